"""What clients of a load send is what the history says; what they make of answers is never more than is certain."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.jepsen import history
from tests.jepsen.history import Answered, ChannelMade, Outcome, Publish
from tests.jepsen.load.client import Gone
from tests.jepsen.load.consumers import AWAKE_SECONDS, CYCLE_SECONDS, Consumer, Subscription
from tests.jepsen.load.dead_letters import fails
from tests.jepsen.load.operators import place_of
from tests.jepsen.load.plan import named, slow_steps, standard
from tests.jepsen.load.publishers import PATIENT, PIPELINED, Habits, Publisher
from tests.jepsen.load.recorder import Recorder


class Wire:
    """A connection whose other side is the test."""

    def __init__(self) -> None:
        self.sent = b""
        self.replies: list[asyncio.Future[bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_messages: Callable[[list[Any]], None] = lambda messages: None
        self.on_refused: Callable[[str, str], None] = lambda command, message_id: None

    def send(self, data: bytes) -> None:
        self.sent += data

    def ask(self, data: bytes, replies: int = 1) -> list[asyncio.Future[bytes]]:
        self.send(data)
        futures = [asyncio.get_running_loop().create_future() for _ in range(replies)]
        self.replies += futures
        return futures


def played(story: Callable[[Recorder, Wire], Any]) -> tuple[list[Any], Wire]:
    """What was recorded, and the wire."""

    async def play() -> tuple[list[Any], Wire]:
        load, wire = Recorder(1), Wire()
        await story(load, wire)
        return list(load.history), wire

    return uvloop.run(play())


def messages(count: int) -> list[tuple[int, int, str, bytes]]:
    return [(1000 + n, 1, f"{n:016x}", history.body(3, n, b"x")) for n in range(count)]


def consumed(habit: str, count: int, *, draining: bool = False, **options: Any) -> tuple[list[Answered], bytes]:
    """What a consumer of this habit answers at once to so many messages, and sends."""

    async def story(load: Recorder, wire: Wire) -> None:
        load.draining = draining
        consumer = Consumer(load, Subscription("t", "ch", habit, **options), load.rng("x"))
        running = asyncio.ensure_future(consumer.run(1, wire, "n1"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        wire.replies[0].set_result(b"OK")
        while b"RDY" not in wire.sent:
            await asyncio.sleep(0)
        wire.sent = b""
        wire.on_messages(messages(count))
        wire.closed.cancel()  # what is not answered at once comes too late to be looked at
        running.cancel()
        await asyncio.wait([running])

    events, wire = played(story)
    return [event for event in events if isinstance(event, Answered)], wire.sent


@pytest.mark.parametrize("habit", ["prompt", "steady", "ordered", "troubled"])
def test_a_consumer_sends_what_it_records(habit: str) -> None:
    answers, sent = consumed(habit, 400)
    recorded = [(answer.command, message_id) for answer in answers for message_id in answer.ids]
    found = re.findall(rb"(FIN|REQ|TOUCH) ([0-9a-f]{16})(?: \d+)?\n", sent)
    assert [(command.decode(), message_id.decode()) for command, message_id in found] == recorded
    commands = {command for command, _ in recorded}
    expected = {"prompt": {"FIN"}, "steady": {"FIN", "REQ"}, "ordered": {"FIN", "REQ"}, "troubled": {"REQ", "TOUCH"}}
    assert commands == expected[habit]
    delays = {answer.delay for answer in answers if answer.command == "REQ"}
    assert delays <= {0.0, 0.05, 0.3, 1.5, 5.5}


@pytest.mark.parametrize("habit", ["steady", "ordered", "troubled", "late"])
def test_everything_is_finished_when_the_load_drains(habit: str) -> None:
    answers, _ = consumed(habit, 300, draining=True)
    assert {answer.command for answer in answers} == {"FIN"}
    assert sum(len(answer.ids) for answer in answers) == 300


def test_what_the_policy_is_about_is_requeued_also_when_the_load_drains() -> None:
    answers, _ = consumed(
        "failing", 9, draining=True, failing=lambda rows: {row.id for row in rows if row.counter == 4}
    )
    assert [(answer.command, len(answer.ids)) for answer in answers] == [("REQ", 1), ("FIN", 8)]


def test_who_refuses_goes_on_refusing_the_same_messages() -> None:
    for draining in (False, True):
        answers, _ = consumed("refusing", 30, draining=draining)
        asked = {answer.command: [int(each, 16) for each in answer.ids] for answer in answers}
        assert asked["REQ"] == [n for n in range(30) if fails((3, n))]
        assert len(asked["FIN"]) == 30 - len(asked["REQ"])


def test_a_sleepy_consumer_takes_nothing_for_a_while_and_all_when_the_load_drains() -> None:
    async def story(load: Recorder, wire: Wire) -> None:
        consumer = Consumer(load, Subscription("t", "ch", "sleepy", windows=(7,)), load.rng("x"))
        times = [0.0, AWAKE_SECONDS + 1, AWAKE_SECONDS + 2, CYCLE_SECONDS + 1, CYCLE_SECONDS + AWAKE_SECONDS + 1]
        for now in times:
            load.now = lambda now=now: now  # type: ignore[method-assign, misc]
            consumer._doze(wire, 7)  # type: ignore[arg-type]
        load.draining = True
        consumer._doze(wire, 7)  # type: ignore[arg-type]

    _, wire = played(story)
    assert wire.sent == b"RDY 0\nRDY 7\nRDY 0\nRDY 7\n"


def test_who_reads_when_the_load_drains_sends_no_beats_any_more() -> None:
    async def story(load: Recorder, wire: Wire) -> None:
        load.draining = True
        consumer = Consumer(load, Subscription("t", "ch", "prompt", "beats"), load.rng("x"))
        running = asyncio.ensure_future(consumer.run(1, wire))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        wire.replies[0].set_result(b"OK")
        while b"NOP" not in wire.sent:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    events, _ = played(story)
    assert not [event for event in events if isinstance(event, Publish)]


def test_a_topic_for_the_dead_has_the_name_that_its_load_gives_it() -> None:
    plans = {plan.name: plan for plan in named(standard(), "-3")}
    (dying,) = [channel for channel in plans["rules-3"].channels if channel.dead_to]
    assert dying.dead_to in plans
    assert dying.said is not None
    assert dying.said["dead_letter"] == f"topic:{dying.dead_to}"
    assert [c.name for c in plans["rules-3"].channels if plans["rules-3"].owed(c)] == ["steady", "dying"]
    assert not any(plans["removed-3"].owed(channel) for channel in plans["removed-3"].channels)


def test_a_sub_without_an_answer_may_have_made_the_channel() -> None:
    async def story(load: Recorder, wire: Wire) -> None:
        consumer = Consumer(load, Subscription("t", "ch", "prompt"), load.rng("x"))
        running = asyncio.ensure_future(consumer.run(1, wire, "n1"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        wire.replies[0].set_exception(Gone(""))
        with pytest.raises(Gone):
            await running

    events, _ = played(story)
    (made,) = [event for event in events if isinstance(event, ChannelMade)]
    assert (made.result, made.node) == ("info", "n1")


def published(*answers: bytes | Exception) -> tuple[list[Publish], list[Outcome], bytes]:
    """A burst with a command for each of the answers."""

    async def story(load: Recorder, wire: Wire) -> None:
        publisher = Publisher(load, "orders", load.rng("x"), Habits(commands=(1, 1, 1)))
        publisher.use(4, wire, "n2")  # type: ignore[arg-type]
        publisher.burst(len(answers))
        for reply, answer in zip(wire.replies, answers, strict=True):
            if isinstance(answer, Exception):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)
        await asyncio.sleep(0.01)

    events, wire = played(story)
    begun = [event for event in events if isinstance(event, Publish)]
    return begun, [event for event in events if isinstance(event, Outcome)], wire.sent


def test_only_not_stored_is_a_failure() -> None:
    refused = "E_PUB_FAILED PUB failed: not stored"
    unknown = "E_PUB_FAILED PUB failed: outcome unknown"
    _, ended, _ = published(b"OK", Gone(refused), Gone(unknown), Gone(""))
    assert [each.result for each in ended] == ["ok", "fail", "info", "info"]


def test_what_is_published_is_what_is_recorded() -> None:
    begun, _, sent = published(*[b"OK"] * 60)
    assert {each.command for each in begun} == {"PUB", "MPUB", "DPUB"}
    assert {(each.conn, each.node, each.process) for each in begun} == {(4, "n2", 1)}
    numbers = [each.first + n for each in begun for n in range(len(each.crcs))]
    assert numbers == list(range(len(numbers))), "each number once, in the order of the commands"
    at = 0
    for each in begun:
        for n, crc in enumerate(each.crcs):
            at = sent.index(b"1-%d " % (each.first + n), at)
            end = next(end for end in range(at + 10, len(sent) + 1) if zlib.crc32(sent[at:end]) == crc)
            assert history.parse(sent[at:end]) == (1, each.first + n)
            at = end


def test_a_patient_publisher_waits_for_each_answer() -> None:
    async def story(load: Recorder, wire: Wire) -> None:
        publisher = Publisher(load, "orders", load.rng("x"), PATIENT)
        publisher.use(4, wire)  # type: ignore[arg-type]
        running = asyncio.ensure_future(publisher.run())
        for n in range(1, 5):
            while len(wire.replies) < n:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # longer than it pauses between commands
            assert len(wire.replies) == n
            wire.replies[-1].set_result(b"OK")
        load.publishing = False
        running.cancel()

    played(story)


def test_the_standard_load_has_the_rate_that_is_asked_for() -> None:
    for rate in (200.0, 1000.0):
        plans = standard(rate)
        assert sum(plan.messages_a_second for plan in plans) == pytest.approx(rate)
        assert any(plan.ordered for plan in plans)
        assert any(channel.moved for plan in plans for channel in plan.channels)
    assert PIPELINED.slowed(2).messages_a_second == pytest.approx(PIPELINED.messages_a_second / 2)
    assert slow_steps().commands[2] == 0, "what is deferred has no place in an order"


def test_an_undo_that_leaves_something_out_is_not_one() -> None:
    answer = SimpleNamespace(
        partition=2, from_offset=9, to_offset=4, to_timestamp_ns=5, clamped=False, error="", deferred_lost=3
    )
    assert "3 deferred are lost" in place_of(answer).error
    answer.deferred_lost = 0
    assert not place_of(answer).error
