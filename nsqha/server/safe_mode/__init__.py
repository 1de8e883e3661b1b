"""Safe mode: a node whose metadata are in doubt decides nothing, reports what it has, and waits for an operator.

Downwards:

    monitor     watches the metadata of a running node
    hold        keeps a node in safe mode at its start
    inventory   what a node reports of itself: its logs, topics and channels
    rebuilding  rebuilds a single node's metadata from its logs
"""
