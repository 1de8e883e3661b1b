"""Reads of many topics at once are one, and each still begins after it was asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest

from nsqha.errors import Unavailable
from nsqha.server.runtime.metadata import READS_ALONE_MAX, NodeMetadata

NAMES = [f"t{number}" for number in range(50)]


class CountedRecords:
    """Topics whose record is a number, and how often they were read."""

    revision = 1

    def __init__(self) -> None:
        self.now = dict.fromkeys(NAMES, 0)
        self.reads: Counter[str] = Counter()
        self.list_fails = False

    def topics(self) -> dict[str, int]:
        self.reads["all"] += 1
        if self.list_fails:
            raise Unavailable("a record can not be read")
        return dict(self.now)

    def topic(self, name: str) -> int | None:
        self.reads["one"] += 1
        return self.now.get(name)


def metadata_of(records: CountedRecords, answers: asyncio.Event | None = None) -> NodeMetadata:
    """`answers`: reads that were made return from then on."""

    async def run(call: Any) -> Any:
        await asyncio.sleep(0)
        try:
            return call()
        finally:
            await (asyncio.sleep(0) if answers is None else answers.wait())

    journal = type("Journal", (), {"node": type("Node", (), {"stage_revision": lambda self, revision: None})()})()
    return NodeMetadata(cast(Any, records), run, journal, pytest.fail)


def test_many_reads_at_once_are_a_few_and_one_list() -> None:
    async def scenario() -> None:
        records = CountedRecords()
        metadata = metadata_of(records)
        found = await asyncio.gather(*[metadata.topic(name) for name in [*NAMES, "gone"]])
        assert found == [0] * len(NAMES) + [None]
        assert records.reads == {"one": READS_ALONE_MAX, "all": 1}

    asyncio.run(scenario())


def test_a_read_that_is_asked_for_later_sees_what_was_written_before_it() -> None:
    async def scenario() -> None:
        records = CountedRecords()
        answers = asyncio.Event()
        metadata = metadata_of(records, answers)
        early = [asyncio.ensure_future(metadata.topic(name)) for name in NAMES]
        while not records.reads["all"]:
            await asyncio.sleep(0)
        records.now[NAMES[-1]] = 7
        late = asyncio.ensure_future(metadata.topic(NAMES[-1]))
        await asyncio.sleep(0)
        answers.set()
        assert await late == 7
        assert (await asyncio.gather(*early))[-1] == 0

    asyncio.run(scenario())


def test_topics_are_read_one_by_one_when_the_list_can_not_be() -> None:
    async def scenario() -> None:
        records = CountedRecords()
        records.list_fails = True
        metadata = metadata_of(records)
        assert await asyncio.gather(*[metadata.topic(name) for name in NAMES]) == [0] * len(NAMES)
        assert records.reads["one"] == len(NAMES)

    asyncio.run(scenario())
