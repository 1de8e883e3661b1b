"""The deployments of deploy/ run, out of their files; and they are restarted under load as docs/operate.md has it: a
StatefulSet in its order, services of Compose and units of systemd one after the other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

import pytest

from nsqha.cli.brokers.v2client import V2Publisher
from nsqha.cli.generate.topology import BROKER_PORTS, LOOKUPD_PORTS, port
from tests.integration.asking import AskingPublisher, producers, received, request
from tests.integration.servers import wait_until
from tests.integration.topologies import DEPLOY, Container, Topology, compose, kubernetes
from tests.integration.units import Unit, hosts

TCP, HTTP, LOOKUP_HTTP = port(BROKER_PORTS, "tcp"), port(BROKER_PORTS, "http"), port(LOOKUPD_PORTS, "http")

SLOW = pytest.mark.timeout(300)  # five daemons are started again, one after the other, also beside other work


def created(broker: Container, topic: str, channel: str) -> None:
    request(f"{broker.ip}:{HTTP}", f"/topic/create?topic={topic}", b"")

    def made() -> bool:
        try:
            request(f"{broker.ip}:{HTTP}", f"/channel/create?topic={topic}&channel={channel}", b"")
        except HTTPError:
            return False  # a topic of a cluster has no leader yet
        return True

    wait_until(made, f"{topic}/{channel} is made")


def at(lookup: Container) -> str:
    return f"{lookup.ip}:{LOOKUP_HTTP}"


def restarted_under_load(
    topology: Topology, order: list[Container], restart: Callable[[Container, AskingPublisher], None]
) -> None:
    """Brokers and lookup daemons in this order: 0 lost, 0 refused."""
    brokers, lookups = topology.of("broker"), [at(lookup) for lookup in topology.of("lookupd")]
    created(brokers[0], "orders", "billing")
    wait_until(lambda: producers(lookups[0], "orders"), "it is known")
    with AskingPublisher(lookups, "orders") as client:
        client.goes_on()
        for container in order:
            restart(container, client)
            client.goes_on()
    assert client.refused == []
    assert client.stored <= received(lookups[0], "orders", "billing", client.stored)


# ---- Compose


def test_one_node_as_compose_has_it(tmp_path: Path) -> None:
    with Topology(tmp_path, compose(DEPLOY / "compose" / "one-node.yaml")).running() as topology:
        (broker,), (lookup,) = topology.of("broker"), topology.of("lookupd")
        created(broker, "orders", "billing")
        wait_until(lambda: producers(at(lookup), "orders") == [f"{broker.ip}:{TCP}"], "it has registered")
        V2Publisher(f"{broker.ip}:{TCP}", 20).publish("orders", [b"first"])
        assert received(at(lookup), "orders", "billing", {b"first"}) == {b"first"}
        assert broker.stop() == 0 and lookup.stop() == 0
        assert not broker.passes("health") and not lookup.passes("health")


def test_a_cluster_as_compose_has_it(tmp_path: Path) -> None:
    with Topology(tmp_path, compose(DEPLOY / "compose" / "cluster.yaml")).running() as topology:
        brokers, lookups, etcds = (topology.of(role) for role in ("broker", "lookupd", "etcd"))
        assert (len(brokers), len(lookups), len(etcds)) == (3, 2, 3)
        created(brokers[0], "orders", "billing")
        etcds[0].kill()  # one of three
        V2Publisher(f"{brokers[1].ip}:{TCP}", 40).publish("orders", [b"first"])
        assert received(at(lookups[1]), "orders", "billing", {b"first"}) == {b"first"}
        assert [broker.stop() for broker in brokers] == [0, 0, 0]


@SLOW
def test_services_of_compose_are_restarted_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs" / "operate.md").read_text()
    (service,) = re.findall(r"`docker compose -f deploy/compose/cluster.yaml restart (\w+)`", page)
    waits = r"`until docker compose -f deploy/compose/cluster.yaml exec (\w+) (.+?); do sleep 1; done`"
    ((waited, check),) = re.findall(waits, page)

    def restart(container: Container, client: AskingPublisher) -> None:
        assert container.stop() == 0, "within its grace period"
        container.start()
        wait_until(lambda: container.succeeds(shlex.split(check)), f"{container.name}: {check}", 60)

    with Topology(tmp_path, compose(DEPLOY / "compose" / "cluster.yaml")).running() as topology:
        brokers, lookups = topology.of("broker"), topology.of("lookupd")
        assert service == waited == brokers[0].name
        restarted_under_load(topology, [*brokers, *lookups], restart)


# ---- systemd


@SLOW
def test_units_of_systemd_are_restarted_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    page = (DEPLOY.parent / "docs" / "operate.md").read_text()
    line = r"`systemctl restart (\S+)` \|.*`until (.+?); do sleep 1; done` \|$"
    ((unit, check),) = re.findall(line, page, re.MULTILINE)
    assert unit == "nsqha-broker"

    def restart(host: Container, client: AskingPublisher) -> None:
        assert isinstance(host, Unit)
        host.restart()
        if host.role == "broker":
            wait_until(lambda: host.succeeds(shlex.split(check)), f"{host.name}: {check}", 60)

    with Topology(tmp_path, hosts()).running() as topology:
        brokers, lookups = topology.of("broker"), topology.of("lookupd")
        restarted_under_load(topology, [*brokers, *lookups], restart)
        for host in (*brokers, *lookups):
            assert isinstance(host, Unit) and host.notified is not None
            wait_until(partial(host.notified.heard, "WATCHDOG=1"), f"{host.name} says that its loop runs", 60)
            *_, before, now = host.lives  # one that began before etcd was there ended, and began anew
            assert [word for word in before if word in ("READY=1", "STOPPING=1")] == ["READY=1", "STOPPING=1"]
            assert "STOPPING=1" not in now and any(word.startswith("EXTEND_TIMEOUT_USEC=") for word in now)


# ---- Kubernetes


def rolled(pod: Container, client: AskingPublisher) -> None:
    assert pod.stop() == 0, "within its grace period"
    assert not pod.passes("readiness")
    client.goes_on()
    pod.start()
    wait_until(pod.ready, f"{pod.name} is ready again", 60)


@SLOW
def test_a_stateful_set_is_rolled_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    with Topology(tmp_path, kubernetes()).running() as topology:
        brokers, lookups = topology.of("broker"), topology.of("lookupd")
        assert [broker.name for broker in brokers] == ["nsqha-broker-0", "nsqha-broker-1", "nsqha-broker-2"]
        # From the last to the first, each when the one before is ready.
        restarted_under_load(topology, [*reversed(brokers), *reversed(lookups)], rolled)


@pytest.mark.parametrize("role", ["broker", "lookupd"])
def test_a_pod_is_reached_by_the_name_that_it_announces(role: str) -> None:
    for pod in kubernetes():
        if pod.role == role:
            prefix = "NSQD_" if role == "broker" else "NSQLOOKUPD_"
            assert pod.environment[f"{prefix}BROADCAST_ADDRESS"] in pod.hosts
