"""The files of a log: pairs of a segment and its commitlog.

Downwards:

    pair_list  the pairs of a log, of which few are open
    directory  which files a partition has
    pairs      pairs of a segment and its commitlog
"""
