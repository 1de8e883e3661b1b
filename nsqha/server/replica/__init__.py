"""The replicas of this node and the role that each plays: leader, follower, or neither any more.

Downwards:

    replica_reports   a status reply as those who elect leaders understand it
    roles             records become roles: lead, follow, step down, remove
    follower_service  what leaders elsewhere may ask: a promise, then to follow
    leader_roles      what it takes to lead, and how that ends
    lead_turns        which of many that are to lead begin first
    follower_roles    logs are opened and followed with, and mended
    status            what a node says of its replicas: status, ends of epochs, batches
    replica_table     which replicas are led and followed here, and the newest record seen of each
    leading           one partition led for one epoch, and the streams to its followers
    replica_files     a replica's log is opened, or begun empty; what catching up does to its files
    replica_runtime   what a node lends to its replicas
    following         a log that is followed, its stream from the leader, its way back to the leader's log
"""
