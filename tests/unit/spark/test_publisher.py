"""The publisher of a task against a scripted nsqd: order, and what is counted when a connection ends."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from pyspark_nsqha.writing.publisher import (
    Command,
    LinkSecurity,
    PublishFailed,
    PublishRefused,
    TaskPublisher,
    split_address,
)
from tests.unit.spark.scripted_nsqd import ScriptedNsqd


def mpub(*bodies: bytes, topic: str = "t") -> Command:
    body = struct.pack(">I", len(bodies)) + b"".join(struct.pack(">I", len(each)) + each for each in bodies)
    return Command(b"MPUB %b\n" % topic.encode() + struct.pack(">I", len(body)) + body, len(bodies))


def numbered(n: int) -> list[Command]:
    return [mpub(b"%d-a" % i, b"%d-b" % i) for i in range(n)]


def bodies_of(n: int) -> list[bytes]:
    return [each for i in range(n) for each in (b"%d-a" % i, b"%d-b" % i)]


def publish(commands: list[Command], *brokers: ScriptedNsqd, **options: object) -> TaskPublisher:
    publisher = TaskPublisher([each.address for each in brokers], sleep=lambda _: None, **options)  # type: ignore[arg-type]
    try:
        for command in commands:
            publisher.publish(command)
        publisher.flush()
    finally:
        publisher.close()
    return publisher


def last_occurrences(log: list[bytes]) -> list[bytes]:
    """What a reader that keeps the last copy of each message sees."""
    return [each for i, each in enumerate(log) if each not in log[i + 1 :]]


def test_what_is_published_is_stored_once_and_in_order():
    with ScriptedNsqd() as nsqd:
        tally = publish(numbered(50), nsqd).tally
        assert nsqd.bodies == bodies_of(50)
        assert (tally.published, tally.possible_duplicates) == (100, 0)
        assert nsqd.connections == 1


def test_a_task_without_rows_asks_no_broker():
    publisher = TaskPublisher(["127.0.0.1:1"], sleep=lambda _: None, timeout_s=0.2)
    publisher.flush()
    publisher.close()
    assert publisher.tally.published == 0


def test_several_commands_are_on_the_way_at_once():
    with ScriptedNsqd(["silent", "silent", "silent"]) as nsqd:
        publisher = TaskPublisher([nsqd.address])
        for command in numbered(3):
            publisher.publish(command)  # would wait for an answer that never comes
        publisher.close()
        assert publisher.tally.published == 0


def test_how_much_is_on_the_way_is_bounded_in_bytes():
    with ScriptedNsqd(["ok"] * 20 + ["silent"] * 9) as nsqd:
        publisher = TaskPublisher([nsqd.address], in_flight_bytes_max=3 * len(mpub(b"x").wire), timeout_s=2)
        for _ in range(20):
            publisher.publish(mpub(b"x"))
        publisher.flush()
        publisher.publish(mpub(b"x"))
        publisher.publish(mpub(b"x"))
        with pytest.raises(PublishFailed, match=r"nothing was stored for 2 s .*no answer within [12]"):
            publisher.publish(mpub(b"x"))
        publisher.close()


def test_why_a_broker_refused_is_heard_although_sending_to_it_failed():
    with ScriptedNsqd(["early"]) as nsqd:
        publisher = TaskPublisher([nsqd.address], sleep=lambda _: None)
        with pytest.raises(PublishRefused, match="E_BAD_BODY MPUB body too big 9 > 8"):
            publisher.publish(mpub(b"x" * (32 << 20)))
        publisher.close()


@pytest.mark.parametrize("k", [0, 1, 5, 11])
def test_what_is_not_stored_is_sent_again_and_is_no_duplicate(k: int):
    with ScriptedNsqd(["ok"] * k + ["not stored"]) as nsqd:
        tally = publish(numbered(k + 1), nsqd).tally
        assert nsqd.bodies == bodies_of(k + 1)
        assert (tally.published, tally.possible_duplicates) == (2 * k + 2, 0)


@pytest.mark.parametrize("how", ["unknown", "lose"])
@pytest.mark.parametrize("k", [0, 1, 5, 11])
def test_an_unknown_outcome_is_sent_again_and_counted(how: str, k: int):
    with ScriptedNsqd(["ok"] * k + [how]) as nsqd:
        tally = publish(numbered(k + 1), nsqd).tally
        assert nsqd.bodies == bodies_of(k + 1) + bodies_of(k + 1)[-2:]
        assert (tally.published, tally.possible_duplicates) == (2 * k + 2, 2)


@pytest.mark.parametrize("how", ["not stored", "unknown", "lose", "drop"])
@pytest.mark.parametrize("k", [0, 3, 17])
def test_order_is_kept_and_duplicates_are_counted_whatever_ends_a_connection(how: str, k: int):
    with ScriptedNsqd(["ok"] * k + [how], ["ok", how], [how]) as nsqd:
        tally = publish(numbered(30), nsqd).tally
        assert last_occurrences(nsqd.bodies) == bodies_of(30)
        duplicates = len(nsqd.bodies) - 60
        assert tally.published == 60
        assert duplicates <= tally.possible_duplicates


def test_an_answer_that_is_here_counts_although_sending_behind_it_fails():
    with ScriptedNsqd(["ok", "ok", "not stored"]) as nsqd:
        publisher = TaskPublisher([nsqd.address], sleep=lambda _: None)
        for command in numbered(3):
            publisher.publish(command)
        # The broker closed long ago; what is sent into that is not stored, and the two OKs are not lost.
        big = [mpub(b"x" * 200_000) for _ in range(20)]
        for command in big:
            publisher.publish(command)
        publisher.flush()
        publisher.close()
        assert nsqd.bodies[:4] == bodies_of(2)
        assert last_occurrences(nsqd.bodies)[:6] == bodies_of(3)
        assert publisher.tally.published == 26


def test_the_next_broker_is_taken_and_a_task_says_where_it_begins():
    with ScriptedNsqd(["not stored"]) as first, ScriptedNsqd() as second:
        publish(numbered(2), second, first, first=1)
        assert first.commands[0] == ("MPUB", 2)
        assert second.bodies == bodies_of(2)


def test_a_broker_that_is_not_there_is_passed_over():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with ScriptedNsqd() as nsqd:
        publisher = TaskPublisher([nobody, nsqd.address], sleep=lambda _: None)
        publisher.publish(mpub(b"1"))
        publisher.flush()
        publisher.close()
        assert nsqd.bodies == [b"1"]
        assert publisher.tally.possible_duplicates == 0


def test_a_connection_that_ended_while_nothing_was_on_its_way_makes_no_duplicates():
    with ScriptedNsqd() as nsqd:
        publisher = TaskPublisher([nsqd.address], sleep=lambda _: None)
        publisher.publish(mpub(b"1"))
        publisher.flush()
        ended = nsqd._peers[0]
        ended.shutdown(socket.SHUT_RDWR)
        publisher.publish(mpub(b"2"))
        publisher.flush()
        publisher.close()
        assert nsqd.bodies == [b"1", b"2"]
        assert (nsqd.connections, publisher.tally.possible_duplicates) == (2, 0)


def test_what_a_broker_refuses_for_good_is_not_tried_again():
    with ScriptedNsqd(["refuse"]) as nsqd:
        with pytest.raises(PublishRefused, match=r"E_BAD_MESSAGE MPUB message too big 9 > 8 \(.*maxMessageBytes"):
            publish(numbered(1), nsqd)
        assert len(nsqd.commands) == 1


def test_it_gives_up_after_the_timeout_and_says_what_is_published():
    clock = iter(range(10_000))
    nsqd = ScriptedNsqd(["ok", *["not stored"] * 3], *[["not stored"]] * 60)
    with nsqd, pytest.raises(PublishFailed) as failed:
        publish(numbered(2), nsqd, timeout_s=30, now=lambda: next(clock))
    text = str(failed.value)
    assert "nothing was stored for 30 s (option timeoutMs)" in text
    assert "not stored: no leader" in text
    assert "this task has published 2 messages, and no others are stored" in text
    assert "\n" not in text


def test_what_was_never_sent_is_not_said_to_be_stored_perhaps():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    publisher = TaskPublisher([free], sleep=lambda _: None, timeout_s=0.2)
    with pytest.raises(PublishFailed, match=r"Connection refused; .* published 0 messages, and no others are stored"):
        publisher.publish(mpub(b"1"))


def test_what_was_sent_and_has_no_answer_may_be_stored_and_what_came_later_not():
    clock = [0.0]
    with ScriptedNsqd(["ok", "silent"]) as nsqd:
        publisher = TaskPublisher([nsqd.address], now=lambda: clock[0], sleep=lambda _: None, timeout_s=0.3)
        publisher.publish(mpub(b"1"))
        publisher.flush()
        publisher.publish(mpub(b"2", b"3"))
        while len(nsqd.commands) < 2:
            time.sleep(0.01)
        address = nsqd.address
    clock[0] = 600.0
    with pytest.raises(PublishFailed, match=f"{address}: .*published 1 messages, and up to 2 more may be stored"):
        publisher.publish(mpub(b"4"))
    publisher.close()


def test_progress_puts_the_timeout_off():
    clock = iter(range(0, 100_000, 10))
    with ScriptedNsqd(*[["ok", "not stored"]] * 20) as nsqd:
        assert publish(numbered(21), nsqd, timeout_s=200, now=lambda: next(clock)).tally.published == 42


@pytest.mark.parametrize("seconds", [30, 600])
def test_a_broker_that_answers_nothing_is_left_although_the_task_is_slow(seconds: int):
    clock = [0.0]
    with ScriptedNsqd(["silent"] * 9) as frozen, ScriptedNsqd() as well:
        publisher = TaskPublisher([frozen.address, well.address], now=lambda: clock[0], sleep=lambda _: None)
        for command in numbered(4):
            publisher.publish(command)  # the window is far from full
            clock[0] += seconds
        publisher.flush()
        publisher.close()
        assert well.bodies == bodies_of(4)
        assert (frozen.connections, well.connections) == (1, 1)
        assert publisher.tally.published == 8


def test_the_last_command_of_a_slow_task_finds_another_broker_too():
    clock = [0.0]
    with ScriptedNsqd(["silent"]) as frozen, ScriptedNsqd() as well:
        publisher = TaskPublisher([frozen.address, well.address], now=lambda: clock[0], sleep=lambda _: None)
        publisher.publish(mpub(b"1"))
        clock[0] = 600.0
        publisher.flush()
        publisher.close()
        assert well.bodies == [b"1"]


def test_it_gives_up_when_the_time_is_over_and_every_broker_had_its_turn():
    clock = [0.0]
    with ScriptedNsqd(["silent"], ["silent"]) as first, ScriptedNsqd(["silent"]) as second:
        brokers = [first.address, second.address]
        publisher = TaskPublisher(brokers, now=lambda: clock[0], sleep=lambda _: None, timeout_s=0.3)
        publisher.publish(mpub(b"1"))
        clock[0] = 600.0
        with pytest.raises(PublishFailed, match=f"{first.address}: no answer within 0.3 s"):
            publisher.flush()
        publisher.close()
        assert [first.connections, second.connections] == [2, 1]


def test_what_was_refused_for_a_moment_while_the_task_was_away_is_sent_again():
    clock = [0.0]
    with ScriptedNsqd(["not stored"]) as nsqd:
        publisher = TaskPublisher([nsqd.address], now=lambda: clock[0], sleep=lambda _: None)
        publisher.publish(mpub(b"1"))
        clock[0] = 600.0
        publisher.flush()
        publisher.close()
        assert (nsqd.bodies, nsqd.connections) == ([b"1"], 2)
        assert publisher.tally.possible_duplicates == 0


def test_an_answer_that_came_long_ago_counts_although_nobody_listened():
    clock = [0.0]
    with ScriptedNsqd() as nsqd, ScriptedNsqd() as other:
        publisher = TaskPublisher([nsqd.address, other.address], now=lambda: clock[0], sleep=lambda _: None)
        publisher.publish(mpub(b"1"))
        clock[0] = 600.0
        publisher.publish(mpub(b"2"))
        publisher.flush()
        publisher.close()
        assert (nsqd.bodies, other.connections) == ([b"1", b"2"], 0)
        assert (publisher.tally.published, publisher.tally.possible_duplicates) == (2, 0)


def test_something_else_than_nsqd_is_told_apart():
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            while peer.recv(4096):  # a close before all is read would be a reset, which may overtake the answer
                pass

    answered = threading.Thread(target=answer)
    answered.start()
    publisher = TaskPublisher([f"127.0.0.1:{listener.getsockname()[1]}"])
    with pytest.raises(PublishRefused, match="does not speak the NSQ protocol"):
        publisher.publish(mpub(b"1"))
    answered.join(20)
    listener.close()


class Closing:
    """A port that takes connections and closes them when something comes, as a gRPC port does."""

    def __init__(self) -> None:
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(4096)
                self.connections += 1

    def __enter__(self) -> Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


def test_ports_that_close_before_an_answer_are_no_brokers_and_that_is_said_soon():
    clock = [0.0]

    def sleep(_: float) -> None:
        clock[0] += 1.0

    with Closing() as first, Closing() as second:
        addresses = [first.address, second.address]
        publisher = TaskPublisher(addresses, now=lambda: clock[0], sleep=sleep, timeout_s=120)
        with pytest.raises(PublishRefused, match=r"no address in option nsqd .*IDENTIFY.* nsqd takes --tcp-address"):
            publisher.publish(mpub(b"1"))
        assert clock[0] == 5.0 and first.connections + second.connections == 6


def test_a_broker_that_was_there_is_waited_for_although_its_port_closes_for_a_while():
    clock = [0.0]
    with Closing() as going, ScriptedNsqd(["ok"]) as nsqd:
        publisher = TaskPublisher([nsqd.address], now=lambda: clock[0], sleep=lambda _: None, timeout_s=120)
        publisher.publish(mpub(b"1"))
        publisher.flush()
        publisher.close()
        publisher._brokers = [going.address]

        def sleep(_: float) -> None:
            clock[0] += 1.0
            if clock[0] == 100.0:
                publisher._brokers = [nsqd.address]

        publisher._sleep = sleep
        publisher.publish(mpub(b"2"))
        publisher.flush()
        publisher.close()
        assert nsqd.bodies == [b"1", b"2"]


def test_a_port_where_nobody_listens_yet_may_be_a_brokers_and_is_waited_for():
    clock = [0.0]

    def sleep(_: float) -> None:
        clock[0] += 10.0

    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    with Closing() as wrong:
        publisher = TaskPublisher([free, wrong.address], now=lambda: clock[0], sleep=sleep, timeout_s=55)
        with pytest.raises(PublishFailed, match="nothing was stored for 55 s"):
            publisher.publish(mpub(b"1"))


def test_one_broker_among_wrong_ports_is_found():
    clock = [0.0]

    def sleep(_: float) -> None:
        clock[0] += 10.0

    with Closing() as wrong, ScriptedNsqd() as nsqd:
        publisher = TaskPublisher([wrong.address, nsqd.address], now=lambda: clock[0], sleep=sleep, timeout_s=120)
        publisher.publish(mpub(b"1"))
        publisher.flush()
        publisher.close()
        assert nsqd.bodies == [b"1"]


def test_a_broker_without_tls_is_not_published_to_in_clear():
    with ScriptedNsqd() as nsqd:
        with pytest.raises(PublishRefused, match="has no TLS"):
            publish(numbered(1), nsqd, security=LinkSecurity(tls=True))
        assert nsqd.log == []


def test_no_secret_is_in_what_is_shown_of_the_security():
    assert "hush" not in repr(LinkSecurity(auth_secret=b"hush"))


@pytest.mark.parametrize("address", ["", "host", ":4150", "host:", "host:0", "host:65536", "host:4150x", "host:٣"])
def test_what_is_no_address_is_refused(address: str):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)


def test_an_ipv6_address_is_taken_out_of_its_brackets():
    assert split_address(" [::1]:4150 ") == ("::1", 4150)
