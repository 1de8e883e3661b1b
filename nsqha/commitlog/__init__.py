"""The durable half of a partition: segments of wire frames, their commitlog, recovery, and the node journal.

Synchronous and without threads; the shell decides what runs where. Reading order: `entry`, `pairs`, `log`, `lookup`,
`recovery`. Formats are drawn in docs/disk-format.md.

Downwards:

    copying         a log as others copy it
    recovery        a log is opened whose writer may have died at any point
    log             the log of one partition: append, make durable, roll, cut
    repair          what does not verify is written again, or given up
    rebuild         lost entries written again, from their neighbours and the frames
    verdict         the recovery table
    verify          a whole log read: is it what it says?
    scan            what the files really hold
    dump            a log in words
    retention       which files may go: pure policy
    cuts            borders at which readers may share the work
    lookup          batches found by log id, offset and time
    reader          batches that were written or read lately
    readonce        files read without a trace in the page cache
    files           the pairs of a log, of which few are open
    directory       which files a partition has
    pairs           pairs of a segment and its commitlog
    journal         what a data directory has promised
    journal_record  what the journal holds
    recordfile      a small file of records, each on disk before the next step
    control         a batch taken apart into frames
    entry           the commitlog entry
    storage         the disk, handed in
"""
