"""How far the logs of this node's replicas can be vouched for, after what recovery found in them.

    an end was cut      others that may have more are elected first, until all that is committed has come again
    damage was found    doubted from a log id on: the log neither leads nor counts
                          |- all that was found is mended where it was: the log is what it was, by its old name
                          |- its leader sent that part again, or the log began again: it keeps its new name
                          '- an operator gave up what is missing

Owner of both, for each replica, and of what recovery found and is not mended yet (`left`). `corrupt_ranges` mends
it.

Invariant: a log goes by its old name again only if all that recovery found was mended and nothing was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nsqha.ids import PartitionKey
from nsqha.ranges import RangeSet
from nsqha.server.opening.sync_history import weakest

if TYPE_CHECKING:
    from nsqha.commitlog.corruption.verdict import RecoveryReport
    from nsqha.commitlog.journal import NodeJournal
    from nsqha.commitlog.log import PartitionLog


class AppliedLog(Protocol):
    """The committed part of a log that is followed."""

    damage: tuple[int, int] | None  # log ids that are committed and can not be read here


class FollowedLog(Protocol):
    """A replica that follows, as far as trust in its log goes."""

    @property
    def applier(self) -> AppliedLog:
        """How far its channel state is."""

    @property
    def complete(self) -> bool:
        """Whether it has all that was committed."""


@dataclass(slots=True)
class Doubted:
    """A log that recovery found damaged."""

    bad: int  # the lowest log id that nothing can be vouched for
    name: int  # its log_uid before, if only this damage is held against it; else 0
    left: RangeSet  # what recovery found and is not mended


def good_name(journal: NodeJournal, key: PartitionKey, sync: str) -> int:
    """The log_uid that a log goes by if recovery finds nothing wrong with it; 0: a new one."""
    known = journal.record(key)
    lost = weakest(journal, key, sync) != "always" and journal.page_cache_lost(key)
    return 0 if known is None or not known.log_uid_trusted or lost else known.log_uid


def can_be_whole(log: PartitionLog, report: RecoveryReport) -> bool:
    """Whether a damaged log would have all that it ever had once the damage that recovery found is mended."""
    return log.end.log_id >= report.watermark and not (report.unreadable or report.restored_anchors)


class SuspectLogs:
    """What is held against the logs of one node."""

    def __init__(
        self, followers: Mapping[PartitionKey, FollowedLog], *, on_whole: Callable[[PartitionKey, int], object]
    ) -> None:
        """`on_whole(key, name)`: all that recovery found is mended, and nothing is held against the log's old name (0:
        that is gone)."""
        self.on_whole = on_whole
        self._followers = followers
        self._cut: set[PartitionKey] = set()
        self._doubted: dict[PartitionKey, Doubted] = {}

    def recovered(self, key: PartitionKey, log: PartitionLog, report: RecoveryReport, name: int, bad: RangeSet) -> int:
        """A log was opened. `name`: its log_uid before, if that was good but for damage; `bad`: what does not
        verify. The name that it may go by again, if all that is mended; 0: it keeps the one it has."""
        if any(cut.why == "torn" for cut in report.cuts):
            self._cut.add(key)
        if report.serve_end is not None:
            whole = can_be_whole(log, report)
            self._doubted[key] = doubted = Doubted(report.serve_end, name if whole else 0, bad.copy())
            if not whole:  # what is missing at the end comes from a leader only
                doubted.left.add(log.end.log_id, max(report.watermark, log.end.log_id + 1))
            return doubted.name
        return 0

    def leads(self, key: PartitionKey) -> None:
        """What this replica has is the truth from now on."""
        self._cut.discard(key)

    def doubts(self, key: PartitionKey) -> tuple[bool, bool]:
        """What is known of a replica: whether recovery cut its end, and whether it is so damaged that others go
        first."""
        follower = self._followers.get(key)
        if key in self._cut and follower is not None and follower.complete:
            self._cut.discard(key)  # what was cut has come again, as far as it counts
        stuck = follower is not None and follower.applier.damage is not None
        return key in self._cut, key in self._doubted or stuck

    def unsound_from(self, key: PartitionKey) -> int | None:
        """The log id from which on nothing can be vouched for; None: all can."""
        return doubted.bad if (doubted := self._doubted.get(key)) is not None else None

    def left(self, key: PartitionKey) -> list[tuple[int, int]]:
        """What recovery found, or missed at the end, and is not mended yet."""
        return list(doubted.left) if (doubted := self._doubted.get(key)) is not None else []

    def mended(self, key: PartitionKey, first: int, end: int) -> None:
        """The log ids [first, end) of what was found are as good as they will be."""
        if (doubted := self._doubted.get(key)) is not None:
            doubted.left.discard(first, end)

    def cut_off(self, key: PartitionKey) -> None:
        """What is doubted is cut off: the ISR counts on more than this log has, whatever is mended in it later."""
        if (doubted := self._doubted.get(key)) is not None:
            doubted.name = 0

    def renewed(self, key: PartitionKey) -> None:
        """Nothing is left of what could not be vouched for, or it was given up."""
        self._doubted.pop(key, None)

    def look(self, key: PartitionKey) -> None:
        """Whether the log is whole again."""
        if (doubted := self._doubted.get(key)) is not None and not doubted.left:
            self.on_whole(key, doubted.name)

    def keep_house(self) -> None:
        """About once a second: a log that was busy when it became whole may be idle now."""
        for key in list(self._doubted):
            self.look(key)

    def gone(self, key: PartitionKey) -> None:
        """The replica is not here any more."""
        self._doubted.pop(key, None)
        self._cut.discard(key)
