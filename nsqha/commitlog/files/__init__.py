"""The files of a log: pairs of a segment and its commitlog.

Downwards:

    open_logs  which logs of a node have files open
    pair_list  the pairs of a log, of which few are open
    directory  which files a partition has
    pairs      pairs of a segment and its commitlog
"""
