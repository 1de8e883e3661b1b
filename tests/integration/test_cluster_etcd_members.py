"""A cluster on an etcd of three members, with TLS, client certificates and a login; members die, one or most of them.

Names are in every part of it as an operator would write them: all three endpoints, in the same order, on every daemon.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.model import TopicSettings
from nsqha.errors import OutcomeUnknown, Unavailable
from tests.certificates import Certificates
from tests.etcd_server import EtcdMembers, EtcdServer, eventually
from tests.integration.cluster import CLUSTER_NAME, Cluster, UnderLoad, posted
from tests.integration.etcd_rig import guard
from tests.integration.servers import Daemon, wait_until
from tests.tcp_relay import Relay

pytestmark = pytest.mark.timeout(180)

PASSWORD = "correct-horse"

names = count(1)


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    for name in ("server", "client"):
        made.issue(name, "IP:127.0.0.1")
    (made.folder / "password").write_text(PASSWORD + "\n")
    (made.folder / "password").chmod(0o600)
    return made


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory, access: Certificates) -> Iterator[EtcdMembers]:
    tls = ["--cert-file", access.cert("server"), "--key-file", access.key("server"), "--client-cert-auth"]
    tls += ["--trusted-ca-file", access.cert("ca"), "--bcrypt-cost", "4"]  # the least that a login can cost
    with EtcdMembers.running(tmp_path_factory.mktemp("etcd"), *tls, scheme="https") as etcd:
        guard(options(access, etcd.endpoints, login=False), PASSWORD)
        yield etcd


def options(access: Certificates, endpoints: tuple[str, ...], *, login: bool = True) -> EtcdOptions:
    found = EtcdOptions(endpoints, ca=access.cert("ca"), cert=access.cert("client"), key=access.key("client"))
    return replace(found, user="nsqha", password=PASSWORD) if login else found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, access: Certificates, etcd: EtcdMembers) -> Iterator[Cluster]:
    """Three nodes and two lookup daemons; every test leaves all members running."""
    flags = [f"--etcd-ca={access.cert('ca')}", f"--etcd-cert={access.cert('client')}"]
    flags += [f"--etcd-key={access.key('client')}", "--etcd-user=nsqha"]
    flags += [f"--etcd-password-file={access.folder / 'password'}"]
    whole = Cluster(
        tmp_path_factory.mktemp("cluster"),
        etcd,
        lookupds=2,
        flags=flags,
        lookupd_flags=flags,
        access=options(access, etcd.endpoints),
    )
    with whole.started() as cluster:
        yield cluster
        assert not any(PASSWORD in daemon.log() for daemon in cluster.daemons)
        cluster.check_replicas()


@pytest.fixture
def topic(cluster: Cluster, etcd: EtcdMembers) -> Iterator[str]:
    name = f"orders-{next(names)}"
    cluster.create(name, "steady")
    yield name
    etcd.start()
    cluster.wait_registered(3)
    cluster.wait_isr(name, 3, seconds=60)


def sockets(daemon: Daemon) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    folder = Path(f"/proc/{daemon.pid}/fd")
    for descriptor in folder.iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


def used_by(daemon: Daemon, etcd: EtcdMembers) -> list[EtcdServer]:
    """The members that it has a connection to now."""
    ours = sockets(daemon)
    ports = set()
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    for _, _, remote, state, *rest in lines:
        if state == "01" and rest[5] in ours:
            ports.add(int(remote.rpartition(":")[2], 16))
    return [member for member in etcd.members if member.client_port in ports]


def decides(cluster: Cluster, etcd: EtcdMembers, number: int) -> None:
    """Whatever needs a decision is decided: a topic on three nodes, made by way of a broker."""
    name = f"decided-{number}"
    wait_until(lambda: posted(cluster.nodes[number % 3], f"/topic/create?topic={name}"), f"{name} is made", 60)
    cluster.wait_isr(name, 3, seconds=60)


def epoch_of(cluster: Cluster, topic: str) -> int:
    """0: etcd does not say."""
    with contextlib.suppress(Unavailable):
        meta = cluster.meta(topic)
        return 0 if meta is None else meta.epoch
    return 0


def make(store: EtcdStore, topic: str) -> None:
    """Ask until it is there: while etcd elects a leader nobody can say."""

    def done() -> bool:
        with contextlib.suppress(Unavailable, OutcomeUnknown):
            if topic not in store.records.topics():
                store.records.create_topic(topic, TopicSettings(partitions=3))
            return True
        return False

    eventually(done)


def test_the_member_that_everybody_uses_dies(cluster: Cluster, etcd: EtcdMembers, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        before = cluster.wait_isr(topic, 3)
        for _ in range(3):
            used = [member for member in etcd.members if any(member in used_by(d, etcd) for d in cluster.daemons)]
            assert used, "somebody is connected to some member"
            used[0].kill()
            load.goes_on()
            decides(cluster, etcd, next(names))
            wait_until(
                lambda: all(used_by(daemon, etcd) for daemon in cluster.daemons), "everybody found another member"
            )
            used[0].start()
        after = cluster.wait_isr(topic, 3)
        assert after.leader == before.leader or after.epoch > before.epoch


def test_a_majority_is_away_and_comes_back(cluster: Cluster, etcd: EtcdMembers, topic: str) -> None:
    before = cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic) as load:
        for member in etcd.members[:2]:
            member.kill()
        undecided = f"undecided-{next(names)}"
        cluster.wait_leases_over()
        load.goes_on()
        assert not posted(cluster.nodes[0], f"/topic/create?topic={undecided}")
        etcd.start()
        decides(cluster, etcd, next(names))
        cluster.wait_registered(3)
        after = cluster.wait_isr(topic, 3)
    assert after.leader == before.leader or after.epoch > before.epoch


def test_a_leader_dies_while_no_majority_is_there_and_is_replaced_when_there_is(
    cluster: Cluster, etcd: EtcdMembers, topic: str
) -> None:
    with UnderLoad(cluster, topic) as load:
        before = cluster.wait_isr(topic, 3)
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        for member in etcd.members[1:]:
            member.kill()
        leader.kill()
        cluster.wait_leases_over()
        etcd.start()
        wait_until(lambda: epoch_of(cluster, topic) > before.epoch, "another leader is elected", 90)
        leader.start()
        cluster.wait_isr(topic, 3, seconds=60)


def test_a_watch_goes_on_over_a_change_of_leader_and_a_compaction(access: Certificates, etcd: EtcdMembers) -> None:
    """Everybody was away from etcd while it changed leaders, changed records and forgot how."""
    made = lambda endpoints: EtcdStore(  # noqa: E731
        options(access, endpoints), CLUSTER_NAME + "-watched", SystemClock(), random.Random()
    )
    with contextlib.ExitStack() as stack:
        relays = [stack.enter_context(Relay.to(member.client_port)) for member in etcd.members]
        writer = stack.enter_context(contextlib.closing(made(etcd.endpoints)))
        store = stack.enter_context(contextlib.closing(made(tuple(relay.endpoint for relay in relays))))
        writer.records.create_topic("deleted", TopicSettings())
        eventually(lambda: "deleted" in store.watch.view().topics)
        for relay in relays:
            relay.cut()
        writer.records.delete_topic("deleted")
        old = etcd.leader()
        old.kill()
        for n in range(5):
            make(writer, f"orders-{n}")
        root = EtcdClient(
            EtcdOptions(
                etcd.endpoints, ca=access.cert("ca"), cert=access.cert("client"), key=access.key("client"),
                user="root", password=PASSWORD,
            )
        )  # fmt: skip
        stack.callback(root.close)
        root.change(lambda stubs: stubs.kv.Compact, rpc.CompactionRequest(revision=writer.records.revision))
        old.start()
        for relay in relays:
            relay.release()
        eventually(lambda: store.watch.view().topics == writer.records.topics())
        make(writer, "later")
        eventually(lambda: "later" in store.watch.view().topics)
