"""Which of a node's partitions are looked at this second: those that may have something to do, and some idle ones.

A partition is idle when a look left nothing to do (`PartitionLog.idle_at`) and nothing was appended since. What depends
on the time alone, as retention does, waits for the partition's turn: so thousands of idle ones cost what a few do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog

IDLE_LOOKS = 25  # idle partitions that are looked at per second; a node with no more than these looks at all


class LookedAt(Protocol):
    """A partition that this node leads or follows."""

    @property
    def log(self) -> PartitionLog: ...


T = TypeVar("T", bound=LookedAt)


class IdleTurns:
    """Chooses among the partitions that one node leads, or among those that it follows."""

    def __init__(self) -> None:
        self._next = 0  # index of the partition whose turn is next

    def choose(self, partitions: Sequence[T]) -> Sequence[T]:
        """Those to look at now."""
        if len(partitions) <= IDLE_LOOKS:
            return partitions
        # By identity: an append puts another object there, and this is all that an idle partition costs.
        busy = [partition for partition in partitions if (log := partition.log).idle_at is not log.end]
        first = self._next if self._next < len(partitions) else 0
        self._next = first + IDLE_LOOKS
        turn = partitions[first : self._next]
        return [*busy, *(partition for partition in turn if partition.log.idle_at is partition.log.end)]
