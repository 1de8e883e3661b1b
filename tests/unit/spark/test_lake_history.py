"""Lake and log as one history: every message of the range once, from the one or the other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pyspark_nsqha.lake import history
from pyspark_nsqha.lake.archive import Subject, once
from pyspark_nsqha.lake.history import divide, lengthened, part_rows, tasks
from pyspark_nsqha.model import Gone, PinnedPartition, ReadFailed
from pyspark_nsqha.planner import PlannedRange
from pyspark_nsqha.reading.columns import DEFAULT
from tests.unit.spark.lake_rig import NOON, SECOND, FakeLog, Lake, Partition

KEY = ("orders", 0)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A hundred batches of which retention took forty; all of them are archived but the last ten."""
    rng = random.Random(11)
    log = FakeLog([Partition(step=800)])
    partition = log.partitions[0]
    for n in range(90):
        partition.publish(*[rng.randbytes(rng.randrange(90)) for _ in range(rng.randrange(5))], at_ns=NOON + n * SECOND)
    lake = Lake(tmp_path / "lake", log, split_bytes=800)
    once(log, lake.rounds(), Subject(("orders",)))
    for n in range(90, 100):
        partition.publish(rng.randbytes(9), at_ns=NOON + n * SECOND)
    partition.trim(40)
    return lake


def uri(lake: Lake) -> str:
    return str(lake.folder)


def pinned(lake: Lake, *seconds: int) -> tuple[PinnedPartition, dict[int, int]]:
    """The pin with the lake in front of it, and the offsets of these times."""
    partition = lake.log.partitions[0]
    pin = partition.pin()
    times = {NOON + second * SECOND: 0 for second in seconds}
    for at in times:
        after = (entry.first_offset for entry, *_ in partition.entries[40:] if entry.timestamp_ns >= at)
        times[at] = next(after, pin.end.offset)
    longer = history.lengthened(uri(lake), [pin], {KEY: times})
    return longer.pins[0], dict(longer.times[KEY])


def offsets(parts: list[history.LakePart]) -> list[int]:
    found = []
    for part in parts:
        for batch in part_rows(part, DEFAULT):
            found += batch.column("offset").to_pylist()
    return found


def start(lake: Lake) -> int:
    return lake.log.partitions[0].pin().start.offset


def test_a_pin_begins_where_the_lake_does(lake: Lake) -> None:
    pin, _ = pinned(lake)
    assert pin.start.offset == 0 < start(lake)
    assert pin.end == lake.log.partitions[0].pin().end


def test_times_below_the_log_start_are_exact(lake: Lake) -> None:
    partition = lake.log.partitions[0]
    seconds = range(-2, 110)
    _, times = pinned(lake, *seconds)
    for second in seconds:
        at = NOON + second * SECOND
        expected = next(
            (e.first_offset for e, *_ in partition.entries if e.timestamp_ns >= at), partition.last.end_offset
        )
        # Where only batches without messages lie between, the offset is the same.
        assert times[at] == expected, second


@pytest.mark.parametrize(("first", "end"), [(0, 200), (0, 10), (3, 4), (50, 140), (120, 130)])
def test_every_message_comes_once_from_the_one_or_the_other(lake: Lake, first: int, end: int) -> None:
    pin, _ = pinned(lake)
    end = min(end, pin.end.offset)
    parts, left = divide(uri(lake), [PlannedRange(pin, first, end)], [lake.log.partitions[0].pin()])
    log = [offset for one in left for offset in range(one.first, one.end)]
    assert offsets(parts) + log == list(range(first, end))
    assert all(offset >= start(lake) for offset in log)


def test_rows_of_the_lake_are_the_rows_of_the_log(lake: Lake) -> None:
    pin, _ = pinned(lake)
    parts, _ = divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], [lake.log.partitions[0].pin()])
    lake.log.partitions[0].start = 0
    from pyspark_nsqha.lake.commits.manifest import LakeState
    from pyspark_nsqha.lake.plan import pieces

    log = [
        row
        for piece in pieces(lake.log.partitions[0].pin(cuts=True), LakeState())
        for verified in lake.log.read(piece.split, lambda *_: None)
        for batch in verified.batches
        for row in batch.to_pylist()
    ]
    ours = [row for part in parts for batch in part_rows(part, DEFAULT) for row in batch.to_pylist()]
    assert ours == log[: len(ours)] and len(ours) >= start(lake)


def test_columns_are_those_that_are_asked_for_in_their_order(lake: Lake) -> None:
    pin, _ = pinned(lake)
    parts, _ = divide(uri(lake), [PlannedRange(pin, 0, 5)], [lake.log.partitions[0].pin()])
    names = ("id", "_corrupt", "value")
    batch = next(iter(part_rows(parts[0], names)))
    assert batch.schema.names == list(names)
    assert batch.column("_corrupt").null_count == batch.num_rows


def test_single_messages_are_looked_up_where_they_are(lake: Lake) -> None:
    pin, _ = pinned(lake)
    wanted = (2, 30, start(lake) - 1, start(lake), pin.end.offset - 1)
    parts, left = divide(
        uri(lake), [PlannedRange(pin, wanted[0], wanted[-1] + 1, wanted)], [lake.log.partitions[0].pin()]
    )
    assert offsets(parts) == list(wanted[:3])
    assert left[0].wanted == wanted[3:]


def test_files_outside_of_a_time_are_passed_over(lake: Lake) -> None:
    pin, _ = pinned(lake)
    now = [lake.log.partitions[0].pin()]
    whole, _ = divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], now)
    late, _ = divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], now, since_ns=NOON + 30 * SECOND)
    assert 0 < len(late) < len(whole) and late == whole[-len(late) :]


def test_what_is_in_neither_is_gone_or_left_out(lake: Lake) -> None:
    partition = lake.log.partitions[0]
    partition.trim(55)  # past what was archived
    pin = replace(pinned(lake)[0])
    state = lake.commits.state()
    end = state.end(next(iter(state.files)))
    now = [partition.pin()]
    with pytest.raises(Gone, match=rf"orders/0: offsets \[{end}, {now[0].start.offset}\) are neither in the lake nor"):
        divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], now)
    parts, left = divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], now, fail_on_data_loss=False)
    assert offsets(parts) == list(range(end or 0))
    assert left[0].first == now[0].start.offset


def test_another_life_of_the_topic_is_not_read(lake: Lake) -> None:
    lake.log.partitions[0] = Partition(uid=0xDEF)
    lake.log.partitions[0].publish(b"new")
    pin = lake.log.partitions[0].pin()
    assert lengthened(uri(lake), [pin], {}).pins == (pin,)


def test_tasks_are_some_files_of_one_partition(lake: Lake) -> None:
    pin, _ = pinned(lake)
    parts, _ = divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], [lake.log.partitions[0].pin()])
    size = parts[0].file.bytes + parts[1].file.bytes
    found = tasks(parts, size)
    assert [part for task in found for part in task] == parts
    assert 1 < len(found) < len(parts)
    assert all(sum(part.file.bytes for part in task) <= size for task in found)


def test_a_damaged_file_is_an_error_that_names_it(lake: Lake) -> None:
    pin, _ = pinned(lake)
    parts, _ = divide(uri(lake), [PlannedRange(pin, 0, pin.end.offset)], [lake.log.partitions[0].pin()])
    path = lake.folder / parts[0].file.path
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ReadFailed, match=r"orders/0: offsets \[0, .*parquet in .*nsqha spark verify --full"):
        offsets(parts)
    path.unlink()
    with pytest.raises(ReadFailed, match="the file is gone"):
        offsets(parts)


def test_a_place_without_manifests_is_no_lake(tmp_path: Path) -> None:
    with pytest.raises(ReadFailed, match=r"^archive: .* is no lake"):
        history.state_of(str(tmp_path))
