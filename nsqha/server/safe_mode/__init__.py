"""Safe mode: a node that doubts its metadata decides nothing, tells what it has, and waits for an operator.

Downwards:

    monitor     a node that runs and finds its metadata in doubt
    hold        a node that is held at its start
    inventory   what a node can say of itself: its logs, topics and channels
    rebuilding  a single node's metadata, put together again from its logs
"""
