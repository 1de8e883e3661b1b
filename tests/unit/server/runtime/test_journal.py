"""Promises are durable before anything rests on them; many share a write, and nothing else is waited for."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nsqha.clock import SystemClock
from nsqha.commitlog.journal import NodeJournal, inspect
from nsqha.commitlog.storage import MemStorage
from nsqha.errors import AppendFailed, NsqhaError, Poisoned, Unavailable
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.journal import JournalWriter
from tests.fakes.disk import FakeDisk


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class HeldJournal:
    """A journal whose writes end when the test says so."""

    def __init__(self) -> None:
        self.storage = MemStorage()
        self.journal = NodeJournal.open(self.storage, "data", random.Random(1), page_cache="boot")
        self.failures: list[BaseException] = []
        self.disk = FakeDisk(asyncio.get_running_loop(), self.failures.append, held=True)
        self.writer = JournalWriter(self.journal, self.disk, self.failures.append)  # type: ignore[arg-type]

    def promise(self, number: int, epoch: int = 1) -> asyncio.Task[None]:
        self.journal.stage((7, number), promise=epoch)
        return asyncio.get_running_loop().create_task(self.writer.promise())

    @property
    def writes(self) -> list[Any]:
        """Those that wait for the disk."""
        return self.disk.journal_writes

    async def end_write(self, error: Exception | None = None) -> None:
        self.disk.finish_first(self.writes, error)
        await turns()

    @property
    def durable(self) -> dict[int, int]:
        return {key[1]: found.promise for key, found in inspect(self.storage, "data").partitions.items()}


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_promises_that_come_while_one_is_written_share_the_next_write() -> None:
    async def scenario() -> None:
        rig = HeldJournal()
        first = rig.promise(0)
        await turns()
        later = [rig.promise(number) for number in range(1, 9)]
        await turns()
        assert len(rig.writes) == 1
        await rig.end_write()
        assert first.done() and not any(each.done() for each in later), "theirs was not in that write"
        assert rig.durable == {0: 1} and len(rig.writes) == 1
        await rig.end_write()
        assert all(each.done() for each in later) and rig.durable == dict.fromkeys(range(9), 1)
        assert not rig.writes

    run(scenario)


def test_everybody_in_a_write_that_failed_hears_of_it_and_the_next_has_it_all() -> None:
    async def scenario() -> None:
        rig = HeldJournal()
        failed = [rig.promise(number) for number in (0, 1)]
        await turns()
        await rig.end_write(AppendFailed("the disk is full"))
        for each in failed:
            with pytest.raises(AppendFailed):
                each.result()
        # As by the journal itself: what it was given it still owes.
        rig.journal.stage((7, 0), promise=2)
        rig.journal.stage((7, 1), promise=2)
        again = asyncio.ensure_future(rig.writer.promise())
        await turns()
        await rig.end_write()
        assert again.done() and again.exception() is None and rig.durable == {0: 2, 1: 2}

    run(scenario)


def test_a_write_goes_on_for_the_others_when_one_who_waited_is_gone() -> None:
    async def scenario() -> None:
        rig = HeldJournal()
        one, other = rig.promise(0), rig.promise(1)
        await turns()
        one.cancel()
        await turns()
        await rig.end_write()
        assert one.cancelled() and other.done() and rig.durable == {0: 1, 1: 1}

    run(scenario)


@pytest.mark.parametrize("error", [AppendFailed("full"), Poisoned("fsync failed")])
def test_what_may_lag_closes_the_node_unless_the_disk_is_only_full(error: NsqhaError) -> None:
    async def scenario() -> None:
        rig = HeldJournal()
        task = asyncio.ensure_future(rig.writer.write())
        await turns()
        assert rig.writer.writing
        await rig.end_write(error)
        await task
        assert not rig.writer.writing and rig.failures == ([error] if isinstance(error, Poisoned) else [])

    run(scenario)


def test_nothing_is_written_behind_the_last() -> None:
    async def scenario() -> None:
        rig = HeldJournal()
        before = rig.promise(0)
        await turns()
        ended = asyncio.ensure_future(rig.writer.end(rig.journal.stop))
        await turns()
        late = rig.promise(1)
        await turns()
        await rig.end_write()
        await rig.end_write()
        await asyncio.gather(before, ended)
        with pytest.raises(Unavailable):
            await late
        await rig.writer.write()
        assert not rig.writes and not rig.failures

    run(scenario)


def test_a_promise_does_not_wait_for_other_work_of_the_disk() -> None:
    """A sync of the cache, a roll, a state that is looked for: each may take a second, without a leader."""

    async def scenario() -> None:
        rig = HeldJournal()
        disk = DiskRounds(asyncio.get_running_loop(), SystemClock(), rig.failures.append)
        writer = JournalWriter(rig.journal, disk, rig.failures.append)
        over = threading.Event()
        try:
            slow = disk.run(lambda: over.wait(10))
            rig.journal.stage((7, 0), promise=3)
            await writer.promise()
            assert rig.durable == {0: 3} and not slow.done()
            over.set()
            await slow
        finally:
            over.set()
            disk.close()

    run(scenario)


def test_a_recovery_and_a_promise_write_one_after_the_other() -> None:
    storage = MemStorage()
    journal = NodeJournal.open(storage, "data", random.Random(1), new_lock=threading.Lock)
    journal.stage((7, 0), promise=1)
    with journal._writing:
        thread = threading.Thread(target=journal.commit)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not inspect(storage, "data").partitions
    thread.join(10)
    assert [found.promise for found in inspect(storage, "data").partitions.values()] == [1]
