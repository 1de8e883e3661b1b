"""Where a follower's log diverges from the leader's, found by epochs: one request per epoch, not one per entry.

The ends of its epochs describe a log. The entries that one leader wrote in one epoch are a run, and two logs that have
an entry in common have everything before it in common. So the follower asks for the end of its own last epoch in the
leader's log, and continues with lower ones:

    leader      1 1 1 | 2 2 | 4 4 4         asked 3 -> (epoch 2, end 6)   ours of 2 ends at 5: the common end is 5
    follower    1 1 1 | 2 | 3 3             two failovers, the second before the follower knew of the first: the leader
                                            has never seen epoch 3, and may have more of 2 than the follower

The highest epoch that *both* have decides, whatever lies above it (the case of two quick failovers: an answer about
an epoch that we never had is not a place to cut, but the next request). Where the answer names an entry that we have
too, the chains are compared; if they differ, everything of that epoch is doubted and the search continues below it.
Where our part of the epoch is the shorter one the chain cannot be compared; the first batch that is sent from there
on does that (`acceptance.decide_append`), and a search that begins with `differs_at` goes below.

The entry before a log's first one (the anchor; the genesis if nothing was ever removed) counts as a part of the log:
it has an epoch, an end and a chain, and the search ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class EpochEndAnswer:
    """A log's highest epoch that is not above the requested one, its exclusive end, and the log's first log id.

    `chain` is that of the entry before `end`. Epoch 0 is the genesis if the log begins at 1; else nothing is left at
    or below the requested epoch, and end and chain have no meaning.
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
    """Our log is a prefix of the leader's: continue at `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut our log so that it ends at `to` (see `acceptance.check_cut`), and continue from there."""

    to: int


@dataclass(frozen=True, slots=True)
class RangeGone:
    """The leader no longer has what follows our common end: begin a new log from its anchor, at `start`."""

    start: int


EPOCH_MAX = (1 << 64) - 1

Outcome: TypeAlias = InSync | Truncate | RangeGone


class Divergence:
    """The follower's search: ask the leader for `asked`, pass the answer to `answered`, until there is an outcome."""

    def __init__(
        self,
        *,
        own: Callable[[int], EpochEndAnswer],
        chain_before: Callable[[int], int],
        differs_at: int | None = None,
    ) -> None:
        """`own` answers the leader's requests for our own log.

        `chain_before(log_id)`: the chain of our entry (or anchor) that `log_id` follows. `differs_at`: our entry with
        that log id is known to differ from the leader's.
        """
        self._own = own
        self._chain_before = chain_before
        self._top = own(EPOCH_MAX)  # the highest epoch that may still be common
        self._end = self._top.end
        self.outcome: Outcome | None = None
        while differs_at is not None and self._top.is_left and self._top.end > differs_at >= self._top.start:
            # In an epoch with a wrong entry no entry is trusted.
            self._top = own(self._top.epoch - 1)

    @property
    def asked(self) -> int:
        """The epoch to ask the leader about."""
        return self._top.epoch

    def answered(self, leader: EpochEndAnswer) -> Outcome | None:
        """Process the leader's answer about `asked`. None: there is another request."""
        assert self.outcome is None, "the search is over"
        assert leader.epoch <= self._top.epoch, f"asked about epoch {self._top.epoch}, answered {leader}"
        if leader.is_left and leader.epoch < self._top.epoch:
            # The leader does not have what we have above that epoch.
            self._top = self._own(leader.epoch)
            if self._top.is_left and self._top.epoch < leader.epoch:
                return None  # and we do not have that epoch: only a lower one can be common
        common = min(self._top.end, leader.end)
        if not (leader.is_left and self._top.is_left) or common < max(leader.start, self._top.start):
            self.outcome = RangeGone(leader.start)
        elif common == leader.end and self._chain_before(common) != leader.chain:
            return self._go_below(leader)
        else:
            self.outcome = InSync(common) if common == self._end else Truncate(common)
        return self.outcome

    def _go_below(self, leader: EpochEndAnswer) -> Outcome | None:
        """Continue below an epoch of the same end whose chains differ."""
        if leader.epoch and (below := self._own(leader.epoch - 1)).is_left:
            self._top = below
        else:
            self.outcome = RangeGone(leader.start)
        return self.outcome
