"""The durable half of a partition: segments of wire frames, their commitlog, recovery, and the node journal.

Synchronous and without threads; the shell decides what runs where. Reading order: `entry`, `files.pairs`, `log`,
`reading.lookup`, `recovery`. Formats are drawn in docs/disk-format.md.

Downwards:

    copying         a log as others copy it
    idle_turns      which of many logs their owners look at now
    recovery        a log is opened whose writer may have died at any point
    log             the log of one partition: append, make durable, roll, cut
    corruption      batches that do not verify: found, judged, and written again or given up
    retention       which files may go: pure policy
    reading         batches found and read
    files           the pairs of segment and commitlog, and which of them a partition has
    readonce        files read without a trace in the page cache
    journal         what a data directory has promised
    journal_node    what the journal says of its node
    journal_record  what the journal holds
    recordfile      a small file of records, each on disk before the next step
    control         a batch taken apart into frames
    entry           the commitlog entry
    storage         the disk, handed in
"""
