"""The controller, a pure machine: `step(event, now) -> actions`. It places replicas and elects leaders.

Downwards:

    controller  the machine
    elections   what is decided on one partition: elections and transfers
    probing     requests to nodes, and what their answers mean
    isolation   whether another controller could do better
    state       what a term knows and has under way
    failed_leaders  nodes that were elected and did not lead
    leader_check  whether the leader of an epoch leads
    pending_probes  requests to nodes that are not answered yet
    rounds      attempts to find a leader, partition by partition
    planner     the slow work: where replicas go, which leader moves where
    node_health what the controller knows about the health of each node
    events      events and actions of the controller
"""
