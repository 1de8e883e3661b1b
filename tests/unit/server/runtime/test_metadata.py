"""Reads of many topics at once are one, and each still begins after it was asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest

from nsqha.election.model import PartitionMeta
from nsqha.election.store import PartitionChange
from nsqha.errors import Unavailable
from nsqha.server.runtime.metadata import (
    READ_APART_SECONDS,
    READS_ALONE_MAX,
    READS_TOGETHER_MAX,
    GatheredChanges,
    NodeMetadata,
)

NAMES = [f"t{number}" for number in range(50)]


class CountedRecords:
    """Topics whose record is a number, and how often they were read."""

    revision = 1

    def __init__(self) -> None:
        self.now = dict.fromkeys(NAMES, 0)
        self.reads: Counter[str] = Counter()
        self.list_fails = False

    def topics_of(self, names: Collection[str]) -> dict[str, int | None]:
        self.reads["all"] += 1
        if self.list_fails:
            raise Unavailable("a record can not be read")
        return {name: self.now.get(name) for name in names}

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


async def many_under_way(records: CountedRecords, metadata: NodeMetadata) -> list[asyncio.Future[Any]]:
    """Reads of all topics, of which those that go together have reached the records."""
    early: list[asyncio.Future[Any]] = [asyncio.ensure_future(metadata.topic(name)) for name in NAMES]
    while not records.reads["all"]:
        await asyncio.sleep(0)
    return early


def test_many_reads_at_once_are_a_few_and_one_together() -> None:
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
        early = await many_under_way(records, metadata)
        records.now[NAMES[-1]] = 7
        late = asyncio.ensure_future(metadata.topic(NAMES[-1]))
        await asyncio.sleep(0)
        answers.set()
        assert await late == 7
        assert (await asyncio.gather(*early))[-1] == 0

    asyncio.run(scenario())


def test_while_many_are_read_none_is_read_alone() -> None:
    async def scenario() -> None:
        records = CountedRecords()
        answers = asyncio.Event()
        metadata = metadata_of(records, answers)
        early = await many_under_way(records, metadata)
        metadata._alone = 0  # as when those that are read alone are answered first
        late = [asyncio.ensure_future(metadata.topic(name)) for name in NAMES]
        await asyncio.sleep(5 * READ_APART_SECONDS)
        assert records.reads == {"one": READS_ALONE_MAX, "all": 2}
        metadata._alone = READS_ALONE_MAX
        answers.set()
        assert await asyncio.gather(*early, *late) == [0] * (2 * len(NAMES))
        assert await metadata.topic("t1") == 0 and records.reads["one"] == READS_ALONE_MAX + 1

    asyncio.run(scenario())


def test_a_read_that_is_slow_holds_up_none_that_is_asked_for_later() -> None:
    async def scenario() -> None:
        records = CountedRecords()
        slow = asyncio.Event()
        metadata = metadata_of(records, slow)
        early = await many_under_way(records, metadata)
        for more in range(2, READS_TOGETHER_MAX + 1):
            late = asyncio.ensure_future(metadata.topic("t1"))
            async with asyncio.timeout(5):
                while records.reads["all"] < more:
                    await asyncio.sleep(READ_APART_SECONDS)
            assert not late.done()
        last = asyncio.ensure_future(metadata.topic("t1"))
        await asyncio.sleep(3 * READ_APART_SECONDS)
        assert records.reads["all"] == READS_TOGETHER_MAX, "and there are not more of them than that"
        slow.set()
        assert await last == 0 and await asyncio.gather(*early) == [0] * len(NAMES)

    asyncio.run(scenario())


def test_topics_are_read_one_by_one_when_they_can_not_be_together() -> None:
    async def scenario() -> None:
        records = CountedRecords()
        records.list_fails = True
        metadata = metadata_of(records)
        assert await asyncio.gather(*[metadata.topic(name) for name in NAMES]) == [0] * len(NAMES)
        assert records.reads["one"] == len(NAMES)

    asyncio.run(scenario())


def test_a_partition_is_changed_once_in_a_round() -> None:
    """Its first caller may be gone, with a leadership that ended: etcd refuses a transaction that puts a key twice."""

    async def main() -> list[list[int]]:
        go, rounds = asyncio.Event(), []

        async def write(changes: Sequence[PartitionChange]) -> list[PartitionMeta]:
            rounds.append([change.number for change in changes])
            await go.wait()
            return [change.meta for change in changes]

        gathered = GatheredChanges(write)

        async def put(number: int, epoch: int) -> int:
            return (await gathered.put(PartitionChange("t", 1, number, PartitionMeta(epoch=epoch)))).epoch

        async with asyncio.timeout(20):
            first = asyncio.create_task(put(9, 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gone = asyncio.create_task(put(0, 1))
            await asyncio.sleep(0)
            gone.cancel()
            later = asyncio.create_task(put(0, 3))
            other = asyncio.create_task(put(1, 1))
            await asyncio.sleep(0)
            go.set()
            assert [await first, await later, await other] == [1, 3, 1]
        return rounds

    assert asyncio.run(main()) == [[9], [0, 1], [0]]
