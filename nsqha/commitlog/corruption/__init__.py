"""Batches that do not verify: they are found, judged, and written again or given up.

Downwards:

    repair   what does not verify is written again, or given up
    rebuild  lost entries are written again, from their neighbours and the frames
    verdict  the recovery table
    verify   a whole log is read: is it what it says?
    scan     what the files really hold
"""
