"""The slow scrub: what it finds, what it does not take for damage, and how slow it is. Time is a list of sleeps."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha import hot
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.lookup import LogIdentity
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import File
from nsqha.errors import Poisoned
from nsqha.server.partition.scrub import (
    BATCH_BYTES_MIN,
    LINES_MAX,
    PIECE_BYTES,
    START_SECONDS,
    ScrubbedReplica,
    Scrubber,
)
from nsqha.server.runtime.measures import Measures
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import add, drop_pairs, roll
from tests.unit.server.broker_rig import running, until

INTERVAL = 86_400.0


class RoundOver(Exception):
    """The scrub would sleep until the next round."""


class AtOnce(Executor):
    """A thread that is never busy."""

    def __init__(self) -> None:
        self.before: Callable[[], object] = lambda: None  # happens once, when a piece was asked for and is not begun

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        before, self.before = self.before, lambda: None
        before()
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ScrubbedLog:
    """A partition as the scrub sees one; everything is committed unless the test says otherwise."""

    def __init__(self, storage: SimStorage, number: int = 0) -> None:
        self.number = number
        self.closed = False
        self.leader = SimpleNamespace(committed=0)
        self.log = PartitionLog.create(
            storage,
            f"data/t/{number}",
            LogIdentity(7, number),
            cache=BatchCache(0),
            limits=LogLimits(segment_bytes=4000, commitlog_bytes=1 << 20),
        )

    def fill(self, batches: int, size: int = 1000) -> None:
        for _ in range(batches):
            add(self.log, b"m" * size)
            if self.log.needs_roll:
                roll(self.log)
        self.leader.committed = self.log.end.log_id


class ScrubberRig:
    def __init__(self, rate: int = 1 << 20, seed: int = 1) -> None:
        self.storage = SimStorage()
        self.partition = ScrubbedLog(self.storage)
        self.partitions: list[Any] = [self.partition]
        self.sleeps: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None  # happens once, between two pieces
        self.told: list[tuple[int, int, int]] = []
        self.measures = Measures()
        self.thread = AtOnce()
        self.scrubber = Scrubber(
            lambda: [
                ScrubbedReplica("t", p.number, p.log, lambda p=p: p.leader.committed, lambda p=p: p.closed)  # type: ignore[misc]
                for p in self.partitions
            ],
            bytes_per_second=rate,
            interval_seconds=INTERVAL,
            measures=self.measures,
            rng=random.Random(seed),
            storage=self.storage,
            thread=self.thread,
            sleep=self._sleep,
        )
        self.scrubber.on_damage = lambda replica, *damage: self.told.append((replica.partition, *damage))

    async def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        if seconds > INTERVAL / 2:
            raise RoundOver
        if len(self.sleeps) == 1:
            return  # before the first round
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()

    def round(self) -> None:
        with pytest.raises(RoundOver):
            asyncio.run(self.scrubber.run())

    def flip(self, log_id: int, byte: int = 20, partition: ScrubbedLog | None = None) -> None:
        """A bit of a batch's frames."""
        log = (partition or self.partition).log
        pair = log.files.pair_of(log_id)
        self.storage.flip(pair.path(".segment"), (log.entry(log_id).position - pair.position + byte) * 8)

    @property
    def found(self) -> list[tuple[int, int]]:
        return sorted((d.first.log_id, d.end.log_id) for damage in self.scrubber.damage.values() for d in damage)


def _meanwhile(rig: ScrubberRig, before: bool, happens: Callable[[], object]) -> None:
    if before:
        rig.thread.before = happens
    else:
        rig.meanwhile = happens


def test_everything_is_read_once_a_round() -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.round()
    assert rig.scrubber.bytes_read == rig.partition.log.end.position
    assert (rig.scrubber.rounds, rig.found, rig.told) == (1, [], [])
    rig.round()
    assert rig.scrubber.bytes_read == 2 * rig.partition.log.end.position


def test_damage_is_found_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.flip(6)
    with caplog.at_level(logging.ERROR, "nsqha.scrub"):
        rig.round()
    assert rig.told == [(0, 6, 7)]
    assert rig.found == [(6, 7)]
    assert rig.measures.log_events == {"scrub_damage": 1}
    (record,) = [record for record in caplog.records if record.name == "nsqha.scrub"]
    fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]
    assert record.event == "scrub_damage"  # type: ignore[attr-defined]
    assert {k: fields[k] for k in ("topic", "partition", "first_log_id", "end_log_id", "first_offset")} == {
        "topic": "t", "partition": 0, "first_log_id": 6, "end_log_id": 7, "first_offset": 5,
    }  # fmt: skip
    assert "log skip" in record.getMessage()


def test_damage_of_the_newest_pair_is_found_too() -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.flip(18)
    assert rig.partition.log.files.pair_of(18) is rig.partition.log.files.pairs[-1]
    rig.round()
    assert rig.found == [(18, 19)]


def test_neighbours_are_one_range() -> None:
    rig = ScrubberRig(rate=4096)  # each batch is a piece of its own
    rig.partition.fill(18)
    for log_id in (1, 2, 3, 9):
        rig.flip(log_id)
    rig.round()
    assert rig.found == [(1, 4), (9, 10)]
    assert sorted(told[1:] for told in rig.told) == rig.found


@pytest.mark.parametrize(
    ("mended", "left"),
    [
        ((4, 9), []),
        ((5, 8), []),
        ((1, 5), [(5, 8)]),
        ((8, 9), [(5, 8)]),
        ((5, 6), [(6, 8)]),
        ((7, 9), [(5, 7)]),
        ((6, 7), [(5, 6), (7, 8)]),
    ],
)
def test_what_was_mended_is_damaged_no_more(mended: tuple[int, int], left: list[tuple[int, int]]) -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    other = ScrubbedLog(rig.storage, 1)
    other.fill(18)
    rig.partitions.append(other)
    for log_id in (5, 6, 7):
        rig.flip(log_id)
    rig.flip(6, partition=other)
    rig.round()
    rig.scrubber.mended(rig.partition.log, *mended)
    assert rig.found == sorted([*left, (6, 7)]), "another partition's damage stays"
    places = [(d.first, d.end) for damage in rig.scrubber.damage.values() for d in damage]
    log = rig.partition.log
    for first, end in places:
        assert first.offset == log.entry(first.log_id).first_offset and end.position == log.entry(end.log_id).position


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("with_entry", [False, True])
def test_a_damaged_anchor_is_told_apart_from_the_batch_that_it_copies(n: int, with_entry: bool) -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    log = rig.partition.log
    first, commitlog = log.files.pairs[n].first.log_id, log.files.pairs[n].path(".commitlog")
    whole = rig.storage.contents()[commitlog]
    rig.storage.flip(commitlog, 30 * 8)
    if with_entry:
        rig.storage.flip(commitlog, (ENTRY_BYTES + 30) * 8)
    anchors: list[int] = []
    rig.scrubber.on_bad_anchor = lambda replica, first_log_id: anchors.append(first_log_id)
    rig.round()
    entries = [(first, first + 1)] if with_entry else []
    assert (anchors, rig.told) == ([first], [(0, *entry) for entry in entries])
    log.repair.restoring_anchor(first)()
    assert rig.storage.contents()[commitlog][:ENTRY_BYTES] == whole[:ENTRY_BYTES]
    rig.scrubber.mended(log, first - 1, first)
    assert rig.found == entries


def test_what_is_not_committed_is_not_looked_at() -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.flip(17)
    rig.flip(5)
    for committed, found in (1, []), (5, []), (6, [(5, 6)]), (17, [(5, 6)]), (18, [(5, 6), (17, 18)]):
        rig.partition.leader.committed = committed
        rig.round()
        assert rig.found == found
        assert rig.scrubber.bytes_read == rig.partition.log.entry(committed).position
        rig.scrubber.bytes_read = 0


@pytest.mark.parametrize("before", [True, False], ids=["before a piece", "between pieces"])
def test_files_that_retention_takes_meanwhile_are_no_damage(before: bool) -> None:
    for seed in range(10):
        rig = ScrubberRig(rate=BATCH_BYTES_MIN, seed=seed)
        rig.partition.fill(18)
        log = rig.partition.log
        _meanwhile(rig, before, lambda log=log: drop_pairs(log, log.pairs[-1].first))  # type: ignore[misc]
        rig.round()
        assert len(log.pairs) == 1
        assert (rig.found, rig.told) == ([], [])


@pytest.mark.parametrize("before", [True, False], ids=["before a piece", "between pieces"])
def test_a_topic_that_is_deleted_meanwhile_is_no_damage(before: bool) -> None:
    for seed in range(10):
        rig = ScrubberRig(rate=BATCH_BYTES_MIN, seed=seed)
        rig.partition.fill(18)
        other = ScrubbedLog(rig.storage, 1)
        other.fill(18)
        rig.partitions.append(other)

        def deleted(rig: ScrubberRig = rig) -> None:
            rig.partition.closed = True
            rig.partition.log.close()
            rig.storage.remove_tree("data/t/0")

        _meanwhile(rig, before, deleted)
        rig.round()
        assert (rig.found, rig.told) == ([], [])
        assert rig.scrubber.bytes_read >= other.log.end.position


@pytest.mark.parametrize("before", [True, False], ids=["before a piece", "between pieces"])
def test_a_log_that_is_begun_anew_meanwhile_is_no_damage(before: bool) -> None:
    """A follower goes on; its old log is closed, and the folder is another one's."""
    for seed in range(10):
        rig = ScrubberRig(rate=BATCH_BYTES_MIN, seed=seed)
        partition = rig.partition
        partition.fill(18)

        def begun_anew(rig: ScrubberRig = rig, partition: ScrubbedLog = partition) -> None:
            partition.log.close()
            rig.storage.remove_tree("data/t/0")

        _meanwhile(rig, before, begun_anew)
        rig.round()
        assert (rig.found, rig.told) == ([], [])


def test_batches_and_files_that_come_meanwhile_are_for_the_next_round() -> None:
    rig = ScrubberRig(rate=BATCH_BYTES_MIN)
    rig.partition.fill(18)
    end = rig.partition.log.end.position
    rig.meanwhile = lambda: rig.partition.fill(20)
    rig.round()
    assert end <= rig.scrubber.bytes_read < rig.partition.log.end.position
    assert rig.found == []
    rig.scrubber.bytes_read = 0
    rig.round()
    assert rig.scrubber.bytes_read == rig.partition.log.end.position


def test_damage_counts_until_it_is_repaired() -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.flip(2)
    rig.round()
    rig.round()
    assert rig.found == [(2, 3)]
    rig.flip(2)
    rig.round()
    assert (rig.found, rig.scrubber.damage) == ([], {})


def test_damage_that_is_gone_counts_no_more() -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.flip(2)
    rig.round()
    assert rig.found == [(2, 3)]
    drop_pairs(rig.partition.log, rig.partition.log.pairs[0].end)
    assert rig.found == []


def test_the_rate_is_kept_and_small_batches_cost_more() -> None:
    rig = ScrubberRig(rate=10_000)
    rig.partition.fill(18, size=9000)
    rig.round()
    before, *waited, until_next = rig.sleeps
    assert before == START_SECONDS
    assert sum(waited) == pytest.approx(rig.partition.log.end.position / 10_000)
    assert until_next == pytest.approx(INTERVAL, rel=0.01)

    rig = ScrubberRig(rate=10_000)
    rig.partition.fill(18, size=10)
    rig.round()
    assert sum(rig.sleeps[1:-1]) == pytest.approx(18 * BATCH_BYTES_MIN / 10_000)


def test_a_piece_is_a_second_of_a_slow_rate_and_bounded_at_a_fast_one() -> None:
    rig = ScrubberRig(rate=10_000)
    rig.partition.fill(30, size=500)
    rig.round()
    assert max(rig.sleeps[1:-1]) < (10_000 + BATCH_BYTES_MIN) / 10_000
    rig = ScrubberRig(rate=1 << 40)
    rig.partition.log.limits = LogLimits(segment_bytes=10 << 20)
    rig.partition.fill(40, size=100_000)
    rig.round()
    assert max(rig.sleeps[1:-1]) * (1 << 40) < PIECE_BYTES + 101_000


def test_off() -> None:
    rig = ScrubberRig(rate=0)
    rig.partition.fill(18)
    asyncio.run(rig.scrubber.run())
    assert (rig.scrubber.bytes_read, rig.sleeps) == (0, [])


def test_a_pair_that_can_not_be_opened_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    rig = ScrubberRig()
    rig.partition.fill(18)
    rig.flip(1)
    rig.flip(18)
    path = rig.partition.log.files.pair_of(1).path(".commitlog")
    opened = rig.storage.open

    def no_more_files(wanted: str, *, create: bool = False, read_only: bool = False) -> File:
        if wanted == path:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return opened(wanted, create=create, read_only=read_only)

    rig.storage.open = no_more_files  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.WARNING, "nsqha.scrub"):
        rig.round()
    assert rig.found == [(18, 19)]
    assert any("Too many open files" in record.getMessage() for record in caplog.records)


def test_thousands_of_ranges_are_told_in_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    rig = ScrubberRig()
    rig.partition.log.limits = LogLimits(segment_bytes=1 << 30)
    rig.partition.fill(2 * LINES_MAX + 10, size=10)
    for log_id in range(1, 2 * LINES_MAX + 10, 2):
        rig.flip(log_id)
    with caplog.at_level(logging.ERROR, "nsqha.scrub"):
        rig.round()
    assert len(rig.told) == LINES_MAX + 5
    assert len(caplog.records) == LINES_MAX + 1
    assert "5 more" in caplog.records[-1].getMessage()


def test_every_round_has_an_order_of_its_own() -> None:
    rig = ScrubberRig()
    rig.partition.fill(60)
    seen: list[int] = []
    part = rig.partition.log.part
    rig.partition.log.part = lambda position, *rest: seen.append(position) or part(position, *rest)  # type: ignore
    rig.round()
    first = seen.copy()
    seen.clear()
    rig.round()
    assert first != seen and sorted(first) == sorted(seen)


def test_a_node_scrubs_and_shows_what_it_found(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, scrub_interval_ns=1_000_000) as broker:
            for n in range(3):
                await broker.publishing.publish("t", hot.frame(b"%d" % n * 100))
            await broker.publishing.publish("e#ephemeral", hot.frame(b"in memory"))
            await until(lambda: broker.scrub.scrubber.rounds)
            assert broker.snapshot().node.scrub.damaged_ranges == 0
            (segment,) = tmp_path.glob("topics/*/0/*.segment")
            data = bytearray(segment.read_bytes())
            data[data.index(b"1" * 100)] ^= 1
            segment.write_bytes(data)
            told: list[tuple[int, int]] = []
            broker.scrub.scrubber.on_damage = lambda partition, first, end: told.append((first, end))
            await until(lambda: broker.scrub.scrubber.damage)
            (damage,) = broker.snapshot().node.scrub.damage
            shown = (damage.topic_name, damage.partition, damage.first_offset, damage.end_offset)
            assert shown == ("t", 0, 1, 2)
            assert broker.snapshot().node.scrub.read_bytes >= len(data)
            assert told and told[0][1] == told[0][0] + 1
            await broker.topics.delete_topic("t")
            assert broker.snapshot().node.scrub.damaged_ranges == 0

    asyncio.run(story())


def test_a_node_writes_a_rotten_anchor_anew(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, scrub_interval_ns=1_000_000) as broker:
            await broker.publishing.publish("t", hot.frame(b"m"))
            (commitlog,) = tmp_path.glob("topics/*/0/*.commitlog")
            whole = commitlog.read_bytes()
            with commitlog.open("r+b") as file:
                file.write(b"\xff" * 9)
            await until(lambda: broker.parts.opener.measures.log_events["scrub_damage"])
            await until(lambda: commitlog.read_bytes() == whole and not broker.scrub.scrubber.damage)

    asyncio.run(story())


def test_a_disk_that_refuses_an_anchor_is_asked_again_a_failed_sync_ends_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with running(tmp_path) as broker:
            await broker.publishing.publish("t", hot.frame(b"m"))
            log = broker.topics.topic("t").led[0].log

            def fails(error: Exception) -> Callable[[], None]:
                def write() -> None:
                    raise error

                return write

            await broker.scrub.restore_anchor(log, 1, fails(OSError(errno.EIO, "no")))
            assert "the next round tries again" in caplog.text and broker.availability.failure is None
            await broker.scrub.restore_anchor(log, 1, fails(Poisoned("no")))
            assert broker.availability.failure == "no"

    asyncio.run(story())
