"""The log on every storage: real files, memory, and the simulated disk behave the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.files.pairs import LogIdentity
from nsqha.commitlog.journal import PartitionRecord
from nsqha.commitlog.log import LogLimits, PartitionLog, Place
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.recovery import Recovery, recover
from nsqha.commitlog.storage import MemStorage, OsStorage, Storage
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import ID_BASE, Cuts, add, contents, drop_pairs, messages, roll, sync

IDENTITY = LogIdentity(5, 1)
LIMITS = LogLimits(segment_bytes=4096, commitlog_bytes=4096)


class LogPlace:
    """A log's directory on one of the storages."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self.storage = storage
        self.directory = directory

    def new_log(self, cache_bytes: int = 1 << 16) -> PartitionLog:
        return PartitionLog.create(
            self.storage, self.directory, IDENTITY, cache=BatchCache(cache_bytes), limits=LIMITS
        )  # fmt: skip

    def recovered(self, cuts: Cuts | None = None) -> Recovery:
        cuts = cuts or Cuts(PartitionRecord(log_uid=1))
        return recover(
            self.storage,
            self.directory,
            IDENTITY,
            cuts.record,
            cuts,
            sync_always=True,
            replicas=1,
            page_cache_lost=False,
            cache=BatchCache(1 << 16),
            limits=LIMITS,
        )


@pytest.fixture(params=["os", "memory", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> LogPlace:
    make: dict[str, Callable[[], Storage]] = {"os": OsStorage, "memory": MemStorage, "simulated": SimStorage}
    top = f"{tmp_path}/" if request.param == "os" else ""
    return LogPlace(make[request.param](), f"{top}topic/0")


def fill(log: PartitionLog, batches: int, rng: random.Random) -> list[bytes]:
    """Append batches of random messages, roll when due; every body in order."""
    bodies = []
    for _ in range(batches):
        new = [rng.randbytes(rng.choice((1, 50, 900))) for _ in range(rng.randrange(1, 6))]
        add(log, *new)
        bodies += new
        if log.needs_roll:
            roll(log)
    return bodies


def body_at(log: PartitionLog, offset: int) -> bytes:
    batch = log.batch_at(offset)
    assert batch is not None
    position = batch.locate(offset)
    size = int.from_bytes(batch.data[position : position + 4], "big")
    frame = bytes(batch.data[position : position + 4 + size])
    assert frame[18:34] == b"%016x" % (ID_BASE + offset)
    return frame[34:]


def test_what_was_appended_is_read_back(disk: LogPlace) -> None:
    rng = random.Random(1)
    log = disk.new_log()
    bodies = fill(log, 60, rng)
    assert len(log.pairs) > 5
    for offset in [*range(len(bodies)), *rng.sample(range(len(bodies)), 30)]:
        assert body_at(log, offset) == bodies[offset]
    assert log.batch_at(len(bodies)) is None
    found = verify(log)
    assert (found.messages, found.batches, found.problems) == (len(bodies), 60, ())


def test_a_reopened_log_is_the_same_and_goes_on(disk: LogPlace) -> None:
    rng = random.Random(2)
    log = disk.new_log()
    bodies = fill(log, 40, rng)
    sync(log)
    before, end = contents(log), log.end
    log.close()
    recovery = disk.recovered()
    log = recovery.log
    assert recovery.report.clean
    assert (contents(log), log.end) == (before, end)
    assert log.local_durable == end.log_id
    bodies += fill(log, 40, rng)
    assert [body_at(log, offset) for offset in range(len(bodies))] == bodies


def test_a_reader_sees_a_log_that_is_being_written(disk: LogPlace) -> None:
    log = disk.new_log()
    fill(log, 30, random.Random(3))
    reader = LogReader.open(disk.storage, disk.directory, IDENTITY)
    assert reader.end == log.end
    assert list(reader.entries(1, reader.end.log_id)) == list(log.entries(1, log.end.log_id))


def test_dropped_pairs_are_gone_and_the_rest_stays(disk: LogPlace) -> None:
    log = disk.new_log()
    bodies = fill(log, 60, random.Random(4))
    kept = log.pairs[3]
    assert drop_pairs(log, kept.first) == 3
    assert log.start == kept.first
    assert log.entry_for_offset(kept.first.offset - 1) is None
    sync(log)
    log.close()
    log = disk.recovered().log
    assert log.start == kept.first
    assert [body_at(log, offset) for offset in range(kept.first.offset, len(bodies))] == bodies[kept.first.offset :]
    assert len(disk.storage.list_dir(disk.directory)) == 2 * len(log.pairs)


def test_the_pair_being_written_is_never_dropped(disk: LogPlace) -> None:
    log = disk.new_log()
    fill(log, 20, random.Random(5))
    drop_pairs(log, log.end)
    assert len(log.pairs) == 1
    assert drop_pairs(log, Place(10**9, 10**9, 10**9)) == 0


def test_a_log_of_which_all_old_pairs_are_gone_still_knows_where_it_is(disk: LogPlace) -> None:
    log = disk.new_log()
    add(log, b"one", b"two")
    sync(log)
    roll(log)
    end, last = log.end, log.last
    drop_pairs(log, end)
    log.close()
    log = disk.recovered().log
    assert (log.start, log.end, log.last) == (end, end, last)
    entry = add(log, b"three")
    assert (entry.log_id, entry.first_offset) == (2, 2)
    assert verify(log).problems == ()


def test_a_cut_removes_the_end_and_later_pairs(disk: LogPlace) -> None:
    log = disk.new_log()
    fill(log, 40, random.Random(6))
    keep = contents(log)[:10]
    intent = log.cut_intent(11)
    assert (intent.log_id, intent.chain) == (11, log.entry(11).chain)
    log.cutting(11)()
    assert (log.end.log_id, contents(log)) == (11, keep)
    assert log.batch_at(keep[-1][0].end_offset) is None
    entry = add(log, b"new", epoch=2)
    assert entry.log_id == 11
    sync(log)
    log.close()
    assert contents(disk.recovered().log)[:10] == keep


def test_a_copy_of_a_batch_is_the_same_batch(disk: LogPlace) -> None:
    log = disk.new_log()
    fill(log, 10, random.Random(7))
    copy = PartitionLog.create(
        disk.storage, disk.directory + "-copy", IDENTITY, cache=BatchCache(1 << 16), limits=LIMITS
    )
    for entry, data in contents(log):
        copy.append_copy(entry, data)
    assert contents(copy) == contents(log)
    assert messages(0, [], 0) == b""
