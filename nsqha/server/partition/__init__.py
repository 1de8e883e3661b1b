"""One partition on the node that leads it: group commit in, committed batches out to channels, files let go.

Downwards:

    holding         holds on the log start: asked for, renewed, released
    scrub           reads what no consumer reads, so that damage is found early
    consumer_acks   FIN, REQ and TOUCH of messages that are in flight
    topic           a topic on this node: its record, the partitions led here, its consumers
    partition       group commit in, committed batches out
    outstanding     a written batch until it is committed, and its publishers' answers
    pending_events  channel events on their way into the log
    gathering       whether a flush waits for publishers that were answered just now
    deliveries      the deliveries of one partition, pumped together
    delivery        committed messages of one channel handed to its consumers
    alarm           one timer for the earliest of many deadlines
    retention       what the log may forget, and how it goes
    local_repair    damage of a log that no other node has is written anew
    file_jobs       work on a partition's files, one job at a time
"""
