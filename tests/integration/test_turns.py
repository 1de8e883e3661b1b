"""Whose turn it is, as a plain V2 consumer with RDY 1 sees it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Self

import pytest

from tests.integration.devnode import DevNode


class OneByOne:
    """A consumer with RDY 1 on a plain socket."""

    def __init__(self, address: str, topic: str, *, ready: int = 1, **identity: int) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._stream = self._socket.makefile("rb")
        if identity:
            body = json.dumps(identity).encode()
            self._socket.sendall(b"  V2IDENTIFY\n" + len(body).to_bytes(4, "big") + body)
            assert self._frame() == (0, b"OK")
        else:
            self._socket.sendall(b"  V2")
        self._socket.sendall(b"SUB %s c\nRDY %d\n" % (topic.encode(), ready))
        assert self._frame() == (0, b"OK")

    def _frame(self) -> tuple[int, bytes]:
        size = int.from_bytes(self._stream.read(4), "big")
        data = self._stream.read(size)
        return int.from_bytes(data[:4], "big"), data[4:]

    def next(self) -> tuple[str, int, bytes]:
        """Body, attempts and id of the next message."""
        kind, data = self._frame()
        while (kind, data) == (0, b"_heartbeat_"):
            self._socket.sendall(b"NOP\n")
            kind, data = self._frame()
        assert kind == 2, data
        return data[26:].decode(), int.from_bytes(data[8:10], "big"), data[10:26]

    def fin(self, message_id: bytes) -> None:
        self._socket.sendall(b"FIN " + message_id + b"\n")

    def requeue(self, message_id: bytes, delay_ms: int = 0) -> None:
        self._socket.sendall(b"REQ %s %d\n" % (message_id, delay_ms))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("turns"))
    try:
        yield node
    finally:
        node.stop()


@pytest.fixture
def topic(node: DevNode, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)[:60]
    node.create(name, "c")
    return name


def test_what_is_requeued_comes_behind_what_waits(node: DevNode, topic: str) -> None:
    node.publish(topic, "m0", "m1", "m2")
    with OneByOne(node.tcp, topic) as consumer:
        body, attempts, first = consumer.next()
        assert (body, attempts) == ("m0", 1)
        consumer.requeue(first)
        for wanted in (("m1", 1), ("m2", 1), ("m0", 2)):
            body, attempts, message_id = consumer.next()
            assert (body, attempts) == wanted
            consumer.fin(message_id)


def test_what_times_out_comes_behind_what_waits(node: DevNode, topic: str) -> None:
    node.publish(topic, "m0", "m1", "m2")
    with OneByOne(node.tcp, topic, msg_timeout=3000) as consumer:
        assert consumer.next()[0] == "m0"  # and it is not answered
        for wanted in (("m1", 1), ("m2", 1), ("m0", 2)):
            body, attempts, message_id = consumer.next()
            assert (body, attempts) == wanted
            consumer.fin(message_id)


def test_messages_that_always_fail_do_not_stop_a_channel(node: DevNode, topic: str) -> None:
    failing = {f"bad{n}" for n in range(4)}
    node.publish(topic, *sorted(failing), *(f"good{n}" for n in range(3000)))
    with OneByOne(node.tcp, topic, ready=len(failing)) as consumer:
        good: list[str] = []
        for _ in range(4000):
            body, _attempts, message_id = consumer.next()
            if body in failing:
                consumer.requeue(message_id)
            else:
                consumer.fin(message_id)
                good.append(body)
            if len(good) == 3000:
                break
        assert good == [f"good{n}" for n in range(3000)]
