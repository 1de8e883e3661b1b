"""AUTH: what an answer allows, and how the servers are asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from typing import Any
from urllib.parse import parse_qsl

import pytest

from nsqha.clock import ManualClock
from nsqha.server.clients.auth import (
    ANSWER_BYTES_MAX,
    AuthClient,
    AuthFailed,
    AuthState,
    Question,
    denial,
    endpoint,
    read_answer,
)

ALL = {"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}


def answer(**fields: Any) -> bytes:
    return json.dumps(
        {"ttl": 60, "identity": "joe", "identity_url": "http://joe", "authorizations": [ALL]} | fields
    ).encode()


def state(**fields: Any) -> AuthState:
    return read_answer(answer(authorizations=[ALL | fields]), 0.0)


def test_the_reply_to_auth() -> None:
    assert (
        read_answer(answer(), 0).reply_json() == b'{"identity":"joe","identity_url":"http://joe","permission_count":1}'
    )
    nobody = read_answer(b'{"ttl":1,"authorizations":null}', 0)
    assert nobody.reply_json() == b'{"identity":"","identity_url":"","permission_count":0}'


AUTHORIZATION = b'"authorizations":[{"topic":".*","channels":[".*"],"permissions":["subscribe","publish"]}]'


@pytest.mark.parametrize(
    ("fields", "identity"),
    [
        (b'"ttl":60,"identity":null,"identity_url":null', ""),
        (b'"TTL":60,"Identity":"joe"', "joe"),
        (b'"ttl":60,"identity":"caf\xe9"', "caf\ufffd"),
        (b'"ttl":60,"identity":"\\ud800"', "\ufffd"),
    ],
)
def test_an_answer_is_read_as_nsqd_reads_it(fields: bytes, identity: str) -> None:
    found = read_answer(b"{%b,%b}" % (fields, AUTHORIZATION), 0)
    assert found.identity == identity
    assert found.allows("t", "c")
    assert json.loads(found.reply_json())["identity"] == identity


def test_null_items_are_empty_as_for_nsqd() -> None:
    found = read_answer(b'{"ttl":1,"authorizations":[null,{"channels":[null],"permissions":["publish"]}]}', 0)
    assert len(found.authorizations) == 2
    assert found.allows("any")  # an empty expression matches every name
    assert not found.allows("any", "c")
    with pytest.raises(AuthFailed, match="unknown permission"):
        read_answer(b'{"ttl":1,"authorizations":[{"permissions":[null]}]}', 0)


@pytest.mark.parametrize(
    "body",
    [
        b"nope",
        b"",
        b"[]",
        answer(ttl=0),
        answer(ttl=-5),
        answer(ttl="60"),
        b'{"authorizations":[]}',
        answer(identity=7),
        answer(authorizations=[ALL | {"permissions": ["admin"]}]),
        answer(authorizations=[ALL | {"topic": "("}]),
        answer(authorizations=[ALL | {"channels": ["ok", "["]}]),
        answer(authorizations=[ALL | {"topic": "a{1001}"}]),
        b"[" * 100_000,
    ],
)
def test_an_answer_that_can_not_be_used_is_a_failure(body: bytes) -> None:
    with pytest.raises(AuthFailed):
        read_answer(body, 0)


def test_the_ttl_counts_from_the_answer() -> None:
    found = read_answer(answer(ttl=60), 100.0)
    assert not found.expired(160.0)
    assert found.expired(160.1)


def test_permissions_are_apart() -> None:
    publisher = state(permissions=["publish"])
    assert publisher.allows("t")
    assert not publisher.allows("t", "c")
    subscriber = state(permissions=["subscribe"])
    assert subscriber.allows("t", "c")
    assert not subscriber.allows("t")
    assert not state(permissions=[]).allows("t")


def test_expressions_are_not_anchored() -> None:
    assert state(topic="mid").allows("xx-mid-yy")
    assert not state(topic="^mid").allows("xx-mid-yy")
    assert not state(topic="^mid$").allows("mid-yy")


def test_a_publish_is_checked_with_an_empty_channel() -> None:
    narrow = state(channels=["^public$"])
    assert narrow.allows("t", "public")
    assert not narrow.allows("t", "private")
    assert not narrow.allows("t")
    assert not state(channels=[]).allows("t")


def test_one_matching_authorization_is_enough() -> None:
    found = read_answer(answer(authorizations=[ALL | {"topic": "^a$"}, ALL | {"topic": "^b$"}]), 0)
    assert found.allows("a")
    assert found.allows("b")
    assert not found.allows("c")


@pytest.mark.parametrize(
    ("expression", "matching", "other"),
    [
        (r"^t[[:digit:]]+\z", "t12", "t1x"),
        (r"^[[:alpha:]_]+$", "ab_", "a1"),
        (r"^[^[:upper:]]+$", "abc", "aBc"),
        (r"^[]a]$", "a", "b"),
        (r"^[a[]+$", "a", "b"),
        (r"^[a[:digit:]]+$", "a1", "b"),
        (r"^\[:x$", "[:x", "x"),
        (r"(?i)^ORDERS", "orders.eu", "x"),
        (r"^(?P<name>a|b)$", "a", "c"),
        (r"^[[:^alpha:]]+$", "12", "ab"),
        (r"^\pL+$", "ab", "a1"),
        (r"^\Qa.b\E$", "a.b", "axb"),
        (r"^\pre$", None, None),
        (r"^(?=a)", None, None),
        (r"^(a)\1$", None, None),
        ("[", None, None),
        ("\udc80", "\ufffd", "x"),
    ],
)
def test_expressions_of_re2(expression: str, matching: str | None, other: str) -> None:
    if matching is None:
        with pytest.raises(AuthFailed):
            state(topic=expression)
        return
    assert state(topic=expression).allows(matching)
    assert not state(topic=expression).allows(other)


def test_no_name_takes_long() -> None:
    """One that tries all ways would take longer than the universe is old."""
    assert not state(topic="^(a+)+$").allows("a" * 63 + "b")


def test_denials_are_worded_as_nsqd_does() -> None:
    assert denial(None, "DPUB", "t") == b"E_AUTH_FIRST AUTH required before DPUB"
    publisher = state(permissions=["publish"])
    assert denial(publisher, "PUB", "t") is None
    assert denial(publisher, "SUB", "t", "c") == b'E_UNAUTHORIZED AUTH failed for SUB on "t" "c"'
    assert denial(state(topic="^x"), "MPUB", "t") == b'E_UNAUTHORIZED AUTH failed for MPUB on "t" ""'


def test_a_question_keeps_the_bytes_of_the_secret() -> None:
    question = Question(b"a b&\xff=", "10.0.0.7", True, "joe & co")
    assert question.query() == "common_name=joe+%26+co&remote_ip=10.0.0.7&secret=a+b%26%FF%3D&tls=true"
    assert json.loads(Question(b"s", "::1").json()) == {
        "secret": ["s"],
        "remote_ip": ["::1"],
        "tls": ["false"],
        "common_name": [""],
    }


def test_an_address_alone_means_its_auth_path() -> None:
    assert endpoint("127.0.0.1:4181") == "http://127.0.0.1:4181/auth"
    assert endpoint("https://a/check/nsq") == "https://a/check/nsq"


# ---- asking a real server


class AuthServer:
    """Answers every request with `reply`, and remembers what it was asked."""

    def __init__(self, reply: bytes, status: str = "200 OK") -> None:
        self.reply = reply
        self.status = status
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    async def serve(self) -> str:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((head[0], headers, body))
        writer.write(
            f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.reply)}\r\nConnection: close\r\n\r\n".encode()
        )
        writer.write(self.reply)
        writer.close()


def ask(
    *servers: AuthServer,
    question: Question | None = None,
    seed: int = 3,
    refused: Counter[str] | None = None,
    **options: Any,
) -> AuthState:
    """`refused` gets what the client counted."""

    async def run() -> AuthState:
        addresses = [await server.serve() for server in servers] or ["127.0.0.1:1"]
        if path := options.pop("path", ""):
            addresses = [f"http://{address}{path}" for address in addresses]
        client = AuthClient(addresses, clock=ManualClock(mono=1000.0), rng=random.Random(seed), **options)
        try:
            return await client.ask(question or Question(b"good", "127.0.0.1"))
        finally:
            if refused is not None:
                refused.update(client.refused)
            await client.close()
            for server in servers:
                server.server.close()

    return asyncio.run(run())


def test_get_sends_the_documented_query() -> None:
    server = AuthServer(answer(ttl=10))
    assert ask(server).expires_at == 1010.0
    ((line, headers, body),) = server.requests
    method, target, _ = line.split(" ")
    path, _, query = target.partition("?")
    assert (method, path, body) == ("GET", "/auth", b"")
    assert dict(parse_qsl(query, keep_blank_values=True)) == {
        "secret": "good",
        "remote_ip": "127.0.0.1",
        "tls": "false",
        "common_name": "",
    }
    assert headers["accept"] == "application/vnd.nsq; version=1.0"


def test_bytes_of_the_secret_arrive() -> None:
    server = AuthServer(answer())
    ask(server, question=Question(b"\xff+ %", "127.0.0.1"))
    assert "secret=%FF%2B+%25&" in server.requests[0][0]


def test_post_sends_lists() -> None:
    server = AuthServer(answer())
    ask(server, post=True, path="/check")
    ((line, headers, body),) = server.requests
    assert line == "POST /check HTTP/1.1"
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["secret"] == ["good"]


def test_a_url_with_a_query_keeps_it() -> None:
    server = AuthServer(answer())
    ask(server, path="/check?x=1")
    assert server.requests[0][0].startswith("GET /check?x=1&common_name=")


@pytest.mark.parametrize("seed", range(4))
def test_the_next_server_is_asked_when_one_fails(seed: int) -> None:
    bad, good = AuthServer(b"", "500 Oops"), AuthServer(answer())
    assert ask(bad, good, seed=seed).identity == "joe"
    assert len(good.requests) == 1


@pytest.mark.parametrize(
    "server",
    [
        AuthServer(b"nope"),
        AuthServer(answer(), "403 Forbidden"),
        AuthServer(answer(), "204 No Content"),
        AuthServer(b" " * (ANSWER_BYTES_MAX + 1) + answer()),
    ],
)
def test_no_usable_answer_is_a_failure(server: AuthServer) -> None:
    with pytest.raises(AuthFailed):
        ask(server)


def test_what_is_said_of_a_failure_holds_no_secret() -> None:
    """aiohttp says the whole address when it can not read the answer."""
    secret = b"do-not-tell\xff"
    for server, path in ((AuthServer(b"", "2x0"), ""), (AuthServer(b"", "302 Found\r\nLocation: ftp://x"), "/check")):
        with pytest.raises(AuthFailed) as caught:
            ask(server, path=path, question=Question(secret, "127.0.0.1"))
        assert "do-not-tell" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ([AuthServer(b"", "403 Forbidden")], "refused"),
        ([AuthServer(b"", "401 Unauthorized"), AuthServer(b"", "500 Oops")], "refused"),
        ([AuthServer(b"", "500 Oops")], "no_answer"),
        ([AuthServer(b"nope")], "no_answer"),
        ([], "no_answer"),
        ([AuthServer(answer(authorizations=[]))], "nothing_allowed"),
        ([AuthServer(answer())], ""),
    ],
)
def test_who_is_not_let_in_is_counted_by_the_reason(servers: list[AuthServer], why: str) -> None:
    refused = Counter[str]()
    with contextlib.suppress(AuthFailed):
        ask(*servers, refused=refused)
    assert refused == ({why: 1} if why else {})


def test_no_server_at_all_is_a_failure() -> None:
    with pytest.raises(AuthFailed):
        ask()


def test_a_silent_server_is_given_up() -> None:
    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)  # and hold the writer: one that nobody holds is closed

    async def run() -> None:
        server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = AuthClient([address], clock=ManualClock(), rng=random.Random(1), request_seconds=0.05)
        with pytest.raises(AuthFailed, match="Timeout"):
            await client.ask(Question(b"s", "127.0.0.1"))
        await client.close()
        server.close()

    asyncio.run(run())
