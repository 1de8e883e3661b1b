"""One Live stream from the controller to each node: its end is the first sign that a node died, its silence that it is
frozen or cut off.

A stream that ends is opened again after REOPEN_S, while the node's record exists; each end, and each failed attempt,
is reported as a suspicion. The node sends its uid and registration, and `suspects`: all nodes that it has lost a
stream to now, and `unheard`: leaders that it does not hear any more, though nothing ended. Every message replaces the
one before; an empty list takes everything back.

A node that says nothing is pinged. While it does not answer, and the controller itself runs in time, that is reported
again and again (`nsqha.replication.silence`).

A node that takes questions is asked on the stream what it has of partitions (`nsqha.server.node.cluster.live`).

The process that answers at the address must be the expected node with the expected registration; another one says
nothing about this node, and its stream is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from nsqha.election.model import NodeInfo
from nsqha.errors import Unavailable
from nsqha.pb.v1.replication_pb2 import LiveMessage, StatusReply, StatusRequest
from nsqha.replication.silence import LOOK_SECONDS, SILENT_LOOKS, LookTimes, SilenceDetector
from nsqha.server.peers.api import Message, Peers, PeerStream

REOPEN_S = 0.25
SUSPECTS_MAX = 10_000


class LinkListener(Protocol):
    """Receives suspicions and blame."""

    def suspected(self, node: int, why: str) -> None:
        """The controller's stream to this node ended, or could not be opened."""

    def linked(self, node: int) -> None:
        """The controller's stream to this node is open."""

    def unheard(self, node: int) -> None:
        """The stream to this node is open, and nothing has come on it for a while."""

    def blamed(self, by: int, nodes: frozenset[int], unheard: frozenset[int]) -> None:
        """`nodes` are all nodes that the node `by` has lost its streams to, `unheard` all that it does not hear."""


class Links:
    """Streams to all nodes that are registered. Used on one loop."""

    def __init__(self, peers: Peers, cluster_id: int, listener: LinkListener) -> None:
        self._peers = peers
        self._cluster_id = cluster_id
        self._listener = listener
        self._links: dict[int, _NodeLink] = {}
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._look_times = LookTimes()
        self._next_look = self._loop.call_later(LOOK_SECONDS, self._look)

    def update(self, nodes: Mapping[int, NodeInfo]) -> None:
        """Open and close streams so that there is one for each of `nodes`."""
        for uid in [uid for uid, link in self._links.items() if link.node != _key(nodes.get(uid))]:
            self._links.pop(uid).close()
        for uid, node in nodes.items():
            if uid not in self._links and node.peer_address and not self._closed:
                self._links[uid] = _NodeLink(self._open, self._listener, node)

    @property
    def open(self) -> list[int]:
        """Nodes that have said hello on a stream that is still open."""
        return sorted(uid for uid, link in self._links.items() if link.greeted)

    def asks(self, node: int) -> bool:
        """Whether a question to this node goes on its stream."""
        link = self._links.get(node)
        return link is not None and link.takes_questions

    async def ask(self, node: int, request: StatusRequest, seconds: float) -> StatusReply:
        """What a node has of partitions. Unavailable: it refuses, is lost, or has not answered in time."""
        link = self._links.get(node)
        if link is None:
            raise Unavailable("there is no stream to it")
        return await link.ask(request, seconds)

    def _look(self) -> None:
        self._next_look = self._loop.call_later(LOOK_SECONDS, self._look)
        late = self._look_times.late(self._loop.time())
        for link in list(self._links.values()):
            link.look(late=late)

    def close(self) -> None:
        self._closed = True
        self._next_look.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _open(self, link: _NodeLink) -> PeerStream:
        stream = self._peers.stream(link.address, "Live", link)
        stream.send(LiveMessage(cluster_id=self._cluster_id))
        return stream


Identity = tuple[str, int, int]


def _key(node: NodeInfo | None) -> Identity | None:
    return None if node is None else (node.peer_address, node.node_uid, node.registration)


class _NodeLink:
    """The stream to one life of one node."""

    def __init__(self, open_: Callable[[_NodeLink], PeerStream], listener: LinkListener, node: NodeInfo) -> None:
        self.node = _key(node)
        self.address = node.peer_address
        self.greeted = False
        self.takes_questions = False
        self._questions = 0
        self._asked: dict[int, asyncio.Future[StatusReply]] = {}
        self._uid = node.node_uid
        self._registration = node.registration
        self._open = open_
        self._listener = listener
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._silence = SilenceDetector()
        self._stream: PeerStream | None = open_(self)

    def on_message(self, message: Message) -> None:
        if self._closed:
            return
        if (message.node_uid, message.registration) != (self._uid, self._registration):
            if self._stream is not None:
                self._stream.close(f"this is not node {self._uid:016x} with registration {self._registration}")
            return
        if message.question:
            self._answered(message)
            return
        self.greeted = True
        self.takes_questions = message.takes_questions
        self._listener.linked(self._uid)
        lost, unheard = message.suspects[:SUSPECTS_MAX], message.unheard[:SUSPECTS_MAX]
        self._listener.blamed(self._uid, frozenset(lost), frozenset(unheard))

    async def ask(self, request: StatusRequest, seconds: float) -> StatusReply:
        if self._stream is None:
            raise Unavailable("its stream has ended")
        self._questions += 1
        number, answer = self._questions, asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._stream.send(LiveMessage(cluster_id=request.cluster_id, question=number, status_request=request))
        try:
            async with asyncio.timeout(seconds):
                reply: StatusReply = await answer
                return reply
        except TimeoutError:
            raise Unavailable(f"it has not answered within {seconds:.3g} s") from None
        finally:
            del self._asked[number]

    def _answered(self, message: Message) -> None:
        answer = self._asked.get(message.question)
        if answer is None or answer.done():
            return  # too late
        if message.refused:
            answer.set_exception(Unavailable(message.refused))
        else:
            answer.set_result(message.status)

    def on_closed(self, why: str) -> None:
        self.greeted = self.takes_questions = False
        self._stream = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Unavailable(f"its stream has ended: {why}"))
        if self._closed:
            return
        self._timer = asyncio.get_running_loop().call_later(REOPEN_S, self._reopen)
        self._listener.blamed(self._uid, frozenset(), frozenset())
        self._listener.suspected(self._uid, why)

    def look(self, *, late: bool) -> None:
        """Whether the node is heard. It says hello before that is asked."""
        if not self.greeted or self._stream is None:
            self._silence.reset()
            return
        if self._silence.look(self._stream.heard, late=late):
            self._stream.ping()
        if self._silence.silent and self._silence.looks % SILENT_LOOKS == 0:
            self._listener.unheard(self._uid)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.close("the controller does not need it any more")

    def _reopen(self) -> None:
        if not self._closed:
            self._stream = self._open(self)
