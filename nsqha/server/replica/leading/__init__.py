"""A replica that leads: its log goes to the followers, their acknowledgements to the commit rule.

Downwards:

    leadership  one partition led for one epoch: log to followers, acks to the commit rule
    records     the partition's record: proposed, fenced, read
    sender      the leader's half of live replication: one stream to each follower node
"""
