"""The recovery table, row by row: write a log, damage it, recover, look at the report and at what is left.

Log ids here are 1 to 10 in one pair unless said; `durable` is what the journal says, W the watermark.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES, FAULTY, REBUILT, BatchCorrupt, Entry
from nsqha.commitlog.journal import CutIntent, PartitionRecord
from nsqha.commitlog.log import LogLimits, PartitionLog, Place
from nsqha.commitlog.pairs import unlink_some
from nsqha.commitlog.verdict import Circumstances, Verdict, judge
from nsqha.commitlog.verify import verify
from nsqha.errors import LogCorrupt, Poisoned
from nsqha.frames import EPOCH_START, PROGRESS
from nsqha.ranges import RangeSet
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.logs import DIRECTORY, SMALL, Cuts, add, contents, event, new_log, reopen, sync

SEGMENT = f"{DIRECTORY}/00000000000000000000.segment"
COMMITLOG = f"{DIRECTORY}/00000000000000000000.commitlog"
ONE_PAIR = LogLimits()


class Built:
    """A log of ten batches of two messages, an event before each third; its entries and bytes as they were."""

    def __init__(self, *, durable: int = 1, batches: int = 10, limits: LogLimits = ONE_PAIR) -> None:
        self.storage = SimStorage()
        self.limits = limits
        self.log = new_log(self.storage, limits=limits)
        for n in range(batches):
            events = event(b"x" * n) if n % 3 == 0 else b""
            add(self.log, b"a" * (50 + n), b"b" * 60, events=events, durable=durable)
            if self.log.needs_roll:
                self.log.roll()
        sync(self.log)
        self.contents = contents(self.log)

    def entry(self, log_id: int) -> Entry:
        return self.contents[log_id - 1][0]

    def file(self, log_id: int, suffix: str) -> str:
        return self.log.pair_of(log_id).path(suffix)

    def flip_entry(self, log_id: int, *bytes_of_it: int) -> None:
        at = self.log.pair_of(log_id).slot(log_id)
        for byte in bytes_of_it or (3,):
            self.storage.flip(self.file(log_id, ".commitlog"), (at + byte) * 8)

    def zero_entries(self, first: int, end: int) -> None:
        file = self.storage.open(self.file(first, ".commitlog"))
        file.pwrite(bytes((end - first) * ENTRY_BYTES), self.log.pair_of(first).slot(first))
        file.sync()

    def flip_data(self, log_id: int) -> None:
        entry = self.entry(log_id)
        byte = entry.end_position - 10 - self.log.pair_of(log_id).position
        self.storage.flip(self.file(log_id, ".segment"), byte * 8)

    def shorten(self, path: str, n: int) -> None:
        file = self.storage.open(path)
        file.truncate(n)
        file.sync()

    def sizes(self) -> tuple[int, int]:
        return self.storage.open(SEGMENT).size(), self.storage.open(COMMITLOG).size()


def unreadable(log: PartitionLog) -> list[int]:
    """Log ids whose batch can not be read."""
    bad = []
    for log_id in range(log.start.log_id, log.end.log_id):
        try:
            log.read(log.entry(log_id))
        except LogCorrupt:
            bad.append(log_id)
    return bad


# ---- nothing bad


def test_nothing_bad() -> None:
    built = Built()
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert recovery.report.clean and not recovery.report.new_log_uid
    assert contents(recovery.log) == built.contents
    assert recovery.log.local_durable == 11


def test_bytes_without_an_entry_are_cut_off() -> None:
    built = Built()
    size = built.sizes()
    segment, commitlog = built.storage.open(SEGMENT), built.storage.open(COMMITLOG)
    segment.pwrite(b"frames whose entry was never written", size[0])
    commitlog.allocate(size[1] + 4096)
    cuts = Cuts(PartitionRecord(log_uid=7, local_durable=11))
    recovery = reopen(built.storage, cuts=cuts, limits=built.limits)
    assert recovery.report.verdict == Verdict(None, None, False, False, False)
    assert recovery.report.trimmed_bytes == 36 + 4096 and not recovery.report.cuts
    assert built.sizes() == size and not cuts.begun
    assert contents(recovery.log) == built.contents


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("sync_always", "due"), [(True, False), (False, True)])
def test_nothing_bad_after_the_host_restarted(replicas: int, sync_always: bool, due: bool) -> None:
    built = Built()
    recovery = reopen(
        built.storage, local_durable=5, sync_always=sync_always, replicas=replicas, host_restarted=True, limits=ONE_PAIR
    )
    assert recovery.report.new_log_uid is due
    assert recovery.report.possible_loss is (due and replicas == 1)
    assert contents(recovery.log) == built.contents


# ---- torn


@pytest.mark.parametrize("what", ["entry", "data", "missing data"])
def test_a_bad_batch_above_the_watermark_is_torn_and_cut(what: str) -> None:
    built = Built(durable=5)
    if what == "entry":
        built.flip_entry(8)
    elif what == "data":
        built.flip_data(8)
    else:
        built.shorten(SEGMENT, built.entry(8).position + 5)
    cuts = Cuts(PartitionRecord(log_uid=7, local_durable=4))
    recovery = reopen(built.storage, cuts=cuts, host_restarted=True, limits=ONE_PAIR)
    report = recovery.report
    assert report.watermark == 5
    assert report.verdict == Verdict(cut_at=8, bad=None, alarm=False, new_log_uid=False, possible_loss=False)
    (cut,) = report.cuts
    assert (tuple(cut.at), cut.why) == ((8, 14, built.entry(8).position), "torn")
    assert cut.entries == (2 if what == "entry" else 3)
    assert contents(recovery.log) == built.contents[:7]
    assert built.sizes() == (built.entry(8).position, 8 * ENTRY_BYTES)
    (intent,) = cuts.begun
    chain = (0, 0) if what == "entry" else (1, built.entry(8).chain)
    assert intent == CutIntent(8, 14, built.entry(8).position, *chain)
    assert cuts.record == PartitionRecord(log_uid=7, local_durable=4)


def test_an_entry_from_another_past_above_the_watermark_is_torn() -> None:
    built = Built()
    file = built.storage.open(COMMITLOG)
    stale = built.entry(8)._replace(chain=1234)
    file.pwrite(stale.encode(), 8 * ENTRY_BYTES)
    file.sync()
    recovery = reopen(built.storage, local_durable=5, limits=ONE_PAIR)
    assert recovery.report.verdict.cut_at == 8
    assert contents(recovery.log) == built.contents[:7]


def test_an_entry_that_does_not_go_on_where_the_last_one_ends_is_bad_wherever_it_is() -> None:
    built = Built()
    file = built.storage.open(COMMITLOG)
    file.pwrite(built.entry(4)._replace(first_offset=99).encode(), 4 * ENTRY_BYTES)
    file.sync()
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert recovery.report.verdict.bad == 4
    assert [data for _, data in contents(recovery.log)] == [data for _, data in built.contents]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("host_restarted", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_torn_log_without_sync_always(replicas: int, host_restarted: bool, written: bool) -> None:
    """What was `written` whole may have been acknowledged, and a process that is killed does not spoil it."""
    built = Built(durable=5)
    if written:
        built.flip_data(9)
    else:
        built.shorten(COMMITLOG, 9 * ENTRY_BYTES + 40)
    recovery = reopen(
        built.storage,
        local_durable=5,
        sync_always=False,
        replicas=replicas,
        host_restarted=host_restarted,
        limits=ONE_PAIR,
    )
    report = recovery.report
    assert report.verdict.cut_at == 9 and len(report.cuts) == 1
    assert report.new_log_uid is (host_restarted or (written and replicas > 1))
    assert report.possible_loss is (replicas == 1)
    assert contents(recovery.log) == built.contents[:8]


def test_a_cut_may_reach_into_the_pair_before() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    first = built.log.pairs[-2].first.log_id
    built.flip_data(first + 1)
    names = built.storage.list_dir(DIRECTORY)
    recovery = reopen(built.storage, local_durable=2, limits=built.limits)
    assert recovery.report.verdict.cut_at == first + 1
    assert contents(recovery.log) == built.contents[:first]
    assert set(built.storage.list_dir(DIRECTORY)) == set(names[:-2])


# ---- corrupt, one replica


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


# ---- corrupt, more replicas


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
    log.truncate_to(5)
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


# ---- journal


@pytest.mark.parametrize(
    ("record", "replicas", "new"),
    [
        (None, 1, True),
        (PartitionRecord(), 1, True),
        (PartitionRecord(log_uid=7), 1, False),
        (PartitionRecord(log_uid=7, log_uid_trusted=False), 1, False),
        (PartitionRecord(log_uid=7, log_uid_trusted=False), 3, True),
    ],
)
def test_without_a_valid_journal_record_a_new_log_uid_is_due(
    record: PartitionRecord | None, replicas: int, new: bool
) -> None:
    built = Built()
    recovery = reopen(built.storage, cuts=Cuts(record), replicas=replicas, limits=ONE_PAIR)
    assert recovery.report.new_log_uid is new
    assert contents(recovery.log) == built.contents


def test_without_a_journal_record_all_frames_are_verified() -> None:
    built = Built(durable=10)
    built.flip_data(2)
    recovery = reopen(built.storage, known=False, limits=ONE_PAIR)
    assert recovery.report.verdict.bad == 2


@pytest.mark.parametrize("state", ["untouched", "half", "finished"])
def test_a_cut_that_was_begun_is_finished(state: str) -> None:
    built = Built()
    cut = built.entry(7)
    intent = CutIntent(7, cut.first_offset, cut.position, cut.epoch, cut.chain)
    if state != "untouched":
        built.shorten(SEGMENT, cut.position)
    if state == "finished":
        built.shorten(COMMITLOG, 7 * ENTRY_BYTES)
    cuts = Cuts(PartitionRecord(log_uid=7, local_durable=9, cut=intent))
    recovery = reopen(built.storage, cuts=cuts, limits=ONE_PAIR)
    assert contents(recovery.log) == built.contents[:6]
    assert not recovery.report.damage
    assert [c.why for c in recovery.report.cuts] == ["intent"]
    assert cuts.record == PartitionRecord(log_uid=7, local_durable=7)


def test_a_cut_is_not_repeated_on_what_was_written_since() -> None:
    built = Built()
    cut = built.entry(7)
    intent = CutIntent(7, cut.first_offset, cut.position, cut.epoch, cut.chain ^ 1)
    cuts = Cuts(PartitionRecord(log_uid=7, local_durable=11, cut=intent))
    recovery = reopen(built.storage, cuts=cuts, limits=ONE_PAIR)
    assert contents(recovery.log) == built.contents
    assert cuts.record is not None and cuts.record.cut is None


def test_a_cut_that_was_begun_across_pairs_is_finished() -> None:
    built = Built(limits=LogLimits(segment_bytes=400))
    cut = built.entry(3)
    intent = CutIntent(3, cut.first_offset, cut.position, cut.epoch, cut.chain)
    cuts = Cuts(PartitionRecord(log_uid=7, local_durable=11, cut=intent))
    recovery = reopen(built.storage, cuts=cuts, limits=built.limits)
    assert contents(recovery.log) == built.contents[:2]


# ---- files


def test_an_empty_folder_is_a_new_log() -> None:
    recovery = reopen(SimStorage(), known=False)
    assert recovery.report.created and recovery.report.new_log_uid and not recovery.report.verdict.alarm
    assert recovery.log.end.log_id == 1


def test_a_folder_that_lost_everything_is_an_alarm() -> None:
    recovery = reopen(SimStorage(), local_durable=100)
    assert recovery.report.created and recovery.report.new_log_uid and recovery.report.verdict.alarm
    assert recovery.report.damage


@pytest.mark.parametrize("first", ["genesis", "copy"])
def test_a_lost_anchor_is_derived_again(first: str) -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    pair = built.log._pairs[0 if first == "genesis" else -1]
    file = built.storage.open(pair.path(".commitlog"))
    file.pwrite(bytes(ENTRY_BYTES), 0)
    file.sync()
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert recovery.report.restored_anchors == 1
    assert contents(recovery.log) == built.contents
    assert verify(recovery.log).problems == ()


@pytest.mark.parametrize("lost", [1, 3])
def test_the_anchor_of_the_oldest_pair_can_do_without_the_one_before(lost: int) -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    built.log.drop_pairs(built.log.pairs[1].first)
    kept = contents(built.log)
    file = built.storage.open(built.log._pairs[0].path(".commitlog"))
    file.pwrite(bytes(ENTRY_BYTES * lost), 0)
    file.sync()
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    log = recovery.log
    assert (log.start, log.end) == (built.log.start, built.log.end)
    for entry, data in kept[lost:]:
        assert (log.entry(entry.log_id), log.read(entry)) == (entry, data)
    for offset in range(kept[lost][0].first_offset, log.end.offset):
        assert log.batch_at(offset) is not None


def test_a_partition_of_which_no_commitlog_can_be_read_stays_closed() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    built.log.drop_pairs(built.log.end)
    built.shorten(built.log._pairs[0].path(".commitlog"), 0)
    with pytest.raises(LogCorrupt, match="restore"):
        reopen(built.storage, local_durable=11, limits=built.limits)


def test_a_replica_of_which_no_commitlog_can_be_read_begins_anew_under_another_name() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    built.log.drop_pairs(built.log.end)
    position = built.log._pairs[0].position
    built.shorten(built.log._pairs[0].path(".commitlog"), 0)
    recovery = reopen(built.storage, local_durable=0, limits=built.limits, replicas=2)
    assert recovery.log.end.log_id == 1 and recovery.report.new_log_uid
    names = built.storage.list_dir(DIRECTORY)
    assert f"{position:020d}.segment.unreadable" in names, "the bytes are kept"


def test_a_pair_that_can_not_be_used_is_set_aside_so_that_it_never_comes_back() -> None:
    built = Built(limits=LogLimits(segment_bytes=800), batches=8)
    before, last = built.log._pairs[-2:]
    built.flip_entry(last.anchor.log_id, 1, 2)
    built.shorten(last.path(".commitlog"), 0)
    recovery = reopen(built.storage, local_durable=9, limits=built.limits)
    assert recovery.report.unreadable == (last.position,) and recovery.report.verdict.alarm
    names = built.storage.list_dir(DIRECTORY)
    assert [name for name in names if name.endswith(".unreadable")] == [
        f"{last.position:020d}.commitlog.unreadable",
        f"{last.position:020d}.segment.unreadable",
    ]
    log = recovery.log
    assert log._pairs[-1].position == before.position
    assert log.end == Place(9, last.first.offset, last.position), "where the lost pair began"
    add(log, b"on", seconds=100)
    sync(log)
    again = reopen(built.storage, local_durable=log.end.log_id, limits=built.limits)
    assert again.report.clean and contents(again.log) == contents(log)


def test_what_a_crash_left_of_a_roll_goes() -> None:
    built = Built()
    left = built.storage.open(f"{DIRECTORY}/00000000000000009999.commitlog", create=True)
    left.pwrite(b"half an anchor", 0)
    built.storage.open(f"{DIRECTORY}/00000000000000009999.segment", create=True)
    recovery = reopen(built.storage, local_durable=11, limits=ONE_PAIR)
    assert contents(recovery.log) == built.contents
    assert built.storage.list_dir(DIRECTORY) == ["00000000000000000000.commitlog", "00000000000000000000.segment"]


def test_a_pair_that_was_being_dropped_goes() -> None:
    built = Built(limits=LogLimits(segment_bytes=400))
    first = built.log._pairs[0]
    built.storage.rename(first.path(".commitlog"), first.path(".dropping"))
    recovery = reopen(built.storage, local_durable=11, limits=built.limits)
    assert recovery.log.start == built.log._pairs[1].first
    assert len(built.storage.list_dir(DIRECTORY)) == 2 * len(recovery.log.pairs)


def test_half_a_log_that_goes_as_a_whole_never_passes_for_one_that_was_shortened() -> None:
    """The partition may come back to this node before it starts again, and the log would have lost its beginning."""
    whole = begun = 0
    for n in range(1, 40):
        rng = random.Random(n)
        built = Built(limits=SMALL, batches=200)
        assert len(built.log.pairs) > 3
        built.log.close()
        built.storage.crash_after(n)
        try:
            while unlink_some(built.storage, DIRECTORY, 3):
                pass
        except Crashed:
            pass
        recovery = reopen(built.storage.crash(rng), local_durable=built.log.end.log_id, replicas=3)
        if recovery.report.created:
            begun += 1
            assert recovery.report.new_log_uid and recovery.log.end.log_id == 1
        else:
            whole += 1
            assert contents(recovery.log) == built.contents
    assert whole and begun


def test_files_that_do_not_belong_here_are_left_alone() -> None:
    built = Built()
    built.storage.open(f"{DIRECTORY}/notes.txt", create=True)
    assert reopen(built.storage, local_durable=11, limits=ONE_PAIR).report.clean
    assert "notes.txt" in built.storage.list_dir(DIRECTORY)


def test_sectors_that_can_not_be_read_are_damage() -> None:
    built = Built()
    built.storage.spoil(SEGMENT, 1)
    recovery = reopen(built.storage, local_durable=1, limits=ONE_PAIR)
    first = recovery.report.verdict.cut_at
    assert first is not None
    assert built.entry(first).position < 1024 and built.entry(first).end_position > 512


def test_epochs_are_rebuilt_from_the_frame_that_starts_one() -> None:
    storage = SimStorage()
    log = new_log(storage, limits=ONE_PAIR)
    add(log, b"1")
    add(log, b"2", events=event(b"", EPOCH_START), epoch=2)
    add(log, b"3", events=event(b"", PROGRESS), epoch=2)
    sync(log)
    was = contents(log)
    file = storage.open(COMMITLOG)
    file.pwrite(bytes(ENTRY_BYTES), 2 * ENTRY_BYTES)
    file.sync()
    recovery = reopen(storage, local_durable=4, limits=ONE_PAIR)
    assert [damage.what for damage in recovery.report.damage] == ["proven"]
    assert contents(recovery.log) == was


def test_a_failed_sync_during_recovery_does_not_report_an_end() -> None:
    built = Built()
    built.storage.fail("sync")
    with pytest.raises(Poisoned):
        reopen(built.storage, local_durable=11, limits=ONE_PAIR)


# ---- the table itself

ALWAYS_1 = Circumstances(sync_always=True, replicas=1, host_restarted=False, known=True, local_durable=50)


@pytest.mark.parametrize(
    ("bad", "changes", "verdict"),
    [
        ([], {}, Verdict(None, None, False, False, False)),
        ([], {"known": False}, Verdict(None, None, False, True, False)),
        ([], {"host_restarted": True}, Verdict(None, None, False, False, False)),
        ([], {"host_restarted": True, "sync_always": False}, Verdict(None, None, False, True, True)),
        ([], {"host_restarted": True, "sync_always": False, "replicas": 3}, Verdict(None, None, False, True, False)),
        ([(100, 101)], {}, Verdict(100, None, False, False, False)),
        ([(100, 101)], {"replicas": 3}, Verdict(100, None, False, False, False)),
        ([(100, 101)], {"sync_always": False}, Verdict(100, None, False, False, True)),
        ([(100, 101)], {"sync_always": False, "host_restarted": True}, Verdict(100, None, False, True, True)),
        ([(49, 50)], {}, Verdict(None, 49, True, False, False)),
        ([(49, 50)], {"replicas": 3}, Verdict(None, 49, True, True, False)),
        ([(49, 50)], {"sync_always": False}, Verdict(None, 49, True, False, False)),
        ([(50, 51)], {}, Verdict(None, 50, True, False, False)),
        ([(50, 51)], {"replicas": 3}, Verdict(None, 50, False, True, False)),
        ([(99, 101)], {}, Verdict(100, 99, True, False, False)),
        ([(99, 100), (130, 131)], {}, Verdict(130, 99, True, False, False)),
        ([(100, 101)], {"replicas": 3, "written": 101}, Verdict(100, None, False, True, False)),
        (
            [(100, 101)],
            {"replicas": 3, "written": 101, "host_restarted": True},
            Verdict(100, None, False, False, False),
        ),
        ([(100, 101)], {"replicas": 1, "written": 101}, Verdict(100, None, False, False, False)),
    ],
)
def test_the_table(bad: list[tuple[int, int]], changes: dict[str, Any], verdict: Verdict) -> None:
    changes = {"written": 100} | changes
    written = changes.pop("written")
    assert judge(100, RangeSet(bad), replace(ALWAYS_1, **changes), written=written) == verdict
