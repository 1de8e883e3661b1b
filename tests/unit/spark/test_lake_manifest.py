"""Names, manifests and plans: what is written is what is read, and nothing overlaps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_nsqha.lake import names, plan
from pyspark_nsqha.lake.commits.manifest import (
    Addition,
    BadManifest,
    LakeFile,
    LakeState,
    Life,
    Missing,
    OffsetRange,
    Overlap,
    decode,
    encode,
    joined,
    without,
)
from tests.unit.spark.lake_rig import DAY, Partition

LIFE = Life("orders", 0xABC, 3)
FILE = LakeFile(
    topic="orders",
    topic_uid=0xABC,
    partition=3,
    day="2026-11-23",
    first=10,
    end=20,
    rows=10,
    bytes=99,
    first_timestamp_ns=1,
    last_timestamp_ns=2,
    id_base=3 << 50,
    first_log_id=4,
    end_log_id=6,
    epoch=1,
    chain=0xFEED,
    flags=0,
    chain_before=None,
    crc=5,
    file_crc=0xFFFFFFFF,
)


def file(first: int, end: int) -> LakeFile:
    return replace(FILE, first=first, end=end, rows=end - first)


# ---- names


def test_a_name_says_all_of_what_the_file_holds() -> None:
    path = "data/topic=orders/day=2026-11-23/0000000000000abc-00003-00000000000000000010-00000000000000000020.parquet"
    assert FILE.path == path
    assert names.parse_data(path) == ("orders", "2026-11-23", 0xABC, 3, 10, 20, "")
    merged = replace(FILE, merged="ab12")
    assert names.parse_data(merged.path) == ("orders", "2026-11-23", 0xABC, 3, 10, 20, "ab12")
    assert merged.path != FILE.path


@pytest.mark.parametrize(
    "path", ["", "data/x.parquet", FILE.path + "x", FILE.path.replace("data/", "tmp/"), "/" + FILE.path]
)
def test_other_names_are_none(path: str) -> None:
    assert names.parse_data(path) is None


@given(st.integers(0, 1 << 62))
def test_a_day_holds_its_own_nanoseconds(ns: int) -> None:
    start = names.day_start(names.day_of(ns))
    assert start <= ns < start + DAY


def test_days_between_are_all_of_them() -> None:
    first = names.day_start("2026-02-27")
    assert names.days_between(first, first + 2 * DAY) == ["2026-02-27", "2026-02-28", "2026-03-01"]


# ---- manifests


def test_a_manifest_is_read_as_it_was_written() -> None:
    addition = Addition((FILE, file(20, 21)), (Missing(*LIFE, 21, 30, "retention"),))
    assert decode(encode(7, addition, written_ns=1, run="r"), "x") == (7, "r", addition)


def test_every_flipped_byte_of_a_manifest_is_noticed() -> None:
    raw = encode(7, Addition((FILE,)), written_ns=1, run="r").rstrip()
    for at in range(len(raw)):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        try:
            assert decode(bytes(flipped), "m.json") == decode(raw, "m.json"), (
                flipped
            )  # JSON's own freedom: none is used
        except BadManifest as error:
            assert str(error).startswith("m.json ")


@pytest.mark.parametrize(
    "change",
    [
        {"first": 20},
        {"rows": 11},
        {"topic": "../orders"},
        {"day": "2026-11-23/x"},
        {"first": -1},
        {"chain": "no hex"},
        {"bytes": "9"},
        {"crc": None},
    ],
)
def test_a_manifest_with_a_file_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    content = json.loads(encode(1, Addition((FILE,)), written_ns=1, run="r"))["manifest"]
    content["files"][0] |= change
    from pyspark_nsqha.lake.commits import manifest

    raw = json.dumps({"crc": manifest._crc(content), "manifest": content}).encode()
    with pytest.raises(BadManifest, match=r"^m is not a manifest"):
        decode(raw, "m")


def test_messages_are_told_of_once() -> None:
    state = LakeState().with_added(Addition((file(10, 20),)), 1)
    for added in (Addition((file(19, 25),)), Addition((), (Missing(*LIFE, 5, 11, "lost"),)), Addition((file(10, 20),))):
        with pytest.raises(Overlap, match=r"^orders/3: \["):
            state.with_added(added, 2)
    with pytest.raises(Overlap):
        LakeState().with_added(Addition((file(1, 3), file(2, 4))), 1)


def test_what_is_covered_is_files_and_gaps_together() -> None:
    state = LakeState().with_added(Addition((file(10, 20), file(30, 40)), (Missing(*LIFE, 20, 25, "lost"),)), 1)
    assert state.covered(LIFE) == [(10, 25), (30, 40)]
    assert [state.covered_from(LIFE, offset) for offset in (9, 10, 24, 25, 30)] == [9, 25, 25, 25, 40]
    assert state.end(LIFE) == 40 and state.end(Life("orders", 1, 3)) is None


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda r: OffsetRange(r[0], r[0] + r[1])), max_size=8
)


@given(ranges, st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_what_is_left_is_the_set_difference(taken: list[OffsetRange], whole: tuple[int, int]) -> None:
    first, end = min(whole), max(whole)
    found = list(without(OffsetRange(first, end), joined(taken)))
    assert {n for r in found for n in range(*r)} == set(range(first, end)) - {n for r in taken for n in range(*r)}
    assert all(a.end < b.first for a, b in pairwise(found)) and all(r.first < r.end for r in found)


# ---- plans


def partition(batches: int, seed: int = 1) -> Partition:
    rng = random.Random(seed)
    made = Partition(step=500)
    for _ in range(batches):
        made.publish(*[rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(6))])
    return made


def covered_by(found: list[plan.LakePiece]) -> list[tuple[int, int]]:
    return [(piece.split.first, piece.split.end) for piece in found]


@pytest.mark.parametrize("split_bytes", [1, 600, 3000, 1 << 30])
def test_pieces_are_what_is_not_covered_and_meet_at_borders_of_batches(split_bytes: int) -> None:
    made = partition(80)
    end = made.last.end_offset
    borders = {e.first_offset for e, *_ in made.entries} | {end}
    inner = sorted(borders)
    a, b = inner[10], inner[20]
    by_offset = {e.first_offset: e for e, *_ in reversed(made.entries)}
    lake_file = replace(
        FILE, topic="orders", partition=0, first=a, end=b, rows=b - a,
        first_log_id=by_offset[a].log_id, end_log_id=by_offset[b].log_id,
    )  # fmt: skip
    state = LakeState().with_added(Addition((lake_file,)), 1)
    found = plan.pieces(made.pin(cuts=True), state, split_bytes=split_bytes)
    taken = [n for first, last in covered_by(found) for n in range(first, last)]
    assert taken == [*range(a), *range(b, end)]
    for piece in found:
        split = piece.split
        assert {split.first, split.end} <= borders
        assert (split.first_offset, split.end_offset) == (split.first, split.end)
        low, high = made.entries[split.first_log_id - 1][0], made.entries[split.end_log_id - 2][0]
        assert low.first_offset == split.first and high.end_offset == split.end
    if split_bytes == 1 << 30:
        assert len(found) == 2
    if split_bytes == 600:
        assert all(piece.log_bytes <= 600 + 500 for piece in found) and len(found) > 10


def test_a_range_inside_of_batches_is_read_from_the_borders_around_it() -> None:
    made = partition(40)
    found = plan.pieces(made.pin(cuts=True), LakeState(), wanted=OffsetRange(7, 31), split_bytes=1)
    assert [n for first, last in covered_by(found) for n in range(first, last)] == list(range(7, 31))
    assert all(piece.split.first_offset <= piece.split.first for piece in found)
    assert all(piece.split.end_offset >= piece.split.end for piece in found)


def test_borders_of_an_earlier_plan_are_kept() -> None:
    made = partition(60)
    earlier = [piece.planned for piece in plan.pieces(made.pin(cuts=True), LakeState(), split_bytes=700)]
    for n in range(30):
        made.publish(b"later %d" % n)
    found = plan.pieces(made.pin(cuts=True), LakeState(), earlier=earlier, split_bytes=1 << 30)
    assert covered_by(found)[: len(earlier)] == [tuple(one.range) for one in earlier]
    assert found[-1].split.end == made.last.end_offset


def test_a_plan_is_read_as_it_was_written_and_rubbish_is_none() -> None:
    earlier = [piece.planned for piece in plan.pieces(partition(60).pin(cuts=True), LakeState(), split_bytes=700)]
    assert plan.decode(plan.encode(earlier)) == earlier
    assert plan.decode(plan.encode(earlier)[:-9]) == [] == plan.decode(b"")


def test_rounds_take_partitions_in_turn_and_each_in_order() -> None:
    found = [
        piece
        for number in (0, 1)
        for piece in plan.pieces(replace_number(partition(60), number).pin(cuts=True), LakeState(), split_bytes=700)
    ]
    parts = list(plan.rounds(found, 2000))
    assert len(parts) > 2 and sorted(covered_by([p for part in parts for p in part])) == sorted(covered_by(found))
    assert {piece.life.partition for piece in parts[0]} == {0, 1}
    for number in (0, 1):
        mine = [piece.split.first for part in parts for piece in part if piece.life.partition == number]
        assert mine == sorted(mine)


def replace_number(made: Partition, number: int) -> Partition:
    made.number = number
    return made


def test_files_that_overlap_what_is_committed_are_dead_and_no_others() -> None:
    planned = plan.Planned(LIFE, 10, 40, 1, 9, "2026-11-23", "2026-11-23")
    state = LakeState().with_added(Addition((file(10, 25),)), 1)
    mine, pending, other = file(10, 30).path, file(30, 40).path, replace(file(10, 30), topic_uid=1).path
    assert plan.dead_files(planned, [mine, pending, other, file(10, 25).path, "data/x"], state) == [mine]
    assert plan.still_open([planned], state) == [planned]
    assert plan.still_open([planned], state.with_added(Addition((file(25, 40),)), 2)) == []
