"""What only the embedded store does: its file. Crash images are in tests/unit/commitlog/test_recordfile_crash.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nsqha.commitlog.recordfile import SECTOR, RecordFile
from nsqha.election import embedded as embedded_module
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.model import FEATURE_LEVEL, TopicSettings
from nsqha.errors import AppendFailed, ConfigError, LogCorrupt, Poisoned
from tests.fakes.disk import FaultyStorage


def opened(disk: FaultyStorage, **changes: int) -> EmbeddedStore:
    return EmbeddedStore(disk, "d/metadata", random.Random(1), **changes)


def size(disk: FaultyStorage) -> int:
    return disk.open("d/metadata").size()


def put(disk: FaultyStorage, at: int, data: bytes) -> None:
    disk.open("d/metadata").pwrite(data, at)


def test_a_store_says_whether_it_is_new() -> None:
    disk = FaultyStorage("d")
    store = opened(disk)
    assert store.created
    assert not opened(disk).created
    assert opened(disk).records.cluster() == store.records.cluster()


def test_the_file_of_another_cluster_is_refused() -> None:
    disk = FaultyStorage("d")
    opened(disk, cluster_id=0xA)
    opened(disk, cluster_id=0xA)
    with pytest.raises(ConfigError, match="is the metadata of cluster 000000000000000a"):
        opened(disk, cluster_id=0xB)


def test_an_old_copy_is_refused() -> None:
    disk = FaultyStorage("d")
    store = opened(disk)
    store.records.create_topic("a", TopicSettings())
    opened(disk, revision_seen=store.records.revision)
    with pytest.raises(ConfigError, match="old copy"):
        opened(disk, revision_seen=store.records.revision + 1)


def test_a_higher_feature_level_is_refused_and_a_newer_form_too(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyStorage("d")
    opened(disk)
    monkeypatch.setattr(embedded_module, "FEATURE_LEVEL", FEATURE_LEVEL - 1)
    with pytest.raises(ConfigError, match=f"needs feature level {FEATURE_LEVEL}"):
        opened(disk)
    monkeypatch.undo()
    disk = FaultyStorage("d")
    monkeypatch.setattr(embedded_module, "FORMAT", 2)
    opened(disk)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="newer version"):
        opened(disk)


def test_damage_is_refused_in_one_line_that_says_what_to_do() -> None:
    disk = FaultyStorage("d")
    opened(disk).records.create_topic("a", TopicSettings())
    put(disk, 60, b"~")
    with pytest.raises(LogCorrupt, match="restore it from a backup, or move it away") as error:
        opened(disk)
    assert "\n" not in str(error.value)


def test_a_torn_change_is_gone_and_the_next_one_is_safe() -> None:
    disk = FaultyStorage("d")
    store = opened(disk)
    store.records.create_topic("a", TopicSettings())
    before = size(disk)
    store.records.create_topic("b", TopicSettings(partitions=40))
    disk.open("d/metadata").truncate(before + SECTOR)
    store = opened(disk)
    assert list(store.records.topics()) == ["a"]
    store.records.create_topic("c", TopicSettings())
    assert list(opened(disk).records.topics()) == ["a", "c"]


def test_a_change_that_the_disk_refuses_did_not_happen() -> None:
    disk = FaultyStorage("d")
    store = opened(disk)
    topic = store.records.create_topic("a", TopicSettings())
    before = (store.records.topics(), store.records.cluster(), store.records.revision)
    disk.failing = "pwrite"
    for change in (
        lambda: store.records.create_topic("b", TopicSettings()),
        lambda: store.records.delete_topic("a"),
        lambda: store.records.replace("a", topic.version, replace(topic.record, settings=TopicSettings(ordered=True))),
        store.records.raise_epochs,
    ):
        with pytest.raises(AppendFailed):
            change()
    assert (store.records.topics(), store.records.cluster(), store.records.revision) == before
    disk.failing = ""
    store.records.create_topic("b", TopicSettings())
    assert opened(disk).records.topics() == store.records.topics()


def test_after_a_failed_sync_nothing_is_accepted() -> None:
    disk = FaultyStorage("d")
    store = opened(disk)
    disk.failing = "sync"
    with pytest.raises(Poisoned):
        store.records.create_topic("a", TopicSettings())
    disk.failing = ""
    with pytest.raises(Poisoned):
        store.records.create_topic("a", TopicSettings())
    assert store.records.topics() == {}


def test_it_is_made_anew_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "REWRITE_BYTES", 16 * SECTOR)
    disk = FaultyStorage("d")
    store = opened(disk)
    topic = store.records.create_topic("a", TopicSettings())
    store.records.delete_topic("a")
    topic = store.records.create_topic("a", TopicSettings())
    for n in range(300):
        channels = topic.record.channels.with_topic_paused(n % 2 == 0)
        topic = store.records.replace("a", topic.version, replace(topic.record, channels=channels))
        assert size(disk) <= 16 * SECTOR
        if n % 5 == 0:
            store = opened(disk)
    again = opened(disk)
    assert again.records.topics() == store.records.topics()
    assert again.records.tombstones() == store.records.tombstones()
    assert again.records.cluster() == store.records.cluster()
    assert again.records.revision == store.records.revision


def test_an_ephemeral_topic_is_never_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "REWRITE_BYTES", 4 * SECTOR)
    disk = FaultyStorage("d")
    store = opened(disk)
    topic = store.records.create_topic("a#ephemeral", TopicSettings())
    for n in range(20):  # the file is made anew in between
        topic = store.records.replace(
            topic.record.name, topic.version, replace(topic.record, settings=TopicSettings(ordered=n % 2 == 0))
        )
        assert not any(b"ephemeral" in payload for payload in RecordFile.inspect(disk, "d/metadata").payloads)
    assert opened(disk).records.topics() == {}
    store.records.delete_topic("a#ephemeral")
    assert store.records.tombstones() == {}
    store.records.create_topic("b", TopicSettings())
    assert store.records.topics()["b"].record.salt != topic.record.salt
    assert opened(disk).records.topics() == store.records.topics()


def test_random_changes_survive_a_restart_also_right_after_the_file_was_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded_module, "REWRITE_BYTES", 4 * SECTOR)
    disk = FaultyStorage("d")
    rng = random.Random(3)
    store = EmbeddedStore(disk, "d/metadata", rng)
    for n in range(60):
        store.records.create_topic(f"t{n}", TopicSettings(partitions=rng.randrange(1, 4)))
        if rng.random() < 0.4:
            store.records.delete_topic(rng.choice(sorted(store.records.topics())))
        if rng.random() < 0.2:
            store.records.raise_epochs(leader=n)
        again = EmbeddedStore(disk, "d/metadata", rng)
        assert again.records.topics() == store.records.topics()
        assert again.records.tombstones() == store.records.tombstones()
        assert again.records.revision == store.records.revision
        if rng.random() < 0.2:
            store = again
