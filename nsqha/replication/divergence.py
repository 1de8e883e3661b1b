"""Where a follower's log stops being the leader's, found by epochs: one question per epoch, not one per entry.

A log is known by where its epochs end. The entries that one leader wrote in one epoch are a run, and two logs that
have an entry in common have everything before it in common. So the follower asks for the end of its own last epoch in
the leader's log, and goes down:

    leader      1 1 1 | 2 2 | 4 4 4         asked 3 -> (epoch 2, end 6)   ours of 2 ends at 5: the common end is 5
    follower    1 1 1 | 2 | 3 3             two failovers, the second before the first was heard of: the leader has
                                            never seen epoch 3, and may have more of 2 than we do

The highest epoch that *both* have decides, whatever lies above it (the case of two quick failovers: an answer about
an epoch that we never had is not a place to cut, but the next question). Where the answer names an entry that we have
too, the chains are compared; if they differ, everything of that epoch is doubted and the search goes on below it.
Where our part of the epoch is the shorter one the chain can not be compared; the first batch that is sent from there
on does that (`acceptance.decide_append`), and a search that begins with `differs_at` goes below.

The entry before a log's first one (the anchor; the genesis if nothing was ever removed) counts as a part of the log:
it has an epoch, an end and a chain, and nothing is left to ask below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class EpochEndAnswer:
    """Of a log: the highest epoch that is not above the asked one, its exclusive end, and the log's first log id.

    `chain` is that of the entry before `end`. Epoch 0 is the genesis if the log begins at 1; else nothing is left at
    or below the asked epoch, and end and chain mean nothing.
    """

    epoch: int
    end: int
    chain: int
    start: int

    @property
    def is_left(self) -> bool:
        return self.epoch > 0 or self.start == 1


@dataclass(frozen=True, slots=True)
class InSync:
    """Our log is a beginning of the leader's: go on at `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut our log so that it ends at `to` (see `acceptance.check_cut`), and go on from there."""

    to: int


@dataclass(frozen=True, slots=True)
class RangeGone:
    """The leader can not give what comes behind our common end: begin anew from its anchor, at `start`."""

    start: int


EPOCH_MAX = (1 << 64) - 1

Outcome: TypeAlias = InSync | Truncate | RangeGone


class Divergence:
    """The follower's search: ask the leader for `asked`, hand the answer to `answered`, until there is an outcome."""

    def __init__(
        self,
        *,
        own: Callable[[int], EpochEndAnswer],
        chain_before: Callable[[int], int],
        differs_at: int | None = None,
    ) -> None:
        """`own` answers about our log what the leader is asked about its.

        `chain_before(log_id)`: of our entry (or anchor) that `log_id` follows. `differs_at`: our entry with that log
        id is known to be another than the leader's.
        """
        self._own = own
        self._chain_before = chain_before
        self._top = own(EPOCH_MAX)  # all that may still be common
        self._end = self._top.end
        self.outcome: Outcome | None = None
        while differs_at is not None and self._top.is_left and self._top.end > differs_at >= self._top.start:
            # Of an epoch that has a wrong entry nothing is taken for granted.
            self._top = own(self._top.epoch - 1)

    @property
    def asked(self) -> int:
        """The epoch to ask the leader about."""
        return self._top.epoch

    def answered(self, leader: EpochEndAnswer) -> Outcome | None:
        """Take the leader's answer about `asked`. None: there is another question."""
        assert self.outcome is None, "the search is over"
        assert leader.epoch <= self._top.epoch, f"asked about epoch {self._top.epoch}, answered {leader}"
        if leader.is_left and leader.epoch < self._top.epoch:
            # What we have above that epoch, the leader has not.
            self._top = self._own(leader.epoch)
            if self._top.is_left and self._top.epoch < leader.epoch:
                return None  # and that epoch is new to us: only a lower one can be common
        common = min(self._top.end, leader.end)
        if not (leader.is_left and self._top.is_left) or common < max(leader.start, self._top.start):
            self.outcome = RangeGone(leader.start)
        elif common == leader.end and self._chain_before(common) != leader.chain:
            return self._go_below(leader)
        else:
            self.outcome = InSync(common) if common == self._end else Truncate(common)
        return self.outcome

    def _go_below(self, leader: EpochEndAnswer) -> Outcome | None:
        """The same epoch and end, and yet another past."""
        if leader.epoch and (below := self._own(leader.epoch - 1)).is_left:
            self._top = below
        else:
            self.outcome = RangeGone(leader.start)
        return self.outcome
