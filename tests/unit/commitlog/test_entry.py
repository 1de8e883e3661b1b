"""The commitlog entry: 80 bytes that name their past."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.commitlog.control import iter_frames
from nsqha.commitlog.entry import (
    ENTRY_BYTES,
    FAULTY,
    REBUILT,
    Entry,
    columns,
    decode,
    decode_all,
    decode_flipped,
    follow_each_other,
    genesis,
    next_entry,
)
from nsqha.errors import LogCorrupt
from nsqha.frames import PROGRESS, control_frame

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
U16 = st.integers(0, 2**16 - 1)
PLACES = st.integers(0, 2**62 - 1)
TIMES = st.integers(0, 2**63 - 1)
ENTRIES = st.builds(Entry, PLACES, U64, PLACES, PLACES, TIMES, U32, U32, U32, U32, U16, U16, U64, U64)


def second() -> tuple[Entry, Entry, bytes]:
    first, _ = next_entry(genesis(7, 0), b"a" * 40, count=1, flags=0, timestamp_ns=5, epoch=1, durable=1)
    entry, raw = next_entry(first, b"b" * 50, count=2, flags=1, timestamp_ns=6, epoch=2, durable=1)
    return first, entry, raw


@given(ENTRIES)
def test_an_entry_is_its_bytes(entry: Entry) -> None:
    raw = entry.encode()
    assert len(raw) == ENTRY_BYTES == 80
    assert decode(raw) == entry
    assert decode_all(raw + raw) == [entry, entry]


@pytest.mark.parametrize("field", ["log_id", "first_offset", "position", "timestamp_ns"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_numbers_that_no_log_can_have_are_no_entry(field: str, value: int) -> None:
    first, entry, _ = second()
    raw = entry._replace(**{field: value}).encode()
    assert decode(raw) is None
    assert decode_all(raw) == [None]
    fields = columns(raw)
    assert fields is None or not follow_each_other(fields, first)


def test_the_bytes_are_where_the_drawing_says() -> None:
    first, entry, raw = second()
    assert raw == entry.encode()
    fields = {
        0: (8, 2),
        8: (8, 2),
        16: (8, 1),
        24: (8, 40),
        32: (8, 6),
        40: (4, 2),
        44: (4, 50),
        52: (4, 1),
        56: (2, 1),
    }
    for at, (size, value) in fields.items():
        assert int.from_bytes(raw[at : at + size], "big") == value
    assert int.from_bytes(raw[48:52], "big") == zlib.crc32(b"b" * 50)
    assert int.from_bytes(raw[68:76], "big") == 1
    assert int.from_bytes(raw[76:], "big") == zlib.crc32(raw[:76])
    assert first.end_position == entry.position


@settings(max_examples=30)
@given(ENTRIES, st.integers(0, ENTRY_BYTES * 8 - 1))
def test_one_wrong_bit_is_noticed_and_can_be_put_right(entry: Entry, bit: int) -> None:
    raw = bytearray(entry.encode())
    raw[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(raw)) is None
    assert decode_flipped(bytes(raw)) == entry


def test_two_wrong_bits_are_not_put_right() -> None:
    _, _, raw = second()
    wrong = bytes([raw[0] ^ 1, raw[1] ^ 1]) + raw[2:]
    assert decode_flipped(wrong) is None


BLOCK = [second()[0]]
for _ in range(5):
    BLOCK.append(next_entry(BLOCK[-1], b"x" * 9, count=2, flags=0, timestamp_ns=6, epoch=1, durable=1)[0])


@given(
    st.integers(1, 5),
    st.sampled_from(["log_id", "epoch", "first_offset", "position", "timestamp_ns", "count", "size", "durable"]),
    st.integers(-1, 2),
)
def test_a_block_is_judged_like_its_entries(i: int, field: str, by: int) -> None:
    block = list(BLOCK)
    block[i] = block[i]._replace(**{field: getattr(block[i], field) + by})
    fields = columns(b"".join([entry.encode() for entry in block[1:]]))
    assert fields is not None
    assert [Entry(*row) for row in zip(*fields, strict=True)] == block[1:]
    expected = all(entry.follows(previous) for previous, entry in pairwise(block))
    assert follow_each_other(fields, block[0]) is expected


def test_a_block_with_a_bad_entry_has_no_columns() -> None:
    _, _, raw = second()
    assert columns(raw + raw) is not None
    for bad in (b"", raw[:79], raw + bytes(80), bytes(80) + raw):
        assert columns(bad) is None


@pytest.mark.parametrize("raw", [b"", bytes(79), bytes(80), bytes(81), b"\xff" * 80])
def test_what_was_never_written_is_no_entry(raw: bytes) -> None:
    assert decode(raw) is None


def test_zeros_and_a_part_of_a_slot_are_no_entries() -> None:
    _, entry, raw = second()
    assert decode_all(raw + bytes(80) + raw[:79]) == [entry, None]


def test_the_chain_names_the_whole_past() -> None:
    first, entry, _ = second()
    assert entry.follows(first) and entry.chained_to(first)
    other, _ = next_entry(genesis(7, 0), b"x" * 40, count=1, flags=0, timestamp_ns=5, epoch=1, durable=1)
    assert entry.follows(other) and not entry.chained_to(other)


@pytest.mark.parametrize("uid_partition", [(8, 0), (7, 1)])
def test_entries_of_another_partition_do_not_fit(uid_partition: tuple[int, int]) -> None:
    first, _, _ = second()
    assert first.chained_to(genesis(7, 0))
    assert not first.chained_to(genesis(*uid_partition))


def test_the_chain_does_not_depend_on_what_was_durable() -> None:
    first, entry, _ = second()
    assert entry._replace(durable=99).chained_to(first)
    assert not entry._replace(timestamp_ns=99).chained_to(first)


@pytest.mark.parametrize("flag", [FAULTY, REBUILT])
def test_behind_an_entry_that_recovery_wrote_the_chain_is_not_expected_to_fit(flag: int) -> None:
    first, entry, _ = second()
    assert entry._replace(chain=1).chained_to(first._replace(flags=flag))


@pytest.mark.parametrize(
    "change",
    [{"log_id": 3}, {"first_offset": 0}, {"position": 41}, {"timestamp_ns": 4}, {"epoch": 0}],
)
def test_an_entry_follows_only_where_the_last_one_ends(change: dict[str, int]) -> None:
    first, entry, _ = second()
    assert not entry._replace(**change).follows(first)


def test_frames_of_a_batch() -> None:
    data = control_frame(PROGRESS, b"abc") + b"\0\0\0\x05\0\0\0\x02x"
    assert [(f.type, f.position, f.payload_position, f.end) for f in iter_frames(data)] == [
        (PROGRESS, 0, 8, 11),
        (2, 11, 19, 20),
    ]


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0\x03\0\0\0\x02", b"\0\0\0\x05\0\0\0\x02", b"\xff" * 8])
def test_frames_that_do_not_tile_are_refused(data: bytes) -> None:
    with pytest.raises(LogCorrupt):
        list(iter_frames(data))
