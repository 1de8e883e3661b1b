"""What a checkpoint says, and how much a micro-batch takes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_nsqha.model import CutPoint, PartitionLife, PinnedPartition, ReadFailed
from pyspark_nsqha.streams.offsets import (
    BatchLimits,
    PartitionOffset,
    end_within,
    from_json,
    position_at,
    shares,
    to_json,
)

U64 = st.integers(0, (1 << 64) - 1)
RECORDS = st.dictionaries(
    st.tuples(st.from_regex(r"[.a-zA-Z0-9_-]{1,20}", fullmatch=True), st.integers(0, 8191)),
    st.builds(PartitionOffset, U64, U64, U64, U64, U64, st.none() | U64),
)


def pin(end: int = 10, uid: int = 7, log_id: int = 5) -> PinnedPartition:
    return PinnedPartition(
        PartitionLife("t", uid, 0, 0),
        CutPoint(0, 1, 0, 0),
        CutPoint(end, log_id + 1, end * 100, 0),
        epoch=3,
        chain=0xABC,
    )


# ---- checkpoints


@given(RECORDS)
def test_what_is_written_is_read_back_through_text(records: dict[tuple[str, int], PartitionOffset]):
    assert from_json(json.loads(json.dumps(to_json(records)))) == records


def test_the_text_is_the_documented_one():
    records = {("orders", 0): PartitionOffset(offset=1200, uid=0xC0FFEE, log_id=57, epoch=3, chain=0x123456789ABCDEF)}
    assert json.dumps(to_json(records)) == (
        '{"orders/0": {"offset": 1200, "uid": "0000000000c0ffee", "log_id": 57, "epoch": 3, '
        '"chain": "0123456789abcdef"}}'
    )


def test_the_same_records_are_the_same_text_in_whatever_order():
    one, two = PartitionOffset(1, 2, 3, 4, 5), PartitionOffset(6, 7, 8, 9, 10)
    there = json.dumps(to_json({("a", 0): one, ("b", 1): two}))
    assert there == json.dumps(to_json({("b", 1): two, ("a", 0): one}))


def test_a_record_that_does_not_move_is_itself_although_the_log_grows():
    record = PartitionOffset.at(pin(end=10, log_id=5), 10)
    assert record.moved(pin(end=10, log_id=9), 10) is record
    assert record.moved(pin(end=12, log_id=9), 12) == PartitionOffset(12, 7, 9, 3, 0xABC)


GOOD = {"offset": 1, "uid": "0" * 16, "log_id": 1, "epoch": 1, "chain": "f" * 16}


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {"t/0": 5},
        {"t": GOOD},
        {"t/x": GOOD},
        {"t/0/1": GOOD},
        {"t/0": {"offset": 5}},
        {"t/0": {**GOOD, "more": 1}},
        {"t/0": {**GOOD, "offset": -1}},
        {"t/0": {**GOOD, "offset": True}},
        {"t/0": {**GOOD, "offset": "1"}},
        {"t/0": {**GOOD, "offset": 1 << 64}},
        {"t/0": {**GOOD, "chain": 5}},
        {"t/0": {**GOOD, "chain": "xyz"}},
    ],
)
def test_offsets_of_something_else_are_refused_in_one_line(said: object):
    with pytest.raises(ReadFailed, match="the checkpoint has offsets of another source") as refused:
        from_json(said)
    assert "\n" not in str(refused.value)


# ---- shares


WAITING = st.dictionaries(st.integers(0, 50), st.integers(0, 10**9), max_size=20)


@given(WAITING, st.integers(1, 10**7))
def test_shares_sum_up_to_the_limit_or_to_what_waits(waiting: dict[int, int], limit: int):
    some = [count for count in waiting.values() if count]
    assert sum(shares(waiting, limit).values()) == min(sum(some), max(limit, len(some)))


@given(WAITING, st.integers(1, 10**7))
def test_nobody_with_something_waiting_gets_none_or_more_than_that(waiting: dict[int, int], limit: int):
    taken = shares(waiting, limit)
    assert all(1 <= taken[key] <= count for key, count in waiting.items() if count)
    assert all(waiting[key] for key in taken)


@given(WAITING, st.integers(1, 10**7))
def test_shares_are_in_proportion_but_for_the_one_that_each_gets(waiting: dict[int, int], limit: int):
    total, some = sum(waiting.values()), sum(count > 0 for count in waiting.values())
    for key, taken in shares(waiting, limit).items():
        assert abs(taken - min(1, limit / total) * waiting[key]) <= 1 + some


def test_a_small_partition_beside_a_large_one_is_read_to_its_end():
    waiting = {"large": 10**9, "small": 3}
    for _ in range(3):
        taken = shares(waiting, 100)
        waiting = {key: count - taken.get(key, 0) for key, count in waiting.items()}
    assert waiting["small"] == 0


# ---- bytes


CUTS = [
    CutPoint(0, 1, 0, 0),
    CutPoint(10, 2, 1000, 0),
    CutPoint(10, 3, 1100, 0),
    CutPoint(30, 4, 1500, 0),
]  # one batch without messages


@pytest.mark.parametrize(
    ("offset", "position"), [(0, 0), (5, 500), (9, 900), (10, 1100), (20, 1300), (30, 1500), (99, 1500)]
)
def test_positions_between_borders_are_in_proportion(offset: int, position: int):
    assert position_at(CUTS, offset) == position


@pytest.mark.parametrize(
    ("first", "end", "bytes_max", "found"),
    [
        (0, 30, 500, 5),
        (0, 30, 1000, 10),
        (0, 30, 1300, 20),
        (0, 30, 10**9, 30),
        (0, 7, 1000, 7),
        (5, 30, 1, 6),
        (29, 30, 1, 30),
        (20, 25, 1000, 25),
    ],
)
def test_bytes_end_a_micro_batch_behind_one_message_at_least(first: int, end: int, bytes_max: int, found: int):
    assert end_within(CUTS, first, end, bytes_max) == found


@given(st.data())
def test_an_end_by_bytes_always_goes_on_and_never_too_far(data: st.DataObject):
    steps = data.draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10**6)), min_size=1, max_size=20))
    cuts = [CutPoint(0, 1, 0, 0)]
    for messages, size in steps:
        cuts.append(CutPoint(cuts[-1].offset + messages, cuts[-1].log_id + 1, cuts[-1].position + size, 0))
    if cuts[-1].offset == 0:
        return
    first = data.draw(st.integers(0, cuts[-1].offset - 1))
    end = data.draw(st.integers(first + 1, cuts[-1].offset))
    bytes_max = data.draw(st.integers(1, 10**7))
    found = end_within(cuts, first, end, bytes_max)
    assert first < found <= end
    if found > first + 1:
        assert position_at(cuts, found) - position_at(cuts, first) <= bytes_max + max(size for _, size in steps)


# ---- when


@pytest.mark.parametrize(
    ("waiting", "since_s", "too_few"), [(9, 0, True), (10, 0, False), (9, 59, True), (9, 60, False), (0, 61, False)]
)
def test_a_micro_batch_waits_for_enough_messages_but_not_for_ever(waiting: int, since_s: float, too_few: bool):
    assert BatchLimits(min_offsets=10, max_delay_s=60).too_few(waiting, since_s) is too_few


def test_without_a_least_number_nothing_waits():
    assert not BatchLimits().too_few(0, 0)
