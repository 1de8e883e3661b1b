"""NSQ's HTTP manners, byte by byte, over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import NoReturn

import pytest
import uvloop

from nsqha.nsqlog import Logger
from nsqha.server.http import server as http_envelope
from nsqha.server.http.server import ApiError, Gate, HttpApi, HttpReply, HttpRequest, HttpServer, Query
from nsqha.server.runtime.budget import FRESH_SECONDS, PublishBudget, SharedTurns
from nsqha.server.runtime.listen import listen

BODY_MAX = 10
LARGE_BODY_MAX = 4 * http_envelope.SMALL_BODY_BYTES


def api() -> HttpApi:
    async def ping(_: HttpRequest) -> object:
        return "OK"

    async def info(request: HttpRequest) -> object:
        return {"version": "1.3.0", "a": request.query.get("a"), "remote": request.remote}

    async def create(request: HttpRequest) -> object:
        request.query.require_name("topic")
        return None

    async def publish(request: HttpRequest) -> object:
        body = await request.body(BODY_MAX)
        if body is None:
            raise ApiError(413, "MSG_TOO_BIG")
        return body

    async def upload(request: HttpRequest) -> object:
        body = await request.body(LARGE_BODY_MAX)
        return None if body is None else str(len(body))

    async def download(request: HttpRequest) -> object:
        return b"a" * int(request.query.require("bytes"))

    async def option(request: HttpRequest) -> object:
        return request.param

    async def broken(_: HttpRequest) -> object:
        raise RuntimeError("a bug")

    async def metrics(_: HttpRequest) -> object:
        return HttpReply(b"up 1\n", "text/plain; version=0.0.4")

    async def required(_: HttpRequest) -> object:
        raise ApiError(403, "TLS_REQUIRED", https_port=4152)

    routes = HttpApi()
    routes.add("GET", "/ping", ping, plain=True)
    routes.add("GET", "/info", info)
    routes.add("POST", "/topic/create", create)
    routes.add("POST", "/pub", publish, quiet=True)
    routes.add("POST", "/upload", upload)
    routes.add("GET", "/download", download)
    routes.add("GET", "/config/:opt", option)
    routes.add("PUT", "/config/:opt", option)
    routes.add("GET", "/broken", broken)
    routes.add("GET", "/plainly/broken", broken, plain=True)
    routes.add("GET", "/metrics", metrics)
    routes.add("GET", "/secret", required)
    return routes


class Peer:
    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self) -> Peer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        start = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = start.decode().strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        length = 0 if head else int(headers.get("Content-Length", "0"))
        assert status.startswith("HTTP/1.1 ")
        return int(status.split()[1]), headers, await self.reader.readexactly(length)

    async def ask(self, line: str, body: bytes = b"", extra: str = "") -> tuple[int, dict[str, str], bytes]:
        await self.send(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body)
        return await self.answer(head=line.startswith("HEAD"))

    async def closed(self) -> bool:
        return await asyncio.wait_for(self.reader.read(), 20) == b""


@asynccontextmanager
async def serving(gate: Gate | None = None, room_bytes: int = 1 << 30) -> AsyncIterator[Peer]:
    room = PublishBudget(asyncio.get_running_loop(), room_bytes)
    server = HttpServer(api(), Logger("test"), gate=gate, room=room)
    address = await server.listen(listen("127.0.0.1:0", flag="http-address"))
    peer = await Peer(int(address.rpartition(":")[2])).connect()
    try:
        yield peer
    finally:
        peer.writer.close()
        await server.close()
    assert not room.used


def run(story: Callable[[Peer], Awaitable[None]], gate: Gate | None = None, room_bytes: int = 1 << 30) -> None:
    async def main() -> None:
        async with serving(gate, room_bytes) as peer:
            await asyncio.wait_for(story(peer), 60)

    uvloop.run(main())


NSQ = "nsq; version=1.0"


def test_a_page_of_another_site_gets_403_and_a_program_its_answer() -> None:
    async def story(peer: Peer) -> None:
        status, _, body = await peer.ask("POST /pub", b"x", "Origin: https://evil.example\r\n")
        assert (status, json.loads(body)["message"]) == (403, "CROSS_SITE")
        assert "evil.example" in json.loads(body)["detail"]
        assert (await peer.ask("POST /pub", b"x"))[0] == 200

    run(story)


def test_the_kinds_of_answers() -> None:
    async def story(peer: Peer) -> None:
        status, headers, body = await peer.ask("GET /ping")
        assert (status, body, headers["Content-Type"]) == (200, b"OK", "text/plain; charset=utf-8")
        assert "X-Nsq-Content-Type" not in headers

        status, headers, body = await peer.ask("GET /info?a=1&a=2")
        assert (status, json.loads(body)["a"]) == (200, "1")
        assert json.loads(body)["remote"].startswith("127.0.0.1:")
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert headers["X-Nsq-Content-Type"] == NSQ

        status, headers, body = await peer.ask("POST /topic/create?topic=t")
        assert (status, body, headers["X-Nsq-Content-Type"]) == (200, b"", NSQ)
        assert "Content-Type" not in headers

        status, headers, body = await peer.ask("GET /metrics")
        assert (body, headers["Content-Type"]) == (b"up 1\n", "text/plain; version=0.0.4")

    run(story)


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("GET /nope", 404, "NOT_FOUND"),
        ("POST /", 404, "NOT_FOUND"),
        ("GET /config/", 404, "NOT_FOUND"),
        ("GET /config/a/b", 404, "NOT_FOUND"),
        ("POST /info", 405, "METHOD_NOT_ALLOWED"),
        ("GET /info?a=%zz", 400, "INVALID_REQUEST"),
        ("GET /info?a=1;b=2", 400, "INVALID_REQUEST"),
        ("POST /topic/create", 400, "MISSING_ARG_TOPIC"),
        ("POST /topic/create?topic=a%2Ab", 400, "INVALID_ARG_TOPIC"),
        ("POST /topic/create?topic=", 400, "INVALID_ARG_TOPIC"),
        ("GET /broken", 500, "INTERNAL_ERROR"),
    ],
)
def test_refusals(line: str, status: int, message: str) -> None:
    async def story(peer: Peer) -> None:
        got, headers, body = await peer.ask(line)
        assert (got, body) == (status, b'{"message":"%s"}' % message.encode())
        assert headers["X-Nsq-Content-Type"] == NSQ
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert (await peer.ask("GET /ping"))[0] == 200  # and the connection goes on

    run(story)


def test_a_plain_handler_fails_plainly_and_a_refusal_may_say_more() -> None:
    async def story(peer: Peer) -> None:
        status, headers, body = await peer.ask("GET /plainly/broken")
        assert (status, body, "X-Nsq-Content-Type" in headers) == (500, b"INTERNAL_ERROR", False)
        assert (await peer.ask("GET /secret"))[2] == b'{"message":"TLS_REQUIRED","https_port":4152}'

    run(story)


def test_wrong_methods_are_told_the_right_ones() -> None:
    async def story(peer: Peer) -> None:
        assert (await peer.ask("POST /config/x"))[1]["Allow"] == "GET, OPTIONS, PUT"
        assert (await peer.ask("HEAD /ping"))[:2][0] == 405
        status, headers, body = await peer.ask("OPTIONS /config/x")
        assert (status, headers["Allow"], body) == (200, "GET, OPTIONS, PUT", b"")

    run(story)


@pytest.mark.parametrize(
    ("line", "status", "location"),
    [
        ("GET /ping/", 301, "/ping"),
        ("GET /PING", 301, "/ping"),
        ("GET //info//?a=b%20c", 301, "/info?a=b%20c"),
        ("POST /topic/create/?topic=t", 307, "/topic/create?topic=t"),
        ("GET /Config/Log_Level", 301, "/config/Log_Level"),  # a parameter's case is its own
        ("GET /config/log_level/", 301, "/config/log_level"),
        ("GET /config/%0d%0ax/", 301, "/config/%0D%0Ax"),
        ("GET //evil.example/", 404, None),
        ("GET /topic/create/", 404, None),
    ],
)
def test_redirects(line: str, status: int, location: str | None) -> None:
    async def story(peer: Peer) -> None:
        got, headers, _ = await peer.ask(line)
        assert (got, headers.get("Location")) == (status, location)

    run(story)


def test_a_parameter_is_decoded() -> None:
    async def story(peer: Peer) -> None:
        assert (await peer.ask("GET /config/log%5Flevel"))[2] == b"log_level"
        assert (await peer.ask("GET http://host:1/config/x?y"))[2] == b"x"

    run(story)


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello there\r\n\r\n",
        b"  V2IDENTIFY\n",
        b"\x16\x03\x01\x00\xa5\x01",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_garbage_gets_http_1_1_400_and_the_end(garbage: bytes) -> None:
    async def story(peer: Peer) -> None:
        await peer.send(garbage)
        status, headers, body = await peer.answer()
        assert (status, headers["Connection"], body) == (400, "close", b"400 Bad Request")
        assert await peer.closed()

    run(story)


def test_what_follows_garbage_is_not_parsed_and_nothing_waits_for_a_collection() -> None:
    async def story() -> None:
        async def never(_: object) -> NoReturn:
            pytest.fail("that was no request")

        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        server = http_envelope._WebServer(never, SharedTurns(loop))
        _, connection = await loop.create_connection(server, sock=ours)
        assert isinstance(connection, http_envelope._HttpConnection)
        reader, writer = await asyncio.open_connection(sock=theirs)
        for _ in range(3):
            connection.feed(b"\xff" * 100)
        ((error, _),) = connection._messages
        while (error := getattr(error, "exc", None) or error.__context__) is not None:
            assert error.__traceback__ is None
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        await server.shutdown(0)

    uvloop.run(story())


def test_a_body_that_broke_off_before_its_request_began_is_refused() -> None:
    """Head and body came in one turn of the loop; nothing more comes."""

    async def story(peer: Peer) -> None:
        head = b"POST /pub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        feed = http_envelope._HttpConnection.feed

        def cut(self: http_envelope._HttpConnection, data: bytes) -> None:
            for piece in (head + b"3\r\nabc\r\n", b"ZZ\r\n"):
                feed(self, piece)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(http_envelope._HttpConnection, "feed", cut)
            await peer.send(b"x")
            assert (await asyncio.wait_for(peer.answer(), 20))[0] == 400

    run(story)


def test_a_header_beyond_the_limit_is_refused() -> None:
    async def story(peer: Peer) -> None:
        await peer.send(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await peer.answer())[0] == 400

    run(story)


HEAD = b"POST /pub HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /pub HTTP/1.1\nHost: x\nContent-Length: 1\n\nx",
        HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        HEAD + b"Cookie: " + b"a" * 1_000_000 + b"\r\nContent-Length: 1\r\n\r\nx",
        HEAD + b"X: y\r\n" * 300 + b"Content-Length: 1\r\n\r\nx",
    ],
)
def test_heads_that_go_takes_are_taken(sent: bytes) -> None:
    async def story(peer: Peer) -> None:
        await peer.send(sent + sent)
        for _ in range(2):
            status, _, body = await peer.answer()
            assert (status, body) == (200, b"x")

    run(story)


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501, b"Unsupported transfer encoding"),
        (HEAD + b"Cookie: " + b"a" * 1_100_000 + b"\r\n\r\n", 431, b"431 Request Header Fields Too Large"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400, b"400 Bad Request"),
        (HEAD + b"X: y\nContent-Length: 1\r\n\r\nx", 400, b"400 Bad Request"),
        # What the parser itself refuses.
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", 400, b"400 Bad Request"),
        (HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 400, b"400 Bad Request"),
        (HEAD + b"Content-Length : 1\r\n\r\nx", 400, b"400 Bad Request"),
        (HEAD + b"Content-Length: 1\r\n 2\r\n\r\nx", 400, b"400 Bad Request"),
        (HEAD + b"X: y\r\n folded\r\nContent-Length: 1\r\n\r\nx", 400, b"400 Bad Request"),
    ],
)
def test_heads_that_could_be_read_in_two_ways_are_refused(sent: bytes, status: int, text: bytes) -> None:
    async def story(peer: Peer) -> None:
        assert (await peer.ask("GET /ping"))[0] == 200
        await peer.send(sent)
        got, headers, body = await peer.answer()
        assert (got, headers["Connection"], body) == (status, "close", text)
        assert await peer.closed()

    run(story)


def test_bodies() -> None:
    async def story(peer: Peer) -> None:
        assert (await peer.ask("POST /pub", b"a" * BODY_MAX))[2] == b"a" * BODY_MAX
        assert (await peer.ask("POST /pub"))[2] == b""
        # Not inflated: the bytes are the message.
        assert (await peer.ask("POST /pub", b"hello", "Content-Encoding: gzip\r\n"))[2] == b"hello"
        await peer.send(b"POST /pub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await peer.send(b"2\r\nde\r\n0\r\n\r\n")
        assert (await peer.answer())[2] == b"abcde"

    run(story)


def test_too_large_a_body_is_refused_and_the_connection_goes_on_if_it_ends() -> None:
    async def story(peer: Peer) -> None:
        status, _, body = await peer.ask("POST /pub", b"a" * (BODY_MAX + 1))
        assert (status, body) == (413, b'{"message":"MSG_TOO_BIG"}')
        await peer.send(b"POST /pub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nabcdef\r\n")
        await peer.send(b"5\r\nabcde\r\n0\r\n\r\n")
        assert (await peer.answer())[0] == 413
        assert (await peer.ask("GET /ping"))[0] == 200

    run(story)


def test_a_broken_chunk_is_a_bad_request() -> None:
    async def story(peer: Peer) -> None:
        await peer.send(b"POST /pub HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.02)  # the handler waits for more
        await peer.send(b"zz\r\n")
        assert (await peer.answer())[0] == 400

    run(story)


def test_a_body_is_asked_for_only_when_it_is_wanted() -> None:
    async def story(peer: Peer) -> None:
        head = "POST /pub HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n"
        await peer.send(head.format(5).encode())
        assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await peer.send(b"hello")
        assert (await peer.answer())[2] == b"hello"
        await peer.send(head.format(BODY_MAX + 1).encode())
        status, headers, _ = await peer.answer()
        assert (status, headers["Connection"]) == (413, "close")

    run(story)


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "BODY_S", 0.05)
    monkeypatch.setattr(http_envelope, "LINGER_S", 0.05)

    async def story(peer: Peer) -> None:
        await peer.send(b"POST /pub HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe")
        assert (await peer.answer())[2] == b'{"message":"INVALID_REQUEST"}'
        assert await peer.closed()

    run(story)


LARGE = b"a" * (LARGE_BODY_MAX - 1)
LARGE_HEAD = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(LARGE)
CHUNKED_HEAD = b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_large_bodies_wait_for_room_and_are_read_when_there_is_some() -> None:
    async def story(peer: Peer) -> None:
        other = await Peer(peer._port).connect()
        await other.send(LARGE_HEAD + b"a")
        assert (await peer.ask("POST /pub", b"a"))[0] == 200  # small ones go on
        asked = asyncio.ensure_future(peer.ask("POST /upload", LARGE))
        await other.send(LARGE[1:])
        assert (await other.answer())[2] == (await asked)[2] == str(len(LARGE)).encode()
        other.writer.close()

    run(story, room_bytes=1)


@pytest.mark.parametrize("sent", [LARGE_HEAD + b"a", CHUNKED_HEAD + b"%x\r\n%b" % (len(LARGE), LARGE)])
def test_large_bodies_without_room_are_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "ROOM_S", 0.05)

    async def story(peer: Peer) -> None:
        slow = await Peer(peer._port).connect()
        await slow.send(sent)
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE), LARGE)
        while True:  # until the slow one has the room
            status, _, body = await peer.ask("POST /upload", LARGE)
            if status == 503:
                break
        assert body == b'{"message":"UNAVAILABLE","detail":"too many large requests are being read: try again"}'
        await peer.send(CHUNKED_HEAD + chunk)
        assert (await peer.answer())[0] == 503
        # Not asked for: nothing is sent in vain.
        await peer.send(LARGE_HEAD[:-2] + b"Expect: 100-continue\r\n\r\n")
        status, headers, _ = await peer.answer()
        assert (status, headers["Connection"]) == (503, "close")
        slow.writer.transport.abort()
        peer = await Peer(peer._port).connect()
        while (await peer.ask("POST /upload", LARGE))[0] != 200:  # its room is given back
            pass
        peer.writer.close()

    run(story, room_bytes=1)


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "IDLE_S", 0.1)

    async def story(peer: Peer) -> None:
        await peer.send(b"GET /ping HT")  # dribbling does not help
        assert await peer.closed()

    run(story)


def test_requests_of_many_connections_share_the_turns_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """One each is less than what a connection may ask for in a turn; of a thousand connections it took a second."""
    in_a_turn = 3
    monkeypatch.setattr(http_envelope, "REQUEST_SECONDS", FRESH_SECONDS / in_a_turn)
    due: list[Callable[[], None]] = []

    async def main() -> None:
        turns = SharedTurns(SimpleNamespace(call_soon=due.append), lambda: 0.0)
        server = HttpServer(api(), Logger("test"), turns=turns)
        address = await server.listen(listen("127.0.0.1:0", flag="http-address"))
        peers = [await Peer(int(address.rpartition(":")[2])).connect() for _ in range(3 * in_a_turn)]
        answers = [asyncio.ensure_future(peer.ask("GET /ping")) for peer in peers]
        for turn in range(1, 4):
            while sum(answer.done() for answer in answers) < turn * in_a_turn:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert sum(answer.done() for answer in answers) == turn * in_a_turn
            began, due[:] = list(due), []
            for callback in began:
                callback()
        assert [answer.result()[0] for answer in answers] == [200] * len(peers)
        for peer in peers:
            peer.writer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("size", [8 << 20, 32 << 10])  # held by the handler; by a closing socket
def test_who_does_not_take_an_answer_is_dropped(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_envelope, "TAKE_S", 0.05)

    async def main() -> None:
        sock = listen("127.0.0.1:0", flag="http-address")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = HttpServer(api(), Logger("test"))
        await server.listen(sock)
        loop = asyncio.get_running_loop()
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            await loop.sock_connect(peer, sock.getsockname())
            request = b"GET /download?bytes=%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % size
            await loop.sock_sendall(peer, request)
            assert server._web is not None
            for there in (True, False):
                while bool(server._web.connections) != there:
                    await asyncio.sleep(0.01)
        await server.close()

    uvloop.run(asyncio.wait_for(main(), 20))


def test_a_peer_that_leaves_in_the_middle_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def story(peer: Peer) -> None:
        other = await Peer(peer._port).connect()
        await other.send(b"POST /pub HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe")
        other.writer.transport.abort()
        assert (await peer.ask("GET /ping"))[0] == 200

    run(story)
    assert not [record for record in caplog.records if record.exc_info]


def test_the_gate_comes_first() -> None:
    def closed(request: HttpRequest) -> None:
        raise ApiError(403, "TLS_REQUIRED", https_port=1)

    async def story(peer: Peer) -> None:
        for line in ("GET /ping", "GET /nope", "GET /ping/"):
            assert (await peer.ask(line))[::2] == (403, b'{"message":"TLS_REQUIRED","https_port":1}')

    run(story, closed)


def test_requests_are_logged_except_quiet_ones(caplog: pytest.LogCaptureFixture) -> None:
    async def story(peer: Peer) -> None:
        await peer.ask("GET /info?a=1")
        await peer.ask("POST /pub", b"x")
        await peer.ask("GET /nope")

    with caplog.at_level("INFO", logger="nsqha"):
        run(story)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("nsqha")]
    assert [line.partition(" (")[0] for line in lines] == ["200 GET /info?a=1", "404 GET /nope"]


def test_what_is_refused_again_and_again_and_long_paths_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story(peer: Peer) -> None:
        for number in range(100):
            await peer.ask(f"GET /nope/{'a' * 10_000}{number}")
        await peer.ask(f"GET /info?x={'b' * 10_000}")

    with caplog.at_level("INFO", logger="nsqha"):
        run(story)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("nsqha")]
    assert [line[:14] for line in lines] == ["404 GET /nope/", "200 GET /info?"]
    assert max(map(len, lines)) < 300


def test_closing_lets_a_request_end() -> None:
    async def main() -> None:
        started, release = asyncio.Event(), asyncio.Event()

        async def slow(_: HttpRequest) -> object:
            started.set()
            await release.wait()
            return "done"

        routes = HttpApi()
        routes.add("GET", "/slow", slow)
        server = HttpServer(routes, Logger("test"))
        address = await server.listen(listen("127.0.0.1:0", flag="http-address"))
        peer = await Peer(int(address.rpartition(":")[2])).connect()
        idle = await Peer(peer._port).connect()
        await peer.send(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await started.wait()
        closing = asyncio.ensure_future(server.close())
        await asyncio.sleep(0)
        release.set()
        assert (await peer.answer())[2] == b"done"
        await closing
        assert await idle.closed()

    uvloop.run(main())


def test_queries() -> None:
    query = Query("topic=a%20b+c&&topic=x&empty=&on&binary=yes&off=0")
    assert query.get("topic") == "a b c"
    assert (query.get("empty"), query.get("on"), query.get("none")) == ("", "", None)
    assert query.flag("binary", False)
    assert not query.flag("off", True)
    assert query.flag("absent", True)
    assert Query("a=%ff").get("a") == "\ufffd"
    with pytest.raises(ApiError) as caught:
        query.require("channel")
    assert (caught.value.status, caught.value.code) == (400, "MISSING_ARG_CHANNEL")
    with pytest.raises(ApiError) as caught:
        query.require_name("topic", "INVALID_TOPIC")
    assert caught.value.code == "INVALID_TOPIC"


def test_tls_is_the_same_api(tmp_path: object) -> None:
    """No certificate here: a context that can not shake hands must cost the peer its connection and nobody else."""

    async def main() -> None:
        server = HttpServer(api(), Logger("test"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        address = await server.listen(listen("127.0.0.1:0", flag="https-address"), context)
        peer = await Peer(int(address.rpartition(":")[2])).connect()
        await peer.send(b"GET /ping HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await asyncio.wait_for(peer.reader.read(), 5)
        await server.close()

    uvloop.run(main())
