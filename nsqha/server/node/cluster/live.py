"""A controller's stream to this node: its end is the first sign that one of them is gone.

    node  -> controller   what this node suspects, each time that changes (`suspects`)
    controller -> node    a question: what have you of these partitions?
    node  -> controller   its answer

A controller elects nobody before the replicas have answered, and after the death of a node the loops of the others are
busy. An answer by gRPC takes several of their turns and of its threads', one on this stream takes one turn.

A turn answers one question, and few of them wait, or their answers: one costs as much as the partitions that it names.

When a node that led thousands dies, the controller asks for them in parts. Leaders of all elected at once would take
each step side by side, and the first serve hardly sooner than the last. So a question about more than MANY partitions
is *held* while more than MANY of those that were asked for before have no leader, for HOLD_SECONDS at most; one about
few goes ahead. What is let go overlaps with the end of the part before: each part takes some steps in which both loops
wait for the disk, the store or each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from nsqha.errors import LimitReached, NsqhaError
from nsqha.ids import PartitionKey
from nsqha.pb.v1 import replication_pb2 as pb

if TYPE_CHECKING:
    from nsqha.server.node.cluster.suspects import Suspects
    from nsqha.server.peers.api import PeerStream

QUESTIONS_MAX = 32  # that wait on one stream, and as many answers that the other side does not read
KEYS_MAX = 1_000  # of one question
MANY = 150
HOLD_SECONDS = 0.25  # after the answer before; `ControllerLimits.key_s` has time for it
LOOK_SECONDS = 0.02


class AskedReplicas(Protocol):
    """What this node has."""

    def status_of(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Answer a question; raises an NsqhaError."""

    def unled(self, keys: Sequence[PartitionKey], most: int) -> list[PartitionKey]:
        """Those that have a replica here and no leader that serves. When more than `most` are found, the rest need not
        be looked at, and stays."""


class LiveStream:
    """A controller's stream to this node."""

    def __init__(
        self,
        suspects: Suspects,
        stream: PeerStream,
        replicas: AskedReplicas,
        *,
        controller_came: Callable[[], None] = lambda: None,
    ) -> None:
        """`controller_came`: it is a controller that opened the stream, and has accepted this side."""
        self._suspects = suspects
        self._stream = stream
        self._replicas = replicas
        self._controller_came = controller_came
        self._questions: deque[pb.LiveMessage] = deque()
        self._held: deque[pb.LiveMessage] = deque()
        self._unled: list[PartitionKey] = []  # of those that were asked for, many at a time, the last ones
        self._loop = asyncio.get_running_loop()
        self._held_until = 0.0  # the loop's time
        self._look_at: asyncio.TimerHandle | None = None
        suspects.informs(stream)

    def on_message(self, message: pb.LiveMessage) -> None:
        """A question, or a greeting: the controller's, or that of a node that only tries whether it gets through.
        LimitReached: too much is asked, which ends the stream."""
        if not message.question:
            if not message.node_uid:
                self._controller_came()
            return
        waiting = max(len(self._questions) + len(self._held), self._stream.pending)
        partitions = len(message.status_request.keys)
        if waiting >= QUESTIONS_MAX or not 0 < partitions <= KEYS_MAX:
            raise LimitReached(f"a node answers questions about 1 to {KEYS_MAX} partitions, {QUESTIONS_MAX} at a time")
        if partitions > MANY and (self._held or self._holds()):
            self._held.append(message)
            self._look_later()
        else:
            self._take(message)

    def _take(self, question: pb.LiveMessage) -> None:
        if len(question.status_request.keys) > MANY:
            self._unled += [(key.topic_uid, key.partition) for key in question.status_request.keys]
            del self._unled[:-KEYS_MAX]
            self._held_until = self._loop.time() + HOLD_SECONDS
        self._questions.append(question)
        if len(self._questions) == 1:
            self._answer_next()

    def _holds(self) -> bool:
        if self._loop.time() >= self._held_until:
            return False
        self._unled = self._replicas.unled(self._unled, MANY)  # they are looked at again until they have found one
        return len(self._unled) > MANY

    def _look_later(self) -> None:
        if self._look_at is None:
            self._look_at = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._look_at = None
        if not self._holds():
            self._take(self._held.popleft())
        if self._held:
            self._look_later()

    def _answer_next(self) -> None:
        question = self._questions[0]
        message = self._suspects.signed()
        message.question = question.question
        try:
            message.status.CopyFrom(self._replicas.status_of(question.status_request))
        except NsqhaError as error:
            message.refused = str(error)
        self._stream.send(message)
        self._loop.call_soon(self._answered)

    def _answered(self) -> None:
        if self._questions:
            self._questions.popleft()
        if self._questions:
            self._answer_next()

    def on_closed(self, why: str) -> None:
        self._questions.clear()
        self._held.clear()
        if self._look_at is not None:
            self._look_at.cancel()
        self._suspects.stream_closed(self._stream)
