"""A whole node: how it starts and stops, its place in the cluster, and what it announces of itself.

Downwards:

    start         from the lock file to the listeners, in the order in which they start and stop
    statsd        nsqd's statsd feed
    broker        the node while it runs: its parts put together, start, failure and stop
    snapshot      one moment of the broker as immutable records
    housekeeping  what is done once a second
    disk_use      finished messages that are kept for replay, by topic
    data_watch    whether the data directory is at its path
    dead_letters  those that a policy has moved to another topic
    scrubbing     which replicas the scrub reads, and what happens to what it finds
    cluster_side  what being one of a cluster adds to a node, as an interface; a single node
    cluster       a node that is one of a cluster
    log_sources   the logs that this node leads, for the segment service
    parts         what a node is made from, and what it listens on
    registrar     topics and channels announced to lookup daemons, as nsqd does
    availability  whether anything can be stored on the node
"""
