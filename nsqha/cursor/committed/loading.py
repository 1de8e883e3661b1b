"""Where a partition's committed state comes from when its log is opened: the nearest source that the log vouches for.

    1. the cache        the state as of some batch, if the log has exactly that batch: (log_id, epoch, chain) name the
                        whole log up to it
    2. a checkpoint     the newest complete one, searched from the end of the log backwards
    3. the log's start  if nothing was taken from it

and then every batch behind. All three give the same state; they differ in how much is read.

A state that turned out to be wrong is **rebuilt**: neither from the cache nor from a checkpoint that may hold the same
fault, so from a checkpoint that ended before the fault, or else from the oldest one that the log can begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from nsqha.cursor.committed.checkpoint import Gatherer, checkpoint_frames
from nsqha.cursor.committed.state import NEEDS_LOOK, AppliedEntry, EntryLike, PartitionState
from nsqha.cursor.deferred.deferred_set import NewDeferred
from nsqha.cursor.events import CheckpointFrame
from nsqha.errors import LogCorrupt
from nsqha.frames import HAS_CHECKPOINT, LOST

_BLOCK = 2048  # entries read at once on the way back

CACHE, CHECKPOINT, LOG_START = "cache", "checkpoint", "log start"


class PlaceLike(Protocol):
    """A border between two batches."""

    @property
    def log_id(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def position(self) -> int: ...


class LogLike(Protocol):
    """What is needed of a log."""

    @property
    def start(self) -> PlaceLike: ...
    @property
    def end(self) -> PlaceLike: ...

    def entry(self, log_id: int) -> EntryLike: ...

    def entries(self, first_log_id: int, end_log_id: int) -> Iterable[EntryLike]: ...


@dataclass(frozen=True)
class LoadedState:
    """The committed state at the end of the log, where it came from and how many batches came on top."""

    state: PartitionState
    source: str
    batches: int


def load(
    log: LogLike,
    read: Callable[[EntryLike], bytes | bytearray],
    cached: Callable[[], PartitionState | None] = lambda: None,
    new_deferred: NewDeferred | None = None,
    *,
    end_log_id: int | None = None,
    committed: int | None = None,
    must_read: int = NEEDS_LOOK,
    distrusted: int | None = None,
) -> LoadedState:
    """The committed state of `log` up to its end, or up to `end_log_id` (exclusive).

    `must_read`: flags of the batches that are read; all others are passed over.

    `committed`: only what is below is known to be committed. The cache may know better: it holds nothing else. What
    follows is applied later, perhaps the event that let the first files go too: until then the state is of before it.
    `distrusted`: a state was wrong from this log id on, so checkpoints that reach it are not used if there is another
    way; 0: it is not known since when.
    LogCorrupt if a batch that is needed does not verify, or the log begins in the middle and no source vouches for what
    came before.
    """
    end = log.end.log_id if end_log_id is None else end_log_id
    state, source = cached() if distrusted is None else None, CACHE
    vouched = state is not None and vouches(log, state.applied, end)
    if committed is not None:
        end = min(end, committed)
        if state is not None and vouched:
            end = max(end, state.applied.log_id + 1)
    if state is None or not vouched:
        state, source = _checkpoint(log, read, end, new_deferred, must_read, distrusted), CHECKPOINT
    if state is None:
        if log.start.position != 0:
            raise LogCorrupt(f"the log begins at batch {log.start.log_id} and has no complete checkpoint")
        state, source = PartitionState(new_deferred), LOG_START
    first = state.applied.log_id + 1
    for entry in log.entries(first, end):
        state.apply(entry, read(entry) if entry.flags & must_read else b"")
    if distrusted is not None:
        state.rebuilt = state.applied.log_id
    if committed is None:
        state.start_at(log.start.offset, log.start.position)
    return LoadedState(state, source, max(end - first, 0))


def _checkpoint(
    log: LogLike,
    read: Callable[[EntryLike], bytes | bytearray],
    end: int,
    new_deferred: NewDeferred | None,
    must_read: int,
    distrusted: int | None,
) -> PartitionState | None:
    """The state in the newest complete checkpoint below `end`; if a later state is `distrusted`, in the newest below
    that, or none if the log has its beginning, or in the first that has all that the log lacks."""
    if distrusted is None:
        return newest_checkpoint(log, read, end, new_deferred)
    state = newest_checkpoint(log, read, min(end, distrusted), new_deferred)
    if state is None and log.start.position != 0:
        state = newest_checkpoint(log, read, min(end, first_checkpoint_end(log, read, must_read)), new_deferred)
    return state


def vouches(log: LogLike, applied: AppliedEntry, end_log_id: int) -> bool:
    """Whether `log` has exactly the batch that is named, and so all that came before it was the same."""
    if not log.start.log_id <= applied.log_id < end_log_id:
        return False
    entry = log.entry(applied.log_id)
    return (entry.epoch, entry.chain) == (applied.epoch, applied.chain)


def newest_checkpoint(
    log: LogLike,
    read: Callable[[EntryLike], bytes | bytearray],
    end_log_id: int,
    new_deferred: NewDeferred | None = None,
) -> PartitionState | None:
    """The state in the complete checkpoint with the highest as_of, which is the last: none is written below another."""
    run: list[CheckpointFrame] = []  # from its last frame backwards
    for entry in _backwards(log, end_log_id):
        if not entry.flags & HAS_CHECKPOINT:
            continue
        for frame in reversed(list(checkpoint_frames(bytes(read(entry))))):
            if frame.last:
                run = [frame]
            elif run and (frame.id, frame.sequence) == (run[-1].id, run[-1].sequence - 1):
                run.append(frame)
            else:
                run = []  # of a checkpoint that was never finished, or whose middle is missing
            if run and frame.sequence == 0:
                state = _complete(run, new_deferred)
                if state is not None:
                    return state
                run = []
    return None


def first_checkpoint_end(
    log: LogLike, read: Callable[[EntryLike], bytes | bytearray], must_read: int = NEEDS_LOOK
) -> int:
    """The end, as a log id, of the first complete checkpoint that has all of what a log lacks at its beginning.

    That is committed, whatever else is known: what came before it went only for a checkpoint that was, and this is that
    one or is in front of it. 0: there is none, or it may have been in a batch that was given up. LogCorrupt: likewise,
    in one that cannot be read."""
    gathered = Gatherer()
    for entry in log.entries(log.start.log_id, log.end.log_id):
        if entry.flags & LOST:
            return 0
        for frame in checkpoint_frames(bytes(read(entry))) if entry.flags & must_read else ():
            if gathered.feed(frame) and frame.as_of >= log.start.log_id:
                return entry.log_id + 1
    return 0


def _complete(backwards: list[CheckpointFrame], new_deferred: NewDeferred | None) -> PartitionState | None:
    gathered = Gatherer()
    try:
        for frame in reversed(backwards):
            gathered.feed(frame)
        return gathered.state(new_deferred)
    except LogCorrupt:
        return None  # an older one serves as well, with more to read behind it


def _backwards(log: LogLike, end_log_id: int) -> Iterator[EntryLike]:
    """LogCorrupt at the first one that cannot be read, not before: what is behind damage may be all that is needed."""
    end, start = end_log_id, log.start.log_id
    while end > start:
        at = first = max(start, end - _BLOCK)
        found: list[EntryLike] = []
        hole: LogCorrupt | None = None
        while at < end:
            try:
                for entry in log.entries(at, end):
                    found.append(entry)
                    at += 1
            except LogCorrupt as error:
                found, hole = [], error
                at += 1
        yield from reversed(found)
        if hole is not None:
            raise hole
        end = first
