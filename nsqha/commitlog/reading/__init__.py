"""Batches of a log, found and read.

Downwards:

    dump    a log in words
    cuts    borders at which readers may share the work
    lookup  batches found by log id, offset and time
    reader  batches that were written or read lately
"""
