"""News of the records: many at once are looked at in turns, and what fails is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

from nsqha.errors import Unavailable
from nsqha.server.node.cluster.records import LOOKED_AT_ONCE, RecordNews
from nsqha.server.node.cluster.registration import REJOIN_SECONDS
from tests.unit.server.replica_rig import pause, run

COUNT = 3 * LOOKED_AT_ONCE + 1


class SeenNews(RecordNews):
    """Remembers what is looked at; `failures` of these fail first."""

    def __init__(self, failures: int = 0) -> None:
        watch = SimpleNamespace(view=lambda: None)
        super().__init__(cast(Any, SimpleNamespace()), cast(Any, watch), asyncio.get_running_loop())
        self.turns: list[list[str]] = []
        self.failures = failures

    def look_at(self, names: Collection[str]) -> None:
        self.turns.append(list(names))
        if self.failures:
            self.failures -= 1
            raise Unavailable("not now")


def test_others_have_a_turn_while_many_records_are_looked_at() -> None:
    async def scenario() -> None:
        news, between = SeenNews(), list[int]()
        names = [f"topics/t{number}" for number in range(COUNT)]
        for name in (*names, *names):
            news.named(name)
        following = asyncio.create_task(news.follow())
        for _ in range(4):
            await asyncio.sleep(0)
            between.append(len(news.turns))
        await pause(0)
        following.cancel()
        assert between[:3] == [1, 2, 3]
        assert [name for turn in news.turns for name in turn] == names, "each once, the first named first"
        assert [len(turn) for turn in news.turns] == [LOOKED_AT_ONCE] * 3 + [1]

    run(scenario)


def test_what_can_not_be_looked_at_is_tried_again_after_a_pause() -> None:
    async def scenario() -> None:
        news = SeenNews(failures=2)
        for number in range(COUNT):
            news.named(f"topics/t{number}")
        following = asyncio.create_task(news.follow())
        await pause(REJOIN_SECONDS * 0.9)
        assert len(news.turns) == 1, "it does not fail again and again without a pause"
        await pause(3 * REJOIN_SECONDS)
        following.cancel()
        done = [name for turn in news.turns[2:] for name in turn]
        assert sorted(done) == sorted(f"topics/t{number}" for number in range(COUNT))

    run(scenario)
