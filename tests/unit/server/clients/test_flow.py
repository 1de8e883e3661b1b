"""What makes a client's next command wait, without a socket."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from nsqha import hot
from nsqha.server.clients.flow import CommandFlow
from nsqha.server.clients.unfinished import ReadingBudget
from nsqha.server.runtime.budget import TURN_SECONDS, SharedTurns
from tests.fakes.loop import VirtualLoop


class Steps:
    """A clock: each look at it is half a turn later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TURN_SECONDS / 2
        return self.now


class Client:
    """Writes down what the flow has it do."""

    def __init__(self, others: Client | None = None) -> None:
        """`others`: connected to the same node."""
        self.closed = False
        self.done: list[str] = []
        self.loop = VirtualLoop() if others is None else others.loop
        self.turns = SharedTurns(self.loop, Steps()) if others is None else others.turns
        self.replies = hot.Replies(self, lambda data: self.done.append(bytes(data).decode()))
        transport: Any = SimpleNamespace(codec=None, remote_address="", pause_reading=lambda: self.done.append("pause"))
        self.flow = CommandFlow(
            self,
            transport,
            self.replies,
            self.loop,
            ReadingBudget(self.loop, 1 << 20, 1 << 20),  # type: ignore[arg-type]
            self.turns,
        )
        session: Any = SimpleNamespace(kill=lambda: self.done.append("kill"), eof=lambda: self.done.append("eof"))
        self.flow.session = session

    def go_on(self) -> None:
        self.done.append("go on")

    def close(self) -> None:
        self.closed = True
        self.done.append("close")

    def heed_unread(self) -> None: ...

    def publish_failed(self, command: str, why: str) -> bytes:
        raise NotImplementedError


def test_without_replies_owed_a_command_runs_at_once():
    client = Client()
    client.flow.after_replies(lambda: client.done.append("run"))
    assert client.done == ["run"] and not client.flow.blocked


def test_a_command_waits_for_the_replies_of_all_earlier_ones():
    client = Client()
    slot = client.replies.publish("MPUB", 1)
    client.flow.after_replies(lambda: client.done.append("run"))
    assert client.done == ["pause"] and client.flow.blocked
    slot.stored()
    assert client.done == ["pause", "\0\0\0\6\0\0\0\0OK", "run", "go on"]


def test_a_command_that_blocks_again_is_waited_for_again():
    client = Client()
    client.flow.block()
    client.flow.unblock(client.flow.block)
    assert client.done == ["pause", "pause"] and client.flow.blocked
    client.flow.unblock()
    assert client.done[2:] == ["go on"]


def test_nothing_goes_on_at_a_client_that_was_closed_meanwhile():
    client = Client()
    client.flow.block()
    client.close()
    client.flow.unblock(lambda: client.done.append("run"))
    assert client.done == ["pause", "close"]


def test_a_client_that_sends_no_more_is_closed_when_all_is_answered():
    client = Client()
    slot = client.replies.publish("MPUB", 1)
    assert client.flow.end_of_input(), "an answer is owed"
    assert client.done == ["eof"]
    slot.stored()
    assert client.done[-1] == "close"


def test_the_end_without_a_frame_waits_for_the_answers():
    client = Client()
    slot = client.replies.publish("MPUB", 1)
    client.flow.hang_up()
    assert not client.closed
    slot.stored()
    assert client.closed


def test_a_rest_ends_with_the_turn_of_the_loop():
    client = Client()
    client.flow.rest()
    client.flow.rest()
    assert client.done == ["pause"]
    client.loop.turn()
    assert client.done == ["pause", "go on"]


def test_clients_that_rest_share_a_turn_of_the_loop():
    first = Client()
    clients = [first, *(Client(first) for _ in range(9))]
    for client in clients:
        client.flow.rest()
    went_on = []
    for _ in clients:
        first.loop.run_ready()
        went_on.append(sum(client.done == ["pause", "go on"] for client in clients))
    assert went_on == [2, 4, 6, 8, 10, 10, 10, 10, 10, 10]


def test_a_command_that_fails_in_the_broker_is_answered_before_the_end() -> None:
    client = Client()

    async def command() -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "nobody thought of it")

    client.flow.wait_for(command())
    for _ in range(3):
        client.loop.turn()
    frame, *rest = [done for done in client.done if done != "pause"]
    assert "E_INVALID internal error of the broker" in frame
    assert "close" in rest


def test_a_client_that_is_gone_before_its_command_began_leaves_nothing_unawaited() -> None:
    client = Client()

    async def command() -> None:
        raise AssertionError("it began")

    work = command()
    client.flow.wait_for(work)
    client.flow.cancel()
    client.loop.turn()
    client.loop.turn()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
