"""A split yields exactly its messages, or fails, or says how many it left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pyspark_nsqha.model import (
    ENTRY_BYTES,
    CutPoint,
    FetchedRun,
    Gone,
    NotVerified,
    PinnedPartition,
    ReadFailed,
    Split,
    Unreadable,
)
from pyspark_nsqha.options import ConnectOptions, Reading
from pyspark_nsqha.planner import SplitPart
from pyspark_nsqha.reading import rows
from pyspark_nsqha.reading.columns import CORRUPT
from pyspark_nsqha.reading.entries import LOST
from pyspark_nsqha.reading.rows import Recipe, part_batches
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest
from tests.unit.spark.logs import IDENTITY, Writer, messages

BATCHES = 4
EACH = 3  # messages of a batch
Step = FetchedRun | Exception


def written(lost: int | None = None) -> Writer:
    """BATCHES batches of EACH messages; of one, the frames may be lost."""
    writer = Writer()
    for batch in range(BATCHES):
        bodies = [b"%d" % (batch * EACH + n) for n in range(EACH)]
        writer.batch(messages(*bodies), flags=LOST if batch == lost else 0, with_frames=batch != lost)
    return writer


def in_runs(writer: Writer) -> list[Step]:
    """A run for each batch."""
    data = iter(writer.frames)
    lost = len(writer.entries) - len(writer.frames)
    assert not lost or lost == 1
    runs: list[Step] = []
    for at, entry in enumerate(writer.entries):
        is_lost = int.from_bytes(entry[52:56]) & LOST
        runs.append(FetchedRun(at + 1, entry, b"" if is_lost else next(data)))
    return runs


def damaged(runs: list[Step], at: int) -> list[Step]:
    """One byte of one run's frames is another."""
    run = runs[at]
    assert isinstance(run, FetchedRun)
    broken = bytearray(run.frames)
    broken[-1] ^= 1
    return [*runs[:at], run._replace(frames=bytes(broken)), *runs[at + 1 :]]


@dataclass
class Replicas:
    """Keeps the contract of `runs.Runs`: each replica has its own runs of the same batches."""

    steps: Sequence[list[Step]]
    at: int = 0
    turn: int = 0
    tried: int = 0
    closed: int = 0
    asked: list[Split] = field(default_factory=list)

    def __call__(self, split: Split, **how: Any) -> Replicas:
        self.asked.append(split)
        self.at = split.first_log_id - 1
        return self

    def __iter__(self) -> Iterator[FetchedRun]:
        return self

    def __next__(self) -> FetchedRun:
        if self.at >= len(self.steps[self.turn]):
            raise StopIteration
        step = self.steps[self.turn][self.at]
        if isinstance(step, Exception):
            raise step
        self.at += 1
        return step

    def retry_other(self, why: str) -> bool:
        if self.tried + 1 >= len(self.steps):
            return False
        self.tried += 1
        self.turn = (self.turn + 1) % len(self.steps)
        self.at -= 1
        return True

    def close(self) -> None:
        self.closed += 1


def split_of(writer: Writer, first: int = 0, end: int = BATCHES * EACH) -> Split:
    last = writer.last
    return Split(IDENTITY, first, end, 1, last.log_id + 1, 0, last.end_offset, last.log_id, last.chain)


def recipe(*columns: str, connection: ConnectOptions | None = None, **reading: Any) -> Recipe:
    return Recipe(columns or ("offset", "value"), Reading(**reading), connection)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    """One replica that has everything, unless the test says otherwise."""
    found = Replicas([in_runs(written())])
    monkeypatch.setattr(rows, "runs", found)
    return found


def read(split: Split, how: Recipe, wanted: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    return [row for batch in part_batches(SplitPart(split, wanted), how) for row in batch.to_pylist()]


def offsets(found: list[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in found]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("first", "end"), [(0, 12), (1, 12), (3, 9), (5, 7), (11, 12)])
def test_a_split_gives_its_messages_and_no_other(replicas: Replicas, first: int, end: int) -> None:
    found = read(split_of(written(), first, end), recipe())
    assert [(row["offset"], row["value"]) for row in found] == [(n, b"%d" % n) for n in range(first, end)]
    assert replicas.closed == 1


def test_what_is_wanted_of_a_split_needs_no_column_of_its_own(replicas: Replicas) -> None:
    found = read(split_of(written(), 2, 9), recipe("value"), wanted=(2, 7, 8))
    assert found == [{"value": b"2"}, {"value": b"7"}, {"value": b"8"}]


def test_a_reader_that_stops_in_the_middle_lets_go_of_its_source(replicas: Replicas) -> None:
    batches = part_batches(SplitPart(split_of(written())), recipe())
    assert next(batches).num_rows == EACH
    batches.close()  # type: ignore[attr-defined]
    assert replicas.closed == 1


@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
def test_another_replica_is_read_where_one_does_not_verify(
    replicas: Replicas, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    whole = in_runs(written())
    replicas.steps = [damaged(whole, 2), whole]
    assert offsets(read(split_of(written()), recipe(mode=mode))) == list(range(12))
    assert len(warnings(caplog)) == 1
    assert warnings(caplog)[0].endswith("trying another replica")


def test_what_no_replica_has_right_fails_the_task(replicas: Replicas) -> None:
    replicas.steps = [damaged(in_runs(written()), 2)] * 2
    with pytest.raises(NotVerified, match=r"offsets \[6, 9\)"):
        read(split_of(written()), recipe())
    assert replicas.tried == 1


def test_permissive_gives_a_row_for_each_batch_that_does_not_verify(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    replicas.steps = [damaged(in_runs(written()), 2)]
    found = read(split_of(written()), recipe("offset", "value", CORRUPT, mode="PERMISSIVE"))
    assert offsets(found) == [*range(7), 9, 10, 11]
    assert found[6]["value"] is None
    assert found[6][CORRUPT]
    assert warnings(caplog)[-1] == (
        "orders/3: of offsets [0, 12) 3 messages are left out: 3 in batches that do not verify"
    )


def test_dropmalformed_leaves_them_out_and_counts(replicas: Replicas, caplog: pytest.LogCaptureFixture) -> None:
    replicas.steps = [damaged(in_runs(written()), 2)]
    assert offsets(read(split_of(written(), 0, 8), recipe(mode="DROPMALFORMED"))) == list(range(6))
    assert warnings(caplog)[-1] == (
        "orders/3: of offsets [0, 8) 2 messages are left out: 2 in batches that do not verify"
    )


def test_corrupt_rows_are_kept_when_single_messages_are_wanted(replicas: Replicas) -> None:
    replicas.steps = [damaged(in_runs(written()), 2)]
    how = recipe("value", CORRUPT, mode="PERMISSIVE")
    found = read(split_of(written(), 1, 9), how, wanted=(1, 8))
    assert [row["value"] for row in found] == [b"1", None]


@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
def test_lost_messages_fail_the_task_whatever_the_mode(replicas: Replicas, mode: str) -> None:
    replicas.steps = [in_runs(written(lost=1))]
    with pytest.raises(Unreadable, match=r"orders/3: offsets \[3, 6\) are lost"):
        read(split_of(written(lost=1)), recipe(mode=mode))


def test_lost_messages_are_left_out_and_counted_if_losses_may_be(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    replicas.steps = [in_runs(written(lost=1))]
    found = read(split_of(written(lost=1)), recipe(fail_on_data_loss=False))
    assert offsets(found) == [0, 1, 2, *range(6, 12)]
    assert warnings(caplog)[-1] == (
        "orders/3: of offsets [0, 12) 3 messages are left out: 3 marked as lost by an operator"
    )


@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_another_replica_may_have_what_one_has_lost(replicas: Replicas, fail_on_data_loss: bool) -> None:
    replicas.steps = [in_runs(written(lost=1)), in_runs(written())]
    assert offsets(read(split_of(written()), recipe(fail_on_data_loss=fail_on_data_loss))) == list(range(12))


def test_fewer_rows_than_planned_are_an_error_and_no_result(replicas: Replicas) -> None:
    replicas.steps = [in_runs(written())[:3]]
    with pytest.raises(ReadFailed, match=r"offsets \[0, 12\) are 12 messages, but 9 rows were read; this is a bug"):
        read(split_of(written()), recipe())


def test_runs_of_different_logs_do_not_follow_each_other(replicas: Replicas) -> None:
    other = Writer()
    for batch in range(BATCHES):
        other.batch(messages(*[b"other %d" % (batch * EACH + n) for n in range(EACH)]))
    replicas.steps = [in_runs(written())[:1] + in_runs(other)[1:]]
    with pytest.raises(NotVerified, match=r"offsets \[3, 6\)"):
        read(split_of(other), recipe())


def test_arrow_batches_are_as_large_as_asked_for(replicas: Replicas) -> None:
    writer = Writer()
    entry = writer.batch(messages(*[b"x" * 1000] * 500))
    replicas.steps = [in_runs(writer)]
    sizes = [batch.nbytes for batch in part_batches(SplitPart(split_of(writer, 0, 500)), recipe(batch_bytes=64 << 10))]
    assert entry.size > 500_000
    assert len(sizes) == 8
    assert max(sizes) < 70_000


def test_the_chain_of_the_snapshot_is_compared(replicas: Replicas) -> None:
    with pytest.raises(NotVerified):
        read(replace(split_of(written()), chain=1), recipe())


# ---- retention, while it is read


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[SnapshotRequest]:
    """The log starts with its third batch now; what was asked for is in the list."""
    asked: list[SnapshotRequest] = []
    borders = tuple(CutPoint(EACH * n, n + 1, 100 * n, 1) for n in range(2, BATCHES + 1))
    pin = PinnedPartition(IDENTITY, borders[0], borders[-1], 1, 1, borders)

    class Service:
        def __init__(self, connection: ConnectOptions) -> None:
            pass

        def snapshot(self, one: SnapshotRequest) -> Snapshot:
            asked.append(one)
            return Snapshot((pin,))

    monkeypatch.setattr(rows, "Segments", Service)
    return asked


CONNECTION = ConnectOptions(("127.0.0.1:1",))


def test_what_retention_takes_meanwhile_fails_the_task(replicas: Replicas, now: list[SnapshotRequest]) -> None:
    replicas.steps = [[Gone("gone")] * BATCHES]
    with pytest.raises(Gone):
        read(split_of(written()), recipe(connection=CONNECTION))
    assert now == []


def test_or_what_is_left_is_read_and_the_rest_counted(
    replicas: Replicas, now: list[SnapshotRequest], caplog: pytest.LogCaptureFixture
) -> None:
    whole = in_runs(written())
    replicas.steps = [[whole[0], Gone("gone"), *whole[2:]]]
    found = read(split_of(written(), 1, 11), recipe(connection=CONNECTION, fail_on_data_loss=False))
    assert offsets(found) == [1, 2, *range(6, 11)]
    assert now[0].ranges == (("orders", 3, 3, 11),)
    assert [split.first_log_id for split in replicas.asked] == [1, 3]
    assert warnings(caplog) == ["orders/3: of offsets [1, 11) 3 messages are left out: 3 removed by retention"]


def test_nothing_outside_of_a_split_is_read_when_all_of_it_is_gone(
    replicas: Replicas, now: list[SnapshotRequest]
) -> None:
    replicas.steps = [[Gone("gone")] * BATCHES]
    assert read(split_of(written(), 0, 5), recipe(connection=CONNECTION, fail_on_data_loss=False)) == []
    assert len(replicas.asked) == 1


def test_a_log_that_is_there_by_the_brokers_word_is_not_asked_for_again(
    replicas: Replicas, now: list[SnapshotRequest]
) -> None:
    replicas.steps = [[Gone("gone")] * BATCHES]
    with pytest.raises(Gone):
        read(split_of(written(), 7, 9), recipe(connection=CONNECTION, fail_on_data_loss=False))
    assert len(now) == 1


def test_a_topic_that_was_made_anew_is_no_retention(replicas: Replicas, now: list[SnapshotRequest]) -> None:
    replicas.steps = [[Gone("gone")] * BATCHES]
    other = replace(split_of(written()), identity=IDENTITY._replace(topic_uid=1))
    with pytest.raises(Gone):
        read(other, recipe(connection=CONNECTION, fail_on_data_loss=False))


def test_the_runs_of_this_test_are_whole_entries() -> None:
    assert all(isinstance(run, FetchedRun) and len(run.entries) == ENTRY_BYTES for run in in_runs(written()))
