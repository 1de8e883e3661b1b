"""The metadata of a cluster, in etcd.

    EtcdStore    reads and compare-and-set transactions, in the caller's thread
      EtcdClient   endpoints, deadlines, login, what a failure means
      EtcdWatch    own thread: keeps `view` up to date and gives hints
      EtcdSession  own thread: keeps the process's lease

Where the records are is drawn in `keys`. Each partition has a key of its own, so a topic is read in one
transaction of two ranges, and written as far as it changed. Every change is one transaction that compares what it
relies on; a change that lost against one it does not mind is tried again on what is there now, at most RETRIES times.

etcd is believed only as long as it is the one that this node belongs to and never goes back: see `StoreIdentity`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nsqha.clock import Clock
from nsqha.election import rules
from nsqha.election.codec import encode
from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import Compacted, EtcdClient, EtcdOptions, Full
from nsqha.election.etcd.keys import created, delete, get, none_newer, put, txn, unchanged
from nsqha.election.etcd.metadata_restore import EtcdSnapshot, look
from nsqha.election.etcd.session import EtcdSession
from nsqha.election.etcd.view import Trouble, join
from nsqha.election.etcd.watch import EtcdWatch, list_keys
from nsqha.election.model import (
    FEATURE_LEVEL,
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
from nsqha.election.session import Lost, StoreIdentity, View
from nsqha.election.store import Hint, Intent
from nsqha.errors import (
    ConfigError,
    Conflict,
    LogCorrupt,
    NotFound,
    NsqhaError,
    OutcomeUnknown,
    StaleMetadata,
    Unavailable,
)
from nsqha.ids import is_ephemeral, new_uid

RETRIES = 20
COMPARES_MAX = etcd_keys.OPS_MAX - etcd_keys.OPS_PER_PART - 4


@dataclass(frozen=True)
class _ReadTopic:
    """A topic as it was read."""

    topic: Versioned[TopicRecord]
    lease: int  # 0: it stays
    revision: int


class EtcdStore:
    """The cluster's store. Any number of threads."""

    def __init__(
        self,
        options: EtcdOptions,
        cluster_name: str,
        clock: Clock,
        rng: random.Random,
        *,
        cluster_id: int = 0,
        seen: StoreIdentity = StoreIdentity(0, 0),
        trouble: Trouble = lambda text: None,
    ) -> None:
        """Connect, check who it is, read everything and begin to watch.

        `cluster_id` and `seen` are what this node's journal says. A cluster that is not there yet begins, unless this
        node has been in one. `trouble` gets a line for a log whenever a background thread has to start over.

        Unavailable: etcd can not be reached. StaleMetadata: it is another one or was put back to an older state.
        ConfigError: another cluster, another version's, or etcd refuses us.
        """
        self._keys = etcd_keys.Keys(cluster_name)
        self._clock = clock
        self._rng = rng
        self._trouble = trouble
        self._hints: list[Hint] = []
        self._view = View()
        self._session: EtcdSession | None = None
        self._generation = 0  # of the acceptance that is believed
        self._client = EtcdClient(options, etcd_cluster_id=seen.etcd_cluster_id, revision_seen=seen.revision)
        self._watch = EtcdWatch(self._client, self._keys, self._publish, trouble)
        try:
            self._check_cluster(cluster_id, known=seen.etcd_cluster_id != 0)
            self._watch.start()
        except BaseException:
            self._client.close()
            raise

    # What is known without a call

    @property
    def revision(self) -> int:
        return self._client.revision

    def identity(self) -> StoreIdentity:
        return StoreIdentity(self._client.etcd_cluster_id, self._client.revision)

    def view(self) -> View:
        return self._view

    @property
    def doubt(self) -> str:
        """Why etcd is not believed any more, which no call can change; empty: it is."""
        return self._client.doubt

    @property
    def foreign(self) -> bool:
        """The doubt is that it is another etcd, and not an older state of ours."""
        return self._client.foreign

    def watch(self, hint: Hint) -> Callable[[], None]:
        self._hints.append(hint)
        return lambda: self._hints.remove(hint) if hint in self._hints else None

    # Reads

    def cluster(self) -> Versioned[ClusterRecord]:
        kv = self._one(self._keys.cluster)
        if kv is None:
            raise Unavailable(f"etcd has no key {self._keys.prefix}cluster any more; put it back from a backup")
        return etcd_keys.versioned_of(ClusterRecord, kv)

    def topics(self) -> dict[str, Versioned[TopicRecord]]:
        while True:
            topics, revision = list_keys(self._client, self._keys.topics)
            try:
                partitions, _ = list_keys(self._client, self._keys.partitions, revision=revision)
            except Compacted:
                continue
            return self._joined(topics, partitions)

    def topic(self, name: str) -> Versioned[TopicRecord] | None:
        found = self._find(name)
        return None if found is None else found.topic

    def tombstones(self) -> dict[int, Tombstone]:
        kvs, _ = list_keys(self._client, self._keys.tombstones)
        records = [etcd_keys.record_of(Tombstone, kv) for kv in kvs]
        return {record.uid: record for record in records}

    def nodes(self) -> dict[int, NodeInfo]:
        kvs, _ = list_keys(self._client, self._keys.nodes)
        infos = [etcd_keys.node_info(kv) for kv in kvs]
        return {info.node_uid: info for info in infos}

    def controller(self) -> Controller | None:
        kv = self._one(self._keys.controller)
        return None if kv is None else etcd_keys.controller_of(kv)

    def intents(self) -> dict[str, Versioned[Intent]]:
        kvs, _ = list_keys(self._client, self._keys.intents)
        return {self._keys.short(kv.key).removeprefix("intents/"): _intent_or_none(kv) for kv in kvs}

    # Acceptance (nsqha.election.metadata_restore)

    def why_not(self) -> str:
        """Why nobody may decide by the metadata now; empty: nothing is known against it."""
        return self._looked().why_not

    def believe_accepted(self) -> bool:
        """If this etcd is doubted and an operator has accepted it since: believe it again, from the beginning.

        For a process that has no state of its own which could be ahead of the metadata: a lookup daemon."""
        if not self.doubt:
            return False
        client = EtcdClient(self._client.options)
        try:
            found = look(client, self._keys)
        finally:
            client.close()
        if found.why_not or found.accepted.record.generation <= self._generation:
            return False
        self._client.forget()
        self._watch.begin_again()
        return True

    def _looked(self) -> EtcdSnapshot:
        found = look(self._client, self._keys)
        self._generation = found.accepted.record.generation
        return found

    # Changes

    def create_topic(
        self,
        name: str,
        settings: TopicSettings,
        *,
        partitions: Mapping[int, PartitionMeta] | None = None,
        channels: ChannelList | None = None,
    ) -> Versioned[TopicRecord]:
        partitions = rules.new_partitions(name, settings, partitions)
        uid, known = new_uid(self._rng), channels or ChannelList()

        def made(cluster: ClusterRecord) -> tuple[TopicRecord, ClusterRecord]:
            record = TopicRecord(name, uid, cluster.next_salt(), settings, channels=known, partitions=partitions)
            return record, replace(cluster, salt_counter=cluster.salt_counter + 1)

        return self._add(name, uid, made)

    def put_recovered(self, record: TopicRecord) -> Versioned[TopicRecord]:
        rules.check_partitions(record)
        return self._add(record.name, record.uid, lambda cluster: (record, cluster.past_salt(record.salt)))

    def replace(
        self, name: str, expected_version: int, record: TopicRecord, *, controller: int | None = None
    ) -> Versioned[TopicRecord]:
        for _ in range(RETRIES):
            found = self._existing(name)
            old = found.topic.record
            changed = rules.changed_partitions(found.topic, expected_version, record)
            compares = [unchanged(self._keys.topic(name), expected_version), *self._led_by(controller)]
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
            answer = self._txn(compares, ops)
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
        compares = [unchanged(key, meta.version), *self._led_by(controller)]
        compares += [created(self._keys.node(node), known) for node, known in (registered or {}).items()]
        try:
            answer = self._txn(compares, [put(key, etcd_keys.partition_value(meta), keep_lease=True)], [get(key)])
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

    def fence_partition(self, name: str, uid: int, number: int, version: int) -> PartitionMeta:
        key = self._keys.partition(uid, number)
        for _ in range(RETRIES):
            kv = self._one(key)
            if kv is None:
                raise NotFound(f"there is no partition {number} of topic {name} with uid {uid:016x}")
            if kv.mod_revision != version:
                return etcd_keys.partition_meta(kv)
            try:
                answer = self._txn([unchanged(key, version)], [put(key, kv.value, keep_lease=True)])
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
            if self._txn([unchanged(key, topic.version), none_newer(partitions, found.revision)], ops).succeeded:
                return tombstone
        raise _too_many(f"topic {name}")

    def forget_tombstone(self, uid: int, *, node: int | None = None) -> None:
        key = self._keys.tombstone(uid)
        for _ in range(RETRIES):
            kv = self._one(key)
            if kv is None:
                return
            tombstone = etcd_keys.record_of(Tombstone, kv)
            left = rules.without_node(tombstone, node)
            if left == tombstone:
                return
            change = delete(key) if left is None else put(key, encode(left))
            if self._txn([unchanged(key, kv.mod_revision)], [change]).succeeded:
                return
        raise _too_many(f"the tombstone of {uid:016x}")

    def raise_epochs(self, *, leader: int | None = None) -> dict[str, Versioned[TopicRecord]]:
        waiting = [(t.record.uid, number, meta) for t in self.topics().values() for number, meta in _partitions(t)]
        parts = iter(waiting)
        while part := list(islice(parts, etcd_keys.OPS_PER_PART - 2)):
            self._raise_epochs(part, leader)
        return self.topics()

    def put_intent(
        self, name: str, intent: Intent, *, expected_version: int = 0, controller: int | None = None
    ) -> Versioned[Intent]:
        rules.check_intent_name(name)
        key = self._keys.intent(name)
        value = etcd_keys.intent_value(intent)
        answer = self._txn([unchanged(key, expected_version), *self._led_by(controller)], [put(key, value)])
        if not answer.succeeded:
            raise Conflict(f"intent {name} was changed meanwhile, or the controller's epoch is over")
        return Versioned(intent, answer.header.revision)

    def remove_intent(self, name: str, expected_version: int, *, controller: int | None = None) -> None:
        key = self._keys.intent(name)
        # An absent key has revision 0: nothing to remove is a conflict.
        if expected_version:
            compares = [unchanged(key, expected_version), *self._led_by(controller)]
            if self._txn(compares, [delete(key)]).succeeded:
                return
        raise Conflict(f"intent {name} was changed meanwhile, or the controller's epoch is over")

    # The process

    def open_session(self, *, ttl_s: float, lost: Lost) -> EtcdSession:
        if self._session is not None and not self._session.over:
            raise Conflict("this store has a session already")
        self._session = EtcdSession(
            self._client, self._keys, self._clock, ttl_s=ttl_s, lost=lost, trouble=self._trouble
        )
        return self._session

    def close(self) -> None:
        self._hints.clear()
        if self._session is not None:
            self._session.close()
        self._watch.stop()
        self._client.close()

    # How

    def _check_cluster(self, cluster_id: int, *, known: bool) -> None:
        kv = self._one(self._keys.cluster)
        if kv is None and known:
            raise ConfigError(
                f"etcd has no cluster under {self._keys.prefix}, though this node has been in one there; "
                "check the cluster's name, or put etcd's data back from a backup"
            )
        if kv is None:
            if not cluster_id and (why := look(self._client, self._keys).why_not):
                raise StaleMetadata(f"etcd has no cluster under {self._keys.prefix}, and it is not to be begun: {why}")
            record = ClusterRecord(cluster_id or new_uid(self._rng))
            begun = [put(self._keys.cluster, encode(record))]
            try:
                self._txn([created(self._keys.cluster, 0)], begun)
            except Full:
                raise
            except OutcomeUnknown:
                pass  # somebody began it, or nobody; the next read says
        cluster = self.cluster().record
        if cluster_id not in (0, cluster.cluster_id):
            raise ConfigError(
                f"{self._keys.prefix} in etcd is cluster {cluster.cluster_id:016x}, this data directory belongs to "
                f"{cluster_id:016x}; check the cluster's name and etcd's endpoints, or use another data directory"
            )
        if cluster.feature_level > FEATURE_LEVEL:
            raise ConfigError(
                f"{self._keys.prefix} in etcd needs feature level {cluster.feature_level}, this version has "
                f"{FEATURE_LEVEL}; start a newer version"
            )

    def _publish(self, view: View, names: list[str]) -> None:
        self._view = view
        for hint in tuple(self._hints):
            for name in names:
                try:
                    hint(name)
                except Exception as error:
                    # The caller's fault (a loop that is closed), which must not cost all others their hints.
                    self._trouble(f"a hint about {name or 'anything'} was not taken: {error!r}")

    def _one(self, key: bytes) -> Any:
        answer = self._client.read(lambda stubs: stubs.kv.Range, rpc.RangeRequest(key=key))
        return answer.kvs[0] if answer.kvs else None

    def _untouched(self, key: bytes, version: int) -> bool:
        """Whether a change that there was no room for has certainly not been made; whatever it was, it is over."""
        try:
            kv = self._one(key)
        except NsqhaError:
            return False
        return kv is not None and kv.mod_revision == version

    def _ranges(self, *ops: Any) -> tuple[list[Any], int]:
        """The keys of each `get`, all of one revision."""
        found, header = self._client.ranges(*(op.request_range for op in ops))
        return found, header.revision

    def _txn(self, compares: list[Any], then: list[Any], otherwise: list[Any] | None = None) -> Any:
        return self._client.change(lambda stubs: stubs.kv.Txn, txn(compares, then, otherwise or ()))

    def _find(self, name: str) -> _ReadTopic | None:
        known = self._view.topics.get(name)
        uid = 0 if known is None else known.record.uid
        for _ in range(RETRIES):
            (topics, partitions), revision = self._ranges(
                get(self._keys.topic(name)), get(self._keys.partitions_of(uid), prefix=True)
            )
            if not topics:
                return None
            topic = etcd_keys.versioned_of(TopicRecord, topics[0])
            if topic.record.uid == uid:
                metas = {number: etcd_keys.partition_meta(kv) for number, kv in self._numbered(partitions)}
                return _ReadTopic(join(topic, metas), topics[0].lease, revision)
            uid = topic.record.uid  # a guess that was late
        raise _too_many(f"topic {name}")

    def _existing(self, name: str) -> _ReadTopic:
        found = self._find(name)
        if found is None:
            raise NotFound(f"there is no topic {name}")
        return found

    def _joined(self, topics: list[Any], partitions: list[Any]) -> dict[str, Versioned[TopicRecord]]:
        metas: dict[int, dict[int, PartitionMeta]] = {}
        for kv in partitions:
            found = etcd_keys.partition_of(self._keys.short(kv.key))
            if found is not None:
                metas.setdefault(found[0], {})[found[1]] = etcd_keys.partition_meta(kv)
        records = [etcd_keys.versioned_of(TopicRecord, kv) for kv in topics]
        return {topic.record.name: join(topic, metas.get(topic.record.uid, {})) for topic in records}

    def _numbered(self, kvs: list[Any]) -> Iterator[tuple[int, Any]]:
        for kv in kvs:
            found = etcd_keys.partition_of(self._keys.short(kv.key))
            if found is not None:
                yield found[1], kv

    def _add(
        self, name: str, uid: int, made: Callable[[ClusterRecord], tuple[TopicRecord, ClusterRecord]]
    ) -> Versioned[TopicRecord]:
        """Put a new topic and what it makes of the cluster record, in one transaction."""
        lease = self._lease_for(name)
        keys = self._keys
        absent = {
            keys.topic(name): f"topic {name} exists already",
            keys.tombstone(uid): f"topic {name} with uid {uid:016x} was deleted",
            keys.partition(uid, 0): f"uid {uid:016x} belongs to another topic",
        }
        for _ in range(RETRIES):
            (clusters, *others), _ = self._ranges(get(keys.cluster), *map(get, absent))
            for found, problem in zip(others, absent.values(), strict=True):
                if found:
                    raise Conflict(problem)
            if not clusters:
                raise Unavailable(f"etcd has no key {keys.prefix}cluster any more; put it back from a backup")
            record, cluster = made(etcd_keys.record_of(ClusterRecord, clusters[0]))
            ops = [
                put(keys.cluster, encode(cluster)),
                put(keys.topic(name), etcd_keys.topic_value(record), lease=lease),
            ]
            for number, meta in record.partitions.items():
                ops.append(put(keys.partition(uid, number), etcd_keys.partition_value(meta), lease=lease))
            compares = [unchanged(keys.cluster, clusters[0].mod_revision), *(created(key, 0) for key in absent)]
            answer = self._txn(compares, ops)
            if answer.succeeded:
                revision = answer.header.revision
                metas = {number: replace(meta, version=revision) for number, meta in record.partitions.items()}
                return Versioned(replace(record, partitions=metas), revision)
        raise _too_many("the cluster record")

    def _lease_for(self, name: str) -> int:
        if not is_ephemeral(name):
            return 0
        if self._session is None or self._session.over:
            raise Unavailable(f"topic {name} would end with this process's session, and there is none now")
        return self._session.lease_id

    def _raise_epochs(self, part: list[tuple[int, int, PartitionMeta]], leader: int | None) -> None:
        keys = {self._keys.partition(uid, number): meta for uid, number, meta in part}
        for _ in range(RETRIES):
            compares = [unchanged(key, meta.version) for key, meta in keys.items()]
            ops = [
                put(key, etcd_keys.partition_value(rules.next_epoch(meta, leader)), keep_lease=True)
                for key, meta in keys.items()
            ]
            if self._txn(compares, ops).succeeded:
                return
            found, _ = self._ranges(*map(get, keys))
            # Those that are gone were deleted with their topic.
            keys = {kvs[0].key: etcd_keys.partition_meta(kvs[0]) for kvs in found if kvs}
        raise _too_many("the partitions")

    def _led_by(self, controller: int | None) -> list[Any]:
        return [] if controller is None else [created(self._keys.controller, controller)]

    def _check_controller(self, epoch: int | None) -> None:
        if epoch is None:
            return
        now = self.controller()
        if now is None or now.epoch != epoch:
            raise Conflict(f"controller epoch {epoch} is over")


def _intent_or_none(kv: Any) -> Versioned[Intent]:
    try:
        return etcd_keys.intent_of(kv)
    except (LogCorrupt, ConfigError):  # the watch reports it
        return Versioned({}, kv.mod_revision)


def _partitions(topic: Versioned[TopicRecord]) -> Iterator[tuple[int, PartitionMeta]]:
    yield from topic.record.partitions.items()


def _too_many(what: str) -> Unavailable:
    return Unavailable(f"{what} is changed by others all the time; try again")
