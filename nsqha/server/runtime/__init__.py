"""What the other packages of the server run on: disk rounds, journal, cache, metadata, budget, tasks, TLS, listening.

Downwards:

    cache         the cache of channel state, kept a second behind
    journal       writes what is staged in the node's journal to the disk
    disk          disk rounds: fdatasync for all partitions, off the loop
    metadata      the metadata store as the loop sees it
    listen        listening sockets with nsqd's syntax of addresses, and who accepts there
    budget        bounds that all connections share: bytes of publishes under way, and a part of each turn of the loop
    certificates  certificate files, read again when they change
    tasks         work that continues when its callers are gone, and changes of a topic one at a time
    backoff       how long an owner waits before it tries again
    tls           TLS from nsqd's flags; a peer that is refused gets the alert, and the log says why
    service_manager  what systemd is told: recovery goes on, it is ready, the loop runs, it stops
    rare_warnings lines that others may cause as often as they like
    allocator     large blocks are used again; what a storm has left goes back to the kernel; full collections are short
    grpc_threads  gRPC's own threads get a core only as far as the loop leaves it
    measures      what the node counts, the free space of its disk, what its process uses
"""
