"""nsqd's HTTP API: publishing, administration, statistics, options; and our own /metrics and health endpoints.

    POST /pub?topic=T[&defer=MS]       POST /mpub?topic=T[&binary=true][&defer=MS]
    POST /topic/{create,delete,empty,pause,unpause}?topic=T
    POST /channel/{create,delete,empty,pause,unpause}?topic=T&channel=C
    GET /ping   /info   /stats   /config/:opt          PUT /config/{nsqlookupd_tcp_addresses,log_level}
    GET /healthz   /readyz[?verbose]   /startupz   /metrics   /debug/pprof/...

`server` has the conventions (headers, error bodies, redirects). The order of the checks is nsqd's, and visible: /pub
checks the body first and then the topic, /mpub the topic first, and creates the topic before it reads the body.

nsqd does not have these: 503 UNAVAILABLE (not stored, try again: disk low, queue full, too many large bodies), 504
OUTCOME_UNKNOWN (may be stored), 500 INTERNAL_ERROR if a write to the disk fails. All have the reason in `detail`,
next to `message`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from nsqha import NSQ_VERSION, hot
from nsqha.errors import AppendFailed, Conflict, NotFound, OutcomeUnknown, StorageError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.options import LOG_LEVELS, TlsRequired, config_value, host_name
from nsqha.server.http import debug as http_debug
from nsqha.server.http import server as http_envelope
from nsqha.server.http.server import ApiError, HttpApi, HttpReply, HttpRequest, Route
from nsqha.server.http.stats import Selection, stats_json
from nsqha.server.http.text import stats_text
from nsqha.server.runtime.budget import NO_ROOM, PublishBudget
from nsqha.server.runtime.measures import memory_stats

if TYPE_CHECKING:
    from nsqha.server.http.broker_api import BrokerApi

T = TypeVar("T")

PIECE_BYTES = 16 * 1024
"""A body of lines becomes frames in pieces of this size: a message costs 0.5 us, and its line may have two bytes."""
TOPICS_AT_ONCE = 100
"""Statistics of more topics are encoded in a thread; each topic takes about 50 us."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class NsqdHttp:
    """Has the handlers; `api` returns the routes to them."""

    def __init__(self, broker: BrokerApi) -> None:
        self._broker = broker
        self._framing = asyncio.Lock()

    def api(self) -> HttpApi:
        api = HttpApi()
        api.add("GET", "/ping", self.ping, plain=True)
        api.add("GET", "/info", self.info)
        api.add("GET", "/stats", self.stats)
        api.add("POST", "/pub", self.pub, quiet=True)
        api.add("POST", "/mpub", self.mpub, quiet=True)
        for verb in ("create", "delete", "empty", "pause", "unpause"):
            api.add("POST", f"/topic/{verb}", getattr(self, f"topic_{verb}"))
            api.add("POST", f"/channel/{verb}", getattr(self, f"channel_{verb}"))
        api.add("GET", "/config/:opt", self.read_option)
        api.add("PUT", "/config/:opt", self.write_option)
        api.add("GET", "/healthz", self.healthz, plain=True, quiet=True)
        api.add("GET", "/startupz", self.startupz, plain=True, quiet=True)
        api.add("GET", "/readyz", self.readyz, plain=True, quiet=True)
        api.add("GET", "/metrics", self.metrics, plain=True, quiet=True)
        http_debug.add_to(api)
        return api

    # ---- publishing

    async def pub(self, request: HttpRequest) -> object:
        body = await request.body(self._broker.options.max_msg_size)
        if body is None:
            raise ApiError(413, "MSG_TOO_BIG")
        if not body:
            raise ApiError(400, "MSG_EMPTY")
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        delay_ms = self._delay_ms(request)
        self._refuse_unless_creatable(topic)
        await _done(self._broker.publishing.publish(topic, hot.frame(body), deliver_in_ms=delay_ms), self._broker)
        return "OK"

    async def mpub(self, request: HttpRequest) -> object:
        options = self._broker.options
        if (request.content_length or 0) > options.max_body_size:
            raise ApiError(413, "BODY_TOO_BIG")
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        binary = request.query.flag("binary", False)
        delay_ms = self._delay_ms(request)
        self._refuse_unless_creatable(topic)
        if topic not in self._broker.topics:
            await _done(self._broker.topics.create_topic(topic), self._broker)
        body = await request.body(options.max_body_size)
        if body is None:
            raise ApiError(413, "BODY_TOO_BIG")
        until = self._broker.publishing.patience()
        if len(body) <= PIECE_BYTES:
            frames = await self._frames(body, binary)
        else:
            frames = await _done(self._frames_in_turn(body, binary, until), self._broker)
        if frames:
            publish = self._broker.publishing.publish(topic, frames, deliver_in_ms=delay_ms, until=until)
            await _done(publish, self._broker)
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

    def _refuse_unless_creatable(self, topic: str) -> None:
        if self._broker.exiting:
            raise ApiError(503, "EXITING")
        if not self._broker.options.auto_create_topics and topic not in self._broker.topics:
            raise ApiError(404, "TOPIC_NOT_FOUND")

    # ---- topics and channels

    async def topic_create(self, request: HttpRequest) -> None:
        topic = request.query.require_name("topic", "INVALID_TOPIC")
        await _done(self._broker.topics.create_topic(topic), self._broker)

    async def topic_delete(self, request: HttpRequest) -> None:
        await _done(self._broker.topics.delete_topic(self._existing(request)), self._broker)

    async def topic_empty(self, request: HttpRequest) -> None:
        request.query.require_name("topic", "INVALID_TOPIC")
        await _done(self._broker.channels.empty_topic(self._existing(request)), self._broker)

    async def topic_pause(self, request: HttpRequest) -> None:
        await _done(self._broker.channels.pause_topic(self._existing(request), True), self._broker)

    async def topic_unpause(self, request: HttpRequest) -> None:
        await _done(self._broker.channels.pause_topic(self._existing(request), False), self._broker)

    def _existing(self, request: HttpRequest) -> str:
        topic = request.query.require("topic")
        if topic not in self._broker.topics:
            raise ApiError(404, "TOPIC_NOT_FOUND")
        return topic

    async def channel_create(self, request: HttpRequest) -> None:
        topic, channel = self._named(request)
        await _done(self._broker.channels.create(topic, channel), self._broker)

    async def channel_delete(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await _done(self._broker.channels.delete(topic, channel), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_empty(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await _done(self._broker.channels.empty(topic, channel), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_pause(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await _done(self._broker.channels.pause(topic, channel, True), self._broker, "CHANNEL_NOT_FOUND")

    async def channel_unpause(self, request: HttpRequest) -> None:
        topic, channel = self._existing_channel(request)
        await _done(self._broker.channels.pause(topic, channel, False), self._broker, "CHANNEL_NOT_FOUND")

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

    # ---- the node and its health

    async def ping(self, _request: HttpRequest) -> object:
        health = self._broker.health()
        if health != "OK":
            raise ApiError(500, health)
        return "OK"

    async def info(self, _request: HttpRequest) -> object:
        options = self._broker.options
        tcp_port, http_port = announced_ports(self._broker)
        return {
            "version": NSQ_VERSION,
            "broadcast_address": options.broadcast_address,
            "hostname": host_name(),
            "http_port": http_port,
            "tcp_port": tcp_port,
            "start_time": self._broker.start_time_ns // 1_000_000_000,
            "max_heartbeat_interval": options.max_heartbeat_interval_ns,
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": options.max_output_buffer_timeout_ns,
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }

    async def stats(self, request: HttpRequest) -> object:
        query = request.query
        wanted = Selection(query.get("topic") or "", query.get("channel") or "", query.flag("include_clients", True))
        memory = memory_stats() if query.flag("include_mem", True) else None
        stats = self._broker.snapshot(wanted.topic, wanted.clients)
        make: Callable[[], object]
        if query.get("format") == "json":
            make = partial(stats_json, stats, wanted, memory, extra=query.flag("include_nsqha", False))
        else:
            make = partial(stats_text, stats, wanted, memory, self._broker.clock.wall_ns())
        # The snapshot is of one moment; encoding it may take longer than a client should wait for its message.
        return await asyncio.to_thread(make) if len(stats.topics) > TOPICS_AT_ONCE else make()

    async def healthz(self, _request: HttpRequest) -> object:
        """Liveness: an answer shows that the loop runs; a check marked `live` finds what only a restart can repair."""
        return self._checked(live_only=True, verbose=False)

    async def startupz(self, _request: HttpRequest) -> object:
        """Always OK: nothing listens before the recovery has ended."""
        return "OK"

    async def readyz(self, request: HttpRequest) -> object:
        return self._checked(live_only=False, verbose=request.query.get("verbose") is not None)

    def _checked(self, *, live_only: bool, verbose: bool) -> HttpReply:
        checks = [check for check in self._broker.checks() if check.live or not live_only]
        ok = all(check.ok for check in checks)
        lines = ["OK" if ok else "NOK"]
        for check in checks:
            if verbose or not check.ok:
                lines.append(f"[{'+' if check.ok else '-'}] {check.name}{': ' if check.detail else ''}{check.detail}")
        text = "\n".join(lines) if len(lines) > 1 else lines[0]
        return HttpReply(text.encode(), http_envelope.TEXT, 200 if ok else 503)

    async def metrics(self, request: HttpRequest) -> object:
        from nsqha.server.http import metrics  # not needed before the first scrape

        stats = self._broker.snapshot(clients=False)
        accept = request.headers.get("Accept", "")
        # In a thread: with ten thousand series this takes longer than a client should wait for its message.
        body, content_type = await asyncio.to_thread(metrics.render, stats, accept)
        return HttpReply(body, content_type)

    # ---- options

    async def read_option(self, request: HttpRequest) -> object:
        try:
            return config_value(self._broker.options, request.param)
        except KeyError:
            raise ApiError(400, "INVALID_OPTION") from None

    async def write_option(self, request: HttpRequest) -> object:
        body = await request.body(self._broker.options.max_msg_size)
        if not body:
            raise ApiError(413, "INVALID_VALUE")
        try:
            if request.param == "nsqlookupd_tcp_addresses":
                self._broker.set_lookupds(msgspec.json.decode(body, type=list[str] | None) or [])
            elif request.param == "log_level":
                level = body.decode().lower()
                if level not in LOG_LEVELS:
                    raise ValueError(level)
                self._broker.set_log_level(level)
            else:
                raise ApiError(400, "INVALID_OPTION")
        except ValueError:
            raise ApiError(400, "INVALID_VALUE") from None
        return await self.read_option(request)


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


def announced_ports(broker: BrokerApi) -> tuple[int, int]:
    """The TCP and HTTP ports that are announced: the bound ones, unless the flags set others."""
    options, ports = broker.options, broker.ports
    return options.broadcast_tcp_port or ports.tcp, options.broadcast_http_port or ports.http


async def _done(change: Awaitable[T], broker: BrokerApi, not_found: str = "TOPIC_NOT_FOUND") -> T:
    """Await a change; an error becomes NSQ's code with the reason in `detail`."""
    try:
        return await change
    except NotFound:
        raise ApiError(404, not_found) from None
    except (Unavailable, AppendFailed) as error:
        if broker.exiting:
            raise ApiError(503, "EXITING") from error
        raise ApiError(503, "UNAVAILABLE", detail=str(error)) from error
    except Conflict as error:
        raise ApiError(409, "CONFLICT", detail=str(error)) from error
    except OutcomeUnknown as error:
        raise ApiError(504, "OUTCOME_UNKNOWN", detail=str(error)) from error
    except StorageError as error:
        raise ApiError(500, "INTERNAL_ERROR", detail=str(error)) from error


class _TlsOnly(HttpApi):
    """Answers every path over plain HTTP with 403 TLS_REQUIRED."""

    def __init__(self, https_port: int) -> None:
        super().__init__()
        body = f'{{"message": "TLS_REQUIRED", "https_port": {https_port}}}'.encode()
        headers = {"X-Nsq-Content-Type": "nsq; version=1.0"}
        self._refusal = HttpReply(body, http_envelope.JSON, 403, headers)

    def find(self, request: HttpRequest) -> Route | HttpReply:
        return self._refusal


class BrokerHttp:
    """The HTTP and HTTPS listeners of one broker, on sockets that already listen; `broker.ports` must be set."""

    def __init__(
        self,
        broker: BrokerApi,
        http: socket.socket | None,
        https: socket.socket | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._logger = Logger("http")
        api = NsqdHttp(broker).api()
        room = PublishBudget(asyncio.get_running_loop(), broker.options.publish_queue_bytes)
        refuse = broker.options.tls_required == TlsRequired.YES
        self._listeners: list[tuple[str, http_envelope.HttpServer, socket.socket, ssl.SSLContext | None]] = []
        if http is not None:
            plain = http_envelope.HttpServer(_TlsOnly(broker.ports.https) if refuse else api, self._logger, room=room)
            self._listeners.append(("HTTP", plain, http, None))
        if https is not None:
            assert tls is not None, "an HTTPS listener needs a certificate"
            self._listeners.append(("HTTPS", http_envelope.HttpServer(api, self._logger, room=room), https, tls))

    async def start(self) -> None:
        for name, server, sock, tls in self._listeners:
            address = await server.listen(sock, tls)
            self._logger.info("listening", "%s: listening on %s", name, address, address=name.lower())

    async def close(self) -> None:
        for _, server, _, _ in self._listeners:
            await server.close()
