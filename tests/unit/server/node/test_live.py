"""Questions of a controller are answered on its stream to the node: in order, one a turn, and few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.election.session import View
from nsqha.errors import LimitReached, Unavailable
from nsqha.ids import PartitionKey
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.node.cluster.live import HOLD_SECONDS, KEYS_MAX, MANY, QUESTIONS_MAX, LiveStream
from nsqha.server.node.cluster.suspects import Suspects
from tests.fakes.loop import VirtualLoop


class Node:
    """The end of a stream at a node that has the partition 0 of each topic, except topic 13."""

    def __init__(self) -> None:
        self.sent: list[pb.LiveMessage] = []
        self.pending = 0
        self.suspects = Suspects(SimpleNamespace(view=View), node=1, cluster_id=9)  # type: ignore[arg-type]
        self.suspects.registered(7)
        self.led: set[int] = set()  # topics
        self.live = LiveStream(self.suspects, self, self)  # type: ignore[arg-type]

    def send(self, message: pb.LiveMessage) -> None:
        self.sent.append(message)

    def unled(self, keys: Iterable[PartitionKey], most: int) -> list[PartitionKey]:
        return [key for key in keys if key[0] not in self.led]

    @property
    def answered(self) -> list[int]:
        return [message.question for message in self.sent if message.question]

    def status_of(self, request: pb.StatusRequest) -> pb.StatusReply:
        if any(key.topic_uid == 13 for key in request.keys):
            raise Unavailable("not this one")
        return pb.StatusReply(node_uid=1, replicas=[pb.ReplicaStatus(key=key, end=5) for key in request.keys])

    def ask(self, number: int, *topics: int) -> None:
        keys = [pb.PartitionKey(topic_uid=uid) for uid in topics]
        self.live.on_message(pb.LiveMessage(question=number, status_request=pb.StatusRequest(keys=keys)))


def story(told: Any) -> None:
    async def run() -> None:
        await told(Node())

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


def test_only_a_greeting_of_a_controller_is_one():
    async def told(node: Node) -> None:
        came: list[int] = []
        live = LiveStream(node.suspects, node, node, controller_came=lambda: came.append(1))  # type: ignore[arg-type]
        live.on_message(pb.LiveMessage(cluster_id=9, node_uid=4))
        assert not came, "a node that tries whether it gets through"
        live.on_message(pb.LiveMessage(cluster_id=9))
        assert came == [1]

    story(told)


def test_an_answer_says_who_gives_it_and_nothing_about_suspects():
    async def told(node: Node) -> None:
        node.suspects.lost(2)
        node.ask(1, 3, 4)
        hello, _, answer = node.sent
        assert hello.takes_questions and not hello.question
        assert (answer.question, answer.node_uid, answer.registration, list(answer.suspects)) == (1, 1, 7, [])
        assert [shown.key.topic_uid for shown in answer.status.replicas] == [3, 4]

    story(told)


def test_a_turn_answers_one_question_and_all_are_answered_in_order():
    async def told(node: Node) -> None:
        for number in range(1, 6):
            node.ask(number, number)
        counts = []
        for _ in range(6):
            counts.append(len(node.sent) - 1)
            await asyncio.sleep(0)
        assert counts == [1, 2, 3, 4, 5, 5]
        assert [message.question for message in node.sent[1:]] == [1, 2, 3, 4, 5]

    story(told)


def test_what_can_not_be_answered_is_refused_and_the_stream_stays():
    async def told(node: Node) -> None:
        node.ask(1, 13)
        await asyncio.sleep(0)
        node.ask(2, 3)
        refusal, answer = node.sent[1:]
        assert (refusal.refused, refusal.HasField("status")) == ("not this one", False)
        assert answer.HasField("status")

    story(told)


@pytest.mark.parametrize("keys", [0, KEYS_MAX + 1])
def test_a_question_names_some_partitions_and_not_too_many(keys: int):
    async def told(node: Node) -> None:
        with pytest.raises(LimitReached):
            node.ask(1, *range(keys))

    story(told)


def test_a_stranger_that_asks_without_end_is_cut_off():
    async def told(node: Node) -> None:
        for number in range(1, QUESTIONS_MAX + 1):
            node.ask(number, 3)
        with pytest.raises(LimitReached):
            node.ask(QUESTIONS_MAX + 1, 3)
        node.live.on_closed("too much")
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(node.sent) == 2, "nobody is there to hear the rest"

    story(told)


def test_a_stranger_that_reads_no_answers_is_cut_off():
    """They would be kept for it, each of as many bytes as the partitions that it named need."""

    async def told(node: Node) -> None:
        node.pending = QUESTIONS_MAX - 1
        node.ask(1, 3)
        await asyncio.sleep(0)
        node.pending = QUESTIONS_MAX
        with pytest.raises(LimitReached):
            node.ask(2, 3)
        assert [message.question for message in node.sent[1:]] == [1]

    story(told)


def test_a_greeting_is_no_question():
    async def told(node: Node) -> None:
        node.live.on_message(pb.LiveMessage(cluster_id=9))
        assert len(node.sent) == 1

    story(told)


def many(part: int) -> range:
    return range(100 + part * 2 * MANY, 100 + (part + 1) * 2 * MANY)


def test_a_part_of_many_is_answered_when_those_before_have_leaders():
    async def told(node: Node) -> None:
        for part in range(3):
            node.ask(part + 1, *many(part))
        await asyncio.sleep(HOLD_SECONDS / 2)
        assert node.answered == [1]
        node.led.update(many(0)[:MANY])
        await asyncio.sleep(HOLD_SECONDS / 4)
        assert node.answered == [1, 2], "few are left of the first part; of the second, all"
        node.led.update(many(1))
        await asyncio.sleep(HOLD_SECONDS / 4)
        assert node.answered == [1, 2, 3]

    story(told)


def test_a_part_of_many_waits_a_bounded_time_for_leaders_that_do_not_come():
    async def told(node: Node) -> None:
        for part in range(3):
            node.ask(part + 1, *many(part))
        for answered in ([1], [1, 2], [1, 2, 3]):
            await asyncio.sleep(HOLD_SECONDS * 0.9)
            assert node.answered == answered
            await asyncio.sleep(HOLD_SECONDS * 0.15)

    story(told)


def test_a_question_about_few_goes_ahead_of_those_about_many():
    async def told(node: Node) -> None:
        for part in range(2):
            node.ask(part + 1, *many(part))
        await asyncio.sleep(0)
        node.ask(3, 5)
        assert node.answered == [1, 3]

    story(told)


def test_held_questions_are_of_the_few_that_may_wait_and_end_with_the_stream():
    async def told(node: Node) -> None:
        for part in range(QUESTIONS_MAX + 1):
            await asyncio.sleep(0)
            node.ask(part + 1, *many(0))
        with pytest.raises(LimitReached):
            node.ask(99, 5)
        node.live.on_closed("too much")
        await asyncio.sleep(2 * HOLD_SECONDS)
        assert node.answered == [1]

    story(told)
