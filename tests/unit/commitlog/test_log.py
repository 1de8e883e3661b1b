"""Appending: what it costs when it fails, when it is durable, when new files begin."""

from __future__ import annotations

import errno

import pytest

from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.storage import MemStorage
from nsqha.errors import AppendFailed, LogCorrupt, Poisoned
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import (
    DIRECTORY,
    SECOND,
    add,
    contents,
    drop_pairs,
    messages,
    new_log,
    reopen,
    roll,
    sync,
)


def test_the_first_entry_has_log_id_1_and_offset_0() -> None:
    log = new_log(MemStorage())
    assert (log.last, tuple(log.end), log.local_durable) == (None, (1, 0, 0), 1)
    entry = add(log, b"a", b"b")
    assert (entry.log_id, entry.first_offset, entry.count, entry.position) == (1, 0, 2, 0)
    assert tuple(log.end) == (2, 2, 70)
    assert log.last == entry


def test_time_never_goes_back() -> None:
    log = new_log(MemStorage())
    add(log, b"a", seconds=100)
    assert log.next_timestamp(SECOND) == 100 * SECOND
    assert log.next_timestamp(200 * SECOND) == 200 * SECOND


@pytest.mark.parametrize("file", ["segment", "commitlog"])
def test_a_failed_write_leaves_the_log_as_it_was(file: str) -> None:
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    before, end = storage.contents(), log.end
    storage.fail("pwrite", file, code=errno.ENOSPC)
    with pytest.raises(AppendFailed, match="ENOSPC"):
        add(log, b"lost", b"lost too")
    assert (storage.contents(), log.end) == (before, end)
    add(log, b"b")
    sync(log)
    assert [entry.count for entry, _ in contents(reopen(storage).log)] == [1, 1]


def test_a_failed_write_that_can_not_be_cut_back_poisons() -> None:
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    storage.fail("pwrite", "commitlog")
    storage.fail("truncate")
    with pytest.raises(Poisoned):
        add(log, b"lost")
    with pytest.raises(Poisoned):
        add(log, b"refused although the disk is well again")


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("file", ["segment", "commitlog"])
def test_a_write_that_fails_as_the_disk_does_poisons(file: str, code: int) -> None:
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    before = storage.contents()
    storage.fail("pwrite", file, code=code)
    with pytest.raises(Poisoned, match=errno.errorcode[code]):
        add(log, b"lost")
    with pytest.raises(Poisoned):
        add(log, b"refused although the disk is well again")
    assert storage.contents() == before, "it was cut back"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE])
def test_a_write_that_only_lacks_something_may_be_tried_again(code: int) -> None:
    storage = SimStorage()
    log = new_log(storage)
    storage.fail("pwrite", "segment", code=code)
    with pytest.raises(AppendFailed):
        add(log, b"not now")
    add(log, b"a")


def test_a_failed_fsync_is_never_retried() -> None:
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    storage.fail("sync", "segment")
    for _ in range(2):
        ticket = log.unsynced()
        assert ticket is not None
        with pytest.raises(Poisoned):
            ticket.run()
    assert log.local_durable == 1


def test_a_ticket_covers_what_was_written_before_it_was_drawn() -> None:
    log = new_log(SimStorage())
    assert log.unsynced() is None
    add(log, b"a")
    ticket = log.unsynced()
    assert ticket is not None and ticket.log_id == 2 and len(ticket.files) == 2
    add(log, b"b")
    ticket.run()
    assert log.synced(ticket) == 2
    later = log.unsynced()
    assert later is not None and later.log_id == 3
    later.run()
    assert log.synced(later) == 3
    assert log.synced(ticket) == 3, "an older ticket takes nothing back"
    assert log.unsynced() is None


def test_a_ticket_of_before_a_cut_says_nothing_of_what_came_after_it() -> None:
    storage = MemStorage()
    log = new_log(storage)
    for n in range(4):
        add(log, b"old %d" % n)
    ticket = log.unsynced()
    assert ticket is not None
    ticket.run()
    log.cutting(2)()
    for n in range(4):
        add(log, b"new %d" % n)
    assert log.synced(ticket) == 1
    again = log.unsynced()
    assert again is not None and log.synced(again) == 6


def test_a_ticket_of_another_log_says_nothing_of_this_one() -> None:
    old, new = new_log(MemStorage()), new_log(MemStorage())
    add(old, b"old")
    add(new, b"new")
    ticket = old.unsynced()
    assert ticket is not None and new.synced(ticket) == 1


def test_a_ticket_may_run_while_the_log_rolls_and_drops_its_files() -> None:
    log = new_log(SimStorage())
    add(log, b"a")
    ticket = log.unsynced()
    assert ticket is not None
    roll(log)
    drop_pairs(log, log.end)
    ticket.run()
    assert log.synced(ticket) == 2


def test_new_files_begin_when_a_limit_is_reached() -> None:
    log = new_log(MemStorage(), limits=LogLimits(segment_bytes=100, commitlog_bytes=1000))
    add(log, b"x" * 10)
    assert not log.needs_roll
    add(log, b"x" * 60)
    assert log.needs_roll
    roll(log)
    assert not log.needs_roll
    tiny = new_log(MemStorage(), limits=LogLimits(segment_bytes=1 << 20, commitlog_bytes=240))
    add(tiny, b"1")
    assert not tiny.needs_roll
    add(tiny, b"2")
    assert tiny.needs_roll, "an anchor and two entries"


def test_a_roll_makes_everything_before_it_durable() -> None:
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    roll(log)
    assert log.local_durable == 2 and log.unsynced() is None
    assert storage.list_dir(DIRECTORY) == [
        "00000000000000000000.commitlog",
        "00000000000000000000.segment",
        "00000000000000000035.commitlog",
        "00000000000000000035.segment",
    ]


def test_rolling_an_empty_pair_does_nothing() -> None:
    log = new_log(MemStorage())
    roll(log)
    add(log, b"a")
    roll(log)
    roll(log)
    assert [pair.size for pair in log.pairs] == [35, 0]


@pytest.mark.parametrize("operation", ["create", "pwrite"])
def test_a_roll_without_room_leaves_the_old_files_in_use(operation: str) -> None:
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    names = storage.list_dir(DIRECTORY)
    storage.fail(operation, code=errno.ENOSPC)
    with pytest.raises(AppendFailed):
        roll(log)
    assert storage.list_dir(DIRECTORY) == names
    add(log, b"b")
    roll(log)
    add(log, b"c")
    sync(log)
    assert [entry.log_id for entry, _ in contents(reopen(storage).log)] == [1, 2, 3]


def test_the_pairs_tell_what_retention_needs() -> None:
    log = new_log(MemStorage())
    add(log, b"aa")
    add(log, b"bb", seconds=5)
    roll(log)
    add(log, b"cc", seconds=10)
    old, new = log.pairs
    assert (tuple(old.first), tuple(old.end), old.size, old.newest_ns) == ((1, 0, 0), (3, 2, 72), 72, 6 * SECOND)
    assert (tuple(new.first), tuple(new.end), new.size, new.newest_ns) == ((3, 2, 72), (4, 3, 108), 36, 16 * SECOND)


def test_a_copy_that_does_not_follow_or_does_not_verify_is_refused() -> None:
    leader, follower = new_log(MemStorage()), new_log(MemStorage())
    first, second = add(leader, b"a"), add(leader, b"b")
    data = bytes(leader.read(first))
    with pytest.raises(LogCorrupt, match="does not follow"):
        follower.append_copy(second, bytes(leader.read(second)))
    with pytest.raises(LogCorrupt, match="not its own"):
        follower.append_copy(first, data[:-1] + b"!")
    with pytest.raises(LogCorrupt, match="does not follow"):
        follower.append_copy(first._replace(chain=first.chain ^ 1), data)
    follower.append_copy(first, data)
    assert follower.end.log_id == 2


def test_the_bytes_of_an_entry_are_those_on_disk_whether_it_was_just_written_or_not() -> None:
    leader, follower = new_log(MemStorage()), new_log(MemStorage())
    for body in (b"a", b"b"):
        entry = add(leader, body)
        follower.append_copy(entry, bytes(leader.read(entry)), entry.encode())
    entries = [leader.entry(2), leader.entry(1)]
    for log in (leader, follower):
        assert [log.encoded(log.entry(entry.log_id)) for entry in entries] == [entry.encode() for entry in entries]
    leader.cutting(2)()
    assert leader.encoded(leader.entry(1)) == entries[1].encode()
    entry = add(leader, b"c")
    assert leader.encoded(entry) == entry.encode() != entries[0].encode()


def test_appended_bytes_are_kept_as_they_are_for_delivery() -> None:
    log = new_log(MemStorage())
    data = messages(0, [b"a", b"b"], SECOND)
    log.append(data, count=2, flags=0, timestamp_ns=SECOND, epoch=1, durable=1)
    batch = log.batch_at(1)
    assert batch is not None and batch.data is data


def test_broken_rules_of_the_caller_are_assertions() -> None:
    log: PartitionLog = new_log(MemStorage())
    add(log, b"a", epoch=3)
    with pytest.raises(AssertionError):
        add(log, b"b", epoch=2)
    with pytest.raises(AssertionError):
        log.append(b"", count=0, flags=0, timestamp_ns=10 * SECOND, epoch=3, durable=1)
