"""The lake: Parquet files of the log's messages, and manifests that say which of them count.

Downwards:

    verify    proves that the lake is the log
    backfill  writes a range of time into the lake, once
    archive   writes everything committed into the lake; a reader channel follows it
    history   reads lake and log as one
    contents  verifies one whole file
    rounds    plan, write, commit, until everything wanted is in the lake
    compact   merges small files into large ones
    plan      finds the ranges that are not in the lake yet, and divides them into tasks
    task      the task of a round: fetch, verify, write files
    commits   what says which files count: manifests, or an Iceberg table
    parquet   makes and reads a file
    store     files at a URI: whole and durable, or absent
    agree     one content for one name, in stores that cannot create exclusively
    names     the names of files
"""
