"""A log copied run by run is the same log; epochs end where they end; a copy may begin in the middle."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.commitlog import copying
from nsqha.commitlog.entry import ENTRY_BYTES, decode
from nsqha.commitlog.files.pairs import LogIdentity
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import MemStorage
from nsqha.errors import LogCorrupt
from tests.unit.commitlog.logs import add, drop_pairs, roll

IDENTITY = LogIdentity(9, 2)
LIMITS = LogLimits(segment_bytes=2000, commitlog_bytes=100 * ENTRY_BYTES)


def written(epochs: list[int], seed: int = 0) -> PartitionLog:
    """A log with one batch for each of these epochs."""
    log = PartitionLog.create(MemStorage(), "leader", IDENTITY, cache=BatchCache(1 << 14), limits=LIMITS)
    rng = random.Random(seed)
    for epoch in epochs:
        add(log, *[rng.randbytes(rng.randrange(1, 200)) for _ in range(rng.randrange(1, 4))], epoch=epoch)
        if log.needs_roll:
            roll(log)
    return log


def copy_all(log: PartitionLog, copy: PartitionLog, max_bytes: int) -> None:
    while copy.end.log_id < log.end.log_id:
        run = copying.read_run(log, copy.end.log_id, log.end.log_id, max_bytes)
        for entry, data, raw in copying.batches(run.entries, run.data):
            copy.append_copy(entry, data, raw)
        assert copy.end.log_id == run.end


@given(epochs=st.lists(st.integers(1, 9), min_size=1, max_size=40).map(sorted), max_bytes=st.integers(1, 3000))
def test_a_copied_log_is_the_same(epochs: list[int], max_bytes: int) -> None:
    log = written(epochs)
    copy = PartitionLog.create(MemStorage(), "copy", IDENTITY, cache=BatchCache(0))
    copy_all(log, copy, max_bytes)
    assert copy.end == log.end
    assert copy.last == log.last


@given(epochs=st.lists(st.integers(1, 9), min_size=1, max_size=40).map(sorted), asked=st.integers(0, 11))
def test_an_epoch_ends_before_the_first_entry_of_a_later_one(epochs: list[int], asked: int) -> None:
    log = written(epochs)
    found = copying.epoch_end(log, asked)
    known = [epoch for epoch in epochs if epoch <= asked]
    assert found.end == 1 + len(known)
    assert found.epoch == (known[-1] if known else 0)
    assert found.chain == log.entry_before(found.end).chain


def test_an_epoch_whose_files_are_gone_is_said_to_be_gone() -> None:
    log = written([3] * 30 + [5] * 30)
    drop_pairs(log, log.pairs[-2].first)
    assert log.start.log_id > 31
    assert copying.epoch_end(log, 3) == copying.EpochEnd(0, log.start.log_id, 0)


@given(
    epochs=st.lists(st.integers(1, 4), min_size=1, max_size=12).map(sorted),
    damaged=st.sets(st.integers(1, 12)),
    cached=st.booleans(),
)
def test_entries_that_do_not_verify_are_no_part_of_an_epoch_before(
    epochs: list[int], damaged: set[int], cached: bool
) -> None:
    """One who asks about an epoch is not answered about a later one: what is in memory is not read, and says."""
    log = written(epochs)
    expected = [copying.epoch_end(log, asked) for asked in range(6)]
    pair = log.files.pairs[-1]
    for log_id in damaged & set(range(pair.first.log_id, log.end.log_id)):
        pair.commitlog.pwrite(b"\xff" * 4, pair.slot(log_id))
    if not cached:
        log.shelf.clear()
    for asked, wanted in enumerate(expected):
        try:
            assert copying.epoch_end(log, asked) == wanted
        except LogCorrupt:
            assert not cached, "all of them are in memory"


def test_a_copy_may_begin_where_the_oldest_files_begin() -> None:
    log = written([1] * 40)
    drop_pairs(log, log.pairs[1].end)
    anchor = log.entry_before(log.start.log_id)
    copy = copying.begin_at(MemStorage(), "copy", IDENTITY, anchor, cache=BatchCache(0), limits=LIMITS)
    assert copy.start == log.start == copy.end
    copy_all(log, copy, 1000)
    assert copy.last == log.last


def test_a_run_holds_at_least_one_batch_and_at_most_what_was_asked_for() -> None:
    log = written([1] * 20)
    assert copying.read_run(log, 5, 21, 1).end == 6
    run = copying.read_run(log, 5, 21, 1000)
    assert len(run.data) <= 1000 and len(run.entries) == (run.end - 5) * ENTRY_BYTES
    assert copying.read_run(log, 5, 7, 1 << 20).end == 7


@pytest.mark.parametrize("damage", ["entries cut", "data cut", "data long", "entry flipped"])
def test_halves_that_do_not_fit_are_refused(damage: str) -> None:
    run = copying.read_run(written([1] * 4), 1, 5, 1 << 20)
    entries, data = run.entries, run.data
    if damage == "entries cut":
        entries = entries[:-1]
    elif damage == "data cut":
        data = data[:-1]
    elif damage == "data long":
        data += b"x"
    else:
        entries = bytes([entries[0] ^ 1]) + entries[1:]
        assert decode(entries[:ENTRY_BYTES]) is None
    with pytest.raises(LogCorrupt):
        list(copying.batches(entries, data))
