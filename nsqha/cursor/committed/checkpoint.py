"""The whole channel state, written into the log, so that the log before it may go.

A checkpoint is a run of frames (`events.CheckpointFrame`) of at most 64 KB, all with its id and its `as_of`: the last
log_id that the snapshot had applied. It may span many batches with messages and events between. A reader of

    the complete checkpoint with the highest as_of, and then every event behind as_of, those between its frames included

has the committed state. A checkpoint that its writer did not finish is no checkpoint; the next one has another id.

The bodies together are a list of records that begins with HEAD. A CHANNEL is followed by what belongs to it. Long lists
are many records, none crosses a frame. The last frame ends with BLAKE2b-128 of all bodies before the digest.

    HEAD      0  u8, version u8, log_id u64, epoch u64, chain u64, end_offset u64, end_position u64,
                 state_epoch u64, pump u64, paused u8, version u64, log start offset u64, position u64, log_id u64,
                 last checkpoint: as_of u64, size u64, end_log_id u64, end_position u64
    CHANNEL   1  u8, uid u64, flags u8, floor u64, seek u64, abandoned u64, undo u8 (0 none, 1 without ranges, 2 with),
                 undo floor u64, name
    RANGES    2  u8, n u32, [first u64, end u64]*n
    DEFERRED  3  u8, n u32, [offset u64, due_ns i64, attempts u16, position u64]*n
    ATTEMPTS  4  u8, n u32, [first u64, end u64, attempts u16]*n
    UNDO      5  u8, n u32, [first u64, end u64]*n
    LATER     6  u8, n u32, [offset u64, due_ns i64]*n          deliver-at times that the pump has not passed
    HOLDS     7  u8, n u32, [id u64, offset u64, until_ns i64, since_ns i64]*n
    DROPPED   8  u8, n u32, rows as in DEFERRED                 what the last seek dropped
    LOST      9  u8, 1 u32, [count u64]                         dropped messages that an undo cannot bring back

The records of equal states are equal bytes: `encode` and `digest` are how states are compared.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from nsqha.cursor import events
from nsqha.cursor.committed.holds import LiveHold
from nsqha.cursor.committed.state import (
    AppliedEntry,
    ChannelState,
    CheckpointMark,
    PartitionState,
    Undo,
)
from nsqha.cursor.deferred.deferred_set import Deferred, NewDeferred
from nsqha.cursor.events import CheckpointFrame, Reader
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.listing import CHANNEL_PAUSED, CHANNEL_READER
from nsqha.errors import LogCorrupt
from nsqha.frames import CHECKPOINT, CONTROL_MIN, HAS_CHECKPOINT
from nsqha.frames import HEAD as FRAME_HEAD
from nsqha.ranges import RangeSet

FORMAT = 1
BODY_BYTES_MAX = 60 << 10  # a frame stays below 64 KB with its heads
_ROWS = 2000  # of at most 26 bytes per record; holds are few
_DIGEST = 16

_HEAD = struct.Struct(">BBQQQQQQQBQQQQQQQQ")
_CHANNEL = struct.Struct(">BQBQQQBQB")
_LIST = struct.Struct(">BI")
_RANGE = struct.Struct(">QQ")
_DEFERRED = struct.Struct(">QqHQ")
_RUN = struct.Struct(">QQH")
_LATER = struct.Struct(">Qq")
_HOLD = struct.Struct(">QQqq")
_COUNT = struct.Struct(">Q")
(
    _KIND_HEAD, _KIND_CHANNEL, _KIND_RANGES, _KIND_DEFERRED, _KIND_ATTEMPTS, _KIND_UNDO, _KIND_LATER, _KIND_HOLDS,
    _KIND_DROPPED, _KIND_LOST
) = range(10)  # fmt: skip
_NO_UNDO, _UNDO_FLOOR, _UNDO_RANGES = range(3)


# ---- writing


def records(state: PartitionState) -> Iterator[bytes]:
    """The state as records, in one possible order only."""
    mark = state.checkpoint
    yield _HEAD.pack(
        _KIND_HEAD,
        FORMAT,
        *state.applied,
        state.epoch,
        state.pump,
        state.paused,
        state.version,
        *state.log_start,
        state.log_start_log_id,
        mark.as_of,
        mark.size,
        mark.end_log_id,
        mark.end_position,
    )
    for name in sorted(state.channels):
        yield from _channel_records(state.channels[name])
    yield from _lists(_KIND_LATER, _LATER, state.later.rows())
    yield from _lists(_KIND_HOLDS, _HOLD, state.holds.rows())


def _channel_records(channel: ChannelState) -> Iterator[bytes]:
    name = channel.name.encode()
    undo = channel.undo
    kind = _NO_UNDO if undo is None else _UNDO_FLOOR if undo.ranges is None else _UNDO_RANGES
    yield (
        _CHANNEL.pack(
            _KIND_CHANNEL,
            channel.uid,
            channel.paused * CHANNEL_PAUSED | channel.reader * CHANNEL_READER,
            channel.floor,
            channel.seek,
            channel.abandoned,
            kind,
            undo.floor if undo is not None else 0,
            len(name),
        )
        + name
    )
    yield from _lists(_KIND_RANGES, _RANGE, channel.ranges)
    yield from _lists(_KIND_DEFERRED, _DEFERRED, channel.deferred.items())
    yield from _lists(_KIND_ATTEMPTS, _RUN, channel.attempts)
    if undo is not None and undo.ranges:
        yield from _lists(_KIND_UNDO, _RANGE, undo.ranges)
    if undo is not None:
        yield from _lists(_KIND_DROPPED, _DEFERRED, undo.deferred)
        yield from _lists(_KIND_LOST, _COUNT, [(undo.lost,)] if undo.lost else [])


def _lists(kind: int, layout: struct.Struct, rows: Iterable[tuple[int, ...]]) -> Iterator[bytes]:
    rows = iter(rows)
    while chunk := list(islice(rows, _ROWS)):
        yield _LIST.pack(kind, len(chunk)) + b"".join([layout.pack(*row) for row in chunk])


def encode(state: PartitionState) -> bytes:
    """All records: equal for equal states."""
    return b"".join(records(state))


def digest(state: PartitionState) -> bytes:
    """16 bytes that differ for different states."""
    hashed = hashlib.blake2b(digest_size=_DIGEST)
    for record in records(state):
        hashed.update(record)
    return hashed.digest()


def write(state: PartitionState, body_bytes_max: int = BODY_BYTES_MAX) -> Iterator[bytes]:
    """The frames of a checkpoint of `state`, which must not change meanwhile.

    Its id is its as_of and the epoch of the last epoch start: no two writers share both.
    """
    hashed = hashlib.blake2b(digest_size=_DIGEST)
    as_of = state.applied.log_id
    identity = (state.epoch << 40 ^ as_of) & (1 << 64) - 1
    body = bytearray()
    sequence = 0
    for record in records(state):
        if body and len(body) + len(record) > body_bytes_max:
            yield CheckpointFrame(identity, sequence, as_of, False, bytes(body)).encode()
            sequence += 1
            body.clear()
        hashed.update(record)
        body += record
    yield CheckpointFrame(identity, sequence, as_of, True, bytes(body) + hashed.digest()).encode()


class CheckpointWriter:
    """Writes checkpoints of a partition that this node leads: when they are due, some frames with each batch."""

    __slots__ = ("_as_of", "_begun_at", "_limits", "_state", "frames")

    def __init__(self, state: PartitionState, limits: ChannelLimits) -> None:
        self.frames: Iterator[bytes] | None = None  # of the one that is being written
        self._state = state
        self._limits = limits
        self._begun_at = 0  # the position of the log's end when the last one was begun here
        self._as_of = 0  # of that one

    @property
    def due(self) -> bool:
        """Whether the log grew enough since the last one. Asked for each batch."""
        mark, end = self._state.checkpoint, self._state.applied.end_position
        if end - mark.end_position < self._limits.checkpoint_every_bytes:
            return False
        grown = end - max(mark.end_position, self._begun_at)
        return grown >= max(self._limits.checkpoint_every_bytes, 4 * mark.size)

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint is being written, or waits to be committed; it rides with the next batches."""
        return self.frames is not None or self._as_of > self._state.checkpoint.as_of

    def begin(self, snapshot: PartitionState) -> None:
        """Write `snapshot`, which may lag behind, with the next batches; replaces one that is being written."""
        if snapshot.applied.log_id >= self._state.checkpoint.as_of:
            self._begun_at = self._state.applied.end_position
            self._as_of = snapshot.applied.log_id
            self.frames = write(snapshot, self._limits.checkpoint_frame_bytes)

    def take(self, parts: list[bytes]) -> int:
        """Append the frames of the next batch to `parts`; the flags that the batch needs for them."""
        if self.frames is None and self.due:
            self.begin(self._state.snapshot())
        if self.frames is None:
            return 0
        size = 0
        while size < self._limits.checkpoint_bytes_per_batch:
            frame = next(self.frames, None)
            if frame is None:
                self.frames = None
                break
            parts.append(frame)
            size += len(frame)
        return HAS_CHECKPOINT if size else 0


# ---- reading


class Gatherer:
    """Takes checkpoint frames in the order of the log and keeps the newest complete checkpoint."""

    def __init__(self) -> None:
        self.as_of = 0  # of the complete one
        self.size = 0
        self._complete: bytes | None = None
        self._id: int | None = None
        self._bodies: list[bytes] = []

    def feed(self, frame: CheckpointFrame) -> bool:
        """Whether this frame completed a checkpoint. LogCorrupt if its digest does not fit."""
        if frame.sequence == 0:
            self._id, self._bodies = frame.id, []
        elif frame.id != self._id or frame.sequence != len(self._bodies):
            self._id, self._bodies = None, []  # of a checkpoint whose beginning is not here
            return False
        self._bodies.append(frame.body)
        if not frame.last:
            return False
        data = b"".join(self._bodies)
        self._id, self._bodies = None, []
        if hashlib.blake2b(data[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
            raise LogCorrupt(f"the checkpoint as of {frame.as_of} does not match its digest")
        if frame.as_of < self.as_of:
            return False
        self.as_of, self._complete = frame.as_of, data[:-_DIGEST]
        return True

    def state(self, new_deferred: NewDeferred | None = None) -> PartitionState | None:
        """The state in the newest complete checkpoint."""
        return None if self._complete is None else decode(self._complete, new_deferred)


def decode(data: bytes, new_deferred: NewDeferred | None = None) -> PartitionState:
    """The state in these records. LogCorrupt if they do not decode."""
    state = PartitionState(new_deferred)
    try:
        _decode(Reader(data), state)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise LogCorrupt(f"a checkpoint does not decode: {error}") from None
    return state


def _decode(reader: Reader, state: PartitionState) -> None:
    _, version, *head = reader.take(_HEAD)
    if version != FORMAT:
        raise ValueError(f"format {version} is not known")
    state.applied = AppliedEntry(*head[:5])
    state.epoch, state.pump, paused, state.version = head[5:9]
    state.paused = bool(paused)
    state.log_start = (head[9], head[10])
    state.log_start_log_id = head[11]
    state.checkpoint = CheckpointMark(*head[12:])
    channel: ChannelState | None = None
    while reader.left:
        kind = reader.peek()
        if kind == _KIND_CHANNEL:
            channel = _decode_channel(reader, state)
            state.channels[channel.name] = channel
            continue
        _, count = reader.take(_LIST)
        if kind == _KIND_LATER:
            for offset, due_ns in reader.rows(_LATER, count):
                state.later.add(offset, due_ns)
        elif kind == _KIND_HOLDS:
            for id_, *hold in reader.rows(_HOLD, count):
                state.holds.put(id_, LiveHold(*hold))
        elif channel is None:
            raise ValueError(f"a record of kind {kind} before any channel")
        elif kind == _KIND_DEFERRED:
            for row in reader.rows(_DEFERRED, count):
                channel.deferred.put(Deferred(*row))
        elif kind == _KIND_RANGES:
            for first, end in reader.ranges(count):
                channel.ranges.add(first, end)
        elif kind == _KIND_ATTEMPTS:
            channel.attempts += reader.rows(_RUN, count)  # type: ignore[arg-type]
        elif kind == _KIND_UNDO:
            undo = channel.undo
            assert undo is not None and undo.ranges is not None
            channel.undo = replace(undo, ranges=undo.ranges + reader.ranges(count))
        elif kind == _KIND_DROPPED:
            assert channel.undo is not None
            dropped = tuple(Deferred(*row) for row in reader.rows(_DEFERRED, count))
            channel.undo = replace(channel.undo, deferred=channel.undo.deferred + dropped)
        elif kind == _KIND_LOST:
            assert channel.undo is not None
            channel.undo = replace(channel.undo, lost=sum(lost for (lost,) in reader.rows(_COUNT, count)))
        else:
            raise ValueError(f"no record of kind {kind}")


def _decode_channel(reader: Reader, state: PartitionState) -> ChannelState:
    _, uid, flags, floor, seek, abandoned, undo, undo_floor, size = reader.take(_CHANNEL)
    return ChannelState(
        name=reader.raw(size).decode(),
        uid=uid,
        floor=floor,
        deferred=state.new_deferred(uid),
        paused=bool(flags & CHANNEL_PAUSED),
        reader=bool(flags & CHANNEL_READER),
        seek=seek,
        undo=None if undo == _NO_UNDO else Undo(undo_floor, () if undo == _UNDO_RANGES else None),
        abandoned=abandoned,
        ranges=RangeSet(),
    )


def checkpoint_frames(data: bytes) -> Iterator[CheckpointFrame]:
    """The checkpoint frames at the front of a batch."""
    at = 0
    while at + FRAME_HEAD.size <= len(data):
        size, frame_type = FRAME_HEAD.unpack_from(data, at)
        if frame_type < CONTROL_MIN or at + 4 + size > len(data):
            return
        if frame_type == CHECKPOINT:
            event = events.decode(frame_type, data[at + 8 : at + 4 + size])
            assert isinstance(event, CheckpointFrame)
            yield event
        at += 4 + size
