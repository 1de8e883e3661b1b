"""What a node said of its replicas (`status`), as those who elect leaders understand it."""

from __future__ import annotations

from nsqha.election.elect import ReplicaReport
from nsqha.pb.v1.replication_pb2 import ROLE_LEADER, StatusReply


def reports_in(reply: StatusReply) -> dict[tuple[int, int], ReplicaReport]:
    """(topic uid, partition) -> report."""
    return {
        (replica.key.topic_uid, replica.key.partition): ReplicaReport(
            reply.registration,
            replica.log_uid,
            replica.last_epoch,
            replica.end,
            replica.promise,
            replica.committed,
            leading=replica.role == ROLE_LEADER,
            poisoned=reply.poisoned,
            cut=replica.cut,
            corrupt=replica.corrupt,
            damage=tuple((found.first, found.end, found.first_offset, found.end_offset) for found in replica.damage),
            damaged_ranges=replica.damaged_ranges,
            led_by=replica.led_by,
            declined_epoch=replica.declined_epoch,
            declines=replica.declines,
        )
        for replica in reply.replicas
    }
