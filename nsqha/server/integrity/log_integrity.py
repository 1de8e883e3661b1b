"""What is known to be wrong with the logs of one node, in three parts that know each other.

CorruptRanges  batches that do not verify        --mended-->  SuspectLogs  which logs can not be vouched for
MarkLost       an operator gives them up         --asks-->    both
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nsqha.ids import PartitionKey
from nsqha.server.integrity.corrupt_ranges import CorruptRanges
from nsqha.server.integrity.mark_lost import MarkLost
from nsqha.server.integrity.suspect_logs import SuspectLogs

if TYPE_CHECKING:
    from nsqha.server.integrity.corrupt_ranges import RepairableReplicas, RepairRuntime
    from nsqha.server.partition.partition import Partition


class LogIntegrity:
    """Damage of one node's replicas, and the trust in their logs."""

    def __init__(
        self,
        runtime: RepairRuntime,
        replicas: RepairableReplicas,
        *,
        look_behind: Callable[[PartitionKey], Awaitable[None]],
        on_whole: Callable[[PartitionKey, int], object],
    ) -> None:
        """`look_behind`: no replica has what a follower's channels wait for; they may be known from further on.
        `on_whole(key, name)`: all that recovery found is mended (`SuspectLogs.on_whole`)."""
        self.suspects = SuspectLogs(replicas.followers, on_whole=on_whole)
        self.corrupt = CorruptRanges(runtime, replicas, self.suspects, look_behind=look_behind)
        self.mark_lost = MarkLost(
            runtime.disk, self.corrupt, self.suspects, log_of=replicas.log_of, on_failure=runtime.on_failure
        )

    def leads(self, key: PartitionKey, partition: Partition) -> None:
        """A replica leads from now on: what it has is the truth."""
        self.suspects.leads(key)
        self.corrupt.leads(key, partition)

    def keep_house(self) -> None:
        """Called about once a second."""
        self.corrupt.keep_house()
        self.suspects.keep_house()

    def gone(self, key: PartitionKey) -> None:
        """The replica is not here any more."""
        self.corrupt.gone(key)
        self.suspects.gone(key)
