"""Channels are cursors over the log, and their state is itself in the log.

Two kinds of state, kept apart by everything in this package:

    committed   what the log says. `committed.state.PartitionState` is a pure function of the committed batches:
                followers, recovery and a new leader compute the same bytes. It changes only when a batch is applied.
    live        what the leader knows beyond that: who has which message in flight until when, what was finished since
                the last progress event, what waits for redelivery. It exists only in memory. Losing it may repeat
                messages; it cannot lose one, because every floor that moved was committed first.

Reading order: `events`, `deferred.deferred_set`, `committed.state`, `live.cursor`, `live.channel`, `live.progress`,
`committed.checkpoint`, `partition`. Downwards:

    cache      the committed state on disk, in LMDB
    partition  all channels of one partition: their events into the log, and out of it
    retention  what channels keep of the log, and how its start moves
    passing    which channels pass over messages by their policies
    requests   what was asked for and is not in the log yet
    seek       a cursor moved: what would happen, what did, and the way back
    live       a channel as its leader has it: messages handed out, in flight, waiting, and the progress
    committed  the committed state, its checkpoints, and where it comes from at start
    deferred   messages that wait for a due time: the set, and what it is made of
    events     the channel events: what is written into the log, and how
    listing    the channels of a topic as an event has them, compared without being walked over
    policy     what an operator asked of channels
    turns      which of many things are looked at this second
    limits     each bound with its reason
"""
