"""What the parts of one led partition share: its log and channels, what the node lends it, and how far it has come.

    begun -> serving  the epoch start is committed and applied
          -> closed   takes nothing more, and begins nothing more
          -> ended    every caller that waited has its answer

A leader that hands over writes and delivers nothing meanwhile, but takes publishes: they wait for it or are refused.
One whose process stood still delivers nothing before it has had the time to hear that another one leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

from nsqha.clock import Clock
from nsqha.commitlog.idle_turns import IdleTurns
from nsqha.commitlog.log import PartitionLog
from nsqha.cursor.partition import PartitionCursors
from nsqha.cursor.passing import PassingChannels
from nsqha.errors import NotInLog
from nsqha.nsqlog import Logger
from nsqha.replication.leader import LeaderReplica
from nsqha.replication.pauses import ProcessPause
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.measures import Measures

logger = Logger("partition")


class ProgressPace:
    """When the node may write progress as a batch of its own again: seldom, however many partitions it leads."""

    __slots__ = ("next_at",)

    def __init__(self) -> None:
        self.next_at = 0.0  # by the monotonic clock


@dataclass(frozen=True, slots=True)
class PartitionRuntime:
    """What the node lends to each of its partitions."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    disk: DiskRounds
    measures: Measures
    on_failure: Callable[[BaseException], None]
    pause: ProcessPause
    budget: PublishBudget  # of the whole node: beyond it publishers are not read
    wait_seconds_max: float  # a publish that could not be written for so long is refused
    written_seconds_max: float  # a written publish without outcome is answered "unknown"
    sync_every: int  # messages per fsync with sync=interval
    sync_seconds: float
    turns: IdleTurns[Any]  # of the partitions that the node leads
    moving: WeakSet[PassingChannels] = field(default_factory=WeakSet)  # of those that had dead letters to move
    progress_pace: ProgressPace = field(default_factory=ProgressPace)


@dataclass(frozen=True, slots=True)
class LedLog:
    """The log of one partition that this node leads, its channels, and the commit rule of the epoch."""

    number: int
    id_base: int
    log: PartitionLog
    cursors: PartitionCursors
    leader: LeaderReplica


class LedState(Protocol):
    """A led log and the channel state beside it."""

    @property
    def log(self) -> PartitionLog: ...
    @property
    def cursors(self) -> PartitionCursors: ...


class PartitionLifecycle:
    """How far one partition has come in the epoch in which this node leads it.

    Invariants: the first reason to close stands; what has ended is closed.
    """

    __slots__ = (
        "_pause", "closed", "ended", "handing_over", "on_wrong_state", "rebuilding", "serving", "stopped", "why",
    )  # fmt: skip

    def __init__(self, pause: ProcessPause) -> None:
        self._pause = pause
        self.serving = False  # deliveries and channel events may go on
        self.handing_over = False
        self.closed = False
        self.ended = False
        self.stopped: str | None = None  # which broken invariant ended it; shown in the health checks
        self.why = "the partition is closed"
        self.rebuilding = False  # the channel state does not fit the log
        self.on_wrong_state: Callable[[], object] = lambda: None  # has the state rebuilt, and the partition led with it

    def delivers(self, now: float) -> bool:
        """Whether messages may be delivered. `now`: by the monotonic clock."""
        return self.serving and not self.handing_over and now <= self._pause.fit_until

    def wrong_state(self, partition: LedState, error: NotInLog) -> bool:
        """The channel state names a message that the log does not have. True: the state is rebuilt. False: that was
        done already, so it is the log that lacks the message."""
        if partition.cursors.state.rebuilt:
            return False
        if not self.rebuilding:
            self.rebuilding = True
            text = "%s: the channel state does not fit the log and is rebuilt from it: %s"
            logger.error("state_diverged", text, partition.log.directory, error)
            self.on_wrong_state()
        return True

    def close(self, why: str) -> None:
        """Take nothing more."""
        if not self.closed:
            self.closed = True
            self.why = why

    def end(self, why: str) -> None:
        """Answer nothing more: all answers are given now."""
        self.close(why)
        self.ended = True
