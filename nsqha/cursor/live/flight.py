"""What the leader has handed out of one channel: to which consumer, until when, and in which attempt.

A delivered run costs no object per message: its slots in the ring say IN_FLIGHT and the owner, and one *span* per owner
and 50 ms holds the deadline. A message that differs from its run (touched, or delivered again) is a `Single` with a
deadline of its own; its slot says SINGLE. A deferred message is only ever a single, and its slot says DEFERRED, because
for the floor it is settled: what is in flight of it exists here alone.

The spans of an owner are disjoint and in order, since first deliveries go upwards; only a seek goes back, and it
forgets all spans.

**Forgotten deliveries.** After a seek the same offsets are delivered again, perhaps on the same connection. A late FIN
for the earlier delivery must not finish the later one, and the two look the same. So each owner keeps the offsets that
were in flight on it when the seek came; a FIN or REQ for one of them fails and takes one off. If the consumer answers
deliveries in order, each answer meets its own delivery; one that never answers the old delivery costs a duplicate.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from nsqha.hot import IN_FLIGHT, SINGLE, Ring
from nsqha.ranges import RangeSet

NOT_IN_FLIGHT = "ID not in flight"
NOT_OWNER = "client does not own message"

SPAN_GRAIN_S = 0.05  # deliveries to one owner within this time share a deadline, the later one (nsqd: about 100 ms)
_SPANS_PRUNED_AT = 256
_NO_LIMIT = 1 << 63


class FlightSpan:
    """Deliveries to one owner that time out together."""

    __slots__ = ("deadline", "end", "first", "opened", "owner")

    def __init__(self, first: int, end: int, owner: int, deadline: float) -> None:
        self.first = first
        self.end = end
        self.owner = owner
        self.opened = deadline
        self.deadline = deadline


class Single:
    """One message in flight with a deadline of its own; `attempts` counts this delivery too."""

    __slots__ = ("attempts", "deadline", "deferred", "latest", "owner")

    def __init__(self, owner: int, attempts: int, deadline: float, *, deferred: bool = False) -> None:
        self.owner = owner
        self.attempts = attempts
        self.deadline = deadline
        self.latest: float | None = None  # where touching ends; known once it was touched
        self.deferred = deferred


class Flight:
    """The ring and everything in flight."""

    __slots__ = (
        "_forgotten",
        "_prune_at",
        "_serial",
        "_single_heap",
        "_span_heap",
        "_spans",
        "count",
        "ring",
        "singles",
    )

    def __init__(self, low: int) -> None:
        self.ring = Ring(low)
        self.count = 0
        self.singles: dict[int, Single] = {}
        self._spans: dict[int, list[FlightSpan]] = {}
        self._span_heap: list[tuple[float, int, FlightSpan]] = []
        self._single_heap: list[tuple[float, int]] = []
        self._forgotten: dict[int, list[RangeSet]] = {}
        self._serial = 0
        self._prune_at = _SPANS_PRUNED_AT

    # ---- handing out

    def deliver(self, first: int, end: int, owner: int, deadline: float) -> None:
        """First delivery of [first, end)."""
        self.ring.deliver(first, end, owner)
        self.count += end - first
        spans = self._spans.get(owner)
        if spans is None:
            spans = self._spans[owner] = []
        elif spans:
            last = spans[-1]
            if 0.0 <= deadline - last.opened <= SPAN_GRAIN_S:
                last.end = end
                last.deadline = deadline
                return
        span = FlightSpan(first, end, owner, deadline)
        spans.append(span)
        self._serial += 1
        heapq.heappush(self._span_heap, (deadline, self._serial, span))
        if len(self._span_heap) > self._prune_at:
            self._prune()

    def deliver_single(self, offset: int, single: Single) -> None:
        """Delivery of one message that is not a first one. A ring slot of it exists unless it is deferred."""
        if not single.deferred:
            self.ring.set(offset, SINGLE, single.owner)
        self.singles[offset] = single
        self.count += 1
        self._watch(offset, single)

    def _watch(self, offset: int, single: Single) -> None:
        heapq.heappush(self._single_heap, (single.deadline, offset))
        if len(self._single_heap) > 2 * len(self.singles) + _SPANS_PRUNED_AT:
            self._single_heap = [(single.deadline, offset) for offset, single in self.singles.items()]
            heapq.heapify(self._single_heap)

    # ---- coming back

    def fin_run(self, data: bytes, pos: int, end: int, id_base: int, owner: int) -> tuple[int, int]:
        """As Ring.fin_run; stops at once for an owner with forgotten deliveries, whose answers are taken singly."""
        if owner in self._forgotten:
            return pos, 0
        pos, finished = self.ring.fin_run(data, pos, end, id_base, owner)
        self.count -= finished
        return pos, finished

    def refuse(self, offset: int, owner: int) -> str | None:
        """Why `owner` may not answer for `offset`; None if it holds it."""
        single = self.singles.get(offset)
        if single is not None:
            return None if single.owner == owner else NOT_OWNER
        if self.ring.get(offset) != IN_FLIGHT:
            return NOT_IN_FLIGHT
        return None if self.ring.owner(offset) == owner else NOT_OWNER

    def delivery(self, offset: int) -> tuple[int, int, float]:
        """Owner, attempts and deadline of a message that is in flight."""
        single = self.singles.get(offset)
        if single is not None:
            return single.owner, single.attempts, single.deadline
        owner = self.ring.owner(offset)
        return owner, 1, self._deadline_of(offset, owner)

    def take_back(self, offset: int) -> Single | None:
        """`offset` is no longer in flight; its single, if it was one. What the slot says next is the caller's."""
        self.count -= 1
        return self.singles.pop(offset, None)

    def touch(self, offset: int, owner: int, now: float, timeout_s: float, attempt_s: float) -> None:
        """A new deadline, never later than `attempt_s` after this attempt began. `owner` holds the message.

        An attempt began `timeout_s` before its first deadline, since an owner has one time-out.
        """
        single = self.singles.get(offset)
        if single is None:
            single = Single(owner, 1, self._deadline_of(offset, owner))
            self.singles[offset] = single
            self.ring.set(offset, SINGLE, owner)
        if single.latest is None:
            single.latest = single.deadline - timeout_s + attempt_s
        single.deadline = min(now + timeout_s, single.latest)
        self._watch(offset, single)

    def _deadline_of(self, offset: int, owner: int) -> float:
        spans = self._spans[owner]
        span = spans[bisect_right(spans, offset, key=lambda span: span.first) - 1]
        assert span.first <= offset < span.end, f"offset {offset} is in flight to {owner} without a deadline"
        return span.deadline

    # ---- time

    def expire(
        self, now: float, slots_max: int = _NO_LIMIT
    ) -> Iterator[tuple[int, list[int], list[tuple[int, Single]]]]:
        """What timed out, as (owner, offsets from runs (now WAITING), singles). No longer in flight.

        Of a span that is longer than `slots_max` it is one piece after the other."""
        heap = self._span_heap
        while heap and heap[0][0] <= now:
            _, serial, span = heapq.heappop(heap)
            if span.deadline > now:
                heapq.heappush(heap, (span.deadline, serial, span))
                continue
            first = max(span.first, self.ring.low)
            end = min(span.end, first + slots_max)
            if end < span.end:
                span.first = end
                heapq.heappush(heap, (span.deadline, serial, span))
            else:
                self._drop_span(span)
            offsets = self.ring.expire(first, end, span.owner)
            if offsets:
                self.count -= len(offsets)
                yield span.owner, offsets, []
        while self._single_heap and self._single_heap[0][0] <= now:
            deadline, offset = heapq.heappop(self._single_heap)
            if self._current(deadline, offset):
                single = self.singles[offset]
                self.take_back(offset)
                yield single.owner, [], [(offset, single)]

    def next_deadline(self) -> float | None:
        """When `expire` has something to look at."""
        spans, low = self._span_heap, self.ring.low
        while spans and spans[0][2].end <= low:
            self._drop_span(heapq.heappop(spans)[2])
        singles = self._single_heap
        while singles and not self._current(*singles[0]):
            heapq.heappop(singles)
        if not spans:
            return singles[0][0] if singles else None
        return min(spans[0][0], singles[0][0]) if singles else spans[0][0]

    def _current(self, deadline: float, offset: int) -> bool:
        single = self.singles.get(offset)
        return single is not None and single.deadline == deadline

    def _drop_span(self, span: FlightSpan) -> None:
        spans = self._spans.get(span.owner)
        if spans and span in spans:
            spans.remove(span)

    def _prune(self) -> None:
        """Forget spans that are wholly finished; what stays may double before the next time."""
        low = self.ring.low
        self._span_heap = [item for item in self._span_heap if item[2].end > low]
        heapq.heapify(self._span_heap)
        self._prune_at = max(_SPANS_PRUNED_AT, 2 * len(self._span_heap))
        for spans in self._spans.values():
            spans[:] = [span for span in spans if span.end > low]

    # ---- owners that go, and seeks

    def detach(self, owner: int) -> tuple[list[int], list[tuple[int, Single]]]:
        """Everything in flight to `owner`, as `expire` returns it."""
        self._forgotten.pop(owner, None)
        offsets = self.ring.expire(self.ring.low, self.ring.next, owner) if self._spans.pop(owner, None) else []
        singles = [(offset, single) for offset, single in self.singles.items() if single.owner == owner]
        for offset, _ in singles:
            del self.singles[offset]
        self.count -= len(offsets) + len(singles)
        return offsets, singles

    def forget(self, low: int, *, keep: Iterable[int] = ()) -> dict[int, int]:
        """A seek: everything in flight is forgotten but the deferred messages `keep`; returns owner -> messages."""
        by_owner: dict[int, list[int]] = {
            owner: self.ring.owned(owner) for owner, spans in self._spans.items() if spans
        }
        kept: dict[int, Single] = {}
        held = set(keep)
        for offset, single in self.singles.items():
            if offset in held:
                kept[offset] = single
            else:
                by_owner.setdefault(single.owner, []).append(offset)
        counts: dict[int, int] = {}
        for owner, offsets in by_owner.items():
            if offsets:
                self._forgotten.setdefault(owner, []).append(RangeSet(runs(sorted(offsets))))
                counts[owner] = len(offsets)
        self.ring.reset(low)
        self.singles = kept
        self.count = len(kept)
        self._spans.clear()
        self._span_heap.clear()
        return counts

    def forget_below(self, end: int, *, keep: Iterable[int] = ()) -> dict[int, int]:
        """What is in flight below `end` is dropped, but the deferred messages `keep`; returns owner -> messages.

        Nothing needs to be remembered of it: those offsets are not delivered again.
        """
        kept = set(keep)
        counts: dict[int, int] = {}
        for owner in self._spans:
            dropped = len(self.ring.expire(self.ring.low, end, owner))
            if dropped:
                counts[owner] = dropped
        for offset, single in list(self.singles.items()):
            if offset < end and offset not in kept:
                del self.singles[offset]
                counts[single.owner] = counts.get(single.owner, 0) + 1
        self.count -= sum(counts.values())
        return counts

    def forgotten(self, offset: int, owner: int, *, answered: bool) -> bool:
        """Whether this answer belongs to a delivery that a seek forgot; `answered` (FIN, REQ) takes one off."""
        layers = self._forgotten.get(owner)
        if layers is None:
            return False
        for layer in layers:
            if offset in layer:
                if answered:
                    layer.discard(offset, offset + 1)
                    if not layer:
                        layers.remove(layer)
                    if not layers:
                        del self._forgotten[owner]
                return True
        return False


def runs(offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Sorted offsets as maximal ranges [first, end)."""
    first = end = -1
    for offset in offsets:
        if offset != end:
            if end > first:
                yield first, end
            first = offset
        end = offset + 1
    if end > first:
        yield first, end
