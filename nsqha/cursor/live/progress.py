"""Makes progress events of the live state: only what changed since the last one.

`Written` is what was written of a channel's cursor (on its way or committed). A channel's news may be long, a frame
should not: it is cut into pieces of some thousand rows, in an order in which every beginning of it is true. What
is deferred comes first and the floor last, for a floor that passed a message whose deferral was never read would lose
it. (A batch is applied whole, so within one batch the order matters to readers only; between batches it matters.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from typing import Generic, TypeVar

from nsqha import frames as layout
from nsqha.cursor.events import FRAME_BYTES_MAX, ChannelProgress, Range, progress_frame
from nsqha.ranges import RangeSet

ROWS_PER_PIECE = 3000  # of at most 18 bytes

T = TypeVar("T")


class Written:
    """Floor and finished ranges above it, as the log has them or will have them."""

    __slots__ = ("floor", "ranges")

    def __init__(self, floor: int, ranges: RangeSet) -> None:
        self.floor = floor
        self.ranges = ranges.copy()

    def advance(self, floor: int, finished: list[Range], next_read: int) -> list[Range]:
        """The cursor is here, `finished` is all that is finished in [floor, next_read); returns what is new of it."""
        self.floor = max(self.floor, floor)
        new = without(finished, self.ranges)
        if new or finished:
            above = [(max(first, next_read), end) for first, end in self.ranges if end > next_read]
            self.ranges = RangeSet([*finished, *above])
        else:
            self.ranges.cut_below(self.floor)
        return new

    def imply(self, finished: Iterable[int]) -> None:
        """Applying that these deferred messages are finished adds those at or above the floor to the ranges."""
        for offset in finished:
            if offset >= self.floor:
                self.ranges.add(offset, offset + 1)


def without(ranges: list[Range], held: RangeSet) -> list[Range]:
    """The parts of `ranges` (in order) that are not in `held`."""
    if not held:
        return ranges
    new: list[Range] = []
    holes = iter(held)
    hole = next(holes, None)
    for first, end in ranges:
        while hole is not None and hole[1] <= first:
            hole = next(holes, None)
        while hole is not None and hole[0] < end:
            if first < hole[0]:
                new.append((first, hole[0]))
            first = hole[1]
            if first >= end:
                break
            hole = next(holes, None)
        if first < end:
            new.append((first, end))
    return new


def deliveries(low: int, end: int, settled: list[Range], known: dict[int, int]) -> list[tuple[int, int, int]]:
    """[low, end) without what is settled, as runs (first, end, deliveries): 1 unless known."""
    marks = sorted(known)
    found: list[tuple[int, int, int]] = []
    for first, stop in [*RangeSet(sorted(settled)), (end, end)]:
        for offset in marks[bisect_left(marks, low) : bisect_left(marks, first)]:
            if low < offset:
                found.append((low, offset, 1))
            found.append((offset, offset + 1, known[offset]))
            low = offset + 1
        if low < first:
            found.append((low, first, 1))
        low = stop
    return found


def pieces(whole: ChannelProgress, floor_before: int, put_back: Set[int] = frozenset()) -> Iterator[ChannelProgress]:
    """The same news in parts that fit frames; parts but the last say `floor_before`. `put_back`: of what is deferred,
    what was finished before."""
    if put_back:
        back = tuple(put for put in whole.puts if put[0] in put_back)
        whole = replace(whole, puts=tuple(put for put in whole.puts if put[0] not in put_back))
        for i in range(0, len(back), ROWS_PER_PIECE):
            part = back[i : i + ROWS_PER_PIECE]
            yield ChannelProgress(whole.uid, whole.seek, floor_before, puts=part, put_back=True)
    if whole.rows <= ROWS_PER_PIECE:
        yield whole
        return
    uid, seek, n = whole.uid, whole.seek, ROWS_PER_PIECE
    for i in range(0, len(whole.puts), n):
        yield ChannelProgress(uid, seek, floor_before, puts=whole.puts[i : i + n])
    for i in range(0, len(whole.finished), n):
        yield ChannelProgress(uid, seek, floor_before, finished=whole.finished[i : i + n])
    for i in range(0, len(whole.ranges), n):
        yield ChannelProgress(uid, seek, floor_before, ranges=whole.ranges[i : i + n])
    yield ChannelProgress(uid, seek, whole.floor, attempts=whole.attempts[:n], attempts_known=whole.attempts_known)
    for i in range(n, len(whole.attempts), n):
        yield ChannelProgress(uid, seek, whole.floor, attempts=whole.attempts[i : i + n])


def frames(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Encoded parts gathered into as few progress frames as 64 KB each allow."""
    gathered: list[bytes] = []
    size = 0
    for encoded in parts:
        if gathered and size + len(encoded) > FRAME_BYTES_MAX - 64:
            yield progress_frame(gathered)
            gathered, size = [], 0
        gathered.append(encoded)
        size += len(encoded)
    if gathered:
        yield progress_frame(gathered)


class TakenEvents(Generic[T]):
    """Events that went into batches, in order, with what is to be settled when those are committed."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: deque[tuple[bytes, list[T]]] = deque()

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, data: bytes, news: list[T]) -> None:
        """`data` goes into the log in front of what is taken after it."""
        self._taken.append((data, news))

    def committed(self, batch: bytes | bytearray | memoryview) -> list[T]:
        """What of the news is in this batch, which was committed; recognised by its bytes."""
        if self._taken:
            data, news = self._taken[0]
            size = len(data)
            last = len(batch) < size + layout.HEAD.size or layout.HEAD.unpack_from(batch, size)[1] < layout.CONTROL_MIN
            if last and batch[:size] == data:
                self._taken.popleft()
                return news
        found: list[T] = []
        front = bytes(batch[: sum(len(data) for data, _ in self._taken) + 64])
        at = 0
        while self._taken and at < len(front):
            data, news = self._taken[0]
            if front.startswith(data, at):
                self._taken.popleft()
                found += news
                at += len(data)
            else:
                size, frame_type = layout.HEAD.unpack_from(front, at) if at + 8 <= len(front) else (0, 0)
                if frame_type < layout.CONTROL_MIN:
                    break
                at += 4 + size
        return found
