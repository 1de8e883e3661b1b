"""What lies in front of a channel's reader.

What the reader meets settled it passes over: finished ranges that were known before it came (`passed`: from before a
restart, an undone seek, an emptied topic) and messages that are deferred. What was in flight when the last leader
stopped cleanly (`again`) it leaves to `Channel.redelivery`: that is handed out with the count of its deliveries.
`stop` is the nearest of these, so that reading on costs nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nsqha.cursor.committed.state import ChannelState
from nsqha.cursor.deferred.dead import is_dead
from nsqha.cursor.deferred.deferred_set import DeferredSet
from nsqha.cursor.limits import ChannelLimits
from nsqha.hot import DEFERRED, FINISHED, Ring
from nsqha.ranges import RangeSet

_NEVER = 1 << 63


class UnreadLog:
    """The part of the log that a channel's reader has not handed out, from `ring.next` on."""

    __slots__ = (
        "_ahead",
        "_back",
        "_committed",
        "_deferred",
        "_ephemeral",
        "_limits",
        "_moved",
        "_ring",
        "_twice",
        "_waits",
        "again",
        "passed",
        "stop",
    )  # fmt: skip

    def __init__(
        self,
        ring: Ring,
        committed: ChannelState,
        deferred: DeferredSet,
        limits: ChannelLimits,
        *,
        waits: bool,
        moved: Callable[[], None],
    ) -> None:
        """`waits`: for deferred messages that are not dead, instead of passing over them.

        `moved` is called when something was passed."""
        self.passed = committed.ranges.copy()  # finished at or above ring.next
        self._ahead = RangeSet()  # of these, what an operator finished and no progress says yet
        self._twice: set[int] = set()  # of these, what the committed set still holds: finished, and not committed yet
        self._back: set[int] = set()  # of these, what was put back: it is deferred, and the committed set may not know
        self.again = list(committed.attempts)  # handed out before a clean stop: (first, end, deliveries)
        self.stop = 0  # nothing is special in [ring.next, stop)
        self._ring = ring
        self._committed = committed
        self._ephemeral = committed.ephemeral
        self._deferred = deferred
        self._limits = limits
        self._waits = waits
        self._moved = moved
        self.look()

    def window_end(self) -> int:
        """The reader goes no further."""
        # An ephemeral channel commits nothing, so its own floor bounds it.
        return (self._ring.low if self._ephemeral else self._committed.floor) + self._limits.window

    def count(self, end: int) -> int:
        """Messages below `end` that are to be handed out for the first time."""
        place = self._ring.next
        settled = self.passed.count_below(end) + self._deferred.count_from(place)
        if self._twice or self._back:
            self._twice = {offset for offset in self._twice if offset >= place}
            self._back = {offset for offset in self._back if offset >= place}
            settled -= sum(self._deferred.get(offset) is not None for offset in self._twice | self._back)
        return max(end - place - settled, 0)

    def left(self, first: int, end: int) -> int:
        """Messages of [first, end), which is in front of the reader, that are to be handed out for the first time."""
        if first >= end:
            return 0
        settled = self.passed.count_below(end) - self.passed.count_below(first)
        settled += self._deferred.count_from(first) - self._deferred.count_from(end)
        both = (offset for offset in self._twice | self._back if first <= offset < end)
        return end - first - settled + sum(self._deferred.get(offset) is not None for offset in both)

    def finished(self, first: int, end: int) -> int:
        """Messages of [first, end), which is in front of the reader, that are done."""
        if first >= end:
            return 0
        back = sum(first <= offset < end for offset in self._back)
        return self.passed.count_below(end) - self.passed.count_below(first) - back

    def prepare_count(self) -> bool:
        """Count some of what `count` needs, about COUNT_ROWS rows; whether it is quick now. The reader may move between
        two calls."""
        return self._deferred.counted_from(self._ring.next) is not None

    def beyond(self, end: int, most: int) -> int | None:
        """How many more than `most` messages `count` says; None: that must be counted first, and some was."""
        place = self._ring.next
        if end - place - self.passed.count_below(end) <= most:  # whatever is deferred
            return 0
        return max(self.count(end) - most, 0) if self.prepare_count() else None

    def skip(self) -> int:
        """Pass over what is finished or deferred where the reader stands; where it stands then."""
        ring, limit = self._ring, self.window_end()
        place = ring.next
        while place < limit:
            past = min(self.passed.end_of_range(place), limit)
            if past > place:
                ring.settle(place, past, FINISHED)
                for offset in self._back:
                    if max(place, ring.low) <= offset < past:
                        ring.set(offset, DEFERRED)
            elif (past := self._end_of_deferred(place, limit)) > place:
                ring.settle(place, past, DEFERRED)
            else:
                break
            place = past
            self._moved()
        self.look()
        return place

    def _end_of_deferred(self, place: int, limit: int) -> int:
        """`place`, or the end of the run of deferred messages that begins there."""
        if self._deferred.next_offset(place) != place:
            return place
        passed = self.passed.next_held(place)
        limit = limit if passed is None else min(limit, passed)
        for ref in self._deferred.items(place):
            if ref.offset != place or place >= limit or (self._waits and not is_dead(ref)):
                break
            place += 1
        return place

    def look(self) -> None:
        """Where the reader must look closer next: to be called whenever the reader, or what lies there, has changed."""
        place = self._ring.next
        self.passed.cut_below(place)
        while self.again and self.again[0][1] <= place:
            del self.again[0]
        special = (
            self.passed.next_held(place),
            self._deferred.next_offset(place),
            max(self.again[0][0], place) if self.again else None,
        )
        self.stop = min([at for at in special if at is not None], default=_NEVER)

    def finish(self, offset: int) -> None:
        """A message in front of the reader is done: nobody gets it."""
        self.passed.add(offset, offset + 1)
        self._ahead.add(offset, offset + 1)
        self.look()

    def finish_deferred(self, offsets: Iterable[int]) -> None:
        """Deferred messages in front of the reader, which was moved back behind them, are done."""
        for offset in offsets:
            self.passed.add(offset, offset + 1)
            self._twice.add(offset)
            self._back.discard(offset)
        self.look()

    def put_back(self, offset: int) -> None:
        """A message in front of the reader, which is done, is deferred; the reader goes on passing over it, as the
        committed set may have to hear of both."""
        self._ahead.discard(offset, offset + 1)
        self._twice.discard(offset)
        self._back.add(offset)
        self.passed.add(offset, offset + 1)
        self.look()

    @property
    def has_ahead(self) -> bool:
        """Whether `take_ahead` has something."""
        return bool(self._ahead)

    def take_ahead(self) -> list[tuple[int, int]]:
        """What was finished in front of the reader since the last time, and lies there still."""
        self._ahead.cut_below(self._ring.next)
        ahead, self._ahead = self._ahead, RangeSet()
        return [*ahead]

    def handed_out_before(self) -> tuple[int, int] | None:
        """The next message, and how often it was delivered, if it was before a clean stop."""
        place = self.skip() if self._ring.next >= self.stop else self._ring.next
        if not self.again or self.again[0][0] > place or place >= self.window_end():
            return None
        return place, self.again[0][2]

    def moved_back(self, finished: Iterable[int]) -> None:
        """A seek has moved the reader: what is finished is in the committed cursor, beside these offsets."""
        self.passed = self._committed.ranges.copy()
        self._ahead = RangeSet()
        self._twice, self._back = set(), set()
        self.again = []
        self.finish_deferred(finished)
