"""The recovery table: write a log, harm its end or its journal, recover, look at the report and at what is left.

Log ids here are 1 to 10 in one pair unless said; `durable` is what the journal says, W the watermark.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsqha.commitlog.corruption.verdict import Circumstances, Verdict, judge
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.journal import CutIntent, PartitionRecord
from nsqha.commitlog.log import LogLimits
from nsqha.ranges import RangeSet
from tests.unit.commitlog.damaged_logs import COMMITLOG, ONE_PAIR, SEGMENT, Built, unreadable
from tests.unit.commitlog.logs import DIRECTORY, Cuts, contents, reopen


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
def test_nothing_bad_after_the_page_cache_was_lost(replicas: int, sync_always: bool, due: bool) -> None:
    built = Built()
    recovery = reopen(
        built.storage,
        local_durable=5,
        sync_always=sync_always,
        replicas=replicas,
        page_cache_lost=True,
        limits=ONE_PAIR,
    )
    assert recovery.report.new_log_uid is due
    assert recovery.report.possible_loss is (due and replicas == 1)
    assert contents(recovery.log) == built.contents


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
    recovery = reopen(built.storage, cuts=cuts, page_cache_lost=True, limits=ONE_PAIR)
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
@pytest.mark.parametrize("page_cache_lost", [False, True])
def test_a_torn_log_without_sync_always(replicas: int, page_cache_lost: bool) -> None:
    built = Built(durable=5)
    built.shorten(COMMITLOG, 9 * ENTRY_BYTES + 40)
    recovery = reopen(
        built.storage,
        local_durable=5,
        sync_always=False,
        replicas=replicas,
        page_cache_lost=page_cache_lost,
        limits=ONE_PAIR,
    )
    report = recovery.report
    assert report.verdict.cut_at == 9 and len(report.cuts) == 1
    assert report.new_log_uid is page_cache_lost
    assert report.possible_loss is (replicas == 1)
    assert contents(recovery.log) == built.contents[:8]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("page_cache_lost", [False, True])
@pytest.mark.parametrize("sync_always", [False, True])
def test_a_batch_above_the_watermark_that_was_written_whole(
    replicas: int, page_cache_lost: bool, sync_always: bool
) -> None:
    """Killing a process spoils nothing: it may have been acknowledged, as what is behind it, and others may have it."""
    built = Built(durable=5)
    built.flip_data(9)
    recovery = reopen(
        built.storage,
        local_durable=5,
        sync_always=sync_always,
        replicas=replicas,
        page_cache_lost=page_cache_lost,
        limits=ONE_PAIR,
    )
    report = recovery.report
    if replicas > 1 and not page_cache_lost:
        assert (report.verdict.cut_at, report.serve_end, report.cuts) == (None, 9, ())
        assert report.new_log_uid
        assert [damage.what for damage in report.damage] == ["data"] and unreadable(recovery.log) == [9]
        assert recovery.log.end.log_id == 11
    else:
        assert report.verdict.cut_at == 9 and len(report.cuts) == 1
        assert report.new_log_uid is (page_cache_lost and not sync_always)
        assert contents(recovery.log) == built.contents[:8]


@pytest.mark.parametrize("page_cache_lost", [False, True])
@pytest.mark.parametrize("torn", [0, 4, 40])
def test_a_last_entry_that_was_written_to_its_end(page_cache_lost: bool, torn: int) -> None:
    """Without a restart of the host it was an entry, perhaps of what was acknowledged: others may not count on this
    log. One that lacks its end never was one."""
    built = Built(durable=5)
    if torn:
        built.shorten(COMMITLOG, 11 * ENTRY_BYTES - torn)
    else:
        built.flip_entry(10)
    recovery = reopen(built.storage, local_durable=5, replicas=3, page_cache_lost=page_cache_lost, limits=ONE_PAIR)
    assert recovery.log.end.log_id == 10
    assert recovery.report.new_log_uid is (not torn and not page_cache_lost)
    assert contents(recovery.log) == built.contents[:9]


def test_a_cut_may_reach_into_the_pair_before() -> None:
    built = Built(limits=LogLimits(segment_bytes=800))
    first = built.log.pairs[-2].first.log_id
    built.flip_data(first + 1)
    names = built.storage.list_dir(DIRECTORY)
    recovery = reopen(built.storage, local_durable=2, limits=built.limits)
    assert recovery.report.verdict.cut_at == first + 1
    assert contents(recovery.log) == built.contents[:first]
    assert set(built.storage.list_dir(DIRECTORY)) == set(names[:-2])


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


ALWAYS_1 = Circumstances(sync_always=True, replicas=1, page_cache_lost=False, known=True, local_durable=50)


@pytest.mark.parametrize(
    ("bad", "changes", "verdict"),
    [
        ([], {}, Verdict(None, None, False, False, False)),
        ([], {"known": False}, Verdict(None, None, False, True, False)),
        ([], {"page_cache_lost": True}, Verdict(None, None, False, False, False)),
        ([], {"page_cache_lost": True, "sync_always": False}, Verdict(None, None, False, True, True)),
        ([], {"page_cache_lost": True, "sync_always": False, "replicas": 3}, Verdict(None, None, False, True, False)),
        ([(100, 101)], {}, Verdict(100, None, False, False, False)),
        ([(100, 101)], {"replicas": 3}, Verdict(100, None, False, False, False)),
        ([(100, 101)], {"sync_always": False}, Verdict(100, None, False, False, True)),
        ([(100, 101)], {"sync_always": False, "page_cache_lost": True}, Verdict(100, None, False, True, True)),
        ([(49, 50)], {}, Verdict(None, 49, True, False, False)),
        ([(49, 50)], {"replicas": 3}, Verdict(None, 49, True, True, False)),
        ([(49, 50)], {"sync_always": False}, Verdict(None, 49, True, False, False)),
        ([(50, 51)], {}, Verdict(None, 50, True, False, False)),
        ([(50, 51)], {"replicas": 3}, Verdict(None, 50, False, True, False)),
        ([(99, 101)], {}, Verdict(100, 99, True, False, False)),
        ([(99, 100), (130, 131)], {}, Verdict(130, 99, True, False, False)),
    ],
)
def test_the_table(bad: list[tuple[int, int]], changes: dict[str, Any], verdict: Verdict) -> None:
    assert judge(100, RangeSet(bad), replace(ALWAYS_1, **changes)) == verdict
