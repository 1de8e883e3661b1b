"""What is written is read back, and nothing else is."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha import frames, hot
from nsqha.cursor import events
from nsqha.cursor.events import (
    Abandoned,
    Attributes,
    Carry,
    ChannelProgress,
    ChannelsEvent,
    CheckpointFrame,
    Ephemeral,
    EpochStart,
    LogHold,
    LogStart,
    ProgressEvent,
    Seek,
    TopicEmpty,
    decode,
    deliver_at_in,
)
from nsqha.cursor.listing import ChannelEntry, Listing
from nsqha.errors import LogCorrupt

u64 = st.integers(0, (1 << 64) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u16 = st.integers(0, 65535)
names = st.text(st.sampled_from("abz-_.0#"), min_size=1, max_size=64)
ranges = st.sets(st.integers(0, 1 << 40), max_size=12).map(
    lambda s: tuple(zip(sorted(s)[::2], sorted(s)[1::2], strict=False))
)
progress = st.builds(
    ChannelProgress,
    uid=u64,
    seek=u64,
    floor=u64,
    ranges=ranges,
    puts=st.lists(st.tuples(u64, i64, u16), max_size=4).map(tuple),
    finished=st.lists(u64, max_size=4).map(tuple),
    attempts=st.lists(st.tuples(u64, u64, u16), max_size=4).map(tuple),
    attempts_known=st.booleans(),
    put_back=st.booleans(),
)
all_events = st.one_of(
    st.builds(
        Attributes, u32, i64, st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=3).map(tuple)
    ),
    st.builds(
        ChannelsEvent,
        u64,
        st.booleans(),
        st.lists(st.builds(ChannelEntry, names, u64, st.booleans(), st.booleans()), max_size=4).map(Listing.of),
    ),
    st.builds(Ephemeral, names, u64, st.booleans()),
    st.just(TopicEmpty()),
    st.builds(ProgressEvent, st.lists(progress, max_size=3).map(tuple)),
    st.builds(Seek, u64, u64, u64, st.one_of(st.none(), ranges), st.booleans(), st.booleans(), st.booleans()),
    st.builds(Carry, u64, st.binary(max_size=50)),
    st.builds(LogStart, u64, u64, st.lists(st.builds(Abandoned, u64, u64, u64), max_size=3).map(tuple)),
    st.builds(CheckpointFrame, u64, u32, u64, st.booleans(), st.binary(max_size=50)),
    st.builds(EpochStart, u64, u64),
    st.builds(LogHold, u64, u64, i64),
)


def parts(frame: bytes) -> tuple[int, bytes]:
    size, frame_type = struct.unpack_from(">II", frame)
    assert size == len(frame) - 4
    return frame_type, frame[8:]


@settings(max_examples=300, deadline=None)
@given(all_events)
def test_what_is_written_is_read(event):
    assert decode(*parts(event.encode())) == event


@settings(max_examples=200, deadline=None)
@given(all_events, st.data())
def test_a_cut_or_longer_payload_is_refused_or_another_event(event, data):
    frame_type, payload = parts(event.encode())
    cut = payload[: data.draw(st.integers(0, max(len(payload) - 1, 0)))]
    for wrong in (cut, payload + b"\0"):
        try:
            assert wrong == payload or decode(frame_type, wrong) != event
        except LogCorrupt:
            pass


@settings(max_examples=300, deadline=None)
@given(st.integers(16, 31), st.binary(max_size=80))
def test_any_bytes_decode_or_are_corrupt(frame_type, payload):
    try:
        decode(frame_type, payload)
    except LogCorrupt:
        pass


def test_a_huge_count_is_refused_before_memory_is_used():
    payload = struct.pack(">QQQIIIIB", 1, 0, 0, 1 << 31, 1 << 31, 0, 0, 0)
    with pytest.raises(LogCorrupt):
        decode(frames.PROGRESS, payload)


def test_an_unknown_type_stops_the_partition_or_is_skipped():
    with pytest.raises(LogCorrupt, match="newer"):
        decode(31, b"")
    assert decode(32, b"anything") is None


def test_ranges_out_of_order_are_corrupt():
    frame = Seek(1, 2, 3, ((5, 9), (1, 2))).encode()
    with pytest.raises(LogCorrupt, match="order"):
        decode(*parts(frame))


def test_a_carried_frame_lies_behind_the_carry_head():
    message = hot.frame(b"body")
    assert Carry(7, message).encode()[events.CARRY_HEAD :] == message


def test_deliver_at_times_of_a_batch():
    batch = b"".join(
        [
            EpochStart(1).encode(),
            hot.frame(b"0"),
            hot.frame(b"1"),
            Attributes(2, 77).encode(),
            hot.frame(b"2"),
            hot.frame(b"3"),
            Attributes(1, 0, ((b"key", b"value"),)).encode(),
            hot.frame(b"4"),
            Attributes(1, 88).encode(),
            hot.frame(b"5"),
        ]
    )
    assert deliver_at_in(batch, 100) == {102: 77, 103: 77, 105: 88}


# ---- the quick ways for the usual progress


@given(u64, u64, u64, ranges)
def test_a_floor_with_ranges_is_encoded_as_any_progress(uid, seek, floor, finished):
    assert (
        events.encode_cursor(uid, seek, floor, list(finished)) == ChannelProgress(uid, seek, floor, finished).encode()
    )
    assert events.floor_frame(uid, seek, floor) == ProgressEvent((ChannelProgress(uid, seek, floor),)).encode()


@given(st.lists(progress, max_size=4), st.booleans())
def test_floors_and_ranges_are_read_as_they_were_written(channels, plain):
    if plain:
        channels = [ChannelProgress(c.uid, c.seek, c.floor, c.ranges) for c in channels]
    data = ProgressEvent(tuple(channels)).encode()
    found = events.cursors_in(data, 8, len(data))
    says_more = any(c.puts or c.finished or c.attempts or c.attempts_known or c.put_back for c in channels)
    assert found == (None if says_more else [(c.uid, c.seek, c.floor, list(c.ranges)) for c in channels])
    floor = channels[0] if len(channels) == 1 and not says_more and not channels[0].ranges else None
    assert events.floor_in(data) == ((floor.uid, floor.seek, floor.floor) if floor else None)


def test_a_floor_is_quick_to_read_only_with_messages_behind_it():
    floor = events.floor_frame(1, 2, 3)
    assert events.floor_in(bytearray(floor + hot.frame(b"x"))) == (1, 2, 3)
    assert events.floor_in(floor + floor) is None
    assert events.floor_in(floor[:-1]) is None
    assert events.floor_in(floor + b"junk") is None


@pytest.mark.parametrize("cut", range(1, 33))
def test_what_does_not_fit_is_left_to_the_way_that_says_why(cut):
    data = ProgressEvent((ChannelProgress(1, 2, 3, ((4, 5), (7, 9))),)).encode()
    assert events.cursors_in(data, 8, len(data) - cut) is None
    assert (
        events.cursors_in(ProgressEvent((ChannelProgress(1, 2, 3, ((7, 9), (4, 5))),)).encode(), 8, len(data)) is None
    )
