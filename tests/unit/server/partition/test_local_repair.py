"""Entries that rot in a log which nobody else has: they are written anew from their frames, and everything goes on."""

from __future__ import annotations

import errno
import random

import pytest

from nsqha.commitlog.corruption.verdict import CorruptRange
from nsqha.commitlog.corruption.verify import verify
from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.files.pairs import Pair
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.server.partition import local_repair as local_repair
from nsqha.server.partition.local_repair import LocalRepair
from tests.sim.storage import SimStorage
from tests.unit.server.shell_rig import PartitionRig


class Alone(PartitionRig):
    """A partition of three pairs, whose messages nobody has read; its cache holds nothing."""

    def __init__(self, storage: SimStorage | None = None) -> None:
        if storage is not None:
            storage.make_dirs("topic")
        super().__init__(storage=storage, limits=LogLimits(segment_bytes=150))
        self.told: list[CorruptRange] = []
        self.mended: list[tuple[int, int]] = []
        self.partition.local_repair = LocalRepair(
            self.partition, self.told.append, lambda log, first, end: self.mended.append((first, end))
        )
        self.partition.on_damage = self.partition.local_repair.found
        for n in range(8):
            self.pass_time(1.0)
            self.publish(b"%d" % n * 20)
            self.disk.sync()
            self.disk.work()
        assert len(self.log.pairs) > 2
        self.log.shelf.clear()

    def rot(self, pair: Pair, first: int, end: int) -> None:
        """The entries in these slots of a commitlog."""
        pair.commitlog.pwrite(b"\1" * ((end - first) * ENTRY_BYTES), pair.slot(first))

    def keep_house(self) -> None:
        self.partition.keep_house(self.partition.now())
        self.disk.work()


def bodies(log: PartitionLog) -> list[bytes]:
    return [bytes(log.message(offset)[34:]) for offset in range(log.end.offset)]


def test_a_channel_that_stopped_in_front_of_lost_entries_goes_on():
    rig = Alone()
    old = rig.log.files.pairs[1]
    rig.rot(old, old.first.log_id, old.first.log_id + 2)
    consumer = rig.consume(100)
    delivery = rig.partition.deliveries["c"]
    assert delivery.stuck is not None and delivery.damage is not None and len(consumer.wire.bodies) < 8
    rig.keep_house()
    rig.turn()
    assert delivery.stuck is None
    assert consumer.wire.bodies == [b"%d" % n * 20 for n in range(8)]
    assert [damage.what for damage in rig.told] == ["proven"]
    assert rig.mended == [(old.first.log_id, old.first.log_id + 2)]
    assert not verify(rig.log).problems


def test_what_the_scrub_tells_is_rebuilt_hole_by_hole():
    rig = Alone()
    first, second = rig.log.files.pairs[:2]
    rig.rot(first, first.first.log_id, first.first.log_id + 1)
    rig.rot(second, second.first.log_id + 1, second.first.log_id + 2)
    assert len(verify(rig.log).problems) == 2
    rig.partition.on_damage(first.first.log_id, rig.log.end.log_id)
    for _ in range(4):
        rig.keep_house()
    assert not verify(rig.log).problems and len(rig.told) == 2
    assert bodies(rig.log) == [b"%d" % n * 20 for n in range(8)]


def test_frames_that_do_not_verify_stay_and_are_looked_at_once():
    rig = Alone()
    pair = rig.log.files.pairs[1]
    entry = rig.log.entry(pair.first.log_id)
    pair.segment.pwrite(b"\xff" * 9, entry.position - pair.position)
    consumer = rig.consume(100)
    delivery = rig.partition.deliveries["c"]
    assert delivery.stuck is not None
    before = len(consumer.wire.bodies)
    for _ in range(3):
        rig.keep_house()
    assert delivery.stuck is not None and len(consumer.wire.bodies) == before and rig.told == []


def test_what_is_lost_with_its_frames_is_marked_and_the_channel_stays_in_front_of_it():
    rig = Alone()
    pair = rig.log.files.pairs[1]
    entry = rig.log.entry(pair.first.log_id)
    pair.segment.pwrite(b"\xff" * 9, entry.position - pair.position)
    rig.rot(pair, entry.log_id, entry.log_id + 1)
    rig.consume(100)
    for _ in range(3):
        rig.keep_house()
        rig.turn()
    delivery = rig.partition.deliveries["c"]
    assert [damage.what for damage in rig.told] == ["faulty"] and rig.mended == []
    assert delivery.damage == (entry.first_offset, entry.end_offset)


def test_while_the_files_are_in_use_it_waits():
    rig = Alone()
    pair = rig.log.files.pairs[1]
    rig.rot(pair, pair.first.log_id, pair.first.log_id + 1)
    rig.partition.on_damage(pair.first.log_id, pair.first.log_id + 1)
    rig.publish(b"x" * 200)
    rig.turn()
    assert rig.partition.held_up, "a roll is under way"
    rig.partition.keep_house(rig.partition.now())
    rig.disk.work()
    assert rig.told == []
    rig.keep_house()
    assert [damage.what for damage in rig.told] == ["proven"]


# ---- a disk that refuses


def delays(caplog: pytest.LogCaptureFixture) -> int:
    return sum("later again" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("operation", ["pwrite", "open"])
def test_a_disk_that_refuses_is_asked_again_later_and_the_node_goes_on(
    operation: str, caplog: pytest.LogCaptureFixture
):
    """The same of a lack of descriptors. Each time is told of, and the pause grows."""
    storage = SimStorage()
    rig = Alone(storage)
    old = rig.log.files.pairs[1]
    rig.rot(old, old.first.log_id, old.first.log_id + 1)
    rig.partition.on_damage(old.first.log_id, old.first.log_id + 1)
    files = storage.contents()
    if operation == "pwrite":
        storage.fail("pwrite", ".commitlog", code=errno.ENOSPC, times=99)
        storage.rng = AllOrNothing()
    else:
        rig.log.files.use(old)
        _ = old.commitlog, old.segment
        descriptors, storage.descriptors = storage.descriptors, 0
    for _ in range(20):
        rig.clock.advance(1.0)
        rig.keep_house()
    assert delays(caplog) == 1
    for _ in range(80):
        rig.clock.advance(1.0)
        rig.keep_house()
        rig.partition.on_damage(old.first.log_id, old.first.log_id + 1)  # as readers do that meet it
    assert delays(caplog) == 3 and rig.failures == [] and rig.partition.life.stopped is None
    assert storage.contents() == files
    storage.heal()
    if operation == "open":
        storage.descriptors = descriptors
    for _ in range(130):
        rig.clock.advance(1.0)
        rig.keep_house()
    assert [damage.what for damage in rig.told] == ["proven"] and not verify(rig.log).problems


class AllOrNothing(random.Random):
    """A write that fails writes nothing."""

    def randrange(self, *args: int) -> int:  # type: ignore[override]
        return 0


def test_a_range_that_can_not_be_mended_now_holds_up_no_other():
    storage = SimStorage()
    rig = Alone(storage)
    first, second = rig.log.files.pairs[:2]
    rig.rot(first, first.first.log_id, first.first.log_id + 1)
    rig.rot(second, second.first.log_id, second.first.log_id + 1)
    storage.fail("pwrite", first.path(".commitlog"), code=errno.EIO, times=99)
    rig.partition.on_damage(first.first.log_id, rig.log.end.log_id)
    for _ in range(3):
        rig.keep_house()
    assert [damage.first.log_id for damage in rig.told] == [second.first.log_id]


def test_whoever_can_not_take_in_what_was_mended_stops_nothing():
    rig = Alone()

    def refuses(log: PartitionLog, first: int, end: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    rig.partition.local_repair._mended = refuses
    pair = rig.log.files.pairs[1]
    rig.rot(pair, pair.first.log_id, pair.first.log_id + 1)
    consumer = rig.consume(100)
    rig.keep_house()
    rig.turn()
    assert rig.failures == [] and rig.partition.life.stopped is None
    assert consumer.wire.bodies == [b"%d" % n * 20 for n in range(8)]


def test_a_disk_that_fails_to_sync_ends_the_node():
    storage = SimStorage()
    rig = Alone(storage)
    pair = rig.log.files.pairs[1]
    rig.rot(pair, pair.first.log_id, pair.first.log_id + 1)
    rig.partition.on_damage(pair.first.log_id, pair.first.log_id + 1)
    storage.fail("sync", pair.path(".commitlog"))
    rig.keep_house()
    assert len(set(map(str, rig.failures))) == 1


def test_what_memory_has_still_is_written_back():
    rig = Alone()
    rig.store(b"8" * 20)
    rig.disk.work()
    entry = rig.log.last
    assert entry is not None
    pair = rig.log.files.pair_of(entry.log_id)
    rig.rot(pair, entry.log_id, entry.log_id + 1)
    pair.segment.pwrite(b"\xff" * 9, entry.position - pair.position)
    rig.partition.on_damage(entry.log_id, entry.log_id + 1)
    rig.keep_house()
    rig.log.shelf.clear()
    assert [damage.what for damage in rig.told] == ["proven"]
    assert bodies(rig.log)[-1] == b"8" * 20 and rig.log.entry(entry.log_id) == entry


def test_with_another_replica_nothing_is_made_up():
    rig = Alone()
    pair = rig.log.files.pairs[1]
    rig.rot(pair, pair.first.log_id, pair.first.log_id + 1)
    rig.partition.on_damage(pair.first.log_id, pair.first.log_id + 1)
    rig.partition.local_repair.alone = lambda: False
    rig.keep_house()
    rig.partition.local_repair.alone = lambda: True
    rig.keep_house()
    assert rig.told == [] and len(verify(rig.log).problems) == 1


def test_a_moment_in_which_nothing_could_be_read_stops_no_channel_for_good():
    storage = SimStorage()
    rig = Alone(storage)
    pair = rig.log.files.pairs[1]
    storage.spoil(pair.path(".commitlog"), 0)
    consumer = rig.consume(100)
    assert rig.partition.deliveries["c"].stuck is not None
    storage.unspoil(pair.path(".commitlog"))
    rig.keep_house()
    rig.turn()
    assert consumer.wire.bodies == [b"%d" % n * 20 for n in range(8)] and rig.told == []


def test_what_can_be_read_again_is_damaged_no_more():
    storage = SimStorage()
    rig = Alone(storage)
    pair = rig.log.files.pairs[1]
    first = pair.first.log_id
    storage.spoil(pair.path(".segment"), 0)
    consumer = rig.consume(100, timeout=1000.0)
    assert rig.partition.deliveries["c"].stuck is not None
    rig.partition.on_damage(first, first + 2)
    for _ in range(40):
        rig.clock.advance(1.0)
        rig.keep_house()
    assert rig.mended == [] and rig.told == []
    storage.unspoil(pair.path(".segment"))
    for _ in range(61):
        rig.clock.advance(1.0)
        rig.keep_house()
    rig.turn()
    assert rig.mended == [(first, first + 2)] and rig.told == []
    assert consumer.wire.bodies == [b"%d" % n * 20 for n in range(8)]


def test_a_long_range_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """Publishes wait while files are read."""
    monkeypatch.setattr(local_repair, "LOOK_BYTES", 60)
    rig = Alone()
    first, end = rig.log.start.log_id, rig.log.end.log_id
    pair = rig.log.files.pairs[1]
    entry = rig.log.entry(pair.first.log_id)
    pair.segment.pwrite(b"\xff" * 9, entry.position - pair.position)
    rig.partition.on_damage(first, end)
    for _ in range(end - first):
        rig.keep_house()
    assert rig.mended == [(1, 3), (3, 5), (7, 8), (8, 10)] and entry.log_id == 5


def test_a_lack_of_descriptors_says_nothing_of_a_range(caplog: pytest.LogCaptureFixture):
    storage = SimStorage()
    rig = Alone(storage)
    pair = rig.log.files.pairs[1]
    rig.log.files.use(pair)
    _ = pair.commitlog, pair.segment
    descriptors, storage.descriptors = storage.descriptors, 0
    rig.partition.on_damage(pair.first.log_id, pair.first.log_id + 1)
    for _ in range(3):
        rig.keep_house()
    assert delays(caplog) == 1 and rig.mended == [] and rig.partition.life.stopped is None and rig.failures == []
    storage.descriptors = descriptors
    rig.clock.advance(31.0)
    rig.keep_house()
    assert rig.mended == [(pair.first.log_id, pair.first.log_id + 1)]
