"""The lookup daemon's HTTP API: what clients, nsqadmin and nsqd ask it.

Key order and spelling are upstream's. /nodes gives as many `tombstones` as `topics`: nsqadmin indexes one by the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from lookupd.registry import Peer, Registry
from nsqha import NSQ_VERSION
from nsqha.clock import Clock, read
from nsqha.server.http_envelope import ApiError, HttpApi, Request


class LookupdApi:
    """Answers from one registry. Handlers never wait, so that each answer is one consistent picture."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    def routes(self) -> HttpApi:
        api = HttpApi()
        api.add("GET", "/ping", _async(lambda _: "OK"), plain=True)
        api.add("GET", "/info", _async(lambda _: {"version": NSQ_VERSION}))
        api.add("GET", "/topics", _async(lambda _: {"topics": self._registry.topics()}))
        api.add("GET", "/channels", _async(self.channels))
        api.add("GET", "/lookup", _async(self.lookup))
        api.add("GET", "/nodes", _async(self.nodes))
        api.add("GET", "/debug", _async(self.debug))
        api.add("POST", "/topic/create", _async(self.create_topic))
        api.add("POST", "/topic/delete", _async(self.delete_topic))
        api.add("POST", "/topic/tombstone", _async(self.tombstone))
        api.add("POST", "/channel/create", _async(self.create_channel))
        api.add("POST", "/channel/delete", _async(self.delete_channel))
        return api

    def channels(self, request: Request) -> object:
        return {"channels": self._registry.channels(request.query.require("topic"))}

    def lookup(self, request: Request) -> object:
        found = self._registry.lookup(request.query.require("topic"), read(self._clock))
        if found is None:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return {"channels": found.channels, "producers": [_peer(peer) for peer in found.producers]}

    def nodes(self, _: Request) -> object:
        return {
            "producers": [
                _peer(node.peer)
                | {"tombstones": [hidden for _, hidden in node.topics], "topics": [name for name, _ in node.topics]}
                for node in self._registry.nodes(read(self._clock))
            ]
        }

    def debug(self, _: Request) -> object:
        found: dict[str, list[dict[str, Any]]] = {}
        for key, peer, tombstone in self._registry.registrations():
            facts = {"id": peer.id, **_peer(peer)}
            del facts["remote_address"]
            facts["last_update"] = peer.heard.wall_ns
            facts["tombstoned"] = tombstone is not None
            facts["tombstoned_at"] = tombstone.wall_ns if tombstone else 0
            found.setdefault(key, []).append(facts)
        return found

    def create_topic(self, request: Request) -> None:
        self._create(request.query.require_name("topic"))

    def create_channel(self, request: Request) -> None:
        self._create(request.query.require_name("topic"), request.query.require_name("channel"))

    def _create(self, topic: str, channel: str = "") -> None:
        if not self._registry.create(topic, channel):
            raise ApiError(507, "TOO_MANY_NAMES")

    def delete_topic(self, request: Request) -> None:
        self._registry.delete_topic(request.query.require("topic"))

    def delete_channel(self, request: Request) -> None:
        query = request.query
        if not self._registry.delete_channel(query.require_name("topic"), query.require_name("channel")):
            raise ApiError(404, "CHANNEL_NOT_FOUND")

    def tombstone(self, request: Request) -> None:
        topic = request.query.require("topic")
        self._registry.tombstone(topic, request.query.require("node"), read(self._clock))


def _async(answer: Callable[[Request], object]) -> Callable[[Request], Awaitable[object]]:
    async def handler(request: Request) -> object:
        return answer(request)

    return handler


def _peer(peer: Peer) -> dict[str, Any]:
    info = peer.info
    return {
        "remote_address": peer.id,
        "hostname": info.hostname,
        "broadcast_address": info.broadcast_address,
        "tcp_port": info.tcp_port,
        "http_port": info.http_port,
        "version": info.version,
        "topology_zone": info.topology_zone,
        "topology_region": info.topology_region,
    }
