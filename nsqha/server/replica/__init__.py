"""The replicas of this node and the role that each plays: leader, follower, or neither any more.

Downwards:

    replica_reports    that status as those who elect leaders understand it
    roles              records become roles: lead, follow, step down, remove
    follower_service   what leaders elsewhere may ask: a promise, then to follow
    receiver           the follower's half of live replication
    catch_up           a follower's way back to its leader's log
    status             what a node tells of its replicas: status, ends of epochs, batches
    replica_table      which replicas are led and followed here, and the newest record seen of each
    leadership         one partition led for one epoch: log to followers, acks to the commit rule
    sender             the leader's half of live replication: one stream to each follower node
    replica_files      a replica's log is opened, or begun empty; what catching up does to its files
    replica_runtime    what a node lends to its replicas
    log_manager        logs and channel state opened; partitions that are led made of them
    follower           a log that is followed
    follower_jobs      work on the files of such a log: rolls, catching up, removals
    applier            what is committed of a log that is followed, and the channel state that it makes
"""
