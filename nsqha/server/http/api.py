"""nsqd's HTTP API: publishing, administration, statistics, options; and our own /metrics and health endpoints.

    POST /pub?topic=T[&defer=MS]       POST /mpub?topic=T[&binary=true][&defer=MS]
    POST /topic/{create,delete,empty,pause,unpause}?topic=T
    POST /channel/{create,delete,empty,pause,unpause}?topic=T&channel=C
    GET /ping   /info[?include_nsqha=true]   /stats   /config/:opt    PUT /config/{nsqlookupd_tcp_addresses,log_level}
    GET /cluster   /healthz   /readyz[?verbose]   /startupz   /metrics[?topic=]   /debug/pprof/...

`server` has the conventions (headers, error bodies, redirects), `publishing` and `administration` the handlers of what
changes something; the others are here.

nsqd does not have these: 503 UNAVAILABLE (not stored, try again: disk low, queue full, too many large bodies), 504
OUTCOME_UNKNOWN (may be stored), 500 INTERNAL_ERROR if a write to the disk fails. All have the reason in `detail`,
next to `message`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nsqha import NSQ_VERSION
from nsqha.access.roles import Need
from nsqha.access.surfaces import BROKER_HTTP
from nsqha.nsqlog import Logger
from nsqha.options import LOG_LEVELS, VERIFIED, TlsRequired, config_value, host_name, networks
from nsqha.server.http import debug as http_debug
from nsqha.server.http import server as http_envelope
from nsqha.server.http.administration import AdministrationRoutes
from nsqha.server.http.broker_api import announced_ports
from nsqha.server.http.metrics.scrapes import Scrapes
from nsqha.server.http.publishing import HttpPublishRoutes
from nsqha.server.http.server import ApiError, HttpApi, HttpDoors, HttpReply, HttpRequest, Route
from nsqha.server.http.stats import Selection, stats_json
from nsqha.server.http.text import stats_text
from nsqha.server.runtime.budget import PublishBudget, SharedTurns
from nsqha.server.runtime.listen import is_tcp
from nsqha.server.runtime.measures import memory_stats
from nsqha.texts import gojson

if TYPE_CHECKING:
    from nsqha.server.authorization.audit import Audit
    from nsqha.server.authorization.guard import Guard
    from nsqha.server.http.broker_api import BrokerApi

"""How many topics that scrapes ask for are remembered."""

TOPICS_AT_ONCE = 100
"""Statistics of more topics are encoded in a thread; each topic takes about 50 us."""


def routes(broker: BrokerApi) -> HttpApi:
    """All routes of one broker. ConfigError: it is not said what one of them needs."""
    api = HttpApi(BROKER_HTTP)
    HttpPublishRoutes(broker).add_to(api)
    AdministrationRoutes(broker).add_to(api)
    node = NodeRoutes(broker)
    node.add_to(api)
    node.add_observed_to(api)
    http_debug.add_to(api)
    return api


def observed_routes(broker: BrokerApi, beside: HttpApi) -> HttpApi:
    """What is served at --metrics-address: metrics and health; its requests count with those `beside`."""
    api = HttpApi(BROKER_HTTP, counts=beside.requests)
    NodeRoutes(broker).add_observed_to(api)
    return api


class NodeRoutes:
    """The handlers that show the node, its figures and its health, and change its options."""

    def __init__(self, broker: BrokerApi) -> None:
        self._broker = broker
        self._scrapes = Scrapes(broker, {})

    def add_to(self, api: HttpApi) -> None:
        api.add("GET", "/info", self.info)
        api.add("GET", "/stats", self.stats)
        api.add("GET", "/cluster", self.cluster)
        api.add("GET", "/config/:opt", self.read_option)
        api.add("PUT", "/config/:opt", self.write_option)

    def add_observed_to(self, api: HttpApi) -> None:
        """What monitors read."""
        self._scrapes = Scrapes(self._broker, api.requests)
        api.add("GET", "/ping", self.ping, plain=True)
        api.add("GET", "/healthz", self.healthz, plain=True, quiet=True)
        api.add("GET", "/startupz", self.startupz, plain=True, quiet=True)
        api.add("GET", "/readyz", self.readyz, plain=True, quiet=True)
        api.add("GET", "/metrics", self.metrics, plain=True, quiet=True)

    async def ping(self, _request: HttpRequest) -> object:
        health = self._broker.health()
        if health != "OK":
            raise ApiError(500, health)
        return "OK"

    async def info(self, request: HttpRequest) -> object:
        options = self._broker.options
        tcp_port, http_port = announced_ports(options, self._broker.ports)
        ours = {"grpc_address": self._broker.ports.grpc_address} if request.query.flag("include_nsqha", False) else {}
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
            **ours,
        }

    async def stats(self, request: HttpRequest) -> object:
        query = request.query
        wanted = Selection(query.get("topic") or "", query.get("channel") or "", query.flag("include_clients", True))
        memory = memory_stats() if query.flag("include_mem", True) else None
        stats = await self._broker.snapshot_in_turns(wanted.topic, wanted.clients)
        extra = query.flag("include_nsqha", False)
        make: Callable[[], object]
        if query.get("format") == "json":
            make = partial(stats_json, stats, wanted, memory, extra=extra)
        else:
            make = partial(stats_text, stats, wanted, memory, self._broker.clock.wall_ns(), extra=extra)
        # Encoding all of them may take longer than a client should wait for its message.
        return await asyncio.to_thread(make) if len(stats.topics) > TOPICS_AT_ONCE else make()

    async def cluster(self, _request: HttpRequest) -> object:
        page = await self._broker.side.page()
        if page is None:
            raise ApiError(404, "NOT_FOUND", detail="this node is not one of a cluster")
        return HttpReply(page, http_envelope.JSON)

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
        scrape = await self._scrapes.scrape(request.query.get("topic") or "", request.headers.get("Accept", ""))
        return HttpReply(b"".join(scrape.parts), scrape.content_type)

    # ---- options

    async def read_option(self, request: HttpRequest) -> object:
        try:
            return config_value(self._broker.options, request.param)
        except KeyError:
            raise ApiError(400, "INVALID_OPTION") from None

    async def write_option(self, request: HttpRequest) -> object:
        if not self._may_configure(request):
            raise ApiError(403, "FORBIDDEN", detail="--allow-config-from-cidr does not have the address that asks")
        body = await request.body(self._broker.options.max_msg_size)
        if not body:
            raise ApiError(413, "INVALID_VALUE")
        try:
            if request.param == "nsqlookupd_tcp_addresses":
                self._broker.set_lookupds(gojson.decode(body, list[str]))
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

    def _may_configure(self, request: HttpRequest) -> bool:
        """Whether it comes from where administration is allowed: who sets the lookup daemons decides which channels
        new topics begin with, and who is sent here."""
        options = self._broker.options
        try:
            address = ipaddress.ip_address(request.remote.rpartition(":")[0].strip("[]").partition("%")[0])
        except ValueError:  # a Unix socket, which has permissions of its own; or the connection is gone
            return not is_tcp(options.http_address)
        return any(address in network for network in networks(options.allow_config_from_cidr))


class _TlsOnly(HttpApi):
    """Answers every path over plain HTTP with 403 TLS_REQUIRED."""

    def __init__(self, https_port: int, behind: HttpApi) -> None:
        """`behind`: what is served over HTTPS."""
        super().__init__(counts=behind.requests)
        self._behind = behind
        body = f'{{"message": "TLS_REQUIRED", "https_port": {https_port}}}'.encode()
        headers = {"X-Nsq-Content-Type": "nsq; version=1.0"}
        self._refusal = HttpReply(body, http_envelope.JSON, 403, headers)

    def find(self, request: HttpRequest) -> Route | HttpReply:
        request.refusal = "TLS_REQUIRED"
        return self._refusal

    def need(self, method: str, path: str) -> Need | None:
        return self._behind.need(method, path)


class BrokerHttp:
    """The HTTP and HTTPS listeners of one broker, on sockets that already listen; `broker.ports` must be set."""

    def __init__(
        self,
        broker: BrokerApi,
        http: socket.socket | None,
        https: socket.socket | None,
        tls: ssl.SSLContext | None = None,
        *,
        metrics: socket.socket | None = None,
        guard: Guard | None = None,
        audit: Audit | None = None,
        turns: SharedTurns | None = None,
    ) -> None:
        """`turns`: shared with other ports."""
        self._logger = Logger("http")
        turns = turns or SharedTurns(asyncio.get_running_loop())
        api = routes(broker)
        room = PublishBudget(asyncio.get_running_loop(), broker.options.publish_queue_bytes)
        refuse = broker.options.tls_required == TlsRequired.YES
        names = (host_name(), broker.options.broadcast_address)
        self._listeners: list[tuple[str, http_envelope.HttpServer, socket.socket, ssl.SSLContext | None]] = []
        if http is not None:
            served = _TlsOnly(broker.ports.https, api) if refuse else api
            doors = HttpDoors("http", guard, audit)
            plain = http_envelope.HttpServer(served, self._logger, room=room, turns=turns, names=names, doors=doors)
            self._listeners.append(("HTTP", plain, http, None))
        if https is not None:
            assert tls is not None, "an HTTPS listener needs a certificate"
            verifies = broker.options.tls_client_auth_policy == VERIFIED
            doors = HttpDoors("https", guard, audit, verifies=verifies)
            secure = http_envelope.HttpServer(api, self._logger, room=room, turns=turns, names=names, doors=doors)
            self._listeners.append(("HTTPS", secure, https, tls))
        if metrics is not None:
            doors = HttpDoors("metrics", guard, audit)
            observed = http_envelope.HttpServer(
                observed_routes(broker, api), self._logger, turns=turns, names=names, doors=doors
            )
            self._listeners.append(("METRICS", observed, metrics, None))

    async def start(self) -> None:
        for name, server, sock, tls in self._listeners:
            address = await server.listen(sock, tls)
            self._logger.info("listening", "%s: listening on %s", name, address, address=name.lower())

    async def close(self) -> None:
        for _, server, _, _ in self._listeners:
            await server.close()
