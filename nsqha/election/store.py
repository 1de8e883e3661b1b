"""The metadata store: what every implementation promises, and the one that lives in memory.

    MetadataStore    protocol; blocking, so the shell calls it in a worker thread
      MemoryStore      all the rules below; tests, simulation
        EmbeddedStore    the same with a file behind it (nsqha.election.embedded), for a node without etcd
      EtcdStore        the cluster's (nsqha.election.etcd)

- Every change is compare-and-set: it names the version it read and raises `Conflict` if that is no longer current.
- A change is durable when the call returns. `OutcomeUnknown`: it may or may not have happened; read again.
- `revision` rises with every change; a record's version is the revision of its last change. A partition has a version
  of its own, so leaders that change an ISR and nodes that add channels do not disturb each other.
- A missing record means nothing; a `Tombstone` means that the topic was deleted. It stays until its files are gone.
- An ephemeral topic's record is kept like any other but never stored, and leaves no tombstone.
- Hints tell that something about a topic may have changed; whoever gets one reads again. They may be late, repeated or,
  when a connection breaks, a single "" for "anything".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from nsqha.election.model import (
    ClusterRecord,
    NodeInfo,
    PartitionMeta,
    Tombstone,
    TopicRecord,
    TopicSettings,
    Versioned,
)
from nsqha.errors import Conflict, NotFound
from nsqha.ids import is_ephemeral, new_uid, valid_name

Hint = Callable[[str], None]


class MetadataStore(Protocol):
    """The small truth."""

    @property
    def revision(self) -> int:
        """Of the newest change this store has seen."""

    def cluster(self) -> Versioned[ClusterRecord]:
        """What exists once."""

    def raise_feature_level(self, level: int) -> Versioned[ClusterRecord]:
        """Allow what older versions do not understand; never goes down."""

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        """All topics by name."""

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        """One topic, as of now (a linearizable read)."""

    def create_topic(
        self, name: str, settings: TopicSettings, *, partitions: Mapping[int, PartitionMeta] | None = None
    ) -> Versioned[TopicRecord]:
        """Draw a uid, take a salt and store the record. Without `partitions` they wait for a leader, in epoch 1.

        Conflict if it exists; ValueError if the name or the partitions do not fit."""

    def replace(self, name: str, expected_version: int, record: TopicRecord) -> Versioned[TopicRecord]:
        """Change a topic. Conflict unless the topic, and every partition that differs, is still as it was read.

        Partitions can be added, not taken away; name, uid and salt never change (ValueError). NotFound."""

    def replace_partition(self, name: str, uid: int, number: int, meta: PartitionMeta) -> PartitionMeta:
        """Change one partition, guarded only by `meta.version`; returns it with its new version. NotFound, Conflict."""

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        """Put a tombstone in the place of a topic. NotFound, Conflict."""

    def tombstones(self) -> dict[int, Tombstone]:
        """Deleted topics by uid."""

    def forget_tombstone(self, uid: int) -> None:
        """No file of this topic is left anywhere; fine if it is gone already."""

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        """Store a record that was put together from logs or from another cluster, uid and salt kept.

        Its channel list has to be newer than every log's (`ChannelList.above`), its epochs higher than every promise.
        Conflict if the name is taken or the uid was deleted."""

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        """Begin a new epoch of every partition in one write, led by `leader` alone if given; returns all topics.

        For a node that is alone, at start: one process life leads an epoch."""

    def register(self, node: NodeInfo) -> NodeInfo:
        """Announce a node that is alive, with a registration no other process life had; replaces its earlier one."""

    def nodes(self) -> dict[int, NodeInfo]:
        """The nodes that are alive, by uid."""

    def watch(self, hint: Hint) -> Callable[[], None]:
        """Call `hint(topic name)` after changes, from any thread; the result ends it."""

    def close(self) -> None:
        """Let go of files, threads and leases."""


@dataclass(frozen=True)
class Change:
    """One transaction: records by key, None = removed. What is not mentioned stays."""

    revision: int
    cluster: ClusterRecord | None = None
    topics: Mapping[str, Versioned[TopicRecord] | None] = field(default_factory=dict)
    tombstones: Mapping[int, Tombstone | None] = field(default_factory=dict)


@dataclass
class State:
    """All records and their versions."""

    cluster: Versioned[ClusterRecord]
    revision: int = 1
    topics: dict[str, Versioned[TopicRecord]] = field(default_factory=dict)
    tombstones: dict[int, Tombstone] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        self.revision = change.revision
        if change.cluster is not None:
            self.cluster = Versioned(change.cluster, change.revision)
        _apply(self.topics, change.topics)
        _apply(self.tombstones, change.tombstones)


class MemoryStore:
    """Records in memory. Subclasses make a change durable in `_save`, before it becomes visible."""

    def __init__(self, rng: random.Random, *, cluster_id: int = 0, state: State | None = None) -> None:
        self._rng = rng
        self._state = state or State(Versioned(ClusterRecord(cluster_id or new_uid(rng)), 1))
        self._nodes: dict[int, NodeInfo] = {}
        self._hints: list[Hint] = []

    @property
    def revision(self) -> int:
        return self._state.revision

    def cluster(self) -> Versioned[ClusterRecord]:
        return self._state.cluster

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        return dict(self._state.topics)

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        return self._state.topics.get(name)

    def tombstones(self) -> dict[int, Tombstone]:
        return dict(self._state.tombstones)

    def nodes(self) -> dict[int, NodeInfo]:
        return dict(self._nodes)

    def create_topic(
        self, name: str, settings: TopicSettings, *, partitions: Mapping[int, PartitionMeta] | None = None
    ) -> Versioned[TopicRecord]:
        if not valid_name(name):
            raise ValueError(f"{name!r} is not a topic name")
        if partitions is None:
            partitions = {number: PartitionMeta() for number in range(settings.partitions)}
        elif set(partitions) != set(range(settings.partitions)):
            raise ValueError(f"the settings say {settings.partitions} partitions, given are {sorted(partitions)}")
        if name in self._state.topics:
            raise Conflict(f"topic {name} exists already")
        cluster = self._state.cluster.record
        record = TopicRecord(name, new_uid(self._rng), cluster.next_salt(), settings, partitions=partitions)
        return self._add(record, replace(cluster, salt_counter=cluster.salt_counter + 1))

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        _check_partitions(record)
        if record.name in self._state.topics:
            raise Conflict(f"topic {record.name} exists already")
        if record.uid in self._state.tombstones:
            raise Conflict(f"topic {record.name} with uid {record.uid:016x} was deleted")
        if any(record.uid == topic.record.uid for topic in self._state.topics.values()):
            raise Conflict(f"uid {record.uid:016x} belongs to another topic")
        return self._add(record, self._state.cluster.record.past_salt(record.salt))

    def replace(self, name: str, expected_version: int, record: TopicRecord) -> Versioned[TopicRecord]:
        old = self._existing(name)
        if old.version != expected_version:
            raise Conflict(f"topic {name} was changed meanwhile (version {old.version}, not {expected_version})")
        _check_same_topic(old.record, record)
        _check_partitions(record)
        revision = self.revision + 1
        partitions = dict(record.partitions)
        for number, meta in record.partitions.items():
            before = old.record.partitions.get(number)
            if meta != before:
                if before is not None and meta.version != before.version:
                    raise Conflict(f"partition {number} of topic {name} was changed meanwhile")
                partitions[number] = replace(meta, version=revision)
        new = Versioned(replace(record, partitions=partitions), revision)
        self._commit(Change(revision, topics={name: new}))
        return new

    def replace_partition(self, name: str, uid: int, number: int, meta: PartitionMeta) -> PartitionMeta:
        topic = self._existing(name)
        before = topic.record.partitions.get(number) if topic.record.uid == uid else None
        if before is None:
            raise NotFound(f"there is no partition {number} of topic {name} with uid {uid:016x}")
        if meta.version != before.version:
            raise Conflict(f"partition {number} of topic {name} was changed meanwhile")
        revision = self.revision + 1
        new = replace(meta, version=revision)
        record = replace(topic.record, partitions={**topic.record.partitions, number: new})
        self._commit(Change(revision, topics={name: Versioned(record, topic.version)}))
        return new

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        old = self._existing(name)
        if expected_version is not None and old.version != expected_version:
            raise Conflict(f"topic {name} was changed meanwhile (version {old.version}, not {expected_version})")
        partitions = old.record.partitions.values()
        nodes = tuple(sorted({node for meta in partitions for node in meta.replicas}))
        tombstone = Tombstone(name, old.record.uid, len(partitions), nodes)
        buried = {} if is_ephemeral(name) else {old.record.uid: tombstone}
        self._commit(Change(self.revision + 1, topics={name: None}, tombstones=buried))
        return tombstone

    def forget_tombstone(self, uid: int) -> None:
        if uid in self._state.tombstones:
            self._commit(Change(self.revision + 1, tombstones={uid: None}))

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        revision = self.revision + 1
        raised = {}
        for name, topic in self._state.topics.items():
            partitions = {
                number: replace(_led(meta, leader), epoch=meta.epoch + 1, version=revision)
                for number, meta in topic.record.partitions.items()
            }
            raised[name] = Versioned(replace(topic.record, partitions=partitions), topic.version)
        self._commit(Change(revision, topics=raised))
        return self.topics()

    def raise_feature_level(self, level: int) -> Versioned[ClusterRecord]:
        cluster = self._state.cluster
        if level > cluster.record.feature_level:
            self._commit(Change(self.revision + 1, cluster=replace(cluster.record, feature_level=level)))
        return self._state.cluster

    def register(self, node: NodeInfo) -> NodeInfo:
        # A change without content: the revision, and so the registration, is used up for ever.
        self._commit(Change(self.revision + 1))
        registered = replace(node, registration=self.revision)
        self._nodes[node.node_uid] = registered
        return registered

    def watch(self, hint: Hint) -> Callable[[], None]:
        self._hints.append(hint)
        return lambda: self._hints.remove(hint)

    def close(self) -> None:
        self._hints.clear()

    def _save(self, change: Change) -> None:
        """Make a change durable, or raise and leave no trace of it."""

    def _commit(self, change: Change) -> None:
        self._save(change)
        self._state.apply(change)
        for name in change.topics:
            for hint in tuple(self._hints):
                hint(name)

    def _add(self, record: TopicRecord, cluster: ClusterRecord) -> Versioned[TopicRecord]:
        revision = self.revision + 1
        partitions = {number: replace(meta, version=revision) for number, meta in record.partitions.items()}
        new = Versioned(replace(record, partitions=partitions), revision)
        self._commit(Change(revision, cluster=cluster, topics={record.name: new}))
        return new

    def _existing(self, name: str) -> Versioned[TopicRecord]:
        topic = self._state.topics.get(name)
        if topic is None:
            raise NotFound(f"there is no topic {name}")
        return topic


def _apply(target: dict, changes: Mapping) -> None:  # type: ignore[type-arg]
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


def _led(meta: PartitionMeta, leader: int | None) -> PartitionMeta:
    if leader is None:
        return meta
    return meta.led_by(leader, log_uid=meta.isr.get(leader, 0))


def _check_same_topic(old: TopicRecord, new: TopicRecord) -> None:
    if (old.name, old.uid, old.salt) != (new.name, new.uid, new.salt):
        raise ValueError(f"name, uid and salt of topic {old.name} can not be changed")
    if missing := sorted(set(old.partitions) - set(new.partitions)):
        raise ValueError(f"partitions {missing} of topic {old.name} can not be taken away")


def _check_partitions(record: TopicRecord) -> None:
    wanted: Iterable[int] = range(record.settings.partitions)
    if set(record.partitions) != set(wanted):
        raise ValueError(
            f"topic {record.name} has settings for {record.settings.partitions} partitions and records of "
            f"{sorted(record.partitions)}"
        )
