"""What every metadata store promises: one suite over the one in memory, the embedded one and etcd's.

An implementation joins by adding an `Opener`: something that opens the store again as a restarted process would.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsqha.clock import SystemClock
from nsqha.commitlog.storage import MemStorage, OsStorage
from nsqha.election import moves
from nsqha.election.embedded import EmbeddedStore
from nsqha.election.etcd import EtcdStore
from nsqha.election.etcd_client import EtcdOptions
from nsqha.election.model import (
    ChannelInfo,
    ChannelList,
    Controller,
    NodeInfo,
    PartitionMeta,
    Tombstone,
    TopicRecord,
    TopicSettings,
    Versioned,
)
from nsqha.election.session import Session
from nsqha.election.store import MemoryStore, MetadataStore
from nsqha.errors import Conflict, NotFound
from tests.etcd_server import EtcdServer, eventually

Opener = Callable[[], MetadataStore]

CLUSTER = 0x1234_5678_9ABC_DEF0


def in_memory() -> Opener:
    store = MemoryStore(random.Random(1), cluster_id=CLUSTER)
    return lambda: store


def embedded_in_memory() -> Opener:
    storage = MemStorage()
    storage.make_dirs("d")
    rng = random.Random(1)
    return lambda: EmbeddedStore(storage, "d/metadata", rng, cluster_id=CLUSTER)


def embedded_on_disk(folder: Path) -> Opener:
    rng = random.Random(1)
    return lambda: EmbeddedStore(OsStorage(), f"{folder}/metadata", rng, cluster_id=CLUSTER)


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer.running(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class EtcdOpener:
    """Each one is a cluster of its own."""

    def __init__(self, server: EtcdServer) -> None:
        self._options = EtcdOptions((server.endpoint,))
        self._name = uuid.uuid4().hex
        self._opened: list[EtcdStore] = []

    def __call__(self) -> MetadataStore:
        store = EtcdStore(self._options, self._name, SystemClock(), random.Random(), cluster_id=CLUSTER)
        self._opened.append(store)
        store.open_session(ttl_s=60, lost=lambda: None)  # ephemeral topics hang on it
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture(params=["memory", "embedded", "embedded on disk", "etcd"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    match request.param:
        case "memory":
            yield in_memory()
        case "embedded":
            yield embedded_in_memory()
        case "embedded on disk":
            yield embedded_on_disk(tmp_path)
        case _:
            opener = EtcdOpener(request.getfixturevalue("etcd"))
            yield opener
            opener.close()


@pytest.fixture
def store(opener: Opener) -> Iterator[MetadataStore]:
    store = opener()
    yield store
    store.close()


def changed(topic: Versioned[TopicRecord], channel: str, uid: int = 5) -> TopicRecord:
    return replace(topic.record, channels=topic.record.channels.with_channel(channel, uid))


# Topics


def test_a_topic_may_be_made_with_channels(opener: Opener) -> None:
    channels = ChannelList().with_channel("archive", 5)
    made = opener().create_topic("orders", TopicSettings(), channels=channels)
    assert made.record.channels == channels
    again = opener().topic("orders")
    assert again is not None and again.record.channels == channels


def test_a_new_topic_has_a_uid_a_salt_and_partitions_that_wait_for_a_leader(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings(partitions=3, sync="interval"))
    assert topic.record.uid
    assert topic.record.settings == TopicSettings(partitions=3, sync="interval")
    assert topic.record.channels == ChannelList()
    assert sorted(topic.record.partitions) == [0, 1, 2]
    assert all((meta.leader, meta.epoch) == (0, 1) for meta in topic.record.partitions.values())
    assert store.topic("orders") == topic
    assert store.topics() == {"orders": topic}


def test_a_topic_can_be_created_with_its_leaders(store: MetadataStore) -> None:
    wanted = {n: PartitionMeta().led_by(7, log_uid=70 + n) for n in range(2)}
    topic = store.create_topic("orders", TopicSettings(partitions=2), partitions=wanted)
    assert {n: replace(m, version=0) for n, m in topic.record.partitions.items()} == wanted
    with pytest.raises(ValueError, match="say 2 partitions, given are"):
        store.create_topic("other", TopicSettings(partitions=2), partitions={0: PartitionMeta()})


def test_a_name_is_taken_once(store: MetadataStore) -> None:
    store.create_topic("orders", TopicSettings())
    with pytest.raises(Conflict):
        store.create_topic("orders", TopicSettings())
    assert store.cluster().record.salt_counter == 1


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/../b", "a#other"])
def test_a_bad_name_is_refused(store: MetadataStore, name: str) -> None:
    with pytest.raises(ValueError, match="not a topic name"):
        store.create_topic(name, TopicSettings())


def test_uids_and_salts_are_never_given_twice(store: MetadataStore, opener: Opener) -> None:
    seen = set()
    for n in range(20):
        topic = store.create_topic("orders", TopicSettings()).record
        seen |= {("uid", topic.uid), ("salt", topic.salt)}
        store.forget_tombstone(store.delete_topic("orders").uid)
        if n % 7 == 0:
            store = opener()
    assert len(seen) == 40


def test_a_change_needs_the_version_that_was_read(store: MetadataStore) -> None:
    first = store.create_topic("orders", TopicSettings())
    second = store.replace("orders", first.version, changed(first, "a"))
    assert second.version > first.version
    with pytest.raises(Conflict):
        store.replace("orders", first.version, changed(first, "b"))
    assert store.topic("orders") == second
    assert second.record.channels == ChannelList(1, False, {"a": ChannelInfo(5)})


def test_what_does_not_exist_can_not_be_changed(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings())
    store.delete_topic("orders")
    with pytest.raises(NotFound):
        store.replace("orders", topic.version, topic.record)
    with pytest.raises(NotFound):
        store.replace_partition("orders", topic.record.uid, 0, topic.record.partitions[0])
    with pytest.raises(NotFound):
        store.delete_topic("orders")
    assert store.topic("orders") is None


def test_a_topic_keeps_its_name_uid_and_salt(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings())
    for other in (
        replace(topic.record, name="other"),
        replace(topic.record, uid=topic.record.uid ^ 1),
        replace(topic.record, salt=topic.record.salt ^ 1),
    ):
        with pytest.raises(ValueError, match="can not be changed"):
            store.replace("orders", topic.version, other)


def test_partitions_are_added_and_never_taken_away(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings(partitions=2))
    more = replace(
        topic.record,
        settings=replace(topic.record.settings, partitions=3),
        partitions={**topic.record.partitions, 2: PartitionMeta()},
    )
    topic = store.replace("orders", topic.version, more)
    assert sorted(topic.record.partitions) == [0, 1, 2]
    fewer = replace(topic.record, settings=TopicSettings(), partitions={0: topic.record.partitions[0]})
    with pytest.raises(ValueError, match="can not be taken away"):
        store.replace("orders", topic.version, fewer)
    with pytest.raises(ValueError, match="settings for 3 partitions"):
        store.replace(
            "orders", topic.version, replace(topic.record, partitions={**more.partitions, 3: PartitionMeta()})
        )


# Partitions


def test_a_partition_is_changed_without_disturbing_the_topic(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings(partitions=2))
    meta = topic.record.partitions[1]
    new = store.replace_partition("orders", topic.record.uid, 1, replace(meta, leader=7, isr={7: 70}))
    assert new.version > meta.version
    with pytest.raises(Conflict):
        store.replace_partition("orders", topic.record.uid, 1, replace(meta, leader=8))
    # The channel list was read before, and is changed after, the partition.
    after = store.replace("orders", topic.version, changed(store.topic("orders") or topic, "a"))
    assert after.record.partitions == {0: topic.record.partitions[0], 1: new}


def test_a_topic_is_not_changed_with_an_old_view_of_a_partition(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings())
    store.replace_partition("orders", topic.record.uid, 0, replace(topic.record.partitions[0], leader=7))
    with pytest.raises(Conflict):
        store.replace("orders", topic.version, changed(topic, "a"))


def test_a_partition_of_another_life_of_the_topic_is_not_changed(store: MetadataStore) -> None:
    old = store.create_topic("orders", TopicSettings()).record
    store.delete_topic("orders")
    store.create_topic("orders", TopicSettings())
    with pytest.raises(NotFound):
        store.replace_partition("orders", old.uid, 0, old.partitions[0])


def test_all_epochs_are_raised_at_once(store: MetadataStore, opener: Opener) -> None:
    a = store.create_topic("a", TopicSettings(partitions=2))
    store.create_topic("b", TopicSettings())
    for number, meta in a.record.partitions.items():
        store.replace_partition("a", a.record.uid, number, replace(meta, leader=7, isr={7: 70, 8: 80}, epoch=5))
    before = store.revision
    raised = store.raise_epochs(leader=7)
    assert store.revision > before
    assert raised == store.topics() == opener().topics()
    partitions = raised["a"].record.partitions
    assert [(m.epoch, m.leader, m.isr, m.replicas) for m in partitions.values()] == [(6, 7, {7: 70}, (7,))] * 2
    assert raised["b"].record.partitions[0].epoch == 2
    with pytest.raises(Conflict):
        store.replace_partition("a", a.record.uid, 1, replace(partitions[1], version=before))
    assert store.replace("a", a.version, changed(raised["a"], "c")).record.partitions == partitions


# Deletion


def test_a_deleted_topic_leaves_a_tombstone_until_its_files_are_gone(store: MetadataStore, opener: Opener) -> None:
    metas = {n: replace(PartitionMeta().led_by(7 + n), replicas=(7 + n, 7)) for n in range(2)}
    uid = store.create_topic("orders", TopicSettings(partitions=2), partitions=metas).record.uid
    tombstone = store.delete_topic("orders")
    assert tombstone == Tombstone("orders", uid, 2, (7, 8))
    again = store.create_topic("orders", TopicSettings())
    assert again.record.uid != uid
    assert opener().tombstones() == store.tombstones() == {uid: tombstone}
    store.forget_tombstone(uid)
    store.forget_tombstone(uid)
    assert opener().tombstones() == store.tombstones() == {}
    assert store.topic("orders") == again


def test_a_tombstone_goes_when_no_node_has_files_any_more(store: MetadataStore, opener: Opener) -> None:
    metas = {0: PartitionMeta(replicas=(1, 2)), 1: PartitionMeta(replicas=(2, 3))}
    uid = store.create_topic("orders", TopicSettings(partitions=2), partitions=metas).record.uid
    assert store.delete_topic("orders").nodes == (1, 2, 3)
    for node, left in ((2, (1, 3)), (9, (1, 3)), (2, (1, 3)), (3, (1,))):
        store.forget_tombstone(uid, node=node)
        assert opener().tombstones()[uid].nodes == store.tombstones()[uid].nodes == left
    store.forget_tombstone(uid, node=1)
    store.forget_tombstone(uid, node=1)
    assert opener().tombstones() == store.tombstones() == {}


def test_a_deletion_can_name_the_version_it_read(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings())
    newer = store.replace("orders", topic.version, changed(topic, "a"))
    with pytest.raises(Conflict):
        store.delete_topic("orders", expected_version=topic.version)
    store.delete_topic("orders", expected_version=newer.version)


# Rebuild and import


def test_a_recovered_topic_keeps_uid_and_salt_and_its_salt_is_not_given_again(store: MetadataStore) -> None:
    lost = MemoryStore(random.Random(2), cluster_id=CLUSTER)
    records = [lost.create_topic(f"t{n}", TopicSettings()).record for n in range(5)]
    recovered = replace(records[3], channels=records[3].channels.with_channel("a", 9).above(40))
    assert store.put_recovered(recovered).record == replace(
        recovered, partitions={0: replace(recovered.partitions[0], version=store.revision)}
    )
    assert store.topics()["t3"].record.channels.version == 41
    new = [store.create_topic(f"n{n}", TopicSettings()).record.salt for n in range(5)]
    assert not set(new) & {record.salt for record in records[:4]}


def test_a_recovered_topic_takes_no_name_and_no_uid_and_does_not_come_back_from_the_dead(store: MetadataStore) -> None:
    old = store.create_topic("orders", TopicSettings()).record
    with pytest.raises(Conflict, match="exists already"):
        store.put_recovered(replace(old, uid=99))
    with pytest.raises(Conflict, match="belongs to another"):
        store.put_recovered(replace(old, name="copy"))
    store.delete_topic("orders")
    with pytest.raises(Conflict, match="was deleted"):
        store.put_recovered(old)


# The cluster, nodes, hints


def test_the_cluster_has_one_id_and_a_feature_level_that_never_falls(store: MetadataStore, opener: Opener) -> None:
    assert store.cluster().record.cluster_id == CLUSTER
    level = store.cluster().record.feature_level
    assert store.raise_feature_level(level).record.feature_level == level
    assert opener().cluster() == store.cluster()


@pytest.fixture
def session(store: MetadataStore) -> Session:
    return open_session(store)


def open_session(store: MetadataStore) -> Session:
    if isinstance(store, EtcdStore):
        # One per process; the opener has made it.
        assert store._session is not None
        if not store._session.over:
            return store._session
    return store.open_session(ttl_s=60, lost=lambda: None)


def test_each_registration_is_new_also_after_a_restart(store: MetadataStore, opener: Opener) -> None:
    session = open_session(store)
    first = session.register(NodeInfo(7, tcp_address="a:1"))
    assert first.registration
    assert store.nodes() == {7: first}
    session.close()
    assert store.nodes() == {}
    session = open_session(store)
    second = session.register(NodeInfo(7, tcp_address="b:1"))
    assert second.registration > first.registration
    assert store.nodes() == {7: second}
    session.close()
    third = open_session(opener()).register(NodeInfo(7))
    assert third.registration > second.registration


def test_a_node_changes_its_record_and_keeps_its_registration(store: MetadataStore, session: Session) -> None:
    with pytest.raises(NotFound):
        session.update(NodeInfo(7))
    first = session.register(NodeInfo(7, name="a"))
    changed = session.update(NodeInfo(7, name="a", poisoned="fsync failed"))
    assert changed == replace(first, poisoned="fsync failed")
    assert store.nodes() == {7: changed}
    with pytest.raises(NotFound):
        session.update(NodeInfo(8))
    with pytest.raises(Conflict):
        session.register(NodeInfo(7))


def test_a_session_that_is_over_changes_nothing(store: MetadataStore, session: Session) -> None:
    session.register(NodeInfo(7))
    assert session.fresh(SystemClock().monotonic())
    session.close()
    assert not session.fresh(SystemClock().monotonic())
    with pytest.raises(NotFound):
        session.update(NodeInfo(7))
    with pytest.raises(NotFound):
        session.register(NodeInfo(7))
    with pytest.raises(NotFound):
        session.campaign(Controller("a"))


def test_a_node_joins_an_isr_only_with_the_registration_it_asked_with(store: MetadataStore, session: Session) -> None:
    topic = store.create_topic("orders", TopicSettings())
    meta = topic.record.partitions[0]
    wanted = replace(meta, isr={7: 70, 8: 80})
    with pytest.raises(Conflict, match="registration"):
        store.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: 1})
    registration = session.register(NodeInfo(8)).registration
    with pytest.raises(Conflict, match="registration"):
        store.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: registration - 1})
    with pytest.raises(Conflict, match="registration"):
        store.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: registration, 9: 1})
    session.update(NodeInfo(8, zone="b"))  # still the same process
    new = store.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: registration})
    assert new.isr == {7: 70, 8: 80}
    session.close()
    with pytest.raises(Conflict, match="registration"):
        store.replace_partition("orders", topic.record.uid, 0, new, registered={8: registration})


def test_one_controller_at_a_time_and_each_term_has_a_higher_epoch(store: MetadataStore, session: Session) -> None:
    assert store.controller() is None
    first = session.campaign(Controller("a", "a:1"))
    assert first is not None and first.name == "a" and first.epoch
    assert session.campaign(Controller("a", "a:1")) == first == store.controller()
    session.resign()
    session.resign()
    assert store.controller() is None
    second = session.campaign(Controller("a"))
    assert second is not None and second.epoch > first.epoch
    session.close()
    assert store.controller() is None


def test_a_controller_that_is_deposed_decides_nothing_more(store: MetadataStore, session: Session) -> None:
    topic = store.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    first = session.campaign(Controller("a"))
    assert first is not None
    session.depose(replace(first, epoch=first.epoch - 1))  # an earlier term, which is over
    assert store.controller() == first
    session.depose(first)
    assert store.controller() is None
    with pytest.raises(Conflict):
        store.replace_partition("orders", uid, 0, replace(meta, leader=8), controller=first.epoch)
    second = session.campaign(Controller("b"))
    assert second is not None and second.epoch > first.epoch
    session.depose(first)
    assert store.controller() == second


def test_what_a_controller_decides_counts_only_in_its_term(store: MetadataStore, session: Session) -> None:
    topic = store.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    term = session.campaign(Controller("a"))
    assert term is not None
    meta = store.replace_partition("orders", uid, 0, replace(meta, leader=7), controller=term.epoch)
    read = store.topic("orders")
    assert read is not None
    topic = store.replace("orders", read.version, changed(read, "a"), controller=term.epoch)
    intent = store.put_intent("moves/1", {"to": 8}, controller=term.epoch)
    session.resign()
    with pytest.raises(Conflict):
        store.replace_partition("orders", uid, 0, replace(meta, leader=8), controller=term.epoch)
    with pytest.raises(Conflict):
        store.replace("orders", topic.version, changed(topic, "b"), controller=term.epoch)
    with pytest.raises(Conflict):
        store.put_intent("moves/1", {}, expected_version=intent.version, controller=term.epoch)
    with pytest.raises(Conflict):
        store.remove_intent("moves/1", intent.version, controller=term.epoch)
    assert store.topic("orders") == topic
    assert store.intents() == {"moves/1": intent}


def test_intents_are_kept_and_changed_by_their_version(store: MetadataStore, opener: Opener) -> None:
    first = store.put_intent("moves/7-0", {"from": 1, "to": [2, 3], "note": {"a": None}})
    with pytest.raises(Conflict):
        store.put_intent("moves/7-0", {})
    second = store.put_intent("moves/7-0", {"to": 4}, expected_version=first.version)
    assert second.version > first.version
    assert opener().intents() == store.intents() == {"moves/7-0": second}
    for version in (first.version, 0):
        with pytest.raises(Conflict):
            store.remove_intent("moves/7-0", version)
    store.remove_intent("moves/7-0", second.version)
    with pytest.raises(Conflict):
        store.remove_intent("moves/7-0", second.version)
    assert opener().intents() == store.intents() == {}
    for name in ("", "a b", "x" * 201):
        with pytest.raises(ValueError, match="not a name for an intent"):
            store.put_intent(name, {})


def test_after_a_fence_the_version_that_it_ended_is_gone(store: MetadataStore) -> None:
    topic = store.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    fenced = store.fence_partition("orders", uid, 0, meta.version)
    assert replace(fenced, version=meta.version) == meta
    assert fenced.version > meta.version
    with pytest.raises(Conflict):
        store.replace_partition("orders", uid, 0, replace(meta, leader=7))
    # Nothing is left to fence: what is there came after.
    assert store.fence_partition("orders", uid, 0, meta.version) == fenced
    store.delete_topic("orders")
    with pytest.raises(NotFound):
        store.fence_partition("orders", uid, 0, fenced.version)


def test_watchers_get_the_names_of_changed_records_until_they_stop(store: MetadataStore, session: Session) -> None:
    names: list[str] = []
    stop = store.watch(names.append)

    def told(name: str) -> None:
        eventually(lambda: name in names)
        names.clear()

    topic = store.create_topic("a", TopicSettings())
    told("topics/a")
    store.replace("a", topic.version, changed(topic, "c"))
    told("topics/a")
    store.replace_partition("a", topic.record.uid, 0, replace(topic.record.partitions[0], leader=7))
    told("topics/a")
    session.register(NodeInfo(7))
    told(f"nodes/{7:016x}")
    session.campaign(Controller("a"))
    told("controller")
    store.put_intent("move", {})
    told("intents/move")
    tombstone = store.delete_topic("a")
    told(f"tombstones/{tombstone.uid:016x}")
    stop()
    store.create_topic("a", TopicSettings())
    assert "topics/a" not in names


def test_the_view_comes_to_what_is_read(store: MetadataStore, session: Session) -> None:
    a = store.create_topic("a", TopicSettings(partitions=2))
    store.replace_partition("a", a.record.uid, 1, replace(a.record.partitions[1], leader=7))
    for name in ("b", "e#ephemeral"):
        store.create_topic(name, TopicSettings())
    store.delete_topic("b")
    store.create_topic("b", TopicSettings())
    node = session.register(NodeInfo(7))
    session.campaign(Controller("a"))
    for uid, name in ((7, "seven"), (8, "eight"), (9, "nine")):
        store.put_intent(moves.node_name(uid), {"node": uid, "name": name})
    store.remove_intent(moves.node_name(8), store.intents()[moves.node_name(8)].version)
    store.put_intent(moves.BALANCE, {"paused": True})

    def same() -> bool:
        view = store.view()
        known = (view.topics, view.tombstones, view.nodes, view.controller, view.names)
        return known == (store.topics(), store.tombstones(), store.nodes(), store.controller(), {7: "seven", 9: "nine"})

    eventually(same)
    view = store.view()
    assert (view.leader("a", 1), view.leader("a", 0), view.leader("c", 0)) == (node, None, None)
    assert view.revision <= store.revision
    session.close()
    store.delete_topic("a")
    eventually(same)
    assert view.leader("a", 1) == node, "a view does not change"


def test_the_revision_rises_with_every_change_and_never_falls(store: MetadataStore, opener: Opener) -> None:
    seen = [store.revision]
    topic = store.create_topic("a", TopicSettings())
    seen.append(store.revision)
    store.replace("a", topic.version, changed(topic, "c"))
    seen.append(store.revision)
    store.create_topic("b#ephemeral", TopicSettings())
    seen.append(store.revision)
    store.raise_epochs()
    seen.append(store.revision)
    assert seen == sorted(set(seen))
    assert opener().revision == store.revision


# Random histories against a plain model, with restarts

NAMES = ["a", "b", "c", "e#ephemeral"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "delete", "channel", "stale", "pause", "leader", "epochs", "forget", "restart"]),
        st.sampled_from(NAMES),
        st.integers(0, 3),
    ),
    max_size=30,
)


@pytest.mark.parametrize("make", [in_memory, embedded_in_memory])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_random_histories(make: Callable[[], Opener], steps: list[tuple[str, str, int]]) -> None:
    run_history(make(), steps)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_random_histories_in_etcd(etcd: EtcdServer, steps: list[tuple[str, str, int]]) -> None:
    opener = EtcdOpener(etcd)
    try:
        run_history(opener, steps)
    finally:
        opener.close()


def run_history(open_store: Opener, steps: list[tuple[str, str, int]]) -> None:
    store = open_store()
    channels: dict[str, dict[str, bool]] = {}
    epochs: dict[str, int] = {}
    leaders: dict[str, int] = {}
    buried: set[str] = set()
    for action, name, n in steps:
        topic = store.topic(name)
        assert (topic is not None) == (name in channels)
        match action:
            case "create" if topic is None:
                store.create_topic(name, TopicSettings())
                channels[name], epochs[name], leaders[name] = {}, 1, 0
            case "delete" if topic is not None:
                store.delete_topic(name)
                del channels[name]
                if not name.endswith("#ephemeral"):
                    buried.add(name)
            case "channel" if topic is not None and f"c{n}" not in channels[name]:
                store.replace(name, topic.version, changed(topic, f"c{n}"))
                channels[name][f"c{n}"] = False
            case "stale" if topic is not None:
                with pytest.raises(Conflict):
                    store.replace(name, topic.version - 1, topic.record)
            case "pause" if topic is not None and f"c{n}" in channels[name]:
                paused = topic.record.channels.with_channel_paused(f"c{n}", True)
                store.replace(name, topic.version, replace(topic.record, channels=paused))
                channels[name][f"c{n}"] = True
            case "leader" if topic is not None:
                meta = replace(topic.record.partitions[0], leader=n)
                store.replace_partition(name, topic.record.uid, 0, meta)
                leaders[name] = n
            case "epochs":
                store.raise_epochs()
                epochs = {known: epoch + 1 for known, epoch in epochs.items()}
            case "forget":
                for uid, tombstone in store.tombstones().items():
                    if tombstone.name == name:
                        store.forget_tombstone(uid)
                buried.discard(name)
            case "restart":
                before = store
                store.close()
                store = open_store()
                if store is not before:
                    channels.pop("e#ephemeral", None)
    got = {
        name: (
            {c: info.paused for c, info in topic.record.channels.channels.items()},
            topic.record.partitions[0].epoch,
            topic.record.partitions[0].leader,
        )
        for name, topic in store.topics().items()
    }
    assert got == {name: (channels[name], epochs[name], leaders[name]) for name in channels}
    assert {tombstone.name for tombstone in store.tombstones().values()} == buried
