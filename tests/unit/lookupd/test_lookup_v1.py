"""The lookup protocol, conversation by conversation, whole and in pieces."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookupd import registry as registry_module
from lookupd.lookup_v1 import IDENTIFY_BYTES_MAX, LINE_BYTES_MAX, STEPS_AT_ONCE, Admission, LookupSession, NotAdmitted
from lookupd.registry import Registry
from nsqha.clock import Now

T0 = Now(1000.0, 10**18)
BODY = b'{"version":"1.3.0","hostname":"h","broadcast_address":"a","tcp_port":4150,"http_port":4151,"x":[{}]}'


def sized(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


IDENTIFY = b"IDENTIFY\n" + sized(BODY)


class Talk:
    def __init__(self, greeting: bytes = b"  V1", admission: Admission | None = None) -> None:
        self.registry = Registry(inactive_timeout_s=300, tombstone_lifetime_s=45)
        self.said: list[str] = []
        say = lambda event, _: self.said.append(event)  # noqa: E731
        self.session = LookupSession(self.registry, "1.2.3.4:5", b"{me}", say, admission)
        self.send(greeting)

    def send(self, data: bytes, now: Now = T0) -> list[bytes]:
        return replies(self.session.receive(data, now))


def replies(data: bytes) -> list[bytes]:
    found = []
    while data:
        (size,) = struct.unpack(">i", data[:4])
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def test_a_conversation() -> None:
    talk = Talk()
    assert talk.send(b"PING\n") == [b"OK"]
    assert talk.send(IDENTIFY) == [b"{me}"]
    assert talk.send(b"REGISTER t c\r\n  UNREGISTER t c \nPING\n") == [b"OK"] * 3
    assert not talk.session.closed
    found = talk.registry.lookup("t", T0)
    assert found is not None
    assert [peer.id for peer in found.producers] == ["1.2.3.4:5"]
    assert found.producers[0].info.hostname == "h"
    talk.session.leave()
    assert talk.registry.nodes(T0) == []
    assert talk.said == ["lookup_identify", "lookup_register", "lookup_unregister"]


def test_identify_is_read_as_nsqlookupd_reads_it() -> None:
    talk = Talk()
    body = b'{"VERSION":"1.3.0","hostname":null,"Broadcast_Address":"caf\xe9","tcp_port":4150,"HTTP_port":4151}'
    assert talk.send(b"IDENTIFY\n" + sized(body)) == [b"{me}"]
    talk.send(b"REGISTER t\n")
    found = talk.registry.lookup("t", T0)
    assert found is not None
    info = found.producers[0].info
    assert (info.broadcast_address, info.hostname) == ("caf\ufffd", "")


@pytest.mark.parametrize(
    ("line", "partitions"),
    [
        (b"REGISTER t", 1),
        (b"REGISTER t c", 1),
        (b"REGISTER t  4", 4),
        (b"REGISTER t  4\nREGISTER t c", 4),
        (b"REGISTER t  4\nREGISTER t", 1),
        (b"REGISTER t c 4", 1),
        (b"REGISTER t  9999", 1023),
        (b"REGISTER t  99999", 1),
        (b"REGISTER t  x", 1),
    ],
)
def test_a_producer_that_has_all_partitions_says_how_many(line: bytes, partitions: int) -> None:
    talk = Talk()
    talk.send(IDENTIFY + line + b"\n")
    found = talk.registry.lookup("t", T0)
    assert found is not None and found.partitions == partitions
    other = LookupSession(talk.registry, "1.2.3.4:6", b"{}", lambda *_: None)
    other.receive(b"  V1" + IDENTIFY + b"REGISTER t  2\n", T0)
    found = talk.registry.lookup("t", T0)
    assert found is not None and found.partitions == 0, "which of them has which there is no telling"


def test_ping_keeps_the_producer_shown() -> None:
    talk = Talk()
    talk.send(IDENTIFY)
    talk.send(b"PING\n", Now(1299.0, 10**18))
    assert len(talk.registry.nodes(Now(1500.0, 10**18))) == 1


@pytest.mark.parametrize("magic", [b"  V2", b"  v1", b"GET ", b"\n\n\n\n"])
def test_another_magic_is_refused(magic: bytes) -> None:
    talk = Talk(b"")
    assert talk.send(magic + b"PING\n") == [b"E_BAD_PROTOCOL"]
    assert talk.session.closed


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"\n", b"E_INVALID invalid command "),
        (b"ping\n", b"E_INVALID invalid command ping"),
        (b"HELP me\n", b"E_INVALID invalid command HELP"),
        (b"REGISTER t\n", b"E_INVALID client must IDENTIFY"),
        (b"UNREGISTER\n", b"E_INVALID client must IDENTIFY"),
        (IDENTIFY + b"IDENTIFY\n", b"E_INVALID cannot IDENTIFY again"),
        (IDENTIFY + b"REGISTER\n", b"E_INVALID REGISTER insufficient number of params"),
        (IDENTIFY + b"UNREGISTER\n", b"E_INVALID UNREGISTER insufficient number of params"),
        (IDENTIFY + b"REGISTER a*b c\n", b"E_BAD_TOPIC REGISTER topic name 'a*b' is not valid"),
        (IDENTIFY + b"REGISTER \xff\n", b"E_BAD_TOPIC REGISTER topic name '\xff' is not valid"),
        (IDENTIFY + b"REGISTER  t\n", b"E_BAD_TOPIC REGISTER topic name '' is not valid"),
        (IDENTIFY + b"UNREGISTER t a*b\n", b"E_BAD_CHANNEL UNREGISTER channel name 'a*b' is not valid"),
        (
            IDENTIFY + b"REGISTER " + b"n" * 65 + b"\n",
            b"E_BAD_TOPIC REGISTER topic name '%s' is not valid" % (b"n" * 65),
        ),
        (b"IDENTIFY\n" + sized(b"nope"), b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (b"IDENTIFY\n" + sized(b""), b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (b"IDENTIFY\n" + sized(b"[" * 60_000), b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (b"IDENTIFY\n" + sized(b'{"tcp_port":"4150"}'), b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (b"IDENTIFY\n" + sized(b'{"version":"\xff\xfe"}'), b"E_BAD_BODY IDENTIFY missing fields"),
        (b"IDENTIFY\n" + sized(b"{}"), b"E_BAD_BODY IDENTIFY missing fields"),
        (b"IDENTIFY\n" + sized(BODY.replace(b"4151", b"0")), b"E_BAD_BODY IDENTIFY missing fields"),
        (b"IDENTIFY\n" + sized(BODY.replace(b'"a"', b"null")), b"E_BAD_BODY IDENTIFY missing fields"),
        (b"IDENTIFY\n\xff\xff\xff\xff", b"E_BAD_BODY IDENTIFY invalid body size -1"),
        (b"IDENTIFY\n\x7f\xff\xff\xff", b"E_BAD_BODY IDENTIFY body too big 2147483647 > 65536"),
        (IDENTIFY + b"AUTH\n" + sized(b"x"), b"E_AUTH_DISABLED AUTH disabled"),
        (
            b"IDENTIFY\n" + sized(BODY.replace(b'"a"', b'"%s"' % (b"a" * 256))),
            b"E_BAD_BODY IDENTIFY broadcast_address is longer than 255 characters",
        ),
        (
            b"IDENTIFY\n" + sized(BODY.replace(b'"h"', b'"%s"' % (b"h" * 60_000))),
            b"E_BAD_BODY IDENTIFY hostname is longer than 255 characters",
        ),
    ],
)
def test_every_error_is_said_and_closes(sent: bytes, answer: bytes) -> None:
    talk = Talk()
    assert talk.send(sent + b"PING\nPING\n")[-1] == answer
    assert talk.session.closed
    assert talk.send(b"PING\n") == []


def test_the_registry_being_full_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(registry_module, "NAMES_MAX", 1)
    talk = Talk()
    talk.send(IDENTIFY)
    assert talk.send(b"REGISTER t c\n") == [b"E_INVALID REGISTER too many topics and channels are registered"]


def test_a_line_is_refused_when_it_is_too_long_even_if_it_comes_whole() -> None:
    assert Talk().send(b"x" * (LINE_BYTES_MAX - 1) + b"\n")[0].startswith(b"E_INVALID invalid command xxx")
    assert Talk().send(b"x" * LINE_BYTES_MAX + b"\n") == [b"E_INVALID line is longer than 4096 bytes"]


def test_a_line_without_end_is_refused_when_it_is_too_long() -> None:
    talk = Talk()
    assert talk.send(b"x" * (LINE_BYTES_MAX - 1)) == []
    assert talk.send(b"x" * 100_000) == [b"E_INVALID line is longer than 4096 bytes"]
    assert len(talk.session._buffer) == 0


def test_the_largest_identify_is_taken() -> None:
    talk = Talk()
    body = BODY[:-1] + b" " * (IDENTIFY_BYTES_MAX - len(BODY)) + b"}"
    assert talk.send(b"IDENTIFY\n" + sized(body)) == [b"{me}"]


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", []),
        (b"PIN", []),
        (b"IDENTIFY\n\x00", [b"E_BAD_BODY IDENTIFY failed to read body size"]),
        (IDENTIFY[:-1], [b"E_BAD_BODY IDENTIFY failed to read body"]),
    ],
)
def test_an_end_inside_identify_is_an_error(sent: bytes, answer: list[bytes]) -> None:
    talk = Talk()
    talk.send(sent)
    assert replies(talk.session.eof()) == answer
    assert talk.session.closed


def test_leaving_twice_or_before_identify_is_fine() -> None:
    talk = Talk()
    talk.session.leave()
    talk.session.leave()
    assert talk.registry.topics() == []


CONVERSATION = b"  V1PING\n" + IDENTIFY + b"REGISTER t c\nREGISTER u\nUNREGISTER t\nPING\nBYE\nPING\n"
CONVERSATION_REPLIES = [b"OK", b"{me}", b"OK", b"OK", b"OK", b"OK", b"E_INVALID invalid command BYE"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=12))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int]) -> None:
    talk = Talk(b"")
    edges = [0, *sorted(cuts), len(CONVERSATION)]
    got = [reply for a, b in itertools.pairwise(edges) for reply in talk.send(CONVERSATION[a:b])]
    assert got == CONVERSATION_REPLIES
    assert talk.registry.topics() == ["t", "u"]


def test_many_commands_are_carried_out_some_at_a_time() -> None:
    talk = Talk()
    count = 3 * STEPS_AT_ONCE + 1
    assert talk.send(b"PING\n" * count) == [b"OK"] * STEPS_AT_ONCE
    got = STEPS_AT_ONCE
    while talk.session.more:
        got += len(talk.send(b""))
    assert got == count
    talk.send(b"BYE\n" * count)
    assert talk.session.closed and not talk.session.more


def test_byte_by_byte() -> None:
    talk = Talk(b"")
    assert [reply for byte in CONVERSATION for reply in talk.send(bytes([byte]))] == CONVERSATION_REPLIES


PIECES = st.sampled_from(
    [b"  V1", b"PING\n", IDENTIFY, b"IDENTIFY\n", b"REGISTER ", b"t c\n", b"\n", b" ", b"\x00\x00\x00\x05", b"\xff" * 5]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.binary(max_size=30), max_size=30))
def test_no_input_raises_or_is_kept_beyond_the_limits(pieces: list[bytes]) -> None:
    talk = Talk(b"  V1")
    for piece in pieces:
        talk.send(piece)
        assert len(talk.session._buffer) <= max(LINE_BYTES_MAX, IDENTIFY_BYTES_MAX)
    talk.session.eof()
    talk.session.leave()
    assert not any(members for _, members in talk.registry.registrations())


# ---- a daemon with an access file


class OnlySecret:
    """Admits who shows `secret`, until it is revoked."""

    def __init__(self, *, open: bool = False) -> None:
        self.open = open
        self.revoked = False

    def greeting(self, identity: bytes) -> bytes:
        return identity + b" auth_required"

    def admit(self, secret: bytes, digest: bytes) -> bytes:
        assert digest == hashlib.sha256(BODY).digest()
        if secret != b"secret":
            raise NotAdmitted("E_AUTH_FAILED AUTH failed")
        return b"{welcome}"

    def still(self) -> bool:
        return self.open or not self.revoked


AUTH = b"AUTH\n" + sized(b"secret")


def test_a_peer_registers_after_auth_and_is_listed_from_then_on() -> None:
    talk = Talk(admission=OnlySecret())
    assert talk.send(IDENTIFY + b"PING\n") == [b"{me} auth_required", b"OK"]
    assert talk.registry.nodes(T0) == [], "consumers and nsqadmin connect to what is listed"
    assert talk.send(AUTH + b"REGISTER t c\n") == [b"{welcome}", b"OK"]
    assert len(talk.registry.nodes(T0)) == 1


def test_a_peer_whose_address_may_register_needs_no_auth() -> None:
    talk = Talk(admission=OnlySecret(open=True))
    assert talk.send(IDENTIFY + b"REGISTER t c\n" + AUTH + b"PING\n") == [b"{me}", b"OK", b"{welcome}", b"OK"]
    assert len(talk.registry.nodes(T0)) == 1


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (AUTH, b"E_INVALID client must IDENTIFY"),
        (IDENTIFY + b"REGISTER t c\n", b"E_AUTH_FIRST AUTH required before REGISTER"),
        (IDENTIFY + b"UNREGISTER t c\n", b"E_AUTH_FIRST AUTH required before UNREGISTER"),
        (IDENTIFY + b"AUTH\n" + sized(b"wrong"), b"E_AUTH_FAILED AUTH failed"),
        (IDENTIFY + IDENTIFY, b"E_INVALID cannot IDENTIFY again"),
        (IDENTIFY + b"AUTH\n" + struct.pack(">i", 4097), b"E_BAD_BODY AUTH body too big 4097 > 4096"),
    ],
)
def test_a_peer_that_is_not_admitted_is_refused_and_in_no_list(sent: bytes, answer: bytes) -> None:
    talk = Talk(admission=OnlySecret())
    assert talk.send(sent + b"PING\n")[-1] == answer
    assert talk.session.closed and talk.registry.nodes(T0) == [] and talk.registry.topics() == []


def test_a_peer_whose_token_is_revoked_leaves_all_lists() -> None:
    admission = OnlySecret()
    talk, waiting = Talk(admission=admission), Talk(admission=admission)
    talk.send(IDENTIFY + AUTH + b"REGISTER t c\n")
    waiting.send(IDENTIFY)
    assert talk.session.judge_again() == b""
    admission.revoked = True
    assert waiting.session.judge_again() == b"", "it has registered nothing, and may still show a token"
    assert replies(talk.session.judge_again()) == [b"E_AUTH_FAILED AUTH failed"]
    assert talk.session.closed and talk.registry.nodes(T0) == [] and talk.session.judge_again() == b""
