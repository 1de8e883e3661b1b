"""One partition on the node that leads it: group commit in, committed batches out to channels, files let go.

Downwards:

    holding        holds on the log start: asked for, renewed, released
    scrub          reads what no consumer reads, so that damage is found early
    consumer_acks  FIN, REQ and TOUCH of messages that are in flight
    topic          a topic on this node: its record, the partitions led here, its consumers
    partition      the owner: an epoch begins, commits, is handed over and ends
    group_commit   what goes into the next batch, channel events included, and when it is written
    outstanding    written batches, and who waits for their commit
    publishes      publishes that wait for a batch, and whether a flush waits for more of them
    log_sync       when the log goes to the disk, at the topic's sync setting
    local_repair   damage of a log that no other node has is written again
    memory         what #ephemeral topics hold in memory, per topic and in the node
    retention      what the log may forget, and how it goes
    delivery       committed messages handed to the consumers of each channel
    file_jobs      work on a partition's files, one job at a time
    context        what these parts share: log, channels and commit rule, and how far the partition has come
"""
