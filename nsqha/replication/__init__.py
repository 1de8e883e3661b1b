"""Replication of one partition as decisions without I/O: who has acknowledged what, and what is committed.

Downwards:

    isr         who leaves the ISR, who joins it, and who must be asked until that is certain
    leader      who has which batches, and up to where they are committed
    acceptance  what a follower answers to a leader, and the reverse: decided on entries alone
    divergence  where a follower's log stops being the leader's, found by epochs
"""
