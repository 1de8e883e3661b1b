"""A controller's stream to this node: its end is the first sign that one of them is gone.

    node  -> controller   what this node suspects, each time that changes (`suspects`)
    controller -> node    a question: what have you of these partitions?
    node  -> controller   its answer

A controller elects nobody before the replicas have answered, and after the death of a node the loops of the others are
busy. An answer by gRPC takes several of their turns and of its threads', one on this stream takes one turn.

A turn answers one question, and few of them wait, or their answers: one costs as much as the partitions that it names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.errors import LimitReached, NsqhaError
from nsqha.pb.v1 import replication_pb2 as pb

if TYPE_CHECKING:
    from nsqha.server.node.cluster.suspects import Suspects
    from nsqha.server.peers.api import PeerStream

QUESTIONS_MAX = 32  # that wait on one stream, and as many answers that the other side does not read
KEYS_MAX = 1_000  # of one question

Answer = Callable[[pb.StatusRequest], pb.StatusReply]


class LiveStream:
    """A controller's stream to this node."""

    def __init__(self, suspects: Suspects, stream: PeerStream, answer: Answer) -> None:
        """`answer` replies or raises an NsqhaError."""
        self._suspects = suspects
        self._stream = stream
        self._answer = answer
        self._questions: deque[pb.LiveMessage] = deque()
        suspects.informs(stream)

    def on_message(self, message: pb.LiveMessage) -> None:
        """A question, or the controller's greeting. LimitReached: too much is asked, which ends the stream."""
        if not message.question:
            return
        waiting = max(len(self._questions), self._stream.pending)
        if waiting >= QUESTIONS_MAX or not 0 < len(message.status_request.keys) <= KEYS_MAX:
            raise LimitReached(f"a node answers questions about 1 to {KEYS_MAX} partitions, {QUESTIONS_MAX} at a time")
        self._questions.append(message)
        if len(self._questions) == 1:
            self._answer_next()

    def _answer_next(self) -> None:
        question = self._questions[0]
        message = self._suspects.signed()
        message.question = question.question
        try:
            message.status.CopyFrom(self._answer(question.status_request))
        except NsqhaError as error:
            message.refused = str(error)
        self._stream.send(message)
        asyncio.get_running_loop().call_soon(self._answered)

    def _answered(self) -> None:
        if self._questions:
            self._questions.popleft()
        if self._questions:
            self._answer_next()

    def on_closed(self, why: str) -> None:
        self._questions.clear()
        self._suspects.stream_closed(self._stream)
