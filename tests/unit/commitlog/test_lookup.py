"""Finding batches: bisection over pairs and slots, and what damage may and may not stop."""

from __future__ import annotations

import random

import pytest

from nsqha.commitlog.entry import BatchCorrupt, Entry
from nsqha.commitlog.files.pairs import Pair
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import RUN_BYTES
from nsqha.errors import LogCorrupt
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import DIRECTORY, SECOND, add, drop_pairs, event, new_log, roll

TINY = LogLimits(segment_bytes=600, commitlog_bytes=1 << 20)


def built(batches: int = 60, seed: int = 1, cache_bytes: int = 1) -> tuple[SimStorage, PartitionLog, list[Entry]]:
    """A log of many pairs with empty batches in between, nothing cached."""
    rng = random.Random(seed)
    storage = SimStorage()
    log = new_log(storage, limits=TINY, cache_bytes=cache_bytes)
    entries = []
    for _ in range(batches):
        if rng.random() < 0.3:
            entries.append(add(log, events=event(), seconds=rng.randrange(3)))
        else:
            entries.append(add(log, *[b"x" * rng.randrange(1, 80)] * rng.randrange(1, 5), seconds=rng.randrange(3)))
        if log.needs_roll:
            roll(log)
    log.shelf.clear()
    return storage, log, entries


def damage(storage: SimStorage, log: PartitionLog, log_id: int) -> None:
    """Make one entry unreadable on disk."""
    pair = log.files.pair_of(log_id)
    position = pair.slot(log_id)
    path = pair.path(".commitlog")
    for byte in range(position, position + 4):
        storage.flip(path, byte * 8)


def damage_data(storage: SimStorage, log: PartitionLog, entry: Entry) -> None:
    pair = log.files.pair_of(entry.log_id)
    storage.flip(pair.path(".segment"), (entry.position - pair.position) * 8 + 5)


def test_entries_by_log_id_offset_and_time() -> None:
    _, log, entries = built()
    assert len(log.pairs) > 5
    assert list(log.entries(0, 1000)) == entries
    assert list(log.entries(5, 9)) == entries[4:8]
    assert [log.entry(entry.log_id) for entry in entries] == entries
    for entry in entries:
        for offset in range(entry.first_offset, entry.end_offset):
            assert log.entry_for_offset(offset) == entry
    for time in range(0, entries[-1].timestamp_ns + SECOND, SECOND // 2):
        first = next((e for e in entries if e.timestamp_ns >= time and e.count), None)
        assert log.entry_for_time(time) == first


def test_nothing_is_found_outside_the_log() -> None:
    _, log, entries = built()
    assert log.entry_for_offset(entries[-1].end_offset) is None
    assert log.entry_for_offset(-1) is None
    assert log.batch_at(entries[-1].end_offset) is None
    assert log.entry_for_time(entries[-1].timestamp_ns + 1) is None
    empty = new_log(SimStorage())
    assert empty.entry_for_offset(0) is None and empty.entry_for_time(0) is None and empty.batch_at(0) is None


def test_a_backlog_is_read_in_runs() -> None:
    _, log, _entries = built(cache_bytes=1 << 20)
    seen: list[int] = []
    offset = 0
    reads = 0
    while (batch := log.batch_at(offset)) is not None:
        assert batch.first_offset <= offset
        seen += range(offset, batch.end_offset)
        offset = batch.end_offset
        reads += 1
    assert seen == list(range(log.end.offset))
    assert reads <= len(log.pairs) + 1, "one read per pair: they are far smaller than a run"


def test_a_run_says_where_each_message_is() -> None:
    _, log, _entries = built(cache_bytes=1 << 20)
    batch = log.batch_at(0)
    assert batch is not None and batch.end_log_id > 3 and batch.flags
    for offset in [*range(batch.first_offset, batch.end_offset), batch.first_offset]:
        entry = log.entry_for_offset(offset)
        assert entry is not None
        position = batch.locate(offset)
        frame = bytes(batch.data[position : position + 34])
        assert int(frame[18:34], 16) & 0xFFFFFF == offset
        assert int.from_bytes(frame[8:16], "big") == entry.timestamp_ns


def test_the_same_run_serves_the_next_reader() -> None:
    _, log, _ = built(cache_bytes=1 << 20)
    assert log.batch_at(0) is log.batch_at(1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of frames asked for."""
    asked: list[int] = []
    read_data = Pair.read_data

    def counted(pair: Pair, position: int, size: int) -> bytearray:
        asked.append(size)
        return read_data(pair, position, size)

    monkeypatch.setattr(Pair, "read_data", counted)
    return asked


def of_hundreds(batches: int) -> PartitionLog:
    """A log of batches of a hundred messages, nothing cached."""
    log = new_log(SimStorage(), cache_bytes=1 << 20)
    for n in range(batches):
        add(log, *[b"%d" % i for i in range(100 * n, 100 * n + 100)])
    log.shelf.clear()
    return log


def test_single_messages_far_apart_cost_a_batch_each(reads: list[int]) -> None:
    log = of_hundreds(400)
    size = log.entry(1).size
    offsets = [100 * n + 7 for n in range(0, 400, 20)]
    random.Random(3).shuffle(offsets)
    for offset in offsets:
        assert log.message(offset)[34:] == b"%d" % offset
    assert max(reads) < 2 * size and len(reads) == len(offsets)


def test_single_messages_in_turn_are_read_in_runs_by_several_readers_at_once(reads: list[int]) -> None:
    log = of_hundreds(400)
    for step in range(0, 9000, 50):
        for reader in (0, 20_000):
            offset = reader + step
            assert log.message(offset)[34:] == b"%d" % offset
    assert len(reads) <= 2 * (2 + 9000 * 40 // RUN_BYTES + 2)


def test_a_message_of_a_large_batch_that_is_wanted_again_and_again_is_read_twice(reads: list[int]) -> None:
    log = new_log(SimStorage(), cache_bytes=1 << 20)
    add(log, *[b"x"] * 5000)
    add(log, b"last")
    log.shelf.clear()
    for _ in range(20):
        assert log.message(3)[34:] == b"x"
    assert len(reads) == 2


def test_bad_frames_stop_only_who_needs_them() -> None:
    storage, log, entries = built()
    bad = next(entry for entry in entries[20:] if entry.count)
    damage_data(storage, log, bad)
    with pytest.raises(BatchCorrupt) as caught:
        log.read(bad)
    assert (caught.value.first_offset, caught.value.end_offset) == (bad.first_offset, bad.end_offset)
    assert caught.value.end_log_id == bad.log_id + 1
    with pytest.raises(LogCorrupt):
        log.batch_at(bad.first_offset)
    batch = log.batch_at(bad.first_offset - 1)
    assert batch is not None and batch.end_offset == bad.first_offset
    assert log.batch_at(bad.end_offset) is not None
    assert log.entry_for_offset(bad.first_offset) == bad, "the entry itself is good"


def test_a_bad_entry_stops_only_who_needs_it() -> None:
    storage, log, _entries = built()
    # One that is not at a border of its pair, so that both neighbours are beside it.
    pair = max(log.pairs, key=lambda pair: pair.end.log_id - pair.first.log_id)
    bad = next(entry for entry in log.entries(pair.first.log_id + 1, pair.end.log_id - 1) if entry.count)
    damage(storage, log, bad.log_id)
    with pytest.raises(BatchCorrupt) as caught:
        log.entry(bad.log_id)
    assert tuple(caught.value.first) == (bad.log_id, bad.first_offset, bad.position)
    assert tuple(caught.value.end) == (bad.log_id + 1, bad.end_offset, bad.end_position)
    for offset in range(log.end.offset):
        if bad.first_offset <= offset < bad.end_offset:
            for look_up in (log.entry_for_offset, log.batch_at):
                with pytest.raises(BatchCorrupt):
                    look_up(offset)
        else:
            found, batch = log.entry_for_offset(offset), log.batch_at(offset)
            assert found is not None and found.first_offset <= offset < found.end_offset
            assert batch is not None and batch.first_offset <= offset < batch.end_offset
    with pytest.raises(BatchCorrupt):
        list(log.entries(1, log.end.log_id))
    assert next(e.log_id for e in log.entries(caught.value.end_log_id, log.end.log_id)) == bad.log_id + 1


def test_a_reader_goes_on_where_retention_took_what_lay_behind_its_last_run() -> None:
    """An empty batch, in the files that went: the run that is kept says to go on with it."""
    log = new_log(SimStorage(), cache_bytes=1)
    add(log, b"a")
    add(log, b"b")
    run = log.batch_at(0)
    assert run is not None and run.end_offset == 2
    removed = add(log, events=event())
    roll(log)
    wanted = add(log, b"c")
    add(log, b"d")
    drop_pairs(log, log.pairs[1].first)
    assert run in log.shelf.runs and removed.log_id < log.start.log_id, "else nothing is shown"
    batch = log.batch_at(2)
    assert batch is not None and batch.entry == wanted


def test_a_log_whose_last_entry_is_bad_says_where_it_ends() -> None:
    """Else its node could not be asked before an election."""
    storage, log, entries = built()
    damage(storage, log, entries[-1].log_id)
    assert log.entry_before(log.end.log_id) == entries[-1]


def test_times_are_found_beside_a_bad_entry() -> None:
    storage, log, entries = built()
    damage(storage, log, 30)
    for time in range(0, entries[-1].timestamp_ns, SECOND):
        want = next(e for e in entries if e.timestamp_ns >= time and e.count)
        try:
            found = log.entry_for_time(time)
        except BatchCorrupt as error:
            assert error.first.log_id == 30
        else:
            assert found is not None and abs(found.log_id - want.log_id) <= 2


@pytest.mark.parametrize("rolled", [False, True])
def test_an_epoch_that_begins_with_a_damaged_last_entry_begins_there_all_the_same(rolled: bool) -> None:
    """Whoever looks for what two logs have in common would find less, and cut what was committed."""
    storage = SimStorage()
    log = new_log(storage)
    for epoch in (1, 1, 2, 3):
        add(log, b"x", epoch=epoch)
    if rolled:
        roll(log)
    log.shelf.clear()
    damage(storage, log, 4)
    assert [log.end_of_epoch(epoch) for epoch in (1, 2, 3)] == [3, 4, 5]


def test_only_a_few_old_files_stay_open() -> None:
    _, log, _ = built()
    for offset in range(log.end.offset):
        log.batch_at(offset)
    assert sum(pair.is_open for pair in log.files.pairs) <= 6


def test_looking_up_entries_alone_keeps_only_a_few_old_files_open() -> None:
    """Statistics ask for the age of a message of each channel, wherever in the log it is."""
    _, log, entries = built()
    for offset in range(log.end.offset):
        log.entry_for_offset(offset)
    assert sum(pair.is_open for pair in log.files.pairs) <= 6
    for entry in entries:
        log.entry_at_position(entry.position)
        log.entry_for_time(entry.timestamp_ns)
        log.end_of_epoch(1)
        log.batch_at(entry.first_offset)
    assert sum(pair.is_open for pair in log.files.pairs) <= 6


def test_a_missing_segment_is_corrupt_not_a_crash() -> None:
    storage, log, _entries = built()
    pair = log.files.pairs[2]
    pair.close()
    storage.remove(pair.path(".segment"))
    assert DIRECTORY in pair.path(".segment")
    with pytest.raises(LogCorrupt):
        log.batch_at(pair.first.offset)
    with pytest.raises(LogCorrupt):
        log.read(log.entry(pair.first.log_id))
    storage.remove(pair.path(".commitlog"))
    pair.close()
    with pytest.raises(LogCorrupt):
        log.entry(pair.first.log_id)


def test_an_unreadable_sector_is_corrupt_where_it_is_and_nowhere_else() -> None:
    storage, log, entries = built()
    pair = log.files.pairs[3]
    storage.spoil(pair.path(".segment"), 0)
    lost = [e for e in entries if pair.position <= e.position < pair.position + 512 and e.count]
    assert 0 < len(lost) < 20
    for entry in entries:
        if entry in lost or entry.position < pair.position + 512 <= entry.end_position:
            with pytest.raises(LogCorrupt):
                log.read(entry)
        elif entry.count:
            log.read(entry)
            assert log.batch_at(entry.first_offset) is not None


def test_an_entry_that_does_not_fit_its_neighbours_is_not_read_together_with_them() -> None:
    storage, log, entries = built(cache_bytes=1 << 20)
    pair = max(log.pairs, key=lambda pair: pair.end.log_id - pair.first.log_id)
    forged = log.entry(pair.first.log_id + 1)
    file = storage.open(log.files.pair_of(forged.log_id).path(".commitlog"))
    file.pwrite(forged._replace(count=forged.count + 1).encode(), log.files.pair_of(forged.log_id).slot(forged.log_id))
    for entry in entries:
        for offset in range(entry.first_offset, entry.end_offset):
            batch = log.batch_at(offset)
            assert batch is not None
            if offset == forged.end_offset and batch.entry.log_id == forged.log_id:
                with pytest.raises(LogCorrupt):
                    batch.locate(offset)
                continue
            position = batch.locate(offset)
            assert int(batch.data[position + 18 : position + 34], 16) & 0xFFFFFF == offset


def test_parts_of_a_log_are_logs() -> None:
    storage, log, entries = built()
    found = []
    for pair in log.pairs:
        part = log.part(pair.first.position, log.end.log_id, storage)
        assert part is not None
        assert (part.start, part.end) == (pair.first, pair.end)
        found += list(part.entries(0, log.end.log_id))
    assert found == entries


def test_a_part_ends_where_it_is_told() -> None:
    storage, log, _ = built()
    pair = log.pairs[2]
    for end in range(pair.first.log_id - 1, pair.end.log_id + 2):
        part = log.part(pair.first.position, end, storage)
        if end <= pair.first.log_id:
            assert part is None
        else:
            assert part is not None and part.end.log_id == min(end, pair.end.log_id)
            assert part.end.position == log.entry(part.end.log_id - 1).end_position
    assert log.part(pair.first.position + 1, log.end.log_id, storage) is None
    assert new_log(SimStorage()).part(0, 5, storage) is None


def test_a_part_has_files_of_its_own() -> None:
    storage, log, entries = built()
    part = log.part(0, log.end.log_id, storage)
    assert part is not None
    first = part.entry(1)
    assert part.read(first)
    drop_pairs(log, log.pairs[0].end)
    assert log.part(0, log.end.log_id, storage) is None
    assert part.read(first) and first == entries[0], "open files stay readable"


def test_a_snapshot_is_the_log_as_it_was() -> None:
    _, log, entries = built()
    snapshot = log.snapshot()
    for entry in entries:
        part = log.part_at(entry.log_id)
        assert part.entry(entry.log_id) == entry and part.start.log_id == log.files.pair_of(entry.log_id).first.log_id
    add(log, b"later")
    assert list(snapshot.entries(0, 1 << 40)) == entries
    assert all(snapshot.read(entry) == log.read(entry) for entry in entries)
    assert snapshot.end.log_id == len(entries) + 1
