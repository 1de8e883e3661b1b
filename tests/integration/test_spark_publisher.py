"""The publisher of a task against real nodes: TLS, AUTH, limits, and kill -9 while it publishes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import Subscriber
from pyspark_nsqha.writing.publisher import Command, LinkSecurity, PublishRefused, TaskPublisher
from tests.certificates import Certificates
from tests.integration.cluster import Cluster
from tests.integration.servers import Node
from tests.integration.test_cli_security import SECRET, Permissions

pytestmark = pytest.mark.timeout(180)


def mpub(topic: str, *bodies: bytes) -> Command:
    body = struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(each)) + each for each in bodies)
    return Command(b"MPUB %b\n" % topic.encode() + struct.pack(">I", len(body)) + body, len(bodies))


def stored(address: str, topic: str, last: bytes, channel: str = "test") -> list[bytes]:
    """The bodies that a channel gets, which is the first one of its topic, in the order of the log, until `last`."""
    bodies: list[bytes] = []
    subscriber = Subscriber(address, 30, topic, channel, window=2500)
    while (not bodies or bodies[-1] != last) and (messages := subscriber.messages()):
        bodies += [message.body for message in messages]
        subscriber.answer(messages, None, None)
    subscriber.leave()
    return bodies


def last_occurrences(log: list[bytes]) -> list[bytes]:
    """What a reader sees that keeps the last copy of each message."""
    places = {body: at for at, body in enumerate(log)}
    return sorted(places, key=places.__getitem__)


# ---- certificates and secrets


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    found = Certificates(tmp_path_factory.mktemp("certificates"))
    found.issue("broker", "IP:127.0.0.1")
    found.issue("joe")
    return found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Node]:
    """Wants TLS, a certificate and a secret."""
    server = HTTPServer(("127.0.0.1", 0), Permissions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [
        f"--tls-cert={certificates.cert('broker')}",
        f"--tls-key={certificates.key('broker')}",
        f"--tls-root-ca-file={certificates.cert('ca')}",
        "--tls-client-auth-policy=require-verify",
        "--tls-required=true",
        "--https-address=127.0.0.1:0",
        f"--auth-http-address=127.0.0.1:{server.server_address[1]}",
    ]
    with Node(tmp_path_factory.mktemp("guarded"), sync="none", flags=flags) as node:
        yield node
    server.shutdown()
    server.server_close()


def publish(node: Node, topic: str, security: LinkSecurity) -> int:
    publisher = TaskPublisher([node.tcp], timeout_s=30, security=security)
    try:
        for _ in range(20):
            publisher.publish(mpub(topic, b"x" * 100_000, b"y"))
        publisher.flush()
    finally:
        publisher.close()
    return publisher.tally.published


def test_a_certificate_and_a_secret_let_a_task_publish(guarded: Node, certificates: Certificates) -> None:
    files = certificates.cert("ca"), certificates.cert("joe"), certificates.key("joe")
    assert publish(guarded, "orders", LinkSecurity(True, *files, auth_secret=SECRET.encode())) == 40


def test_what_does_not_fit_is_refused_at_once_with_what_to_do(guarded: Node, certificates: Certificates) -> None:
    ca, cert, key = certificates.cert("ca"), certificates.cert("joe"), certificates.key("joe")

    def refused(security: LinkSecurity, topic: str = "orders") -> str:
        with pytest.raises(PublishRefused) as why:
            publish(guarded, topic, security)
        assert "\n" not in str(why.value) and SECRET not in str(why.value)
        return str(why.value)

    assert "set option nsqha.tls to true" in refused(LinkSecurity())
    assert "is not trusted" in refused(LinkSecurity(True)) and "nsqha.tls.ca" in refused(LinkSecurity(True))
    assert "nsqha.authSecretFile" in refused(LinkSecurity(True, ca, cert, key))
    assert "E_UNAUTHORIZED" in refused(LinkSecurity(True, ca, cert, key, auth_secret=b"wrong"))
    assert "E_UNAUTHORIZED" in refused(LinkSecurity(True, ca, cert, key, auth_secret=SECRET.encode()), "mail")
    assert "option nsqha.tls.ca: /none: No such file" in refused(LinkSecurity(True, "/none"))


# ---- limits and crashes


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(
        tmp_path, sync="none", flags=["--max-msg-size=1000", "--max-body-size=5000", "--max-req-timeout=1h"]
    ) as node:
        yield node


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (mpub("t", b"x" * 1001), r"E_BAD_MESSAGE MPUB message too big 1001 > 1000 .*maxMessageBytes"),
        (mpub("t", *[b"x" * 900] * 6), r"E_BAD_BODY MPUB body too big .*batchBytes"),
        (Command(b"DPUB t 3600001\n\0\0\0\1x", 1), r"E_INVALID DPUB timeout .*--max-req-timeout"),
    ],
)
def test_limits_of_the_broker_are_said_with_the_option_to_change(node: Node, command: Command, text: str) -> None:
    publisher = TaskPublisher([node.tcp], timeout_s=20)
    with pytest.raises(PublishRefused, match=text):
        publisher.publish(command)
        publisher.flush()
    publisher.close()


def numbered(topic: str, n: int) -> list[Command]:
    return [mpub(topic, *(b"%06d" % i for i in range(at * 10, at * 10 + 10))) for at in range(n)]


def test_a_node_that_is_killed_and_started_again_loses_nothing(tmp_path: Path) -> None:
    with Node(tmp_path, sync="none") as node:
        publisher = TaskPublisher([node.tcp], timeout_s=60)
        for at, command in enumerate(numbered("t", 3000)):
            publisher.publish(command)
            if at in (500, 1500):
                node.kill()
                node.start()
        publisher.flush()
        publisher.close()
        log = stored(node.tcp, "t", b"029999")
    assert publisher.tally.published == 30_000
    assert last_occurrences(log) == [b"%06d" % i for i in range(30_000)]
    assert len(log) - 30_000 <= publisher.tally.possible_duplicates


def test_a_leader_that_is_killed_costs_a_task_no_message(cluster: Cluster, topic: str) -> None:
    leader = cluster.leader(topic)
    others = [node.tcp for node in cluster.nodes if node is not leader]
    publisher = TaskPublisher([leader.tcp, *others], timeout_s=90)
    for at, command in enumerate(numbered(topic, 1000)):
        publisher.publish(command)
        if at == 300:
            leader.kill()
    publisher.flush()
    publisher.close()
    log = stored(others[0], topic, b"009999", "steady")
    assert last_occurrences(log) == [b"%06d" % i for i in range(10_000)]
    assert len(log) - 10_000 <= publisher.tally.possible_duplicates
    leader.start()
