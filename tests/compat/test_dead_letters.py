"""Real, unmodified NSQ clients with their default limit of attempts, and a handler that always fails.

No message is given up by a client; each is a dead letter, and comes at attempt 1 when an operator says so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.compat.drivers import LIBRARIES, Client, Library
from tests.integration.devnode import DevNode
from tests.integration.servers import wait_until

ATTEMPTS = 5  # beyond that go-nsq, pynsq and gnsq finish a message by themselves
BODIES = [b"one", b"two", b"three"]

pytestmark = pytest.mark.timeout(300)  # the first use of a library may have to fetch and build it


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("dead"))
    try:
        yield node
    finally:
        node.stop()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_what_always_fails_is_a_dead_letter_and_not_given_up(node: DevNode, library: Library) -> None:
    topic = f"failing-{library.name}"
    node.create(topic, "ch")
    node.ok("channel", "set", topic, "ch", "--max-attempts", str(ATTEMPTS))
    client = Client(library)
    try:
        client.produce(node.tcp)
        client.publish(topic, *BODIES, how="MPUB")
        client.consume(topic, "ch", nsqd=node.tcp, gives_up=True)
        seen: Counter[tuple[bytes, int]] = Counter()
        for _ in range(len(BODIES) * ATTEMPTS):
            message = client.must_get()
            seen[message.body, message.attempts] += 1
            client.req(message, 0)
        assert seen == Counter((body, n) for body in BODIES for n in range(1, ATTEMPTS + 1))
        wait_until(lambda: node.json("channel", "show", topic, "ch")["dead"] == len(BODIES), "all are dead")
        assert client.message(0.5) is None
        listed = [json.loads(line) for line in node.ok("dead", "list", topic, "ch", "--bodies", "--json").splitlines()]
        assert {(letter["body"], letter["attempts"], letter["reason"]) for letter in listed} == {
            (body.decode(), ATTEMPTS, "requeued") for body in BODIES
        }
        assert node.json("channel", "show", topic, "ch")["finished"] == 0, "the client gave none up"
        assert node.json("dead", "requeue", topic, "ch", "--all", "--yes")["messages"] == len(BODIES)
        for _ in BODIES:
            message = client.must_get()
            assert message.attempts == 1
            client.fin(message)
        wait_until(lambda: node.json("channel", "show", topic, "ch")["finished"] == len(BODIES), "all are finished")
    finally:
        client.close()
