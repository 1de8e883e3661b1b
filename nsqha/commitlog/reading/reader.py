"""Reading batches: what was written or read lately stays in memory, bounded for the whole node.

    Batch        verified frames of one batch, or of a run of neighbouring ones; what delivery slices
    BatchCache   node-wide bound in bytes over
      tail         the last batches appended to each log, oldest out first
      runs         what readers of a backlog have been given, least recently used out first
      retries      frames of single messages that were handed out and come again soon, oldest out first
    Shelf        one log's part of the cache

A reader behind the tail gets a **run**: one pread of up to 256 KB, every entry and every batch in it verified, or
small batches of the tail joined. So the cost per batch stays far below the cost per read even if each holds a single
message. A run is kept until others push it out, so several channels at about the same place share it.

A message that comes again in some seconds is alone there: to verify it, its whole batch would have to be read, which
may be a thousand times as large. So its frame is copied while the batch is still in memory.

Batches of the tail hold the very object that was given to `append`: it must not change afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from contextlib import suppress
from typing import TYPE_CHECKING

from nsqha import hot
from nsqha.errors import LogCorrupt

if TYPE_CHECKING:
    from nsqha.commitlog.entry import Entry

CACHE_BYTES = 16 << 20
RUN_BYTES = 256 << 10  # one read of a backlog
JOIN_BYTES = 64 << 10  # neighbouring batches of the tail are joined up to this size
BATCH_OVERHEAD = 400  # what a cached batch costs beside its bytes
RETRIES_SHARE = 8  # one in so many bytes may be retries
RETRY_OVERHEAD = 250  # what a frame costs beside its bytes


class Batch:
    """Verified bytes of the batches [entry.log_id, end_log_id), which hold the messages [first_offset, end_offset)."""

    __slots__ = ("_offset", "_position", "data", "end_log_id", "end_offset", "entry", "first_offset", "flags")

    def __init__(
        self,
        entry: Entry,
        data: bytes | bytearray,
        first_offset: int,
        end_log_id: int,
        end_offset: int,
        flags: int,
    ) -> None:
        self.entry = entry  # of the first batch
        self.data = data
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.end_log_id = end_log_id
        self.flags = flags  # of all batches: 0 means there is no control frame
        self._offset = first_offset  # the frame at or behind `_position` is this message
        self._position = 0

    @classmethod
    def of(cls, entry: Entry, data: bytes | bytearray) -> Batch:
        """A single batch."""
        return cls(entry, data, entry.first_offset, entry.log_id + 1, entry.end_offset, entry.flags)

    def locate(self, offset: int) -> int:
        """Where in `data` the frame of this message begins. Going forward continues where the last call ended.

        LogCorrupt if the batch has fewer messages than its entry says, which its CRCs do not exclude.
        """
        assert self.first_offset <= offset < self.end_offset, f"{offset} is not in {self}"
        data, end = self.data, len(self.data)
        if offset < self._offset:
            self._offset, self._position = self.first_offset, 0
        missing, position = offset - self._offset, self._position
        count = 1
        while missing and count:
            if self.flags:
                position = hot.skip_control(data, position, end)
            position, count = hot.walk(data, position, end, missing)
            missing -= count
        if self.flags:
            position = hot.skip_control(data, position, end)
        if missing or position == end:
            raise LogCorrupt(f"{self} has no frame for offset {offset}")
        self._offset, self._position = offset, position
        return position

    def frame(self, offset: int) -> bytes:
        """A copy of the frame of this message. LogCorrupt as of `locate`."""
        at = self.locate(offset)
        return bytes(self.data[at : at + 4 + int.from_bytes(self.data[at : at + 4], "big")])

    def __repr__(self) -> str:
        log_ids = f"log ids [{self.entry.log_id}, {self.end_log_id})"
        return f"Batch({log_ids}, offsets [{self.first_offset}, {self.end_offset}), {len(self.data)} bytes)"


class BatchCache:
    """Batches of all logs of a node, at most `bytes_max` of them; at most half of it are runs."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self.bytes_max = bytes_max
        self.tail_bytes = 0
        self.runs_bytes = 0
        self._tail: deque[Shelf] = deque()  # one item per batch of a tail, in the order they were appended
        self._runs: OrderedDict[Batch, Shelf] = OrderedDict()
        self.retries_bytes = 0
        self._retries: OrderedDict[tuple[Shelf, int], bytes] = OrderedDict()  # by log and offset

    def shelf(self) -> Shelf:
        """The part of a log that is being opened."""
        return Shelf(self)

    def appended(self, shelf: Shelf, size: int) -> None:
        self._tail.append(shelf)
        self.tail_bytes = tail_bytes = self.tail_bytes + size + BATCH_OVERHEAD
        if tail_bytes + self.runs_bytes + self.retries_bytes > self.bytes_max:
            self._shrink()

    def _shrink(self) -> None:
        # The newest of each stay whatever their size: they are about to be delivered.
        while self.tail_bytes + self.runs_bytes + self.retries_bytes > self.bytes_max:
            if len(self._tail) > 1:
                self.tail_bytes -= self._tail.popleft().drop_oldest()
            elif len(self._runs) > 1:
                self.drop_run(next(iter(self._runs)))
            else:
                break

    def keep_run(self, shelf: Shelf, run: Batch) -> None:
        shelf.runs.append(run)
        self._runs[run] = shelf
        self.runs_bytes += len(run.data) + BATCH_OVERHEAD
        while self.runs_bytes > self.bytes_max // 2 and len(self._runs) > 1:
            self.drop_run(next(iter(self._runs)))
        self._shrink()

    def used(self, run: Batch) -> None:
        self._runs.move_to_end(run)

    def drop_run(self, run: Batch) -> None:
        shelf = self._runs.pop(run)
        shelf.runs.remove(run)
        self.runs_bytes -= len(run.data) + BATCH_OVERHEAD

    def keep_retry(self, shelf: Shelf, offset: int, frame: bytes) -> None:
        self.take_retry(shelf, offset)
        self._retries[shelf, offset] = frame
        shelf.retries.add(offset)
        self.retries_bytes += len(frame) + RETRY_OVERHEAD
        while self.retries_bytes > self.bytes_max // RETRIES_SHARE:
            self.take_retry(*next(iter(self._retries)))
        self._shrink()

    def take_retry(self, shelf: Shelf, offset: int) -> bytes | None:
        frame = self._retries.pop((shelf, offset), None)
        if frame is not None:
            self.retries_bytes -= len(frame) + RETRY_OVERHEAD
            shelf.retries.remove(offset)
        return frame

    def forget(self, batches: list[Batch]) -> None:
        self.tail_bytes -= sum(len(batch.data) + BATCH_OVERHEAD for batch in batches)


class Shelf:
    """The cached batches of one log. The tail is contiguous: it ends at the log's end, unless it is empty."""

    __slots__ = ("_cache", "_forgotten", "_head", "_offsets", "_tail", "_tail_log_id", "retries", "runs")

    def __init__(self, cache: BatchCache) -> None:
        self._cache = cache
        self._tail: dict[int, Batch] = {}  # by log id, dense
        self._tail_log_id = 0  # of the oldest batch in it
        self._offsets: list[int] = []  # first_offset of each, from `_head` on
        self._head = 0
        self._forgotten = 0  # items of ours in the cache's queue that stand for nothing any more
        self.runs: list[Batch] = []
        self.retries: set[int] = set()  # offsets

    def append(self, batch: Batch) -> None:
        log_id = batch.entry.log_id
        if not self._tail:
            self._tail_log_id = log_id
        self._tail[log_id] = batch
        self._offsets.append(batch.first_offset)
        self._cache.appended(self, len(batch.data))

    def drop_oldest(self) -> int:
        """Take out the oldest batch of the tail; how many bytes that freed."""
        if self._forgotten:
            self._forgotten -= 1
            return 0
        batch = self._tail.pop(self._tail_log_id)
        self._tail_log_id += 1
        self._head += 1
        if self._head * 2 > len(self._offsets):
            del self._offsets[: self._head]
            self._head = 0
        return len(batch.data) + BATCH_OVERHEAD

    def cut(self, log_id: int) -> None:
        """Forget everything from `log_id` on, and every run that reaches it."""
        gone = [self._tail.pop(n) for n in range(max(log_id, self._tail_log_id), self._tail_log_id + len(self._tail))]
        del self._offsets[len(self._offsets) - len(gone) :]
        self._cache.forget(gone)
        # Which of our items in the queue come to nothing does not matter, only how many.
        self._forgotten += len(gone)
        for run in [run for run in self.runs if run.end_log_id > log_id]:
            self._cache.drop_run(run)
        for offset in list(self.retries):
            self._cache.take_retry(self, offset)

    def clear(self) -> None:
        """Forget everything."""
        self.cut(0)

    def by_log_id(self, log_id: int) -> Batch | None:
        """The single batch with this log id, if the tail has it."""
        return self._tail.get(log_id)

    def by_offset(self, offset: int) -> Batch | None:
        """A batch or run that holds `offset`."""
        batch = self._in_tail(offset)
        if batch is not None and batch.entry.log_id == self._tail_log_id + len(self._tail) - 1:
            return batch
        for run in self.runs:
            if run.first_offset <= offset < run.end_offset:
                self._cache.used(run)
                return run
        return None if batch is None else self._joined(batch)

    def keep_retry(self, offset: int) -> None:
        """The message will be asked for again soon: its frame stays in memory, if it is there and there is room."""
        batch = self._in_tail(offset)
        if batch is None:
            batch = next((run for run in reversed(self.runs) if run.first_offset <= offset < run.end_offset), None)
        if batch is not None:
            with suppress(LogCorrupt):  # who asks for it hears so
                self._cache.keep_retry(self, offset, batch.frame(offset))

    def take_retry(self, offset: int) -> bytes | None:
        """The frame of a message that was to be kept, and is no longer."""
        return self._cache.take_retry(self, offset)

    def log_id_after_run(self, offset: int) -> int | None:
        """Where a reader that finished a run goes on: the log id behind a run that ends at `offset`."""
        for run in self.runs:
            if run.end_offset == offset:
                return run.end_log_id
        return None

    def entry_by_offset(self, offset: int) -> Entry | None:
        """The entry that holds `offset`, if the tail has it."""
        batch = self._in_tail(offset)
        return None if batch is None else batch.entry

    def _in_tail(self, offset: int) -> Batch | None:
        i = bisect_right(self._offsets, offset, self._head) - 1
        if i < self._head:
            return None
        # Of several that begin here the last one is found: the others hold no message.
        batch = self._tail[self._tail_log_id + i - self._head]
        return batch if offset < batch.end_offset else None

    def _joined(self, batch: Batch) -> Batch:
        """A batch of the tail, joined with the small ones behind it."""
        parts, size, flags, last = [batch.data], len(batch.data), batch.flags, batch
        while (after := self._tail.get(last.end_log_id)) is not None and size + len(after.data) <= JOIN_BYTES:
            last = after
            size += len(after.data)
            flags |= after.flags
            parts.append(after.data)
        if last is batch:
            return batch
        data = b"".join(parts)
        run = Batch(batch.entry, data, batch.first_offset, last.end_log_id, last.end_offset, flags)
        self._cache.keep_run(self, run)
        return run
