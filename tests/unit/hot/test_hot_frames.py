"""Commands to frames, stamping, walking: examples, and Hypothesis against the plainest code that could do it."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The machine may be busy; how long one example takes proves nothing.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

HEADER = 34
PREFIX = b"PUB topic\n"
BLANK_ID = bytes(16)

bodies = st.one_of(
    st.lists(st.binary(min_size=1, max_size=40), max_size=30),
    # runs of one size, long enough to meet the column code and its probes
    st.lists(st.tuples(st.binary(min_size=1, max_size=12), st.integers(1, 400)), max_size=4).map(
        lambda runs: [body for body, n in runs for _ in range(n)]
    ),
    # of one size, but not equal
    st.integers(1, 9).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=80)),
)
prefixes = st.sampled_from([b"PUB t\n", PREFIX, b"", b"PUB " + b"P" * 64 + b"\n"])
SIZES = (0, 1, 2, 3, 4, 5, 30, 34, 100, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0xFFFFFFDD, 0xFFFFFFFB, 0xFFFFFFFF)
# Garbage that is likely to be nearly right.
crumbs = st.lists(
    st.one_of(
        st.sampled_from([PREFIX, b"PUB topic", b"PUB t\n", b"FIN ", b"\n", b" ", b"\0\0\0\2", bytes(16), b"\0" * 34]),
        st.sampled_from(SIZES).map(lambda n: n.to_bytes(4)),
        st.binary(max_size=50),
    ),
    max_size=12,
).map(b"".join)


def u32(n: int) -> bytes:
    return n.to_bytes(4)


def blank(body: bytes) -> bytes:
    return stamped(body, 0, BLANK_ID)


def stamped(body: bytes, timestamp_ns: int, message_id: bytes, attempts: int = 1) -> bytes:
    return struct.pack(">IIqH16s", 30 + len(body), 2, timestamp_ns, attempts, message_id) + body


def control(payload: bytes, kind: int = 20) -> bytes:
    return struct.pack(">II", 4 + len(payload), kind) + payload


def pubs(prefix: bytes, messages: list[bytes]) -> bytes:
    return b"".join(prefix + u32(len(body)) + body for body in messages)


def mpub(messages: list[bytes]) -> bytes:
    return u32(len(messages)) + b"".join(u32(len(body)) + body for body in messages)


# What the functions mean, one message at a time.


def plain_reframe(data: bytes, end: int, pos: int, prefix: bytes, size_max: int, most: int) -> tuple[int, int, bytes]:
    frames: list[bytes] = []
    while len(frames) < most and data[pos:end].startswith(prefix):
        body = pos + len(prefix) + 4
        size = int.from_bytes(data[body - 4 : body])
        if body > end or not 0 < size <= min(size_max, 2**31 - 1) or body + size > end:
            break
        frames.append(blank(data[body : body + size]))
        pos = body + size
    return pos, len(frames), b"".join(frames)


def plain_mpub(data: bytes, pos: int, end: int, size_max: int) -> tuple[int, bytes] | None:
    wanted = int.from_bytes(data[pos : pos + 4])
    if end - pos < 4 or wanted == 0:
        return None
    _, count, frames = plain_reframe(data, end, pos + 4, b"", size_max, wanted)
    return (count, frames) if count == wanted else None


def plain_frames(data: bytes, pos: int, end: int) -> list[tuple[int, int]]:
    """(position, type) of the frames that tile [pos, end); ValueError if they do not."""
    found = []
    while pos < end:
        if end - pos < 8:
            raise ValueError
        size, kind = struct.unpack_from(">II", data, pos)
        if pos + 4 + size > end or not ((kind >= 16 and size >= 4) or (kind == 2 and size >= 30)):
            raise ValueError
        found.append((pos, kind))
        pos += 4 + size
    return found


def plain_walk(data: bytes, pos: int, end: int, count_max: int) -> tuple[int, int]:
    count = 0
    while pos < end and count < count_max:
        if end - pos < 8:
            raise ValueError
        size, kind = struct.unpack_from(">II", data, pos)
        [(_, kind)] = plain_frames(data, pos, min(pos + 4 + size, end))
        if kind != 2:
            break
        pos += 4 + size
        count += 1
    return pos, count


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except ValueError:
        return ValueError


# PUB


def test_a_run_of_pubs_becomes_blank_frames(hot: ModuleType) -> None:
    data = b"NOP\n" + pubs(PREFIX, [b"one", b"two", b"three"]) + b"RDY 1\n"
    end, count, frames = hot.pub_run(data, 4, len(data), PREFIX, 1024)
    assert data[end:] == b"RDY 1\n"
    assert (count, frames) == (3, blank(b"one") + blank(b"two") + blank(b"three"))


@pytest.mark.parametrize("tail", [b"", b"PUB", PREFIX, PREFIX + b"\0\0\0", PREFIX + u32(5), PREFIX + u32(5) + b"four"])
def test_a_run_stops_before_an_incomplete_command(hot: ModuleType, tail: bytes) -> None:
    whole = pubs(PREFIX, [b"one"])
    data = whole + tail
    assert hot.pub_run(data, 0, len(data), PREFIX, 1024) == (len(whole), 1, blank(b"one"))
    data += b"x" * 100  # bytes behind `end` belong to nobody yet
    assert hot.pub_run(data, 0, len(whole + tail), PREFIX, 1024) == (len(whole), 1, blank(b"one"))


def test_a_run_stops_before_another_topic(hot: ModuleType) -> None:
    first = pubs(PREFIX, [b"one"])
    data = first + pubs(b"PUB other\n", [b"two"])
    assert hot.pub_run(data, 0, len(data), PREFIX, 1024)[:2] == (len(first), 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("size_max", [3, 2**31 - 1, 2**32, 2**63 - 1, 0, -1])
def test_a_run_stops_before_a_bad_size(hot: ModuleType, size: int, size_max: int) -> None:
    data = pubs(PREFIX, [b"one"]) + PREFIX + u32(size) + b"abc"
    end, count, frames = hot.pub_run(data, 0, len(data), PREFIX, size_max)
    expected = [b"one"] * (size_max >= 3)
    if 0 < size <= 3 and expected:
        expected.append(b"abc"[:size])
    assert (end, count, frames) == (len(pubs(PREFIX, expected)), len(expected), b"".join(map(blank, expected)))


@pytest.mark.parametrize("at", range(len(PREFIX) + 4))
@pytest.mark.parametrize("nth", [1, 2, 31, 33, 34, 99])
def test_a_run_of_one_size_stops_where_any_byte_differs(hot: ModuleType, at: int, nth: int) -> None:
    one = pubs(PREFIX, [b"abc"])
    data = bytearray(one * 100)
    data[nth * len(one) + at] ^= 0x80
    broken = bytes(data)
    expected = plain_reframe(broken, len(broken), 0, PREFIX, 100, 100)
    assert expected[1] == nth
    assert hot.pub_run(broken, 0, len(broken), PREFIX, 100) == expected


def test_commands_inside_a_body_are_content(hot: ModuleType) -> None:
    inner = pubs(PREFIX, [b"x" * 3])
    data = pubs(PREFIX, [inner] * 100)
    assert hot.pub_run(data, 0, len(data), PREFIX, 1024) == (len(data), 100, blank(inner) * 100)


@unhurried
@given(bodies, prefixes, st.data())
def test_pub_run_does_what_the_plain_code_does(
    hot: ModuleType, messages: list[bytes], prefix: bytes, draw: st.DataObject
) -> None:
    data = pubs(prefix, messages) + draw.draw(crumbs)
    end = draw.draw(st.integers(0, len(data)))
    size_max = draw.draw(st.sampled_from([1, 10, 40, 2**40]))
    assert hot.pub_run(data, 0, end, prefix, size_max) == plain_reframe(data, end, 0, prefix, size_max, end)


@unhurried
@given(crumbs, st.data())
def test_pub_run_of_garbage(hot: ModuleType, data: bytes, draw: st.DataObject) -> None:
    pos = draw.draw(st.integers(0, len(data)))
    end = draw.draw(st.integers(pos, len(data)))
    assert hot.pub_run(data, pos, end, b"PUB t\n", 99) == plain_reframe(data, end, pos, b"PUB t\n", 99, end)


# MPUB


def test_an_mpub_body_becomes_blank_frames(hot: ModuleType) -> None:
    messages = [b"one", b"two", b"three"]
    data = b"...." + mpub(messages)
    assert hot.mpub_body(data, 4, len(data), 1024) == (3, b"".join(map(blank, messages)))


def test_what_follows_the_last_part_is_left_to_the_caller(hot: ModuleType) -> None:
    data = mpub([b"one", b"two"])
    count, frames = hot.mpub_body(data + b"NOP\n", 0, len(data) + 4, 1024)
    assert 4 + len(frames) - 30 * count == len(data)


def test_an_mpub_with_anything_wrong_is_refused_whole(hot: ModuleType) -> None:
    good = mpub([b"one", b"two"])
    for end in range(len(good)):
        assert hot.mpub_body(good, 0, end, 1024) is None
    assert hot.mpub_body(mpub([b"one", b""]), 0, len(mpub([b"one", b""])), 1024) is None
    assert hot.mpub_body(good, 0, len(good), 2) is None
    assert hot.mpub_body(mpub([]), 0, 4, 1024) is None
    assert hot.mpub_body(b"\0\0\0", 0, 3, 1024) is None


@pytest.mark.parametrize("number", SIZES)
def test_huge_counts_and_sizes_allocate_nothing(hot: ModuleType, number: int) -> None:
    parts = b"\0\0\0\1x" * 3
    data = u32(number) + parts
    assert hot.mpub_body(data, 0, len(data), 2**62) == plain_mpub(data, 0, len(data), 2**62)
    data = u32(2) + u32(1) + b"x" + u32(number) + b"abc"
    assert hot.mpub_body(data, 0, len(data), 2**62) == plain_mpub(data, 0, len(data), 2**62)


@unhurried
@given(bodies, crumbs, st.data())
def test_mpub_does_what_the_plain_code_does(
    hot: ModuleType, messages: list[bytes], rest: bytes, draw: st.DataObject
) -> None:
    data = mpub(messages) + rest
    end = draw.draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))
    size_max = draw.draw(st.sampled_from([1, 10, 40, 2**40]))
    assert hot.mpub_body(data, 0, end, size_max) == plain_mpub(data, 0, end, size_max)


@unhurried
@given(st.binary(max_size=200))
def test_frame_is_a_run_of_one(hot: ModuleType, body: bytes) -> None:
    assert hot.frame(body) == blank(body)


# Batches

timestamps = st.integers(-(2**63), 2**63 - 1)
batches = st.lists(
    st.one_of(
        bodies.map(lambda messages: [blank(body) for body in messages]),
        st.binary(max_size=20).map(lambda payload: [control(payload)]),
        st.integers(1, 50).map(lambda n: [control(b"x", kind=0xFFFFFFFF)] * n),
    ),
    max_size=5,
).map(lambda groups: b"".join(frame for group in groups for frame in group))


def test_stamp_numbers_the_messages_and_skips_control_frames(hot: ModuleType) -> None:
    batch = bytearray(control(b"event") + blank(b"one") + control(b"") + blank(b"two"))
    skip = len(control(b"event"))
    assert hot.stamp(batch, skip, 0xAFF, 77) == 2
    ids = [b"%016x" % 0xAFF, b"%016x" % 0xB00]
    expected = control(b"event") + stamped(b"one", 77, ids[0]) + control(b"") + stamped(b"two", 77, ids[1])
    assert batch == expected


@unhurried
@given(batches, st.integers(0, 2**64 - 3000), timestamps)
def test_stamp_does_what_the_plain_code_does(hot: ModuleType, data: bytes, id_value: int, timestamp_ns: int) -> None:
    check_stamp(hot, data, id_value, timestamp_ns)


@pytest.mark.parametrize("id_value", [0, 0xFFF, 0x1000, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFF00, 2**62 - 7, 2**64 - 9000])
def test_ids_carry_over_every_digit(hot: ModuleType, id_value: int) -> None:
    check_stamp(hot, blank(b"x") * 9000, id_value, 1)


def check_stamp(hot: ModuleType, data: bytes, id_value: int, timestamp_ns: int) -> None:
    batch, expected = bytearray(data), bytearray(data)
    count = 0
    for pos, kind in plain_frames(data, 0, len(data)):
        if kind == 2:
            expected[pos + 8 : pos + 16] = struct.pack(">q", timestamp_ns)
            expected[pos + 18 : pos + 34] = b"%016x" % (id_value + count)
            count += 1
    assert hot.stamp(batch, 0, id_value, timestamp_ns) == count
    assert batch == expected


def test_the_last_id_of_64_bits_and_the_one_after_it(hot: ModuleType) -> None:
    batch = bytearray(blank(b"x") * 2)
    assert hot.stamp(batch, 0, 2**64 - 2, 0) == 2
    assert batch[-17:-1] == b"f" * 16
    before = bytes(batch)
    with pytest.raises(ValueError):
        hot.stamp(batch, 0, 2**64 - 1, 0)
    assert batch == before
    assert hot.stamp(bytearray(), 0, 2**64 - 1, 0) == 0
    for id_value, timestamp_ns in ((2**64, 0), (-1, 0), (0, 2**63), (0, -(2**63) - 1)):
        with pytest.raises(OverflowError):
            hot.stamp(bytearray(), 0, id_value, timestamp_ns)


@unhurried
@given(batches, crumbs)
def test_stamp_writes_nothing_into_what_is_no_batch(hot: ModuleType, good: bytes, rest: bytes) -> None:
    data = good + rest
    try:
        count = sum(kind == 2 for _, kind in plain_frames(data, 0, len(data)))
    except ValueError:
        batch = bytearray(data)
        with pytest.raises(ValueError):
            hot.stamp(batch, 0, 1, 2)
        assert batch == data
    else:
        assert hot.stamp(bytearray(data), 0, 1, 2) == count


BROKEN = {
    "cut in the header": blank(b"x")[:7],
    "cut in the body": blank(b"x")[:-1],
    "message too small": struct.pack(">II", 29, 2) + bytes(29),
    "control too small": struct.pack(">II", 3, 16) + bytes(3),
    "a response frame": struct.pack(">II", 6, 0) + b"OK",
    "type 15": struct.pack(">II", 40, 15) + bytes(40),
    "size 0": bytes(8),
    "size 0xffffffff": b"\xff" * 40,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("before", [b"", blank(b"x"), control(b"x")], ids=["first", "message first", "control first"])
def test_a_broken_frame_is_an_error(hot: ModuleType, broken: bytes, before: bytes) -> None:
    data = before + broken
    with pytest.raises(ValueError):
        hot.stamp(bytearray(data), 0, 0, 0)
    with pytest.raises(ValueError):
        hot.walk(broken, 0, len(broken), 9)
    with pytest.raises(ValueError):
        hot.skip_control(broken, 0, len(broken))


def test_walk_stops_at_its_count_a_control_frame_and_the_end(hot: ModuleType) -> None:
    one, event = blank(b"one"), control(b"event")
    data = one * 3 + event + one
    assert hot.walk(data, 0, len(data), 2) == (2 * len(one), 2)
    assert hot.walk(data, 0, len(data), 99) == (3 * len(one), 3)
    assert hot.walk(data, 3 * len(one), len(data), 99) == (3 * len(one), 0)
    assert hot.skip_control(data, 3 * len(one), len(data)) == 3 * len(one) + len(event)
    assert hot.skip_control(data, 0, len(data)) == 0
    assert hot.walk(data, len(data), len(data), 99) == (len(data), 0)
    assert hot.walk(data, 0, len(data), 0) == (0, 0)
    assert hot.walk(data, 0, len(data), -1) == (0, 0)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("nth", [1, 2, 31, 33, 34, 99])
def test_walk_notices_any_byte_of_a_header(hot: ModuleType, at: int, nth: int) -> None:
    one = blank(b"abc")
    data = bytearray(one * 100)
    data[nth * len(one) + at] ^= 0x80
    expected = outcome(plain_walk, bytes(data), 0, len(data), 100)
    assert expected in (ValueError, (nth * len(one), nth))
    assert outcome(hot.walk, bytes(data), 0, len(data), 100) == expected
    assert hot.walk(bytes(data), 0, len(data), nth) == (nth * len(one), nth)


def test_walk_does_not_look_behind_its_count(hot: ModuleType) -> None:
    data = blank(b"one") * 2 + b"garbage"
    assert hot.walk(data, 0, len(data), 2) == (len(data) - 7, 2)
    with pytest.raises(ValueError):
        hot.walk(data, 0, len(data), 3)


@unhurried
@given(batches, crumbs, st.integers(-1, 100), st.sampled_from([bytes, bytearray, memoryview]))
def test_walk_does_what_the_plain_code_does(
    hot: ModuleType, good: bytes, rest: bytes, count_max: int, kind: type
) -> None:
    data = good + rest
    assert outcome(hot.walk, kind(data), 0, len(data), count_max) == outcome(plain_walk, data, 0, len(data), count_max)


@unhurried
@given(batches, st.integers(1, 60))
def test_walk_and_skip_control_cross_a_whole_batch(hot: ModuleType, data: bytes, step: int) -> None:
    pos = count = 0
    while pos < len(data):
        pos, n = hot.walk(data, hot.skip_control(data, pos, len(data)), len(data), step)
        assert n <= step
        count += n
    assert count == sum(kind == 2 for _, kind in plain_frames(data, 0, len(data)))


@unhurried
@given(crumbs)
def test_skip_control_of_garbage(hot: ModuleType, rest: bytes) -> None:
    data = control(b"x") * 40 + rest
    try:
        expected: Any = plain_walk(rest, 0, len(rest), 0)[0] + len(data) - len(rest)
        pos = 0
        while pos < len(rest):
            size, kind = struct.unpack_from(">II", rest, pos) if len(rest) - pos >= 8 else (0, 0)
            plain_frames(rest, pos, min(pos + 4 + size, len(rest)))
            if kind == 2:
                break
            pos += 4 + size
            expected = pos + len(data) - len(rest)
    except ValueError:
        expected = ValueError
    assert outcome(hot.skip_control, data, 0, len(data)) == expected


@unhurried
@given(st.binary(max_size=60), st.integers(0, 65535), st.sampled_from([bytes, bytearray, memoryview]))
def test_patch_attempts_changes_a_copy(hot: ModuleType, body: bytes, attempts: int, kind: type) -> None:
    message_id = b"0123456789abcdef"
    original = stamped(body, 5, message_id)
    patched = hot.patch_attempts(kind(original), attempts)
    assert type(patched) is bytes
    assert patched == stamped(body, 5, message_id, attempts)
    assert original == stamped(body, 5, message_id)


def test_patch_attempts_takes_one_whole_frame_and_16_bits(hot: ModuleType) -> None:
    good = blank(b"x")
    for bad in (b"", good[:-1], good + b"y", good * 2, control(b"x" * 40), good[:33]):
        with pytest.raises(ValueError):
            hot.patch_attempts(bad, 1)
    for attempts in (-1, 65536):
        with pytest.raises(OverflowError):
            hot.patch_attempts(good, attempts)


# FIN


@unhurried
@given(
    st.lists(
        st.one_of(
            st.integers(0, 2**64 - 1).map(lambda n: b"FIN %016x\n" % n),
            st.sampled_from(
                [
                    b"FIN 0123456789ABCDEF\n",
                    b"FIN 01234567\n",
                    b"FIN 0123456789abcdef\r\n",
                    b"FIN 0123456 89abcdef\n",
                    b"FIN 012345678\n9abcde\n",
                    b"FIN 0123456789abcde\r\n",
                    b"fin 0123456789abcdef\n",
                    b"FIN zzzzzzzzzzzzzzz\0\n",
                    b"FIN  0123456789abcd\n",
                    b"NOP\n",
                ]
            ),
        )
    ),
    st.integers(0, 25),
)
def test_fins_end_takes_whole_plain_lines(hot: ModuleType, lines: list[bytes], cut: int) -> None:
    data = b"".join(lines)
    end = max(len(data) - cut, 0)
    pos = 0
    while end - pos >= 21:
        line = data[pos : pos + 21]
        if not (line.startswith(b"FIN ") and line.endswith(b"\n")) or any(c in b" \r\n" for c in line[4:20]):
            break
        pos += 21
    assert hot.fins_end(data, 0, end) == pos


# Arguments


@pytest.mark.parametrize(("pos", "end"), [(-1, 3), (0, 9), (5, 4), (9, 9), (-3, -2)])
def test_positions_outside_the_buffer_are_refused(hot: ModuleType, pos: int, end: int) -> None:
    data = b"FIN 0123"
    calls: tuple[Callable[[], object], ...] = (
        lambda: hot.pub_run(data, pos, end, b"PUB t\n", 9),
        lambda: hot.mpub_body(data, pos, end, 9),
        lambda: hot.walk(data, pos, end, 9),
        lambda: hot.skip_control(data, pos, end),
        lambda: hot.fins_end(data, pos, end),
        lambda: hot.Ring(0).fin_run(data, pos, end, 0, 1),
    )
    for call in calls:
        with pytest.raises(ValueError):
            call()
    if not 0 <= pos <= len(data):
        with pytest.raises(ValueError):
            hot.stamp(bytearray(data), pos, 0, 0)


@unhurried
@given(data=st.integers(0, 400).flatmap(lambda size: st.binary(min_size=size, max_size=size)), repeat=st.integers(1, 9))
def test_crc_is_that_of_zlib(hot: ModuleType, data: bytes, repeat: int) -> None:
    whole = data * repeat
    assert hot.crc32(whole) == zlib.crc32(whole)
    with memoryview(b"x" + whole) as view:
        assert hot.crc32(view[1:]) == zlib.crc32(whole)
    assert hot.crc32(bytearray(whole)) == zlib.crc32(whole)


def test_constants(hot: ModuleType) -> None:
    assert hot.HEADER == HEADER
    assert (hot.FREE, hot.IN_FLIGHT, hot.FINISHED, hot.SINGLE, hot.WAITING, hot.DEFERRED) == (0, 1, 2, 3, 4, 5)


# ---- entries of the commitlog

longs = st.integers(0, 2**64 - 1)
words = st.integers(0, 2**32 - 1)
ENTRY = struct.Struct(">QQQQQIIIIHHQQ")


@unhurried
@given(
    last=st.tuples(*[st.integers(0, 2**62 - 1)] * 5, *[words] * 4, st.just(1), st.just(1), longs, longs),
    data=st.binary(max_size=300),
    count=words,
    flags=words,
    timestamp_ns=longs,
    epoch=longs,
    durable=longs,
)
def test_an_entry_follows_the_one_before(hot: ModuleType, last: tuple[int, ...], data: bytes, **own: int) -> None:
    entry, raw = hot.next_entry(tuple, last, bytearray(data), *own.values())
    assert ENTRY.unpack(raw[:76]) == entry
    log_id, epoch, offset, position, timestamp_ns, count, size, crc, flags, version, kind, chain, durable = entry
    assert (log_id, offset, position) == (last[0] + 1, last[2] + last[5], last[3] + last[6])
    assert own == {
        "count": count,
        "flags": flags,
        "timestamp_ns": timestamp_ns,
        "epoch": epoch,
        "durable": durable,
    }
    assert (size, crc, version, kind) == (len(data), zlib.crc32(data), 1, 1)
    linked = struct.pack(">Q", last[11]) + raw[:60]
    assert chain == int.from_bytes(hashlib.blake2b(linked, digest_size=8).digest())
    assert raw[76:] == struct.pack(">I", zlib.crc32(raw[:76]))


@unhurried
@given(
    last=st.tuples(*[st.integers(0, 2**61)] * 5, *[words] * 4, st.just(1), st.just(1), longs, longs),
    data=st.binary(max_size=100),
    later=st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)),
    wrong=st.integers(0, 80 * 8 - 1),
)
def test_an_entry_that_came_is_taken_only_if_it_is_the_next_one(
    hot: ModuleType, last: tuple[int, ...], data: bytes, later: tuple[int, int], wrong: int
) -> None:
    entry, raw = hot.next_entry(tuple, last, data, 3, 5, last[4] + later[0], last[1] + later[1], 9)
    assert hot.copied_entry(tuple, last, raw, data, 2) == entry
    assert hot.copied_entry(tuple, last, raw, data, 4) is None, "a flag that is handled elsewhere"
    assert hot.copied_entry(tuple, last, raw, data + b"x", 0) is None
    assert hot.copied_entry(tuple, entry, raw, data, 0) is None, "twice"
    flipped = bytearray(raw)
    flipped[wrong // 8] ^= 1 << wrong % 8
    assert hot.copied_entry(tuple, last, bytes(flipped), data, 0) is None
    sound = bytes(flipped[:76]) + struct.pack(">I", zlib.crc32(flipped[:76]))
    if wrong // 8 < 68:  # what is durable is neither in the chain nor checked
        assert hot.copied_entry(tuple, last, sound, data, 0) is None
    for size in (0, 79, 81):
        assert hot.copied_entry(tuple, last, (raw + b"x")[:size], data, 0) is None


@pytest.mark.parametrize("place", [0, 2, 3])
def test_an_entry_beyond_what_a_log_can_have_is_none(hot: ModuleType, place: int) -> None:
    last = [0] * 5 + [0] * 4 + [1, 1, 0, 0]
    last[place] = 2**62 - (place == 0)
    _, raw = hot.next_entry(tuple, tuple(last), b"a", 0, 0, 5, 1, 1)
    assert hot.copied_entry(tuple, tuple(last), raw, b"a", 0) is None


def test_an_entry_of_another_chain_time_or_epoch_is_not_taken(hot: ModuleType) -> None:
    last = (1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 1, 10, 11)
    for n, value in ((11, 12), (4, 4), (1, 1)):
        other = (*last[:n], value, *last[n + 1 :])
        _, raw = hot.next_entry(tuple, other, b"a", 1, 0, value if n == 4 else 5, value if n == 1 else 2, 1)
        assert hot.copied_entry(tuple, last, raw, b"a", 0) is None


class Named(tuple[int, ...]):
    """A class of entries."""


def test_an_entry_is_of_the_class_that_is_asked_for(hot: ModuleType) -> None:
    first, _ = hot.next_entry(Named, (0,) * 13, b"a", 1, 0, 5, 1, 1)
    second, _ = hot.next_entry(Named, first, b"b", 1, 0, 5, 1, 1)
    assert type(second) is Named and second[0] == 2


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_without_room_in_an_entry_is_refused(hot: ModuleType, wrong: int, number: int) -> None:
    own = [1, 0, 5, 1, 1]
    own[wrong] = number
    with pytest.raises(OverflowError):
        hot.next_entry(tuple, (0,) * 13, b"a", *own)


def test_what_is_no_entry_has_no_next_one(hot: ModuleType) -> None:
    with pytest.raises(ValueError):
        hot.next_entry(tuple, (0,) * 12, b"a", 1, 0, 5, 1, 1)
