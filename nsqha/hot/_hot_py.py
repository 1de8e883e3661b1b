"""The pure-Python twin of `_hot.pyx`, and the description of what both do.

It is fast where bytes methods are: traffic is mostly runs of messages of one size, and those are found and handled by
whole columns. If frames of `stride` bytes follow each other, byte i of all their headers is the slice
`data[pos + i :: stride]`: one call compares or writes it for thousands of frames. Mixed sizes take a plain loop.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, TypeVar

__all__ = [
    "DEFERRED",
    "FINISHED",
    "FREE",
    "HEADER",
    "IN_FLIGHT",
    "SINGLE",
    "SPAN_MAX",
    "WAITING",
    "Ring",
    "copied_entry",
    "crc32",
    "fins_end",
    "frame",
    "mpub_body",
    "next_entry",
    "patch_attempts",
    "pub_run",
    "skip_control",
    "stamp",
    "walk",
]

T = TypeVar("T", bound=tuple[int, ...])

HEADER: Final = 34
SIZE_MAX = 2**31 - 1
"""NSQ's lengths are signed; below it `30 + size` fits the frame's size field whatever limit is configured."""

MESSAGE = 2
CONTROL = 16

_SIZE_TYPE = struct.Struct(">II")
_SIZE = struct.Struct(">I")
_BLANK = struct.Struct(">IIqH16s")
_CONSTANT = struct.Struct(">qH13s")
_STAMP = struct.Struct("23s3s")
_LINKED = struct.Struct(">QQQQQQIIIIHH")  # the chain before, and what the chain covers
_LONG = struct.Struct(">Q")
_ENTRY = struct.Struct(">QQQQQIIIIHHQQI")
_PLACE_END = 1 << 62  # of log ids, offsets and positions
_TIME_END = 1 << 63
_NO_FRAME = (0, 0)
_ID_LIMIT = 2**64

# A run is probed with this many frames first and eight times as many each time all of them match, so that finding
# runs examines each frame a bounded number of times whatever the sizes are.
_PROBE = 32

# Ids are consecutive, so within a block of 4096 only the last three of their 16 digits change.
_BLOCK = 4096
_LAST_DIGITS = [b"%03x" % n for n in range(_BLOCK)]
_LAST_COLUMNS = [bytes(digits[i] for digits in _LAST_DIGITS) for i in range(3)]

# No blank, CR or newline in the id: such a line means something else to the protocol.
_FIN_LINES = re.compile(rb"(?:FIN [^ \r\n]{16}\n)*+").match
_FIN_HEX_LINES = re.compile(rb"(?:FIN [0-9a-f]{16}\n)*+").match


def _outside(data: Any, pos: int, end: int) -> ValueError:
    return ValueError(f"[{pos}, {end}) is not within a buffer of {len(data)} bytes")


def _repeats(data: Any, pos: int, stride: int, count_max: int, mark: bytes) -> int:
    """How many times in a row from `pos`, at most `count_max`, `mark` is found every `stride` bytes."""
    found = 0
    probe = _PROBE
    while True:
        count = fitting = min(probe, count_max - found)
        for i in range(len(mark)):
            column = bytes(data[pos + i : pos + count * stride : stride])
            count = len(column) - len(column.lstrip(mark[i : i + 1]))
        found += count
        if count < fitting or found == count_max:
            return found
        pos += count * stride
        probe *= 8


# Commands to frames


def frame(body: bytes) -> bytes:
    """Make one message frame with blank id and timestamp."""
    if len(body) > SIZE_MAX:
        raise ValueError("body too large for a frame")
    return _blank(len(body)) + body


@lru_cache(maxsize=1024)
def _blank(size: int) -> bytes:
    """The header of a message of `size` bytes before it is stamped."""
    return _BLANK.pack(30 + size, MESSAGE, 0, 1, bytes(16))


@lru_cache(maxsize=256)
def _command(prefix_size: int) -> Callable[[bytes, int], tuple[bytes, int]]:
    """A function that splits the bytes before a body into prefix and size."""
    return struct.Struct(f">{prefix_size}sI").unpack_from


def pub_run(data: bytes, pos: int, end: int, prefix: bytes, size_max: int) -> tuple[int, int, bytes]:
    """Take the complete commands `prefix` + u32 size + body, 0 < size <= size_max, that start at `pos`.

    Returns where they end, how many they are, and their message frames with blank id and timestamp. Stops before the
    first that is incomplete, different or of a bad size.
    """
    if not 0 <= pos <= end <= len(data):
        raise _outside(data, pos, end)
    return _reframe(data, pos, end, prefix, size_max, end - pos)


def mpub_body(data: bytes, pos: int, end: int, size_max: int) -> tuple[int, bytes] | None:
    """Take `i32 count` and that many times `i32 size, body` from `pos`; None if anything is wrong.

    As in nsqd the parts determine where the body ends: bytes left before `end` are ignored. The number of bytes taken
    is `4 + len(frames) - 30 * count`.
    """
    if not 0 <= pos <= end <= len(data):
        raise _outside(data, pos, end)
    if end - pos < 4:
        return None
    wanted: int = _SIZE.unpack_from(data, pos)[0]
    if wanted == 0 or wanted > (end - pos - 4) // 5:
        return None
    _, count, frames = _reframe(data, pos + 4, end, b"", size_max, wanted)
    return (count, frames) if count == wanted else None


def _reframe(data: bytes, pos: int, end: int, prefix: bytes, size_max: int, count_max: int) -> tuple[int, int, bytes]:
    size_max = min(size_max, SIZE_MAX)
    lead = len(prefix) + 4
    last = end - lead  # a command starts below it or is incomplete
    command = _command(len(prefix))
    parts: list[bytes] = []
    singles: list[bytes] = []  # bodies not in `parts` yet
    count = 0
    previous = 0
    while pos < last and count < count_max:
        name, size = command(data, pos)
        body = pos + lead
        after = body + size
        if name != prefix or after > end or not 0 < size <= size_max:
            break
        if size != previous:
            singles.append(data[body:after])
            previous = size
            pos = after
            count += 1
            continue
        # The second one of the same size in a row: most likely many follow.
        stride = after - pos
        n = _repeats(data, pos, stride, min((end - pos) // stride, count_max - count), data[pos:body])
        run = memoryview(data)[pos : pos + n * stride]
        bodies = [each for (each,) in struct.iter_unpack(f"{lead}x{size}s", run)]
        parts += (_frames(singles), _blank(size), _blank(size).join(bodies))
        singles.clear()
        pos += n * stride
        count += n
    if not parts:
        return pos, count, _frames(singles)
    parts.append(_frames(singles))
    return pos, count, b"".join(parts)


def _frames(bodies: list[bytes]) -> bytes:
    if len(bodies) == 1:
        return _blank(len(bodies[0])) + bodies[0]
    return b"".join(chain.from_iterable(zip(map(_blank, map(len, bodies)), bodies, strict=False)))


# Frames of a batch


def _message_starts(batch: bytearray, pos: int) -> list[list[int] | range]:
    """Where the message frames from `pos` to the end start, in order: runs of one size as ranges, others in lists."""
    end = len(batch)
    unpack = _SIZE_TYPE.unpack_from
    singles: list[int] = []
    starts: list[list[int] | range] = [singles]
    previous = 0
    while pos < end:
        size, kind = unpack(batch, pos) if end - pos >= 8 else _NO_FRAME
        after = pos + 4 + size
        if kind != MESSAGE or size < 30 or after > end:
            pos = _after_control(kind, pos, after, end)
        elif size != previous:
            singles.append(pos)
            previous = size
            pos = after
        else:
            stride = after - pos
            after = pos + stride * _repeats(batch, pos, stride, (end - pos) // stride, bytes(batch[pos : pos + 8]))
            singles = []
            starts += (range(pos, after, stride), singles)
            pos = after
    return starts


def _after_control(kind: int, pos: int, after: int, end: int) -> int:
    """Return `after` if a whole control frame begins at `pos`; ValueError otherwise."""
    if kind < CONTROL or not pos + 8 <= after <= end:
        raise ValueError(f"no frame at {pos}, or it is cut off")
    return after


def stamp(batch: bytearray, pos: int, id_value: int, timestamp_ns: int) -> int:
    """Write the timestamp and the ids id_value, id_value + 1, ... into the message frames from `pos` to the end.

    Control frames are skipped. Attempts become 1. Returns the number of message frames. ValueError, and nothing
    written, if the frames do not tile the buffer or an id would not fit 64 bits.
    """
    if not 0 <= pos <= len(batch):
        raise _outside(batch, pos, len(batch))
    if not 0 <= id_value < _ID_LIMIT or not -(2**63) <= timestamp_ns < 2**63:
        raise OverflowError("id or timestamp does not fit 64 bits")
    starts = _message_starts(batch, pos)
    count = sum(map(len, starts))
    if count > _ID_LIMIT - id_value:
        raise ValueError("ids do not fit 64 bits")
    pack_into = _STAMP.pack_into
    constant = b""
    for some in starts:
        if isinstance(some, range):
            _stamp_columns(batch, some, id_value, timestamp_ns)
            id_value += len(some)
            constant = b""
            continue
        for at in some:
            in_block = id_value % _BLOCK
            if not in_block or not constant:
                constant = _CONSTANT.pack(timestamp_ns, 1, b"%013x" % (id_value // _BLOCK))
            pack_into(batch, at + 8, constant, _LAST_DIGITS[in_block])
            id_value += 1
    return count


def _stamp_columns(batch: bytearray, starts: range, id_value: int, timestamp_ns: int) -> None:
    """Stamp frames of one size column by column, block of ids by block of ids."""
    stride = starts.step
    while starts:
        in_block = id_value % _BLOCK
        now, starts = starts[: _BLOCK - in_block], starts[_BLOCK - in_block :]
        n, first, end = len(now), now.start, now.stop
        constant = _CONSTANT.pack(timestamp_ns, 1, b"%013x" % (id_value // _BLOCK))
        for column, byte in enumerate(constant, start=first + 8):
            batch[column:end:stride] = bytes((byte,)) * n
        for column, digits in enumerate(_LAST_COLUMNS, start=first + 31):
            batch[column:end:stride] = digits[in_block : in_block + n]
        id_value += n


def walk(data: Any, pos: int, end: int, count_max: int) -> tuple[int, int]:
    """Step over message frames, at most `count_max`, up to a control frame or `end`: (new position, how many).

    The frames have been verified before; ValueError if they are not frames or if one goes past `end`.
    """
    if not 0 <= pos <= end <= len(data):
        raise _outside(data, pos, end)
    unpack = _SIZE_TYPE.unpack_from
    count = 0
    previous = 0
    while pos < end and count < count_max:
        size, kind = unpack(data, pos) if end - pos >= 8 else _NO_FRAME
        after = pos + 4 + size
        if kind != MESSAGE or size < 30 or after > end:
            _after_control(kind, pos, after, end)
            break
        if size != previous:
            previous = size
            pos = after
            count += 1
        else:
            stride = after - pos
            n = _repeats(data, pos, stride, min((end - pos) // stride, count_max - count), bytes(data[pos : pos + 8]))
            pos += n * stride
            count += n
    return pos, count


def skip_control(data: Any, pos: int, end: int) -> int:
    """Step over control frames up to a message frame or `end`; ValueError as in `walk`."""
    if not 0 <= pos <= end <= len(data):
        raise _outside(data, pos, end)
    while pos < end:
        size, kind = _SIZE_TYPE.unpack_from(data, pos) if end - pos >= 8 else _NO_FRAME
        after = pos + 4 + size
        if kind == MESSAGE and size >= 30 and after <= end:
            break
        pos = _after_control(kind, pos, after, end)
    return pos


def patch_attempts(frame: Any, attempts: int) -> bytes:
    """A copy of one whole message frame with another number of attempts."""
    if len(frame) < HEADER or _SIZE_TYPE.unpack_from(frame) != (len(frame) - 4, MESSAGE):
        raise ValueError("not one whole message frame")
    return b"".join((frame[:16], attempts.to_bytes(2), frame[18:]))


# Checksum


def crc32(data: Any) -> int:
    """CRC-32 of the bytes of any buffer."""
    return zlib.crc32(data)


def next_entry(
    cls: type[T],
    previous: tuple[int, ...],
    data: bytes | bytearray,
    count: int,
    flags: int,
    timestamp_ns: int,
    epoch: int,
    durable: int,
) -> tuple[T, bytes]:
    """The commitlog entry of a batch that follows `previous`, a `cls`, and its bytes: `commitlog.entry` says what they
    are. OverflowError if a number has no room in its field."""
    log_id, _, offset, position, _, previous_count, previous_size, _, _, _, _, chain, _ = previous
    log_id += 1
    offset += previous_count
    position += previous_size
    size, crc = len(data), zlib.crc32(data)
    fields = (log_id, epoch, offset, position, timestamp_ns, count, size, crc, flags, 1, 1)
    try:
        linked = _LINKED.pack(chain, *fields)
        digest = hashlib.blake2b(linked, digest_size=8).digest()
        head = linked[8:] + digest + _LONG.pack(durable)
    except struct.error as error:
        raise OverflowError(str(error)) from None
    entry = tuple.__new__(cls, (*fields, int.from_bytes(digest, "big"), durable))
    return entry, head + _SIZE.pack(zlib.crc32(head))


def copied_entry(cls: type[T], previous: tuple[int, ...], raw: bytes, data: bytes | bytearray, odd: int) -> T | None:
    """The entry in `raw`, a `cls`, if it is sound, has none of the flags `odd`, follows `previous` in every respect,
    and `data` is what it describes. None: something of that is not so, and `commitlog.entry` says what."""
    last_id, last_epoch, offset, position, timestamp_ns, count, size, _, _, _, _, chain, _ = previous
    if len(raw) != _ENTRY.size:
        return None
    fields = _ENTRY.unpack(raw)
    if fields[-1] != zlib.crc32(raw[: _ENTRY.size - _SIZE.size]) or fields[8] & odd or fields[9:11] != (1, 1):
        return None
    if max(fields[0], fields[2], fields[3]) >= _PLACE_END or fields[4] >= _TIME_END:
        return None
    if (fields[0], *fields[2:4]) != (last_id + 1, offset + count, position + size):
        return None
    if fields[4] < timestamp_ns or fields[1] < last_epoch:
        return None
    if len(data) != fields[6] or zlib.crc32(data) != fields[7]:
        return None
    digest = hashlib.blake2b(_LINKED.pack(chain, *fields[:11]), digest_size=8).digest()
    if int.from_bytes(digest, "big") != fields[11]:
        return None
    return tuple.__new__(cls, fields[:-1])


# In flight


def fins_end(data: bytes, pos: int, end: int) -> int:
    """Where the run of complete lines `FIN <16 bytes>` + newline that starts at `pos` ends (21 bytes each).

    A line whose id has a blank, CR or newline is not one of them: the protocol would split it otherwise.
    """
    if not 0 <= pos <= end <= len(data):
        raise _outside(data, pos, end)
    return _FIN_LINES(data, pos, end).end()  # type: ignore[union-attr]  # matches the empty run, too


FREE: Final = 0
IN_FLIGHT: Final = 1
FINISHED: Final = 2
SINGLE: Final = 3
WAITING: Final = 4
DEFERRED: Final = 5

SPAN_MAX: Final = 1 << 26
"""The largest number of slots of one ring: 200 MB. Channels stop delivering at their window, far below."""

_SETTLED_SLOTS = re.compile(b"[\x02\x05]*+").match
_FINISHED_SLOTS = re.compile(b"\x02++").finditer
_IN_FLIGHT_SLOTS = re.compile(b"\x01").finditer


class Ring:
    """The states of delivered messages: one state byte and one owner per offset of [low, next).

    `next` is the end of what was delivered. `low` is the highest offset below which all is settled (finished or
    deferred): a slot at `low` is not settled, every change moves `low` as far as possible. Three bytes per slot.

    IN_FLIGHT is a delivery whose deadline is that of its range; SINGLE one with a deadline of its own; WAITING awaits
    redelivery. The channel defines what else SINGLE, WAITING and DEFERRED mean.

    The owner of a slot is what `deliver` or `set` gave it, 0 after `settle` or in a gap.
    """

    FREE: Final = 0
    IN_FLIGHT: Final = 1
    FINISHED: Final = 2
    SINGLE: Final = 3
    WAITING: Final = 4
    DEFERRED: Final = 5

    __slots__ = ("_owners", "_states", "low", "next")

    def __init__(self, low: int) -> None:
        self.reset(low)

    def reset(self, low: int) -> None:
        """Become an empty ring whose `next` is `low`."""
        if low < 0:
            raise ValueError(f"offset {low} is negative")
        # Both grow at the end and lose their front, which a bytearray does without moving the rest.
        self._states = bytearray()
        self._owners = bytearray()
        self.low = low
        self.next = low

    def deliver(self, first: int, end: int, owner: int) -> None:
        """Mark [first, end) as in flight to `owner`, and [next, first), which was passed over, as finished."""
        if not self.next <= first <= end:
            raise ValueError(f"deliver [{first}, {end}) to a ring whose next is {self.next}")
        owner_bytes = owner.to_bytes(2)
        if first == end:
            return
        low = self.low if self.low < self.next else first
        if end - low > SPAN_MAX:
            raise ValueError(f"a ring can not span {end - low} slots")
        if first > self.next:
            if low == first:
                self.low = first  # an empty ring passes over any distance
            else:
                self._extend(first, FINISHED)
        self._states += b"\x01" * (end - first)
        self._owners += owner_bytes * (end - first)
        self.next = end

    def settle(self, first: int, end: int, state: int) -> None:
        """Mark [first, end) as FINISHED or DEFERRED; `next` moves up to `end`, and offsets between are finished."""
        if state not in (FINISHED, DEFERRED):
            raise ValueError(f"state {state} does not settle")
        first = max(first, self.low)
        if first >= end:
            return
        if first == self.low and end >= self.next:
            self.reset(end)
            return
        if end - self.low > SPAN_MAX:
            raise ValueError(f"a ring can not span {end - self.low} slots")
        a, b = first - self.low, min(end, self.next) - self.low
        if a < b:
            self._states[a:b] = bytes((state,)) * (b - a)
            self._owners[2 * a : 2 * b] = bytes(2 * (b - a))
        self._extend(first, FINISHED)
        self._extend(end, state)
        self._advance()

    def fin_run(self, data: bytes, pos: int, end: int, id_base: int, owner: int) -> tuple[int, int]:
        """Finish the messages of the complete lines `FIN <16 lowercase hex>` + newline that start at `pos`.

        Stops before the first that is something else, or whose offset (its id - id_base) is not IN_FLIGHT of `owner`.
        Returns the new position and how many were finished.
        """
        if not 0 <= pos <= end <= len(data):
            raise _outside(data, pos, end)
        owner_bytes = owner.to_bytes(2)
        if not 0 <= id_base < _ID_LIMIT:
            raise OverflowError("id base does not fit 64 bits")
        stop = _FIN_HEX_LINES(data, pos, end).end()  # type: ignore[union-attr]  # matches the empty run, too
        n = (stop - pos) // 21
        ids: Sequence[int]
        if n < 4:
            # Clients that answer message by message send no runs.
            ids = [int(data[at + 4 : at + 20], 16) for at in range(pos, stop, 21)]
        else:
            ids = struct.unpack(f">{n}Q", bytes.fromhex(data[pos:stop].translate(None, b"FIN \n").decode()))
            a = ids[0] - id_base - self.low
            if (
                a >= 0
                and self._states[a : a + n] == b"\x01" * n
                and self._owners[2 * a : 2 * (a + n)] == owner_bytes * n
                and ids == tuple(range(ids[0], ids[0] + n))
            ):
                self._states[a : a + n] = b"\x02" * n
                self._advance()
                return stop, n
        n = self._fin_each(ids, id_base + self.low, *owner_bytes)
        self._advance()
        return pos + 21 * n, n

    def _fin_each(self, ids: Sequence[int], base: int, owner_high: int, owner_low: int) -> int:
        states, owners = self._states, self._owners
        span = len(states)
        count = 0
        for number in ids:
            i = number - base
            if not 0 <= i < span or states[i] != 1 or owners[2 * i + 1] != owner_low or owners[2 * i] != owner_high:
                break
            states[i] = 2
            count += 1
        return count

    def get(self, offset: int) -> int:
        """The state of `offset`; FREE outside [low, next)."""
        return self._states[offset - self.low] if self.low <= offset < self.next else FREE

    def owner(self, offset: int) -> int:
        """The owner of `offset`; 0 outside [low, next)."""
        if not self.low <= offset < self.next:
            return 0
        i = 2 * (offset - self.low)
        return int.from_bytes(self._owners[i : i + 2])

    def set(self, offset: int, state: int, owner: int = 0) -> None:
        """Give one offset of [low, next) a state and an owner."""
        if not self.low <= offset < self.next:
            raise ValueError(f"offset {offset} is outside [{self.low}, {self.next})")
        if not FREE <= state <= DEFERRED:
            raise ValueError(f"no state {state}")
        i = offset - self.low
        self._owners[2 * i : 2 * i + 2] = owner.to_bytes(2)
        self._states[i] = state
        self._advance()

    def expire(self, first: int, end: int, owner: int) -> list[int]:
        """Set offsets of [first, end) that are still IN_FLIGHT of `owner` to WAITING; returns those offsets."""
        found = self._in_flight(first, end, owner)
        for offset in found:
            self._states[offset - self.low] = WAITING
        return found

    def owned(self, owner: int) -> list[int]:
        """The offsets that are IN_FLIGHT of `owner`."""
        return self._in_flight(self.low, self.next, owner)

    def _in_flight(self, first: int, end: int, owner: int) -> list[int]:
        owner_bytes = owner.to_bytes(2)
        low, owners = self.low, self._owners
        a, b = max(first - low, 0), max(end - low, 0)
        found = (match.start() for match in _IN_FLIGHT_SLOTS(self._states, a, b))
        return [low + i for i in found if owners[2 * i : 2 * i + 2] == owner_bytes]

    def unfinished(self, first: int, end: int) -> int:
        """The number of offsets of [first, end) that are neither finished nor deferred, also at or above `next`."""
        first = max(first, self.low)
        if first >= end:
            return 0
        a, b = first - self.low, end - self.low
        states = self._states
        return end - first - states.count(FINISHED, a, b) - states.count(DEFERRED, a, b)

    def finished_ranges(self, first: int, end: int) -> list[tuple[int, int]]:
        """The maximal runs of FINISHED slots within [first, end) and [low, next)."""
        low = self.low
        a, b = max(first - low, 0), max(end - low, 0)
        return [(low + match.start(), low + match.end()) for match in _FINISHED_SLOTS(self._states, a, b)]

    def _extend(self, end: int, state: int) -> None:
        """Add slots without an owner up to `end`, unless they exist."""
        if end > self.next:
            self._states += bytes((state,)) * (end - self.next)
            self._owners += bytes(2 * (end - self.next))
            self.next = end

    def _advance(self) -> None:
        states = self._states
        if states and (states[0] == FINISHED or states[0] == DEFERRED):
            n: int = _SETTLED_SLOTS(states).end()  # type: ignore[union-attr]  # matches the empty run, too
            del states[:n]
            del self._owners[: 2 * n]
            self.low += n

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sys.getsizeof(self._states) + sys.getsizeof(self._owners)

    def __repr__(self) -> str:
        return f"Ring(low={self.low}, next={self.next}, unfinished={self.unfinished(self.low, self.next)})"
