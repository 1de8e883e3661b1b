"""Publishing by HTTP: /pub and /mpub.

The order of the checks is nsqd's, and visible: /pub checks the body first and then the topic, /mpub the topic first,
and creates the topic before it reads the body.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from nsqha import hot
from nsqha.errors import Unavailable
from nsqha.server.http.failures import done
from nsqha.server.http.server import ApiError, HttpApi, HttpRequest
from nsqha.server.runtime.budget import NO_ROOM

if TYPE_CHECKING:
    from nsqha.server.http.broker_api import BrokerApi

PIECE_BYTES = 16 * 1024
"""A body of lines becomes frames in pieces of this size: a message costs 0.5 us, and its line may have two bytes."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class HttpPublishRoutes:
    """The handlers of /pub and /mpub."""

    def __init__(self, broker: BrokerApi) -> None:
        self._broker = broker
        self._framing = asyncio.Lock()

    def add_to(self, api: HttpApi) -> None:
        api.add("POST", "/pub", self.pub, quiet=True)
        api.add("POST", "/mpub", self.mpub, quiet=True)

    async def pub(self, request: HttpRequest) -> object:
        body = await request.body(self._broker.options.max_msg_size)
        if body is None:
            raise ApiError(413, "MSG_TOO_BIG")
        if not body:
            raise ApiError(400, "MSG_EMPTY")
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        delay_ms = self._delay_ms(request)
        partition = self._partition(request, topic)
        self._refuse_unless_creatable(topic)
        publish = self._broker.publishing.publish(topic, hot.frame(body), partition=partition, deliver_in_ms=delay_ms)
        await done(publish, self._broker)
        return "OK"

    async def mpub(self, request: HttpRequest) -> object:
        options = self._broker.options
        if (request.content_length or 0) > options.max_body_size:
            raise ApiError(413, "BODY_TOO_BIG")
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        binary = request.query.flag("binary", False)
        delay_ms = self._delay_ms(request)
        partition = self._partition(request, topic)
        self._refuse_unless_creatable(topic)
        if topic not in self._broker.topics:
            await done(self._broker.topics.ensure_topic(topic), self._broker)
        body = await request.body(options.max_body_size)
        if body is None:
            raise ApiError(413, "BODY_TOO_BIG")
        until = self._broker.publishing.patience()
        if len(body) <= PIECE_BYTES:
            frames = await self._frames(body, binary)
        else:
            frames = await done(self._frames_in_turn(body, binary, until), self._broker)
        if frames:
            publish = self._broker.publishing.publish(
                topic, frames, partition=partition, deliver_in_ms=delay_ms, until=until
            )
            await done(publish, self._broker)
        return "OK"

    async def _frames_in_turn(self, body: bytes, binary: bool, until: float) -> bytes:
        """Build frames for one body at a time, when the budget has room: they may be 12 times as large as the lines.

        Unavailable after `until`. It is set when a request arrives, so requests that wait for the same disk wait in
        parallel and give up in parallel."""
        try:
            async with asyncio.timeout_at(until) as waiting, self._framing:
                await self._broker.publishing.room(until)
                waiting.reschedule(None)
                return await self._frames(body, binary)
        except TimeoutError:
            raise Unavailable(NO_ROOM) from None

    async def _frames(self, body: bytes, binary: bool) -> bytes:
        return self._counted(body) if binary else await frames_of_lines(body, self._broker.options.max_msg_size)

    def _counted(self, body: bytes) -> bytes:
        """The frames of a binary MPUB body: a count, then size and bytes of each message."""
        options = self._broker.options
        count = int.from_bytes(body[:4], "big", signed=True)
        if len(body) < 4 or not 0 < count <= (options.max_body_size - 4) // 5:
            raise ApiError(413, "BAD_BODY")
        run = hot.mpub_body(body, 0, len(body), options.max_msg_size)
        if run is None:
            raise ApiError(413, "BAD_MESSAGE")
        _, frames = run
        return frames

    def _delay_ms(self, request: HttpRequest) -> int | None:
        text = request.query.get("defer")
        if text is None:
            return None
        if not _INTEGER.fullmatch(text) or not 0 <= int(text) * 1_000_000 <= self._broker.options.max_req_timeout_ns:
            raise ApiError(400, "INVALID_DEFER")
        return int(text) or None

    def _partition(self, request: HttpRequest, topic: str) -> int | None:
        """The partition that a client of the Youzan fork names; None: any, as with V2's commands."""
        text = request.query.get("partition")
        partitions = self._broker.publishing.named_partitions(topic) if text and text != "-1" else 0
        if not text or not partitions:
            return None
        if not _INTEGER.fullmatch(text) or not 0 <= int(text) < partitions:
            why = f"topic {topic} has the partitions 0 to {partitions - 1}"
            raise ApiError(400, "INVALID_ARG_TOPIC_PARTITION", detail=why)
        return int(text)

    def _refuse_unless_creatable(self, topic: str) -> None:
        if self._broker.exiting:
            raise ApiError(503, "EXITING")
        if not self._broker.options.auto_create_topics and topic not in self._broker.topics:
            raise ApiError(404, "TOPIC_NOT_FOUND")


async def frames_of_lines(body: bytes, size_max: int) -> bytes:
    """The frames of a body with one message per line; empty lines are skipped. 413 MSG_TOO_BIG.

    Other tasks run after each piece of PIECE_BYTES."""
    pieces: list[bytes] = []
    start = 0
    while start < len(body):
        end = body.find(b"\n", start + PIECE_BYTES) + 1 or len(body)
        messages = [line for line in body[start:end].split(b"\n") if line]
        if len(max(messages, key=len, default=b"")) > size_max:
            raise ApiError(413, "MSG_TOO_BIG")
        pieces.append(b"".join(map(hot.frame, messages)))
        start = end
        if start < len(body):
            await asyncio.sleep(0)
    return b"".join(pieces)
