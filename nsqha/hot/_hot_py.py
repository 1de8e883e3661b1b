"""The pure-Python twin of `_hot.pyx`, and the description of what both do.

It is fast where bytes methods are: traffic is mostly runs of messages of one size, and those are found and handled by
whole columns. If frames of `stride` bytes follow each other, byte i of all their headers is the slice
`data[pos + i :: stride]`: one call compares or writes it for thousands of frames. Mixed sizes take a plain loop.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from typing import Any, Final
from zlib import crc32

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
    "crc32",
    "fins_end",
    "frame",
    "mpub_body",
    "patch_attempts",
    "pub_run",
    "skip_control",
    "stamp",
    "walk",
]

HEADER: Final = 34
SIZE_MAX = 2**31 - 1
"""NSQ's lengths are signed; below it `30 + size` fits the frame's size field whatever limit is configured."""

MESSAGE = 2
CONTROL = 16

_SIZE_TYPE = struct.Struct(">II")
_SIZE = struct.Struct(">I")
_ATTEMPTS = struct.Struct(">H")
_BLANK = struct.Struct(">IIqH16s")
_STAMP = struct.Struct(">qH13s3s")
_ID_LIMIT = 2**64

# A run is probed with this many frames first and eight times as many each time all of them match, so that finding
# runs costs a bounded number of looks at each frame whatever the sizes are.
_PROBE = 32

# Ids are consecutive, so within a block of 4096 only the last three of their 16 digits change.
_BLOCK = 4096
_LAST_DIGITS = [b"%03x" % n for n in range(_BLOCK)]
_LAST_COLUMNS = [bytes(digits[i] for digits in _LAST_DIGITS) for i in range(3)]

# No blank, CR or newline in the id: such a line means something else to the protocol.
_FIN_LINES = re.compile(rb"(?:FIN [^ \r\n]{16}\n)*+").match
_FIN_HEX_LINES = re.compile(rb"(?:FIN [0-9a-f]{16}\n)*+").match


def _check(data: Any, pos: int, end: int) -> None:
    if not 0 <= pos <= end <= len(data):
        raise ValueError(f"[{pos}, {end}) is not within a buffer of {len(data)} bytes")


def _repeats(data: Any, pos: int, stride: int, count: int, mark: bytes) -> int:
    """How many times in a row from `pos`, at most `count`, `mark` stands every `stride` bytes."""
    for i in range(len(mark)):
        column = bytes(data[pos + i : pos + count * stride : stride])
        count = len(column) - len(column.lstrip(mark[i : i + 1]))
    return count


# Commands to frames


def frame(body: bytes) -> bytes:
    """One message frame with blank id and timestamp."""
    if len(body) > SIZE_MAX:
        raise ValueError("body too large for a frame")
    return _blank(len(body)) + body


def _blank(size: int) -> bytes:
    return _BLANK.pack(30 + size, MESSAGE, 0, 1, bytes(16))


def pub_run(data: bytes, pos: int, end: int, prefix: bytes, size_max: int) -> tuple[int, int, bytes]:
    """Take the complete commands `prefix` + u32 size + body, 0 < size <= size_max, that start at `pos`.

    Returns where they end, how many they are, and their message frames with blank id and timestamp. Stops before the
    first that is incomplete, different or of a bad size.
    """
    _check(data, pos, end)
    return _reframe(data, pos, end, prefix, size_max, end - pos)


def mpub_body(data: bytes, pos: int, end: int, size_max: int) -> tuple[int, bytes] | None:
    """Take `i32 count` and that many times `i32 size, body` from `pos`; None if anything is wrong.

    As in nsqd the parts say where the body ends: what is left before `end` is not looked at. The number of bytes taken
    is `4 + len(frames) - 30 * count`.
    """
    _check(data, pos, end)
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
    size_at = len(prefix)
    size_of = _SIZE.unpack_from
    blanks: dict[int, bytes] = {}
    parts: list[bytes] = []
    count = 0
    previous = -1
    probe = _PROBE
    while count < count_max and end - pos > lead and data.startswith(prefix, pos):
        size: int = size_of(data, pos + size_at)[0]
        body = pos + lead
        if not 0 < size <= size_max or size > end - body:
            break
        blank = blanks.get(size)
        if blank is None:
            blank = blanks[size] = _blank(size)
        if size != previous:
            parts += (blank, data[body : body + size])
            pos = body + size
            count += 1
            previous = size
            probe = _PROBE
            continue
        stride = lead + size
        fitting = min(probe, (end - pos) // stride, count_max - count)
        n = _repeats(data, pos, stride, fitting, data[pos:body])
        bodies = [b for (b,) in struct.iter_unpack(f"{lead}x{size}s", memoryview(data)[pos : pos + n * stride])]
        parts += (blank, blank.join(bodies))
        pos += n * stride
        count += n
        probe *= 8
        if n < fitting:
            previous = -1
    return pos, count, b"".join(parts)


# Frames of a batch


def _runs(data: Any, pos: int, end: int, count_max: int) -> Iterator[tuple[int, int, int, int]]:
    """The frames that tile [pos, end), at most `count_max`, as runs (position, frame type, stride, count)."""
    unpack = _SIZE_TYPE.unpack_from
    previous = (-1, -1)
    probe = _PROBE
    while pos < end and count_max > 0:
        if end - pos < 8:
            raise ValueError(f"a frame is cut off at {pos}")
        header: tuple[int, int] = unpack(data, pos)
        size, kind = header
        stride = 4 + size
        if stride > end - pos:
            raise ValueError(f"a frame is cut off at {pos}")
        if size < (30 if kind == MESSAGE else 4) or (kind < CONTROL and kind != MESSAGE):
            raise ValueError(f"no frame at {pos}: size {size}, type {kind}")
        count = 1
        if header == previous:
            fitting = min(probe, (end - pos) // stride, count_max)
            count = _repeats(data, pos, stride, fitting, _SIZE_TYPE.pack(size, kind))
            probe *= 8
        else:
            previous = header
            probe = _PROBE
        yield pos, kind, stride, count
        pos += count * stride
        count_max -= count


def stamp(batch: bytearray, pos: int, id_value: int, timestamp_ns: int) -> int:
    """Write the timestamp and the ids id_value, id_value + 1, ... into the message frames from `pos` to the end.

    Control frames are skipped. Attempts become 1. Returns the number of message frames. ValueError, and nothing
    written, if the frames do not tile the buffer or an id would not fit 64 bits.
    """
    end = len(batch)
    _check(batch, pos, end)
    if not 0 <= id_value < _ID_LIMIT or not -(2**63) <= timestamp_ns < 2**63:
        raise OverflowError("id or timestamp does not fit 64 bits")
    runs = [(at, stride, n) for at, kind, stride, n in _runs(batch, pos, end, end) if kind == MESSAGE]
    count = sum(n for _, _, n in runs)
    if count > _ID_LIMIT - id_value:
        raise ValueError("ids do not fit 64 bits")
    pack_into = _STAMP.pack_into
    block = -1
    first_digits = b""
    for at, stride, n in runs:
        if n == 1:
            if id_value // _BLOCK != block:
                block = id_value // _BLOCK
                first_digits = b"%013x" % block
            pack_into(batch, at + 8, timestamp_ns, 1, first_digits, _LAST_DIGITS[id_value % _BLOCK])
        else:
            _stamp_run(batch, at, stride, n, id_value, timestamp_ns)
        id_value += n
    return count


def _stamp_run(batch: bytearray, pos: int, stride: int, count: int, id_value: int, timestamp_ns: int) -> None:
    """Stamp `count` frames of one size, column by column, block of ids by block of ids."""
    while count:
        last = id_value % _BLOCK
        n = min(count, _BLOCK - last)
        end = pos + n * stride
        constant = _STAMP.pack(timestamp_ns, 1, b"%013x" % (id_value // _BLOCK), b"")[:-3]
        for i in range(len(constant)):
            batch[pos + 8 + i : end : stride] = constant[i : i + 1] * n
        for i, column in enumerate(_LAST_COLUMNS, start=31):
            batch[pos + i : end : stride] = column[last : last + n]
        pos, id_value, count = end, id_value + n, count - n


def walk(data: Any, pos: int, end: int, count_max: int) -> tuple[int, int]:
    """Step over message frames, at most `count_max`, up to a control frame or `end`: (new position, how many).

    The frames have been verified before; ValueError if they are not frames or if one goes past `end`.
    """
    _check(data, pos, end)
    count = 0
    for _, kind, stride, n in _runs(data, pos, end, count_max):
        if kind != MESSAGE:
            break
        pos += n * stride
        count += n
    return pos, count


def skip_control(data: Any, pos: int, end: int) -> int:
    """Step over control frames up to a message frame or `end`; ValueError as in `walk`."""
    _check(data, pos, end)
    for _, kind, stride, n in _runs(data, pos, end, end):
        if kind == MESSAGE:
            break
        pos += n * stride
    return pos


def patch_attempts(frame: Any, attempts: int) -> bytes:
    """A copy of one whole message frame with another number of attempts."""
    if not 0 <= attempts <= 0xFFFF:
        raise ValueError(f"attempts {attempts} does not fit 16 bits")
    if len(frame) < HEADER or _SIZE_TYPE.unpack_from(frame) != (len(frame) - 4, MESSAGE):
        raise ValueError("not one whole message frame")
    return b"".join((frame[:16], _ATTEMPTS.pack(attempts), frame[18:]))


# In flight


def fins_end(data: bytes, pos: int, end: int) -> int:
    """Where the run of complete lines `FIN <16 bytes>` + newline that starts at `pos` ends (21 bytes each).

    A line whose id holds a blank, CR or newline is not one of them: its parts are not what they seem.
    """
    _check(data, pos, end)
    return _FIN_LINES(data, pos, end).end()  # type: ignore[union-attr]  # matches the empty run, too


FREE: Final = 0
IN_FLIGHT: Final = 1
FINISHED: Final = 2
SINGLE: Final = 3
WAITING: Final = 4
DEFERRED: Final = 5

SPAN_MAX: Final = 1 << 26
"""Slots that one ring may have: 200 MB. Channels stop delivering at their window, far below."""

_SETTLED_SLOTS = re.compile(b"[\x02\x05]*+").match
_FINISHED_SLOTS = re.compile(b"\x02++").finditer
_IN_FLIGHT_SLOTS = re.compile(b"\x01").finditer


class Ring:
    """What became of the messages handed out: one state byte and one owner per offset of [low, next).

    `next` is the end of what was handed out. `low` is the highest offset below which all is settled (finished or
    deferred): a slot at `low` is not settled, every change moves it on as far as it goes. Three bytes per slot.

    IN_FLIGHT is a delivery whose deadline is that of its range; SINGLE one with a deadline of its own; WAITING awaits
    redelivery. What SINGLE, WAITING and DEFERRED mean further is the channel's business.

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
        """Forget everything: an empty ring whose `next` is `low`."""
        if low < 0:
            raise ValueError(f"offset {low} is negative")
        # Plain strings that grow at the end and lose their front: both are cheap for a bytearray.
        self._states = bytearray()
        self._owners = bytearray()
        self.low = low
        self.next = low

    def deliver(self, first: int, end: int, owner: int) -> None:
        """[first, end) is in flight to `owner`; what was passed over, [next, first), is finished."""
        if not self.next <= first <= end:
            raise ValueError(f"deliver [{first}, {end}) to a ring whose next is {self.next}")
        owner_bytes = _owner_bytes(owner)
        if first == end:
            return
        if self.low == self.next:
            self._need(end - first)
            self.low = self.next = first
        else:
            self._need(end - self.low)
        self._extend(first, FINISHED, b"\0\0")
        self._extend(end, IN_FLIGHT, owner_bytes)

    def settle(self, first: int, end: int, state: int) -> None:
        """[first, end) is FINISHED or DEFERRED; `next` moves up to `end`, what is between is finished."""
        if state not in (FINISHED, DEFERRED):
            raise ValueError(f"state {state} does not settle")
        first = max(first, self.low)
        if first >= end:
            return
        if first == self.low and end >= self.next:
            self.reset(end)
            return
        self._need(end - self.low)
        a, b = first - self.low, min(end, self.next) - self.low
        if a < b:
            self._states[a:b] = bytes((state,)) * (b - a)
            self._owners[2 * a : 2 * b] = bytes(2 * (b - a))
        self._extend(first, FINISHED, b"\0\0")
        self._extend(end, state, b"\0\0")
        self._advance()

    def fin_run(self, data: bytes, pos: int, end: int, id_base: int, owner: int) -> tuple[int, int]:
        """Finish the messages of the complete lines `FIN <16 lowercase hex>` + newline that start at `pos`.

        Stops before the first that is something else, or whose offset (its id - id_base) is not IN_FLIGHT of `owner`.
        Returns the new position and how many were finished.
        """
        _check(data, pos, end)
        owner_bytes = _owner_bytes(owner)
        if not 0 <= id_base < _ID_LIMIT:
            raise OverflowError("id base does not fit 64 bits")
        stop = _FIN_HEX_LINES(data, pos, end).end()  # type: ignore[union-attr]  # matches the empty run, too
        n = (stop - pos) // 21
        if n == 0:
            return pos, 0
        ids = struct.unpack(f">{n}Q", bytes.fromhex(data[pos:stop].translate(None, b"FIN \n").decode()))
        states, owners = self._states, self._owners
        base = id_base + self.low
        a = ids[0] - base
        if (
            a >= 0
            and ids[-1] - ids[0] == n - 1
            and states[a : a + n] == b"\x01" * n
            and owners[2 * a : 2 * (a + n)] == owner_bytes * n
            and ids == tuple(range(ids[0], ids[0] + n))
        ):
            states[a : a + n] = b"\x02" * n
        else:
            n = self._fin_each(ids, base, owner_bytes)
        self._advance()
        return pos + 21 * n, n

    def _fin_each(self, ids: tuple[int, ...], base: int, owner_bytes: bytes) -> int:
        states, owners = self._states, self._owners
        span = len(states)
        n = 0
        for n, number in enumerate(ids):
            i = number - base
            if not 0 <= i < span or states[i] != 1 or owners[2 * i : 2 * i + 2] != owner_bytes:
                return n
            states[i] = 2
        return n + 1

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
        self._owners[2 * i : 2 * i + 2] = _owner_bytes(owner)
        self._states[i] = state
        self._advance()

    def expire(self, first: int, end: int, owner: int) -> list[int]:
        """What of [first, end) is still IN_FLIGHT of `owner` becomes WAITING; returns those offsets."""
        found = self._in_flight(first, end, owner)
        for offset in found:
            self._states[offset - self.low] = WAITING
        return found

    def owned(self, owner: int) -> list[int]:
        """The offsets that are IN_FLIGHT of `owner`."""
        return self._in_flight(self.low, self.next, owner)

    def _in_flight(self, first: int, end: int, owner: int) -> list[int]:
        owner_bytes = _owner_bytes(owner)
        low, owners = self.low, self._owners
        a, b = max(first - low, 0), max(end - low, 0)
        found = (match.start() for match in _IN_FLIGHT_SLOTS(self._states, a, b))
        return [low + i for i in found if owners[2 * i : 2 * i + 2] == owner_bytes]

    def unfinished(self, first: int, end: int) -> int:
        """How many of [first, end) are neither finished nor deferred, those at or above `next` included."""
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

    def _need(self, span: int) -> None:
        if span > SPAN_MAX:
            raise ValueError(f"a ring can not span {span} slots")

    def _extend(self, end: int, state: int, owner_bytes: bytes) -> None:
        if end > self.next:
            self._states += bytes((state,)) * (end - self.next)
            self._owners += owner_bytes * (end - self.next)
            self.next = end

    def _advance(self) -> None:
        n: int = _SETTLED_SLOTS(self._states).end()  # type: ignore[union-attr]  # matches the empty run, too
        if n:
            del self._states[:n]
            del self._owners[: 2 * n]
            self.low += n

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sys.getsizeof(self._states) + sys.getsizeof(self._owners)

    def __repr__(self) -> str:
        return f"Ring(low={self.low}, next={self.next}, unfinished={self.unfinished(self.low, self.next)})"


def _owner_bytes(owner: int) -> bytes:
    if not 0 <= owner <= 0xFFFF:
        raise ValueError(f"owner {owner} does not fit 16 bits")
    return owner.to_bytes(2)
