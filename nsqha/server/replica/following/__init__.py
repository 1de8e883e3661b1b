"""A replica that follows: batches come from the leader, acknowledgements go back, what is committed is applied.

Downwards:

    receiver       the follower's half of live replication: one handler for each stream of a leader
    catch_up       a follower's way back to its leader's log
    follower       a log that is followed
    early_promise  a promise that is journalled before anybody asks for it
    follower_jobs  work on the files of such a log: rolls, catching up, removals
    follower_sync  when its log goes to the disk
    applier        what is committed of such a log, and the channel state that it makes
"""
