"""Messages that come again and stay in memory: timed out, requeued without or with a short delay.

Their ring slots say WAITING, so the floor cannot pass them; a crash delivers them again from their place, with the
count of attempts at one again. Most wait for nothing but their turn and are one integer in a queue. Those with a delay
are in `delays`, those delivered more than once in `_attempts`; the rest was delivered exactly once.

Each has a *place*: its turn comes when the reader is there. Places never fall, so a group of messages that came back
when the reader was at one offset is one mark over the queue:

    queue   7  3  9  12  4            the next is on the left
    marks   -----+ ------+ --         up to 9: place 1100; up to 12: place 1108; 4: place 1110
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from nsqha.hot import WAITING, Ring

_GROUPS_MAX = 10_000  # what comes back beyond them joins the last; so many fail that the share decides, not places
_GRAIN_S = 0.05  # those of one place that came back within this time are one group


class Group:
    """Messages in the queue with one place, which came back together."""

    __slots__ = ("end", "place", "since")

    def __init__(self, end: int, place: int, since: float) -> None:
        self.end = end  # counted from the first message that was ever queued
        self.place = place
        self.since = since


class Waiting:
    """The messages of one channel that wait in memory, in the order in which they came."""

    __slots__ = ("_attempts", "_delay_heap", "_groups", "_queue", "_ring", "_taken", "count", "delays")

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._queue: deque[int] = deque()
        self._groups: deque[Group] = deque()
        self._taken = 0  # how many left the queue at its front
        self._attempts: dict[int, int] = {}
        self.delays: dict[int, float] = {}  # when each is due, on the monotonic clock
        self._delay_heap: list[tuple[float, int]] = []
        self.count = 0  # of those without a delay

    @property
    def remembered(self) -> int:
        """How many cost more than an integer."""
        return len(self._attempts) + len(self.delays)

    def add(self, offset: int, attempts: int, place: int, now: float) -> None:
        """`offset`, delivered `attempts` times, waits for its turn."""
        self._ring.set(offset, WAITING)
        if attempts > 1:
            self._attempts[offset] = attempts
        self._enqueue((offset,), place, now)

    def add_expired(self, offsets: list[int], place: int, now: float) -> None:
        """These were delivered once; the ring has them WAITING already."""
        self._enqueue(offsets, place, now)

    def _enqueue(self, offsets: Sequence[int], place: int, now: float) -> None:
        if not offsets:
            return
        queue, groups = self._queue, self._groups
        queue.extend(offsets)
        self.count += len(offsets)
        end = self._taken + len(queue)
        if groups:
            last = groups[-1]
            assert last.place <= place, f"place {place} is before {last.place}"
            if (last.place == place and now - last.since <= _GRAIN_S) or len(groups) >= _GROUPS_MAX:
                last.end = end
                return
        groups.append(Group(end, place, now))

    def add_later(self, offset: int, attempts: int, due: float) -> None:
        """`offset` may be handed out, but not before `due`."""
        self._ring.set(offset, WAITING)
        if attempts > 1:
            self._attempts[offset] = attempts
        self.delays[offset] = due
        heapq.heappush(self._delay_heap, (due, offset))

    def wake(self, now: float, place: int) -> None:
        """Queue those whose delay is over."""
        heap = self._delay_heap
        while heap and heap[0][0] <= now:
            due, offset = heapq.heappop(heap)
            if self.delays.get(offset) == due:
                del self.delays[offset]
                self._enqueue((offset,), place, now)

    def next_deadline(self) -> float | None:
        heap = self._delay_heap
        while heap and self.delays.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def first(self) -> int | None:
        """The next message."""
        queue, ring = self._queue, self._ring
        while queue:
            if ring.get(queue[0]) == WAITING:
                return queue[0]
            self._take()  # it was deferred meanwhile
        return None

    def _take(self) -> None:
        """The front of the queue is gone."""
        self._queue.popleft()
        self._taken += 1
        if self._groups[0].end <= self._taken:
            self._groups.popleft()

    def group(self) -> Group:
        """That of the next message; there is one."""
        return self._groups[0]

    def attempts(self, offset: int) -> int:
        """How often a waiting message was delivered."""
        return self._attempts.get(offset, 1)

    def pop(self, offset: int) -> None:
        """`offset`, the first, is handed out."""
        assert self._queue and self._queue[0] == offset, f"offset {offset} is not the first that waits"
        self._take()
        self._attempts.pop(offset, None)
        self.count -= 1

    def give_up(self, offset: int) -> tuple[int, float | None]:
        """`offset` waits elsewhere from now on: its attempts, and when it is due if it had a delay."""
        attempts = self._attempts.pop(offset, 1)
        due = self.delays.pop(offset, None)
        if due is None:
            self.count -= 1
        return attempts, due

    def drop_below(self, end: int) -> None:
        """Forget everything below `end`."""
        queue, groups, taken = self._queue, self._groups, self._taken
        self._queue, self._groups, self.count = deque(), deque(), 0
        for group in groups:
            offsets = [queue.popleft() for _ in range(group.end - taken)]
            kept = [o for o in offsets if o >= end and self._ring.get(o) == WAITING]
            self._enqueue(kept, group.place, group.since)
            taken = group.end
        for offset in [o for o in self._attempts if o < end]:
            del self._attempts[offset]
        for offset in [o for o in self.delays if o < end]:
            del self.delays[offset]

    def known(self) -> dict[int, int]:
        """Attempts of those delivered more than once."""
        return dict(self._attempts)
