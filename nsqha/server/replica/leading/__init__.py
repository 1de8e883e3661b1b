"""A replica that leads: its log goes to the followers, their acknowledgements to the commit rule.

Downwards:

    turns       whose turn it is to begin to lead, when many partitions lost their leader at once
    leadership  one partition led for one epoch: log to followers, acks to the commit rule
    records     the partition's record: proposed, fenced, read
    sender      the leader's half of live replication: one stream to each follower node
"""
