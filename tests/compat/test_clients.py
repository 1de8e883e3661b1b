"""Real, unmodified NSQ clients against the broker: publish, consume, requeue, time out, come back.

The same stories for every library; bodies are compared byte by byte and attempts one by one.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compat.drivers import LIBRARIES, Client, Library
from tests.integration.servers import Lookupd, Node, wait_until

MSG_TIMEOUT = 2.0  # where one is waited for; elsewhere a client that gets no core for a while is no failure
CLOCK_SLACK = 0.05
BINARY = bytes(range(256)) * 3
BIG = b"\x00nsq\n" * 40_000  # many reads, many compressed blocks

# The first use of a library may have to fetch and build it.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    key, cert = directory / "key.pem", directory / "cert.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=localhost"
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[Node]:
    cert, key = certificate
    flags = [f"--tls-cert={cert}", f"--tls-key={key}", "--https-address=127.0.0.1:0"]
    with Node(tmp_path_factory.mktemp("node"), flags=flags) as node:
        assert isinstance(node, Node)
        yield node


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Its default is short, too: not every library can ask for a time-out."""
    with Node(tmp_path_factory.mktemp("hasty"), flags=[f"--msg-timeout={MSG_TIMEOUT}s"]) as node:
        assert isinstance(node, Node)
        yield node


@pytest.fixture
def open_client() -> Iterator[Callable[[Library], Client]]:
    opened: list[Client] = []

    def open_one(library: Library) -> Client:
        client = Client(library)
        opened.append(client)
        return client

    yield open_one
    for client in opened:
        client.close()


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def client(request: pytest.FixtureRequest, open_client: Callable[[Library], Client]) -> Client:
    return open_client(request.param)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[-60:]


def is_empty(node: Node, topic: str, channel: str) -> bool:
    found = node.channel(topic, channel)
    return found is not None and found["depth"] == found["in_flight_count"] == found["deferred_count"] == 0


def publish_until_ok(client: Client, topic: str, body: bytes) -> None:
    """As an application does whose broker is away; a publish of unknown outcome may have been stored."""
    wait_until(lambda: not client.try_publish(topic, [body]), f"{client.library.name} publishes to {topic}", 40)


def test_what_is_published_comes_out_once_and_whole(client: Client, node: Node, topic: str) -> None:
    begun_ns = time.time_ns()
    client.produce(node.tcp)
    client.publish(topic, b"hello")
    client.publish(topic, BINARY, b"two", b"3", how="MPUB")
    client.publish(topic, BIG)
    client.consume(topic, "ch", nsqd=node.tcp)
    got = []
    for _ in range(5):
        got.append(client.must_get())
        client.fin(got[-1])
    assert [message.body for message in got] == [b"hello", BINARY, b"two", b"3", BIG]  # one window, one log: in order
    assert [message.attempts for message in got] == [1] * 5
    assert len({message.id for message in got}) == 5
    assert all(begun_ns <= message.timestamp <= time.time_ns() for message in got)
    wait_until(lambda: is_empty(node, topic, "ch"), "the channel is empty")
    stats = node.channel(topic, "ch")
    assert stats is not None
    assert (stats["message_count"], stats["requeue_count"], stats["timeout_count"]) == (5, 0, 0)
    assert stats["clients"][0]["finish_count"] == 5


def test_a_deferred_publish_comes_in_its_time(client: Client, node: Node, topic: str) -> None:
    client.produce(node.tcp)
    client.consume(topic, "ch", nsqd=node.tcp)
    wait_until(lambda: node.channel(topic, "ch"), "the channel exists")
    begun = time.monotonic()
    client.publish(topic, b"later", how="DPUB", delay_ms=600)
    client.publish(topic, b"now")
    first = client.must_get()
    client.fin(first)
    second = client.must_get()
    client.fin(second)
    assert (first.body, first.attempts) == (b"now", 1)
    assert (second.body, second.attempts) == (b"later", 1)
    assert second.at - begun >= 0.6 - CLOCK_SLACK
    wait_until(lambda: is_empty(node, topic, "ch"), "the channel is empty")


def test_a_requeued_message_comes_back_when_it_should(client: Client, node: Node, topic: str) -> None:
    client.produce(node.tcp)
    client.publish(topic, b"again")
    client.consume(topic, "ch", nsqd=node.tcp)
    first = client.must_get()
    client.req(first, 0)
    second = client.must_get()
    asked = time.monotonic()  # before: what is measured may not begin later than the broker's half a second
    client.req(second, 500)
    third = client.must_get()
    client.fin(third)
    assert [(m.body, m.attempts, m.id) for m in (first, second, third)] == [
        (b"again", 1, first.id),
        (b"again", 2, first.id),
        (b"again", 3, first.id),
    ]
    assert third.at - asked >= 0.5 - CLOCK_SLACK
    wait_until(lambda: is_empty(node, topic, "ch"), "the channel is empty")
    stats = node.channel(topic, "ch")
    assert stats is not None
    assert (stats["requeue_count"], stats["timeout_count"]) == (2, 0)


def test_a_message_left_alone_times_out_and_comes_back(client: Client, hasty: Node, topic: str) -> None:
    client.produce(hasty.tcp)
    client.publish(topic, b"left alone")
    begun = time.monotonic()  # the client tells of a delivery some time after the broker has begun to count
    client.consume(topic, "ch", nsqd=hasty.tcp, msg_timeout_ms=int(1000 * MSG_TIMEOUT))
    first = client.must_get()
    second = client.must_get()
    client.fin(second)
    assert (second.body, second.attempts, second.id) == (b"left alone", 2, first.id)
    assert second.timestamp == first.timestamp
    assert second.at - begun >= MSG_TIMEOUT - CLOCK_SLACK
    wait_until(lambda: is_empty(hasty, topic, "ch"), "the channel is empty")
    stats = hasty.channel(topic, "ch")
    assert stats is not None
    assert (stats["requeue_count"], stats["timeout_count"]) == (0, 1)


def test_touch_gives_more_time(client: Client, hasty: Node, topic: str) -> None:
    client.produce(hasty.tcp)
    client.publish(topic, b"slow work")
    client.consume(topic, "ch", nsqd=hasty.tcp, msg_timeout_ms=int(1000 * MSG_TIMEOUT))
    message = client.must_get()
    for _ in range(6):  # a fifth of the time-out each, so that a machine that stalls for a while is no failure
        client.touch(message)
        assert client.message(seconds=MSG_TIMEOUT / 5) is None, "it timed out although it was touched"
    client.fin(message)
    wait_until(lambda: is_empty(hasty, topic, "ch"), "the channel is empty")
    stats = hasty.channel(topic, "ch")
    assert stats is not None
    assert stats["timeout_count"] == 0


TRANSPORTS = [
    pytest.param(library, tls, compression, id=f"{library.name}-{'tls' if tls else 'plain'}-{compression or 'raw'}")
    for library in LIBRARIES
    for tls in ((False, True) if library.tls else ())
    for compression in ("", *library.compression)
    if tls or compression
]


@pytest.mark.parametrize(("library", "tls", "compression"), TRANSPORTS)
def test_tls_and_compression(
    library: Library, tls: bool, compression: str, open_client: Callable[[Library], Client], node: Node, topic: str
) -> None:
    client = open_client(library)
    if library.upgrading_producer:
        client.produce(node.tcp, tls=tls, compression=compression)
    else:
        client.produce(node.tcp)
    bodies = [b"small", BINARY, BIG, *(b"%d" % n * 50 for n in range(20))]
    client.publish(topic, *bodies, how="MPUB")
    client.consume(topic, "ch", nsqd=node.tcp, tls=tls, compression=compression)
    for body in bodies:
        message = client.must_get()
        assert (message.body, message.attempts) == (body, 1)
        client.fin(message)
    wait_until(lambda: is_empty(node, topic, "ch"), "the channel is empty")
    stats = node.channel(topic, "ch")
    assert stats is not None
    assert [stats["clients"][0][name] for name in ("tls", "snappy", "deflate")] == [
        tls,
        compression == "snappy",
        compression == "deflate",
    ]


def test_clients_find_the_broker_and_come_back_after_its_crash(
    open_client: Callable[[Library], Client], tmp_path: Path
) -> None:
    """All libraries at once, for some of them wait long before they try again.

    Each has a consumer that asks the lookup daemon and one that knows the address. In flight when the broker is killed
    is one message of each, and it comes again.
    """
    libraries = []
    for library in LIBRARIES:
        try:
            libraries.append((library, open_client(library)))
        except pytest.skip.Exception:
            continue  # the other tests say so
    with Lookupd(tmp_path / "lookupd") as lookupd:
        node = Node(tmp_path / "node", flags=[f"--lookupd-tcp-address={lookupd.tcp}", "--broadcast-address=127.0.0.1"])
        with node:
            for library, client in libraries:
                client.produce(node.tcp)
                for way in ("found", "known"):
                    client.publish(f"{library.name}.{way}", f"{way} before".encode())
            wait_until(
                lambda: len(lookupd.json("/topics")["topics"]) == 2 * len(libraries), "nsqlookupd knows all topics"
            )
            for library, client in libraries:
                client.consume(f"{library.name}.found", "ch", lookupd=lookupd.http)
                client.consume(f"{library.name}.known", "ch", nsqd=node.tcp)
            held = []
            for _, client in libraries:
                first = [client.must_get(), client.must_get()]
                assert sorted(m.body for m in first) == [b"found before", b"known before"]
                held += [(client, message) for message in first]

            node.kill()
            for client, message in held:
                client.fin(message)  # in vain, but go-nsq gives a connection up only when its handlers have ended
            node.start()

            for library, client in libraries:
                for way in ("found", "known"):
                    publish_until_ok(client, f"{library.name}.{way}", f"{way} after".encode())
            for library, client in libraries:
                again: set[bytes] = set()
                while len(again) < 4:
                    message = client.must_get(40)
                    client.fin(message)
                    again.add(message.body)
                assert again == {b"found before", b"known before", b"found after", b"known after"}, library.name
            for library, _ in libraries:
                for way in ("found", "known"):
                    topic = f"{library.name}.{way}"
                    wait_until(lambda topic=topic: is_empty(node, topic, "ch"), f"{topic} is empty")  # type: ignore[misc]
