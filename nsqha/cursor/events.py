"""Channel events: the control frames through which channel state travels, and their bytes.

All integers are big endian and of fixed width, so that long lists are packed and unpacked by one call each. Names are
UTF-8 behind a length byte. `[..]*n` is n repetitions.

    ATTRIBUTES   covers u32, deliver_at_ns i64 (0: none), headers u16, [key u16 + bytes, value u32 + bytes]*headers
    CHANNELS     version u64, paused u8, n u32, [uid u64, flags u8 (1 paused, 2 a reader's), name]*n
    EPHEMERAL    uid u64, exists u8, name
    TOPIC_EMPTY  nothing
    PROGRESS     per channel until the payload ends:
                   uid u64, seek u64, floor u64, ranges u32, puts u32, finished u32, attempts u32, flags u8,
                   [first u64, end u64]*ranges           newly finished, above the floor
                   [offset u64, due_ns i64, attempts u16]*puts           deferred, or deferred again
                   [offset u64]*finished                 deferred until now, finished
                   [first u64, end u64, attempts u16]*attempts           flag 1: replaces what was known
                   flag 2: what is deferred was finished, and an operator puts it back
    SEEK         uid u64, target u64, old floor u64, flags u8, ranges u32, [first u64, end u64]*ranges
                   flags: 1 deferred messages are dropped, 2 the ranges are known, 4 undo, 8 never back
    CARRY        offset u64, the message's frame
    LOG_START    offset u64, position u64, n u32, [uid u64, first u64, end u64]*n
    CHECKPOINT   id u64, sequence u32, flags u8, as_of u64, body (see `committed.checkpoint`)
    EPOCH_START  epoch u64, node u64
    HOLD         id u64, offset u64, until_ns i64 (0: released)

A frame other than a checkpoint's is at most 64 KB where its writer can choose (`live.progress` splits). Reading trusts
nothing: a payload that does not fit is LogCorrupt, never a wrong event.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nsqha import frames, hot
from nsqha.cursor.listing import NO_CHANNELS, Listing
from nsqha.cursor.policy import PolicySource
from nsqha.errors import LogCorrupt
from nsqha.frames import control_frame

FRAME_BYTES_MAX = 64 << 10
TARGET_END = (1 << 63) - 1  # a seek to here means the pump

Range = tuple[int, int]

_U64 = struct.Struct(">Q")
_RANGE = struct.Struct(">QQ")
_PUT = struct.Struct(">QqH")
_RUN = struct.Struct(">QQH")
_ATTRIBUTES = struct.Struct(">IqH")
_CHANNELS = struct.Struct(">QBI")
_CHANNEL = struct.Struct(">QBB")
_PROGRESS = struct.Struct(">QQQIIIIB")
_FLOOR = struct.Struct(">IIQQQQQB")  # the frame of a progress without lists
_MESSAGE = frames.MESSAGE.to_bytes(4)
_SEEK = struct.Struct(">QQQBI")
_LOG_START = struct.Struct(">QQI")
_ABANDONED = struct.Struct(">QQQ")
_CHECKPOINT = struct.Struct(">QIBQ")
_EPOCH_START = struct.Struct(">QQ")
_HOLD = struct.Struct(">QQq")

CARRY_HEAD = frames.HEAD.size + _U64.size  # from the start of a carry frame to the message's frame in it


@dataclass(frozen=True)
class Attributes:
    """What is known of the next `covers` messages of the batch beyond their frames."""

    covers: int = 1
    deliver_at_ns: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def encode(self) -> bytes:
        parts = [_ATTRIBUTES.pack(self.covers, self.deliver_at_ns, len(self.headers))]
        for key, value in self.headers:
            parts += (len(key).to_bytes(2), key, len(value).to_bytes(4), value)
        return control_frame(frames.ATTRIBUTES, b"".join(parts))


class ChannelInfoLike(Protocol):
    """A channel of the metadata record."""

    @property
    def uid(self) -> int: ...
    @property
    def paused(self) -> bool: ...
    @property
    def reader(self) -> bool: ...


class ChannelListLike(PolicySource, Protocol):
    """The metadata record of a topic's channels."""

    @property
    def paused(self) -> bool: ...
    @property
    def channels(self) -> Mapping[str, ChannelInfoLike]: ...

    def changed_since(self, before: Any) -> Collection[str]:
        """The names of all channels that came, went or changed since that record, of the same topic."""


@dataclass(frozen=True)
class ChannelsEvent:
    """A copy of the topic's channel record; applied by difference."""

    version: int
    paused: bool
    channels: Listing

    def encode(self) -> bytes:
        head = _CHANNELS.pack(self.version, self.paused, len(self.channels))
        return control_frame(frames.CHANNELS, head + self.channels.entries)


@dataclass(frozen=True)
class Ephemeral:
    """An #ephemeral channel comes or goes."""

    name: str
    uid: int
    exists: bool

    def encode(self) -> bytes:
        name = self.name.encode()
        return control_frame(frames.EPHEMERAL, _CHANNEL.pack(self.uid, self.exists, len(name)) + name)


@dataclass(frozen=True)
class TopicEmpty:
    """All channels drop everything between the pump and this event's place."""

    def encode(self) -> bytes:
        return control_frame(frames.TOPIC_EMPTY, b"")


@dataclass(frozen=True)
class ChannelProgress:
    """What became of one channel since its last progress.

    `seek` is the log_id of the last seek that the writer had applied: a newer one in the log makes everything here
    stale but the changes to offsets that are deferred already.
    """

    uid: int
    seek: int
    floor: int
    ranges: tuple[Range, ...] = ()
    puts: tuple[tuple[int, int, int], ...] = ()
    finished: tuple[int, ...] = ()
    attempts: tuple[tuple[int, int, int], ...] = ()
    attempts_known: bool = False
    put_back: bool = False

    @property
    def rows(self) -> int:
        """How long its lists are together."""
        return len(self.ranges) + len(self.puts) + len(self.finished) + len(self.attempts)

    def encode(self) -> bytes:
        head = _PROGRESS.pack(
            self.uid,
            self.seek,
            self.floor,
            len(self.ranges),
            len(self.puts),
            len(self.finished),
            len(self.attempts),
            self.attempts_known | self.put_back << 1,
        )
        if not (self.ranges or self.puts or self.finished or self.attempts):
            return head  # an ordered channel waits for it with each message
        return b"".join(
            (
                head,
                pack_ranges(self.ranges),
                b"".join([_PUT.pack(*put) for put in self.puts]),
                struct.pack(f">{len(self.finished)}Q", *self.finished),
                b"".join([_RUN.pack(*run) for run in self.attempts]),
            )
        )


def encode_cursor(uid: int, seek: int, floor: int, ranges: list[Range]) -> bytes:
    """`ChannelProgress(uid, seek, floor, ranges).encode()` in a third of the time."""
    head = _PROGRESS.pack(uid, seek, floor, len(ranges), 0, 0, 0, 0)
    return head + pack_ranges(ranges) if ranges else head


def floor_frame(uid: int, seek: int, floor: int) -> bytes:
    """The frame of a progress that moves the floor of one channel and says nothing else."""
    return _FLOOR.pack(4 + _PROGRESS.size, frames.PROGRESS, uid, seek, floor, 0, 0, 0)


def floor_in(data: bytes | bytearray | memoryview) -> tuple[int, int, int] | None:
    """(uid, seek, floor) of the `floor_frame` at the front of a batch, if no other control frame follows."""
    if len(data) < _FLOOR.size:
        return None
    size, kind, uid, seek, floor, lists, more, flags = _FLOOR.unpack_from(data)
    if size != 4 + _PROGRESS.size or kind != frames.PROGRESS or lists or more or flags:
        return None
    if len(data) > _FLOOR.size and data[_FLOOR.size + 4 : _FLOOR.size + 8] != _MESSAGE:
        return None
    return uid, seek, floor


def cursors_in(
    data: bytes | bytearray | memoryview, at: int, end: int
) -> list[tuple[int, int, int, list[Range]]] | None:
    """(uid, seek, floor, ranges) of the channels in this payload of a PROGRESS frame, if it says nothing else of any.
    None: `decode` has to look."""
    found = []
    try:
        while at < end:
            uid, seek, floor, count, puts, finished, attempts, flags = _PROGRESS.unpack_from(data, at)
            at += _PROGRESS.size
            if puts or finished or attempts or flags or at + count * _RANGE.size > end:
                return None
            ranges: list[Range] = []
            if count:
                before = -1
                for first, after in _RANGE.iter_unpack(data[at : at + count * _RANGE.size]):
                    if not before <= first < after:
                        return None
                    before = after
                    ranges.append((first, after))
                at += count * _RANGE.size
            found.append((uid, seek, floor, ranges))
    except struct.error:
        return None
    return found


def progress_frame(channels: list[bytes]) -> bytes:
    """The frame of a `ProgressEvent` whose channels are encoded already."""
    return control_frame(frames.PROGRESS, b"".join(channels))


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of any number of channels; one frame, so it is applied whole or not at all."""

    channels: tuple[ChannelProgress, ...]

    def encode(self) -> bytes:
        return progress_frame([channel.encode() for channel in self.channels])


@dataclass(frozen=True)
class Seek:
    """Move a channel's cursor. `old_floor` and `old_ranges` are what an undo goes back to (ranges None: too many).

    `undo`: the ranges that the last seek remembered come back with the floor. `forward`: it never goes back.
    """

    uid: int
    target: int
    old_floor: int
    old_ranges: tuple[Range, ...] | None = ()
    drop_deferred: bool = False
    undo: bool = False
    forward: bool = False

    def encode(self) -> bytes:
        ranges = self.old_ranges or ()
        flags = self.drop_deferred | (self.old_ranges is not None) << 1 | self.undo << 2 | self.forward << 3
        head = _SEEK.pack(self.uid, self.target, self.old_floor, flags, len(ranges))
        return control_frame(frames.SEEK, head + pack_ranges(ranges))


@dataclass(frozen=True)
class Carry:
    """A deferred message's frame, appended again so that the segment it came from may go."""

    offset: int
    frame: bytes

    def encode(self) -> bytes:
        return control_frame(frames.CARRY, _U64.pack(self.offset) + self.frame)


@dataclass(frozen=True)
class Abandoned:
    """By explicit policy these messages of a channel (uid 0: those the pump had not passed) go unread."""

    uid: int
    first: int
    end: int


@dataclass(frozen=True)
class LogStart:
    """No channel needs a message below `offset` or a byte below `position` any more."""

    offset: int
    position: int
    abandoned: tuple[Abandoned, ...] = ()

    def encode(self) -> bytes:
        parts = [_LOG_START.pack(self.offset, self.position, len(self.abandoned))]
        parts += [_ABANDONED.pack(a.uid, a.first, a.end) for a in self.abandoned]
        return control_frame(frames.LOG_START, b"".join(parts))


@dataclass(frozen=True)
class CheckpointFrame:
    """A piece of a checkpoint; `as_of` is the last log_id that its snapshot had applied."""

    id: int
    sequence: int
    as_of: int
    last: bool
    body: bytes

    def encode(self) -> bytes:
        head = _CHECKPOINT.pack(self.id, self.sequence, self.last, self.as_of)
        return control_frame(frames.CHECKPOINT, head + self.body)


@dataclass(frozen=True)
class EpochStart:
    """The first batch of a leader; channels that live only with their leader end here."""

    epoch: int
    node: int = 0

    def encode(self) -> bytes:
        return control_frame(frames.EPOCH_START, _EPOCH_START.pack(self.epoch, self.node))


@dataclass(frozen=True)
class LogHold:
    """A reader needs what follows `offset` until `until_ns`; 0: it needs nothing more."""

    id: int
    offset: int
    until_ns: int

    def encode(self) -> bytes:
        return control_frame(frames.HOLD, _HOLD.pack(self.id, self.offset, self.until_ns))


Event = (
    Attributes
    | ChannelsEvent
    | Ephemeral
    | TopicEmpty
    | ProgressEvent
    | Seek
    | Carry
    | LogStart
    | CheckpointFrame
    | EpochStart
    | LogHold
)  # fmt: skip


def decode(frame_type: int, payload: bytes, listed: Callable[[], Listing] = Listing) -> Event | None:
    """The event in a control frame; None for a type that may be skipped. LogCorrupt if it does not fit. `listed`: the
    channels of an earlier event, most of which a CHANNELS frame will have again."""
    decoder = _DECODERS.get(frame_type)
    if decoder is None:
        if frame_type >= frames.SKIPPABLE_MIN:
            return None
        raise LogCorrupt(f"a frame of type {frame_type}, which this version does not know: a newer one wrote this log")
    reader = Reader(payload)
    try:
        event = decoder(reader) if decoder is not _channels else _channels(reader, listed())
    except (struct.error, UnicodeDecodeError) as error:
        raise LogCorrupt(f"a control frame of type {frame_type} does not decode: {error}") from None
    if reader.left:
        raise LogCorrupt(f"a control frame of type {frame_type} has {reader.left} bytes too many")
    return event


def deliver_at_in(data: bytes | bytearray | memoryview, first_offset: int) -> dict[int, int]:
    """offset -> deliver-at time of the messages in this batch, or run of batches, that have one."""
    found: dict[int, int] = {}
    offset, at, end = first_offset, 0, len(data)
    while at + frames.HEAD.size <= end:
        size, frame_type = frames.HEAD.unpack_from(data, at)
        if frame_type == frames.MESSAGE:
            at, count = hot.walk(data, at, end, end)
            if not count:
                break
            offset += count
            continue
        if frame_type == frames.ATTRIBUTES:
            covers, deliver_at_ns, _ = _ATTRIBUTES.unpack_from(data, at + frames.HEAD.size)
            if deliver_at_ns:
                covers = min(covers, end // hot.HEADER)  # no more messages than that fit
                found.update(dict.fromkeys(range(offset, offset + covers), deliver_at_ns))
        at += 4 + size
    return found


class Reader:
    """Walks a payload; struct.error where it ends too early."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        values: tuple[int, ...] = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def peek(self) -> int:
        """The next byte."""
        return self._data[self._at]

    def raw(self, size: int) -> bytes:
        if size > self.left:
            raise struct.error(f"{size} bytes announced, {self.left} left")
        self._at += size
        return self._data[self._at - size : self._at]

    def rows(self, layout: struct.Struct, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(layout.iter_unpack(self.raw(count * layout.size)))

    def ranges(self, count: int) -> tuple[Range, ...]:
        rows = self.rows(_RANGE, count)
        end = -1
        for first, after in rows:
            if not end <= first < after:
                raise struct.error("ranges are not in order")
            end = after
        return rows  # type: ignore[return-value]


def pack_ranges(ranges: tuple[Range, ...] | list[Range]) -> bytes:
    """Ranges as pairs of u64."""
    return b"".join([_RANGE.pack(first, end) for first, end in ranges])


def _attributes(reader: Reader) -> Attributes:
    covers, deliver_at_ns, count = reader.take(_ATTRIBUTES)
    headers = []
    for _ in range(count):
        key = reader.raw(int.from_bytes(reader.raw(2)))
        headers.append((key, reader.raw(int.from_bytes(reader.raw(4)))))
    return Attributes(covers, deliver_at_ns, tuple(headers))


def _channels(reader: Reader, known: Listing = NO_CHANNELS) -> ChannelsEvent:
    version, paused, count = reader.take(_CHANNELS)
    return ChannelsEvent(version, bool(paused), Listing.read(reader.raw(reader.left), count, known))


def _ephemeral(reader: Reader) -> Ephemeral:
    uid, exists, size = reader.take(_CHANNEL)
    return Ephemeral(reader.raw(size).decode(), uid, bool(exists))


def _progress(reader: Reader) -> ProgressEvent:
    channels = []
    while reader.left:
        uid, seek, floor, ranges, puts, finished, attempts, flags = reader.take(_PROGRESS)
        channels.append(
            ChannelProgress(
                uid,
                seek,
                floor,
                reader.ranges(ranges) if ranges else (),
                reader.rows(_PUT, puts) if puts else (),  # type: ignore[arg-type]
                tuple(offset for (offset,) in reader.rows(_U64, finished)) if finished else (),
                reader.rows(_RUN, attempts) if attempts else (),  # type: ignore[arg-type]
                bool(flags & 1),
                bool(flags & 2),
            )
        )
    return ProgressEvent(tuple(channels))


def _seek(reader: Reader) -> Seek:
    uid, target, old_floor, flags, count = reader.take(_SEEK)
    ranges = reader.ranges(count)
    old_ranges = ranges if flags & 2 else None
    return Seek(uid, target, old_floor, old_ranges, bool(flags & 1), bool(flags & 4), bool(flags & 8))


def _carry(reader: Reader) -> Carry:
    (offset,) = reader.take(_U64)
    return Carry(offset, reader.raw(reader.left))


def _log_start(reader: Reader) -> LogStart:
    offset, position, count = reader.take(_LOG_START)
    return LogStart(offset, position, tuple(Abandoned(*row) for row in reader.rows(_ABANDONED, count)))


def _checkpoint(reader: Reader) -> CheckpointFrame:
    id_, sequence, last, as_of = reader.take(_CHECKPOINT)
    return CheckpointFrame(id_, sequence, as_of, bool(last), reader.raw(reader.left))


def _epoch_start(reader: Reader) -> EpochStart:
    epoch, node = reader.take(_EPOCH_START)
    return EpochStart(epoch, node)


def _hold(reader: Reader) -> LogHold:
    id_, offset, until_ns = reader.take(_HOLD)
    return LogHold(id_, offset, until_ns)


_DECODERS: Mapping[int, Callable[[Reader], Event]] = {
    frames.ATTRIBUTES: _attributes,
    frames.CHANNELS: _channels,
    frames.EPHEMERAL: _ephemeral,
    frames.TOPIC_EMPTY: lambda reader: TopicEmpty(),
    frames.PROGRESS: _progress,
    frames.SEEK: _seek,
    frames.CARRY: _carry,
    frames.LOG_START: _log_start,
    frames.CHECKPOINT: _checkpoint,
    frames.EPOCH_START: _epoch_start,
    frames.HOLD: _hold,
}
