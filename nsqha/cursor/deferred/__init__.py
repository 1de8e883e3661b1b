"""Messages that wait for a due time: the set, its layers, and the leader's view of it.

Downwards:

    overlay       the leader's view: deferred messages, committed and not yet committed, by due time
    store         a deferred set in layers
    marks         what is known of the set: how many rows lie at or above a place, counted in steps
    gaps          where the set has nothing, so that a walk begins behind it
    layer         the layers, and what a table below them must offer
    dead          messages that are never due
    later         deliver-at times of messages that the pump has not passed
    deferred_set  the set, the protocol that its storage fulfils, and the set in memory
"""
