"""A damaged range is written anew from another replica: exactly what was there, or nothing."""

from __future__ import annotations

import random

import pytest

from nsqha.commitlog import copying
from nsqha.commitlog.entry import Entry
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.pairs import LogIdentity
from nsqha.commitlog.reader import BatchCache
from nsqha.commitlog.storage import MemStorage
from nsqha.errors import LogCorrupt
from tests.unit.commitlog.logs import add, sync

LIMITS = LogLimits(segment_bytes=1500)


def replica(seed: int = 1, batches: int = 30) -> PartitionLog:
    log = PartitionLog.create(MemStorage(), "log", LogIdentity(9, 2), cache=BatchCache(0), limits=LIMITS)
    rng = random.Random(seed)
    for _ in range(batches):
        add(log, rng.randbytes(100))
        sync(log)
        if log.needs_roll:
            log.roll()
    return log


def damage(log: PartitionLog, log_id: int, *, entry: bool = False) -> None:
    known = log.entry(log_id)
    pair = log.pair_of(log_id)
    if entry:
        pair.commitlog.pwrite(b"\xff", pair.slot(log_id) + 7)
    else:
        pair.segment.pwrite(b"\xff\x00\xff", known.position - pair.position + 20)


def taken(log: PartitionLog, first: int, end: int) -> list[tuple[Entry, bytes]]:
    run = copying.read_run(log, first, end, 1 << 20)
    return [(entry, data) for entry, data, _ in copying.batches(run.entries, run.data)]


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize(("first", "end"), [(5, 6), (8, 15), (1, 3), (27, 29)])
def test_what_was_damaged_reads_as_before(entry: bool, first: int, end: int) -> None:
    good, bad = replica(), replica()
    for log_id in range(first, end):
        damage(bad, log_id, entry=entry)
    with pytest.raises(LogCorrupt):
        for log_id in range(1, 31):
            bad.read(bad.entry(log_id))
    bad.mend(taken(good, first, end))
    for log_id in range(1, 31):
        assert bad.entry(log_id) == good.entry(log_id)
        assert bad.read(bad.entry(log_id)) == good.read(good.entry(log_id))


def test_what_another_log_has_there_is_refused_and_changes_nothing() -> None:
    other, bad = replica(seed=2), replica()
    damage(bad, 7)
    with pytest.raises(LogCorrupt, match="is not what follows"):
        bad.mend(taken(other, 7, 8))
    assert bad.entry(7) == replica().entry(7)


@pytest.mark.parametrize("log_id", [7, 30])
def test_what_parted_from_this_log_there_is_refused_also_at_its_end(log_id: int) -> None:
    """It follows the batch before. At the very end no batch behind says what was there, but we know what we wrote."""
    fork, bad = replica(batches=log_id - 1), replica()
    add(fork, b"another one")
    assert taken(fork, log_id, log_id + 1)[0][0].chained_to(bad.entry(log_id - 1))
    damage(bad, log_id)
    with pytest.raises(LogCorrupt, match="is not"):
        bad.mend(taken(fork, log_id, log_id + 1))
    assert bad.entry(log_id) == replica().entry(log_id)


def test_the_last_batch_is_mended_as_it_was() -> None:
    bad = replica()
    damage(bad, 30, entry=True)
    bad.mend(taken(replica(), 30, 31))
    assert bad.read(bad.entry(30)) == replica().read(replica().entry(30))


def test_a_range_that_does_not_reach_what_verifies_is_refused() -> None:
    good, bad = replica(), replica()
    damage(bad, 7, entry=True)
    damage(bad, 8, entry=True)
    with pytest.raises(LogCorrupt):
        bad.mend(taken(good, 8, 9))
    with pytest.raises(LogCorrupt):
        bad.mend(taken(good, 7, 8))
