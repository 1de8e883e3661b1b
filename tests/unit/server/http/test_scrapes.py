"""Who asks for /metrics while a scrape is made, and how soon the next one begins."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.server.http.metrics import scrapes
from nsqha.server.http.metrics.scrapes import FILTERS_MAX, REST, REST_SECONDS_MAX, Scrapes
from nsqha.server.http.metrics.turns import in_turns, to_end
from nsqha.server.http.stats import BrokerStats, TopicStats
from tests.unit.server.http.test_metrics import OPENMETRICS


def in_a_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(story)
    def test(**fixtures: Any) -> None:
        asyncio.run(story(**fixtures))

    return test


class Slow:
    """A broker whose figures are taken when it is told; each time it has one topic more."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = asyncio.Event()

    async def snapshot_in_turns(self, topic: str = "", clients: bool = False) -> BrokerStats:
        self.asked.append(topic)
        topics = tuple(TopicStats(topic_name=f"t{n}") for n in range(len(self.asked)))
        await self.go_on.wait()
        return BrokerStats(health="OK", start_time_ns=0, topics=topics)


def topics_in(answer: scrapes.Scrape) -> int:
    return b"".join(answer.parts).count(b"nsqha_publish_messages_total{")


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrapes, "REST", 0)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


@in_a_loop
async def test_who_asks_meanwhile_shares_the_next_scrape_with_all_who_want_the_same() -> None:
    broker = Slow()
    served = Scrapes(broker, {})  # type: ignore[arg-type]
    first = asyncio.ensure_future(served.scrape("", ""))
    await until(lambda: broker.asked == [""])
    later = [asyncio.ensure_future(served.scrape("", "")) for _ in range(3)]
    other = asyncio.ensure_future(served.scrape("", OPENMETRICS))
    await asyncio.sleep(0)
    broker.go_on.set()
    assert topics_in(await first) == 1
    assert [topics_in(await each) for each in later] == [2, 2, 2]
    assert (await other).content_type.startswith("application/openmetrics-text")
    assert topics_in(await other) == 3
    assert topics_in(await served.scrape("", "")) == 4  # nothing old is shown


@in_a_loop
async def test_who_goes_away_does_not_take_the_answer_of_others_with_them() -> None:
    broker = Slow()
    served = Scrapes(broker, {})  # type: ignore[arg-type]
    first = asyncio.ensure_future(served.scrape("", ""))
    await until(lambda: broker.asked == [""])
    second = asyncio.ensure_future(served.scrape("", ""))
    await asyncio.sleep(0)
    first.cancel()
    broker.go_on.set()
    assert topics_in(await second) == 2


@in_a_loop
async def test_the_next_one_waits_for_nine_times_what_the_last_took_and_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    slept: list[float] = []
    takes = iter((0.01, 5.0, 0.0))

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    class Timed(Slow):
        async def snapshot_in_turns(self, topic: str = "", clients: bool = False) -> BrokerStats:
            nonlocal now
            now += next(takes)
            return BrokerStats(health="OK", start_time_ns=0)

    monkeypatch.setattr(scrapes, "REST", REST)
    monkeypatch.setattr(scrapes, "time", SimpleNamespace(monotonic=lambda: now))
    served = Scrapes(Timed(), {})  # type: ignore[arg-type]
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(scrapes, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
            await served.scrape("", "")
    assert [seconds for seconds in slept if seconds] == pytest.approx([0.01 * REST, REST_SECONDS_MAX])


@in_a_loop
async def test_each_filter_has_a_bound_of_its_own_and_few_are_kept() -> None:
    broker = Slow()
    broker.go_on.set()
    served = Scrapes(broker, {})  # type: ignore[arg-type]
    for topic in ("", *map(str, range(2 * FILTERS_MAX))):
        await served.scrape(topic, "")
    assert broker.asked[:2] == ["", "0"]
    assert len(served._bounds) == FILTERS_MAX
    assert "" in served._bounds


@in_a_loop
async def test_others_have_two_turns_of_the_loop_between_two_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> Generator[None, None, str]:
        for step in range(3):
            seen.append(step)
            yield
        return "done"

    seen: list[object] = []
    assert to_end(work()) == "done"
    monkeypatch.setattr("nsqha.server.http.metrics.turns.TURN_SECONDS", 0.0)
    seen.clear()
    task = asyncio.ensure_future(in_turns(work()))
    while not task.done():
        await asyncio.sleep(0)
        seen.append("other")
    assert await task == "done"
    assert seen[:7] == [0, "other", "other", 1, "other", "other", 2]
