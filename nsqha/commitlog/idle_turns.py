"""Which of a node's partitions are looked at this second: those that may have something to do, and some idle ones.

A partition is idle when a look left nothing to do (`PartitionLog.idle_at`) and nothing was appended since. Its log says
when that ends (`PartitionLog.on_wake`), so idle ones are not walked over. What depends on the time alone, as retention
does, waits for the partition's turn: so thousands of idle ones cost what a few do.
"""

from __future__ import annotations

from functools import partial as bind
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from nsqha.commitlog.log import PartitionLog

IDLE_LOOKS = 25  # idle partitions that are looked at per second; a node with no more than these looks at all


class LookedAt(Protocol):
    """A partition that this node leads or follows."""

    @property
    def log(self) -> PartitionLog: ...


T = TypeVar("T", bound=LookedAt)


class IdleTurns(Generic[T]):
    """Chooses among the partitions that one node leads, or among those that it follows.

    Invariant: each of them is busy, or its turn comes, or its log wakes it."""

    def __init__(self) -> None:
        self._all = WeakKeyDictionary[T, None]()
        self._busy: dict[T, None] = {}  # or new
        # Their turn is still to come, the next one last: to move the others up costs more than all looks. One that goes
        # meanwhile is not kept for its turn.
        self._waiting: list[ref[T]] = []

    def add(self, partition: T) -> None:
        """It is new, or something was written to it: it is looked at in the next second."""
        self._all[partition] = self._busy[partition] = None

    def choose(self) -> list[T]:
        """Those to look at now, some of which may have gone; say then of each that has not that it was `looked` at."""
        if len(self._waiting) < IDLE_LOOKS:
            self._waiting[:0] = self._all.keyrefs()[::-1]  # of all partitions, once a round
        turn = self._waiting[: -IDLE_LOOKS - 1 : -1]
        del self._waiting[-IDLE_LOOKS:]
        chosen, self._busy = self._busy, {}
        for waiting in turn:
            if (partition := waiting()) is not None:
                chosen[partition] = None
        return list(chosen)

    def looked(self, partition: T) -> None:
        """It was looked at: once more in a second, unless it is idle."""
        log = partition.log
        if log.idle_at is log.end:
            log.on_wake = bind(self.add, partition)
        else:
            self._busy[partition] = None
