"""What a session makes of what a client sends. Texts and their order are nsqd's."""

from __future__ import annotations

import pytest

from nsqha.wire import identify
from nsqha.wire.commands import CLOSING, INIT, SUBSCRIBED
from nsqha.wire.encoder import OK
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.session import MAGIC
from tests.unit.wire.conversation import Call, Recorder, calls, i32, mpub_body, session_of, sized, start

ID = b"0123456789abcdef"
SUB: tuple[bytes, Call] = b"SUB t ch\n", ("sub", "t", "ch")
SMALL = ProtocolLimits(msg_bytes_max=100, body_bytes_max=1000)


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
        (b"DPUB t 800\n" + sized(b"later"), [("check", "DPUB", "t"), ("dpub", "t", b"later", 800)]),
        (b"DPUB t \n" + sized(b"x"), [("check", "DPUB", "t"), ("dpub", "t", b"x", 0)]),
        (b"DPUB t 3600000\n" + sized(b"x"), [("check", "DPUB", "t"), ("dpub", "t", b"x", 3600000)]),
        (
            b"MPUB t\n" + sized(mpub_body(b"one", b"two")),
            [("check", "MPUB", "t"), ("ensure_topic", "t"), ("mpub", "t", [b"one", b"two"])],
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
        (SUB[0] + b"REQ %b 18446744073709551616\n" % ID, [SUB[1], ("req", ID, 3600000)]),
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
    assert isinstance(request, identify.AgreedIdentify)
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
        (
            b"DPUB t 18446744073709556616\n",  # 2^64 and 5 seconds
            b"E_INVALID DPUB timeout 18446744073709551615 out of range 0-3600000",
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
        (b"AUTH\n" + i32(65537), b"E_BAD_BODY AUTH body too big 65537 > 65536"),
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
        (b"RDY 18446744073709551617\n", b"E_INVALID RDY count -1 out of range 0-2500"),
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
@pytest.mark.parametrize("words", [b"", b" " + ID, b" " + ID + b" 0"])
def test_the_state_is_checked_before_the_parameters(command: bytes, words: bytes) -> None:
    assert calls(command + words + b"\n") == [fatal(b"E_INVALID cannot %b in current state" % command)]


@pytest.mark.parametrize("command", [b"FIN", b"REQ", b"TOUCH"])
def test_messages_may_be_settled_while_closing(command: bytes) -> None:
    line = command + b" " + ID + b" 0\n"
    assert calls(SUB[0] + b"CLS\n" + line)[2][:2] == (command.decode().lower(), ID)


def test_rdy_while_closing_is_ignored_whatever_it_says() -> None:
    assert calls(SUB[0] + b"CLS\nRDY 5\nRDY bogus\nPUB t\n" + sized(b"x")) == [
        SUB[1],
        ("cls",),
        ("pub", "t", b"x"),
    ]


def test_states_are_the_numbers_of_stats() -> None:
    session, _ = start()
    assert session.consuming.state == INIT == 0
    session.receive(SUB[0])
    assert session.consuming.state == SUBSCRIBED == 3
    session.receive(b"CLS\n")
    assert session.consuming.state == CLOSING == 4


@pytest.mark.parametrize("command", [b"CLS", b"SUB t ch", b"AUTH", b"IDENTIFY"])
def test_closing_allows_no_second_beginning_or_end(command: bytes) -> None:
    word = command.split()[0]
    assert calls(SUB[0] + b"CLS\n" + command + b"\n")[2:] == [fatal(b"E_INVALID cannot %b in current state" % word)]


def test_consumers_must_have_heartbeats_and_that_is_checked_first() -> None:
    off = b"IDENTIFY\n" + sized(b'{"heartbeat_interval":-1}')
    assert calls(off + b"SUB\n")[1:] == [fatal(b"E_INVALID cannot SUB with heartbeats disabled")]


# ---- MPUB, which checks what it has before the rest has come


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (i32(0), b"E_BAD_BODY MPUB invalid body size 0"),
        (i32(-3), b"E_BAD_BODY MPUB invalid body size -3"),
        (i32(1001), b"E_BAD_BODY MPUB body too big 1001 > 1000"),
        (i32(20) + i32(0), b"E_BAD_BODY MPUB invalid message count 0"),
        (i32(20) + i32(-1), b"E_BAD_BODY MPUB invalid message count -1"),
        (i32(20) + i32(200), b"E_BAD_BODY MPUB invalid message count 200"),
        (i32(17) + i32(3) + sized(b"a") + i32(0), b"E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
        (i32(17) + i32(3) + i32(-7), b"E_BAD_MESSAGE MPUB invalid message(0) body size -7"),
        (i32(17) + i32(3) + i32(101), b"E_BAD_MESSAGE MPUB message too big 101 > 100"),
        (sized(i32(3) + sized(b"a") + sized(b"") + sized(b"c")), b"E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
        (i32(4) + mpub_body(*[b"x" * 100] * 10), b"E_BAD_BODY MPUB body too big 1044 > 1000"),
    ],
)
def test_mpub_refused(body: bytes, text: bytes) -> None:
    expected = [fatal(text)]
    made = [("check", "MPUB", "t"), ("ensure_topic", "t")]
    assert calls(b"MPUB t\n" + body, limits=SMALL) == made + expected
    assert calls(b"MPUB t\n", *[body[n : n + 1] for n in range(len(body))], limits=SMALL) == made + expected


def test_mpub_of_as_many_messages_as_fit() -> None:
    *_, last = calls(b"MPUB t\n" + sized(mpub_body(*[b"1"] * 199)), limits=SMALL)
    assert last == ("mpub", "t", [b"1"] * 199)


@pytest.mark.parametrize("announced", [1, 13, 22, 23, 24, 100, 1000])
def test_the_parts_of_an_mpub_say_where_it_ends(announced: int) -> None:
    body = mpub_body(b"one", b"two", b"x")
    sent = b"MPUB t\n" + i32(announced) + body + b"PUB t\n" + sized(b"next")
    expected = [("mpub", "t", [b"one", b"two", b"x"]), ("pub", "t", b"next")]
    assert calls(sent, limits=SMALL)[2:] == expected
    assert calls(*[sent[n : n + 1] for n in range(len(sent))], limits=SMALL)[2:] == expected


def test_every_mpub_is_checked_and_makes_its_topic() -> None:
    names = [call[0] for call in calls((b"MPUB t\n" + sized(mpub_body(b"x"))) * 2)]
    assert names == ["check", "ensure_topic", "mpub"] * 2


def test_what_looks_like_one_more_message_of_an_mpub_is_the_next_command() -> None:
    sent = b"MPUB t\n" + i32(100) + mpub_body(b"one", b"two") + sized(b"three")
    for pieces in ([sent], [sent[:20], sent[20:]]):
        session, handler = start(SMALL)
        for piece in pieces:
            session.receive(piece)
        assert handler.calls[2:] == [("mpub", "t", [b"one", b"two"])]
        session.receive(b"\n")
        assert handler.calls[3] == fatal(b"E_INVALID invalid command \x00\x00\x00\x05three")


# ---- pipelines


def test_replies_keep_the_order_of_the_commands() -> None:
    sent = (
        b"PUB t\n"
        + sized(b"1")
        + b"MPUB t\n"
        + sized(mpub_body(b"2", b"3"))
        + b"NOP\nSUB t ch\nCLS\nDPUB t 0\n"
        + sized(b"4")
    )
    assert [call[0] for call in calls(sent)] == ["pub", "check", "ensure_topic", "mpub", "sub", "cls", "check", "dpub"]


def test_a_fatal_error_ends_the_pipeline() -> None:
    sent = (b"PUB t\n" + sized(b"x")) * 20
    session, handler = start()
    session.receive(sent + b"BAD\n" + sent)
    session.receive(sent)
    session.resume()
    session.eof()
    assert handler.calls == [("pub", "t", b"x")] * 20 + [fatal(b"E_INVALID invalid command BAD")]


def test_a_run_to_one_topic_is_one_call_and_topics_alternate() -> None:
    runs: list[tuple[str, int]] = []

    class Counter(Recorder):
        def publish(self, topic: str, frames: bytes, count: int, command: str, partition: int | None) -> None:
            runs.append((topic, count))

    session = session_of(Counter())
    a, b = b"PUB a\n" + sized(b"1"), b"PUB b\n" + sized(b"2")
    session.receive(MAGIC + a + b)  # the first of each topic is by itself
    session.receive(a * 5 + b * 3 + a)
    assert runs == [("a", 1), ("b", 1), ("a", 5), ("b", 3), ("a", 1)]


def test_hundreds_of_topics_on_one_connection() -> None:
    sent = [b"PUB t%d\n" % n + sized(b"%d" % n) for n in range(300)] * 2
    expected = [("pub", f"t{n}", b"%d" % n) for n in range(300)] * 2
    assert calls(b"".join(sent)) == expected


@pytest.mark.parametrize("word", [b"10", b"abc", b"-2", b"1e1", b"18446744073709551617"])
@pytest.mark.parametrize("line", [b"PUB %b %b", b"MPUB %b %b", b"DPUB %b 5 %b", b"SUB %b c %b"])
def test_a_partition_that_the_topic_does_not_have_is_refused(line: bytes, word: bytes) -> None:
    command = line.split(b" ")[0]
    known = b"PUB several\n" + sized(b"x")
    *_, last = calls(known + line % (b"several", word) + b"\n" + body_of(command))
    text = b'E_BAD_PARTITION %b topic partition "%b" is not valid: several has the partitions 0 to 9'
    assert last == fatal(text % (command, word))
    *_, last = calls(known + line % (b"one", word) + b"\n" + body_of(command))
    assert last[:2] == (command.decode().lower(), "one"), "there is only one: nsqd ignores the word, too"


@pytest.mark.parametrize("word", [b"10", b"abc", b"-2"])
@pytest.mark.parametrize("line", [b"PUB %b %b", b"MPUB %b %b", b"DPUB %b 5 %b", b"SUB %b c %b"])
@pytest.mark.parametrize("key", [b'"multiplexing":false', b'"desired_tag":""', b'"Extend_Support":null'])
def test_clients_of_the_fork_look_the_topic_up_again(
    line: bytes, word: bytes, key: bytes
) -> None:
    """Its SDK looks the topic up again on this code, and not on E_BAD_PARTITION."""
    command = line.split(b" ")[0]
    identify = b"IDENTIFY\n" + sized(b"{%b}" % key)
    text = b'E_TOPIC_NOT_EXIST %b topic partition "%b" is not valid: %b has the partitions 0 to %d'
    for topic, last_partition in ((b"several", 9), (b"one", 0)):
        *_, last = calls(identify + line % (topic, word) + b"\n" + body_of(command))
        assert last == fatal(text % (command, word, topic, last_partition))
    *_, last = calls(identify + line % (b"one", b"0") + b"\n" + body_of(command))
    assert last[:2] == (command.decode().lower(), "one")


@pytest.mark.parametrize(
    ("word", "target"), [(b"9", "several/9"), (b"0", "several/0"), (b"-1", "several"), (b"", "several")]
)
@pytest.mark.parametrize("line", [b"PUB %b %b", b"MPUB %b %b", b"DPUB %b 5 %b", b"SUB %b c %b"])
def test_a_partition_that_a_command_names_is_the_one(line: bytes, word: bytes, target: str) -> None:
    command = line.split(b" ")[0]
    *_, last = calls(line % (b"several", word) + b"\n" + body_of(command))
    assert last[:2] == (command.decode().lower(), target)


def body_of(command: bytes) -> bytes:
    """What follows the line of a command."""
    if command == b"SUB":
        return b""
    return sized(b"x") if command in (b"PUB", b"DPUB") else sized(i32(1) + sized(b"x"))


def test_publishes_to_two_partitions_go_where_they_say_in_runs_too() -> None:
    sent = [b"PUB several %d\n" % n + sized(b"%d" % n) for n in (1, 1, 2, 2, 1)] + [b"PUB several\n" + sized(b"any")]
    mpub = b"MPUB several 2\n" + sized(i32(1) + sized(b"m"))
    expected = [("pub", f"several/{n}", b"%d" % n) for n in (1, 1, 2, 2, 1)] + [("pub", "several", b"any")]
    found = calls(b"".join(sent) + mpub + mpub)
    assert found[:6] == expected
    assert [call for call in found[6:] if call[0] == "mpub"] == [("mpub", "several/2", [b"m"])] * 2


def test_a_word_that_was_ignored_is_looked_at_again() -> None:
    """The topic may have got more partitions since."""
    session, handler = start()
    sent = b"PUB several 9\n" + sized(b"x")
    handler.partitions = 0
    session.receive(sent)
    handler.partitions = 2
    session.receive(sent)
    assert handler.calls[0] == ("pub", "several", b"x")
    assert b"E_BAD_PARTITION" in handler.calls[1][1] and len(handler.calls) == 2
