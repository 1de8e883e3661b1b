"""The controller, a pure machine: `step(event, now) -> actions`. It places replicas and elects leaders.

Downwards:

    controller  the machine
    leader_check  whether the leader of an epoch leads
    pending_probes  what nodes were asked and have not answered yet
    rounds      attempts to find a leader, partition by partition
    planner     the slow work: where replicas go, which leader moves where
    node_health what the controller thinks of each node
    events      what the controller hears and what it wants done
"""
