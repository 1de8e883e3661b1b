"""Whatever a crash leaves of the node journal and of the metadata file, a start finds what was acknowledged.

On a simulated disk the power fails at a random operation; of everything that was not synced any subset of 512-byte
sectors, names and file sizes is kept. In some of the images one bit is flipped on top. What the next start finds must
be explainable: everything that was acknowledged, plus the one change that was under way whole or not at all. Only where
a bit was flipped it may be something else, and then the file must say that it is damaged.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from dataclasses import replace

import pytest

from nsqha.commitlog import journal as journal_module
from nsqha.commitlog.journal import NodeJournal, NodeState, PartitionRecord
from nsqha.commitlog.recordfile import HEADER_BYTES, SECTOR, RecordFile
from nsqha.election import embedded as embedded_module
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.memory import Change, StoreState
from nsqha.election.model import Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.errors import AppendFailed, ConfigError, LogCorrupt
from nsqha.ids import PartitionKey, new_uid
from tests.sim.images import Image, crash_images, named
from tests.sim.storage import Crashed, SimStorage

SEEDS = range(50)
IMAGES_PER_SEED = 4
# Few crashes of the metadata leave the record that was being written whole: it takes more images to see enough of them.
METADATA_SEEDS = range(100)
METADATA_IMAGES_PER_SEED = 6
OPERATIONS_MAX = 90


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are made anew every few records."""
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 24 * SECTOR)
    monkeypatch.setattr(journal_module, "SLACK_BYTES", 3 * SECTOR)
    monkeypatch.setattr(embedded_module, "REWRITE_BYTES", 24 * SECTOR)


def flip_a_bit(storage: SimStorage, path: str, rng: random.Random) -> bool:
    """Somewhere in the records or shortly behind, headers more often than their size deserves."""
    data = storage.contents().get(path)
    if not data:
        return False
    at = rng.randrange(min(len(data), len(data.rstrip(b"\0")) + SECTOR))
    if rng.random() < 0.3:
        at -= at % SECTOR - rng.randrange(HEADER_BYTES)
    storage.flip(path, min(at, len(data) - 1) * 8 + rng.randrange(8))
    return True


# The journal

Records = dict[PartitionKey, PartitionRecord]


class JournalUser:
    """Lives of a node: stages, writes, is refused by a full disk, stops cleanly, starts again."""

    def __init__(self, storage: SimStorage, rng: random.Random) -> None:
        self.storage = storage
        self.rng = rng
        self.sure: tuple[Records, NodeState | None] = ({}, None)  # acknowledged
        self.perhaps = self.sure  # was being written

    def run(self) -> None:
        while True:
            self.live()

    def live(self) -> None:
        journal = NodeJournal.open(self.storage, "d", self.rng, page_cache="boot")
        self.sure = self.perhaps = (dict(journal.records()), journal.take().node)
        for _ in range(self.rng.randrange(30)):
            for _ in range(self.rng.choice([1, 1, 5, 30])):
                self.change(journal)
            taken = journal.take()
            self.perhaps = (dict(journal.records()), taken.node)
            if self.rng.random() < 0.1:
                self.storage.fail("pwrite", code=errno.ENOSPC, times=self.rng.choice([1, 2]))
            try:
                journal.write()
                self.sure = self.perhaps
            except AppendFailed:
                self.perhaps = self.sure
            self.storage.heal()
        journal.close()

    def change(self, journal: NodeJournal) -> None:
        rng = self.rng
        key = (rng.randrange(1, 1 << 64), 0) if rng.random() < 0.3 else (rng.randrange(1, 8), rng.randrange(3))
        old = journal.record(key) or PartitionRecord()
        match rng.randrange(6):
            case 0:
                journal.stage(key, promise=old.promise + rng.randrange(3))
            case 1:
                journal.stage(key, log_uid=rng.randrange(1, 1 << 64), local_durable=0)
            case 2 | 3:
                journal.stage(key, local_durable=old.local_durable + rng.randrange(1000))
            case 4:
                journal.forget(key)
            case _:
                journal.node.stage_revision(rng.randrange(1000))


def check_journal(image: Image[JournalUser]) -> str:
    """Start on an image; returns what was found."""
    storage, user = image.storage, image.history
    flipped = image.rng.random() < 0.5 and flip_a_bit(storage, "d/journal", image.rng)
    try:
        journal = NodeJournal.open(storage, "d", image.rng, page_cache="boot")
    except ConfigError as error:
        assert flipped, error
        return "refused"
    found = journal.found
    if found is None:
        assert user.sure == ({}, None)
        return "new"
    if found.damaged:
        assert flipped, "called damaged without a flip"
        assert all(not r.log_uid_trusted and not r.promise_trusted for r in journal.records().values())
        outcome = "damaged"
    else:
        # The very first start was cut short: the identity was drawn, nobody has heard of it.
        assert (dict(found.partitions), found.node) in (user.sure, user.perhaps) or user.sure == ({}, None)
        assert not any(r.promise_trusted for r in journal.records().values() if found.torn)
        outcome = "torn" if found.torn else "whole"
    # Whatever was found can be built on.
    journal.stage((9, 9), promise=1)
    journal.commit()
    expected = journal.records()
    journal.close()
    again = NodeJournal.open(storage, "d", image.rng, page_cache="boot")
    assert again.found is not None
    assert (again.found.torn, again.found.damaged) == (False, False)
    assert again.records() == expected
    return outcome


def test_the_journal_survives_crashes_and_notices_flipped_bits() -> None:
    seen: Counter[str] = Counter()
    for image in crash_images(JournalUser, seeds=SEEDS, images=IMAGES_PER_SEED, operations_max=OPERATIONS_MAX):
        with named(image):
            seen[check_journal(image)] += 1
    assert min(seen[outcome] for outcome in ("whole", "torn", "damaged")) > seen.total() // 20, seen
    assert seen["refused"] < seen.total() // 8, seen


# The metadata

Content = tuple[dict[str, Versioned[TopicRecord]], dict[int, Tombstone], int, int]


def content(state: StoreState) -> Content:
    return dict(state.topics), dict(state.tombstones), state.cluster.record.salt_counter, state.revision


class MetadataUser:
    """Lives of a store: topics and channels come and go, the disk is full now and then."""

    def __init__(self, storage: SimStorage, rng: random.Random) -> None:
        self.storage = storage
        self.rng = rng
        storage.make_dirs("d")
        self.sure: Content | None = None  # None: not even that there is a store
        self.perhaps: Content | None = None

    def run(self) -> None:
        while True:
            store = Watched(self)
            for _ in range(self.rng.randrange(30)):
                if self.rng.random() < 0.1:
                    self.storage.fail("pwrite", code=errno.ENOSPC, times=self.rng.choice([1, 2]))
                try:
                    change_metadata(store, self.rng)
                except AppendFailed:
                    self.perhaps = self.sure
                self.storage.heal()
            store.close()


class Watched(EmbeddedStore):
    """Tells its user what it is about to become before it writes it."""

    def __init__(self, user: MetadataUser) -> None:
        super().__init__(user.storage, "d/metadata", user.rng, cluster_id=77)
        self.user = user
        user.sure = user.perhaps = content(self.watch.state)

    def _save(self, state: StoreState, change: Change) -> None:
        after = StoreState(state.cluster, 0, dict(state.topics), dict(state.tombstones))
        after.apply(change)
        self.user.perhaps = content(after)
        super()._save(state, change)
        self.user.sure = self.user.perhaps


def change_metadata(store: EmbeddedStore, rng: random.Random) -> None:
    names = sorted(store.records.topics())
    choice = rng.randrange(7)
    if choice == 0 or not names:
        store.records.create_topic(f"topic-{rng.randrange(1 << 30)}", TopicSettings(partitions=rng.randrange(1, 6)))
    elif choice == 1:
        store.records.delete_topic(rng.choice(names))
    elif choice == 2:
        store.records.raise_epochs(leader=5)
    elif choice == 3 and store.records.tombstones():
        store.records.forget_tombstone(rng.choice(sorted(store.records.tombstones())))
    else:
        topic = store.records.topics()[rng.choice(names)]
        channels = topic.record.channels.with_channel(f"c{rng.randrange(1 << 30)}", new_uid(rng))
        store.records.replace(topic.record.name, topic.version, replace(topic.record, channels=channels))


def check_metadata(image: Image[MetadataUser]) -> str:
    """Start on an image; returns what was found."""
    storage, user = image.storage, image.history
    flipped = image.rng.random() < 1 / 3 and flip_a_bit(storage, "d/metadata", image.rng)
    try:
        store = EmbeddedStore(storage, "d/metadata", image.rng, cluster_id=77)
    except LogCorrupt as error:
        assert flipped, error
        assert "\n" not in str(error)
        return "refused"
    found = content(store.watch.state)
    assert user.sure is None or found in (user.sure, user.perhaps)
    # Whatever was found can be built on, also through another crash.
    more = store.records.create_topic("one-more", TopicSettings())
    assert content(EmbeddedStore(storage, "d/metadata", image.rng).watch.state) == content(store.watch.state)
    storage.crash_after(image.rng.randrange(1, 4))
    with pytest.raises(Crashed):
        while True:
            store.records.raise_epochs()
    after = EmbeddedStore(storage.crash(image.rng), "d/metadata", image.rng).records.topics()
    assert after.keys() == found[0].keys() | {"one-more"}
    assert after["one-more"].record.uid == more.record.uid
    return "kept" if found == user.perhaps else "lost"


def test_the_metadata_survive_crashes_and_notice_flipped_bits() -> None:
    seen: Counter[str] = Counter()
    seeds, images = METADATA_SEEDS, METADATA_IMAGES_PER_SEED
    for image in crash_images(MetadataUser, seeds=seeds, images=images, operations_max=OPERATIONS_MAX):
        with named(image):
            seen[check_metadata(image)] += 1
    assert min(seen[outcome] for outcome in ("kept", "lost", "refused")) > seen.total() // 20, seen


def test_sectors_of_a_refused_record_never_come_back_among_those_of_the_next() -> None:
    """Mixed they would pass for damage, and cost the node its logs' names."""
    for seed in range(300):
        rng = random.Random(seed)
        storage = SimStorage(rng)
        storage.make_dirs("d")
        file = RecordFile.create(storage, "d/f", b"one", allocate=rng.choice((0, 8192)))
        storage.fail("pwrite", "d/f", code=errno.ENOSPC)
        with pytest.raises(AppendFailed):
            file.append(b"a" * 2500)
        storage.crash_after(2)
        with pytest.raises(Crashed):
            file.append(b"b" * 2500)
        found = RecordFile.inspect(storage.crash(rng), "d/f")
        assert not found.damaged and found.payloads[0] == b"one" and b"a" * 2500 not in found.payloads, seed
