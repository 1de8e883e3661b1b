"""What partitions and the journal rely on of the disk: `DiskRounds` with its threads, and the disk of tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nsqha.clock import SystemClock
from nsqha.commitlog.log import SyncTicket
from nsqha.errors import AppendFailed, Poisoned
from nsqha.server.runtime.disk import DiskRounds
from tests.fakes.disk import FakeDisk
from tests.fakes.loop import VirtualLoop

Story = Callable[[Any, list[BaseException]], Awaitable[None]]
Run = Callable[[Story], None]


class CountedFile:
    """Counts its syncs, which may fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.syncs = 0
        self._error = error

    def sync(self) -> None:
        self.syncs += 1
        if self._error is not None:
            raise self._error


class Written:
    """A partition of which so many writes wait for a round."""

    def __init__(self, *, file: CountedFile | None = None) -> None:
        self.file = file or CountedFile()
        self.unsynced = 0
        self.notified: list[int] = []  # by each round: how many writes it has brought to the disk
        self.on_ticket: Callable[[], object] = lambda: None
        self.on_synced: Callable[[], None] = lambda: None

    def write(self) -> None:
        self.unsynced += 1

    def sync_ticket(self) -> SyncTicket | None:
        if not self.unsynced:
            return None
        end, self.unsynced = self.unsynced, 0
        self.on_ticket()
        return SyncTicket(end, (self.file,))  # type: ignore[arg-type]

    def synced(self, ticket: SyncTicket) -> None:
        assert self.file.syncs, "before its file"
        self.notified.append(ticket.log_id)
        self.on_synced()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def with_threads(story: Story) -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        disk = DiskRounds(asyncio.get_running_loop(), SystemClock(), failures.append)
        try:
            await story(disk, failures)
        finally:
            disk.close()

    asyncio.run(main())


def with_fake(story: Story) -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        disk = FakeDisk(asyncio.get_running_loop(), failures.append)
        await story(disk, failures)
        disk.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


@pytest.fixture(params=[with_threads, with_fake])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.param
    return found


def test_the_fake_has_the_methods_of_the_real_disk() -> None:
    for name, real in vars(DiskRounds).items():
        if name.startswith("_"):
            continue
        fake = vars(FakeDisk)[name]
        if isinstance(real, property):
            assert isinstance(fake, property)
            continue
        assert inspect.iscoroutinefunction(fake) == inspect.iscoroutinefunction(real), name
        described = [
            [(p.name, p.kind, p.default) for p in inspect.signature(each).parameters.values()] for each in (real, fake)
        ]
        assert described[0] == described[1], name


def test_what_was_written_in_one_turn_shares_a_round(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        one, other = Written(), Written()
        for partition in (one, one, other):
            partition.write()
            disk.request(partition)
        assert one.notified == [] and one.unsynced == 2, "a round begins after the turn"
        await until(lambda: other.notified)
        assert (one.notified, other.notified, one.file.syncs) == ([2], [1], 1) and not failures
        assert disk.running == 0

    run(story)


def test_what_is_written_while_a_round_runs_goes_with_the_next(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        partition = Written()
        running: list[int] = []

        def more() -> None:
            running.append(disk.running)
            if len(running) == 1:
                for _ in range(2):
                    partition.write()
                    disk.request(partition)

        loop = asyncio.get_running_loop()
        partition.on_ticket = lambda: loop.call_soon(more)  # after the round has begun, before it has ended
        partition.write()
        disk.request(partition)
        await until(lambda: len(partition.notified) == 2)
        assert partition.notified == [1, 2] and partition.file.syncs == 2
        assert running == [1, 2] and disk.running == 0

    run(story)


def test_a_request_of_one_who_was_just_notified_is_served(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        partition = Written()

        def once_more() -> None:
            if len(partition.notified) == 1:
                partition.write()
                disk.request(partition, patient=True)

        partition.on_synced = once_more
        partition.write()
        disk.request(partition)
        await until(lambda: len(partition.notified) == 2)

    run(story)


def test_who_has_nothing_to_sync_is_not_notified_and_keeps_no_other_waiting(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        nothing, partition = Written(), Written()
        disk.request(nothing)
        await asyncio.sleep(0.01)
        partition.write()
        disk.request(nothing)
        disk.request(partition)
        await until(lambda: partition.notified)
        assert nothing.notified == [] and nothing.file.syncs == 0

    run(story)


def test_a_partition_that_breaks_keeps_no_other_from_being_notified(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        first, second = Written(), Written()

        def broken() -> None:
            raise ValueError("broken")

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        first.on_synced = broken
        for partition in (first, second):
            partition.write()
            disk.request(partition)
        await until(lambda: second.notified)
        second.write()
        disk.request(second)
        await until(lambda: len(second.notified) == 2)
        assert failures == []

    run(story)


def test_after_a_sync_that_failed_no_partition_is_notified_again(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        error = Poisoned("fdatasync failed")
        good, bad = Written(), Written(file=CountedFile(error))
        for partition in (good, bad):
            partition.write()
            disk.request(partition)
        await until(lambda: failures)
        good.write()
        disk.request(good)
        await asyncio.sleep(0.02)
        assert failures == [error] and good.notified == bad.notified == []

    run(story)


@pytest.mark.parametrize("lane", ["run", "journal"])
def test_jobs_are_done_in_their_order_and_off_the_caller(lane: str, run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        done: list[int] = []
        submitted = [getattr(disk, lane)(lambda n=n: done.append(n) or n) for n in range(4)]
        assert not any(job.done() for job in submitted)
        assert await asyncio.gather(*submitted) == [0, 1, 2, 3] and done == [0, 1, 2, 3]

    run(story)


@pytest.mark.parametrize("lane", ["run", "journal", "read"])
def test_a_job_that_fails_is_its_callers_trouble(lane: str, run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        def broken() -> None:
            raise AppendFailed("the disk is full")

        failed, fine = getattr(disk, lane)(broken), getattr(disk, lane)(lambda: 7)
        with pytest.raises(AppendFailed, match="full"):
            await failed
        assert await fine == 7 and failures == []

    run(story)


@pytest.mark.parametrize("lane", ["run", "removed"])
def test_a_job_whose_sync_failed_poisons_the_node_and_no_partition_is_notified_again(lane: str, run: Run) -> None:
    """Who asked for it may try again, and the next sync of the same file would succeed."""

    async def story(disk: Any, failures: list[BaseException]) -> None:
        def fail() -> bool:
            raise Poisoned("fdatasync failed")

        for _ in range(2):
            with pytest.raises(Poisoned):
                await getattr(disk, lane)(fail)
        await until(lambda: failures)
        written = Written()
        written.write()
        disk.request(written)
        await asyncio.sleep(0.05)
        assert len(failures) == 1 and not written.notified

    run(story)


def test_files_are_removed_step_by_step_until_there_are_no_more(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        left = [1, 2, 3]

        def step() -> bool:
            left.pop()
            return bool(left)

        await disk.removed(step)
        assert left == []

        def broken() -> bool:
            raise OSError("Input/output error")

        with pytest.raises(OSError, match="Input/output"):
            await disk.removed(broken)

    run(story)


def test_a_job_that_nobody_waits_for_any_more_keeps_no_other_from_its_turn(run: Run) -> None:
    async def story(disk: Any, failures: list[BaseException]) -> None:
        submitted = [disk.run(lambda n=n: n) for n in range(3)]
        submitted[1].cancel()
        assert (await submitted[0], await submitted[2]) == (0, 2) and submitted[1].cancelled()

    run(story)


# ---- what only the fake can do


def test_held_jobs_and_rounds_wait_for_the_test() -> None:
    loop = VirtualLoop()
    failures: list[BaseException] = []
    disk = FakeDisk(loop, failures.append, held=True)
    partition, done = Written(), list[str]()
    partition.write()
    disk.request(partition)
    disk.run(lambda: done.append("job"))
    removing = loop.create_task(disk.removed(lambda: done.append("removal") or False))
    loop.pass_time(10)
    assert done == [] and partition.notified == [] and list(disk.wanting) == [partition]
    disk.begin()
    partition.write()
    assert partition.file.syncs == 0 and disk.running == 1
    disk.write()
    assert partition.file.syncs == 1 and partition.notified == []
    disk.end()
    assert partition.notified == [1] and partition.unsynced == 1 and disk.running == 0
    disk.work(removals=False)
    assert done == ["job"] and not removing.done()
    disk.work()
    assert done == ["job", "removal"] and removing.done()
    refused = disk.journal(lambda: done.append("never"))
    disk.finish_first(disk.journal_writes, AppendFailed("full"))
    assert isinstance(refused.exception(), AppendFailed) and "never" not in done


def test_jobs_that_come_while_the_disk_is_held_are_done_when_it_is_released() -> None:
    async def story() -> None:
        disk = FakeDisk(asyncio.get_running_loop(), pytest.fail)
        first = disk.run(lambda: 1)
        disk.hold()
        others = [disk.run(lambda: 2), disk.read(lambda: 3), disk.journal(lambda: 4)]
        await asyncio.sleep(1)
        assert not first.done() and not any(job.done() for job in others)
        disk.release()
        assert await asyncio.gather(first, *others) == [1, 2, 3, 4]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story())
