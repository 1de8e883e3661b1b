"""The metadata store in memory: the contract in `nsqha.election.store`, and all its rules.

MemoryStore
  MemoryTables     all records, the one way to change them, and hints (the store's `watch`)
  MemoryRecords    topics, partitions, tombstones, nodes, the controller
  MemoryIntents    what administrators want of the controller
  MemorySessions   registrations
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    name_taken,
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
from nsqha.election.session import Lost, StoreIdentity, View
from nsqha.election.store import Hint, Intent, PartitionChange, Refusal
from nsqha.errors import ConfigError, Conflict, NotFound, OutcomeUnknown, Unavailable
from nsqha.ids import is_ephemeral, new_uid


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


Save = Callable[[StoreState, Change], None]  # makes a change of this state durable, or raises and changes nothing


class MemoryStore:
    """Records in memory. `save` makes a change durable before it becomes visible."""

    def __init__(
        self,
        rng: random.Random,
        *,
        cluster_id: int = 0,
        state: StoreState | None = None,
        save: Save = lambda state, change: None,
    ) -> None:
        state = state or StoreState(Versioned(ClusterRecord(cluster_id or new_uid(rng)), 1))
        self.watch = MemoryTables(state, save)
        self.records = MemoryRecords(self.watch, rng)
        self.intents = MemoryIntents(self.watch)
        self.sessions = MemorySessions(self.watch)

    def identity(self) -> StoreIdentity:
        return StoreIdentity(0, self.watch.revision)

    def close(self) -> None:
        self.watch.close()


class MemoryTables:
    """All records, the one way to change them, and who hears of it."""

    def __init__(self, state: StoreState, save: Save) -> None:
        self.state = state
        self.nodes: dict[int, NodeInfo] = {}
        self.controller: Controller | None = None
        self._save = save
        self._hints: list[Hint] = []
        self._view: View | None = None

    @property
    def revision(self) -> int:
        return self.state.revision

    def view(self) -> View:
        if self._view is None:
            state = self.state
            self._view = View(
                state.revision,
                dict(state.topics),
                dict(state.tombstones),
                dict(self.nodes),
                self.controller,
                read_intents({name: intent.record for name, intent in state.intents.items()}).names,
            )
        return self._view

    def on_change(self, hint: Hint) -> Callable[[], None]:
        self._hints.append(hint)
        return lambda: self._hints.remove(hint) if hint in self._hints else None

    def close(self) -> None:
        self._hints.clear()

    def commit(self, change: Change) -> None:
        self._save(self.state, change)
        self.state.apply(change)
        self.tell(change.hints())

    def tell(self, names: Iterable[str]) -> None:
        self._view = None
        for name in names:
            for hint in tuple(self._hints):
                hint(name)

    def next_revision(self) -> int:
        """Make an empty change, so that its revision, as a registration or a controller epoch, is never used again."""
        self.commit(Change(self.revision + 1))
        return self.revision

    def check_controller(self, epoch: int | None) -> None:
        if epoch is not None and (self.controller is None or self.controller.epoch != epoch):
            raise Conflict(f"controller epoch {epoch} is over")


class MemoryRecords:
    """Topics with their partitions, tombstones, and who is there."""

    def __init__(self, tables: MemoryTables, rng: random.Random) -> None:
        self._tables = tables
        self._rng = rng

    @property
    def revision(self) -> int:
        return self._tables.revision

    def cluster(self) -> Versioned[ClusterRecord]:
        return self._tables.state.cluster

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        return dict(self._tables.state.topics)

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        return self._tables.state.topics.get(name)

    def topics_of(self, names: Collection[str]) -> dict[str, Versioned[TopicRecord] | None]:
        return {name: self._tables.state.topics.get(name) for name in names}

    def tombstones(self) -> dict[int, Tombstone]:
        return dict(self._tables.state.tombstones)

    def nodes(self) -> dict[int, NodeInfo]:
        return dict(self._tables.nodes)

    def controller(self) -> Controller | None:
        return self._tables.controller

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
        uid: int | None = None,
    ) -> Versioned[TopicRecord]:
        partitions = new_partitions(name, settings, partitions)
        if name in self._tables.state.topics:
            raise Conflict(f"topic {name} exists already")
        cluster = self._tables.state.cluster.record
        uid, salt = uid or new_uid(self._rng), cluster.next_salt()
        record = TopicRecord(name, uid, salt, settings, channels=channels or ChannelList(), partitions=partitions)
        return self._add(record, replace(cluster, salt_counter=cluster.salt_counter + 1))

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        check_partitions(record)
        if record.name in self._tables.state.topics:
            raise Conflict(f"topic {record.name} exists already")
        if record.uid in self._tables.state.tombstones:
            raise Conflict(f"topic {record.name} with uid {record.uid:016x} was deleted")
        if any(record.uid == topic.record.uid for topic in self._tables.state.topics.values()):
            raise Conflict(f"uid {record.uid:016x} belongs to another topic")
        return self._add(record, self._tables.state.cluster.record.past_salt(record.salt))

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        old = self._existing(name)
        changed = changed_partitions(old, expected_version, record)
        self._tables.check_controller(controller)
        revision = self._tables.revision + 1
        partitions = {**record.partitions, **{n: replace(meta, version=revision) for n, meta in changed.items()}}
        new = Versioned(replace(record, partitions=partitions), revision)
        self._tables.commit(Change(revision, topics={name: new}))
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
            if node not in self._tables.nodes or self._tables.nodes[node].registration != registration:
                raise Conflict(f"node {node:016x} does not have registration {registration} any more")
        self._tables.check_controller(controller)
        return self._put_partition(topic, number, meta)

    def replace_partitions(
        self, changes: Sequence[PartitionChange], *, controller: int | None = None
    ) -> list[PartitionMeta | Refusal]:
        results: list[PartitionMeta | Refusal] = []
        for each in changes:
            try:
                meta = self.replace_partition(
                    each.name, each.uid, each.number, each.meta, registered=each.registered, controller=controller
                )
            except (Conflict, NotFound, OutcomeUnknown, Unavailable) as error:
                results.append(error)
            else:
                results.append(meta)
        return results

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        topic, meta = self._existing_partition(name, uid, number)
        return meta if meta.version != version else self._put_partition(topic, number, meta)

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        old = self._existing(name)
        if expected_version is not None and old.version != expected_version:
            raise Conflict(f"topic {name} was changed meanwhile (version {old.version}, not {expected_version})")
        tombstone = tombstone_of(old.record)
        buried = {} if is_ephemeral(name) else {old.record.uid: tombstone}
        self._tables.commit(Change(self._tables.revision + 1, topics={name: None}, tombstones=buried))
        return tombstone

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        tombstone = self._tables.state.tombstones.get(uid)
        if tombstone is not None and (left := without_node(tombstone, node)) != tombstone:
            self._tables.commit(Change(self._tables.revision + 1, tombstones={uid: left}))

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        revision = self._tables.revision + 1
        raised = {}
        for name, topic in self._tables.state.topics.items():
            partitions = {
                number: replace(next_epoch(meta, leader), version=revision)
                for number, meta in topic.record.partitions.items()
            }
            raised[name] = Versioned(replace(topic.record, partitions=partitions), topic.version)
        self._tables.commit(Change(revision, topics=raised))
        return self.topics()

    def _put_partition(self, topic: Versioned[TopicRecord], number: int, meta: PartitionMeta) -> PartitionMeta:
        revision = self._tables.revision + 1
        new = replace(meta, version=revision)
        record = replace(topic.record, partitions={**topic.record.partitions, number: new})
        self._tables.commit(Change(revision, topics={record.name: Versioned(record, topic.version)}))
        return new

    def _add(self, record: TopicRecord, cluster: ClusterRecord) -> Versioned[TopicRecord]:
        revision = self._tables.revision + 1
        partitions = {number: replace(meta, version=revision) for number, meta in record.partitions.items()}
        new = Versioned(replace(record, partitions=partitions), revision)
        self._tables.commit(Change(revision, cluster=cluster, topics={record.name: new}))
        return new

    def _existing(self, name: str) -> Versioned[TopicRecord]:
        topic = self._tables.state.topics.get(name)
        if topic is None:
            raise NotFound(f"there is no topic {name}")
        return topic

    def _existing_partition(self, name: str, uid: int, number: int) -> tuple[Versioned[TopicRecord], PartitionMeta]:
        topic = self._existing(name)
        meta = topic.record.partitions.get(number) if topic.record.uid == uid else None
        if meta is None:
            raise NotFound(f"there is no partition {number} of topic {name} with uid {uid:016x}")
        return topic, meta


class MemoryIntents:
    """What administrators want of the controller."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def all(self) -> dict[str, Versioned[Intent]]:
        return dict(self._tables.state.intents)

    def put(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        check_intent_name(name)
        self._check_intent(name, expected_version, controller)
        new = Versioned(intent, self._tables.revision + 1)
        self._tables.commit(Change(new.version, intents={name: new}))
        return new

    def remove(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        self._check_intent(name, expected_version, controller)
        self._tables.commit(Change(self._tables.revision + 1, intents={name: None}))

    def _check_intent(self, name: str, expected_version: int, controller: int | None) -> None:
        before = self._tables.state.intents.get(name)
        if (0 if before is None else before.version) != expected_version:
            raise Conflict(f"intent {name} was changed meanwhile")
        self._tables.check_controller(controller)


class MemorySessions:
    """Sessions that last until they are closed. One store can have many."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def open(self, *, ttl_s: float, lost: Lost) -> MemorySession:
        return MemorySession(self._tables, ttl_s, lost)


class MemorySession:
    """A session that lasts until it is closed or, for simulations, `expire` is called."""

    def __init__(self, tables: MemoryTables, ttl_s: float, lost: Lost) -> None:
        self._tables = tables
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

    def seconds_left(self, now: float) -> float:
        return 0.0 if self._ended else self.ttl_s

    def register(self, node: NodeInfo) -> NodeInfo:
        self._check_open()
        if self._node is not None:
            raise Conflict("this session has registered its node already")
        if node.node_uid in self._tables.nodes:
            raise ConfigError(f"another process is node {node.node_uid:016x}; a data directory must not be copied")
        if why := name_taken(node, self._tables.nodes.values()):
            raise ConfigError(why)
        self._node = replace(node, registration=self._tables.next_revision())
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
        if self._tables.controller is None:
            self._term = replace(candidate, epoch=self._tables.next_revision())
            self._tables.controller = self._term
            self._tables.tell(["controller"])
        return self._term if self._tables.controller is self._term else None

    def resign(self) -> None:
        if self._term is not None:
            self.depose(self._term)
            self._term = None

    def depose(self, controller: Controller) -> None:
        if self._tables.controller == controller:
            self._tables.controller = None
            self._tables.tell(["controller"])

    def expire(self) -> None:
        """End the session as if its lease had expired."""
        if not self._ended:
            self.close()
            self._lost()

    def close(self) -> None:
        self._ended = True
        self.resign()
        if self._node is not None:
            del self._tables.nodes[self._node.node_uid]
            self._tables.tell([f"nodes/{self._node.node_uid:016x}"])
            self._node = None

    def _put_node(self, node: NodeInfo) -> None:
        self._tables.nodes[node.node_uid] = node
        self._tables.tell([f"nodes/{node.node_uid:016x}"])

    def _check_open(self) -> None:
        if self._ended:
            raise NotFound("this session is over")


def _apply(target: dict, changes: Mapping) -> None:  # type: ignore[type-arg]
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value
