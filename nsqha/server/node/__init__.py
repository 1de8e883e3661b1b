"""A whole node: how it starts and stops, its place in the cluster, and what it announces of itself.

Downwards:

    start        from the lock file to the listeners, in the order in which they start and stop
    joining      what a node needs before it can be a member
    statsd       nsqd's statsd feed
    broker       the node while it runs: it starts, keeps house, fails and stops
    registrar    topics and channels announced to lookup daemons, as nsqd does
    snapshot     one moment of the broker as immutable records
    readiness    whether a member of a cluster may be sent clients
    placement    topics of a cluster, as one of its nodes makes and changes them
    log_sources  the logs of this node, for the segment service
    membership   session, registration, peers, and the news of the records
    routing      what a member does for clients of partitions led elsewhere, put together
    disk_watch   a node whose disk hangs lets others lead
"""
