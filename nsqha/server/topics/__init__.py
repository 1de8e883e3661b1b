"""The topics of this node, their channels and their settings: how they are made, changed and deleted.

Downwards:

    topics    which topics there are; how they are made, changed and deleted
    settings  settings that may change while a topic lives, and what follows from them
    channels  channels made, deleted, paused, emptied and moved on every leader
"""
