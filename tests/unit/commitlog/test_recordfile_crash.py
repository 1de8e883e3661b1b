"""Crash images of the node journal and of the metadata file.

A disk that forgets: at a random operation the power fails, and of everything that was not synced any subset of 512-byte
sectors, names and file sizes is kept. Then, in half of the images, one bit of the file is flipped. What is found on the
next start must be explainable: everything that was acknowledged, plus at most the one change that was under way, whole;
and whenever it is not, the file must say that it is damaged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from nsqha.commitlog import journal as journal_module
from nsqha.commitlog.journal import Key, NodeJournal, NodeState, PartitionRecord
from nsqha.commitlog.recordfile import SECTOR
from nsqha.commitlog.storage import Data, File, MemStorage
from nsqha.election import embedded as embedded_module
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.model import Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.election.store import Change, State
from nsqha.errors import ConfigError, LogCorrupt
from nsqha.ids import new_uid

IMAGES = 200
PATHS = {"journal": "d/journal", "metadata": "d/metadata"}


class PowerFailed(BaseException):
    """Not an Exception: nobody may handle it."""


@dataclass
class Inode:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def after_crash(self, rng: random.Random) -> bytearray:
        size = rng.choice([len(self.now), len(self.durable)])
        image = bytearray(self.durable[:size].ljust(size, b"\0"))
        keep = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
        for at in range(0, size, SECTOR):
            if rng.random() < keep:
                image[at : at + SECTOR] = self.now[at : min(at + SECTOR, size)].ljust(min(SECTOR, size - at), b"\0")
        return image


class ForgetfulDisk(MemStorage):
    """Names and bytes that are kept for certain only after a sync."""

    def __init__(self) -> None:
        super().__init__()
        self.make_dirs("d")
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.operations_left = -1

    def count(self) -> None:
        """Called after each operation took effect in memory."""
        self.operations_left -= 1
        if self.operations_left == 0:
            raise PowerFailed

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        if path not in self.names and not create:
            raise FileNotFoundError(path)
        return ForgetfulFile(self, self.names.setdefault(path, Inode()))

    def exists(self, path: str) -> bool:
        return path in self.names

    def remove(self, path: str) -> None:
        del self.names[path]
        self.count()

    def rename(self, old: str, new: str) -> None:
        self.names[new] = self.names.pop(old)
        self.count()

    def sync_dir(self, path: str) -> None:
        self.durable_names = dict(self.names)
        self.count()

    def after_crash(self, rng: random.Random) -> ForgetfulDisk:
        disk = ForgetfulDisk()
        names = dict(self.durable_names)
        for name in {*self.names, *names}:
            if rng.random() < 0.5:
                names.pop(name, None)
                if name in self.names:
                    names[name] = self.names[name]
        # A rename is one step: the new name and the absence of the old one are kept together.
        if all(names.get(n) is self.names.get(n) for n in PATHS.values()):
            names = {n: inode for n, inode in names.items() if inode in self.names.values()}
        for name, inode in names.items():
            image = inode.after_crash(rng)
            disk.names[name] = Inode(image, bytes(image))
        disk.durable_names = dict(disk.names)
        return disk


class ForgetfulFile:
    def __init__(self, disk: ForgetfulDisk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode

    def size(self) -> int:
        return len(self._inode.now)

    def pread(self, n: int, position: int) -> bytes:
        return bytes(self._inode.now[position : position + n])

    def pwrite(self, data: Data, position: int) -> None:
        now = self._inode.now
        now += bytes(max(0, position - len(now)))
        now[position : position + len(data)] = data
        self._disk.count()

    def truncate(self, n: int) -> None:
        del self._inode.now[n:]
        self._inode.now += bytes(n - len(self._inode.now))
        self._disk.count()

    def allocate(self, n: int) -> None:
        self._inode.now += bytes(max(0, n - len(self._inode.now)))
        self._disk.count()

    def sync(self) -> None:
        self._disk.count()  # fails before it has an effect
        self._inode.durable = bytes(self._inode.now)

    def drop_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


def flip_a_bit(disk: ForgetfulDisk, path: str, rng: random.Random) -> None:
    inode = disk.names[path]
    written = len(bytes(inode.now).rstrip(b"\0")) + SECTOR
    at = rng.randrange(min(written, len(inode.now)))
    if rng.random() < 0.3:
        at -= at % SECTOR - rng.randrange(24)  # a header, perhaps
    inode.now[at] ^= 1 << rng.randrange(8)
    inode.durable = bytes(inode.now)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are made anew every few records."""
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 24 * SECTOR)
    monkeypatch.setattr(journal_module, "SLACK_BYTES", 3 * SECTOR)
    monkeypatch.setattr(embedded_module, "REWRITE_BYTES", 24 * SECTOR)


def power_fails_in(life: Callable[[], None], disk: ForgetfulDisk, rng: random.Random) -> ForgetfulDisk:
    """Run until the power fails, or to the end; what is left on the disk."""
    disk.operations_left = rng.randrange(1, 100)
    try:
        life()
    except PowerFailed:
        pass
    return disk.after_crash(rng)


# The journal

Records = dict[Key, PartitionRecord]


@dataclass
class Believed:
    """What a journal's user knows: what was acknowledged, and what was being written."""

    sure: tuple[Records, NodeState | None] = field(default_factory=lambda: ({}, None))
    perhaps: tuple[Records, NodeState | None] = field(default_factory=lambda: ({}, None))


def check_journal(journal: NodeJournal, believed: Believed, flipped: bool) -> str:
    """What was found on start is explainable; returns what it was."""
    found = journal.found
    if found is None:
        assert believed.sure == ({}, None)
        return "new"
    if found.damaged:
        assert flipped, "called damaged without a flip"
        assert all(not r.log_uid_trusted and not r.promise_trusted for r in journal.records().values())
        return "damaged"
    allowed = [believed.perhaps] if believed.sure == ({}, None) else [believed.sure, believed.perhaps]
    # A start that was cut short may have written its doubts already.
    trusted = {key: replace(record, promise_trusted=True) for key, record in found.partitions.items()}
    believed_trusted = [({k: replace(r, promise_trusted=True) for k, r in rs.items()}, node) for rs, node in allowed]
    assert (trusted, found.node) in believed_trusted or allowed == [({}, None)]
    assert not found.torn or not journal.promises_trusted or not journal.records()
    return "torn" if found.torn else "whole"


def journal_life(disk: ForgetfulDisk, rng: random.Random, believed: Believed) -> None:
    journal = NodeJournal.open(disk, "d", rng, boot_id="boot")
    check_journal(journal, believed, False)
    node = journal.take().node
    believed.sure = believed.perhaps = (dict(journal.records()), node)
    while True:
        for _ in range(rng.choice([1, 1, 5, 30])):
            change_something(journal, rng)
        taken = journal.take()
        believed.perhaps = (dict(journal.records()), taken.node)
        journal.write(taken)
        believed.sure = believed.perhaps


def change_something(journal: NodeJournal, rng: random.Random) -> None:
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
            journal.stage_revision(rng.randrange(1000))


def journal_image(seed: int) -> str:
    rng = random.Random(seed)
    disk, believed = ForgetfulDisk(), Believed()
    for _ in range(rng.randrange(1, 4)):
        disk = power_fails_in(lambda d=disk: journal_life(d, rng, believed), disk, rng)  # type: ignore[misc]
    flipped = rng.random() < 0.5 and disk.exists(PATHS["journal"])
    if flipped:
        flip_a_bit(disk, PATHS["journal"], rng)
    try:
        return check_journal(NodeJournal.open(disk, "d", rng, boot_id="boot"), believed, flipped)
    except ConfigError as error:
        assert flipped, error
        return "refused"


@pytest.mark.usefixtures("small_files")
def test_journal_images() -> None:
    seen = Counter(journal_image(seed) for seed in range(IMAGES))
    assert min(seen[outcome] for outcome in ("whole", "torn", "damaged")) > IMAGES // 20, seen
    assert seen["refused"] < IMAGES // 10, seen


# The metadata

Content = tuple[dict[str, Versioned[TopicRecord]], dict[int, Tombstone], int, int]


def content(state: State) -> Content:
    return dict(state.topics), dict(state.tombstones), state.cluster.record.salt_counter, state.revision


@dataclass
class Known:
    """What a store's user knows; None: not even that there is one."""

    sure: Content | None = None
    perhaps: Content | None = None


class Watched(EmbeddedStore):
    """Tells what it is about to become before it writes it."""

    known: Known

    def _save(self, change: Change) -> None:
        after = State(self._state.cluster, 0, self.topics(), self.tombstones())
        after.apply(change)
        self.known.perhaps = content(after)
        super()._save(change)
        self.known.sure = self.known.perhaps


def check_metadata(store: EmbeddedStore, known: Known) -> None:
    if known.sure is not None:
        assert content(store._state) in (known.sure, known.perhaps)


def metadata_life(disk: ForgetfulDisk, rng: random.Random, known: Known) -> None:
    store = Watched(disk, PATHS["metadata"], rng, cluster_id=77)
    check_metadata(store, known)
    store.known = known
    known.sure = known.perhaps = content(store._state)
    while True:
        change_metadata(store, rng)


def change_metadata(store: EmbeddedStore, rng: random.Random) -> None:
    names = sorted(store.topics())
    choice = rng.randrange(7)
    if choice == 0 or not names:
        store.create_topic(f"topic-{rng.randrange(1 << 30)}", TopicSettings(partitions=rng.randrange(1, 6)))
    elif choice == 1:
        store.delete_topic(rng.choice(names))
    elif choice == 2:
        store.raise_epochs(leader=5)
    elif choice == 3 and store.tombstones():
        store.forget_tombstone(rng.choice(sorted(store.tombstones())))
    else:
        topic = store.topics()[rng.choice(names)]
        channels = topic.record.channels.with_channel(f"c{rng.randrange(1 << 30)}", new_uid(rng))
        store.replace(topic.record.name, topic.version, replace(topic.record, channels=channels))


def metadata_image(seed: int) -> str:
    rng = random.Random(seed)
    disk, known = ForgetfulDisk(), Known()
    for _ in range(rng.randrange(1, 4)):
        disk = power_fails_in(lambda d=disk: metadata_life(d, rng, known), disk, rng)  # type: ignore[misc]
    flipped = rng.random() < 0.5 and disk.exists(PATHS["metadata"])
    if flipped:
        flip_a_bit(disk, PATHS["metadata"], rng)
    try:
        store = EmbeddedStore(disk, PATHS["metadata"], rng, cluster_id=77)
    except LogCorrupt as error:
        assert flipped, error
        assert "\n" not in str(error)
        return "refused"
    check_metadata(store, known)
    outcome = "kept" if known.perhaps == content(store._state) else "lost"
    # Whatever was found, it can be built on.
    store.create_topic("one-more", TopicSettings())
    assert content(EmbeddedStore(disk, PATHS["metadata"], rng)._state) == content(store._state)
    return outcome


@pytest.mark.usefixtures("small_files")
def test_metadata_images() -> None:
    seen = Counter(metadata_image(seed) for seed in range(IMAGES))
    assert min(seen[outcome] for outcome in ("kept", "lost", "refused")) > IMAGES // 20, seen
