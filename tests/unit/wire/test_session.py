"""What a session makes of what a client sends. Texts and their order are nsqd's."""

from __future__ import annotations

import pytest
from conversation import MAGIC, Call, Recorder, calls, i32, mpub_body, sized, start

from nsqha.wire import identify
from nsqha.wire.encoder import OK
from nsqha.wire.limits import Limits
from nsqha.wire.session import CLOSING, INIT, SUBSCRIBED, Session

ID = b"0123456789abcdef"
SUB: tuple[bytes, Call] = b"SUB t ch\n", ("sub", "t", "ch")
SMALL = Limits(msg_bytes_max=100, body_bytes_max=1000)


def fatal(text: bytes) -> Call:
    return ("fatal", text)


# ---- each command, well formed


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"PUB t\n" + sized(b"hello"), [("pub", "t", b"hello")]),
        (b"PUB t\r\n" + sized(b"hello"), [("pub", "t", b"hello")]),
        (b"PUB t more words\n" + sized(b"hello"), [("pub", "t", b"hello")]),
        (b"PUB t\n" + sized(b"SUB x y\n  V2"), [("pub", "t", b"SUB x y\n  V2")]),
        (b"DPUB t 800\n" + sized(b"later"), [("dpub", "t", b"later", 800)]),
        (b"DPUB t \n" + sized(b"x"), [("dpub", "t", b"x", 0)]),
        (b"DPUB t 3600000\n" + sized(b"x"), [("dpub", "t", b"x", 3600000)]),
        (
            b"MPUB t\n" + sized(mpub_body(b"one", b"two")),
            [("ensure_topic", "t"), ("mpub", "t", [b"one", b"two"])],
        ),
        (b"SUB t ch more\n", [("sub", "t", "ch")]),
        (b"SUB t#ephemeral c#ephemeral\n", [("sub", "t#ephemeral", "c#ephemeral")]),
        (SUB[0] + b"RDY 7 8\n", [SUB[1], ("rdy", 7)]),
        (SUB[0] + b"RDY\n", [SUB[1], ("rdy", 1)]),
        (SUB[0] + b"RDY \n", [SUB[1], ("rdy", 0)]),
        (SUB[0] + b"RDY 2500\n", [SUB[1], ("rdy", 2500)]),
        (SUB[0] + b"FIN %b\n" % ID, [SUB[1], ("fin", ID)]),
        (SUB[0] + b"FIN %b\r\n" % ID, [SUB[1], ("fin", ID)]),
        (SUB[0] + b"FIN %b more\n" % ID, [SUB[1], ("fin", ID)]),
        (SUB[0] + b"REQ %b 700\n" % ID, [SUB[1], ("req", ID, 700)]),
        (SUB[0] + b"REQ %b \n" % ID, [SUB[1], ("req", ID, 0)]),
        (SUB[0] + b"REQ %b 7200000\n" % ID, [SUB[1], ("req", ID, 3600000)]),
        (SUB[0] + b"TOUCH %b\n" % ID, [SUB[1], ("touch", ID)]),
        (SUB[0] + b"CLS now\n", [SUB[1], ("cls",)]),
        (b"NOP a b\nNOP\n", []),
        (b"AUTH\n" + sized(b"secret"), [("auth", b"secret")]),
    ],
)
def test_commands(sent: bytes, expected: list[Call]) -> None:
    assert calls(sent) == expected


def test_identify_hands_over_what_was_agreed_and_the_reply() -> None:
    (call,) = calls(b"IDENTIFY with words\n" + sized(b'{"client_id":"c","msg_timeout":1500}'))
    request = call[1]
    assert isinstance(request, identify.Request)
    assert request.agreed.client_id == "c"
    assert request.agreed.msg_timeout_ms == 1500
    assert request.reply == OK


# ---- refused: the texts


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"\n", b"E_INVALID invalid command "),
        (b"\r\n", b"E_INVALID invalid command "),
        (b" NOP\n", b"E_INVALID invalid command "),
        (b"ASDF a b\n", b"E_INVALID invalid command ASDF"),
        (b"pub t\n", b"E_INVALID invalid command pub"),
        (b"PUB\n", b"E_INVALID PUB insufficient number of parameters"),
        (b"PUB \n", b'E_BAD_TOPIC PUB topic name "" is not valid'),
        (b"PUB %b\n" % (b"n" * 65), b'E_BAD_TOPIC PUB topic name "%b" is not valid' % (b"n" * 65)),
        (b"PUB t\n" + i32(0), b"E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"PUB t\n" + i32(-1), b"E_BAD_MESSAGE PUB invalid message body size -1"),
        (b"PUB t\n" + i32(1048577), b"E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
        (b"DPUB t\n", b"E_INVALID DPUB insufficient number of parameters"),
        (b"DPUB a*b zzz\n", b'E_BAD_TOPIC DPUB topic name "a*b" is not valid'),
        (b"DPUB t abc\n", b"E_INVALID DPUB could not parse timeout abc"),
        (b"DPUB t -1\n", b"E_INVALID DPUB could not parse timeout -1"),
        (b"DPUB t 3600001\n", b"E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
        (
            b"DPUB t 9223372036854775807\n",
            b"E_INVALID DPUB timeout 9223372036854775807 out of range 0-3600000",
        ),
        (b"DPUB t 1\n" + i32(0), b"E_BAD_MESSAGE DPUB invalid message body size 0"),
        (b"MPUB\n", b"E_INVALID MPUB insufficient number of parameters"),
        (b"MPUB a*b\n", b'E_BAD_TOPIC E_BAD_TOPIC MPUB topic name "a*b" is not valid'),
        (b"SUB\n", b"E_INVALID SUB insufficient number of parameters"),
        (b"SUB t\n", b"E_INVALID SUB insufficient number of parameters"),
        (b"SUB a/b c/d\n", b'E_BAD_TOPIC SUB topic name "a/b" is not valid'),
        (b"SUB t ch\r\r\n", b'E_BAD_CHANNEL SUB channel name "ch\\r" is not valid'),
        (b"SUB t  ch\n", b'E_BAD_CHANNEL SUB channel name "" is not valid'),
        (b"SUB a\tb\xff ch\n", b'E_BAD_TOPIC SUB topic name "a\\tb\\xff" is not valid'),
        (b'SUB a"b\\c ch\n', b'E_BAD_TOPIC SUB topic name "a\\"b\\\\c" is not valid'),
        (b"IDENTIFY\n" + i32(0), b"E_BAD_BODY IDENTIFY invalid body size 0"),
        (b"IDENTIFY\n" + i32(65537), b"E_BAD_BODY IDENTIFY body too big 65537 > 65536"),
        (b"IDENTIFY\n" + sized(b"[1]"), b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (b"AUTH x\n", b"E_INVALID AUTH invalid number of parameters"),
        (b"AUTH\n" + i32(-1), b"E_BAD_BODY AUTH invalid body size -1"),
        (b"AUTH\n" + i32(5242881), b"E_BAD_BODY AUTH body too big 5242881 > 5242880"),
    ],
)
def test_refused(sent: bytes, text: bytes) -> None:
    assert calls(sent) == [fatal(text)]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"RDY x\n", b"E_INVALID RDY could not parse count x"),
        (b"RDY 2501\n", b"E_INVALID RDY count 2501 out of range 0-2500"),
        (b"RDY 18446744073709551615\n", b"E_INVALID RDY count -1 out of range 0-2500"),
        (b"FIN\n", b"E_INVALID FIN insufficient number of params"),
        (b"FIN \n", b"E_INVALID invalid message ID"),
        (b"FIN %b0\n" % ID, b"E_INVALID invalid message ID"),
        (b"FIN 0123456789 bcdef\n", b"E_INVALID invalid message ID"),
        (b"FIN 0123456789abcde\r\n", b"E_INVALID invalid message ID"),
        (b"REQ %b\n" % ID, b"E_INVALID REQ insufficient number of params"),
        (b"REQ 0123 0\n", b"E_INVALID invalid message ID"),
        (b"REQ %b soon\n" % ID, b"E_INVALID REQ could not parse timeout soon"),
        (b"REQ %b -1\n" % ID, b"E_INVALID REQ could not parse timeout -1"),
        (b"REQ %b 0.5\n" % ID, b"E_INVALID REQ could not parse timeout 0.5"),
        (b"TOUCH\n", b"E_INVALID TOUCH insufficient number of params"),
        (b"TOUCH 0123456789abcde\n", b"E_INVALID invalid message ID"),
        (b"SUB\n", b"E_INVALID cannot SUB in current state"),
        (b"IDENTIFY\n", b"E_INVALID cannot IDENTIFY in current state"),
        (b"AUTH x\n", b"E_INVALID cannot AUTH in current state"),
    ],
)
def test_refused_after_sub(sent: bytes, text: bytes) -> None:
    assert calls(SUB[0] + sent) == [SUB[1], fatal(text)]


@pytest.mark.parametrize("command", [b"RDY", b"FIN", b"REQ", b"TOUCH", b"CLS"])
def test_the_state_is_checked_before_the_parameters(command: bytes) -> None:
    assert calls(command + b"\n") == [fatal(b"E_INVALID cannot %b in current state" % command)]
