"""Whatever a crash leaves of the files of a partition, recovery keeps its promises.

A random workload (appends, disk rounds, rolls, failed writes, cuts, dropped pairs, journal rounds) runs on a simulated
disk until the machine goes off; each image keeps some of what was not synced. Then, with sync=always:

1. what a completed disk round covered is there, unaltered; nothing is called corrupt; the rest is a prefix of what was
   written; recovering again, or after a crash in the middle of recovery, gives the same;
2. with one bit flipped, below the watermark: the range is reported or refuses to be read, and everything else there is
   intact; above it: what is missing was reported as cut;
3. with one sector lost: as 2.
"""

from __future__ import annotations

import errno
import random

import pytest

from nsqha.commitlog.entry import Entry
from nsqha.commitlog.journal import PartitionRecord
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.recovery import Recovery
from nsqha.commitlog.storage import parent
from nsqha.errors import AppendFailed, LogCorrupt
from nsqha.frames import HAS_EVENTS
from tests.sim.images import Image, blank_one_sector, crash_images, every_crash, flip_one_bit, named
from tests.sim.storage import Crashed, SimStorage
from tests.unit.commitlog.logs import (
    DIRECTORY,
    IDENTITY,
    SECOND,
    Cuts,
    contents,
    drop_pairs,
    event,
    messages,
    random_bodies,
    reopen,
    roll,
)

STEPS = 90


class LogWorkload:
    """A broker's life with one partition; `written` and the rest are what it knows at the moment of the crash."""

    def __init__(self, storage: SimStorage, rng: random.Random) -> None:
        self.storage = storage
        self.rng = rng
        self.written: dict[int, tuple[Entry, bytes]] = {}  # what the log has now
        self.refused: dict[int, list[tuple[Entry | None, bytes]]] = {}  # appends that failed, by their log id
        self.cut_off: dict[int, list[tuple[Entry, bytes]]] = {}  # entries that a cut removed
        self.acked = 1  # end of what a completed disk round covered
        self.dropped_to = 1  # entries below may be gone with their pair
        self.cuts = Cuts(PartitionRecord(log_uid=7, local_durable=0))
        self.time_ns = 0
        # In some lives other replicas report more durable entries than our own journal has recorded.
        self.journal_rate = rng.choice((0.02, 0.3))

    def run(self) -> None:
        rng = self.rng
        limits = LogLimits(rng.choice((4 << 10, 16 << 10)), commitlog_bytes=rng.choice((2 << 10, 1 << 20)))
        cache = BatchCache(rng.choice((1, 32 << 10)))
        self.log = PartitionLog.create(self.storage, DIRECTORY, IDENTITY, cache=cache, limits=limits)
        for _ in range(STEPS):
            self.step()

    def step(self) -> None:
        rng, log = self.rng, self.log
        choice = rng.random()
        if choice < 0.62:
            self.append()
        elif choice < 0.87:
            ticket = log.unsynced()
            if rng.random() < 0.2:
                self.append()  # while the round runs
            if ticket is not None:
                ticket.run()
                self.acked = max(self.acked, log.synced(ticket))
        elif choice < 0.93 and self.log.needs_roll:
            if rng.random() < 0.2:
                self.failing_roll()
            roll(log)
            self.acked = max(self.acked, log.local_durable)
        elif choice < 0.95:
            self.failing_append()
        elif choice < 0.97:
            self.cut()
        elif choice < 0.99:
            self.drop()
        if rng.random() < self.journal_rate:
            assert self.cuts.record is not None
            self.cuts.record = PartitionRecord(log_uid=7, local_durable=log.local_durable)

    def append(self) -> None:
        rng, log = self.rng, self.log
        self.time_ns += rng.choice((0, 1, SECOND))
        timestamp_ns = log.next_timestamp(self.time_ns)
        events = event(rng.randbytes(rng.randrange(200))) if rng.random() < 0.2 else b""
        bodies = random_bodies(rng) if not events or rng.random() < 0.5 else []
        data = bytearray(events) + messages(log.end.offset, bodies, timestamp_ns)
        log_id = log.end.log_id
        self.refused.setdefault(log_id, []).append((None, bytes(data)))
        entry = log.append(
            data,
            count=len(bodies),
            flags=HAS_EVENTS if events else 0,
            timestamp_ns=timestamp_ns,
            epoch=1 + log_id // 20,
            durable=log.local_durable,
        )
        self.refused[log_id].pop()
        self.written[log_id] = entry, bytes(data)

    def failing_append(self) -> None:
        self.storage.fail("pwrite", self.rng.choice(("segment", "commitlog")), code=errno.ENOSPC)
        with pytest.raises(AppendFailed):
            self.append()
        self.storage.heal()

    def failing_roll(self) -> None:
        self.storage.fail(self.rng.choice(("create", "pwrite", "truncate")), after=self.rng.randrange(2))
        try:
            roll(self.log)
        except AppendFailed:
            pass
        self.storage.heal()
        self.append()

    def cut(self) -> None:
        log, rng = self.log, self.rng
        lowest = max(log.local_durable, log.start.log_id)
        if lowest >= log.end.log_id:
            return
        log_id = rng.randrange(lowest, log.end.log_id)
        self.cuts.begin(log.cut_intent(log_id))
        for gone in range(log_id, log.end.log_id):
            self.cut_off.setdefault(gone, []).append(self.written.pop(gone))
        log.cutting(log_id)()
        self.cuts.done()

    def drop(self) -> None:
        log = self.log
        durable_pairs = [pair for pair in log.pairs[:-1] if pair.end.log_id <= log.local_durable]
        if durable_pairs:
            end = self.rng.choice(durable_pairs).end
            self.dropped_to = max(self.dropped_to, end.log_id)
            drop_pairs(log, end)


def start(image: Image[LogWorkload], cuts: Cuts | None = None, *, replicas: int = 1) -> Recovery:
    """Recover an image, with the journal as the workload left it, or as an earlier recovery did."""
    cuts = cuts or Cuts(image.history.cuts.record)
    return reopen(image.storage, cuts=cuts, page_cache_lost=True, replicas=replicas)


def allowed(history: LogWorkload, log_id: int) -> list[tuple[Entry | None, bytes]]:
    """What may stand at `log_id` if it is above everything that was synced."""
    present = [history.written[log_id]] if log_id in history.written else []
    return [*present, *history.refused.get(log_id, []), *history.cut_off.get(log_id, [])]


def check_prefix(history: LogWorkload, log: PartitionLog) -> None:
    """Acknowledged entries are there and unaltered; the others, if any, are what was once written."""
    assert log.start.log_id <= history.dropped_to
    assert log.end.log_id >= history.acked
    for entry, data in contents(log):
        if entry.log_id < history.acked:
            assert (entry, data) == history.written[entry.log_id]
        else:
            assert any(data == d and e in (None, entry) for e, d in allowed(history, entry.log_id))
    for offset in range(log.start.offset, log.end.offset):
        batch = log.batch_at(offset)
        assert batch is not None and batch.first_offset <= offset < batch.end_offset


def check_files(log: PartitionLog, storage: SimStorage) -> None:
    """The files hold the log and nothing else."""
    segments = {path: data for path, data in storage.contents().items() if path.endswith(".segment")}
    assert sum(map(len, segments.values())) == log.end.position - log.start.position
    others = [path for path in storage.contents() if parent(path) == DIRECTORY and not path.endswith(".segment")]
    assert len(others) == len(segments) == len(log.pairs)


def append_one(log: PartitionLog) -> None:
    timestamp_ns = log.next_timestamp(0)
    data = messages(log.end.offset, [b"after"], timestamp_ns)
    epoch = log.last.epoch + 1 if log.last else 1
    log.append(data, count=1, flags=0, timestamp_ns=timestamp_ns, epoch=epoch, durable=log.local_durable)


def test_nothing_acknowledged_is_lost_and_nothing_false_is_called_corrupt() -> None:
    for image in crash_images(LogWorkload, seeds=range(150), images=4):
        with named(image):
            cuts = Cuts(image.history.cuts.record)
            recovery = start(image, cuts)
            log, report = recovery.log, recovery.report
            assert not report.damage and not report.verdict.alarm
            assert not report.unreadable and not report.restored_anchors
            assert not report.new_log_uid and not report.possible_loss
            check_prefix(image.history, log)
            check_files(log, image.storage)
            end = log.end
            again = start(image, cuts)
            assert again.report.clean and again.log.end == end
            append_one(again.log)
            assert len(contents(again.log)) == end.log_id - log.start.log_id + 1
            cuts.record = PartitionRecord(log_uid=7, local_durable=again.log.local_durable)
            third = reopen(image.storage.crash(image.rng), cuts=cuts, page_cache_lost=True)
            assert third.log.end.log_id >= end.log_id and not third.report.damage


def test_a_crash_during_recovery_changes_nothing() -> None:
    for image in crash_images(LogWorkload, seeds=range(1000, 1080), images=2):
        with named(image):
            cuts = Cuts(image.history.cuts.record)
            image.storage.crash_after(image.rng.randrange(1, 25))
            try:
                reopen(image.storage, cuts=cuts, page_cache_lost=True)
            except Crashed:
                pass
            after = image.storage.crash(image.rng)
            recovery = reopen(after, cuts=cuts, page_cache_lost=True)
            assert not recovery.report.damage and not recovery.report.verdict.alarm
            check_prefix(image.history, recovery.log)
            check_files(recovery.log, after)


class Durable(LogWorkload):
    """A log of 25 synced batches in several pairs; `run` is one act on it."""

    def __init__(self, storage: SimStorage, rng: random.Random) -> None:
        super().__init__(storage, rng)
        self.log = PartitionLog.create(
            storage, DIRECTORY, IDENTITY, cache=BatchCache(1), limits=LogLimits(segment_bytes=4 << 10)
        )
        for _ in range(25):
            self.append()
            if self.log.needs_roll:
                roll(self.log)
        self.sync()
        assert len(self.log.pairs) > 4

    def sync(self) -> None:
        ticket = self.log.unsynced()
        if ticket is not None:
            ticket.run()
            self.acked = self.log.synced(ticket)
            self.cuts.record = PartitionRecord(log_uid=7, local_durable=self.acked)


class Dropping(Durable):
    def run(self) -> None:
        end = self.log.pairs[2].end
        self.dropped_to = end.log_id
        drop_pairs(self.log, end)


class Rolling(Durable):
    def run(self) -> None:
        self.append()
        roll(self.log)
        self.append()
        self.sync()


class Cutting(Durable):
    """What catch-up does: the end goes although it was durable, another end takes its place."""

    def run(self) -> None:
        log_id = self.log.pairs[2].first.log_id + 1
        self.acked = log_id
        self.cuts.begin(self.log.cut_intent(log_id))
        for gone in range(log_id, self.log.end.log_id):
            self.cut_off.setdefault(gone, []).append(self.written.pop(gone))
        self.log.cutting(log_id)()
        self.cuts.done()
        for _ in range(3):
            self.append()
        self.sync()


@pytest.mark.parametrize("act", [Dropping, Rolling, Cutting])
def test_every_moment_of_an_act_may_be_the_last(act: type[Durable]) -> None:
    for image in every_crash(act, images=12):
        with named(image):
            cuts = Cuts(image.history.cuts.record)
            recovery = start(image, cuts)
            assert not recovery.report.damage and not recovery.report.verdict.alarm
            check_prefix(image.history, recovery.log)
            check_files(recovery.log, image.storage)
            # What was recovered is durable: nothing of it goes with the next crash, whatever is appended meanwhile.
            assert cuts.record is not None
            cuts.record = PartitionRecord(log_uid=7, local_durable=recovery.log.local_durable)
            had = contents(recovery.log)
            append_one(recovery.log)
            again = reopen(image.storage.crash(image.rng), cuts=cuts, page_cache_lost=True)
            assert contents(again.log)[: len(had)] == had and not again.report.damage


@pytest.mark.parametrize(("damage", "first_seed"), [(flip_one_bit, 2000), (blank_one_sector, 3000)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_damage_is_detected_below_the_watermark_and_costs_only_the_tail_above(
    damage: object, first_seed: int, replicas: int
) -> None:
    for image in crash_images(LogWorkload, seeds=range(first_seed, first_seed + 70), images=2):
        with named(image):
            assert callable(damage)
            what = damage(image.storage, image.rng, DIRECTORY)
            image.label += f", {what}"
            try:
                recovery = start(image, replicas=replicas)
            except LogCorrupt:
                # Without a pair before it, a commitlog that lost its anchor and every entry says nothing at all.
                assert damage is blank_one_sector and what is not None and what[0].endswith("commitlog") and not what[1]
                continue
            check_damaged(image.history, recovery, replicas)
            had = readable(recovery.log)
            cuts = Cuts(PartitionRecord(log_uid=7, local_durable=recovery.log.local_durable))
            again = reopen(image.storage.crash(image.rng), cuts=cuts, replicas=replicas, page_cache_lost=True)
            assert readable(again.log) == had and not again.report.cuts


def readable(log: PartitionLog) -> dict[int, bytes]:
    """Every batch that can be read, by log id."""
    found = {}
    for log_id in range(log.start.log_id, log.end.log_id):
        try:
            found[log_id] = bytes(log.read(log.entry(log_id)))
        except LogCorrupt:
            pass
    return found


def check_damaged(history: LogWorkload, recovery: Recovery, replicas: int) -> None:
    log, report = recovery.log, recovery.report
    watermark = report.watermark
    reported = [(d.first.log_id, d.end.log_id) for d in report.damage]
    served = log.end.log_id if report.serve_end is None else report.serve_end
    if log.end.log_id < history.acked:
        # Above the watermark a bad entry looks torn; the cut is reported. Below it nothing may be missing silently.
        assert report.cuts or report.trimmed_bytes or report.serve_end is not None
        assert served >= watermark or replicas > 1
    for log_id in range(max(log.start.log_id, history.dropped_to), min(history.acked, log.end.log_id)):
        entry_true, data_true = history.written[log_id]
        try:
            entry = log.entry(log_id)
            data = bytes(log.read(entry))
        except LogCorrupt:
            # A damaged batch below the watermark: it says so, and where reading goes on.
            continue
        if (entry, data) != (entry_true, data_true):
            assert any(first <= log_id < end for first, end in reported), (entry, entry_true)
    if report.serve_end is not None:
        assert report.new_log_uid and replicas > 1
    # What can be read as messages is what was written there. At the very end of the log nothing proves a rebuilt run:
    # of two batches with one timestamp it may take the second, unsynced one for a part of the first.
    rebuilt = [d for d in report.damage if d.what == "rebuilt" and d.end == log.end]
    unproven = {log_id for d in rebuilt for log_id in range(d.first.log_id, d.end.log_id)}
    truth = b"".join(history.written[n][1] for n in sorted(history.written))
    base = min((e.position for e, _ in history.written.values()), default=0)
    for log_id in range(max(log.start.log_id, history.dropped_to), min(served, history.acked)):
        if log_id in unproven:
            continue
        try:
            entry = log.entry(log_id)
            data = bytes(log.read(entry))
        except LogCorrupt:
            continue
        assert data == truth[entry.position - base : entry.end_position - base]
