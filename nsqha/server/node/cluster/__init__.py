"""A node as one of a cluster: what membership adds to it. A single node imports nothing of this but types.

Downwards:

    joining       what a node needs before it can be a member
    member        membership, replicas and routes put together; whether the node may be sent clients
    placement     topics of a cluster, as one of its nodes makes and changes them
    logs          the logs of a member for the segment service
    figures       what /stats and /metrics show of the cluster
    membership    how this node joins and leaves; its parts and its peers
    records       the news of the records, and what follows from them
    registration  the lease and the registration of this node
    folder_life   whether the data directory is an older copy that was put back
    live          a controller's stream to this node: suspects one way, its questions and their answers both ways
    suspects      leaders whose streams ended; controllers hear of them
    reach         the connections that this node needs before it gets new replicas
    leaders       who leads what
    routing       what a member does for clients of partitions led elsewhere, put together
    clock_watch   clocks are compared; a node whose clock is wrong lets others lead
    disk_watch    a node whose disk hangs, is slow or refuses writes lets others lead
"""
