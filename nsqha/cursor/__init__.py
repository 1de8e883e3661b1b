"""Channels are cursors over the log, and their state is itself in the log.

Two kinds of state, kept apart by everything in this package:

    committed   what the log says. `state.PartitionState` is a pure function of the committed batches: followers,
                recovery and a new leader compute the same bytes. It changes only when a batch is applied.
    live        what the leader knows beyond that: who has which message in flight until when, what was finished since
                the last progress event, who waits for redelivery. It exists only in memory. Losing it may repeat
                messages; it can not lose one, because every floor that moved was committed first.

Reading order: `events`, `deferred`, `state`, `cursor`, `channel`, `progress`, `checkpoint`, `partition`. Downwards:

    lmdb_cache      the cache of committed state: deferred sets over `lmdb_tables`, proven by `lmdb_proof`
    lmdb_partition  one partition in the cache
    lmdb_tables     the database, and the only user of lmdb
    lmdb_proof      whether the database is what was last written
    partition       all channels of one partition: their events into the log, and out of it
    retention       what channels keep of the log, and how its start moves
    requests        what was asked for and is not in the log yet
    seek            a cursor moved: what would happen, what did, and the way back
    ordered         live: the strict kind of channel
    channel         live: handing out, FIN, REQ, TOUCH, time-outs
    requeue         live: whether a requeued message waits in memory or in the log
    cursor          live: where a channel stands, what is settled, what is written of it and what the log did to it
    unread          live: what lies in front of a channel's reader
    progress        live -> events: what changed since it was last written
    flight          live: who has what in flight, and until when
    waiting         live: what comes again and stays in memory
    deferred_overlay  live: deferred messages, committed and not yet committed, by due time
    loading         where the committed state comes from at start: cache, checkpoint, start of the log
    checkpoint      committed state <-> frames in the log, and rebuilding it from the files
    state           the committed state of one partition's channels, changed by applying batches only
    later           deliver-at times of messages that the pump has not passed
    holds           leases on a partition's log start
    deferred_store  a deferred set in layers
    layer           the layers, and what a base below them must offer
    deferred        messages that wait for a due time: the set, and the protocol that its storage fulfils
    events          the channel events: what is written into the log, and how
    limits          each bound with its reason
"""
