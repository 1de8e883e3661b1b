"""NSQ's HTTP conventions, shared by nsqd's API and the lookup daemon's; aiohttp's server is used only here.

    api = HttpApi(surfaces.BROKER_HTTP)                  # what each route needs; one that is not in it stops the start
    api.add("GET", "/ping", ping, plain=True)            # no X-Nsq-Content-Type; errors as plain text
    api.add("POST", "/pub", publish, quiet=True)         # not logged
    api.add("GET", "/config/:opt", read_option)          # request.param is the value of :opt

    async def channels(request: HttpRequest) -> object:
        topic = request.query.require("topic")           # 400 MISSING_ARG_TOPIC
        return {"channels": [...]}                       # JSON

    server = HttpServer(api, Logger("http"))
    address = await server.listen(listen("0.0.0.0:4151", flag="http-address"))      # "[::]:4151"
    ...
    await server.close()

A handler returns None (200, empty body, no Content-Type), str or bytes (sent raw as text/plain), an HttpReply (any
other answer), a JsonStream (JSON that may be large), or a value that msgspec encodes as JSON. It refuses with
`raise ApiError(404, "TOPIC_NOT_FOUND")`, which becomes {"message":"TOPIC_NOT_FOUND"}. `await request.body(limit)` is
None when the body is larger than `limit`.

Every request gets these: 404 NOT_FOUND for an unknown path, 405 METHOD_NOT_ALLOWED with Allow for a wrong method, an
answer to OPTIONS, a redirect for a path that differs from a known one by a trailing slash or its case (GET 301, else
307 so that the method stays), 400 INVALID_REQUEST for a query that does not decode, 500 INTERNAL_ERROR and a logged
traceback for an unexpected exception, `HTTP/1.1 400 Bad Request` and a close for bytes that are not HTTP (431 for a
head that is too large, 501 for a coding that is not chunked: `heads`), and a log line `200 GET /stats (127.0.0.1:5)
1.2ms`. Of what is refused (400 and above) the first of an address has a line, the others of ten seconds one together,
and no line shows more than the beginning of a path.

A request other than GET, HEAD and OPTIONS that a page of another site makes a browser send gets 403 CROSS_SITE
(`browsers`). With an access file a caller without a token that is needed, or with a wrong one, gets 401 UNAUTHORIZED,
one that may not do what it asks for 403 FORBIDDEN, and an address that guesses 429 TOO_MANY_WRONG_TOKENS. Each change,
done or refused, is one record of the audit (`server.authorization`).

Only the query has parameters; a form in a POST body is a message like any other. The first value wins.
`Content-Encoding` of a request is not decoded: the bytes are the message. Nothing is read before its size was checked.
A connection that is idle, or does not complete its header, for IDLE_S is closed; a body must arrive within BODY_S, and
the answer must be taken within TAKE_S. A body of more than SMALL_BODY_BYTES is read only when the budget `room` has
space for it, and occupies its size there until it is answered. Without space within ROOM_S it gets 503 UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from urllib.parse import quote, unquote_to_bytes

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11
from aiohttp.http_parser import RawRequestMessage

from nsqha.access.certificates import grant_of
from nsqha.access.roles import BY_TOPIC, Grant, Need
from nsqha.access.surfaces import INSPECT, need_of
from nsqha.access.tokens import ANONYMOUS
from nsqha.errors import Unavailable
from nsqha.goflags import format_duration
from nsqha.ids import valid_name
from nsqha.nsqlog import Logger
from nsqha.server.authorization.audit import AdminAction, Audit, skips_text
from nsqha.server.authorization.guard import CODES, Denied, Guard
from nsqha.server.http import browsers
from nsqha.server.http.heads import BAD, NO_SUCH_CODING, SMALL_BYTES, TOO_LARGE, RequestHeads
from nsqha.server.http.reading import ReadParts
from nsqha.server.runtime.budget import PublishBudget, SharedTurns
from nsqha.server.runtime.listen import Acceptor, address_text, bound_address, too_many_files
from nsqha.server.runtime.rare_warnings import RefusalLog, host_of, shown
from nsqha.server.runtime.tasks import Locks

IDLE_S = 120.0
"""Longer than the 90 s after which Go's HTTP client closes an idle connection, so that both never close at once."""
BODY_S = 60.0
TAKE_S = 60.0
"""How long a peer may take to read what is buffered for it."""
ROOM_S = 30.0
STREAM_BYTES = 64 * 1024
"""How much of a large answer is made before the caller takes it."""
STREAMS_AT_ONCE = 4
STREAM_S = 120.0
PART_S = 10.0  # for a part of it to be taken
STREAMS_WAITING_MAX = 64  # answers whose first part is made, and that wait for room
STREAM_SECONDS = 0.0004
"""How long such an answer is made in one go."""
SMALL_BODY_BYTES = 64 * 1024
"""About the size that is read of each request in any case, before a handler asks for its body."""
LINGER_S = 5.0
"""How long the rest of a refused body is read and dropped, so that the client sees the refusal and not a reset."""
DRAIN_S = 5.0
"""How long a request in progress may take when the server closes."""
HANDSHAKE_S = 5.0
REQUEST_SECONDS = 0.0004
"""What a request takes of the loop, at most in one turn: its share of a turn, as there is no knowing before."""

NO_ROUTE = "(none)"
"""The name of what was asked for and is no route, or was refused before one was looked for."""
AUDITED = (
    "topic", "channel", "partition", "replicas", "node", "remove_node", "move_from", "move_to", "move_leader", "limit",
    "paused", "window", "partition_num", "replicator", "syncdisk", "retention", "orderedmulti",
)  # fmt: skip
"""The parameters that the audit shows."""

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
_NSQ = ("X-Nsq-Content-Type", "nsq; version=1.0")
_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")
_PRINTABLE = "".join(map(chr, range(33, 127)))


class ApiError(Exception):
    """A request is refused: the answer is `{"message": code}` with the fields of `extra`."""

    def __init__(self, status: int, code: str, **extra: object) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.extra = extra


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer with its own status, headers or content type."""

    body: bytes
    content_type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonStream:
    """An answer that may be large, in parts (`server.http.streaming`). One that fits into STREAM_BYTES is sent as any
    other; of larger ones STREAMS_AT_ONCE are made at a time, and each must be taken within STREAM_S."""

    parts: Iterator[bytes]


class Query:
    """The parameters of a request."""

    __slots__ = ("_values",)

    def __init__(self, text: str) -> None:
        """ApiError 400 INVALID_REQUEST for text that Go's parser refuses: a bad %-escape or a semicolon."""
        self._values: dict[str, str] = {}
        for part in text.split("&"):
            if not part:
                continue
            if ";" in part or _PERCENT.search(part):
                raise ApiError(400, "INVALID_REQUEST")
            name, _, value = part.partition("=")
            self._values.setdefault(_unescape(name), _unescape(value))

    def get(self, name: str) -> str | None:
        """The first value; None if the parameter is not given (`?topic=` is given, and empty)."""
        return self._values.get(name)

    def require(self, name: str) -> str:
        """The first value, or 400 MISSING_ARG_<NAME>."""
        value = self._values.get(name)
        if value is None:
            raise ApiError(400, f"MISSING_ARG_{name.upper()}")
        return value

    def require_name(self, name: str, invalid: str | None = None) -> str:
        """As `require`; 400 INVALID_ARG_<NAME> (or the code `invalid`) if it is not a valid topic or channel name."""
        value = self.require(name)
        if not valid_name(value):
            raise ApiError(400, invalid or f"INVALID_ARG_{name.upper()}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Parse nsqd's booleans: false and 0 are false, true and 1 are true, and so is any other word."""
        value = self._values.get(name)
        return default if value is None else value not in ("false", "0")


class HttpRequest:
    """What a handler sees of a request."""

    __slots__ = (
        "_continued", "_inner", "_query", "_room", "_taken", "demand", "judge_again", "method", "need", "param", "path",
        "query_text", "refusal", "skips", "who",
    )  # fmt: skip

    def __init__(self, inner: web.BaseRequest, room: PublishBudget | None = None) -> None:
        target = inner.raw_path
        if "://" in target[:8]:  # the absolute form, which the client of a proxy sends
            target = "/" + target.split("://", 1)[1].partition("/")[2]
        path, _, self.query_text = target.partition("?")
        self._inner = inner
        self._query: Query | None = None
        self._room = room
        self._taken = 0  # of the room
        self._continued = False
        self.method = inner.method
        self.path = _decode(path) if "%" in path else path
        self.param = ""
        self.who = ANONYMOUS
        self.skips = 0  # messages that were never finished, and are not delivered any more
        self.refusal = ""  # the code with which it was refused or failed
        self.need: Need | None = None  # the last that was asked of its caller
        self.judge_again: Callable[[], None] = _nothing
        """ApiError: the access file has changed since the request came, and its caller may not do this any more."""
        self.demand: Callable[[Need], None] = _nothing_of
        """ApiError: the caller may not do this, which the request turned out to need as well."""

    @property
    def query(self) -> Query:
        if self._query is None:
            self._query = Query(self.query_text)
        return self._query

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; their names are case-insensitive."""
        return self._inner.headers

    @property
    def remote(self) -> str:
        """`ip:port` of the peer."""
        transport = self._inner.transport
        return address_text(transport.get_extra_info("peername") if transport else None)

    @property
    def certified(self) -> Grant | None:
        """What the client's certificate grants, where it was verified; None: there is none."""
        transport = self._inner.transport
        found = transport.get_extra_info("peercert") if transport else None
        return grant_of(found) if found else None

    @property
    def content_length(self) -> int | None:
        """The length in the header; None for a chunked body."""
        return self._inner.content_length

    async def body(self, limit: int) -> bytes | None:
        """The whole body, or None as soon as it is known to be larger than `limit` bytes; 503 if there is no room."""
        announced = self._inner.content_length
        if announced is not None and announced > limit:
            return None
        await self._take_room(announced or 0)
        await self._say_continue()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S) as deadline:
                while part := await self._inner.content.readany():
                    size += len(part)
                    if size > limit:
                        return None
                    parts.append(part)
                    if announced is None and size > SMALL_BODY_BYTES and not self._taken:
                        deadline.reschedule(None)
                        await self._take_room(limit)
                        deadline.reschedule(asyncio.get_running_loop().time() + BODY_S)
        except (TimeoutError, web.RequestPayloadError) as error:
            raise ApiError(400, "INVALID_REQUEST") from error
        if self.broken_body:
            raise ApiError(400, "INVALID_REQUEST")
        self.judge_again()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _take_room(self, size: int) -> None:
        if self._room is not None and size > SMALL_BODY_BYTES:
            try:
                await self._room.enter(size, ROOM_S)
            except Unavailable as error:
                raise ApiError(503, "UNAVAILABLE", detail=str(error)) from None
            self._taken = size

    async def answer_with(self, response: web.StreamResponse) -> None:
        """Send the head of an answer whose body follows in parts."""
        await response.prepare(self._inner)

    def drop(self) -> None:
        """End the connection at once."""
        if self._inner.transport is not None:
            self._inner.transport.abort()

    def give_room(self) -> None:
        """The request is answered: return its size to the budget."""
        if self._room is not None and self._taken:
            self._room.give(self._taken)
            self._taken = 0

    async def _say_continue(self) -> None:
        # Only now, as Go does: a body that is refused because of its length is never requested.
        if self.unsent_body and self._inner.transport is not None:
            self._inner.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._continued = True

    @property
    def unsent_body(self) -> bool:
        """Whether the peer still waits for `100 Continue` before it sends the body."""
        return not self._continued and self._inner.headers.get("Expect", "").lower() == "100-continue"

    @property
    def broken_body(self) -> bool:
        """Whether the chunks of the body became malformed before its end."""
        protocol = self._inner.protocol
        return isinstance(protocol, _HttpConnection) and protocol.broken


def _nothing() -> None:
    """Where every caller may do everything."""


def _nothing_of(_: Need) -> None:
    """The same."""


Handler = Callable[[HttpRequest], Awaitable[object]]
Gate = Callable[[HttpRequest], None]
"""Called before routing; refuses by raising ApiError."""


@dataclass(frozen=True, slots=True)
class Route:
    path: str
    handler: Handler
    plain: bool = False
    quiet: bool = False
    need: Need = INSPECT
    takes: tuple[str, ...] = ()  # of NARROWING


NARROWING = ("topic", "channel", "partition", "node")
"""Parameters that narrow what a change is about. A route that does not take one refuses it: a change that acts on more
than its caller asked for cannot be taken back."""
WHOLE = ("", "*", "**")
"""Of a parameter that narrows: it does not. The Youzan fork names all partitions with stars."""


class HttpApi:
    """Maps methods and paths to handlers. The last segment of a path may be a parameter (`/config/:opt`)."""

    def __init__(
        self, needs: Mapping[str, Need] | None = None, *, counts: Counter[tuple[str, int]] | None = None
    ) -> None:
        """`needs`: what each route needs, by method and path. Without it each is for administrators. `counts`: where
        its answers are counted, together with another's."""
        self._routes: dict[str, dict[str, Route]] = {}
        self.requests: Counter[tuple[str, int]] = Counter() if counts is None else counts  # by route and status
        self._needs = needs

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        plain: bool = False,
        quiet: bool = False,
        takes: tuple[str, ...] = (),
    ) -> None:
        """ConfigError: it is not said what the route needs. `takes`: of NARROWING, what a change follows."""
        methods = self._routes.setdefault(_key(path), {})
        assert method not in methods, f"{method} {path} is already added"
        need = INSPECT if self._needs is None else need_of(self._needs, f"{method} {path}")
        methods[method] = Route(path, handler, plain, quiet, need, takes)

    @property
    def names(self) -> list[str]:
        """`METHOD path` of each route."""
        return [
            f"{method} {f'{path}opt' if path.endswith(':') else path}"
            for path, methods in self._routes.items()
            for method in methods
        ]

    def need(self, method: str, path: str) -> Need | None:
        """What the route needs; None: there is no such route."""
        route = self._methods(path)[0].get(method)
        return None if route is None else route.need

    def find(self, request: HttpRequest) -> Route | HttpReply:
        """The route, or the answer when there is none; sets `request.param`."""
        methods, request.param = self._methods(request.path)
        if route := methods.get(request.method):
            return route
        if target := self._redirect(request):
            return target
        if not methods:
            raise ApiError(404, "NOT_FOUND")
        allow = {"Allow": ", ".join(sorted({*methods, "OPTIONS"}))}
        if request.method == "OPTIONS":
            return HttpReply(b"", headers=allow)
        return HttpReply(_encode({"message": "METHOD_NOT_ALLOWED"}), JSON, 405, allow | dict([_NSQ]))

    def _methods(self, path: str) -> tuple[dict[str, Route], str]:
        if methods := self._routes.get(path):
            return methods, ""
        parent, _, last = path.rpartition("/")
        if last and (methods := self._routes.get(parent + "/:")):
            return methods, last
        return {}, ""

    def _nearly(self, path: str) -> tuple[str, dict[str, Route]]:
        """The known path without doubled or trailing slashes and in lower case; a parameter stays as it is."""
        segments = [part for part in path.split("/") if part] or [""]
        *parents, last = segments
        lower = "/".join(["", *map(str.lower, parents)])
        for known, location in ((f"{lower}/{last.lower()}", last.lower()), (f"{lower}/:", quote(last, safe=""))):
            if known != path and (methods := self._routes.get(known)):
                return f"{lower}/{location}", methods
        return "", {}

    def _redirect(self, request: HttpRequest) -> HttpReply | None:
        path, methods = self._nearly(request.path)
        if request.method not in methods:
            return None
        query = quote(request.query_text.encode("utf-8", "surrogateescape"), safe=_PRINTABLE)
        location = {"Location": f"{path}?{query}" if query else path}
        if request.method == "GET":
            # The text is only for people: a program that follows redirects reads the header.
            return HttpReply(b"Moved Permanently\n", "text/plain; charset=utf-8", 301, location)
        return HttpReply(b"", "", 307, location)


class HttpDoors:
    """Who may do what on one surface, and the record of what changed."""

    def __init__(
        self, surface: str = "http", guard: Guard | None = None, audit: Audit | None = None, *, verifies: bool = False
    ) -> None:
        """Without `guard` everybody may do everything. `verifies`: certificates of clients are verified, so that what
        they say counts; Python's ssl shows those that were only asked for in the same way."""
        self.surface = surface
        self._verifies = verifies
        self._guard = guard
        self._audit = audit

    def check(self, need: Need, request: HttpRequest) -> None:
        """ApiError: this caller may not do that."""
        guard = self._guard
        if guard is None or not need.roles:
            return
        by_topic = need.roles & BY_TOPIC or (need.change and guard.audit_topic)
        topic = request.query.get("topic") if by_topic else None
        request.need = need
        authorization = request.headers.get("Authorization")
        certified = request.certified if self._verifies and authorization is None else None
        try:
            request.who = guard.allow(need, request.remote, authorization, topic, certified=certified).who
        except Denied as denied:
            request.who = denied.who
            raise ApiError(denied.status, denied.code, detail=denied.why) from None
        generation = guard.file.generation

        def judge_again() -> None:
            if guard.file.generation != generation:
                self.check(need, request)

        request.judge_again = judge_again
        request.demand = partial(self.check, request=request)

    def record(self, need: Need, request: HttpRequest, took: float) -> None:
        """A change was carried out, or refused."""
        if self._audit is None:
            return
        code = request.refusal
        kind = "refused" if code in REFUSALS else "unknown" if code == "OUTCOME_UNKNOWN" else "failed"
        self._audit.record(
            AdminAction(
                who=request.who,
                role=str(request.need or need),
                address=request.remote,
                surface=self.surface,
                method=f"{request.method} {request.path}",
                target=_target(request),
                plan=False,
                outcome=(f"{kind}: {code}" if code else "done") + skips_text(request.skips),
                took=took,
            )
        )


REFUSALS = frozenset(("CROSS_SITE", "TLS_REQUIRED", *CODES))


def _target(request: HttpRequest) -> str:
    """What a change is about: the parameters that are names and numbers."""
    try:
        query = request.query
    except ApiError:
        return ""
    return " ".join(f"{name}={value}" for name in AUDITED if (value := query.get(name)) is not None)


class HttpServer:
    """Serves an HttpApi on any number of listeners; `gate` may refuse a request before it is routed."""

    def __init__(
        self,
        api: HttpApi,
        logger: Logger,
        *,
        gate: Gate | None = None,
        room: PublishBudget | None = None,
        turns: SharedTurns | None = None,
        names: Iterable[str] = (),
        doors: HttpDoors | None = None,
    ) -> None:
        """`turns`: shared with other ports. `names`: the host names of this node, beside localhost and addresses; empty
        ones are left out. `doors`: who may do what, and where changes are recorded."""
        self._api = api
        self._doors = doors or HttpDoors()
        self._names = frozenset(name.lower() for name in names if name)
        self._logger = logger
        self._refused = RefusalLog(logger.info, "http_refused")
        self._gate = gate
        self._room = room
        self._turns = turns or SharedTurns(asyncio.get_running_loop())
        self._streams = asyncio.Semaphore(STREAMS_AT_ONCE)
        self._streams_to = Locks[str]()  # by host: who reads slowly holds up nobody else
        self._wait_for_stream = 0
        self._web: _WebServer | None = None
        self._listeners: list[Acceptor] = []

    async def listen(self, sock: socket.socket, ssl_context: ssl.SSLContext | None = None) -> str:
        """Serve on this listening socket, which now belongs to the server; returns its address for log lines."""
        if self._web is None:
            self._web = _WebServer(self._answer, self._turns)
        seconds = HANDSHAKE_S if ssl_context else None
        acceptor = Acceptor(sock, self._web, turns=self._turns, tls=ssl_context, handshake_seconds=seconds)
        await acceptor.start()
        self._listeners.append(acceptor)
        return bound_address(sock)

    async def close(self) -> None:
        """Stop accepting, let requests in progress end within DRAIN_S, close every connection."""
        for acceptor in self._listeners:
            acceptor.close()
        self._listeners.clear()
        if self._web is not None:
            self._web.pre_shutdown()
            await self._web.shutdown(DRAIN_S)

    async def _answer(self, inner: web.BaseRequest) -> web.StreamResponse:
        started = time.perf_counter_ns()
        await self._turns.enter_for(REQUEST_SECONDS)
        request = HttpRequest(inner, self._room)
        response: web.StreamResponse
        quiet, name = False, NO_ROUTE
        try:
            if why := browsers.refusal(inner.method, inner.headers, self._names):
                raise ApiError(403, "CROSS_SITE", detail=why)
            if self._gate is not None:
                self._gate(request)
            found = self._api.find(request)
            if isinstance(found, HttpReply):
                response = _response(found)
            else:
                quiet, name = found.quiet, found.path
                response = await self._run(found, request)
        except ApiError as refusal:
            response = _refusal(refusal, request, plain=False)
        finally:
            request.give_room()
        if inner.method not in browsers.SAFE_METHODS:
            need = self._api.need(request.method, request.path)
            if need is not None and need.change:
                self._doors.record(need, request, (time.perf_counter_ns() - started) / 1e9)
        if request.unsent_body:
            inner.content.feed_eof()  # the body was not requested and will not arrive
            response.force_close()
        if request.broken_body:
            response.force_close()
        self._api.requests[name, response.status] += 1
        if not quiet:
            took = format_duration(time.perf_counter_ns() - started)
            line = (
                "%d %s %s (%s) %s",
                response.status,
                shown(inner.method),
                shown(inner.raw_path),
                request.remote,
                took,
            )
            if response.status < 400:
                self._logger.info("http_request", *line)
            else:
                self._refused.refused(request.remote, *line)
        return response

    async def _run(self, route: Route, request: HttpRequest) -> web.StreamResponse:
        try:
            self._doors.check(route.need, request)
            _refuse_narrower(route, request)
            result = await route.handler(request)
            if isinstance(result, JsonStream):
                first, more = await self._part(result.parts)
                if more:
                    return await self._stream(first, result.parts, request, None if route.plain else _NSQ)
                result = HttpReply(first, JSON)
        except ApiError as refusal:
            return _refusal(refusal, request, plain=route.plain)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._logger.error("http_failed", "%s %s: %r", request.method, shown(request.path), error, error=error)
            return _refusal(ApiError(500, "INTERNAL_ERROR"), request, plain=route.plain)
        reply = result if isinstance(result, HttpReply) else _reply(result)
        return _response(reply, None if route.plain else _NSQ)


    async def _part(self, parts: Iterator[bytes]) -> tuple[bytes, bool]:
        """The next STREAM_BYTES of the answer, made as the loop has time for it, and whether there may be more."""
        found: list[bytes] = []
        size = 0
        until = time.perf_counter() + STREAM_SECONDS
        for part in parts:
            found.append(part)
            size += len(part)
            if size >= STREAM_BYTES:
                return b"".join(found), True
            if time.perf_counter() > until:
                await self._turns.enter_for(STREAM_SECONDS)
                await asyncio.sleep(0)  # others, also where there is room
                until = time.perf_counter() + STREAM_SECONDS
        return b"".join(found), False

    async def _stream(
        self, part: bytes, parts: Iterator[bytes], request: HttpRequest, extra: tuple[str, str] | None
    ) -> web.StreamResponse:
        async with contextlib.AsyncExitStack() as room:
            await self._room_for_stream(request, room)
            return await self._send_parts(part, parts, request, extra)

    async def _room_for_stream(self, request: HttpRequest, room: contextlib.AsyncExitStack) -> None:
        """Until `room` is left, one of the large answers that are made at a time, and the only one to this host."""
        refusal = ApiError(503, "UNAVAILABLE", detail="too many large answers are being read: try again")
        if self._wait_for_stream >= STREAMS_WAITING_MAX:
            raise refusal
        self._wait_for_stream += 1
        try:
            async with asyncio.timeout(ROOM_S):
                await room.enter_async_context(self._streams_to.held(host_of(request.remote)))
                await self._streams.acquire()
                room.callback(self._streams.release)
        except TimeoutError:
            raise refusal from None
        finally:
            self._wait_for_stream -= 1

    async def _send_parts(
        self, part: bytes, parts: Iterator[bytes], request: HttpRequest, extra: tuple[str, str] | None
    ) -> web.StreamResponse:
        try:
            headers = {"Server": "nsqha", "Content-Type": JSON} | dict([extra] if extra else [])
            response = web.StreamResponse(headers=headers)
            async with asyncio.timeout(STREAM_S):
                await request.answer_with(response)
                more = True
                while True:
                    async with asyncio.timeout(PART_S):
                        await response.write(part)
                    if not more:
                        break
                    part, more = await self._part(parts)
                await response.write_eof()
        except TimeoutError:
            request.drop()  # it sees an answer without an end
            raise ConnectionError(f"a large answer was not taken within {STREAM_S:g} s") from None
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # its head has gone: another answer would stand in the middle of this one
            self._logger.error("http_failed", "%s %s: %r", request.method, shown(request.path), error, error=error)
            request.drop()
            raise ConnectionError("a large answer failed") from error
        return response


def _reply(result: object) -> HttpReply:
    if result is None:
        return HttpReply(b"", "")
    if isinstance(result, str):
        return HttpReply(result.encode("utf-8", "surrogateescape"))
    if isinstance(result, bytes):
        return HttpReply(result)
    return HttpReply(_encode(result), JSON)


def _refuse_narrower(route: Route, request: HttpRequest) -> None:
    """Answer 400 if a change names something narrower than what it acts on."""
    if not route.need.change:
        return
    for name in NARROWING:
        if name not in route.takes and (request.query.get(name) or "") not in WHOLE:
            code = "TOPIC_PARTITION" if name == "partition" else name.upper()
            detail = f"{request.method} {request.path} does not act on one {name}: send it without"
            raise ApiError(400, f"INVALID_ARG_{code}", detail=detail)


def _refusal(refusal: ApiError, request: HttpRequest, *, plain: bool) -> web.Response:
    request.refusal = refusal.code
    headers = {"WWW-Authenticate": 'Bearer realm="nsqha"'} if refusal.status == 401 else {}
    if plain:
        return _response(HttpReply(refusal.code.encode(), TEXT, refusal.status, headers))
    body = _encode({"message": refusal.code, **refusal.extra})
    return _response(HttpReply(body, JSON, refusal.status, headers), _NSQ)


def _response(reply: HttpReply, extra: tuple[str, str] | None = None) -> web.Response:
    headers = {"Server": "nsqha", **reply.headers}
    if reply.body and reply.content_type:
        headers["Content-Type"] = reply.content_type
    if extra is not None:
        headers[extra[0]] = extra[1]
    return web.Response(body=reply.body, status=reply.status, headers=headers)


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value)


def _key(path: str) -> str:
    parent, colon, _ = path.partition("/:")
    return parent + colon


def _unescape(text: str) -> str:
    return _decode(text.replace("+", " ")) if "%" in text or "+" in text else text


def _decode(text: str) -> str:
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


def without_tracebacks(error: BaseException) -> None:
    """A traceback has the frames that it came through, and these the error: they would stay until a collection."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__context__


class _HttpConnection(web.RequestHandler):
    """aiohttp's connection with three changes: heads are read as Go reads them (`heads`); bytes that are not HTTP get
    Go's answer and are not logged; and a peer that does not read what was written is dropped after TAKE_S, during an
    answer and when the connection closes."""

    __slots__ = ("_drop", "_gave_up", "_heads", "_parts", "_refused_with", "_socket", "body", "broken")

    def __init__(self, turns: SharedTurns, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = ReadParts(self, turns)
        self._heads = RequestHeads()
        self._refused_with = BAD
        self.body: StreamReader | None = None
        self.broken = False
        self._gave_up = False  # what came was not HTTP: what follows is read, as the answer could be lost, and dropped
        self._socket: asyncio.Transport | None = None
        self._drop: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = cast(asyncio.Transport, transport)  # aiohttp drops its own before everything is sent
        if too_many_files(transport, administration=True):
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._parts.end()
        self._taken()
        self._socket = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._must_be_taken()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def force_close(self) -> None:
        super().force_close()
        self._must_be_taken()

    async def start(self) -> None:
        await super().start()
        self._must_be_taken()  # it is closing

    def _must_be_taken(self) -> None:
        if self._drop is None and self._socket is not None and self._socket.get_write_buffer_size():
            self._drop = self._loop.call_later(TAKE_S, self._socket.abort)

    def _taken(self) -> None:
        if self._drop is not None:
            self._drop.cancel()
            self._drop = None

    def data_received(self, data: bytes) -> None:
        self._parts.take(data)

    def pause_source(self) -> None:
        if self._socket is not None and not self._socket.is_closing():
            self._socket.pause_reading()

    def resume_source(self) -> None:
        if self._socket is not None and not self._socket.is_closing() and not self._wants_none:
            self._socket.resume_reading()

    @property
    def _wants_none(self) -> bool:
        """Whether aiohttp has paused reading."""
        return bool(self._reading_paused or getattr(self, "_buffer_paused", False))

    def feed(self, data: bytes) -> None:
        if self._gave_up:
            return
        ready, refused = self._heads.read(data)
        if ready or not data:  # nothing: aiohttp has the parser go on
            self._parse(ready)
        if refused and not self._gave_up:
            self._refused_with = refused
            self._parse(b"\0")  # gives up as on other bytes that are no request

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and not isinstance((parsed := self._messages[-1][0]), RawRequestMessage):
            self._gave_up = True
            without_tracebacks(parsed.exc)
            if self.body is not None:
                self._end_body(self.body)

    def begins(self, body: StreamReader) -> None:
        """A request begins, with this body; all of it may have been parsed before."""
        self.body = body
        if self._gave_up:
            self._end_body(body)

    def _end_body(self, body: StreamReader) -> None:
        # If the parser gave up inside a body, aiohttp does not notify the reader of that body.
        self.broken = not body.is_eof()
        body.feed_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer is sent already")
        status = self._refused_with if status == BAD else status
        response = _response(HttpReply(_GO_TEXTS.get(status, b"500 Internal Server Error"), TEXT, status))
        response.force_close()
        return response


_GO_TEXTS = {
    BAD: b"400 Bad Request",
    TOO_LARGE: b"431 Request Header Fields Too Large",
    NO_SUCH_CODING: b"Unsupported transfer encoding",
}
"""What Go writes to a connection whose request it cannot read."""


class _WebServer(web.Server):
    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], turns: SharedTurns) -> None:
        super().__init__(handler, request_factory=self._request)
        self._turns = turns

    def __call__(self) -> web.RequestHandler:
        return _HttpConnection(
            self._turns,
            self,
            loop=self._loop,
            access_log=None,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            max_line_size=SMALL_BYTES,
            max_field_size=SMALL_BYTES,
        )

    def _request(
        self, message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        if message.method == "UNKNOWN":
            # For malformed bytes aiohttp assumes HTTP/1.0; clients look for "HTTP/1.1 400".
            message = message._replace(version=HttpVersion11)
        protocol.begins(payload)
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop)
