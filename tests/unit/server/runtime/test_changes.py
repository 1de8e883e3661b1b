"""Changes that take long: who waits, how long, and for which."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nsqha.errors import NotFound, OutcomeUnknown
from nsqha.server.partition.partition import Partition
from nsqha.server.runtime.changes import Changes
from tests.unit.server.broker_rig import running, until


def test_who_asks_for_the_same_waits_for_the_change_that_is_under_way():
    async def story() -> None:
        changes = Changes(asyncio.get_running_loop(), 0.01)
        begun: list[str] = []
        over = asyncio.Event()

        async def change(what: str) -> int:
            begun.append(what)
            await over.wait()
            return len(begun)

        for what in ("a", "a", "b"):
            with pytest.raises(OutcomeUnknown):
                await changes.once(what, lambda what=what: change(what))  # type: ignore[misc]
        assert begun == ["a", "b"] and len(changes) == 2
        over.set()
        assert await changes.once("a", lambda: change("again")) == 2, "that one"
        assert await changes.once("a", lambda: change("again")) == 3, "the next"
        assert not len(changes)

    asyncio.run(story())


def test_all_who_wait_hear_why_it_failed_and_the_next_try_is_a_new_one():
    async def story() -> None:
        changes = Changes(asyncio.get_running_loop(), 10)
        tries = 0

        async def fails() -> None:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0)
            raise NotFound("not here")

        outcomes = await asyncio.gather(*[changes.once("a", fails) for _ in range(3)], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NotFound] * 3 and tries == 1
        with pytest.raises(NotFound):
            await changes.once("a", fails)
        assert tries == 2

    asyncio.run(story())


def test_a_topic_whose_log_takes_nothing_is_made_once_however_many_ask(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path, publish_outcome_wait_ns=50_000_000) as broker:
            lead, held = broker.opener.lead, list[Partition]()

            def stalled(*args: Any) -> list[Partition]:
                held.extend(lead(*args))
                for each in held:
                    each.hold(True)
                return held

            broker.opener.lead = stalled  # type: ignore[method-assign]
            for _ in range(3):
                with pytest.raises(OutcomeUnknown):
                    await broker.topics.topic_for_client("t")
            assert len(held) == 1 and "t" not in broker.topics
            held[0].hold(False)
            await until(lambda: not len(broker.changes))
            assert (await broker.topics.topic_for_client("t")).led == tuple(held)

    asyncio.run(story())
