"""The committed state of a partition's channels: a pure function of the log.

Downwards:

    loading     where the committed state comes from at start: cache, checkpoint, start of the log
    checkpoint  committed state <-> frames in the log, and rebuilding it from the files
    state       the committed state of one partition's channels, changed by applying batches only
    holds       leases on a partition's log start
"""
