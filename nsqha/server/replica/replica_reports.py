"""What a node said of its replicas (`status`), as those who elect leaders understand it."""

from __future__ import annotations

from nsqha.election.elect import ReplicaReport
from nsqha.pb.v1.replication_pb2 import ROLE_LEADER, ReplicaStatus, StatusReply


def reports_in(reply: StatusReply) -> dict[tuple[int, int], ReplicaReport]:
    """(topic uid, partition) -> report."""
    registration, poisoned = reply.registration, reply.poisoned
    found = {}
    for replica in reply.replicas:
        key = replica.key
        # By position: a failover decodes two for each of thousands of partitions.
        found[key.topic_uid, key.partition] = ReplicaReport(
            registration,
            replica.log_uid,
            replica.last_epoch,
            replica.end,
            replica.promise,
            replica.committed,
            replica.role == ROLE_LEADER,
            poisoned,
            replica.cut,
            replica.corrupt,
            _damage(replica) if replica.damage else (),
            replica.damaged_ranges,
            replica.led_by,
            replica.declined_epoch,
            replica.declines,
            replica.chain,
        )
    return found


def _damage(replica: ReplicaStatus) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((found.first, found.end, found.first_offset, found.end_offset) for found in replica.damage)
