"""The deployments of deploy/ run, out of their files; and a StatefulSet is rolled in its order under load."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import RefusedByServer, Subscriber, V2Publisher
from nsqha.cli.generate.topology import BROKER_PORTS, LOOKUPD_PORTS, port
from nsqha.cli.terminal import exits
from tests.integration.servers import wait_until
from tests.integration.topologies import DEPLOY, Container, Topology, compose, kubernetes

TCP, HTTP, LOOKUP_HTTP = port(BROKER_PORTS, "tcp"), port(BROKER_PORTS, "http"), port(LOOKUPD_PORTS, "http")
OKS_BETWEEN = 200  # publishes that are OK'd between two steps


def request(address: str, path: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", data=body, timeout=20) as answer:
        data: bytes = answer.read()
        return data


def producers(lookup: Container, topic: str) -> list[str]:
    found = json.loads(request(f"{lookup.ip}:{LOOKUP_HTTP}", f"/lookup?topic={urllib.parse.quote(topic)}"))
    return [f"{producer['broadcast_address']}:{producer['tcp_port']}" for producer in found["producers"]]


def created(broker: Container, topic: str, channel: str) -> None:
    for path in (f"/topic/create?topic={topic}", f"/channel/create?topic={topic}&channel={channel}"):
        request(f"{broker.ip}:{HTTP}", path, b"")


def received(lookup: Container, topic: str, channel: str, wanted: set[bytes]) -> set[bytes]:
    """What comes out of a channel until all that is wanted has come."""
    (address, *_) = producers(lookup, topic)
    reader = Subscriber(address, 30, topic, channel, window=100)
    reader.wait_at_most(0.2)
    found: set[bytes] = set()

    def all_came() -> bool:
        messages = reader.messages()
        found.update(message.body for message in messages)
        if messages:
            reader.answer(messages, None, None)
        return wanted <= found

    with contextlib.closing(reader):
        wait_until(all_came, "everything that was OK'd comes out", 60)
    return found


class AskingPublisher:
    """One client: it asks a lookup daemon, publishes one message after another, and asks again when that fails."""

    def __init__(self, lookups: list[Container], topic: str) -> None:
        self.stored: set[bytes] = set()
        self.refused: list[str] = []
        self._lookups, self._topic = lookups, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> AskingPublisher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def goes_on(self) -> None:
        enough = len(self.stored) + OKS_BETWEEN
        wait_until(lambda: len(self.stored) >= enough, "publishes are OK'd", 60)

    def _run(self) -> None:
        number = 0
        while not self._ends.is_set():
            # A lookup daemon that is gone, a broker that closes: the next one is asked, and the message sent again.
            with contextlib.suppress(OSError, ValueError, exits.Exit):
                address = producers(self._lookups[number % len(self._lookups)], self._topic)[0]
                with contextlib.closing(V2Publisher(address, 40)) as publisher:
                    while not self._ends.is_set():
                        body = b"%d" % number
                        try:
                            publisher.publish(self._topic, [body])
                        except RefusedByServer as error:
                            self.refused.append(str(error))
                            raise
                        self.stored.add(body)
                        number += 1
            self._ends.wait(0.05)


# ---- Compose


def test_one_node_as_compose_has_it(tmp_path: Path) -> None:
    with Topology(tmp_path, compose(DEPLOY / "compose" / "one-node.yaml")).running() as topology:
        (broker,), (lookup,) = topology.of("broker"), topology.of("lookupd")
        created(broker, "orders", "billing")
        wait_until(lambda: producers(lookup, "orders") == [f"{broker.ip}:{TCP}"], "it has registered")
        V2Publisher(f"{broker.ip}:{TCP}", 20).publish("orders", [b"first"])
        assert received(lookup, "orders", "billing", {b"first"}) == {b"first"}
        assert broker.stop() == 0 and lookup.stop() == 0
        assert not broker.passes("health") and not lookup.passes("health")


def test_a_cluster_as_compose_has_it(tmp_path: Path) -> None:
    with Topology(tmp_path, compose(DEPLOY / "compose" / "cluster.yaml")).running() as topology:
        brokers, lookups, etcds = (topology.of(role) for role in ("broker", "lookupd", "etcd"))
        assert (len(brokers), len(lookups), len(etcds)) == (3, 2, 3)
        created(brokers[0], "orders", "billing")
        etcds[0].kill()  # one of three
        V2Publisher(f"{brokers[1].ip}:{TCP}", 40).publish("orders", [b"first"])
        assert received(lookups[1], "orders", "billing", {b"first"}) == {b"first"}
        assert [broker.stop() for broker in brokers] == [0, 0, 0]


# ---- Kubernetes


def test_a_stateful_set_is_rolled_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    with Topology(tmp_path, kubernetes()).running() as topology:
        brokers, lookups = topology.of("broker"), topology.of("lookupd")
        assert [broker.name for broker in brokers] == ["nsqha-broker-0", "nsqha-broker-1", "nsqha-broker-2"]
        created(brokers[0], "orders", "billing")
        wait_until(lambda: producers(lookups[0], "orders"), "it is known")
        with AskingPublisher(lookups, "orders") as client:
            client.goes_on()
            for pod in reversed(brokers):  # from the last to the first, each when the one before is ready
                assert pod.stop() == 0, "within its grace period"
                assert not pod.passes("readiness")
                client.goes_on()
                pod.start()
                wait_until(pod.ready, f"{pod.name} is ready again", 60)
                client.goes_on()
            for pod in reversed(lookups):
                assert pod.stop() == 0
                client.goes_on()
                pod.start()
                wait_until(pod.ready, f"{pod.name} is ready again", 60)
        assert client.refused == []
        assert client.stored <= received(lookups[0], "orders", "billing", client.stored)


@pytest.mark.parametrize("role", ["broker", "lookupd"])
def test_a_pod_is_reached_by_the_name_that_it_announces(role: str) -> None:
    for pod in kubernetes():
        if pod.role == role:
            prefix = "NSQD_" if role == "broker" else "NSQLOOKUPD_"
            assert pod.environment[f"{prefix}BROADCAST_ADDRESS"] in pod.hosts
