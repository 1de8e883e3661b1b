"""The recovery table where something below the watermark is lost or wrong: alone, and with other replicas.

Log ids here are 1 to 10 in one pair unless said; `durable` is what the journal says, W the watermark.
"""

from __future__ import annotations

import pytest

from nsqha.commitlog.corruption.verdict import Verdict
from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, REBUILT, BatchCorrupt
from nsqha.commitlog.log import LogLimits
from nsqha.errors import Poisoned
from tests.unit.commitlog.damaged_logs import COMMITLOG, ONE_PAIR, SEGMENT, Built, unreadable
from tests.unit.commitlog.logs import add, contents, event, reopen, sync


def test_bad_frames_below_the_watermark_are_never_cut() -> None:
    built = Built(durable=1)
    built.flip_data(9)
    recovery = reopen(built.storage, local_durable=8, limits=ONE_PAIR)
    assert recovery.report.verdict.cut_at == 9, "above: torn"
    built = Built(durable=10)
    built.flip_data(9)
    recovery = reopen(built.storage, local_durable=8, limits=ONE_PAIR)
    report = recovery.report
    assert report.verdict == Verdict(cut_at=None, bad=9, alarm=True, new_log_uid=False, possible_loss=False)
    (damage,) = report.damage
    assert (damage.what, damage.first.log_id, damage.end.log_id) == ("data", 9, 10)
    assert (damage.first.offset, damage.end.offset) == (16, 18)
    assert unreadable(recovery.log) == [9]
    log = recovery.log
    with pytest.raises(BatchCorrupt) as caught:
        log.batch_at(16)
    assert caught.value.end_offset == 18
    assert log.batch_at(18) is not None
    assert add(log, b"publishing goes on").log_id == 11


def test_bad_frames_below_local_durable_are_found_when_they_are_read() -> None:
    built = Built(durable=1)
    built.flip_data(3)
    recovery = reopen(built.storage, local_durable=9, limits=ONE_PAIR)
    assert recovery.report.clean, "only what follows local_durable is read at start"
    assert unreadable(recovery.log) == [3]
    assert [problem.first.log_id for problem in verify(recovery.log).problems] == [3]


def test_a_segment_that_is_too_short_is_noticed_wherever_it_ends() -> None:
    built = Built()
    built.shorten(SEGMENT, built.entry(4).position + 1)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert recovery.report.verdict.bad == 4 and recovery.report.verdict.alarm
    assert unreadable(recovery.log) == list(range(4, 11))
    entry = add(recovery.log, b"on")
    assert (entry.log_id, entry.position) == (11, built.log.end.position)
    assert bytes(recovery.log.read(entry))[-2:] == b"on"


@pytest.mark.parametrize("file", ["segment", "commitlog"])
def test_what_a_failed_fsync_lost_is_noticed_after_a_restart(file: str) -> None:
    """The page cache still shows it and the kernel reports the error only once; so the files are synced and re-read."""
    built = Built(durable=5)
    add(built.log, b"lost")
    built.storage.fail("sync", file)
    ticket = built.log.unsynced()
    assert ticket is not None
    with pytest.raises(Poisoned):
        ticket.run()
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert contents(recovery.log) == built.contents
    assert not recovery.report.damage


@pytest.mark.parametrize("log_id", [1, 5, 10])
def test_an_entry_with_one_wrong_bit_is_restored_exactly(log_id: int) -> None:
    built = Built()
    built.flip_entry(log_id)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    (damage,) = recovery.report.damage
    assert (damage.what, damage.first.log_id, damage.end.log_id) == ("proven", log_id, log_id + 1)
    assert recovery.report.verdict.alarm and damage.readable
    assert contents(recovery.log) == built.contents
    assert reopen(built.storage, local_durable=11, limits=ONE_PAIR).report.clean


@pytest.mark.parametrize("field", ["log_id", "first_offset", "position", "timestamp_ns"])
@pytest.mark.parametrize("log_id", [0, 1, 5, 10])
def test_an_entry_that_makes_no_sense_is_damage_whatever_its_checksum(log_id: int, field: str) -> None:
    built = Built()
    entry = built.log.entry_before(log_id + 1)
    file = built.storage.open(COMMITLOG)
    file.pwrite(entry._replace(**{field: 2**63}).encode(), log_id * ENTRY_BYTES)
    file.sync()
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert [e.named._replace(durable=0) for e, _ in contents(recovery.log)] == [
        e._replace(durable=0) for e, _ in built.contents
    ]
    assert verify(recovery.log).problems == ()


@pytest.mark.parametrize(("first", "end"), [(2, 3), (5, 8), (1, 10)])
def test_lost_entries_are_rebuilt_from_the_frames_and_proven_by_the_chain(first: int, end: int) -> None:
    built = Built()
    built.zero_entries(first, end)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert [damage.what for damage in recovery.report.damage] == ["proven"]
    for (was, data), (now, same) in zip(built.contents, contents(recovery.log), strict=True):
        # What was durable elsewhere is not in the frames; lower is always true.
        assert (now._replace(durable=was.durable), same) == (was, data) and now.durable <= was.durable
    assert verify(recovery.log).problems == ()


def test_a_lost_entry_of_an_event_has_no_time_in_its_frames_so_it_is_not_proven() -> None:
    built = Built(batches=2)
    lost = add(built.log, events=event(b"only this"), seconds=7)
    add(built.log, b"behind it")
    sync(built.log)
    built.zero_entries(3, 4)
    log = reopen(built.storage, local_durable=5, limits=ONE_PAIR).log
    rebuilt = log.entry(3)
    assert rebuilt.flags & REBUILT and rebuilt.size == lost.size and rebuilt.timestamp_ns < lost.timestamp_ns
    assert unreadable(log) == [] and verify(log).problems == ()


def test_the_last_entries_are_rebuilt_without_proof() -> None:
    built = Built()
    built.shorten(COMMITLOG, 9 * ENTRY_BYTES)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    (damage,) = recovery.report.damage
    assert (damage.what, damage.first.log_id, damage.end.log_id) == ("rebuilt", 9, 11)
    for (was, data), (now, same) in zip(built.contents, contents(recovery.log), strict=True):
        assert (was.count, was.position, was.timestamp_ns, data) == (now.count, now.position, now.timestamp_ns, same)


def test_lost_entries_with_bad_frames_become_one_faulty_range() -> None:
    built = Built()
    built.zero_entries(4, 7)
    built.flip_data(5)
    at = built.entry(5).position
    for bit in range(24):
        built.storage.flip(SEGMENT, at * 8 + bit)  # the size of its first frame
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    log = recovery.log
    (damage,) = recovery.report.damage
    assert (damage.what, damage.first.log_id, damage.end.log_id) == ("faulty", 4, 7)
    assert (damage.first.offset, damage.end.offset) == (6, 12)
    with pytest.raises(BatchCorrupt) as caught:
        log.batch_at(8)
    assert (caught.value.first_offset, caught.value.end_offset) == (6, 12)
    assert log.entry(4).flags & FAULTY
    batch = log.batch_at(12)
    assert batch is not None and batch.entry == built.entry(7)
    assert reopen(built.storage, local_durable=11, limits=ONE_PAIR).report.clean, "it is known now"


def test_everything_below_the_watermark_that_is_missing_is_corrupt() -> None:
    built = Built()
    built.shorten(COMMITLOG, 8 * ENTRY_BYTES)
    built.shorten(SEGMENT, built.entry(8).position)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    (damage,) = recovery.report.damage
    assert (damage.what, damage.first.log_id, damage.end.log_id) == ("faulty", 8, 11)
    assert recovery.report.verdict.alarm
    assert recovery.log.end.log_id == 11 and recovery.log.end.offset == 14
    entry = add(recovery.log, b"on")
    assert (entry.log_id, entry.first_offset) == (11, 14)


@pytest.mark.parametrize(("local_durable", "alarm"), [(11, True), (8, False)])
def test_a_disk_that_lost_the_synced_end_of_a_replica_is_told_of(local_durable: int, alarm: bool) -> None:
    """The others have it and it is fetched again; but a disk that forgets is to be replaced."""
    built = Built(durable=11)
    built.shorten(COMMITLOG, 8 * ENTRY_BYTES)
    built.shorten(SEGMENT, built.entry(8).position)
    recovery = reopen(built.storage, local_durable=local_durable, replicas=3, limits=ONE_PAIR)
    assert recovery.log.end.log_id == 8
    assert recovery.report.verdict.alarm == alarm and recovery.report.clean == (not alarm)


def test_corruption_does_not_hide_a_torn_end_nor_the_other_way_round() -> None:
    built = Built(durable=6)
    built.flip_entry(3)
    built.flip_data(9)
    recovery = reopen(built.storage, local_durable=4, limits=ONE_PAIR)
    report = recovery.report
    assert (report.verdict.bad, report.verdict.cut_at) == (3, 9)
    assert [damage.what for damage in report.damage] == ["proven"] and len(report.cuts) == 1
    assert contents(recovery.log) == built.contents[:8]


def test_a_hole_across_the_watermark_is_cut_only_above_it() -> None:
    built = Built(durable=1)
    built.zero_entries(6, 10)
    recovery = reopen(built.storage, local_durable=8, limits=ONE_PAIR)
    assert recovery.report.verdict.cut_at == 8
    assert [data for _, data in contents(recovery.log)] == [data for _, data in built.contents[:7]]


def test_the_last_entry_of_a_rolled_pair_has_a_copy() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    last = built.log.pairs[-2].end.log_id - 1
    built.zero_entries(last, last + 1)
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert [damage.what for damage in recovery.report.damage] == ["proven"]
    assert contents(recovery.log) == built.contents


@pytest.mark.parametrize(("local_durable", "alarm"), [(8, True), (4, False)])
def test_corrupt_with_other_replicas(local_durable: int, alarm: bool) -> None:
    built = Built(durable=8)
    built.zero_entries(5, 7)
    recovery = reopen(built.storage, local_durable=local_durable, replicas=3, limits=ONE_PAIR)
    report = recovery.report
    assert report.verdict == Verdict(cut_at=None, bad=5, alarm=alarm, new_log_uid=True, possible_loss=False)
    assert report.serve_end == 5
    log = recovery.log
    assert log.end.log_id == 11 and unreadable(log) == [5]
    assert log.entry(5).flags & FAULTY and log.entry(7) == built.entry(7)
    assert log.entry(6).end_position == built.entry(7).position


@pytest.mark.parametrize("journalled", [11, 5], ids=["died before the journal knew", "the journal knows"])
@pytest.mark.parametrize("durable", [1, 8])
def test_what_one_recovery_marked_is_found_by_the_next_one_too(durable: int, journalled: int) -> None:
    """It would pass for whole, or what is good behind it for a torn end: what was durable here is never cut."""
    built = Built(durable=durable)
    built.zero_entries(5, 7)
    first = reopen(built.storage, local_durable=11, replicas=3, limits=ONE_PAIR)
    assert first.report.serve_end == first.log.vouched_durable == 5
    first.log.close()
    again = reopen(built.storage, local_durable=journalled, replicas=3, limits=ONE_PAIR)
    assert again.report.new_log_uid and again.report.serve_end == again.log.vouched_durable == 5
    assert again.report.cuts == () and again.log.end.log_id == 11
    assert [again.log.entry(n) for n in range(7, 11)] == [built.entry(n) for n in range(7, 11)]


def test_what_nobody_else_counts_for_is_not_waited_for() -> None:
    built = Built(durable=8)
    built.zero_entries(5, 7)
    reopen(built.storage, local_durable=11, limits=ONE_PAIR).log.close()
    report = reopen(built.storage, local_durable=11, replicas=3, alone=True, limits=ONE_PAIR).report
    assert not report.new_log_uid and report.serve_end is None


def test_damage_is_not_vouched_for_until_it_was_fetched_again() -> None:
    """A process that dies before that is followed by one that must find the damage again."""
    built = Built(durable=8)
    built.zero_entries(5, 7)
    log = reopen(built.storage, local_durable=4, replicas=3, limits=ONE_PAIR).log
    ticket = log.unsynced()
    assert ticket is None and log.vouched_durable == 5
    log.cutting(5)()
    assert log.vouched_durable == log.local_durable == 5
    data = built.log.read(built.entry(5))
    log.append_copy(built.entry(5), data)
    ticket = log.unsynced()
    assert ticket is not None
    ticket.run()
    log.synced(ticket)
    assert log.vouched_durable == 6


def test_a_missing_end_with_other_replicas_is_fetched_again() -> None:
    built = Built()
    built.shorten(COMMITLOG, 8 * ENTRY_BYTES)
    recovery = reopen(built.storage, local_durable=11, replicas=3, limits=ONE_PAIR)
    assert recovery.report.serve_end == 8 and recovery.report.new_log_uid
    assert recovery.log.end.log_id == 8
    assert built.sizes() == (built.entry(8).position, 8 * ENTRY_BYTES)
