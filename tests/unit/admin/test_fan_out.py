"""One answer per partition, whoever leads it: what is retried, what never is, what is said when nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from nsqha.admin.fan_out import FanOut
from nsqha.admin.topic_request import concerned, for_leader
from nsqha.errors import NotFound, OutcomeUnknown, StorageError, Unavailable
from nsqha.pb.v1 import admin_pb2 as pb
from tests.fakes.partitions import FakeLeaders
from tests.unit.admin.leaders_rig import UID, FakeOthers, leaders_of, topic_of

Answers = dict[int, str]


@dataclass
class Work:
    """A `TopicRequest` whose answers are texts."""

    topic: Any
    message: Any
    carry_out: Callable[[list[int]], Answers] | None
    answered: Callable[[], None]

    async def here(self, numbers: list[int]) -> Answers:
        return self.carry_out(numbers) if self.carry_out else dict.fromkeys(numbers, "here")

    async def ask(self, peers: Any, address: str, numbers: list[int]) -> Answers:
        reply = await peers.call(address, "Seek", for_leader(self.topic, self.message, numbers), seconds=5.0)
        self.answered()
        return {p.partition: p.error for p in reply.partitions if not p.not_led}

    def failed(self, number: int, why: str) -> str:
        return f"failed: {why}"


def seek_answer(who: str, not_led: tuple[int, ...] = ()) -> Callable[[str, Any], Any]:
    def answer(rpc: str, request: Any) -> Any:
        response = pb.SeekResponse(done=True)
        for number in request.here.partitions:
            away = number in not_led
            response.partitions.add(partition=number, error=who, not_led=away)
        return response

    return answer


def ask(
    others: FakeOthers,
    leaders: dict[int, int],
    leads: tuple[int, ...] = (0,),
    partitions: int = 3,
    *,
    here: Callable[[list[int]], Answers] | None = None,
    numbers: list[int] | None = None,
    request: Any = None,
    after: Callable[[FakeLeaders], None] = lambda leaders: None,
) -> Answers:
    """What node 1 answers."""
    topic = topic_of(list(leads), partitions)
    known = leaders_of(leaders)

    work = Work(topic, request or pb.SeekRequest(topic="t"), here, lambda: after(known))
    fan_out = FanOut(known, others, seconds=0.12)  # type: ignore[arg-type]
    return asyncio.run(fan_out.answers(work, list(range(partitions)) if numbers is None else numbers))


def test_each_leader_is_asked_once_for_all_that_it_leads() -> None:
    others = FakeOthers(n2=seek_answer("two"), n3=seek_answer("three"))
    assert ask(others, {0: 1, 1: 2, 2: 3, 3: 2}, partitions=4) == {0: "here", 1: "two", 2: "three", 3: "two"}
    assert sorted(others.calls) == [("n2", "Seek", [1, 3]), ("n3", "Seek", [2])]


def test_a_leader_that_can_not_be_reached_fails_its_partitions_only() -> None:
    answers = ask(FakeOthers(n2=seek_answer("two")), {1: 2, 2: 3})
    assert answers == {0: "here", 1: "two", 2: "failed: n3 is not there"}


def test_a_partition_whose_epoch_can_not_begin_here_says_why() -> None:
    assert ask(FakeOthers(), {}, leads=(0,), partitions=1, here=lambda numbers: {}) == {0: "failed: 0 has only begun"}


def test_a_partition_that_nobody_leads_says_so() -> None:
    assert ask(FakeOthers(n2=seek_answer("two")), {1: 2})[2] == "failed: no node leads it at the moment"


def test_a_new_leader_is_found() -> None:
    def elect(leaders: FakeLeaders) -> None:
        leaders.appoint("t", 2, 3)

    others = FakeOthers(n2=seek_answer("two", not_led=(2,)), n3=seek_answer("three"))
    assert ask(others, {1: 2, 2: 2}, after=elect) == {0: "here", 1: "two", 2: "three"}
    assert others.calls == [("n2", "Seek", [1, 2]), ("n3", "Seek", [2])], "what is answered is not asked for again"


def test_a_leader_that_never_leads_is_named() -> None:
    answers = ask(FakeOthers(n2=seek_answer("", not_led=(1,))), {1: 2}, partitions=2)
    assert answers == {0: "here", 1: "failed: n2, which is known as its leader, does not lead it, or not yet"}


def test_what_was_led_here_when_another_node_asked_is_looked_for_elsewhere() -> None:
    asked = pb.SeekRequest(topic="t", here=pb.Here(topic_uid=UID))
    assert ask(FakeOthers(), {}, leads=(), partitions=1, request=asked) == {0: "failed: this node does not lead it"}


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), StorageError("disk")])
def test_what_may_have_been_done_is_not_done_again(error: Exception) -> None:
    def answer(rpc: str, request: Any) -> Any:
        raise error

    others = FakeOthers(n2=answer)
    assert ask(others, {1: 2}, partitions=2) == {0: "here", 1: f"failed: {error}"}
    assert len(others.calls) == 1


def test_what_was_definitely_not_done_is_tried_again() -> None:
    tries: list[int] = []

    def answer(rpc: str, request: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise Unavailable("just starting")
        return seek_answer("two")(rpc, request)

    assert ask(FakeOthers(n2=answer), {1: 2}, partitions=2)[1] == "two"


def test_an_error_about_the_only_partition_is_the_answer() -> None:
    def answer(rpc: str, request: Any) -> Any:
        raise NotFound("no such message")

    with pytest.raises(NotFound, match="no such message"):
        ask(FakeOthers(n2=answer), {1: 2}, numbers=[1])
    assert ask(FakeOthers(n2=answer), {1: 2}, partitions=2)[1] == "failed: no such message"


def test_who_is_asked_by_another_node_asks_nobody() -> None:
    others = FakeOthers(n2=seek_answer("two"))
    request = pb.SeekRequest(topic="t", here=pb.Here(topic_uid=UID, partitions=[0, 1]))
    answers = ask(others, {1: 2}, numbers=[0, 1], request=request)
    assert answers == {0: "here", 1: "failed: this node does not lead it"}
    assert not others.calls


def test_another_life_of_the_topic_is_not_meant() -> None:
    request = pb.SeekRequest(topic="t", here=pb.Here(topic_uid=UID + 1, partitions=[0]))
    assert ask(FakeOthers(), {}, numbers=[0], request=request) == {0: "failed: this node does not lead it"}


def test_a_request_names_its_partitions() -> None:
    topic = topic_of([0], 3)
    assert concerned(topic, pb.SeekRequest()) == ([0, 1, 2], 0)
    assert concerned(topic, pb.SeekRequest(partition=2)) == ([2], 0)
    with pytest.raises(NotFound, match="no partition 3, only 3"):
        concerned(topic, pb.SeekRequest(partition=3))
    identifier = (1 << 50) + 5
    assert concerned(topic, pb.SeekRequest(), f"{identifier:016x}") == ([1], identifier)
    with pytest.raises(ValueError, match="not a message id"):
        concerned(topic, pb.SeekRequest(), "x")
    with pytest.raises(NotFound, match="not one of topic t"):
        concerned(topic, pb.SeekRequest(), f"{3 << 50:016x}")
