"""Administration by HTTP: /topic/... and /channel/..."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from nsqha import ids
from nsqha.access.surfaces import ADMINISTER, DEAD_LETTER_TOPIC
from nsqha.election.model import ChannelList
from nsqha.election.policy import EVERY_CHANNEL, target_topic
from nsqha.errors import NsqhaError
from nsqha.server.http.failures import done
from nsqha.server.http.server import WHOLE, ApiError, HttpApi, HttpRequest

if TYPE_CHECKING:
    from nsqha.server.http.broker_api import BrokerApi


POLICY_BYTES_MAX = 64 * 1024


def _shown(topic: str, channel: str, channels: ChannelList) -> dict[str, object]:
    return {
        "topic": topic,
        "channel": channel,
        "policy": channels.own_policy(channel).said,
        "in_force": {
            name: {"value": field.value, "from": field.origin}
            for name, field in channels.policy_in_force(channel).items()
        },
    }


async def _unfinished(broker: BrokerApi, topic: str, channel: str = "", partition: int | None = None) -> int:
    """For the audit: so many messages that were never finished are about to go; 0 if that cannot be counted."""
    try:
        return await broker.endpoints.unfinished(topic, channel, partition)
    except NsqhaError:
        return 0


class AdministrationRoutes:
    """The handlers that change topics and channels."""

    def __init__(self, broker: BrokerApi) -> None:
        self._broker = broker

    def add_to(self, api: HttpApi) -> None:
        of_topic, of_channel = ("topic", "partition"), ("topic", "channel", "partition")
        for verb in ("create", "delete", "empty", "pause", "unpause"):
            api.add("POST", f"/topic/{verb}", getattr(self, f"topic_{verb}"), takes=of_topic)
            api.add("POST", f"/channel/{verb}", getattr(self, f"channel_{verb}"), takes=of_channel)
        api.add("GET", "/channel/policy", self.channel_policy)
        api.add("POST", "/channel/policy", self.change_channel_policy, takes=of_channel)
        api.add("POST", "/channel/skip", self.channel_skip, takes=of_channel)
        api.add("POST", "/channel/unskip", self.channel_unskip, takes=of_channel)
        api.add("POST", "/message/finish", self.message_finish, takes=of_channel)

    async def topic_create(self, request: HttpRequest) -> None:
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        self._whole(request, topic)
        await done(self._broker.topics.create_topic(topic), self._broker)

    async def topic_delete(self, request: HttpRequest) -> None:
        topic = request.query.require("topic")
        with self._done_elsewhere(topic):
            self._whole(request, self._existing(request))
            await done(self._broker.topics.delete_topic(topic, unless_hidden=True), self._broker)

    async def topic_empty(self, request: HttpRequest) -> None:
        request.query.require_name("topic", "INVALID_TOPIC")
        topic = self._existing(request)
        partition = self._partition(request, topic)
        skips = await _unfinished(self._broker, topic, "", partition)
        await done(self._broker.channels.empty_topic(topic, partition), self._broker)
        request.skips = skips

    async def topic_pause(self, request: HttpRequest) -> None:
        topic = self._whole(request, self._existing(request))
        await done(self._broker.channels.pause_topic(topic, True), self._broker)

    async def topic_unpause(self, request: HttpRequest) -> None:
        topic = self._whole(request, self._existing(request))
        await done(self._broker.channels.pause_topic(topic, False), self._broker)

    def _partition(self, request: HttpRequest, topic: str) -> int | None:
        """The partition that a client of the Youzan fork names; None: all. 400; 404: the topic has no such one."""
        text = request.query.get("partition") or ""
        if text in WHOLE:
            return None
        if not text.isascii() or not text.isdecimal() or len(text) > 10:
            raise ApiError(400, "INVALID_ARG_TOPIC_PARTITION", detail="partition is not a number")
        # A topic that is about to be created has one.
        count = len(self._broker.topics.topic(topic).record.partitions) if topic in self._broker.topics else 1
        if int(text) >= count:
            why = f"topic {topic} has the partitions 0 to {count - 1}"
            raise ApiError(404, "TOPIC_NOT_FOUND", detail=why)
        return int(text)

    def _whole(self, request: HttpRequest, topic: str) -> str:
        """The topic. Answer 400 if the request names one of several partitions: it can only be done in all of them."""
        partition = self._partition(request, topic)
        if partition is None or topic not in self._broker.topics:
            return topic
        if len(self._broker.topics.topic(topic).record.partitions) > 1:
            why = f"{request.path} acts on all partitions of a topic: send it without partition"
            raise ApiError(400, "INVALID_ARG_TOPIC_PARTITION", detail=why)
        return topic

    def _existing(self, request: HttpRequest) -> str:
        topic = request.query.require("topic")
        if topic not in self._broker.topics:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return topic

    async def channel_create(self, request: HttpRequest) -> None:
        topic, channel = self._named(request)
        self._whole(request, topic)
        await done(self._broker.channels.create(topic, channel), self._broker)

    async def channel_delete(self, request: HttpRequest) -> None:
        topic, channel = self._named(request)
        with self._done_elsewhere((topic, channel)):
            self._whole(request, self._existing_channel(request)[0])
            skips = await _unfinished(self._broker, topic, channel)
            await done(self._broker.channels.delete(topic, channel), self._broker, "CHANNEL_NOT_FOUND")
            request.skips = skips

    async def channel_empty(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        partition = self._partition(request, topic)
        skips = await _unfinished(self._broker, topic, channel, partition)
        await done(self._broker.channels.empty(topic, channel, partition), self._broker, "CHANNEL_NOT_FOUND")
        request.skips = skips

    async def channel_pause(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        self._whole(request, topic)
        await done(self._broker.channels.pause(topic, channel, True), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_unpause(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        self._whole(request, topic)
        await done(self._broker.channels.pause(topic, channel, False), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_policy(self, request: HttpRequest) -> dict[str, object]:
        """What a channel, or `*`, follows, and where each field comes from."""
        topic, channel = self._with_policy(request)
        return _shown(topic, channel, self._broker.topics.topic(topic).record.channels)

    async def change_channel_policy(self, request: HttpRequest) -> dict[str, object]:
        """The body is a JSON object of fields; null clears one."""
        topic, channel = self._with_policy(request)
        self._whole(request, topic)
        body = await request.body(POLICY_BYTES_MAX)
        if body is None:
            raise ApiError(413, "BODY_TOO_BIG")
        try:
            changes = msgspec.json.decode(body, type=dict[str, int | float | bool | str | None])
            if not changes:
                raise ValueError("the body has no field to change")
            if (target := target_topic(changes)) is not None:
                request.demand(DEAD_LETTER_TOPIC)
                if target == self._broker.options.audit_topic:
                    request.demand(ADMINISTER)
            changed = await done(self._broker.channels.ask(topic, channel, changes), self._broker, "CHANNEL_NOT_FOUND")
        except (msgspec.MsgspecError, ValueError) as error:
            raise ApiError(400, "INVALID_POLICY", detail=str(error)) from error
        return _shown(topic, channel, changed)

    async def channel_skip(self, request: HttpRequest) -> None:
        """As Youzan's: nothing that is published from now on, nor what is unread, is delivered."""
        await self._skip(request, True)

    async def channel_unskip(self, request: HttpRequest) -> None:
        """As Youzan's: what is published from now on is delivered again."""
        await self._skip(request, None)

    async def _skip(self, request: HttpRequest, skip: bool | None) -> None:
        topic, channel = self._existing_channel(request)
        self._whole(request, topic)
        try:
            await done(self._broker.channels.ask(topic, channel, {"skip": skip}), self._broker, "CHANNEL_NOT_FOUND")
        except ValueError as error:
            raise ApiError(400, "INVALID_POLICY", detail=str(error)) from error

    async def message_finish(self, request: HttpRequest) -> None:
        """As Youzan's: nobody gets the message `msgid` any more. Ids are 16 hex digits, and say the partition."""
        topic, channel = self._existing_channel(request)
        message_id = request.query.require("msgid")
        partition, number = self._partition(request, topic), ids.parse_message_id(message_id.encode())
        if None not in (partition, number) and partition != ids.partition_of(number or 0):
            raise ApiError(404, "MESSAGE_NOT_FOUND", detail=f"message {message_id} is not one of partition {partition}")
        try:
            await done(
                self._broker.endpoints.finish_message(topic, channel, message_id), self._broker, "MESSAGE_NOT_FOUND"
            )
        except ValueError as error:
            raise ApiError(400, "INVALID_ARG_MSGID", detail=str(error)) from error

    def _with_policy(self, request: HttpRequest) -> tuple[str, str]:
        if request.query.get("channel") != EVERY_CHANNEL:
            return self._existing_channel(request)
        return self._existing(request), EVERY_CHANNEL

    @contextmanager
    def _done_elsewhere(self, name: str | tuple[str, str]) -> Iterator[None]:
        """Deleting what another node has just deleted succeeds: nsqadmin asks every leader."""
        try:
            yield
        except ApiError as error:
            if error.status != 404 or name not in self._broker.topics.deleted_elsewhere:
                raise

    def _named(self, request: HttpRequest) -> tuple[str, str]:
        topic = request.query.require_name("topic")
        channel = request.query.require_name("channel")
        if topic not in self._broker.topics:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return topic, channel

    def _existing_channel(self, request: HttpRequest) -> tuple[str, str]:
        topic, channel = self._named(request)
        if not self._broker.channels.has(topic, channel):
            raise ApiError(404, "CHANNEL_NOT_FOUND")
        return topic, channel
