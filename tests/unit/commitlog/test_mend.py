"""A damaged range is written anew from another replica: exactly what was there, or nothing."""

from __future__ import annotations

import random

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES, decode
from nsqha.errors import LogCorrupt
from tests.sim.storage import Crashed
from tests.unit.commitlog.damaged_logs import Built, damage, replica, taken
from tests.unit.commitlog.logs import add


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize(("first", "end"), [(5, 6), (8, 15), (1, 3), (27, 29)])
def test_what_was_damaged_reads_as_before(entry: bool, first: int, end: int) -> None:
    good, bad = replica(), replica()
    for log_id in range(first, end):
        damage(bad, log_id, entry=entry)
    with pytest.raises(LogCorrupt):
        for log_id in range(1, 31):
            bad.read(bad.entry(log_id))
    bad.repair.mending(taken(good, first, end))()
    for log_id in range(1, 31):
        assert bad.entry(log_id) == good.entry(log_id)
        assert bad.read(bad.entry(log_id)) == good.read(good.entry(log_id))


def test_what_another_log_has_there_is_refused_and_changes_nothing() -> None:
    other, bad = replica(seed=2), replica()
    damage(bad, 7)
    with pytest.raises(LogCorrupt, match="is not what follows"):
        bad.repair.mending(taken(other, 7, 8))()
    assert bad.entry(7) == replica().entry(7)


@pytest.mark.parametrize("log_id", [7, 30])
def test_what_parted_from_this_log_there_is_refused_also_at_its_end(log_id: int) -> None:
    """It follows the batch before. At the very end no batch behind says what was there, but we know what we wrote."""
    fork, bad = replica(batches=log_id - 1), replica()
    add(fork, b"another one")
    assert taken(fork, log_id, log_id + 1)[0][0].chained_to(bad.entry(log_id - 1))
    damage(bad, log_id)
    with pytest.raises(LogCorrupt, match="is not"):
        bad.repair.mending(taken(fork, log_id, log_id + 1))()
    assert bad.entry(log_id) == replica().entry(log_id)


def test_the_last_batch_is_mended_as_it_was() -> None:
    bad = replica()
    damage(bad, 30, entry=True)
    bad.repair.mending(taken(replica(), 30, 31))()
    assert bad.read(bad.entry(30)) == replica().read(replica().entry(30))


def test_a_range_that_does_not_reach_what_verifies_is_refused() -> None:
    good, bad = replica(), replica()
    damage(bad, 7, entry=True)
    damage(bad, 8, entry=True)
    with pytest.raises(LogCorrupt):
        bad.repair.mending(taken(good, 8, 9))()
    with pytest.raises(LogCorrupt):
        bad.repair.mending(taken(good, 7, 8))()


@pytest.mark.parametrize("operations", range(1, 8))
def test_a_crash_leaves_no_entry_whose_frames_were_not_written_yet(operations: int) -> None:
    """A start reads no frames below what the journal knows to be on the disk: such a batch would pass for whole."""
    for seed in range(20):
        built = Built()
        entry, data = built.contents[4]
        built.flip_entry(5)
        built.flip_data(5)
        mend = built.log.repair.mending([(entry, bytes(data))])
        built.storage.crash_after(operations)
        try:
            mend()
        except Crashed:
            pass
        disk = built.storage.crash(random.Random(seed)).contents()
        commitlog, segment = (disk[built.file(5, suffix)] for suffix in (".commitlog", ".segment"))
        if decode(commitlog[5 * ENTRY_BYTES : 6 * ENTRY_BYTES]) == entry:
            assert segment[entry.position : entry.end_position] == data
