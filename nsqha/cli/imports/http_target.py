"""A broker as an import needs it: nsqd's HTTP API, so any node of a cluster will do."""

from __future__ import annotations

import http.client
import struct
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from nsqha.cli.brokers.discovery import host_and_port
from nsqha.cli.terminal import exits
from nsqha.texts import gojson

ANSWER_BYTES_MAX = 256 << 20

_U32 = struct.Struct(">I")


class _TopicStats(msgspec.Struct):
    topic_name: str = ""


class _Stats(msgspec.Struct):
    topics: list[_TopicStats] = []


class HttpTarget:
    """One connection to the HTTP port of a broker."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, port = host_and_port(address, "--to")
        self._address = address
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)

    def topics(self) -> set[str]:
        """The names of all topics."""
        answer = self._ask("GET", "/stats", {"format": "json", "include_clients": "false"})
        try:
            return {topic.topic_name for topic in gojson.decode(answer, _Stats).topics}
        except ValueError as error:
            why = f"{self._address}/stats cannot be read: {error}; is --to a broker's HTTP address?"
            raise exits.Exit(exits.FAILED, why) from None

    def create_topic(self, topic: str) -> None:
        self._ask("POST", "/topic/create", {"topic": topic})

    def create_channel(self, topic: str, channel: str) -> None:
        self._ask("POST", "/channel/create", {"topic": topic, "channel": channel})

    def pause_topic(self, topic: str) -> None:
        self._ask("POST", "/topic/pause", {"topic": topic})

    def pause_channel(self, topic: str, channel: str) -> None:
        self._ask("POST", "/channel/pause", {"topic": topic, "channel": channel})

    def publish(self, topic: str, bodies: Sequence[bytes]) -> None:
        """Publish all of them or none; returns when they are acknowledged."""
        body = b"".join([_U32.pack(len(bodies)), *(part for b in bodies for part in (_U32.pack(len(b)), b))])
        self._ask("POST", "/mpub", {"topic": topic, "binary": "true"}, body)

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, query: dict[str, Any], body: bytes = b"") -> bytes:
        try:
            self._connection.request(method, f"{path}?{urlencode(query)}", body)
            response = self._connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = str(error) or type(error).__name__
            raise exits.Exit(exits.UNREACHABLE, f"{self._address}{path}: {why}; is --to its HTTP address?") from None
        if response.status != 200:
            text = answer.decode("utf-8", "replace")
            raise exits.Exit(exits.FAILED, f"{self._address} refused {path}: {response.status} {text}")
        return answer
