"""The broker's shell: sockets, the event loop, worker threads. It turns facts into calls of the cores and does what
they say. Rooms, downwards: an import goes only to a room further down.

    node       a whole node: its start and stop, its place in the cluster, what it announces
    safe_mode  a node that doubts its metadata
    clients    NSQ clients: connections, AUTH, publishes, subscriptions
    segments   the log for readers that take it as it lies in the files
    topics     topics, their channels and settings: made, changed, deleted
    routing    publishes and consumers of this node for partitions that other nodes lead
    replica    the replicas of this node: leading, following, catching up
    integrity  batches that do not verify, until other replicas mended them
    opening    logs and channel states opened, and partitions made of them
    partition  one partition that is led here: group commit, delivery, retention
    http       nsqd's HTTP API, statistics, metrics
    peers      how nodes talk to each other: gRPC calls and streams
    authorization  the access file, who calls, and the audit of changes
    runtime    disk, journal, cache, budget, tasks, TLS, listening sockets
"""
