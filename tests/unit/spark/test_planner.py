"""What is read, and how tasks share it: every message once, in order, divided at borders between batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_nsqha import planner
from pyspark_nsqha.model import CutPoint, Gone, PartitionLife, PinnedPartition, ReadFailed, ReplicaAddress, Split
from pyspark_nsqha.options import MIB, batch_options
from pyspark_nsqha.planner import PlannedRange, Restriction, Task, plan, resolve, with_borders

SECOND = 10**9
ID_BASE = 7 << 30
REPLICAS = (ReplicaAddress("127.0.0.1:4156", "n1", True),)


def pin(
    cuts: Sequence[tuple[int, int, int]] = ((0, 1, 0), (100, 11, 8 * MIB), (200, 21, 16 * MIB), (230, 31, 18 * MIB)),
    *,
    topic: str = "orders",
    partition: int = 0,
    uid: int = 1,
) -> PinnedPartition:
    """Borders are (offset, log id, position); each batch is a second later than the border before."""
    borders = tuple(CutPoint(*cut, (at + 1) * SECOND) for at, cut in enumerate(cuts))
    identity = PartitionLife(topic, uid, partition, ID_BASE + (partition << 50))
    return PinnedPartition(identity, borders[0], borders[-1], epoch=3, chain=0xABC, cuts=borders, replicas=REPLICAS)


def resolved(
    *pins: PinnedPartition,
    times: Mapping[tuple[str, int], Mapping[int, int]] | None = None,
    floors: Mapping[tuple[str, int], int] | None = None,
    **options: str,
) -> list[tuple[int, int]]:
    """The ranges, by the options of a read."""
    if not {"subscribe", "subscribePattern", "assign"} & options.keys():
        options["subscribe"] = "orders"
    parsed = batch_options({"brokers": "a:1", **options})
    found = resolve(
        pins,
        parsed.subscription,
        parsed.bounds,
        times=times or {},
        floors=floors or {},
        fail_on_data_loss=parsed.reading.fail_on_data_loss,
    )
    return [(one.first, one.end) for one in found]


def messages(tasks: Sequence[Task]) -> list[tuple[str, int, int]]:
    """(topic, partition, offset) of each message that becomes a row, in the order of tasks."""
    return [
        (part.split.identity.topic, part.split.identity.partition, offset)
        for task in tasks
        for part in task
        for offset in (range(part.split.first, part.split.end) if part.wanted is None else part.wanted)
    ]


def splits(tasks: Sequence[Task]) -> list[Split]:
    return [part.split for task in tasks for part in task]


# ---- where reading begins and ends


def test_a_read_is_from_the_log_start_to_the_pinned_end() -> None:
    assert resolved(pin(((40, 5, 100), (90, 9, 200)))) == [(40, 90)]


def test_offsets_minus_two_and_minus_one_are_start_and_end() -> None:
    pins = pin(((40, 5, 100), (90, 9, 200))), pin(partition=1)
    start = json.dumps({"orders": {"0": -2, "1": 17}})
    end = json.dumps({"orders": {"0": 60, "1": -1}})
    assert resolved(*pins, startingOffsets=start, endingOffsets=end) == [(40, 60), (17, 230)]


def test_an_assignment_takes_its_partitions_only() -> None:
    pins = pin(), pin(partition=1), pin(partition=2)
    assert len(resolved(*pins, assign='{"orders":[0,2]}')) == 2
    with pytest.raises(ReadFailed) as missing:
        resolved(*pins, assign='{"orders":[0,3]}')
    assert str(missing.value) == "assign: there is no partition orders/3; `nsqha topic show` lists them"


def test_offsets_name_all_partitions_that_are_read_and_no_other() -> None:
    with pytest.raises(ReadFailed) as missing:
        resolved(pin(), pin(partition=1), startingOffsets='{"orders":{"0":5}}')
    assert str(missing.value) == (
        "startingOffsets: orders/1 is missing; name every partition that is read, -2 is earliest, -1 is latest"
    )
    with pytest.raises(ReadFailed) as unknown:
        resolved(pin(), endingOffsets='{"orders":{"0":5,"7":5}}')
    assert str(unknown.value) == ("endingOffsets: orders/7 is not among the partitions that are read; leave it out")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"startingOffsets": '{"orders":{"0":91}}'},
            "orders/0: startingOffsets 91 is after the committed end: asked for [91, 90), there is [40, 90)",
        ),
        (
            {"endingOffsets": '{"orders":{"0":91}}'},
            "orders/0: endingOffsets 91 is after the committed end: asked for [40, 91), there is [40, 90)",
        ),
        (
            {"startingOffsets": '{"orders":{"0":70}}', "endingOffsets": '{"orders":{"0":60}}'},
            "orders/0: asked for [70, 60), which ends before it begins; there is [40, 90)",
        ),
    ],
)
@pytest.mark.parametrize("fail_on_data_loss", ["true", "false"])
def test_reversed_and_outside_ranges_are_refused(options: dict[str, str], text: str, fail_on_data_loss: str) -> None:
    with pytest.raises(ReadFailed) as refusal:
        resolved(pin(((40, 5, 100), (90, 9, 200))), **options, failOnDataLoss=fail_on_data_loss)
    assert str(refusal.value) == text
    assert refusal.value.available == (40, 90)


def test_what_retention_took_fails_the_read_and_is_named() -> None:
    with pytest.raises(Gone) as gone:
        resolved(pin(((40, 5, 100), (90, 9, 200))), startingOffsets='{"orders":{"0":10}}')
    assert str(gone.value) == (
        "orders/0: asked for [10, 90), there is [40, 90): retention removed 30 messages; "
        "startingOffsets earliest begins at the first message left, failOnDataLoss false reads without them"
    )
    assert (gone.value.planned, gone.value.available) == ((10, 90), (40, 90))


@pytest.mark.parametrize(
    ("first", "end", "left", "lost"), [(10, 60, (40, 60), 30), (10, 30, (30, 30), 20), (0, 40, (40, 40), 40)]
)
def test_without_failing_what_is_read_is_never_outside_of_what_was_asked_for(
    first: int, end: int, left: tuple[int, int], lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    bounds = {"startingOffsets": f'{{"orders":{{"0":{first}}}}}', "endingOffsets": f'{{"orders":{{"0":{end}}}}}'}
    assert resolved(pin(((40, 5, 100), (90, 9, 200))), **bounds, failOnDataLoss="false") == [left]
    said = f"orders/0: retention removed {lost} messages [{first}, {left[0]}): they are left out"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_an_empty_range_below_the_log_start_loses_nothing() -> None:
    both = '{"orders":{"0":10}}'
    assert resolved(pin(((40, 5, 100), (90, 9, 200))), startingOffsets=both, endingOffsets=both) == [(10, 10)]


def test_times_begin_and_end_where_the_snapshot_says() -> None:
    times = {("orders", 0): {5 * 10**6: 17, 9 * 10**6: 60}}
    assert resolved(pin(), startingTimestamp="5", endingTimestamp="9", times=times) == [(17, 60)]
    by_partition = '{"orders":{"0":5}}'
    assert resolved(pin(), startingOffsetsByTimestamp=by_partition, times=times) == [(17, 230)]


def test_a_start_after_the_last_message_is_an_error_or_the_end() -> None:
    times = {("orders", 0): {5 * 10**6: 230}}
    with pytest.raises(ReadFailed) as nothing:
        resolved(pin(), startingTimestamp="5", times=times)
    assert str(nothing.value) == (
        "startingTimestamp: all messages of orders/0 are older; give an earlier time, or "
        "startingOffsetsByTimestampStrategy latest, which reads nothing there"
    )
    latest = {"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "latest"}
    assert resolved(pin(), **latest, times=times) == [(230, 230)]
    assert resolved(pin(), endingTimestamp="5", times=times) == [(0, 230)]


def test_a_channel_is_where_it_stands_and_must_be_there() -> None:
    assert resolved(pin(), startingChannel="audit", floors={("orders", 0): 120}) == [(120, 230)]
    with pytest.raises(ReadFailed) as missing:
        resolved(pin(), startingChannel="audit")
    assert str(missing.value) == "startingChannel: orders/0 has no channel audit; `nsqha channel list` shows them"


# ---- splits


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Borders as a broker names them: some with no message between them, some far apart."""
    offset, log_id, position = draw(st.integers(0, 50)), draw(st.integers(1, 9)), draw(st.integers(0, MIB))
    cuts = [(offset, log_id, position)]
    for _ in range(draw(st.integers(1, 20))):
        offset += draw(st.one_of(st.just(0), st.integers(1, 30)))
        log_id += draw(st.integers(1, 5))
        position += draw(st.integers(1, 9 * MIB))
        cuts.append((offset, log_id, position))
    return cuts


@st.composite
def asked(draw: st.DrawFn) -> list[PlannedRange]:
    found = []
    for partition in range(draw(st.integers(1, 3))):
        one = pin(draw(logs()), partition=partition)
        first = draw(st.integers(one.start.offset, one.end.offset))
        found.append(PlannedRange(one, first, draw(st.integers(first, one.end.offset))))
    return found


@settings(deadline=None)
@given(asked(), st.integers(1, 40), st.integers(0, 30))
def test_splits_cover_each_range_exactly_in_order_at_borders(ranges: list[PlannedRange], mib: int, least: int) -> None:
    tasks = plan(ranges, split_bytes=mib * MIB, min_partitions=least)
    wanted = [(*one.key, offset) for one in ranges for offset in range(one.first, one.end)]
    assert messages(tasks) == wanted
    borders = {(one.pin.identity.partition, cut.log_id): cut for one in ranges for cut in one.pin.cuts}
    for split in splits(tasks):
        low = borders[split.identity.partition, split.first_log_id]
        high = borders[split.identity.partition, split.end_log_id]
        assert (low.offset, high.offset) == (split.first_offset, split.end_offset)
        assert low.offset <= split.first < split.end <= high.offset
    for left, right in pairwise(splits(tasks)):
        if left.identity == right.identity:
            assert left.end_log_id == right.first_log_id


@settings(deadline=None)
@given(logs(), st.integers(1, 40))
def test_a_split_is_as_large_as_asked_for_or_as_borders_allow(cuts: list[tuple[int, int, int]], mib: int) -> None:
    one = pin(cuts)
    target = mib * MIB
    widest = max(right.position - left.position for left, right in pairwise(one.cuts))
    whole = PlannedRange(one, one.start.offset, one.end.offset)
    positions = {cut.log_id: cut.position for cut in one.cuts}
    for split in splits(plan([whole], split_bytes=target)):
        own = positions[split.end_log_id] - positions[split.first_log_id]
        empty = sum(b.position - a.position for a, b in pairwise(one.cuts) if a.offset == b.offset)
        assert own <= target + widest + empty


def even(count: int, step: int = MIB) -> PinnedPartition:
    return pin([(10 * n, n + 1, n * step) for n in range(count + 1)])


def test_equal_steps_make_equal_splits() -> None:
    one = even(12)
    sizes = [split.end - split.first for split in splits(plan([PlannedRange(one, 0, 120)], split_bytes=3 * MIB))]
    assert sizes == [30, 30, 30, 30]


def test_min_partitions_makes_splits_finer_as_far_as_there_are_borders() -> None:
    ranges = [PlannedRange(even(12), 0, 120)]
    assert len(plan(ranges, split_bytes=64 * MIB)) == 1
    assert [len(plan(ranges, split_bytes=64 * MIB, min_partitions=least)) for least in (2, 5, 6, 7)] == [2, 5, 6, 7]
    assert len(plan(ranges, split_bytes=64 * MIB, min_partitions=100)) == 12
    assert len(plan(ranges, split_bytes=MIB, min_partitions=2)) == 12


def test_nothing_to_read_is_no_task() -> None:
    assert plan([], split_bytes=MIB) == []
    assert plan([PlannedRange(pin(), 50, 50), PlannedRange(pin(((7, 3, 5), (7, 3, 5))), 7, 7)], split_bytes=MIB) == []


def test_tasks_are_by_topic_partition_and_offset() -> None:
    ranges = [PlannedRange(even(4), 0, 40), PlannedRange(pin(partition=1), 0, 230)]
    assert messages(plan(ranges, split_bytes=MIB)) == sorted(messages(plan(ranges, split_bytes=MIB)))


def test_batches_before_the_first_message_are_not_fetched() -> None:
    one = pin(((0, 1, 0), (10, 2, 100), (10, 3, 200), (10, 4, 300), (20, 5, 400)))
    [split] = splits(plan([PlannedRange(one, 10, 15)], split_bytes=MIB))
    assert (split.first_log_id, split.end_log_id) == (4, 5)


def test_a_split_names_the_entry_that_vouches_for_it_and_never_goes_behind_it() -> None:
    pinned = pin()
    later = pin(((0, 1, 0), (100, 11, 8 * MIB), (230, 35, 19 * MIB), (400, 50, 30 * MIB)))
    [merged] = with_borders([PlannedRange(pinned, 150, 230)], [later], True)
    [split] = splits(plan([merged], split_bytes=64 * MIB, hold_id="h1"))
    assert (split.end_log_id, split.at_log_id, split.chain) == (pinned.end.log_id, pinned.end.log_id - 1, 0xABC)
    assert (split.first_log_id, split.first, split.end, split.hold_id) == (11, 150, 230, "h1")
    assert split.replicas == REPLICAS


def test_a_broker_that_names_no_borders_is_refused() -> None:
    with pytest.raises(ReadFailed, match=r"orders/0: the broker sent no borders around \[0, 230\); try again"):
        plan([PlannedRange(without_cuts(pin()), 0, 230)], split_bytes=MIB)


def without_cuts(one: PinnedPartition) -> PinnedPartition:
    return PinnedPartition(one.identity, one.start, one.end, one.epoch, one.chain)


def test_more_tasks_than_a_driver_plans_are_refused() -> None:
    with pytest.raises(ReadFailed, match="18m bytes in splits of 1 are more than 200000 tasks; raise splitBytes"):
        plan([PlannedRange(pin(), 0, 230)], split_bytes=1)


# ---- between load() and the plan


def test_a_topic_that_was_made_anew_since_load_is_gone() -> None:
    for now in ([pin(uid=2)], []):
        with pytest.raises(Gone) as gone:
            with_borders([PlannedRange(pin(), 0, 230)], now, False)
        assert str(gone.value) == "orders/0: the topic was deleted or created again since load(); load it again"


def test_a_log_that_ends_before_what_was_pinned_is_refused() -> None:
    with pytest.raises(ReadFailed, match=r"the log ends before what was pinned at load.*: 100 now, 230 then"):
        with_borders([PlannedRange(pin(), 0, 230)], [pin(((0, 1, 0), (100, 11, 8 * MIB)))], False)


def test_what_retention_took_since_load_is_left_out_or_an_error() -> None:
    now = pin(((100, 11, 8 * MIB), (230, 31, 18 * MIB)))
    with pytest.raises(Gone, match=r"asked for \[0, 230\), there is \[100, 230\): retention removed 100 messages"):
        with_borders([PlannedRange(pin(), 0, 230)], [now], True)
    [left] = with_borders([PlannedRange(pin(), 0, 230)], [now], False)
    assert (left.first, left.end) == (100, 230)


def test_what_is_left_of_a_split_begins_at_a_border_of_now() -> None:
    [split] = splits(plan([PlannedRange(pin(), 10, 230)], split_bytes=64 * MIB))
    now = pin(((100, 11, 8 * MIB), (200, 21, 16 * MIB), (230, 31, 18 * MIB), (300, 40, 20 * MIB)))
    left = planner.left_of(split, now, 120)
    assert left is not None
    assert (left.first, left.end, left.first_log_id, left.end_log_id) == (120, 230, 11, 31)
    assert planner.left_of(split, now, 230) is None


# ---- single messages


def ids(*offsets: int, partition: int = 0) -> list[str]:
    return [f"{ID_BASE + (partition << 50) + offset:016x}" for offset in offsets]


def test_ids_are_read_where_they_are_and_nothing_else_is_a_row() -> None:
    ranges = [PlannedRange(pin(), 0, 230), PlannedRange(pin(partition=1), 0, 230)]
    wanted = [*ids(150, 3, 4), *ids(229, partition=1)]
    tasks = plan(planner.narrow_to_ids(ranges, wanted, True), split_bytes=64 * MIB)
    assert messages(tasks) == [("orders", 0, 3), ("orders", 0, 4), ("orders", 0, 150), ("orders", 1, 229)]
    assert [(split.first_log_id, split.end_log_id) for split in splits(tasks)] == [(1, 11), (11, 21), (21, 31)]
    assert [len(task) for task in tasks] == [2, 1]


@settings(deadline=None)
@given(asked(), st.data())
def test_any_messages_can_be_picked(ranges: list[PlannedRange], data: st.DataObject) -> None:
    every = [(*one.key, offset) for one in ranges for offset in range(one.first, one.end)]
    picked = data.draw(st.sets(st.sampled_from(every))) if every else set()
    wanted = [f"{ID_BASE + (partition << 50) + offset:016x}" for _, partition, offset in picked]
    tasks = plan(planner.narrow_to_ids(ranges, wanted, True), split_bytes=8 * MIB)
    assert messages(tasks) == sorted(picked)


def test_ids_that_are_nowhere_are_named_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    ranges = [PlannedRange(pin(), 0, 230)]
    with pytest.raises(ReadFailed) as missing:
        planner.narrow_to_ids(ranges, ids(5, 230), True)
    assert str(missing.value) == (
        f"ids: {ids(230)[0]} is in no range that is read (another topic's, trimmed, or outside the bounds); "
        "failOnDataLoss false reads the others"
    )
    [left] = planner.narrow_to_ids(ranges, ids(5, 230), False)
    assert left.wanted == (5,)
    assert caplog.records[0].getMessage().endswith("and left out: 1 ids")


# ---- filters


def restricted(restriction: Restriction, *ranges: PlannedRange) -> list[tuple[str, int, int]]:
    kept = [restriction.by_time(one) for one in restriction.apply(ranges)]
    return messages(plan(kept, split_bytes=64 * MIB))


def test_restrictions_leave_topics_partitions_offsets_and_ids() -> None:
    both = PlannedRange(pin(), 0, 230), PlannedRange(pin(partition=1), 0, 230)
    assert len(restricted(Restriction(), *both)) == 460
    assert restricted(Restriction(topics=frozenset({"else"})), *both) == []
    assert {key[1] for key in restricted(Restriction(partitions=frozenset({1, 9})), *both)} == {1}
    assert {key[1] for key in restricted(Restriction(partition_least=1), *both)} == {1}
    assert {key[1] for key in restricted(Restriction(partition_most=0), *both)} == {0}
    assert [key[2] for key in restricted(Restriction(first=228, end=900), *both)] == [228, 229, 228, 229]
    assert restricted(Restriction(first=300), *both) == []
    assert restricted(Restriction(first=20, end=10), *both) == []
    assert [key[1:] for key in restricted(Restriction(offsets=frozenset({7, 900})), *both)] == [(0, 7), (1, 7)]
    assert restricted(Restriction(ids=frozenset(ids(9, partition=1))), *both) == [("orders", 1, 9)]
    either = Restriction(ids=frozenset(ids(9, 10)), offsets=frozenset({10}), partitions=frozenset({0}))
    assert restricted(either, *both) == [("orders", 0, 10)]


@settings(deadline=None)
@given(logs(), st.integers(0, 25), st.integers(0, 25), st.data())
def test_times_leave_out_only_what_is_older_or_newer(
    cuts: list[tuple[int, int, int]], since: int, until: int, data: st.DataObject
) -> None:
    one = pin(cuts)
    first = data.draw(st.integers(one.start.offset, one.end.offset))
    whole = PlannedRange(one, first, data.draw(st.integers(first, one.end.offset)))
    restriction = Restriction(since_ns=since * SECOND, until_ns=until * SECOND)
    kept = {key[2] for key in restricted(restriction, whole)}
    assert kept <= set(range(whole.first, whole.end))
    for low, high in pairwise(one.cuts):
        # Messages between two borders are of the first one's time or later, up to the second one's.
        if low.timestamp_ns < restriction.until_ns and high.timestamp_ns >= restriction.since_ns:
            wanted = set(range(max(low.offset, whole.first), min(high.offset, whole.end)))
            assert wanted <= kept


def test_a_border_whose_time_nobody_knows_leaves_out_nothing() -> None:
    one = pin(((0, 1, 0), (10, 2, 100)))
    unknown = PinnedPartition(
        one.identity, one.start, one.end, 3, 1, tuple(cut._replace(timestamp_ns=0) for cut in one.cuts)
    )
    assert len(restricted(Restriction(since_ns=SECOND), PlannedRange(unknown, 0, 10))) == 10
    for until_ns in (SECOND, 0):
        assert len(restricted(Restriction(until_ns=until_ns), PlannedRange(unknown, 0, 10))) == 10


@pytest.mark.parametrize("unknown", [(1,), (1, 2), (0, 1, 2), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("since", range(6))
@pytest.mark.parametrize("until", range(7))
def test_borders_whose_times_are_known_do_for_the_others(unknown: tuple[int, ...], since: int, until: int) -> None:
    """The batch between two borders is as old as the first one; a time that is not known hides none of them."""
    one = pin(((0, 1, 0), (10, 2, 100), (20, 3, 200), (30, 4, 300)))
    times = [cut.timestamp_ns for cut in one.cuts]
    cuts = tuple(cut._replace(timestamp_ns=0) if at in unknown else cut for at, cut in enumerate(one.cuts))
    hidden = PinnedPartition(one.identity, one.start, one.end, 3, 1, cuts)
    restriction = Restriction(since_ns=since * SECOND, until_ns=until * SECOND)
    kept = {key[2] for key in restricted(restriction, PlannedRange(hidden, 0, 30))}
    for at, (low, high) in enumerate(pairwise(one.cuts)):
        if restriction.since_ns <= times[at] < restriction.until_ns:
            assert set(range(low.offset, high.offset)) <= kept
