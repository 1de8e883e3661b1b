"""What every metadata store promises of the cluster: nodes, sessions, the controller, intents, watches, revisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.clock import SystemClock
from nsqha.election import moves
from nsqha.election.model import Controller, NodeInfo, TopicSettings
from nsqha.election.session import ClusterSession
from nsqha.election.store import MetadataStore, PartitionChange
from nsqha.errors import ConfigError, Conflict, NotFound
from tests.contract.metadata_stores import CLUSTER, EtcdOpener, Opener, changed, open_session
from tests.etcd_server import eventually


def test_the_cluster_has_one_id(store: MetadataStore, opener: Opener) -> None:
    assert store.records.cluster().record.cluster_id == CLUSTER
    assert opener().records.cluster() == store.records.cluster()


def test_each_registration_is_new_also_after_a_restart(store: MetadataStore, opener: Opener) -> None:
    session = open_session(store)
    first = session.register(NodeInfo(7, tcp_address="a:1"))
    assert first.registration
    assert store.records.nodes() == {7: first}
    session.close()
    assert store.records.nodes() == {}
    session = open_session(store)
    second = session.register(NodeInfo(7, tcp_address="b:1"))
    assert second.registration > first.registration
    assert store.records.nodes() == {7: second}
    session.close()
    third = open_session(opener()).register(NodeInfo(7))
    assert third.registration > second.registration


def test_a_node_changes_its_record_and_keeps_its_registration(store: MetadataStore, session: ClusterSession) -> None:
    with pytest.raises(NotFound):
        session.update(NodeInfo(7))
    first = session.register(NodeInfo(7, name="a"))
    changed = session.update(NodeInfo(7, name="a", poisoned="fsync failed"))
    assert changed == replace(first, poisoned="fsync failed")
    assert store.records.nodes() == {7: changed}
    with pytest.raises(NotFound):
        session.update(NodeInfo(8))
    with pytest.raises(Conflict):
        session.register(NodeInfo(7))


def test_two_live_nodes_have_not_one_name(store: MetadataStore, opener: Opener) -> None:
    if isinstance(opener, EtcdOpener):
        pytest.skip("the integration tests of etcd's sessions have it: it takes as long as leases last")
    session = open_session(store)
    session.register(NodeInfo(7, name="a", tcp_address="h:1"))
    other = opener()
    if 7 not in other.records.nodes():
        other = store  # an embedded store is of one process
    with pytest.raises(ConfigError, match="node name a is taken by node 0000000000000007 at h:1, which is alive: give"):
        open_session(other).register(NodeInfo(8, name="a"))
    assert set(store.records.nodes()) == {7}, "no other node sees one that is refused"
    session.close()
    third = opener()
    open_session(third).register(NodeInfo(9, name="a"))
    assert set(third.records.nodes()) == {9}, "one that is gone has its name no more"


def test_a_session_that_is_over_changes_nothing(store: MetadataStore, session: ClusterSession) -> None:
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


def test_a_node_joins_an_isr_only_with_the_registration_it_asked_with(
    store: MetadataStore, session: ClusterSession
) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    meta = topic.record.partitions[0]
    wanted = replace(meta, isr={7: 70, 8: 80})
    with pytest.raises(Conflict, match="registration"):
        store.records.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: 1})
    registration = session.register(NodeInfo(8)).registration
    with pytest.raises(Conflict, match="registration"):
        store.records.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: registration - 1})
    with pytest.raises(Conflict, match="registration"):
        store.records.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: registration, 9: 1})
    session.update(NodeInfo(8, zone="b"))  # still the same process
    new = store.records.replace_partition("orders", topic.record.uid, 0, wanted, registered={8: registration})
    assert new.isr == {7: 70, 8: 80}
    session.close()
    with pytest.raises(Conflict, match="registration"):
        store.records.replace_partition("orders", topic.record.uid, 0, new, registered={8: registration})


def test_many_partitions_change_with_the_registrations_each_relies_on(
    store: MetadataStore, session: ClusterSession
) -> None:
    topic = store.records.create_topic("orders", TopicSettings(partitions=14)).record
    term = session.campaign(Controller("a"))
    assert term is not None
    known = session.register(NodeInfo(8)).registration
    metas = {n: replace(meta, leader=7) for n, meta in topic.partitions.items()}
    right = [PartitionChange("orders", topic.uid, n, metas[n], {8: known}) for n in range(2)]
    wrong = [PartitionChange("orders", topic.uid, n, metas[n], {20 + n: known}) for n in range(2, 14)]
    results = store.records.replace_partitions([*right, *wrong], controller=term.epoch)
    assert [isinstance(result, Conflict) for result in results] == [False] * 2 + [True] * 12
    assert all("registration" in str(result) for result in results[2:])
    session.resign()
    rest = [PartitionChange("orders", topic.uid, n, metas[n], {8: known}) for n in range(2, 14)]
    results = store.records.replace_partitions(rest, controller=term.epoch)
    assert [type(result) for result in results] == [Conflict] * 12
    read = store.records.topic("orders")
    assert read is not None and [n for n, meta in read.record.partitions.items() if meta.leader == 7] == [0, 1]
    assert not isinstance(store.records.replace_partitions(rest)[0], Conflict), "nothing else hinders them"


def test_one_controller_at_a_time_and_each_term_has_a_higher_epoch(
    store: MetadataStore, session: ClusterSession
) -> None:
    assert store.records.controller() is None
    first = session.campaign(Controller("a", "a:1"))
    assert first is not None and first.name == "a" and first.epoch
    assert session.campaign(Controller("a", "a:1")) == first == store.records.controller()
    session.resign()
    session.resign()
    assert store.records.controller() is None
    second = session.campaign(Controller("a"))
    assert second is not None and second.epoch > first.epoch
    session.close()
    assert store.records.controller() is None


def test_a_controller_that_is_deposed_decides_nothing_more(store: MetadataStore, session: ClusterSession) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    first = session.campaign(Controller("a"))
    assert first is not None
    session.depose(replace(first, epoch=first.epoch - 1))  # an earlier term, which is over
    assert store.records.controller() == first
    session.depose(first)
    assert store.records.controller() is None
    with pytest.raises(Conflict):
        store.records.replace_partition("orders", uid, 0, replace(meta, leader=8), controller=first.epoch)
    second = session.campaign(Controller("b"))
    assert second is not None and second.epoch > first.epoch
    session.depose(first)
    assert store.records.controller() == second


def test_what_a_controller_decides_counts_only_in_its_term(store: MetadataStore, session: ClusterSession) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    term = session.campaign(Controller("a"))
    assert term is not None
    meta = store.records.replace_partition("orders", uid, 0, replace(meta, leader=7), controller=term.epoch)
    read = store.records.topic("orders")
    assert read is not None
    topic = store.records.replace("orders", read.version, changed(read, "a"), controller=term.epoch)
    intent = store.intents.put("moves/1", {"to": 8}, controller=term.epoch)
    session.resign()
    with pytest.raises(Conflict):
        store.records.replace_partition("orders", uid, 0, replace(meta, leader=8), controller=term.epoch)
    with pytest.raises(Conflict):
        store.records.replace("orders", topic.version, changed(topic, "b"), controller=term.epoch)
    with pytest.raises(Conflict):
        store.intents.put("moves/1", {}, expected_version=intent.version, controller=term.epoch)
    with pytest.raises(Conflict):
        store.intents.remove("moves/1", intent.version, controller=term.epoch)
    assert store.records.topic("orders") == topic
    assert store.intents.all() == {"moves/1": intent}


def test_intents_are_kept_and_changed_by_their_version(store: MetadataStore, opener: Opener) -> None:
    first = store.intents.put("moves/7-0", {"from": 1, "to": [2, 3], "note": {"a": None}})
    with pytest.raises(Conflict):
        store.intents.put("moves/7-0", {})
    second = store.intents.put("moves/7-0", {"to": 4}, expected_version=first.version)
    assert second.version > first.version
    assert opener().intents.all() == store.intents.all() == {"moves/7-0": second}
    for version in (first.version, 0):
        with pytest.raises(Conflict):
            store.intents.remove("moves/7-0", version)
    store.intents.remove("moves/7-0", second.version)
    with pytest.raises(Conflict):
        store.intents.remove("moves/7-0", second.version)
    assert opener().intents.all() == store.intents.all() == {}
    for name in ("", "a b", "x" * 201):
        with pytest.raises(ValueError, match="not a name for an intent"):
            store.intents.put(name, {})


def test_after_a_fence_the_version_that_it_ended_is_gone(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    fenced = store.records.fence_partition("orders", uid, 0, meta.version)
    assert replace(fenced, version=meta.version) == meta
    assert fenced.version > meta.version
    with pytest.raises(Conflict):
        store.records.replace_partition("orders", uid, 0, replace(meta, leader=7))
    # Nothing is left to fence: what is there came after.
    assert store.records.fence_partition("orders", uid, 0, meta.version) == fenced
    store.records.delete_topic("orders")
    with pytest.raises(NotFound):
        store.records.fence_partition("orders", uid, 0, fenced.version)


def test_watchers_get_the_names_of_changed_records_until_they_stop(
    store: MetadataStore, session: ClusterSession
) -> None:
    names: list[str] = []
    stop = store.watch.on_change(names.append)

    def told(name: str) -> None:
        eventually(lambda: name in names)
        names.clear()

    topic = store.records.create_topic("a", TopicSettings())
    told("topics/a")
    store.records.replace("a", topic.version, changed(topic, "c"))
    told("topics/a")
    store.records.replace_partition("a", topic.record.uid, 0, replace(topic.record.partitions[0], leader=7))
    told("topics/a")
    session.register(NodeInfo(7))
    told(f"nodes/{7:016x}")
    session.campaign(Controller("a"))
    told("controller")
    store.intents.put("move", {})
    told("intents/move")
    tombstone = store.records.delete_topic("a")
    told(f"tombstones/{tombstone.uid:016x}")
    stop()
    store.records.create_topic("a", TopicSettings())
    assert "topics/a" not in names


def test_the_view_comes_to_what_is_read(store: MetadataStore, session: ClusterSession) -> None:
    a = store.records.create_topic("a", TopicSettings(partitions=2))
    store.records.replace_partition("a", a.record.uid, 1, replace(a.record.partitions[1], leader=7))
    for name in ("b", "e#ephemeral"):
        store.records.create_topic(name, TopicSettings())
    store.records.delete_topic("b")
    store.records.create_topic("b", TopicSettings())
    node = session.register(NodeInfo(7))
    session.campaign(Controller("a"))
    for uid, name in ((7, "seven"), (8, "eight"), (9, "nine")):
        store.intents.put(moves.node_name(uid), {"node": uid, "name": name})
    store.intents.remove(moves.node_name(8), store.intents.all()[moves.node_name(8)].version)
    store.intents.put(moves.BALANCE, {"paused": True})

    def same() -> bool:
        view = store.watch.view()
        known = (view.topics, view.tombstones, view.nodes, view.controller, view.names)
        return known == (
            store.records.topics(),
            store.records.tombstones(),
            store.records.nodes(),
            store.records.controller(),
            {7: "seven", 9: "nine"},
        )

    eventually(same)
    view = store.watch.view()
    assert (view.leader("a", 1), view.leader("a", 0), view.leader("c", 0)) == (node, None, None)
    assert view.revision <= store.records.revision
    session.close()
    store.records.delete_topic("a")
    eventually(same)
    assert view.leader("a", 1) == node, "a view does not change"


def test_the_revision_rises_with_every_change_and_never_falls(store: MetadataStore, opener: Opener) -> None:
    seen = [store.records.revision]
    topic = store.records.create_topic("a", TopicSettings())
    seen.append(store.records.revision)
    store.records.replace("a", topic.version, changed(topic, "c"))
    seen.append(store.records.revision)
    store.records.create_topic("b#ephemeral", TopicSettings())
    seen.append(store.records.revision)
    store.records.raise_epochs()
    seen.append(store.records.revision)
    assert seen == sorted(set(seen))
    assert opener().records.revision == store.records.revision
