"""How a session and its handler work together: waiting, upgrades, the end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nsqha.wire.commands import INIT
from nsqha.wire.identify import AgreedIdentify
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.session import MAGIC
from tests.unit.wire.conversation import Call, Recorder, calls, i32, session_of, sized, start

TLS = ProtocolLimits(tls=True)
ASK_TLS = b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"tls_v1":true}')
ASK_SNAPPY = b"IDENTIFY\n" + sized(b'{"feature_negotiation":true,"snappy":true}')
PUB = b"PUB t\n" + sized(b"x")


def fatal(text: bytes) -> Call:
    return ("fatal", text)


def test_a_blocked_handler_gets_nothing_until_it_goes_on() -> None:
    session, handler = start()
    handler.block_on = {"sub"}
    session.receive(b"SUB t c\nRDY 1\n")
    session.receive(b"RDY 2\n")
    assert handler.calls == [("sub", "t", "c")]
    handler.blocked = False
    session.resume()
    assert handler.calls[1:] == [("rdy", 1), ("rdy", 2)]


ID = b"0123456789abcdef"
EVERY_CALL = {
    "pub": PUB,
    "dpub": b"DPUB t 1\n" + sized(b"x"),
    "mpub": b"MPUB t\n" + sized(b"\0\0\0\1" + sized(b"x")),
    "rdy": b"RDY 1\n",
    "fin": b"FIN %b\n" % ID,
    "req": b"REQ %b 0\n" % ID,
    "touch": b"TOUCH %b\n" % ID,
    "cls": b"CLS\n",
}


@pytest.mark.parametrize("name", EVERY_CALL)
@pytest.mark.parametrize("ending", [False, True])
def test_nothing_follows_a_call_that_blocks_or_ends(name: str, ending: bool) -> None:
    class Ending(Recorder):
        def _run(self, what: str, run: list[Call]) -> None:
            super()._run(what, run)
            if ending and self.blocked:
                self.blocked = False
                assert self.session is not None
                self.session.kill()

    handler = Ending()
    session = session_of(handler)
    session.receive(MAGIC + b"SUB t c\n" + PUB)
    del handler.calls[:]
    handler.block_on = {name}
    session.receive(EVERY_CALL[name] + b"PUB u\n" + sized(b"next"))
    assert handler.calls[-1][0] == name
    handler.blocked = False
    session.resume()
    assert handler.calls[-1] == ("pub", "u", b"next") or (ending and handler.calls[-1][0] == name)
    assert session.unread.take() == b""


def test_bytes_wait_when_the_handler_was_blocked_from_outside() -> None:
    session, handler = start()
    handler.blocked = True
    session.receive(PUB)
    assert handler.calls == []
    handler.blocked = False
    session.resume()
    assert handler.calls == [("pub", "t", b"x")]


def test_a_publish_whose_permission_is_not_known_yet_runs_again() -> None:
    for command in (PUB, PUB * 3, b"DPUB t 1\n" + sized(b"x"), b"MPUB t\n" + sized(b"\0\0\0\1" + sized(b"x"))):
        session, handler = start()
        handler.block_on = {"check_publish"}
        session.receive(command)
        assert handler.calls == []
        handler.block_on = set()
        handler.blocked = False
        session.resume()
        assert handler.calls == calls(command)


def test_a_refused_publish_is_the_end() -> None:
    for command in (PUB, PUB * 3, b"DPUB t 1\n" + sized(b"x"), b"MPUB t\n"):
        session, handler = start()
        handler.refuse_publish = True
        session.receive(command)
        session.receive(PUB)
        assert handler.calls == [fatal(b"E_UNAUTHORIZED")]


@pytest.mark.parametrize("command", [PUB, b"DPUB t 1\n" + sized(b"x"), b"MPUB t\n" + sized(b"\0\0\0\1" + sized(b"x"))])
def test_a_publish_whose_right_is_gone_when_its_body_ends_is_refused(command: bytes) -> None:
    for size in range(len(b"MPUB t\n"), len(command)):
        session, handler = start()
        session.receive(command[:size])
        del handler.calls[:]
        handler.refuse_publish = True
        session.receive(command[size:])
        assert handler.calls == [fatal(b"E_UNAUTHORIZED")], size


MPUB = b"MPUB t\n" + sized(b"\0\0\0\1" + sized(b"x"))


@pytest.mark.parametrize("command", [PUB, PUB * 3, MPUB])
def test_a_refused_publish_to_a_known_topic_is_the_end_too(command: bytes) -> None:
    session, handler = start()
    session.receive(PUB)
    handler.refuse_publish = True
    session.receive(command)
    session.receive(PUB)
    assert handler.calls == [("pub", "t", b"x"), fatal(b"E_UNAUTHORIZED")]


def test_nobody_is_asked_where_everybody_may_publish() -> None:
    session, handler = start()
    session.publishing.checks = False
    handler.refuse_publish = True
    for command in (PUB, PUB * 2, MPUB, MPUB, b"DPUB t 1\n" + sized(b"x")):
        session.receive(command)
    made = [call for call in handler.calls if call[0] != "ensure_topic"]
    assert made == [("pub", "t", b"x")] * 3 + [("mpub", "t", [b"x"])] * 2 + [("dpub", "t", b"x", 1)]


def test_an_mpub_is_checked_and_makes_its_topic_before_its_body_comes() -> None:
    session, handler = start()
    session.receive(b"MPUB t\n")
    assert handler.calls == [("check", "MPUB", "t"), ("ensure_topic", "t")]
    session.receive(sized(b"\0\0\0\1" + sized(b"x")))
    assert handler.calls[2:] == [("mpub", "t", [b"x"])]


def test_an_mpub_waits_for_its_topic() -> None:
    for command in (b"MPUB t\n", b"MPUB t\n" + sized(b"\0\0\0\1" + sized(b"x")), b"MPUB t\n" + i32(0)):
        session, handler = start()
        handler.block_on = {"ensure_topic"}
        session.receive(command)
        assert handler.calls == [("check", "MPUB", "t"), ("ensure_topic", "t")]
        handler.blocked = False
        session.resume()
        assert handler.calls == calls(command)


def test_a_short_mpub_leaves_nothing_to_wait_for() -> None:
    session, handler = start()
    handler.block_on = {"mpub"}
    session.receive(b"MPUB t\n" + i32(1000) + b"\0\0\0\1" + sized(b"x") + PUB)
    handler.blocked = False
    session.resume()
    assert handler.calls[2:] == [("mpub", "t", [b"x"]), ("pub", "t", b"x")]


def test_a_handler_that_ends_the_connection_hears_no_more() -> None:
    class Ending(Recorder):
        def subscribe(self, topic: str, channel: str, partition: int | None) -> None:
            super().subscribe(topic, channel, partition)
            assert self.session is not None
            self.session.kill()

    handler = Ending()
    session = session_of(handler)
    session.receive(MAGIC + b"SUB t c\n" + PUB)
    session.receive(PUB)
    session.eof()
    assert handler.calls == [("sub", "t", "c")]


# ---- TLS policy


def test_with_tls_required_only_identify_is_allowed_in_clear() -> None:
    for command in (b"PUB t", b"AUTH", b"ASDF x", b"", b"NOP"):
        session, handler = start(TLS)
        session.tls_required_now = True
        session.receive(b"IDENTIFY\n" + sized(b"{}") + command + b"\n")
        word = command.split(b" ")[0]
        assert handler.calls[1:] == [fatal(b"E_INVALID cannot %b in current state (TLS required)" % word)]


def test_after_the_upgrade_all_is_allowed() -> None:
    session, handler = start(TLS)
    session.tls_required_now = True
    handler.block_on = {"identify"}
    session.receive(ASK_TLS)
    assert session.unread.take() == b""
    session.tls_required_now = handler.blocked = False
    session.resume()
    session.receive(PUB)
    assert handler.calls[1:] == [("pub", "t", b"x")]


# ---- upgrades


def test_what_came_before_an_upgrade_can_be_taken() -> None:
    session, handler = start(TLS)
    handler.block_on = {"identify"}
    session.receive(ASK_TLS + b"NOP")
    session.receive(b"\nNOP\n")
    assert session.unread.take() == b"NOP\nNOP\n"
    handler.blocked = False
    session.resume()
    session.receive(PUB)
    assert handler.calls[1:] == [("pub", "t", b"x")]


class Upgrading(Recorder):
    """Takes what came too early inside the call and feeds it back as if it had been decoded."""

    taken = b""

    def identify(self, request: AgreedIdentify) -> None:
        super().identify(request)
        assert self.session is not None
        self.taken = self.session.unread.take()
        self.session.receive(self.taken)


def test_what_came_before_an_upgrade_can_be_taken_at_once_and_fed_again() -> None:
    for rest, after in ((PUB + b"NO", [("pub", "t", b"x")]), (b"", []), (PUB[:-1], [])):
        handler = Upgrading()
        session = session_of(handler)
        session.receive(MAGIC + ASK_SNAPPY + rest)
        assert handler.taken == rest
        assert handler.calls[1:] == after
    session.receive(PUB[-1:] + PUB)
    assert handler.calls[1:] == [("pub", "t", b"x")] * 2


def test_identify_may_be_repeated_and_keeps_what_is_not_said_again() -> None:
    first = b"IDENTIFY\n" + sized(b'{"msg_timeout":2000,"client_id":"a","heartbeat_interval":-1}')
    second = b"IDENTIFY\n" + sized(b'{"hostname":"h","heartbeat_interval":1000}')
    (_, one), (_, two), sub = calls(first + second + b"SUB t c\n")
    assert isinstance(one, AgreedIdentify)
    assert isinstance(two, AgreedIdentify)
    assert (one.agreed.msg_timeout_ms, two.agreed.msg_timeout_ms) == (2000, 2000)
    assert (one.agreed.heartbeat_interval_ms, two.agreed.heartbeat_interval_ms) == (0, 1000)
    assert (two.agreed.client_id, two.agreed.hostname) == ("", "h")
    assert sub == ("sub", "t", "c")


def test_each_layer_is_switched_on_once_and_tls_first() -> None:
    refused = fatal(b"E_IDENTIFY_FAILED IDENTIFY failed connection is upgraded already")
    assert calls(ASK_TLS + ASK_TLS, limits=TLS)[1:] == [refused]
    assert calls(ASK_SNAPPY + ASK_SNAPPY)[1:] == [refused]
    assert calls(ASK_SNAPPY + ASK_TLS, limits=TLS)[1:] == [refused]
    assert [call[0] for call in calls(ASK_TLS + ASK_SNAPPY, limits=TLS)] == ["identify", "identify"]


def test_a_refused_identify_changes_nothing() -> None:
    session, handler = start()
    session.receive(b"IDENTIFY\n" + sized(b'{"sample_rate":100}'))
    assert handler.calls == [fatal(b"E_BAD_BODY IDENTIFY sample rate (100) is invalid")]
    assert session.consuming.state == INIT


def test_many_commands_are_run_in_parts_if_the_handler_has_others_take_their_turn() -> None:
    session, handler = start()
    handler.block_on = {"rest"}
    session.receive(b"SUB t c\n" + b"".join(b"RDY %d\n" % (n % 2000) for n in range(5_000)) + b"RDY")
    parts = [len(handler.calls)]
    while handler.blocked:
        handler.blocked = False
        session.resume()
        parts.append(len(handler.calls))
    assert len(parts) > 5 and max(b - a for a, b in pairwise([0, *parts])) <= 1_000
    assert handler.calls[1:] == [("rdy", n % 2000) for n in range(5_000)]
    session.receive(b" 7\n")
    assert handler.calls[-1] == ("rdy", 7)
