"""What a task does with a split: fetch its batches, verify them, and make Arrow batches of the messages.

Downwards:

    rows     the messages of a split as Arrow batches
    scan     verified batches to Arrow
    lanes    finds where frames begin
    columns  names and types of columns
    entries  entries of the commitlog, verified
    fetch    fetches runs over HTTP
    files    reads runs from files
    runs     the batches of a split, some at a time
"""
