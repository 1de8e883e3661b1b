"""However the bytes are cut, whatever they are: the same calls, no exception, no more kept than the limits allow."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nsqha.wire import session as session_module
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.session import LINE_BYTES_MAX, MAGIC
from nsqha.wire.unread import UnreadBytes
from tests.unit.wire.conversation import Call, Recorder, calls, i32, mpub_body, session_of, sized, start

SMALL = ProtocolLimits(msg_bytes_max=40, body_bytes_max=200, rdy_count_max=100, req_timeout_ms_max=5000)


def fatal(text: bytes) -> Call:
    return ("fatal", text)


# ---- cuts

words = st.sampled_from([b"t", b"topic.2", b"c#ephemeral", b"a*b", b"", b"0", b"1", b"700", b"-1", b"0123456789abcdef"])
bodies = st.binary(min_size=1, max_size=40)
lengths = st.one_of(st.integers(0, 60), st.sampled_from([-1, 200, 201, 1 << 30, -(1 << 31)]))
ids = st.one_of(st.text("0123456789abcdef", min_size=16, max_size=16), st.text(" \r\nxF0", min_size=14, max_size=17))
line_ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b" more\n"])

commands = st.one_of(
    st.builds(lambda topic, body: b"PUB %b\n" % topic + sized(body), st.sampled_from([b"t", b"u"]), bodies),
    st.builds(lambda body, n: (b"PUB t\n" + sized(body)) * n, bodies, st.integers(1, 5)),
    st.builds(lambda end, body: b"PUB t" + end + sized(body), line_ends, bodies),
    st.builds(lambda parts: b"MPUB t\n" + sized(mpub_body(*parts)), st.lists(bodies, min_size=1, max_size=6)),
    st.builds(lambda n, parts: b"MPUB t\n" + i32(n) + mpub_body(*parts), lengths, st.lists(bodies, max_size=6)),
    st.builds(lambda ms, body: b"DPUB t %b\n" % ms + sized(body), words, bodies),
    st.builds(lambda command, n: b"%b t 1\n" % command + i32(n), st.sampled_from([b"PUB", b"DPUB", b"MPUB"]), lengths),
    st.builds(
        lambda n, end: b"".join(b"FIN %016x" % i + end for i in range(n)), st.integers(1, 6), st.just(b"\n") | line_ends
    ),
    st.builds(lambda command, i: b"%b %b\n" % (command, i.encode()), st.sampled_from([b"FIN", b"TOUCH"]), ids),
    st.builds(lambda i, ms: b"REQ %b %b\n" % (i.encode(), ms), ids, words),
    st.builds(lambda n: b"RDY %b\n" % n, words),
    st.sampled_from(
        [b"NOP\n", b"CLS\n", b"SUB t ch\n", b"SUB t ch\n", b"AUTH\n" + sized(b"secret"), b"RDY\n", b"ASDF\n"]
    ),
    st.sampled_from([b'{"client_id":"c"}', b'{"heartbeat_interval":-1}', b"{}", b"[", b'{"msg_timeout":1}']).map(
        lambda body: b"IDENTIFY\n" + sized(body)
    ),
)
conversations = st.lists(commands, max_size=12).map(b"".join)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(n, len(data)) for n in at), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


@settings(max_examples=300, deadline=None)
@given(data=conversations, at=st.lists(st.integers(0, 600), max_size=8), ends=st.booleans())
@example(data=b"SUB t c\nFIN 0123456789abcd\n\nFIN 0123456789abcdef\n", at=[5], ends=True)
def test_cuts_change_nothing(data: bytes, at: list[int], ends: bool) -> None:
    whole = calls(data, limits=SMALL, eof=ends)
    assert calls(*cut(data, at), limits=SMALL, eof=ends) == whole
    assert calls(*[data[n : n + 1] for n in range(len(data))], limits=SMALL, eof=ends) == whole


BLOCKING = ["pub", "mpub", "dpub", "sub", "rdy", "fin", "req", "touch", "cls", "identify", "auth", "ensure_topic"]


@settings(max_examples=200, deadline=None)
@given(
    data=conversations,
    at=st.lists(st.integers(0, 600), max_size=5),
    block_on=st.sets(st.sampled_from([*BLOCKING, "check_publish"]), min_size=1),
    ends=st.booleans(),
)
@example(
    data=b'IDENTIFY\n\x00\x00\x00\x11{"client_id":"c"}' * 2,
    at=[],
    block_on={"identify"},
    ends=False,
)
def test_blocking_changes_nothing(data: bytes, at: list[int], block_on: set[str], ends: bool) -> None:
    session, handler = start(SMALL)
    handler.block_on = block_on

    def release() -> None:
        while handler.blocked:
            # What was asked once is known when it is asked again.
            handler.block_on = block_on - {"check_publish"}
            handler.blocked = False
            session.resume()
            handler.block_on = block_on

    for piece in cut(data, at):
        session.receive(piece)
        before = list(handler.calls)
        if handler.blocked:
            session.receive(b"")
            session.resume()  # too early
            assert handler.calls == before
        release()
    if ends:
        session.eof()
        release()
    assert handler.calls == calls(data, limits=SMALL, eof=ends)


# ---- the beginning


def test_the_magic_may_come_with_the_first_command_or_byte_by_byte() -> None:
    sent = MAGIC + b"PUB t\n" + sized(b"x")
    for pieces in ([sent], [sent[n : n + 1] for n in range(len(sent))], [sent[:2], sent[2:]]):
        handler = Recorder()
        session = session_of(handler)
        for piece in pieces:
            session.receive(piece)
        assert handler.calls == [("pub", "t", b"x")]


@pytest.mark.parametrize("magic", [b"GET ", b"  v2", b"  V1", b"  V3", b"\x16\x03\x01\x00"])
def test_another_magic_is_refused(magic: bytes) -> None:
    handler = Recorder()
    session = session_of(handler)
    session.receive(magic + b"/ HTTP/1.1\r\n")
    session.receive(MAGIC)
    assert handler.calls == [fatal(b"E_BAD_PROTOCOL")]


@pytest.mark.parametrize("sent", [b"", b"  V", MAGIC])
def test_a_client_that_leaves_at_once_gets_nothing(sent: bytes) -> None:
    handler = Recorder()
    session = session_of(handler)
    session.receive(sent)
    session.eof()
    assert handler.calls == []


# ---- lines


def test_the_longest_line() -> None:
    line = b"NOP ".ljust(LINE_BYTES_MAX - 1, b"x") + b"\n"
    assert calls(line + b"PUB t\n" + sized(b"x")) == [("pub", "t", b"x")]


@pytest.mark.parametrize("step", [1 << 20, 1000, 16384])
def test_a_longer_line_closes_without_a_frame(step: int) -> None:
    sent = b"x" * 16384 + b"\nPUB t\n" + sized(b"x")
    assert calls(*[sent[n : n + step] for n in range(0, len(sent), step)]) == [("hang_up",)]
    assert calls(sent[:16384]) == [("hang_up",)]
    assert calls(sent[:16383]) == []


def test_a_number_of_sixteen_thousand_digits() -> None:
    assert calls(b"DPUB t " + b"0" * 16000 + b"7\n" + sized(b"x"))[1] == ("dpub", "t", b"x", 7)
    assert calls(b"SUB t c\nRDY " + b"9" * 16000 + b"\n")[1][0] == "fatal"


# ---- the end


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"PUB t\n", b"E_BAD_MESSAGE PUB failed to read message body size"),
        (b"PUB t\n\0\0", b"E_BAD_MESSAGE PUB failed to read message body size"),
        (b"PUB t\n" + i32(3) + b"ab", b"E_BAD_MESSAGE PUB failed to read message body"),
        (b"PUB t\n" + i32(3), b"E_BAD_MESSAGE PUB failed to read message body"),
        (b"DPUB t 1\n\0\0", b"E_BAD_MESSAGE DPUB failed to read message body size"),
        (b"DPUB t 1\n" + i32(9) + b"abc", b"E_BAD_MESSAGE DPUB failed to read message body"),
        (b"MPUB t\n\0", b"E_BAD_BODY MPUB failed to read body size"),
        (b"MPUB t\n" + i32(20), b"E_BAD_BODY MPUB failed to read message count"),
        (b"MPUB t\n" + i32(20) + b"\0", b"E_BAD_BODY MPUB failed to read message count"),
        (b"MPUB t\n" + i32(20) + i32(2), b"E_BAD_MESSAGE MPUB failed to read message(0) body size"),
        (
            b"MPUB t\n" + i32(20) + i32(2) + sized(b"a") + b"\0",
            b"E_BAD_MESSAGE MPUB failed to read message(1) body size",
        ),
        (b"MPUB t\n" + i32(20) + i32(2) + sized(b"a") + i32(5), b"E_BAD_MESSAGE MPUB failed to read message body"),
        (b"MPUB t\n" + i32(20) + i32(1) + i32(5) + b"abcd", b"E_BAD_MESSAGE MPUB failed to read message body"),
        (b"IDENTIFY\n\0\0", b"E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n" + i32(10) + b'{"a"', b"E_BAD_BODY IDENTIFY failed to read body"),
        (b"AUTH\n\0", b"E_BAD_BODY AUTH failed to read body size"),
        (b"AUTH\n" + i32(9) + b"abc", b"E_BAD_BODY AUTH failed to read body"),
    ],
)
def test_the_end_inside_a_body(sent: bytes, text: bytes) -> None:
    expected = [fatal(text)]
    assert [c for c in calls(sent, eof=True) if c[0] == "fatal"] == expected
    pieces = [sent[n : n + 1] for n in range(len(sent))]
    assert [c for c in calls(*pieces, eof=True) if c[0] == "fatal"] == expected


@pytest.mark.parametrize("sent", [b"", b"PUB abc", b"NOP\n", b"MPUB t\n" + sized(mpub_body(b"x"))])
def test_the_end_elsewhere_is_silent(sent: bytes) -> None:
    assert "fatal" not in {call[0] for call in calls(sent, eof=True)}


def test_the_end_waits_for_what_is_blocked() -> None:
    session, handler = start()
    handler.block_on = {"sub"}
    session.receive(b"SUB t c\nRDY 3\nPUB t\n" + i32(7))
    session.eof()
    assert handler.calls == [("sub", "t", "c")]
    handler.blocked = False
    session.resume()
    assert handler.calls[1:] == [("rdy", 3), fatal(b"E_BAD_MESSAGE PUB failed to read message body")]


# ---- garbage and memory


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=60), conversations), max_size=6), st.booleans())
def test_garbage_is_never_an_exception(pieces: list[bytes], ends: bool) -> None:
    found = calls(*pieces, limits=SMALL, eof=ends)
    assert [call[0] in ("fatal", "hang_up") for call in found[:-1]] == [False] * (len(found) - 1)


def peak_of_sending(sent: bytes, step: int, limits: ProtocolLimits) -> tuple[int, list[Call]]:
    """Bytes held at most while `sent` comes in pieces of `step`."""
    session, handler = start(limits)
    tracemalloc.start()
    for n in range(0, len(sent), step):
        session.receive(sent[n : n + step])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak, handler.calls


def test_a_size_is_refused_before_anything_is_kept() -> None:
    peak, found = peak_of_sending(b"PUB t\n" + i32(1 << 30) + bytes(1 << 20), 1 << 14, ProtocolLimits())
    assert found == [fatal(b"E_BAD_MESSAGE PUB message too big 1073741824 > 1048576")]
    assert peak < 1 << 17


def test_messages_of_an_mpub_add_up_to_the_body_limit_at_most() -> None:
    limits = ProtocolLimits(msg_bytes_max=1 << 18, body_bytes_max=1 << 20)
    body = i32(1000) + sized(bytes(1 << 18)) * 40
    peak, found = peak_of_sending(b"MPUB t\n" + i32(1 << 20) + body, 1 << 14, limits)
    assert found[-1] == fatal(b"E_BAD_BODY MPUB body too big 1048596 > 1048576")
    assert peak < 3 << 20


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_a_large_mpub_in_small_reads_is_published_once(size: int) -> None:
    rng = random.Random(size)
    parts = [rng.randbytes(size)] * (500_000 // (size + 4))
    sent = b"MPUB t\n" + sized(mpub_body(*parts)) + b"PUB t\n" + sized(b"next")
    found = calls(*[sent[n : n + 4099] for n in range(0, len(sent), 4099)])
    assert found == [("check", "MPUB", "t"), ("ensure_topic", "t"), ("mpub", "t", parts), ("pub", "t", b"next")]


def test_a_large_body_costs_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []

    class Counting(UnreadBytes):
        def take(self) -> bytes:
            data = super().take()
            joined.append(len(data))
            return data

    monkeypatch.setattr(session_module, "UnreadBytes", Counting)
    handler = Recorder()
    session = session_of(handler, ProtocolLimits(msg_bytes_max=1 << 21))
    sent = MAGIC + b"PUB t\n" + sized(bytes(1 << 21))
    for n in range(0, len(sent), 1 << 12):
        session.receive(sent[n : n + (1 << 12)])
    assert handler.calls == [("pub", "t", bytes(1 << 21))]
    assert joined == [1 << 12, len(sent) - len(MAGIC)]
