"""What a partition's log forgets, and what stops it."""

from __future__ import annotations

import errno
import random

import pytest

from nsqha.commitlog.log import LogLimits
from nsqha.commitlog.retention import Retention
from nsqha.server.node.snapshot import cursor_stats
from nsqha.server.partition import retention as trimming
from nsqha.server.partition.file_jobs import REMOVAL_RETRY_SECONDS
from nsqha.server.partition.retention import AbandonedPolicy
from tests.sim.storage import SimStorage
from tests.unit.server.shell_rig import PartitionRig


def fill(rig: PartitionRig, body: bytes = b"y" * 300, *, pairs: int = 3) -> None:
    """Publish until the log has so many pairs of files."""
    while len(rig.log.pairs) < pairs:
        rig.store(body)
        rig.disk.work()
        rig.disk.sync()


def skip_to_end(rig: PartitionRig) -> None:
    """Nobody reads what is there."""
    rig.cursors.requests.seek("c", rig.cursors.state.pump)
    rig.partition.commit_events()


def keep_house(rig: PartitionRig, times: int = 1) -> None:
    for _ in range(times):
        rig.partition.keep_house(rig.partition.now())
        rig.disk.sync()
        rig.disk.work()


def test_a_deferred_message_that_can_not_be_read_keeps_its_files_and_is_told() -> None:
    storage = SimStorage(random.Random(1))
    rig = PartitionRig(storage=storage, limits=LogLimits(segment_bytes=300))
    rig.log._cache.bytes_max = 0  # what is read comes from the files
    told: list[tuple[int, int]] = []
    rig.partition.on_damage = lambda first, end: told.append((first, end))
    rig.store(b"later", defer_ms=3_600_000)
    deferred = rig.log.last.log_id
    fill(rig)
    skip_to_end(rig)
    rig.disk.sync()
    bit = 8 * (rig.log.entry(deferred).position + rig.log.entry(deferred).size - 1)
    storage.flip("topic/0/00000000000000000000.segment", bit)

    keep_house(rig, 8)
    assert set(told) == {(deferred, deferred + 1)} and rig.log.start.log_id == 1
    storage.flip("topic/0/00000000000000000000.segment", bit)
    keep_house(rig, 8)
    assert rig.log.start.log_id > deferred
    consumer = rig.consume(10)
    rig.pass_time(3_601)
    assert consumer.wire.bodies == [b"later"]


def test_figures_have_a_message_that_was_carried_and_is_due() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    rig.store(b"later", defer_ms=3_600_000)
    fill(rig)
    skip_to_end(rig)
    keep_house(rig, 8)
    assert rig.log.start.offset > 0, "its own place in the log is gone"

    def figures() -> tuple[int, int, float | None]:
        found = cursor_stats(rig.partition, rig.cursors.channels["c"], "", rig.partition.now())
        return found.depth, found.deferred_count, found.oldest_unfinished_seconds

    assert figures()[:2] == (0, 1)
    rig.pass_time(3_601)
    depth, deferred, age = figures()
    assert (depth, deferred) == (1, 0) and age is not None and age > 3_600


def test_publishers_do_not_wait_for_files_that_are_unlinked_and_the_end_does() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    fill(rig)
    first = "topic/0/00000000000000000000.segment"
    skip_to_end(rig)
    for _ in range(8):
        rig.disk.sync()
        rig.partition.keep_house(rig.partition.now())
        rig.loop.turn()
    assert rig.log.start.log_id > 1 and rig.storage.exists(first), "forgotten, and not unlinked yet"
    outcome = rig.store(b"meanwhile")
    assert outcome.answers == ["OK"]
    left = rig.loop.create_task(rig.partition.release("test"))
    rig.disk.work(removals=False)
    assert not left.done()
    rig.disk.work()
    assert left.done() and not rig.storage.exists(first)


@pytest.mark.parametrize("sync", ["interval", "none"])
def test_files_stay_until_what_replaces_them_is_on_the_disk(sync: str) -> None:
    """Without sync=always the log start and the checkpoint are committed before they are durable."""
    storage = SimStorage(random.Random(1))
    rig = PartitionRig(sync=sync, storage=storage, limits=LogLimits(segment_bytes=300))
    while len(rig.log.pairs) < 3:
        rig.publish(b"y" * 300)
        rig.turn()
        rig.disk.work()
    skip_to_end(rig)
    for _ in range(8):
        rig.turn()
        rig.partition.keep_house(rig.partition.now())
        rig.disk.work()
    needed = rig.cursors.retention.needed_durable
    assert rig.cursors.state.log_start[1] > 0 and rig.cursors.state.checkpoint.as_of, "committed"
    assert rig.log.local_durable <= needed and rig.log.start.log_id == 1, "and not durable: nothing goes"
    rig.disk.sync()
    assert rig.log.local_durable > needed, "retention asked for a disk round"
    rig.partition.keep_house(rig.partition.now())
    rig.disk.work()
    assert rig.log.start.log_id > 1


@pytest.mark.parametrize("operation", ["rename", "remove"])
def test_files_that_can_not_be_unlinked_are_tried_again_and_end_nothing(operation: str) -> None:
    """A folder that takes no change for a while: the log has forgotten its files, and nobody else knows of them."""
    storage = SimStorage(random.Random(1))
    rig = PartitionRig(storage=storage, limits=LogLimits(segment_bytes=300))
    fill(rig, pairs=4)
    skip_to_end(rig)
    storage.fail(operation, code=errno.EROFS, after=1, times=1000)
    keep_house(rig, 8)
    assert rig.log.start.log_id > 1 and not rig.partition.closed and not rig.failures
    storage.heal()
    keep_house(rig, 8)
    first = "topic/0/00000000000000000000"
    assert storage.exists(f"{first}.dropping"), "not at once again"
    rig.pass_time(REMOVAL_RETRY_SECONDS)
    keep_house(rig, 2)
    names = {name.partition(".")[0] for name in storage.list_dir("topic/0")}
    assert names == {f"{pair.first.position:020d}" for pair in rig.log.pairs}
    outcome = rig.store(b"more")
    assert outcome.answers == ["OK"]


def deferred_and_old(rig: PartitionRig, *sizes: int) -> None:
    """Deferred messages of these sizes, behind which the log has new files and nobody reads."""
    for size in sizes:
        rig.store(b"%08d" % size + b"z" * (size - 8), defer_ms=3_600_000)
    fill(rig, b"y" * (64 << 10))
    skip_to_end(rig)
    rig.disk.sync()


def test_what_is_carried_at_once_fits_a_message_between_nodes() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=64 << 20), waiting_bytes_max=1 << 30)
    sizes = [400_000] * 12
    for _ in range(150):
        rig.store(b"y" * 400_000)
    deferred_and_old(rig, *sizes)
    first = rig.log.end.log_id
    keep_house(rig, 20)
    batches = [entry.size for entry in rig.log.entries(first, rig.log.end.log_id)]
    assert rig.log.start.log_id > 150, "all of it was carried"
    assert max(batches) < 2 << 20
    consumer = rig.consume(100)
    rig.pass_time(3_601)
    assert [len(body) for body in consumer.wire.bodies] == sizes


def test_files_that_hold_little_but_deferred_messages_stay() -> None:
    """To append all that again would free nothing; what does not have to be appended goes all the same."""
    rig = PartitionRig(limits=LogLimits(segment_bytes=2 << 20), waiting_bytes_max=1 << 30)
    deferred_and_old(rig, *[60_000] * 20)
    before = rig.log.end.position
    keep_house(rig, 20)
    assert rig.log.start.offset == 0 and rig.log.end.position == before
    consumer = rig.consume(100)
    rig.pass_time(3_601)
    for message_id, _, _ in consumer.wire.messages:
        rig.fin(consumer, message_id)
    for _ in range(5):
        rig.pass_time(61)
        keep_house(rig)
    assert rig.log.start.offset >= 20


def stalled(rig: PartitionRig, seconds: int) -> int:
    """No disk round: nothing is committed. Where the log ends then."""
    for _ in range(seconds):
        rig.pass_time(1)
        rig.partition.keep_house(rig.partition.now())
        rig.turn()
    return rig.log.end.position


def test_nothing_is_carried_again_while_commits_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a checkpoint written again and again: each would be kept until the others are back."""
    monkeypatch.setattr(trimming, "CARRY_AT_ONCE", 2)
    rig = PartitionRig(limits=LogLimits(segment_bytes=2 << 20), waiting_bytes_max=1 << 30)
    for _ in range(30):
        rig.store(b"y" * 60_000)
    deferred_and_old(rig, 1000, 1000, 1000)
    before = rig.log.end.position
    after = stalled(rig, 3)
    assert after > before and stalled(rig, 50) == after
    while not rig.cursors.state.log_start[0]:
        rig.disk.sync()
        rig.partition.keep_house(rig.partition.now())
    assert not rig.cursors.state.checkpoint.as_of
    after = stalled(rig, 3)
    assert stalled(rig, 50) == after
    for _ in range(5):
        rig.disk.sync()
        rig.partition.keep_house(rig.partition.now())
        rig.disk.work()
    assert rig.log.start.offset > 0


def test_what_nobody_reads_is_given_up_when_it_is_too_old() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    rig.partition.retention.abandoned = AbandonedPolicy(after_ns=60 * 10**9)
    fill(rig)
    for wait, start in ((59, 0), (2, 2)):
        rig.pass_time(wait)
        keep_house(rig, 5)
        assert rig.log.start.offset == start
    assert rig.cursors.channels["c"].committed.abandoned == 2


def test_a_log_start_that_a_channel_held_back_is_asked_for_again() -> None:
    """One channel is given up, another one reads on: what it still needed then goes when it has read it."""
    rig = PartitionRig(limits=LogLimits(segment_bytes=300), channel=False)
    rig.channels("abandoned", "slow")
    rig.partition.retention.abandoned = AbandonedPolicy(over_bytes=1)
    consumer = rig.consume(1, "slow")
    fill(rig)

    def pass_seconds(seconds: int) -> None:
        for _ in range(seconds):
            rig.pass_time(1)
            rig.disk.sync()
            keep_house(rig)

    pass_seconds(5)
    assert rig.cursors.channels["abandoned"].committed.abandoned == 2 and rig.log.start.offset == 0
    ends = rig.log.end.log_id
    pass_seconds(5)
    assert rig.log.end.log_id == ends, "nothing is asked for that can not be"
    while consumer.in_flight:
        rig.fin(consumer, consumer.wire.messages[-1][0])
    pass_seconds(5)
    assert rig.log.start.offset == 2


def test_nothing_goes_because_of_its_age_while_clocks_are_not_trusted() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    rig.partition.retention.retention = Retention(keep_ns=10**9, keep_bytes=None)
    rig.partition.retention.abandoned = AbandonedPolicy(after_ns=10**9)
    fill(rig)
    rig.clock.trusted = False
    rig.clock.advance(3600)
    keep_house(rig, 8)
    assert rig.log.start.log_id == 1
    rig.clock.trusted = True
    keep_house(rig, 8)
    assert rig.log.start.log_id > 1, "the channel is abandoned, and what it had not read is old"


def test_what_retention_removes_is_counted_in_bytes() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    fill(rig)
    begin = rig.log.start.position
    skip_to_end(rig)
    keep_house(rig, 8)
    assert rig.log.start.position > begin
    assert rig.runtime.measures.retention_removed_bytes == rig.log.start.position - begin
