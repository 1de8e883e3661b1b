"""Who may push to a node: the first message of a stream says for whom it is and from whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.replica.following.receiver import Receiver

ME = pb.PushHello(cluster_id=7, node_uid=2, registration=40)


class Stream:
    pending = 0

    def __init__(self) -> None:
        self.peer = PeerIdentity("127.0.0.1:1")
        self.sent: list[Any] = []
        self.why: str | None = None
        self.heard = 0.0
        self.pings = 0

    def ping(self) -> None:
        self.pings += 1

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def pull(self, give: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: self.send(give()))

    def close(self, why: str = "") -> None:
        self.why = why


class Node:
    """The replicas of node 2."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.found: list[int] = []
        self.lost = 0  # partitions without their leader's stream

    def hello(self) -> pb.PushHello:
        return pb.PushHello.FromString(ME.SerializeToString())

    def following(self, key: Any) -> None:
        return None

    def name_of(self, node: int) -> str:
        return ""

    def open(self, receiver: Receiver, opened: Any) -> None:
        self.opened.append(opened)

    def leader_lost(self, partitions: int) -> None:
        self.lost += partitions

    def stream_lost(self, node: int) -> None:
        pass

    def stream_found(self, node: int) -> None:
        self.found.append(node)


async def pushed(hello: pb.PushHello) -> tuple[Stream, Node]:
    """What a stream and a node look like after a hello with an Open behind it."""
    stream, node = Stream(), Node()
    receiver = Receiver(node, node, stream)  # type: ignore[arg-type]
    message = pb.PushMessage(hello=hello)
    message.opens.add(topic="orders")
    receiver.on_message(message)
    await asyncio.sleep(0)
    return stream, node


def test_a_hello_for_this_node_is_answered() -> None:
    stream, node = asyncio.run(pushed(pb.PushHello(cluster_id=7, node_uid=1, target_uid=2)))
    assert stream.why is None
    assert node.found == [1]
    assert len(node.opened) == 1
    assert (stream.sent[0].hello.node_uid, stream.sent[0].hello.registration) == (2, 40)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (pb.PushHello(cluster_id=8, node_uid=1, target_uid=2), "cluster"),
        (pb.PushHello(cluster_id=7, node_uid=1, target_uid=3), "this is node 0000000000000002"),
    ],
)
def test_a_stream_for_somebody_else_is_closed_and_nothing_is_opened(hello: pb.PushHello, why: str) -> None:
    stream, node = asyncio.run(pushed(hello))
    assert stream.why is not None
    assert why in stream.why
    assert (node.opened, node.found, stream.sent) == ([], [], [])


class Followed:
    """A partition that is followed on a stream."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.port: Any = None

    def left(self, port: Any) -> None: ...


def looks(receiver: Receiver, times: int) -> list[bool | None]:
    return [receiver.silent(late=False) for _ in range(times)]


def test_a_leader_that_answers_no_ping_is_silent() -> None:
    stream, node = Stream(), Node()
    receiver, follower = Receiver(node, node, stream), Followed((1, 0))  # type: ignore[arg-type]
    assert looks(receiver, 12) == [None] * 12, "nothing is followed on it"
    follower.port = receiver
    receiver.followed_by(follower)  # type: ignore[arg-type]
    assert looks(receiver, 10)[-1] is False and stream.pings == 1
    assert looks(receiver, 1) == [True]
    stream.heard = 1.0
    assert looks(receiver, 1) == [False]


def test_a_stream_is_listened_to_while_one_partition_is_followed_on_it() -> None:
    stream, node = Stream(), Node()
    receiver, gone, stays = Receiver(node, node, stream), Followed((1, 0)), Followed((1, 1))  # type: ignore[arg-type]
    for follower in (gone, stays):
        follower.port = receiver
        receiver.followed_by(follower)  # type: ignore[arg-type]
    gone.port = None
    assert looks(receiver, 1) == [False]
    stays.port = None
    assert looks(receiver, 1) == [None]
