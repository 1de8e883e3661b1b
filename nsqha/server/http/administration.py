"""Administration by HTTP: /topic/... and /channel/..."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsqha.server.http.failures import done
from nsqha.server.http.server import ApiError, HttpApi, HttpRequest

if TYPE_CHECKING:
    from nsqha.server.http.broker_api import BrokerApi


class AdministrationRoutes:
    """The handlers that change topics and channels."""

    def __init__(self, broker: BrokerApi) -> None:
        self._broker = broker

    def add_to(self, api: HttpApi) -> None:
        for verb in ("create", "delete", "empty", "pause", "unpause"):
            api.add("POST", f"/topic/{verb}", getattr(self, f"topic_{verb}"))
            api.add("POST", f"/channel/{verb}", getattr(self, f"channel_{verb}"))

    async def topic_create(self, request: HttpRequest) -> None:
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        await done(self._broker.topics.create_topic(topic), self._broker)

    async def topic_delete(self, request: HttpRequest) -> None:
        topic = request.query.require("topic")
        with self._done_elsewhere(topic):
            await done(self._broker.topics.delete_topic(self._existing(request), unless_hidden=True), self._broker)

    async def topic_empty(self, request: HttpRequest) -> None:
        request.query.require_name("topic", "INVALID_TOPIC")
        await done(self._broker.channels.empty_topic(self._existing(request)), self._broker)

    async def topic_pause(self, request: HttpRequest) -> None:
        await done(self._broker.channels.pause_topic(self._existing(request), True), self._broker)

    async def topic_unpause(self, request: HttpRequest) -> None:
        await done(self._broker.channels.pause_topic(self._existing(request), False), self._broker)

    def _existing(self, request: HttpRequest) -> str:
        topic = request.query.require("topic")
        if topic not in self._broker.topics:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return topic

    async def channel_create(self, request: HttpRequest) -> None:
        topic, channel = self._named(request)
        await done(self._broker.channels.create(topic, channel), self._broker)

    async def channel_delete(self, request: HttpRequest) -> None:
        topic, channel = self._named(request)
        with self._done_elsewhere((topic, channel)):
            self._existing_channel(request)
            await done(self._broker.channels.delete(topic, channel), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_empty(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await done(self._broker.channels.empty(topic, channel), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_pause(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await done(self._broker.channels.pause(topic, channel, True), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_unpause(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await done(self._broker.channels.pause(topic, channel, False), self._broker, "CHANNEL_NOT_FOUND")

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
