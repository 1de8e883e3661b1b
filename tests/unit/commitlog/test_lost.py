"""What an operator gives up: marked, copied as what it is, and written back where anybody still has it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from nsqha.commitlog import copying
from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, REBUILT, BatchCorrupt, Entry, decode
from nsqha.commitlog.files.pairs import LogIdentity, Pair
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.storage import MemStorage, Storage
from nsqha.errors import LogCorrupt
from nsqha.frames import LOST
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.damaged_logs import LIMITS, ONE_PAIR, Built, damage, replica, taken
from tests.unit.commitlog.logs import reopen, roll


def give_up(log: PartitionLog, first: int, end: int) -> list[tuple[int, int]]:
    return log.repair.giving_up(first, end)()


def copy_of(log: PartitionLog, storage: Storage | None = None) -> PartitionLog:
    """What a new replica gets."""
    copy = PartitionLog.create(
        storage or MemStorage(), "log", LogIdentity(9, 2), cache=BatchCache(1 << 20), limits=LIMITS
    )
    while copy.end.log_id < log.end.log_id:
        run = copying.read_run(log, copy.end.log_id, log.end.log_id, 500, lost=True)
        for entry, data, raw in copying.batches(run.entries, run.data):
            copy.append_copy(entry, data, raw)
            if copy.needs_roll:
                roll(copy)
    return copy


def unreadable(log: PartitionLog) -> Iterator[int]:
    for log_id in range(log.start.log_id, log.end.log_id):
        try:
            log.read(log.entry(log_id))
        except LogCorrupt:
            yield log_id


def smash(log: PartitionLog, log_id: int) -> None:
    """The size of its first frame, so that nothing behind it can be told apart."""
    pair, entry = log.files.pair_of(log_id), log.entry(log_id)
    pair.segment.pwrite(b"\xff\xff\xff\xff", entry.position - pair.position)


def test_only_what_was_given_up_is_copied_without_its_frames() -> None:
    log = replica()
    damage(log, 7)
    damage(log, 8)
    with pytest.raises(LogCorrupt):
        copy_of(log)
    assert give_up(log, 6, 10) == [(7, 9)] == give_up(log, 6, 10)
    copy = copy_of(log)
    assert list(unreadable(copy)) == list(unreadable(log)) == [7, 8]
    assert [entry.chain for entry in copy.entries(1, 99)] == [entry.chain for entry in replica().entries(1, 99)]
    assert copy.end == log.end and copy.read(copy.entry(9)) == replica().read(replica().entry(9))


def test_it_is_not_given_to_one_that_mends() -> None:
    log = replica()
    damage(log, 7)
    give_up(log, 7, 8)
    with pytest.raises(BatchCorrupt, match="given up"):
        copying.read_run(log, 7, 9, 1 << 20)
    assert copying.read_run(log, 5, 9, 1 << 20).end == 7


@pytest.mark.parametrize("log_id", [7, 13, 30])  # in the middle, the last one of its files, the last one of all
def test_whoever_has_the_frames_still_can_give_them_back(log_id: int) -> None:
    log, good = replica(), replica()
    damage(log, log_id)
    give_up(log, log_id, log_id + 1)
    copy = copy_of(log)
    for one in (log, copy):
        one.repair.mending(taken(good, log_id, log_id + 1))()
        assert not list(unreadable(one)) and one.entry(log_id) == good.entry(log_id)
        assert not verify(one).problems


def test_a_reader_is_told_that_the_frames_were_given_up_and_finds_what_is_behind() -> None:
    log = replica()
    damage(log, 7)
    give_up(log, 7, 8)
    for one in (log, copy_of(log)):
        with pytest.raises(BatchCorrupt, match="given up") as caught:
            one.batch_at(6)
        assert (caught.value.first_offset, caught.value.end_offset) == (6, 7)
        batch = one.batch_at(7)
        assert batch is not None and batch.entry.log_id == 8
        assert [(p.first.log_id, p.end.log_id) for p in verify(one).problems] == [(7, 8)]


def test_nothing_that_verifies_is_given_up() -> None:
    log = replica()
    before = [(entry, log.read(entry)) for entry in log.entries(1, 99)]
    assert give_up(log, 1, 31) == []
    assert [(entry, log.read(entry)) for entry in log.entries(1, 99)] == before


@pytest.mark.parametrize("first", [5, 13, 30])
def test_an_entry_whose_frames_are_whole_is_proven_and_lost_no_more(first: int) -> None:
    log, good = replica(), replica()
    damage(log, first, entry=True)
    assert give_up(log, first, first + 1) == []
    assert [log.entry(n)._replace(durable=0) for n in range(1, 31)] == [
        good.entry(n)._replace(durable=0) for n in range(1, 31)
    ]


def test_entries_that_look_alike_are_one_range_that_a_good_replica_mends() -> None:
    log, good = replica(), replica()
    smash(log, 5)
    damage(log, 5, entry=True)
    damage(log, 6, entry=True)
    assert give_up(log, 6, 7) == [(5, 6)]
    assert log.entry(5).flags & (FAULTY | REBUILT | LOST) == FAULTY | REBUILT | LOST and log.entry(6).stands_in
    copy = copy_of(log)
    for one in (log, copy):
        assert one.repair.whole_damage(5, 6) == (5, 7) == one.repair.whole_damage(6, 7)
        with pytest.raises(LogCorrupt):
            one.repair.mending(taken(good, 5, 6))()
        one.repair.mending(taken(good, 5, 7))()
        assert not list(unreadable(one)) and one.entry(6) == good.entry(6)


def test_what_stands_in_for_batches_proves_nothing_to_others() -> None:
    """Its chain fits whatever is behind it."""
    log, other = replica(), replica()
    entry, pair = log.entry(6), log.files.pair_of(6)
    pair.segment.pwrite(b"\xff", entry.end_position - 1 - pair.position)  # in a body: its frame is still one
    for n in (5, 6):
        damage(log, n, entry=True)
        damage(other, n, entry=True)
    assert give_up(log, 5, 7) == [] and log.entry(6).flags & REBUILT
    with pytest.raises(LogCorrupt):
        other.repair.mending(taken(log, 5, 7))()


def test_memory_that_has_what_the_disk_lost_is_written_back() -> None:
    storage = MemStorage()
    log = copy_of(replica(), storage)
    entry, pair = log.entry(30), log.files.pair_of(30)
    pair.segment.pwrite(b"\xff", entry.position - pair.position + 9)
    assert give_up(log, 30, 31) == []
    assert pair.read_data(entry.position, entry.size) == replica().read(replica().entry(30))


def test_a_log_with_given_up_frames_keeps_its_name_over_a_restart() -> None:
    """It was the operator's decision, once: with other replicas damage alone costs the name, and the lead."""
    built = Built(durable=8)
    built.flip_data(5)
    found = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR)
    assert found.report.new_log_uid and found.report.serve_end == 5
    assert give_up(found.log, 5, 6) == [(5, 6)]
    again = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR)
    assert not again.report.new_log_uid and again.report.serve_end is None
    assert again.log.entry(5).flags & LOST


def test_what_one_recovery_marked_the_next_one_does_not_take_for_whole() -> None:
    """A process that dies before the range was fetched anew: a replica that looks whole would be elected."""
    built = Built(durable=8)
    built.zero_entries(5, 7)
    for _ in range(2):
        report = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR).report
        assert report.serve_end == 5 and report.new_log_uid


def test_a_recovery_that_marked_entries_is_given_up_with_what_their_frames_prove() -> None:
    built = Built(durable=8)
    built.zero_entries(5, 7)
    log = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR).log
    assert log.entry(5).flags & FAULTY
    assert give_up(log, 5, 7) == []
    assert [log.entry(n)._replace(durable=0) for n in (5, 6)] == [built.entry(n)._replace(durable=0) for n in (5, 6)]


def reopened(log: PartitionLog, storage: Storage) -> PartitionLog:
    """The same files, with nothing in memory but where it ends."""
    pairs = [Pair(storage, "log", pair.anchor) for pair in log.files.pairs]
    identity, end = LogIdentity(9, 2), log.end.log_id
    return PartitionLog(
        storage, "log", identity, pairs, log.files.last, BatchCache(0), limits=LIMITS, local_durable=end
    )


@pytest.mark.parametrize("operations", range(1, 9))
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_it_is_damage_still_and_is_given_up_again(operations: int, seed: int) -> None:
    rng = random.Random(seed)
    storage = SimStorage(rng)
    log, good = reopened(copy_of(replica(), storage), storage), replica()
    for n in (5, 6, 7, 20):
        damage(log, n, entry=n == 6)
    for pair in log.files.pairs:
        pair.segment.sync()
        pair.commitlog.sync()
    storage.crash_after(operations)
    try:
        give_up(log, 5, 21)
    except Crashed:
        storage = storage.crash(rng)
    after = reopened(log, storage)
    assert {5, 7, 20} <= set(unreadable(after)) <= {5, 6, 7, 20}
    give_up(after, 5, 21)
    copy = copy_of(after)
    assert copy.end == after.end and list(unreadable(copy)) == list(unreadable(after))
    for first, end in (after.repair.whole_damage(5, 8), (20, 21)):
        after.repair.mending(taken(good, first, end))()
    assert not list(unreadable(after))


def test_the_mark_is_no_part_of_the_chain() -> None:
    log = replica()
    entry = log.entry(7)
    marked = entry._replace(flags=entry.flags | LOST)
    assert marked.named == entry and marked.chained_to(log.entry(6)) and log.entry(8).chained_to(marked)
    raw = marked.encode()
    assert len(raw) == ENTRY_BYTES and decode(raw) == marked and isinstance(marked, Entry)


@pytest.mark.parametrize("frames", [False, True])
def test_a_stand_in_for_a_batch_is_not_kept_in_place_of_the_leaders_lost_one(frames: bool) -> None:
    """It verifies, as it is empty; the one that stood for it is mended. So nothing would stand for its messages, and
    what its channels did would pass for nothing. `frames`: ours are whole, and that is found by the leader's entry."""
    leader, ours, good = replica(), replica(), replica()
    damage(leader, 6)
    give_up(leader, 6, 7)
    smash(ours, 5)
    if not frames:
        damage(ours, 6)
    for log_id in (5, 6, 7):
        damage(ours, log_id, entry=True)
    rebuild = ours.repair.rebuilding(5, 8)
    assert rebuild is not None
    rebuild.run()
    assert ours.entry(5).flags & FAULTY and ours.entry(6).stands_in
    run = copying.read_run(leader, 5, 8, 1 << 20, lost=True)
    batches = [(entry, data) for entry, data, _ in copying.batches(run.entries, run.data)]
    ours.repair.mending(batches, proven=True, lost=True)()
    expected = good if frames else leader
    assert [ours.entry(n) for n in range(4, 9)] == [expected.entry(n) for n in range(4, 9)]
    assert list(unreadable(ours)) == ([] if frames else [6])


@pytest.mark.parametrize("operations", range(1, 7))  # two writes and a sync of each file
@pytest.mark.parametrize("seed", range(4))
def test_killed_while_it_does_as_its_leader_did_a_replica_can_do_so_again(operations: int, seed: int) -> None:
    """Its frames of 6 are whole, those of 7 are not; of neither the entry verifies."""
    rng = random.Random(seed)
    storage = SimStorage(rng)
    ours, leader, good = reopened(copy_of(replica(), storage), storage), replica(), replica()
    for log_id in (6, 7):
        damage(leader, log_id)
    give_up(leader, 6, 8)
    damage(ours, 7)
    for log_id in (6, 7):
        damage(ours, log_id, entry=True)
    for pair in ours.files.pairs:
        pair.segment.sync()
        pair.commitlog.sync()
    run = copying.read_run(leader, 6, 8, 1 << 20, lost=True)
    batches = [(entry, data) for entry, data, _ in copying.batches(run.entries, run.data)]
    storage.crash_after(operations)
    with pytest.raises(Crashed):
        ours.repair.mending(batches, lost=True)()
    storage = storage.crash(rng)
    after = reopened(ours, storage)
    assert {7} <= set(unreadable(after)) <= {6, 7}
    after.repair.mending(batches, lost=True)()
    assert [after.entry(n) for n in range(5, 9)] == [good.entry(5), good.entry(6), leader.entry(7), good.entry(8)]
    assert list(unreadable(after)) == [7]
    after.repair.mending(taken(good, 6, 8))()
    assert not list(unreadable(after))


def test_a_reader_stops_in_front_of_a_range_that_is_mended_in_part() -> None:
    """The run that it has read ends there, and goes on behind empty entries: nothing stands for their messages until
    they are mended too. It is told of damage, which ends, and does not find a broken invariant."""
    built, good = Built(durable=8), Built(durable=8)
    built.zero_entries(4, 7)
    built.storage.flip(built.file(4, ".segment"), built.entry(4).position * 8)
    ours = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR).log
    assert ours.entry(4).flags & FAULTY and ours.entry(5).stands_in
    ours.repair.mending(taken(good.log, 4, 5), proven=True)()
    mended = ours.batch_at(built.entry(4).first_offset)
    assert mended is not None and mended.end_log_id == 5
    for offset in range(built.entry(5).first_offset, built.entry(7).first_offset):
        with pytest.raises(BatchCorrupt):
            ours.batch_at(offset)
    ours.repair.mending(taken(good.log, 5, 7))()
    batch = ours.batch_at(built.entry(5).first_offset)
    assert batch is not None and batch.entry == built.entry(5)


def mended_in_part() -> tuple[Built, Built, PartitionLog]:
    """4 to 6 were one FAULTY entry and what stands in behind it; only 4 came back. In an old pair, which no start looks
    at. And the same undamaged."""
    built, good = Built(durable=8), Built(durable=8)
    built.zero_entries(4, 7)
    built.storage.flip(built.file(4, ".segment"), built.entry(4).position * 8)
    ours = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR).log
    ours.repair.mending(taken(good.log, 4, 5), proven=True)()
    assert ours.entry(5).stands_in and ours.entry(6).stands_in and not ours.entry(4).flags & FAULTY
    return built, good, ours


def test_what_is_mended_in_part_is_damage_behind_what_came_back() -> None:
    built, good, ours = mended_in_part()
    for offset in range(built.entry(5).first_offset, built.entry(7).first_offset):
        for read in (ours.batch_at, ours.snapshot().batch_at, ours.snapshot().entry_for_offset):
            with pytest.raises(BatchCorrupt) as caught:
                read(offset)
            assert (caught.value.first.log_id, caught.value.end.log_id) == (5, 7)
            assert (caught.value.first.offset, caught.value.end.offset) == (
                built.entry(5).first_offset,
                built.entry(7).first_offset,
            )
    with pytest.raises(BatchCorrupt, match=r"log ids \[5, 7\)"):
        ours.snapshot().entry_at_position(built.entry(6).position)
    assert ours.repair.whole_damage(5, 7) == ours.repair.whole_damage(5, 6) == ours.repair.whole_damage(6, 7) == (5, 7)
    assert ours.repair.whole_damage(4, 5) == (4, 7)
    ours.repair.mending(taken(good.log, 5, 7))()
    assert [ours.entry(n) for n in range(1, 11)] == [good.entry(n) for n in range(1, 11)]


def test_what_is_mended_in_part_can_be_given_up_behind_what_came_back() -> None:
    """What the frames prove is lost no more; else the rest is one range that others can copy as such."""
    for smashed in (False, True):
        built, good, ours = mended_in_part()
        if smashed:
            built.storage.flip(built.file(5, ".segment"), built.entry(5).position * 8)
        assert give_up(ours, 5, 7) == ([(5, 6)] if smashed else [])
        assert [ours.read(ours.entry(n)) for n in (4, 7)] == [good.contents[n - 1][1] for n in (4, 7)]
        if smashed:
            assert ours.entry(5).flags & (FAULTY | LOST) == FAULTY | LOST and ours.entry(5).end_offset == 14 - 2
        else:
            assert [ours.entry(n) for n in (5, 6)] == [good.entry(n) for n in (5, 6)]
