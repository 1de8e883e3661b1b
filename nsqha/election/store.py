"""The metadata store: the contract of every implementation, and the one in memory.

    MetadataStore    protocol; blocking, so the shell calls it in a worker thread
      MemoryStore      all the rules below; tests, simulation
        EmbeddedStore    the same, stored in a file (nsqha.election.embedded), for a node without etcd
      EtcdStore        the cluster's (nsqha.election.etcd.store)

- Every change is compare-and-set: it names the version it read and raises `Conflict` if that is no longer current.
- A change is durable when the call returns. `OutcomeUnknown`: it may or may not have happened; read again.
- `revision` rises with every change; a record's version is the revision of its last change. A partition has a version
  of its own, so leaders that change an ISR and nodes that add channels do not disturb each other.
- A missing record means nothing; a `Tombstone` means that the topic was deleted. It stays until its files are gone.
- An ephemeral topic's record is kept like any other but never stored, and leaves no tombstone.
- A change can name registrations or a controller that it relies on; it is a Conflict when one of them is gone.
- Hints name a record that may have changed ("topics/<name>" also for its partitions, "tombstones/<uid>", "nodes/<uid>",
  "controller", "intents/<name>", "cluster"; uids as 16 hex digits); the receiver reads it again. They may be late,
  repeated or, when a connection breaks, a single "" for "anything".
- StaleMetadata from any method: this is another store than the one this node belongs to, or an older state of it.
- ConfigError or LogCorrupt from a read: a record is of a newer version, or is not one. Only such an intent counts as
  empty instead: this version does not know it, and it can be changed or removed by its name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nsqha.election.model import (
    ChannelList,
    ClusterRecord,
    Controller,
    NodeInfo,
    PartitionMeta,
    Tombstone,
    TopicRecord,
    TopicSettings,
    Versioned,
)
from nsqha.election.moves import read_intents
from nsqha.election.rules import (
    changed_partitions,
    check_intent_name,
    check_partitions,
    new_partitions,
    next_epoch,
    tombstone_of,
    without_node,
)
from nsqha.election.session import ClusterSession, Lost, StoreIdentity, View
from nsqha.errors import ConfigError, Conflict, NotFound
from nsqha.ids import is_ephemeral, new_uid

Hint = Callable[[str], None]
Intent = Mapping[str, Any]  # a JSON object


class MetadataStore(Protocol):
    """The contract of every metadata store."""

    @property
    def revision(self) -> int:
        """The revision of the newest change that this store has seen."""

    def identity(self) -> StoreIdentity:
        """Which store this is and the newest revision seen, for the journal."""

    def view(self) -> View:
        """The local copy of all records; it costs no call and may be late."""

    def cluster(self) -> Versioned[ClusterRecord]:
        """The cluster's record."""

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        """All topics by name."""

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        """One topic, by a linearizable read."""

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
    ) -> Versioned[TopicRecord]:
        """Draw a uid, take a salt and store the record. Without `partitions` they wait for a leader, in epoch 1.
        `channels`: those that exist from its first message on.

        Conflict if it exists; ValueError if the name or the partitions do not fit."""

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        """Change a topic. Conflict unless the topic, and every partition that differs, is still as it was read.

        `controller` is the epoch of the controller that makes the change.

        Partitions can be added, not removed; name, uid and salt never change (ValueError). NotFound."""

    def replace_partition(
        self,
        name: str,
        uid: int,
        number: int,
        meta: PartitionMeta,
        *,
        registered: Mapping[int, int] | None = None,
        controller: int | None = None,
    ) -> PartitionMeta:
        """Change one partition, guarded by `meta.version`; returns it with its new version. NotFound, Conflict.

        `registered` maps nodes to the registrations they must still have (a node that joins the ISR), `controller` is
        the epoch of the controller that makes the change. After OutcomeUnknown call `fence_partition`."""

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        """Resolve an unknown outcome of a change guarded by `version`: the result has that change or excludes it.

        If the partition still has this version it is put again unchanged, with a new version, so that the lost change
        cannot happen any more. Unavailable: the outcome is still unknown. NotFound: the topic is gone."""

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        """Put a tombstone in the place of a topic. NotFound, Conflict."""

    def tombstones(self) -> dict[int, Tombstone]:
        """Deleted topics by uid."""

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        """Remove a tombstone: no node has a file of this topic any more. No error if it is gone already.

        `node`: no file is left on that node; the tombstone is removed when that is true of every node it names."""

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        """Store a record that was rebuilt from logs or comes from another cluster; uid and salt are kept.

        Its channel list must be newer than every log's (`ChannelList.above`), its epochs higher than every promise.
        Conflict if the name is taken or the uid was deleted."""

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        """Begin a new epoch of every partition, led by `leader` alone if given; returns all topics.

        For a single node, at start: one process life leads an epoch. One write in the embedded store; in etcd it may
        stop half-way, so that the next attempt begins another epoch of some partitions."""

    def open_session(self, *, ttl_s: float, lost: Lost) -> ClusterSession:
        """Open this process's session. `lost` may be called from any thread. Conflict: there is a session already."""

    def intents(self) -> dict[str, Versioned[Intent]]:
        """All intents, by name."""

    def put_intent(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        """Create (`expected_version` 0) or change an intent. Conflict; ValueError for an invalid name."""

    def remove_intent(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        """Remove an intent that is done or given up. Conflict, also if it is gone."""

    def controller(self) -> Controller | None:
        """The current controller, by a linearizable read."""

    def nodes(self) -> dict[int, NodeInfo]:
        """The nodes that are alive, by uid."""

    def watch(self, hint: Hint) -> Callable[[], None]:
        """Call `hint(name of a record)` after changes, from any thread; it must not block. Call the result to stop."""

    def close(self) -> None:
        """Release files, threads and leases."""


@dataclass(frozen=True)
class Change:
    """One transaction: records by key, None: removed. Other records stay."""

    revision: int
    cluster: ClusterRecord | None = None
    topics: Mapping[str, Versioned[TopicRecord] | None] = field(default_factory=dict)
    tombstones: Mapping[int, Tombstone | None] = field(default_factory=dict)
    intents: Mapping[str, Versioned[Intent] | None] = field(default_factory=dict)

    def hints(self) -> list[str]:
        """The hints for watchers."""
        names = [f"topics/{name}" for name in self.topics]
        names += [f"tombstones/{uid:016x}" for uid in self.tombstones]
        names += [f"intents/{name}" for name in self.intents]
        return names if self.cluster is None else [*names, "cluster"]


@dataclass
class StoreState:
    """All records and their versions."""

    cluster: Versioned[ClusterRecord]
    revision: int = 1
    topics: dict[str, Versioned[TopicRecord]] = field(default_factory=dict)
    tombstones: dict[int, Tombstone] = field(default_factory=dict)
    intents: dict[str, Versioned[Intent]] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        self.revision = change.revision
        if change.cluster is not None:
            self.cluster = Versioned(change.cluster, change.revision)
        _apply(self.topics, change.topics)
        _apply(self.tombstones, change.tombstones)
        _apply(self.intents, change.intents)


class MemoryStore:
    """Records in memory. Subclasses make a change durable in `_save`, before it becomes visible."""

    def __init__(self, rng: random.Random, *, cluster_id: int = 0, state: StoreState | None = None) -> None:
        self._rng = rng
        self._state = state or StoreState(Versioned(ClusterRecord(cluster_id or new_uid(rng)), 1))
        self._nodes: dict[int, NodeInfo] = {}
        self._controller: Controller | None = None
        self._hints: list[Hint] = []
        self._view: View | None = None

    @property
    def revision(self) -> int:
        return self._state.revision

    def identity(self) -> StoreIdentity:
        return StoreIdentity(0, self.revision)

    def view(self) -> View:
        if self._view is None:
            state = self._state
            self._view = View(
                state.revision,
                dict(state.topics),
                dict(state.tombstones),
                dict(self._nodes),
                self._controller,
                read_intents({name: intent.record for name, intent in state.intents.items()}).names,
            )
        return self._view

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

    def controller(self) -> Controller | None:
        return self._controller

    def intents(self) -> dict[str, Versioned[Intent]]:
        return dict(self._state.intents)

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
    ) -> Versioned[TopicRecord]:
        partitions = new_partitions(name, settings, partitions)
        if name in self._state.topics:
            raise Conflict(f"topic {name} exists already")
        cluster = self._state.cluster.record
        uid, salt = new_uid(self._rng), cluster.next_salt()
        record = TopicRecord(name, uid, salt, settings, channels=channels or ChannelList(), partitions=partitions)
        return self._add(record, replace(cluster, salt_counter=cluster.salt_counter + 1))

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        check_partitions(record)
        if record.name in self._state.topics:
            raise Conflict(f"topic {record.name} exists already")
        if record.uid in self._state.tombstones:
            raise Conflict(f"topic {record.name} with uid {record.uid:016x} was deleted")
        if any(record.uid == topic.record.uid for topic in self._state.topics.values()):
            raise Conflict(f"uid {record.uid:016x} belongs to another topic")
        return self._add(record, self._state.cluster.record.past_salt(record.salt))

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        old = self._existing(name)
        changed = changed_partitions(old, expected_version, record)
        self._check_controller(controller)
        revision = self.revision + 1
        partitions = {**record.partitions, **{n: replace(meta, version=revision) for n, meta in changed.items()}}
        new = Versioned(replace(record, partitions=partitions), revision)
        self._commit(Change(revision, topics={name: new}))
        return new

    def replace_partition(
        self,
        name: str,
        uid: int,
        number: int,
        meta: PartitionMeta,
        *,
        registered: Mapping[int, int] | None = None,
        controller: int | None = None,
    ) -> PartitionMeta:
        topic, before = self._existing_partition(name, uid, number)
        if meta.version != before.version:
            raise Conflict(f"partition {number} of topic {name} was changed meanwhile")
        for node, registration in (registered or {}).items():
            if node not in self._nodes or self._nodes[node].registration != registration:
                raise Conflict(f"node {node:016x} does not have registration {registration} any more")
        self._check_controller(controller)
        return self._put_partition(topic, number, meta)

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        topic, meta = self._existing_partition(name, uid, number)
        return meta if meta.version != version else self._put_partition(topic, number, meta)

    def _put_partition(self, topic: Versioned[TopicRecord], number: int, meta: PartitionMeta) -> PartitionMeta:
        revision = self.revision + 1
        new = replace(meta, version=revision)
        record = replace(topic.record, partitions={**topic.record.partitions, number: new})
        self._commit(Change(revision, topics={record.name: Versioned(record, topic.version)}))
        return new

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        old = self._existing(name)
        if expected_version is not None and old.version != expected_version:
            raise Conflict(f"topic {name} was changed meanwhile (version {old.version}, not {expected_version})")
        tombstone = tombstone_of(old.record)
        buried = {} if is_ephemeral(name) else {old.record.uid: tombstone}
        self._commit(Change(self.revision + 1, topics={name: None}, tombstones=buried))
        return tombstone

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        tombstone = self._state.tombstones.get(uid)
        if tombstone is not None and (left := without_node(tombstone, node)) != tombstone:
            self._commit(Change(self.revision + 1, tombstones={uid: left}))

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        revision = self.revision + 1
        raised = {}
        for name, topic in self._state.topics.items():
            partitions = {
                number: replace(next_epoch(meta, leader), version=revision)
                for number, meta in topic.record.partitions.items()
            }
            raised[name] = Versioned(replace(topic.record, partitions=partitions), topic.version)
        self._commit(Change(revision, topics=raised))
        return self.topics()

    def put_intent(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        check_intent_name(name)
        self._check_intent(name, expected_version, controller)
        new = Versioned(intent, self.revision + 1)
        self._commit(Change(new.version, intents={name: new}))
        return new

    def remove_intent(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        self._check_intent(name, expected_version, controller)
        self._commit(Change(self.revision + 1, intents={name: None}))

    def open_session(self, *, ttl_s: float, lost: Lost) -> MemorySession:
        return MemorySession(self, ttl_s, lost)

    def watch(self, hint: Hint) -> Callable[[], None]:
        self._hints.append(hint)
        return lambda: self._hints.remove(hint) if hint in self._hints else None

    def close(self) -> None:
        self._hints.clear()

    def _save(self, change: Change) -> None:
        """Make a change durable, or raise and change nothing."""

    def _commit(self, change: Change) -> None:
        self._save(change)
        self._state.apply(change)
        self._tell(change.hints())

    def _tell(self, names: Iterable[str]) -> None:
        self._view = None
        for name in names:
            for hint in tuple(self._hints):
                hint(name)

    def _next_revision(self) -> int:
        """Make an empty change, so that its revision, as a registration or a controller epoch, is never used again."""
        self._commit(Change(self.revision + 1))
        return self.revision

    def _check_controller(self, epoch: int | None) -> None:
        if epoch is not None and (self._controller is None or self._controller.epoch != epoch):
            raise Conflict(f"controller epoch {epoch} is over")

    def _check_intent(self, name: str, expected_version: int, controller: int | None) -> None:
        before = self._state.intents.get(name)
        if (0 if before is None else before.version) != expected_version:
            raise Conflict(f"intent {name} was changed meanwhile")
        self._check_controller(controller)

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

    def _existing_partition(self, name: str, uid: int, number: int) -> tuple[Versioned[TopicRecord], PartitionMeta]:
        topic = self._existing(name)
        meta = topic.record.partitions.get(number) if topic.record.uid == uid else None
        if meta is None:
            raise NotFound(f"there is no partition {number} of topic {name} with uid {uid:016x}")
        return topic, meta


class MemorySession:
    """A session that lasts until it is closed or, for simulations, `expire` is called. One store can have many."""

    def __init__(self, store: MemoryStore, ttl_s: float, lost: Lost) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._lost = lost
        self._ended = False
        self._node: NodeInfo | None = None
        self._term: Controller | None = None

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    def ticked(self) -> None:
        """There is no lease to renew."""

    def fresh(self, now: float) -> bool:
        return not self._ended

    def register(self, node: NodeInfo) -> NodeInfo:
        self._check_open()
        if self._node is not None:
            raise Conflict("this session has registered its node already")
        if node.node_uid in self._store._nodes:
            raise ConfigError(f"another process is node {node.node_uid:016x}; a data directory must not be copied")
        self._node = replace(node, registration=self._store._next_revision())
        self._put_node(self._node)
        return self._node

    def update(self, node: NodeInfo) -> NodeInfo:
        self._check_open()
        if self._node is None or self._node.node_uid != node.node_uid:
            raise NotFound(f"node {node.node_uid:016x} is not registered by this session")
        self._node = replace(node, registration=self._node.registration)
        self._put_node(self._node)
        return self._node

    def campaign(self, candidate: Controller) -> Controller | None:
        self._check_open()
        if self._store._controller is None:
            self._term = replace(candidate, epoch=self._store._next_revision())
            self._store._controller = self._term
            self._store._tell(["controller"])
        return self._term if self._store._controller is self._term else None

    def resign(self) -> None:
        if self._term is not None:
            self.depose(self._term)
            self._term = None

    def depose(self, controller: Controller) -> None:
        if self._store._controller == controller:
            self._store._controller = None
            self._store._tell(["controller"])

    def expire(self) -> None:
        """End the session as if its lease had expired."""
        if not self._ended:
            self.close()
            self._lost()

    def close(self) -> None:
        self._ended = True
        self.resign()
        if self._node is not None:
            del self._store._nodes[self._node.node_uid]
            self._store._tell([f"nodes/{self._node.node_uid:016x}"])
            self._node = None

    def _put_node(self, node: NodeInfo) -> None:
        self._store._nodes[node.node_uid] = node
        self._store._tell([f"nodes/{node.node_uid:016x}"])

    def _check_open(self) -> None:
        if self._ended:
            raise NotFound("this session is over")


def _apply(target: dict, changes: Mapping) -> None:  # type: ignore[type-arg]
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value
