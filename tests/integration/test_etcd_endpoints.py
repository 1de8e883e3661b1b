"""Which of several endpoints is used when the one in use has died. Behind all relays is the same etcd."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import grpc
import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd import client as etcd_client
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.model import TopicSettings
from tests.etcd_server import EtcdServer, eventually
from tests.tcp_relay import Relay

LONG_S = 20.0


@pytest.fixture
def relays(shared_etcd: EtcdServer) -> Iterator[list[Relay]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Relay.to(shared_etcd.client_port)) for _ in range(3)]


def to(relays: list[Relay]) -> EtcdOptions:
    return EtcdOptions(tuple(relay.endpoint for relay in relays))


def test_a_member_that_does_not_speak_is_passed_over(relays: list[Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen one: its kernel still takes connections. No call is spent on finding that out."""
    monkeypatch.setattr(etcd_client, "CONNECT_S", LONG_S)
    client = EtcdClient(to(relays))
    used: list[int] = []
    client.on_rotate(lambda: used.append(client.endpoint))
    client.confirm(b"/test")
    relays[1].hold_requests()
    relays[1].drop_replies = True
    relays[0].cut()
    client.confirm(b"/test")
    assert used == [2]
    client.close()


def test_a_member_that_froze_while_it_was_used_is_not_taken_for_alive(
    relays: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_client, "CONNECT_S", LONG_S)
    client = EtcdClient(to(relays))
    client.confirm(b"/test")
    relays[0].hold_requests()
    relays[0].drop_replies = True
    client.confirm(b"/test")
    left, used = client.endpoint, []
    assert left
    client.on_rotate(lambda: used.append(client.endpoint))
    relays[left].cut()
    client.confirm(b"/test")
    assert used == [3 - left]
    client.close()


def test_a_client_that_asks_nothing_keeps_its_connection(
    shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd ends one after the third ping that comes while no call is under way."""
    often = dict(etcd_client.GRPC_OPTIONS) | {"grpc.keepalive_time_ms": 1000}  # the least that gRPC takes
    monkeypatch.setattr(etcd_client, "GRPC_OPTIONS", tuple(often.items()))
    client = EtcdClient(EtcdOptions((shared_etcd.endpoint,)))
    client.confirm(b"/test")
    channel = client._stubs_of(0).channel
    states: list[grpc.ChannelConnectivity] = []
    channel.subscribe(states.append)
    threading.Event().wait(4.5)
    channel.unsubscribe(states.append)
    client.close()
    assert states == [grpc.ChannelConnectivity.READY]


def test_who_notices_late_that_a_member_died_does_not_leave_the_next_one(relays: list[Relay]) -> None:
    """Calls, the watch and the lease each have something on the connection that breaks."""
    trouble: list[str] = []
    store = EtcdStore(to(relays), "endpoints", SystemClock(), random.Random(), trouble=trouble.append)
    used: list[int] = []
    store._client.on_rotate(lambda: used.append(store._client.endpoint))
    session = store.sessions.open(ttl_s=6, lost=lambda: None)

    def renewed_after(number: int) -> bool:
        session.ticked()
        return session._lease._renewed > before and len(used) >= number

    before = session._lease._renewed
    eventually(lambda: renewed_after(0))  # its stream is open
    relays[0].cut()
    before = SystemClock().monotonic()
    store.records.create_topic("orders", TopicSettings())
    eventually(lambda: renewed_after(1))
    eventually(lambda: "orders" in store.watch.view().topics)
    assert any("watch on etcd broke" in line for line in trouble)
    assert len(used) == 1
    store.close()
