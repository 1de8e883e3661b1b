"""The metadata watch while etcd dies, freezes, or has forgotten what was missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.model import NodeInfo, TopicSettings
from nsqha.errors import OutcomeUnknown, Unavailable
from tests.etcd_server import EtcdServer, eventually
from tests.integration.etcd_rig import Open, Seen, Ticking, answers, created, put_intents, raises
from tests.tcp_relay import Relay


def test_the_watch_goes_on_where_it_was_when_etcd_was_killed(etcd: EtcdServer, open_store: Open) -> None:
    store = open_store(etcd.endpoint)
    seen = Seen(store)
    for round_ in range(3):
        put_intents(store, range(10 * round_, 10 * round_ + 10))
        etcd.kill()
        etcd.start()
        eventually(lambda: answers(store))  # gRPC waits up to a second before it connects again
    put_intents(store, range(30, 40))
    eventually(seen.told(range(40)))
    assert seen.names == [f"intents/n{n}" for n in range(40)], "each once, in order, and never 'anything'"


def test_a_backlog_that_breaks_in_the_middle_loses_nothing(
    shared_etcd: EtcdServer, relay: Relay, open_store: Open
) -> None:
    writer, store = open_store(shared_etcd.endpoint), open_store(relay.endpoint)
    seen = Seen(store)
    relay.cut()
    put_intents(writer, range(2500))
    relay.release(cut_after=160_000)  # a batch of a thousand events is about 105,000
    eventually(lambda: relay._refusing)
    relay.release()
    eventually(seen.told(range(2500)))
    assert seen.names == [f"intents/n{n}" for n in range(2500)]


def test_when_etcd_has_compacted_what_was_missed_everything_is_read_again(
    shared_etcd: EtcdServer, relay: Relay, open_store: Open
) -> None:
    writer, store = open_store(shared_etcd.endpoint), open_store(relay.endpoint)
    writer.records.create_topic("deleted", TopicSettings())
    eventually(lambda: "deleted" in store.watch.view().topics)
    seen = Seen(store)
    relay.cut()
    writer.records.delete_topic("deleted")
    writer.records.create_topic("orders", TopicSettings(partitions=3))
    client = EtcdClient(EtcdOptions((shared_etcd.endpoint,)))
    client.change(lambda stubs: stubs.kv.Compact, rpc.CompactionRequest(revision=writer.records.revision))
    client.close()
    relay.release()
    eventually(lambda: "" in seen.names)
    assert store.watch.view().topics == writer.records.topics()
    writer.records.create_topic("later", TopicSettings())
    eventually(lambda: "topics/later" in seen.names)


def test_a_frozen_etcd_makes_calls_fail_and_comes_back(etcd: EtcdServer, open_store: Open) -> None:
    store = open_store(etcd.endpoint, call_s=0.2)
    topic = store.records.create_topic("orders", TopicSettings())
    eventually(lambda: "orders" in store.watch.view().topics)
    seen = Seen(store)
    etcd.freeze()
    with pytest.raises(Unavailable):
        store.records.topic("orders")
    with pytest.raises(OutcomeUnknown):
        store.records.replace_partition("orders", topic.record.uid, 0, replace(topic.record.partitions[0], leader=7))
    assert store.watch.view().topics.keys() == {"orders"}
    etcd.thaw()  # it may be slower than these calls wait
    eventually(lambda: answers(store))
    eventually(lambda: created(store, "later"))
    eventually(lambda: "topics/later" in seen.names)


def test_a_frozen_member_is_left_for_another_also_by_the_streams(
    shared_etcd: EtcdServer, relay: Relay, open_store: Open
) -> None:
    store = open_store(relay.endpoint, shared_etcd.endpoint)
    session = store.sessions.open(ttl_s=6, lost=lambda: None)
    with Ticking(session.ticked):
        session.register(NodeInfo(7))
        seen = Seen(store)
        relay.hold_requests()
        relay.drop_replies = True
        frozen = SystemClock().monotonic()
        store.records.create_topic("orders", TopicSettings())  # begins with a read, which finds the way
        eventually(lambda: "topics/orders" in seen.names)
        relay.close()
        eventually(lambda: session._lease._renewed > frozen)
        assert store.records.nodes().keys() == {7}


def test_an_etcd_that_is_not_there_did_nothing(etcd: EtcdServer, open_store: Open) -> None:
    store = open_store(etcd.endpoint)
    etcd.kill()
    eventually(lambda: raises(Unavailable, lambda: store.intents.put("a", {})))
    with pytest.raises(Unavailable):
        store.records.topics()
    with pytest.raises(Unavailable):
        open_store(etcd.endpoint)
