"""Records in etcd: reads, and changes that compare what they rely on.

Each partition has a key of its own, so a topic is read in one transaction of two ranges, and written as far as it
changed. Every change is one transaction; one that lost against a change that it does not mind is tried again on what is
there now, at most RETRIES times. Where the records are is drawn in `keys`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nsqha.election import rules
from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.calls import list_keys, read_key, read_ranges, transact
from nsqha.election.etcd.client import EtcdClient, Full
from nsqha.election.etcd.keys import created, delete, get, none_newer, put, unchanged
from nsqha.election.etcd.many_topics import NewTopic, NewTopics, TopicReads
from nsqha.election.etcd.session import EtcdSessions
from nsqha.election.etcd.view import join
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
from nsqha.election.session import View
from nsqha.election.store import Intent, PartitionChange, Refusal
from nsqha.errors import (
    ConfigError,
    Conflict,
    LogCorrupt,
    NotFound,
    NsqhaError,
    OutcomeUnknown,
    Unavailable,
)
from nsqha.ids import is_ephemeral, new_uid

RETRIES = 20
COMPARES_MAX = etcd_keys.OPS_MAX - etcd_keys.OPS_PER_PART - 4
REGISTERED_MAX = 10  # registrations that a transaction of many partitions compares
BULK = COMPARES_MAX - REGISTERED_MAX
"""Partitions of one transaction: with the registrations they rely on and the controller's epoch there are as many
compares as a transaction of OPS_PER_PART operations has room for."""


@dataclass(frozen=True)
class _ReadTopic:
    """A topic as it was read."""

    topic: Versioned[TopicRecord]
    lease: int  # 0: it stays
    revision: int


class EtcdRecords:
    """Topics with their partitions, tombstones, and who is there. Any number of threads."""

    def __init__(
        self,
        client: EtcdClient,
        keys: etcd_keys.Keys,
        rng: random.Random,
        *,
        sessions: EtcdSessions,
        known: Callable[[], View],
    ) -> None:
        """`known` is the copy that the watch keeps; `sessions` have the lease of ephemeral topics."""
        self._client = client
        self._keys = keys
        self._rng = rng
        self._sessions = sessions
        self._reads = TopicReads(client, keys, known)
        self._new = NewTopics(client, keys)

    @property
    def revision(self) -> int:
        return self._client.revision

    def cluster(self) -> Versioned[ClusterRecord]:
        kv = read_key(self._client, self._keys.cluster)
        if kv is None:
            raise Unavailable(f"etcd has no key {self._keys.prefix}cluster any more; put it back from a backup")
        return etcd_keys.versioned_of(ClusterRecord, kv)

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        return self._reads.topics()

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        found = self._find(name)
        return None if found is None else found.topic

    def topics_of(self, names: Collection[str]) -> dict[str, Versioned[TopicRecord] | None]:
        found = self._reads.watched(names)
        if found is not None:
            return found
        if self._reads.better_one_by_one(len(names)):
            return {name: self.topic(name) for name in names}
        topics = self.topics()
        return {name: topics.get(name) for name in names}

    def tombstones(self) -> dict[int, Tombstone]:
        kvs, _ = list_keys(self._client, self._keys.tombstones)
        records = [etcd_keys.record_of(Tombstone, kv) for kv in kvs]
        return {record.uid: record for record in records}

    def nodes(self) -> dict[int, NodeInfo]:
        kvs, _ = list_keys(self._client, self._keys.nodes)
        infos = [etcd_keys.node_info(kv) for kv in kvs]
        return {info.node_uid: info for info in infos}

    def controller(self) -> Controller | None:
        kv = read_key(self._client, self._keys.controller)
        return None if kv is None else etcd_keys.controller_of(kv)

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
        uid: int | None = None,
    ) -> Versioned[TopicRecord]:
        partitions = rules.new_partitions(name, settings, partitions)
        uid, known = uid or new_uid(self._rng), channels or ChannelList()

        def made(cluster: ClusterRecord) -> tuple[TopicRecord, ClusterRecord]:
            record = TopicRecord(name, uid, cluster.next_salt(), settings, channels=known, partitions=partitions)
            return record, replace(cluster, salt_counter=cluster.salt_counter + 1)

        return self._new.add(NewTopic(name, uid, len(partitions), self._sessions.lease_for(name), made))

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        rules.check_partitions(record)
        lease, count = self._sessions.lease_for(record.name), len(record.partitions)
        made = lambda cluster: (record, cluster.past_salt(record.salt))  # noqa: E731
        return self._new.add(NewTopic(record.name, record.uid, count, lease, made))

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        for _ in range(RETRIES):
            found = self._existing(name)
            old = found.topic.record
            changed = rules.changed_partitions(found.topic, expected_version, record)
            compares = [unchanged(self._keys.topic(name), expected_version), *_led_by(self._keys, controller)]
            if len(changed) <= COMPARES_MAX:
                versions = {n: old.partitions[n].version if n in old.partitions else 0 for n in changed}
                compares += [unchanged(self._keys.partition(old.uid, n), v) for n, v in versions.items()]
            else:
                compares.append(none_newer(self._keys.partitions_of(old.uid), found.revision))
            ops = [put(self._keys.topic(name), etcd_keys.topic_value(record), keep_lease=True)]
            for number, meta in changed.items():
                key, value = self._keys.partition(old.uid, number), etcd_keys.partition_value(meta)
                if number in old.partitions:
                    ops.append(put(key, value, keep_lease=True))
                else:
                    ops.append(put(key, value, lease=found.lease))
            answer = transact(self._client, compares, ops)
            if answer.succeeded:
                revision = answer.header.revision
                put_now = {n: replace(meta, version=revision) for n, meta in changed.items()}
                return Versioned(replace(record, partitions={**record.partitions, **put_now}), revision)
            self._check_controller(controller)
        raise _too_many(f"topic {name}")

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
        key = self._keys.partition(uid, number)
        compares = [unchanged(key, meta.version), *_led_by(self._keys, controller)]
        compares += [created(self._keys.node(node), known) for node, known in (registered or {}).items()]
        try:
            answer = transact(
                self._client, compares, [put(key, etcd_keys.partition_value(meta), keep_lease=True)], [get(key)]
            )
        except Full as error:
            if self._untouched(key, meta.version):
                raise Unavailable(str(error)) from None
            raise
        if answer.succeeded:
            return replace(meta, version=answer.header.revision)
        kvs = answer.responses[0].response_range.kvs
        if not kvs:
            raise NotFound(f"there is no partition {number} of topic {name} with uid {uid:016x}")
        if kvs[0].mod_revision != meta.version:
            raise Conflict(f"partition {number} of topic {name} was changed meanwhile")
        raise Conflict(
            f"partition {number} of topic {name} was not changed: a node does not have its registration any more"
            + ("" if controller is None else f", or controller epoch {controller} is over")
        )

    def replace_partitions(
        self, changes: Sequence[PartitionChange], *, controller: int | None = None
    ) -> list[PartitionMeta | Refusal]:
        waiting, results = iter(changes), list[PartitionMeta | Refusal]()
        while part := list(islice(waiting, BULK)):
            results += self._replace_part(part, controller)
        return results

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        key = self._keys.partition(uid, number)
        for _ in range(RETRIES):
            kv = read_key(self._client, key)
            if kv is None:
                raise NotFound(f"there is no partition {number} of topic {name} with uid {uid:016x}")
            if kv.mod_revision != version:
                return etcd_keys.partition_meta(kv)
            try:
                answer = transact(self._client, [unchanged(key, version)], [put(key, kv.value, keep_lease=True)])
            except Full:
                raise  # also the next time
            except OutcomeUnknown:
                continue  # now there are two; the next read sees whether one of them was carried out
            if answer.succeeded:
                return replace(etcd_keys.partition_meta(kv), version=answer.header.revision)
        raise Unavailable(f"it is still not known what partition {number} of topic {name} is; try again")

    def delete_topic(self, name: str, *, expected_version: int | None = None) -> Tombstone:
        for _ in range(RETRIES):
            found = self._existing(name)
            topic = found.topic
            if expected_version is not None and topic.version != expected_version:
                raise Conflict(f"topic {name} was changed meanwhile (version {topic.version}, not {expected_version})")
            tombstone = rules.tombstone_of(topic.record)
            key, partitions = self._keys.topic(name), self._keys.partitions_of(topic.record.uid)
            ops = [delete(key), delete(partitions, prefix=True)]
            if not is_ephemeral(name):
                ops.append(put(self._keys.tombstone(tombstone.uid), encode(tombstone)))
            # The tombstone names every node that may have files, so no replica may have been added since the read.
            if transact(
                self._client, [unchanged(key, topic.version), none_newer(partitions, found.revision)], ops
            ).succeeded:
                return tombstone
        raise _too_many(f"topic {name}")

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        key = self._keys.tombstone(uid)
        for _ in range(RETRIES):
            kv = read_key(self._client, key)
            if kv is None:
                return
            tombstone = etcd_keys.record_of(Tombstone, kv)
            left = rules.without_node(tombstone, node)
            if left == tombstone:
                return
            change = delete(key) if left is None else put(key, encode(left))
            if transact(self._client, [unchanged(key, kv.mod_revision)], [change]).succeeded:
                return
        raise _too_many(f"the tombstone of {uid:016x}")

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        waiting = [(t.record.uid, number, meta) for t in self.topics().values() for number, meta in _partitions(t)]
        parts = iter(waiting)
        while part := list(islice(parts, etcd_keys.OPS_PER_PART - 2)):
            self._raise_epochs(part, leader)
        return self.topics()

    def _replace_part(
        self, changes: list[PartitionChange], controller: int | None
    ) -> Sequence[PartitionMeta | Refusal]:
        """Change partitions in one transaction or, where one of its compares fails, in one for each of them."""
        registered = {pair for each in changes for pair in each.registered.items()}
        if len(changes) > 1 and len(registered) <= REGISTERED_MAX:
            keys = [self._keys.partition(each.uid, each.number) for each in changes]
            compares = [unchanged(key, each.meta.version) for key, each in zip(keys, changes, strict=True)]
            compares += _led_by(self._keys, controller)
            compares += [created(self._keys.node(node), known) for node, known in registered]
            puts = [
                put(key, etcd_keys.partition_value(each.meta), keep_lease=True)
                for key, each in zip(keys, changes, strict=True)
            ]
            try:
                answer = transact(self._client, compares, puts)
            except (OutcomeUnknown, Unavailable) as error:
                refusal: Refusal = error
                if isinstance(error, Full) and self._untouched(keys[0], changes[0].meta.version):
                    refusal = Unavailable(str(error))  # all or none
                return [refusal] * len(changes)
            if answer.succeeded:
                return [replace(each.meta, version=answer.header.revision) for each in changes]
        return [self._replaced(each, controller) for each in changes]

    def _replaced(self, change: PartitionChange, controller: int | None) -> PartitionMeta | Refusal:
        name, uid, number = change.name, change.uid, change.number
        try:
            return self.replace_partition(
                name, uid, number, change.meta, registered=change.registered, controller=controller
            )
        except (Conflict, NotFound, OutcomeUnknown, Unavailable) as error:
            return error

    def _untouched(self, key: bytes, version: int) -> bool:
        """Whether a change that there was no room for has certainly not been made; whatever it was, it is over."""
        try:
            kv = read_key(self._client, key)
        except NsqhaError:
            return False
        return kv is not None and kv.mod_revision == version

    def _find(self, name: str) -> _ReadTopic | None:
        known = self._reads.known().topics.get(name)
        uid = 0 if known is None else known.record.uid
        for _ in range(RETRIES):
            (topics, partitions), header = read_ranges(
                self._client, get(self._keys.topic(name)), get(self._keys.partitions_of(uid), prefix=True)
            )
            if not topics:
                return None
            topic = etcd_keys.versioned_of(TopicRecord, topics[0])
            if topic.record.uid == uid:
                metas = {number: etcd_keys.partition_meta(kv) for number, kv in _numbered(self._keys, partitions)}
                return _ReadTopic(join(topic, metas), topics[0].lease, header.revision)
            uid = topic.record.uid  # a guess that was late
        raise _too_many(f"topic {name}")

    def _existing(self, name: str) -> _ReadTopic:
        found = self._find(name)
        if found is None:
            raise NotFound(f"there is no topic {name}")
        return found

    def _raise_epochs(self, part: list[tuple[int, int, PartitionMeta]], leader: int | None) -> None:
        keys = {self._keys.partition(uid, number): meta for uid, number, meta in part}
        for _ in range(RETRIES):
            compares = [unchanged(key, meta.version) for key, meta in keys.items()]
            ops = [
                put(key, etcd_keys.partition_value(rules.next_epoch(meta, leader)), keep_lease=True)
                for key, meta in keys.items()
            ]
            if transact(self._client, compares, ops).succeeded:
                return
            found, _ = read_ranges(self._client, *map(get, keys))
            # Those that are gone were deleted with their topic.
            keys = {kvs[0].key: etcd_keys.partition_meta(kvs[0]) for kvs in found if kvs}
        raise _too_many("the partitions")

    def _check_controller(self, epoch: int | None) -> None:
        if epoch is None:
            return
        now = self.controller()
        if now is None or now.epoch != epoch:
            raise Conflict(f"controller epoch {epoch} is over")


class EtcdIntents:
    """What administrators want of the controller."""

    def __init__(self, client: EtcdClient, keys: etcd_keys.Keys) -> None:
        self._client = client
        self._keys = keys

    def all(self) -> dict[str, Versioned[Intent]]:
        kvs, _ = list_keys(self._client, self._keys.intents)
        return {self._keys.short(kv.key).removeprefix("intents/"): _intent_or_none(kv) for kv in kvs}

    def put(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        rules.check_intent_name(name)
        key = self._keys.intent(name)
        value = etcd_keys.intent_value(intent)
        answer = transact(
            self._client, [unchanged(key, expected_version), *_led_by(self._keys, controller)], [put(key, value)]
        )
        if not answer.succeeded:
            raise Conflict(f"intent {name} was changed meanwhile, or the controller's epoch is over")
        return Versioned(intent, answer.header.revision)

    def remove(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        key = self._keys.intent(name)
        # An absent key has revision 0: nothing to remove is a conflict.
        if expected_version:
            compares = [unchanged(key, expected_version), *_led_by(self._keys, controller)]
            if transact(self._client, compares, [delete(key)]).succeeded:
                return
        raise Conflict(f"intent {name} was changed meanwhile, or the controller's epoch is over")


def _led_by(keys: etcd_keys.Keys, controller: int | None) -> list[Any]:
    return [] if controller is None else [created(keys.controller, controller)]


def _numbered(keys: etcd_keys.Keys, kvs: list[Any]) -> Iterator[tuple[int, Any]]:
    for kv in kvs:
        found = etcd_keys.partition_of(keys.short(kv.key))
        if found is not None:
            yield found[1], kv


def _intent_or_none(kv: Any) -> Versioned[Intent]:
    try:
        return etcd_keys.intent_of(kv)
    except (LogCorrupt, ConfigError):  # the watch reports it
        return Versioned({}, kv.mod_revision)


def _partitions(topic: Versioned[TopicRecord]) -> Iterator[tuple[int, PartitionMeta]]:
    yield from topic.record.partitions.items()


def _too_many(what: str) -> Unavailable:
    return Unavailable(f"{what} is changed by others all the time; try again")
