"""Changes whose answer was lost, an etcd that is not ours any more, and topics that fill more than one transaction."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nsqha.election.etcd import keys as etcd_keys
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions, Full
from nsqha.election.etcd.keys import created, txn
from nsqha.election.model import TopicSettings
from nsqha.election.session import StoreIdentity
from nsqha.errors import ConfigError, Conflict, NsqhaError, OutcomeUnknown, StaleMetadata, Unavailable
from tests.etcd_server import EtcdServer, eventually
from tests.integration.etcd_rig import Open, answers, raises
from tests.tcp_relay import Relay

# Doubt


def test_a_change_whose_answer_was_lost_is_in_doubt_until_it_is_fenced(
    shared_etcd: EtcdServer, relay: Relay, open_store: Open
) -> None:
    store = open_store(relay.endpoint)
    topic = store.records.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    relay.drop_replies = True
    with pytest.raises(OutcomeUnknown):
        store.records.replace_partition("orders", uid, 0, replace(meta, leader=7))
    with pytest.raises(Unavailable):
        store.records.fence_partition("orders", uid, 0, meta.version)
    relay.release()
    relay.cut()  # HTTP/2 does not go on behind lost bytes
    relay.release()
    eventually(lambda: answers(store))  # gRPC waits up to a second before it connects again
    after = store.records.fence_partition("orders", uid, 0, meta.version)
    assert (after.leader, after.version > meta.version) == (7, True), "it had been carried out"
    assert store.records.replace_partition("orders", uid, 0, replace(after, leader=8)).leader == 8


def test_a_change_that_arrives_after_the_fence_does_nothing(
    shared_etcd: EtcdServer, relay: Relay, open_store: Open
) -> None:
    store, fencing = open_store(relay.endpoint), open_store(shared_etcd.endpoint)
    topic = store.records.create_topic("orders", TopicSettings())
    uid, meta = topic.record.uid, topic.record.partitions[0]
    relay.hold_requests()
    with pytest.raises(OutcomeUnknown):
        store.records.replace_partition("orders", uid, 0, replace(meta, leader=7))
    fenced = fencing.records.fence_partition("orders", uid, 0, meta.version)
    assert (fenced.leader, fenced.version > meta.version) == (0, True)
    relay.release()
    eventually(lambda: answers(store))
    read = store.records.topic("orders")
    assert read is not None and read.record.partitions[0] == fenced
    with pytest.raises(Conflict):
        store.records.replace_partition("orders", uid, 0, replace(meta, leader=7))


def test_what_a_full_etcd_did_not_do_it_has_not_done(tmp_path: Path) -> None:
    """It carries out the changes that bring it over its quota, and says of them that there is no room."""
    quota = ("--quota-backend-bytes", str(8 << 20))
    with EtcdServer.running(tmp_path, *quota) as etcd, ThreadPoolExecutor(40) as threads:
        client = EtcdClient(EtcdOptions(etcd.endpoints))

        def put(n: int) -> Exception | None:
            key = b"/full/%d" % n
            change = txn([created(key, 0)], [etcd_keys.put(key, b"x" * (700 << 10))])
            try:
                client.change(lambda stubs: stubs.kv.Txn, change)
            except NsqhaError as error:
                return error
            return None

        outcomes = list(threads.map(put, range(40)))
        # On a busy machine all of these are on their way before etcd raises its alarm: behind that it refuses.
        while not any(isinstance(outcome, Full) for outcome in outcomes):
            assert len(outcomes) < 140, outcomes
            outcomes.append(put(len(outcomes)))
            time.sleep(0.05)
        for n, outcome in enumerate(outcomes):
            found = client.read(lambda stubs: stubs.kv.Range, rpc.RangeRequest(key=b"/full/%d" % n, keys_only=True))
            assert not found.kvs or outcome is None or isinstance(outcome, OutcomeUnknown), f"{n}: {outcome!r}"
        client.close()


# Which etcd


def test_another_etcd_in_the_same_place_is_not_believed(etcd: EtcdServer, open_store: Open) -> None:
    store = open_store(etcd.endpoint)
    store.records.create_topic("orders", TopicSettings())
    eventually(lambda: "orders" in store.watch.view().topics)
    known = store.identity()
    etcd.kill()
    shutil.rmtree(etcd.folder / "data")
    etcd.extra = ("--initial-cluster-token", "another")
    etcd.start()
    eventually(lambda: raises(StaleMetadata, store.records.topics))
    with pytest.raises(StaleMetadata, match="accept-metadata"):
        store.records.create_topic("later", TopicSettings())
    assert store.watch.view().topics.keys() == {"orders"}
    with pytest.raises(StaleMetadata, match="belongs to"):
        open_store(etcd.endpoint, seen=known)


def test_an_older_state_is_not_believed(shared_etcd: EtcdServer, open_store: Open) -> None:
    store = open_store(shared_etcd.endpoint)
    known = store.identity()
    assert known.etcd_cluster_id
    open_store(shared_etcd.endpoint, seen=known)
    with pytest.raises(StaleMetadata, match="older state"):
        open_store(shared_etcd.endpoint, seen=StoreIdentity(known.etcd_cluster_id, known.revision + 1000))


def test_a_cluster_that_vanished_is_not_begun_again(shared_etcd: EtcdServer, open_store: Open) -> None:
    store = open_store(shared_etcd.endpoint)
    cluster_id = store.records.cluster().record.cluster_id
    with pytest.raises(ConfigError, match="no cluster under /nsqha/other/"):
        open_store(shared_etcd.endpoint, name="other", cluster_id=cluster_id, seen=store.identity())
    with pytest.raises(ConfigError, match="this data directory belongs to"):
        open_store(shared_etcd.endpoint, cluster_id=cluster_id ^ 1, seen=store.identity())
    with pytest.raises(ConfigError, match="of a node that ran alone: `nsqha cluster import`"):
        open_store(shared_etcd.endpoint, cluster_id=cluster_id ^ 1)


# Size


@pytest.mark.parametrize("partitions", [200, 1023])
def test_a_topic_of_many_partitions_is_one_change(shared_etcd: EtcdServer, open_store: Open, partitions: int) -> None:
    store = open_store(shared_etcd.endpoint)
    topic = store.records.create_topic("orders", TopicSettings(partitions=partitions))
    assert {meta.version for meta in topic.record.partitions.values()} == {topic.version}
    assert store.records.topic("orders") == topic
    all_led = {n: replace(meta, leader=7) for n, meta in topic.record.partitions.items()}
    topic = store.records.replace("orders", topic.version, replace(topic.record, partitions=all_led))
    assert store.records.topic("orders") == topic == store.records.topics()["orders"]
    stale = replace(topic.record, partitions={n: replace(m, version=1, leader=8) for n, m in all_led.items()})
    with pytest.raises(Conflict):
        store.records.replace("orders", topic.version, stale)
    raised = store.records.raise_epochs(leader=9)["orders"].record.partitions
    assert {(meta.leader, meta.epoch) for meta in raised.values()} == {(9, 2)}
    assert store.records.delete_topic("orders").partitions == partitions
    assert store.records.topics() == {}
