"""Messages that come again and stay in memory: timed out, requeued without or with a short delay.

Their ring slots say WAITING, so the floor cannot pass them; a crash delivers them again from their place, with the
count of attempts at one again. Most wait for nothing but a consumer and are one integer in a queue. Those with a delay
are in `delays`, those delivered more than once in `_attempts`; the rest was delivered exactly once.
"""

from __future__ import annotations

import heapq
from collections import deque

from nsqha.hot import WAITING, Ring


class Waiting:
    """The messages of one channel that wait in memory, in the order in which they came."""

    __slots__ = ("_attempts", "_delay_heap", "_queue", "_ring", "count", "delays")

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._queue: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self.delays: dict[int, float] = {}  # when each is due, on the monotonic clock
        self._delay_heap: list[tuple[float, int]] = []
        self.count = 0  # of those without a delay

    @property
    def remembered(self) -> int:
        """How many cost more than an integer."""
        return len(self._attempts) + len(self.delays)

    def add(self, offset: int, attempts: int) -> None:
        """`offset`, delivered `attempts` times, may be handed out at once."""
        self._ring.set(offset, WAITING)
        if attempts > 1:
            self._attempts[offset] = attempts
        self._queue.append(offset)
        self.count += 1

    def add_expired(self, offsets: list[int]) -> None:
        """These were delivered once; the ring has them WAITING already."""
        self._queue.extend(offsets)
        self.count += len(offsets)

    def add_later(self, offset: int, attempts: int, due: float) -> None:
        """`offset` may be handed out, but not before `due`."""
        self._ring.set(offset, WAITING)
        if attempts > 1:
            self._attempts[offset] = attempts
        self.delays[offset] = due
        heapq.heappush(self._delay_heap, (due, offset))

    def wake(self, now: float) -> None:
        """Queue those whose delay is over."""
        heap = self._delay_heap
        while heap and heap[0][0] <= now:
            due, offset = heapq.heappop(heap)
            if self.delays.get(offset) == due:
                del self.delays[offset]
                self._queue.append(offset)
                self.count += 1

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
            queue.popleft()  # it was deferred meanwhile
        return None

    def attempts(self, offset: int) -> int:
        """How often a waiting message was delivered."""
        return self._attempts.get(offset, 1)

    def pop(self, offset: int) -> None:
        """`offset`, the first, is handed out."""
        assert self._queue and self._queue[0] == offset, f"offset {offset} is not the first that waits"
        self._queue.popleft()
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
        self._queue = deque(o for o in self._queue if o >= end and self._ring.get(o) == WAITING)
        self.count = len(self._queue)
        for offset in [o for o in self._attempts if o < end]:
            del self._attempts[offset]
        for offset in [o for o in self.delays if o < end]:
            del self.delays[offset]

    def known(self) -> dict[int, int]:
        """Attempts of those delivered more than once."""
        return dict(self._attempts)
