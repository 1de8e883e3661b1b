"""Replication of one partition as decisions without I/O: which replica has acknowledged what, and what is committed.

Downwards:

    isr         which replicas leave and join the ISR, and which must acknowledge until that is certain
    handover    who leads next, when a leader shuts down or has a successor
    followers   what a leader knows of its followers
    leader      the progress of the replicas, and the commit point
    acceptance  what a follower answers to a leader, and the reverse: decided on entries alone
    clocks      which time it is, when clocks of nodes disagree or one is set
    pace        how fast replicas that are far behind are filled
    silence     whether another node is heard, by a witness that runs itself
    contacts    which connections a node lacks that has registered, until it has joined
    pauses      whether this process stood still, and may not have heard yet that another node leads
    divergence  where a follower's log diverges from the leader's, found by epochs
"""
