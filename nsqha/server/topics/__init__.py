"""The topics of this node, their channels and their settings: how they are made, changed and deleted.

Downwards:

    single_node      topics of a single node: made, changed, removed
    channels         channels made, deleted, paused, emptied and moved on every leader
    reader_channels  channels of readers: made, and their floors moved
    channel_leaders  every leader follows the channel list, and does what is in no record
    channel_list     what may be added to the list
    topics           which topics there are; how they are made, changed and deleted
    first_channels   channels of a new topic that lookup daemons know
    settings         settings that may change while a topic lives, and what follows from them
    deleted_elsewhere  what other nodes deleted a moment ago
    placement        what a single node and one of a cluster do differently
"""
