"""Mutual TLS in a real cluster: who gets in, who does not, and certificates that are replaced while everything runs.

Nodes have IP addresses for names, so what a certificate calls a node is its uid; it begins as an operator would have to
begin, with certificates that name only addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from nsqha.errors import NsqhaError
from nsqha.pb.v1 import admin_pb2, admin_pb2_grpc, routing_pb2
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.pb.v1.replication_pb2_grpc import ReplicationStub
from nsqha.server.peers.calls import SERVICES, GrpcPeers
from nsqha.server.runtime.tls import ClusterTls
from tests.certificates import Certificates
from tests.integration.cluster import Cluster, Member, UnderLoad
from tests.integration.push_client import answers
from tests.integration.servers import wait_until

pytestmark = pytest.mark.timeout(180)

NODES = ("n1", "n2", "n3")
ADMINISTRATOR = "URI:nsqha:administrator"

names = count(1)


class Rotated:
    """The files that daemons read: `NAME.crt`, `NAME.key` and one `trusted.crt`, replaced as an operator does."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        self.folder = folder
        self.certificates = certificates

    def flags(self, name: str) -> list[str]:
        at = self.folder
        files = {"cert": at / f"{name}.crt", "key": at / f"{name}.key", "ca": at / "trusted.crt"}
        return [f"--cluster-tls-{flag}={path}" for flag, path in files.items()]

    def trust(self, *authorities: str) -> None:
        text = "".join(Path(self.certificates.cert(ca)).read_text() for ca in authorities)
        self._replace("trusted.crt", text)

    def issue(self, name: str, *sans: str, ca: str = "ca") -> None:
        self.certificates.issue(f"{name}-{ca}", *sans, ca=ca)
        self._replace(f"{name}.key", Path(self.certificates.key(f"{name}-{ca}")).read_text())
        self._replace(f"{name}.crt", Path(self.certificates.cert(f"{name}-{ca}")).read_text())

    def _replace(self, name: str, text: str) -> None:
        new = self.folder / f".{name}.new"
        new.write_text(text)
        new.replace(self.folder / name)


class TlsMember(Member):
    """A broker that is asked with an administrator's certificate."""

    tls: Callable[[], ClusterTls]

    def channel_to(self, tls: ClusterTls | None = None) -> grpc.Channel:
        found = tls or self.tls()
        credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.certificate)
        return grpc.secure_channel(self.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)])

    def status(self, *keys: tuple[int, int], cluster_id: int, seconds: float = 2.0) -> pb.StatusReply:
        request = pb.StatusRequest(cluster_id=cluster_id)
        for uid, number in keys:
            request.keys.add(topic_uid=uid, partition=number)
        with self.channel_to(self.asking()) as channel:
            reply: pb.StatusReply = ReplicationStub(channel).Status(request, timeout=seconds)
            return reply

    asking: Callable[[], ClusterTls]


class TlsCluster(Cluster):
    files: Rotated

    def make(self, name: str) -> Member:
        flags = [*self.files.flags(name), "--topic-replicas=3"]
        member = TlsMember(self.folder / name, name, self.etcds.endpoints, sync=self._sync, flags=flags)
        member.tls = lambda: self.held("admin")
        member.asking = lambda: self.held("lookupd")
        return member

    def held(self, name: str, trusted: str = "trusted.crt") -> ClusterTls:
        """As the daemon `name` would show it now."""
        at = self.files.folder
        return ClusterTls(*((at / file).read_bytes() for file in (f"{name}.crt", f"{name}.key", trusted)))

    def issue_all(self, ca: str) -> None:
        for node in self.nodes:
            self.files.issue(node.name, "IP:127.0.0.1", f"URI:nsqha:node/{self.uid(node):016x}", ca=ca)
        self.files.issue("lookupd", "DNS:lookupd.example", ca=ca)
        self.files.issue("admin", ADMINISTRATOR, ca=ca)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    """Three nodes, which have got their uids into their certificates while they run, and two lookup daemons."""
    certificates = Certificates(tmp_path_factory.mktemp("made"), "newer", "foreign")
    files = Rotated(tmp_path_factory.mktemp("certificates"), certificates)
    files.trust("ca")
    for name in NODES:
        files.issue(name, "IP:127.0.0.1")
    files.issue("lookupd", "DNS:lookupd.example")
    files.issue("admin", ADMINISTRATOR)
    TlsCluster.files = files
    options: dict[str, Any] = {"lookupds": 2, "lookupd_flags": files.flags("lookupd")}
    with TlsCluster.running(tmp_path_factory.mktemp("cluster"), **options) as cluster:
        assert isinstance(cluster, TlsCluster)
        cluster.issue_all("ca")
        wait_until(lambda: all("were read again" in daemon.log() for daemon in cluster.daemons), "all show their uids")
        yield cluster
        cluster.check_replicas()


@pytest.fixture
def topic(cluster: TlsCluster) -> str:
    cluster.start()
    name = f"orders-{next(names)}"
    cluster.create(name, "steady")
    return name


def stub(channel: grpc.Channel) -> Any:
    return admin_pb2_grpc.AdminStub(channel)


# ---- those who belong here


def test_clients_and_administrators_may_use_any_node(cluster: TlsCluster, topic: str) -> None:
    with UnderLoad(cluster, topic, any_node=True):
        for node in cluster.nodes:
            assert isinstance(node, TlsMember)
            with node.channel_to() as channel:
                found = stub(channel).DescribeTopic(admin_pb2.DescribeTopicRequest(topic=topic), timeout=15)
                assert not found.unreachable, "the node asked the others as itself"
                list(stub(channel).PeekMessages(admin_pb2.PeekMessagesRequest(topic=topic, last=3), timeout=15))
            made = f"{node.name}-{topic}"
            node.request(f"/channel/create?topic={topic}&channel={made}", b"")


def test_a_leader_that_dies_is_replaced_by_a_controller_with_a_certificate(cluster: TlsCluster, topic: str) -> None:
    with UnderLoad(cluster, topic) as load:
        epoch = cluster.wait_isr(topic, 3).epoch
        leader = cluster.leader(topic)
        load.clients.avoid = cluster.nodes.index(leader)
        leader.kill()
        assert cluster.wait_isr(topic, 2).epoch > epoch
        leader.start()
        cluster.wait_isr(topic, 3)


# ---- strangers


@dataclass(frozen=True)
class Target:
    """A partition of the cluster, and the node that is attacked."""

    topic: str
    uid: int
    epoch: int
    cluster_id: int
    node: TlsMember
    node_uid: int
    leader_uid: int

    @property
    def key(self) -> pb.PartitionKey:
        return pb.PartitionKey(topic_uid=self.uid, partition=0)


class Heard:
    """What a stream brought, until it ended."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.why = ""
        self.over = asyncio.Event()

    def on_message(self, message: Any) -> None:
        self.messages.append(message)

    def on_closed(self, why: str) -> None:
        self.why = why
        self.over.set()


async def attempts(target: Target, tls: ClusterTls | None, claims: int, *, patient: bool = False) -> dict[str, str]:
    """Try everything as the node `claims`; what came of each: empty if it was let in.

    `patient`: nothing is sent behind a greeting. gRPC does not say why a stream ended while it was being written to."""
    peers = GrpcPeers(SERVICES, tls=tls)
    key = target.key
    found: dict[str, str] = {}

    async def stream(method: str, first: Any, then: Any) -> None:
        heard = Heard()
        opened = peers.stream(target.node.peer, method, heard)
        opened.send(first)
        if then is not None and not patient:
            opened.send(then)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(heard.over.wait(), 3)
        found[method] = "" if heard.messages else heard.why or "silence"
        opened.close()

    async def call(method: str, request: Any) -> None:
        try:
            await peers.call(target.node.grpc, method, request, timeout=3)
        except NsqhaError as error:
            found[method] = str(error)
        else:
            found[method] = ""

    identity = {"cluster_id": target.cluster_id, "node_uid": claims, "target_uid": target.node_uid}
    epoch = target.epoch + 1000
    push = pb.PushMessage(opens=[pb.Open(key=key, topic=target.topic, epoch=epoch, start=0, first=0)])
    push.appends.add(topic_uid=key.topic_uid, partition=key.partition, epoch=epoch, entries=bytes(80), data=b"x")
    greeting = routing_pb2.Greeting(**identity)
    publish = routing_pb2.ForwardedPublish(sequence=1, key=key, topic=target.topic, frames=b"x" * 40)
    forwarded = routing_pb2.ForwardRequest(publishes=[publish])
    try:
        await stream("Push", pb.PushMessage(hello=pb.PushHello(**identity, registration=1)), push)
        await stream("Forward", routing_pb2.ForwardRequest(greeting=greeting), forwarded)
        await stream("Relay", routing_pb2.RelayRequest(greeting=greeting), None)
        await stream("Live", pb.LiveMessage(cluster_id=target.cluster_id), None)
        await call("Status", pb.StatusRequest(cluster_id=target.cluster_id, keys=[key]))
        await call("Fetch", pb.FetchRequest(cluster_id=target.cluster_id, key=key, epoch=target.epoch, max_bytes=999))
        await call("EpochEnd", pb.EpochEndRequest(cluster_id=target.cluster_id, key=key, epoch=target.epoch))
        record: dict[str, Any] = {"cluster_id": target.cluster_id, "topic": target.topic, "topic_uid": target.uid}
        await call("Reconcile", routing_pb2.ReconcileRequest(**record))
        empty = routing_pb2.ADMINISTRATION_EMPTY_TOPIC
        await call("Administer", routing_pb2.AdministerRequest(**record, what=empty, channel="steady"))
    finally:
        await peers.close()
    return found


def administrate(target: Target, tls: ClusterTls | None) -> str:
    """Empty if a topic could be read."""
    with contextlib.ExitStack() as stack:
        if tls is None:
            channel = stack.enter_context(grpc.insecure_channel(target.node.grpc))
        else:
            channel = stack.enter_context(target.node.channel_to(tls))
        try:
            stub(channel).ListTopics(admin_pb2.ListTopicsRequest(), timeout=3)
            list(stub(channel).PeekMessages(admin_pb2.PeekMessagesRequest(topic=target.topic), timeout=3))
        except grpc.RpcError as error:
            return str(error.code().name)
    return ""


def target_of(cluster: TlsCluster, topic: str, node: Member) -> Target:
    found = cluster.store.records.topic(topic)
    assert found is not None and isinstance(node, TlsMember)
    meta = found.record.partitions[0]
    return Target(topic, found.record.uid, meta.epoch, cluster.cluster_id, node, cluster.uid(node), meta.leader)


def promises(cluster: TlsCluster, target: Target) -> list[int]:
    key = (target.uid, 0)
    replies = [node.status(key, cluster_id=cluster.cluster_id) for node in cluster.nodes]
    return [replica.promise for reply in replies for replica in reply.replicas]


@pytest.fixture
def strangers(cluster: TlsCluster) -> dict[str, ClusterTls | None]:
    """Certificates that must open nothing: the right CA is trusted by all of them, as they would have stolen it."""
    made, at = cluster.files.certificates, cluster.files.folder
    made.issue("stranger", "IP:127.0.0.1", "DNS:n1", ca="foreign")
    made.issue("elsewhere", "IP:127.0.0.1", "URI:nsqha:node/00000000deadbeef")
    trusted = (at / "trusted.crt").read_bytes()
    read = lambda name: (Path(made.cert(name)).read_bytes(), Path(made.key(name)).read_bytes())  # noqa: E731
    return {
        "another CA": ClusterTls(*read("stranger"), trusted),
        "no TLS": None,
        "a foreign node": ClusterTls(*read("elsewhere"), trusted),
    }


@pytest.mark.parametrize("at", ["leader", "follower"])
def test_strangers_can_do_nothing(
    cluster: TlsCluster, topic: str, strangers: dict[str, ClusterTls | None], at: str
) -> None:
    leader = cluster.leader(topic)
    node = leader if at == "leader" else cluster.followers(topic)[0]
    target = target_of(cluster, topic, node)
    ends, promised = cluster.ends(topic), promises(cluster, target)
    for who, tls in strangers.items():
        for claims in (target.leader_uid, 0xDEADBEEF):
            outcomes = asyncio.run(attempts(target, tls, claims))
            assert len(outcomes) == 9 and all(outcomes.values()), (who, claims, outcomes)
        assert administrate(target, tls), who
    assert cluster.ends(topic) == ends
    assert promises(cluster, target) == promised


def test_a_certificate_without_a_name_administrates_and_does_nothing_else(cluster: TlsCluster, topic: str) -> None:
    target = target_of(cluster, topic, cluster.leader(topic))
    outcomes = asyncio.run(attempts(target, cluster.held("admin"), target.leader_uid))
    assert len(outcomes) == 9 and all(outcomes.values()), outcomes
    assert administrate(target, cluster.held("admin")) == ""


def test_a_lookup_daemon_asks_how_nodes_are_and_nothing_else(cluster: TlsCluster, topic: str) -> None:
    target = target_of(cluster, topic, cluster.leader(topic))
    outcomes = asyncio.run(attempts(target, cluster.held("lookupd"), target.leader_uid))
    assert {method for method, why in outcomes.items() if not why} == {"Status", "Live"}, outcomes
    assert administrate(target, cluster.held("lookupd")) == "PERMISSION_DENIED"


def test_a_node_speaks_for_itself_only(cluster: TlsCluster, topic: str) -> None:
    follower, other = cluster.followers(topic)
    target = target_of(cluster, topic, follower)
    for patient in (False, True):
        outcomes = asyncio.run(attempts(target, cluster.held(other.name), target.leader_uid, patient=patient))
        for method in ("Push", "Forward", "Relay"):
            assert outcomes[method] and (not patient or "may not speak for" in outcomes[method]), outcomes
    assert promises(cluster, target) == [target.epoch] * 3


def test_any_grpc_client_with_a_nodes_certificate_may_open_a_stream(cluster: TlsCluster, topic: str) -> None:
    """Its Open of an epoch that is over is answered; a lookup daemon's certificate gets a status."""
    follower, other = cluster.followers(topic)
    target = target_of(cluster, topic, follower)
    hello = pb.PushHello(
        cluster_id=cluster.cluster_id, node_uid=cluster.uid(other), registration=1, target_uid=target.node_uid
    )
    messages = [pb.PushMessage(hello=hello), pb.PushMessage(opens=[pb.Open(key=target.key, topic=topic, epoch=0)])]

    def channel(name: str) -> grpc.Channel:
        held = cluster.held(name)
        credentials = grpc.ssl_channel_credentials(held.ca, held.key, held.certificate)
        return grpc.secure_channel(target.node.peer, credentials, [("grpc.use_local_subchannel_pool", 1)])

    with channel(other.name) as mine:
        greeting, refused = answers(mine, messages, 2)
        assert greeting.hello.node_uid == target.node_uid
        assert [(r.key, r.refusal) for r in refused.refused] == [(target.key, pb.REFUSAL_FENCED)]
    with channel("lookupd") as theirs, pytest.raises(grpc.RpcError) as caught:
        answers(theirs, messages, 1)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "Push is for nodes of this cluster" in caught.value.details()


# ---- certificates that are replaced


def accepted(cluster: TlsCluster, name: str, ca: str, trusted: str) -> list[str]:
    """Nodes that let in the administrator with a certificate of `ca`, and show one that `trusted` has signed."""
    made = cluster.files.certificates
    tls = ClusterTls(
        Path(made.cert(f"{name}-{ca}")).read_bytes(),
        Path(made.key(f"{name}-{ca}")).read_bytes(),
        Path(made.cert(trusted)).read_bytes(),
    )
    found = []
    for node in cluster.nodes:
        assert isinstance(node, TlsMember)
        with contextlib.suppress(grpc.RpcError), node.channel_to(tls) as channel:
            stub(channel).ListTopics(admin_pb2.ListTopicsRequest(), timeout=3)
            found.append(node.name)
    return found


def test_a_new_authority_replaces_the_old_one_without_a_restart(cluster: TlsCluster, topic: str) -> None:
    files = cluster.files
    before = cluster.wait_isr(topic, 3)
    with UnderLoad(cluster, topic, any_node=True):
        files.certificates.issue("admin-newer", ADMINISTRATOR, ca="newer")
        files.trust("ca", "newer")
        wait_until(lambda: len(accepted(cluster, "admin", "newer", "ca")) == 3, "both authorities are trusted")
        cluster.issue_all("newer")
        wait_until(lambda: len(accepted(cluster, "admin", "newer", "newer")) == 3, "all show a new certificate")
        files.trust("newer")
        wait_until(lambda: not accepted(cluster, "admin", "ca", "newer"), "the old authority is trusted no more")
        after = cluster.wait_isr(topic, 3)
        assert (after.leader, after.epoch) == (before.leader, before.epoch), "streams that stand are left alone"
    # Everything that is opened from here on has only the new ones, on both sides.
    leader = cluster.leader(topic)
    leader.kill()
    assert cluster.wait_isr(topic, 2).epoch > after.epoch
    leader.start()
    cluster.wait_isr(topic, 3)


def test_a_certificate_that_does_not_work_changes_nothing(cluster: TlsCluster, topic: str) -> None:
    node = cluster.nodes[0]
    path = cluster.files.folder / f"{node.name}.crt"
    good = path.read_bytes()
    path.write_bytes(b"half a certificate")
    wait_until(lambda: "the previous certificates stay in use" in node.log(), "it says so")
    assert isinstance(node, TlsMember)
    with node.channel_to() as channel:
        stub(channel).ListTopics(admin_pb2.ListTopicsRequest(), timeout=5)
    path.write_bytes(good)
