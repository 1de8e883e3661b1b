"""A node as one of a cluster: what membership adds to it. A node that is alone imports nothing of this but types.

Downwards:

    joining      what a node needs before it can be a member
    member       membership, replicas and routes put together; whether the node may be sent clients
    placement    topics of a cluster, as one of its nodes makes and changes them
    logs         the logs of a member for the segment service
    membership   session, registration, peers, and the news of the records
    routing      what a member does for clients of partitions led elsewhere, put together
    disk_watch   a node whose disk hangs lets others lead
"""
