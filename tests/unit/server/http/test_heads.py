"""Heads of requests: what Go takes and the parser does not is made into what it takes, however it is cut on its way."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.server.http import heads as module
from nsqha.server.http.heads import (
    BAD,
    HEAD_BYTES_MAX,
    KEPT_BYTES_MAX,
    LINES_MAX,
    NO_SUCH_CODING,
    SMALL_BYTES,
    TOO_LARGE,
    USED,
    RequestHeads,
)

ROOT = Path(__file__).resolve().parents[4]
GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\n"


def read(*pieces: bytes) -> tuple[bytes, int]:
    """What the parser gets of all of them, and the first refusal."""
    heads, ready, status = RequestHeads(), b"", 0
    for piece in pieces:
        more, refused = heads.read(piece)
        ready += more
        status = status or refused
    return ready, status


@pytest.mark.parametrize(
    ("sent", "ready"),
    [
        (GET, GET),
        (GET.replace(b"\r", b""), GET),
        (b"\r\n\n" + GET, GET),
        (POST + b"Content-Length: 3\r\n\r\na\nb", POST + b"Content-Length: 3\r\n\r\na\nb"),
        (
            POST + b"content-length: 1\r\nX: y\r\nContent-Length:1 \r\nCONTENT-LENGTH:\t1\r\n\r\nx",
            POST + b"content-length: 1\r\nX: y\r\n\r\nx",
        ),
        (
            b"POST / HTTP/1.1\nHost: x\nContent-Length: 2\n\n\n\n" + GET,
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n\n\n" + GET,
        ),
        (b"GET / HTTP/1.1\nUpgrade-Insecure-Requests: 1\n\n" * 2, None),
    ],
)
def test_what_the_parser_gets(sent: bytes, ready: bytes | None) -> None:
    """None: the same with CR LF."""
    assert read(sent) == (sent.replace(b"\n", b"\r\n") if ready is None else ready, 0)


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Transfer-Encoding: Chunked \r\n\r\n1\r\n\n\r\n0\r\n\r\n",
        GET.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"),
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_behind_a_body_whose_end_is_not_known_all_is_handed_on_as_it_is(sent: bytes) -> None:
    behind = b"GET / HTTP/1.1\nHost: x\n\n"
    assert read(sent + behind, behind) == (sent + behind + behind, 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST.replace(b"Host: x\r\n", b"Host: x\n") + b"\r\n", BAD),
        (POST + b"X: y\n\r\n", BAD),
        (b"GET / HTTP/1.1\nHost: x\r\n\n", BAD),
        (b"GET / HTTP/1.1\nHost: x\n\r\n", BAD),
        (b"GET / HTTP/1.1\nHost: x\rContent-Length: 5\n\n", BAD),
        (POST + b"X: a\rContent-Length: 5\r\n\r\n", BAD),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", BAD),
        (POST + b"Content-Length: 1\r\nContent-Length: 01\r\n\r\n", BAD),
        (POST + b"Content-Length: +1\r\n\r\n", BAD),
        (POST + b"Content-Length: 1, 1\r\n\r\n", BAD),
        (POST + b"Content-Length: -1\r\n\r\n", BAD),
        (POST + b"Content-Length:\r\n\r\n", BAD),
        (POST + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n", BAD),
        (b"POST / HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\n\n0\r\n\r\n", BAD),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", NO_SUCH_CODING),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", NO_SUCH_CODING),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", NO_SUCH_CODING),
        (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n", NO_SUCH_CODING),
    ],
)
def test_what_is_refused(sent: bytes, status: int) -> None:
    assert read(sent)[1] == status
    before, refused = read(GET + sent + GET, GET)
    assert (before, refused) == (GET, status), "what came before is answered, what comes behind is dropped"
    assert read(*(sent[n : n + 1] for n in range(len(sent))))[1] == status


@pytest.mark.parametrize(
    "sent", [b"  V2IDENTIFY\n", b"\x16\x03\x01\x00\xa5\x01", b"HELO x\r\n", b"GET / HTTP/1.1 \r\n"]
)
def test_what_begins_no_request_does_not_have_to_end(sent: bytes) -> None:
    assert read(sent) == (b"", BAD)
    assert read(sent, GET) == (b"", BAD)


def large(lines: bytes, *, size: int = SMALL_BYTES, end: bytes = b"\r\n") -> bytes:
    return POST.replace(b"\r\n", end) + b"Cookie: " + b"a" * size + end + lines + end


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_of_a_large_head_what_the_server_uses_is_left(end: bytes) -> None:
    sent = large(b"Authorization: Bearer y" + end + b"X-Y: z" + end + b"Content-Length: 1" + end, size=1 << 20, end=end)
    assert len(sent) < HEAD_BYTES_MAX
    left = POST + b"Authorization: Bearer y\r\nContent-Length: 1\r\n\r\n"
    assert read(sent + b"x" + GET) == (left + b"x" + GET, 0)
    assert read(*(sent[at : at + 1000] for at in range(0, len(sent), 1000)), b"x") == (left + b"x", 0)


def test_of_many_fields_those_that_the_server_uses_are_left() -> None:
    sent = POST + b"X: y\r\n" * 300 + b"Content-Length: 1\r\n\r\n"
    assert len(sent) < SMALL_BYTES
    assert read(sent + b"x" + GET) == (POST + b"Content-Length: 1\r\n\r\nx" + GET, 0)


def test_a_large_head_takes_no_more_memory_than_a_small_one() -> None:
    heads = RequestHeads()
    for piece in (POST, *[b"X: " + b"a" * 2000 + b"\r\n"] * 450):
        assert heads.read(piece) == (b"", 0)
    assert heads._large is not None
    assert len(heads._large.left) == len(POST)
    assert len(heads._large._line) < SMALL_BYTES


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (large(b"", size=HEAD_BYTES_MAX), TOO_LARGE),
        (large(b"A: b\r\n" * LINES_MAX), TOO_LARGE),
        (large((b"Accept: " + b"a" * 10_000 + b"\r\n") * (KEPT_BYTES_MAX // 10_000 + 1)), TOO_LARGE),
        (large(b"Authorization: " + b"a" * SMALL_BYTES + b"\r\n"), TOO_LARGE),
        (b"GET /" + b"a" * SMALL_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", BAD),
        (large(b" folded\r\n"), BAD),
        (large(b"no colon\r\n"), BAD),
        (large(b"Content-Length : 1\r\n"), BAD),
        (large(b"X: y\n"), BAD),
        (large(b"X: a\rb\r\n"), BAD),
        (large(b"Content-Length: 1\r\nContent-Length: 2\r\n"), BAD),
        (large(b"Transfer-Encoding: gzip\r\n"), NO_SUCH_CODING),
        (large(b"Transfer-Encoding: chunked\r\n", end=b"\n"), BAD),
    ],
)
def test_large_heads_that_are_refused(sent: bytes, status: int) -> None:
    assert read(sent) == (b"", status)
    assert read(*(sent[at : at + 997] for at in range(0, len(sent), 997))) == (b"", status)


REQUESTS = [
    (GET, GET),
    (GET.replace(b"\r\n", b"\n"), GET),
    (POST + b"Content-Length: 4\r\n\r\n\r\n\n\n", POST + b"Content-Length: 4\r\n\r\n\r\n\n\n"),
    (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab", POST + b"Content-Length: 2\r\n\r\nab"),
    (b"PUT /x HTTP/1.0\nContent-Length: 3\n\n\n\n\n", b"PUT /x HTTP/1.0\r\nContent-Length: 3\r\n\r\n\n\n\n"),
    (large(b"Content-Length: 1\r\n") + b"\n", POST + b"Content-Length: 1\r\n\r\n\n"),
]


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=6), st.integers(0, 1 << 32), st.booleans())
def test_wherever_the_bytes_are_cut_the_parser_gets_the_same(
    requests: list[tuple[bytes, bytes]], seed: int, chunked: bool
) -> None:
    last = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n\n\r\n0\r\n\r\n\n\nas it is" if chunked else b""
    sent = b"".join(sent for sent, _ in requests) + last
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(sent) + 1), min(20, len(sent))))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert read(*pieces) == (b"".join(ready for _, ready in requests) + last, 0)


@given(st.lists(st.sampled_from([GET, POST, b"\r\n", b"\n", b"Content-Length: 1", b"x", b": ", b"\r"]), max_size=12))
def test_any_bytes_are_handed_on_or_refused(parts: list[bytes]) -> None:
    ready, status = read(*parts)
    assert status in (0, BAD)
    assert ready.count(b"\n") == ready.count(b"\r\n") or b"Content-Length" in ready


def test_the_fields_that_handlers_read_are_left() -> None:
    found = set()
    for folder in (ROOT / "nsqha" / "server" / "http", ROOT / "lookupd"):
        for path in folder.rglob("*.py"):
            found |= set(re.findall(r'headers(?:\.get\(|\[)"([\w-]+)"', path.read_text()))
    found -= {"Content-Type"}  # of answers
    assert {"Authorization", "Origin", "Expect", "Accept"} <= found
    assert {name.lower().encode() for name in found} <= USED


def test_the_bounds_are_those_of_go() -> None:
    assert module.HEAD_BYTES_MAX == (1 << 20) + 4096
