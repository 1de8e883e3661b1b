"""What the leader knows of a channel beyond the committed state. It exists only in memory.

Downwards:

    ordered       the strict kind of channel
    channel       messages are handed out; FIN, REQ, TOUCH and time-outs
    acting        what an operator does to single messages
    requeue       whether a requeued message waits in memory or in the log, or dies
    looking       what a channel holds, message by message
    counts        how many messages wait, and how many are finished or not in a part of the log
    cursor        where a channel stands, what is settled, what is written of it and what the log did to it
    passing       what a policy passes over
    dead          who dies, and what becomes of it
    unread_share  what comes back does not stop what is unread
    unread        what lies in front of a channel's reader
    progress      live state becomes events: what changed since it was last written
    flight        who has what in flight, and until when
    followed      what became of what was handed out: counts, and one message at a time for histograms
    waiting       what comes again and stays in memory
"""
