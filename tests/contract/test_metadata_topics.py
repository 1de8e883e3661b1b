"""What every metadata store promises of topics: names, uids, versions, partitions, tombstones."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from nsqha.election.memory import MemoryRecords, MemoryStore
from nsqha.election.model import (
    ChannelInfo,
    ChannelList,
    PartitionMeta,
    Tombstone,
    TopicRecord,
    TopicSettings,
    Versioned,
)
from nsqha.election.store import MetadataStore, PartitionChange
from nsqha.errors import Conflict, NotFound
from tests.contract.metadata_stores import CLUSTER, Opener, changed
from tests.etcd_server import eventually


def test_a_topic_may_be_made_with_channels(opener: Opener) -> None:
    channels = ChannelList().with_channel("archive", 5)
    made = opener().records.create_topic("orders", TopicSettings(), channels=channels)
    assert made.record.channels == channels
    again = opener().records.topic("orders")
    assert again is not None and again.record.channels == channels


def test_a_new_topic_has_a_uid_a_salt_and_partitions_that_wait_for_a_leader(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings(partitions=3, sync="interval"))
    assert topic.record.uid
    assert topic.record.settings == TopicSettings(partitions=3, sync="interval")
    assert topic.record.channels == ChannelList()
    assert sorted(topic.record.partitions) == [0, 1, 2]
    assert all((meta.leader, meta.epoch) == (0, 1) for meta in topic.record.partitions.values())
    assert store.records.topic("orders") == topic
    assert store.records.topics() == {"orders": topic}


def test_a_topic_can_be_created_with_its_leaders(store: MetadataStore) -> None:
    wanted = {n: PartitionMeta().led_by(7, log_uid=70 + n) for n in range(2)}
    topic = store.records.create_topic("orders", TopicSettings(partitions=2), partitions=wanted)
    assert {n: replace(m, version=0) for n, m in topic.record.partitions.items()} == wanted
    with pytest.raises(ValueError, match="say 2 partitions, given are"):
        store.records.create_topic("other", TopicSettings(partitions=2), partitions={0: PartitionMeta()})


def test_a_name_is_taken_once(store: MetadataStore) -> None:
    store.records.create_topic("orders", TopicSettings())
    with pytest.raises(Conflict):
        store.records.create_topic("orders", TopicSettings())
    assert store.records.cluster().record.salt_counter == 1


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/../b", "a#other"])
def test_a_bad_name_is_refused(store: MetadataStore, name: str) -> None:
    with pytest.raises(ValueError, match="not a topic name"):
        store.records.create_topic(name, TopicSettings())


def test_uids_and_salts_are_never_given_twice(store: MetadataStore, opener: Opener) -> None:
    seen = set()
    for n in range(20):
        topic = store.records.create_topic("orders", TopicSettings()).record
        seen |= {("uid", topic.uid), ("salt", topic.salt)}
        store.records.forget_tombstone(store.records.delete_topic("orders").uid)
        if n % 7 == 0:
            store = opener()
    assert len(seen) == 40


def test_a_change_needs_the_version_that_was_read(store: MetadataStore) -> None:
    first = store.records.create_topic("orders", TopicSettings())
    second = store.records.replace("orders", first.version, changed(first, "a"))
    assert second.version > first.version
    with pytest.raises(Conflict):
        store.records.replace("orders", first.version, changed(first, "b"))
    assert store.records.topic("orders") == second
    assert second.record.channels == ChannelList(1, False, {"a": ChannelInfo(5)})


def test_what_does_not_exist_can_not_be_changed(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    store.records.delete_topic("orders")
    with pytest.raises(NotFound):
        store.records.replace("orders", topic.version, topic.record)
    with pytest.raises(NotFound):
        store.records.replace_partition("orders", topic.record.uid, 0, topic.record.partitions[0])
    with pytest.raises(NotFound):
        store.records.delete_topic("orders")
    assert store.records.topic("orders") is None


def test_a_topic_keeps_its_name_uid_and_salt(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    for other in (
        replace(topic.record, name="other"),
        replace(topic.record, uid=topic.record.uid ^ 1),
        replace(topic.record, salt=topic.record.salt ^ 1),
    ):
        with pytest.raises(ValueError, match="cannot be changed"):
            store.records.replace("orders", topic.version, other)


def test_partitions_are_added_and_never_taken_away(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings(partitions=2))
    more = replace(
        topic.record,
        settings=replace(topic.record.settings, partitions=3),
        partitions={**topic.record.partitions, 2: PartitionMeta()},
    )
    topic = store.records.replace("orders", topic.version, more)
    assert sorted(topic.record.partitions) == [0, 1, 2]
    fewer = replace(topic.record, settings=TopicSettings(), partitions={0: topic.record.partitions[0]})
    with pytest.raises(ValueError, match="cannot be taken away"):
        store.records.replace("orders", topic.version, fewer)
    with pytest.raises(ValueError, match="settings for 3 partitions"):
        store.records.replace(
            "orders", topic.version, replace(topic.record, partitions={**more.partitions, 3: PartitionMeta()})
        )


def test_topics_that_many_threads_create_at_once_are_all_made(store: MetadataStore, opener: Opener) -> None:
    if isinstance(store.records, MemoryRecords):
        pytest.skip("used by one thread at a time")
    names = [f"t{number % 60}" for number in range(64)]  # four are wanted twice
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(partial(created, store, partitions=3), names))
        big = list(threads.map(partial(created, store, partitions=100), ["big1", "big2", "big1"]))
    refused = [name for name, topic in zip(names, made, strict=True) if topic is None]
    assert sorted(refused) == ["t0", "t1", "t2", "t3"] and big.count(None) == 1
    topics = opener().records.topics()
    assert {topic.record.name: topic for topic in [*made, *big] if topic is not None} == topics
    assert len({topic.record.salt for topic in topics.values()}) == len({t.record.uid for t in topics.values()}) == 62


def created(store: MetadataStore, name: str, partitions: int) -> Versioned[TopicRecord] | None:
    try:
        return store.records.create_topic(name, TopicSettings(partitions=partitions))
    except Conflict as error:
        assert "exists" in str(error)
        return None


def test_a_partition_is_changed_without_disturbing_the_topic(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings(partitions=2))
    meta = topic.record.partitions[1]
    new = store.records.replace_partition("orders", topic.record.uid, 1, replace(meta, leader=7, isr={7: 70}))
    assert new.version > meta.version
    with pytest.raises(Conflict):
        store.records.replace_partition("orders", topic.record.uid, 1, replace(meta, leader=8))
    # The channel list was read before, and is changed after, the partition.
    after = store.records.replace("orders", topic.version, changed(store.records.topic("orders") or topic, "a"))
    assert after.record.partitions == {0: topic.record.partitions[0], 1: new}


def test_one_conflict_among_many_partitions_holds_up_no_other(store: MetadataStore, opener: Opener) -> None:
    topics = [store.records.create_topic(f"t{n}", TopicSettings(partitions=40)).record for n in range(3)]
    late = topics[1].partitions[7]
    other = store.records.replace_partition("t1", topics[1].uid, 7, replace(late, leader=9))
    changes = [
        PartitionChange(topic.name, topic.uid, number, replace(meta, leader=7))
        for topic in topics
        for number, meta in topic.partitions.items()
    ]
    gone = PartitionChange("t2", topics[2].uid, 99, replace(late, leader=7))
    results = store.records.replace_partitions([*changes, gone])
    assert len(results) == 121
    assert isinstance(results[47], Conflict) and isinstance(results[120], NotFound)
    read = {name: topic.record.partitions for name, topic in opener().records.topics().items()}
    assert read["t1"][7] == other
    for index, (change, result) in enumerate(zip(changes, results, strict=False)):
        if index != 47:
            assert result == read[change.name][change.number]
            assert result == replace(change.meta, version=result.version) and result.version > change.meta.version
    assert [type(again) for again in store.records.replace_partitions(changes)] == [Conflict] * 120


def test_a_topic_is_not_changed_with_an_old_view_of_a_partition(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    store.records.replace_partition("orders", topic.record.uid, 0, replace(topic.record.partitions[0], leader=7))
    with pytest.raises(Conflict):
        store.records.replace("orders", topic.version, changed(topic, "a"))


def test_a_partition_of_another_life_of_the_topic_is_not_changed(store: MetadataStore) -> None:
    old = store.records.create_topic("orders", TopicSettings()).record
    store.records.delete_topic("orders")
    store.records.create_topic("orders", TopicSettings())
    with pytest.raises(NotFound):
        store.records.replace_partition("orders", old.uid, 0, old.partitions[0])


def test_all_epochs_are_raised_at_once(store: MetadataStore, opener: Opener) -> None:
    a = store.records.create_topic("a", TopicSettings(partitions=2))
    store.records.create_topic("b", TopicSettings())
    for number, meta in a.record.partitions.items():
        store.records.replace_partition("a", a.record.uid, number, replace(meta, leader=7, isr={7: 70, 8: 80}, epoch=5))
    before = store.records.revision
    raised = store.records.raise_epochs(leader=7)
    assert store.records.revision > before
    assert raised == store.records.topics() == opener().records.topics()
    partitions = raised["a"].record.partitions
    assert [(m.epoch, m.leader, m.isr, m.replicas) for m in partitions.values()] == [(6, 7, {7: 70}, (7,))] * 2
    assert raised["b"].record.partitions[0].epoch == 2
    with pytest.raises(Conflict):
        store.records.replace_partition("a", a.record.uid, 1, replace(partitions[1], version=before))
    assert store.records.replace("a", a.version, changed(raised["a"], "c")).record.partitions == partitions


def test_a_deleted_topic_leaves_a_tombstone_until_its_files_are_gone(store: MetadataStore, opener: Opener) -> None:
    metas = {n: replace(PartitionMeta().led_by(7 + n), replicas=(7 + n, 7)) for n in range(2)}
    uid = store.records.create_topic("orders", TopicSettings(partitions=2), partitions=metas).record.uid
    tombstone = store.records.delete_topic("orders")
    assert tombstone == Tombstone("orders", uid, 2, (7, 8))
    again = store.records.create_topic("orders", TopicSettings())
    assert again.record.uid != uid
    assert opener().records.tombstones() == store.records.tombstones() == {uid: tombstone}
    store.records.forget_tombstone(uid)
    store.records.forget_tombstone(uid)
    assert opener().records.tombstones() == store.records.tombstones() == {}
    assert store.records.topic("orders") == again


def test_a_tombstone_goes_when_no_node_has_files_any_more(store: MetadataStore, opener: Opener) -> None:
    metas = {0: PartitionMeta(replicas=(1, 2)), 1: PartitionMeta(replicas=(2,), moved_from=(3,))}
    uid = store.records.create_topic("orders", TopicSettings(partitions=2), partitions=metas).record.uid
    assert store.records.delete_topic("orders").nodes == (1, 2, 3)
    for node, left in ((2, (1, 3)), (9, (1, 3)), (2, (1, 3)), (3, (1,))):
        store.records.forget_tombstone(uid, node=node)
        assert opener().records.tombstones()[uid].nodes == store.records.tombstones()[uid].nodes == left
    store.records.forget_tombstone(uid, node=1)
    store.records.forget_tombstone(uid, node=1)
    assert opener().records.tombstones() == store.records.tombstones() == {}


def test_a_deletion_can_name_the_version_it_read(store: MetadataStore) -> None:
    topic = store.records.create_topic("orders", TopicSettings())
    newer = store.records.replace("orders", topic.version, changed(topic, "a"))
    with pytest.raises(Conflict):
        store.records.delete_topic("orders", expected_version=topic.version)
    store.records.delete_topic("orders", expected_version=newer.version)


def test_a_recovered_topic_keeps_uid_and_salt_and_its_salt_is_not_given_again(store: MetadataStore) -> None:
    lost = MemoryStore(random.Random(2), cluster_id=CLUSTER)
    records = [lost.records.create_topic(f"t{n}", TopicSettings()).record for n in range(5)]
    recovered = replace(records[3], channels=records[3].channels.with_channel("a", 9).above(40))
    assert store.records.put_recovered(recovered).record == replace(
        recovered, partitions={0: replace(recovered.partitions[0], version=store.records.revision)}
    )
    assert store.records.topics()["t3"].record.channels.version == 41
    new = [store.records.create_topic(f"n{n}", TopicSettings()).record.salt for n in range(5)]
    assert not set(new) & {record.salt for record in records[:4]}


def test_a_recovered_topic_takes_no_name_no_uid_and_does_not_come_back(store: MetadataStore) -> None:
    old = store.records.create_topic("orders", TopicSettings()).record
    with pytest.raises(Conflict, match="exists already"):
        store.records.put_recovered(replace(old, uid=99))
    with pytest.raises(Conflict, match="belongs to another"):
        store.records.put_recovered(replace(old, name="copy"))
    store.records.delete_topic("orders")
    with pytest.raises(Conflict, match="was deleted"):
        store.records.put_recovered(old)


def test_topics_are_read_as_they_are_whatever_the_watch_has_brought(
    store: MetadataStore, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = hasattr(store.records, "_reads")  # etcd's store, whose watch may stay behind
    other = opener() if behind else store
    first, second, third = (store.records.create_topic(name, TopicSettings(partitions=2)) for name in ("a", "b", "c"))
    eventually(lambda: len(store.watch.view().topics) == 3)
    old = store.watch.view()
    if behind:
        monkeypatch.setattr(store.records._reads, "known", lambda: old)
    assert store.records.topics() == {"a": first, "b": second, "c": third}
    uid, meta = first.record.uid, first.record.partitions[1]
    meta = other.records.replace_partition("a", uid, 1, replace(meta, epoch=5))
    found = store.records.topics()
    assert found["a"].record.partitions == {0: first.record.partitions[0], 1: meta} and found["b"] == second
    second = other.records.replace("b", second.version, changed(second, "x"))
    fourth = other.records.create_topic("d", TopicSettings(partitions=3))
    found = store.records.topics()
    assert (found["b"], found["d"], len(found)) == (second, fourth, 4)
    other.records.delete_topic("c")
    assert set(store.records.topics()) == {"a", "b", "d"}
    again = other.records.create_topic("c", TopicSettings())
    assert store.records.topics()["c"] == again


@pytest.mark.parametrize(
    "watch", ["has come as far", "stays behind", "comes in a moment", "comes nearer", "could not read a record"]
)
def test_topics_that_are_read_together_are_as_they_are(
    watch: str, store: MetadataStore, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = hasattr(store.records, "_reads")  # etcd's store, whose watch may stay behind
    other = opener() if behind else store
    first, second = (store.records.create_topic(name, TopicSettings(partitions=2)) for name in ("a", "b"))
    eventually(lambda: len(store.watch.view().topics) == 2)
    old = store.watch.view()
    meta = replace(first.record.partitions[1], epoch=5)
    meta = other.records.replace_partition("a", first.record.uid, 1, meta)
    eventually(lambda: store.watch.view().partition("a", 1) == meta)
    new, looks = store.watch.view(), list[object]()

    def known() -> object:
        looks.append(None)
        if watch == "could not read a record":
            return replace(old, revision=new.revision, unreadable={"partitions/0/0": "it is of a newer version"})
        if watch == "comes nearer" and len(looks) <= 20:  # as it does while much is written
            return replace(old, revision=new.revision - 21 + len(looks))
        come = watch in ("has come as far", "comes nearer") or (watch == "comes in a moment" and len(looks) > 2)
        return new if come else old

    if behind:
        monkeypatch.setattr(store.records._reads, "known", known)
    found = store.records.topics_of(["a", "gone"])
    assert found.keys() == {"a", "gone"} and found["gone"] is None
    assert found["a"] is not None and found["a"].record.partitions == {0: first.record.partitions[0], 1: meta}
    if behind and watch in ("has come as far", "comes in a moment", "comes nearer"):
        assert found["a"] is new.topics["a"]  # it was not read once more
    assert store.records.topics_of(["b"]) == {"b": second}
