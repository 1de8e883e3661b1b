"""Jobs that publish: the sink, and replays of messages of the log.

Downwards:

    replay        publishes messages of the log again, to another topic
    replay_task   the task of a replay
    replay_state  what a replay has sent
    sink          publishes rows as messages
    publisher     publishing from one task
"""
