"""Work that may not end: one piece of it at a time for each thing, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nsqha.errors import OutcomeUnknown
from nsqha.server.runtime.unfinished import StillUnderWay, Unfinished

LONG, SHORT = 10.0, 0.02


class Works:
    """What was begun, and what lets it end."""

    def __init__(self) -> None:
        self.unfinished = Unfinished[str]()
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def work(self, name: str) -> Callable[[], Coroutine[Any, Any, str]]:
        async def until_it_may() -> str:
            self.begun.append(name)
            await self.ends.setdefault(name, asyncio.Event()).wait()
            return name

        return until_it_may

    async def do(self, key: str, name: str, seconds: float = LONG) -> str:
        return await self.unfinished.do(key, self.work(name), seconds, lambda: "node 3")


def test_what_does_not_end_in_time_goes_on_and_the_next_has_not_begun() -> None:
    async def story() -> None:
        works = Works()
        with pytest.raises(OutcomeUnknown, match=r"not committed within 0\.02 s: node 3; it goes on"):
            await works.do("a", "first", SHORT)
        with pytest.raises(StillUnderWay, match="node 3"):
            await works.do("a", "second", SHORT)
        assert (works.begun, works.unfinished.keys()) == (["first"], ["a"])
        third = asyncio.create_task(works.do("a", "third"))
        await asyncio.sleep(0)
        works.ends["first"].set()
        works.ends["third"] = asyncio.Event()
        works.ends["third"].set()
        assert await third == "third"
        assert (works.begun, works.unfinished.keys()) == (["first", "third"], [])

    asyncio.run(story())


def test_other_things_go_on_and_whoever_leaves_ends_nothing() -> None:
    async def story() -> None:
        works = Works()
        leaves = asyncio.create_task(works.do("a", "first"))
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        works.ends["other"] = asyncio.Event()
        works.ends["other"].set()
        assert await works.do("b", "other") == "other"
        assert works.unfinished.keys() == ["a"]
        works.ends["first"].set()
        while works.unfinished.keys():
            await asyncio.sleep(0)

    asyncio.run(story())


def test_an_error_is_the_callers() -> None:
    async def fails() -> None:
        raise LookupError("no")

    async def story() -> None:
        unfinished = Unfinished[str]()
        for _ in range(2):
            with pytest.raises(LookupError):
                await unfinished.do("a", fails, LONG, str)

    asyncio.run(story())
