"""Messages of several leaders become one stream by time; who fails says so behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.admin import peeking
from nsqha.admin.fan_out import FanOut
from nsqha.errors import LogCorrupt, OutcomeUnknown, Unavailable
from nsqha.pb.v1 import admin_pb2 as pb
from tests.unit.admin.leaders_rig import FakeOthers, leaders_of, topic_of


def messages(partition: int, times: Iterable[int]) -> list[Any]:
    return [pb.PeekedMessage(partition=partition, offset=n, timestamp_ns=t) for n, t in enumerate(times)]


def leader(*answers: Any) -> Any:
    """Streams these; an exception among them ends it."""
    return lambda rpc, request: answers


def head(partition: int, count: int) -> Any:
    return pb.PeekedMessage(partition=partition, count=count)


def peek(others: FakeOthers, leaders: dict[int, int], partitions: int, **where: Any) -> list[Any]:
    """What node 1 answers, which leads nothing."""

    async def story() -> list[Any]:
        broker: Any = SimpleNamespace(topics=SimpleNamespace(topic=lambda name: topic_of([], partitions)))
        fan_out = FanOut(leaders_of(leaders), others, seconds=0.0)  # type: ignore[arg-type]
        request = pb.PeekMessagesRequest(topic="t", **where)
        return [message async for message in peeking.peek(broker, request, fan_out)]

    return asyncio.run(story())


def places(found: list[Any]) -> list[tuple[int, int]]:
    return [(m.partition, m.timestamp_ns) for m in found]


def test_all_by_time() -> None:
    two = sorted(messages(0, [1, 5]) + messages(2, [2, 9]), key=lambda m: m.timestamp_ns)
    others = FakeOthers(n2=leader(head(0, 2), head(2, 2), *two), n3=leader(head(1, 2), *messages(1, [3, 5])))
    found = peek(others, {0: 2, 1: 3, 2: 2}, 3, start=True)
    assert places(found) == [(0, 1), (2, 2), (1, 3), (0, 5), (1, 5), (2, 9)]
    assert sorted(others.calls) == [("n2", "PeekMessages", [0, 2]), ("n3", "PeekMessages", [1])]


def test_the_last_of_all_are_found_by_what_each_has() -> None:
    others = FakeOthers(n2=leader(head(0, 3), *messages(0, [1, 2, 3])), n3=leader(head(1, 3), *messages(1, [4, 5, 6])))
    assert places(peek(others, {0: 2, 1: 3}, 2, last=4)) == [(0, 3), (1, 4), (1, 5), (1, 6)]


def test_no_more_than_asked_for() -> None:
    others = FakeOthers(n2=leader(head(0, 5), *messages(0, range(5))))
    assert len(peek(others, {0: 2}, 1, start=True, count_max=3)) == 3


def test_a_leader_that_is_away_is_named_behind_the_messages() -> None:
    others = FakeOthers(n2=leader(head(0, 1), *messages(0, [1])))
    message, error = peek(others, {0: 2, 1: 3}, 2, start=True)
    assert (message.partition, message.error) == (0, "")
    assert (error.partition, error.error) == (1, "n3 is not there")


def test_if_nobody_answers_the_whole_fails() -> None:
    with pytest.raises(Unavailable, match="partition 0: n2 is not there; partition 1: no node leads"):
        peek(FakeOthers(), {0: 2}, 2, start=True)


def test_a_stream_that_breaks_says_so() -> None:
    others = FakeOthers(n2=leader(head(0, 2), *messages(0, [1]), OutcomeUnknown("lost")))
    message, error = peek(others, {0: 2}, 1, start=True)
    assert message.timestamp_ns == 1
    assert (error.partition, error.error) == (0, "not all of it: lost")


def test_damage_is_an_error_of_the_call() -> None:
    with pytest.raises(LogCorrupt):
        peek(FakeOthers(n2=leader(head(0, 2), LogCorrupt("bad"))), {0: 2}, 1, start=True)
