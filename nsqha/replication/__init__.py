"""Replication of one partition as decisions without I/O: which replica has acknowledged what, and what is committed.

Downwards:

    isr         which replicas leave and join the ISR, and which must acknowledge until that is certain
    leader      the progress of the replicas, and the commit point
    acceptance  what a follower answers to a leader, and the reverse: decided on entries alone
    divergence  where a follower's log diverges from the leader's, found by epochs
"""
