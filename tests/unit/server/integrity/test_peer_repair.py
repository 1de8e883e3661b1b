"""A node mends its copy of a committed range from whoever has it, and goes on asking until somebody does."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from nsqha.commitlog import copying
from nsqha.commitlog.corruption.repair import LogRepair
from nsqha.commitlog.log import PartitionLog
from nsqha.errors import LogCorrupt, Poisoned, Unavailable
from nsqha.frames import LOST
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.integrity.peer_repair import RETRY_SECONDS, Repairer
from tests.fakes.disk import FakeDisk
from tests.fakes.loop import VirtualLoop
from tests.unit.commitlog.damaged_logs import damage, replica
from tests.unit.commitlog.logs import add, roll

KEY = (9, 2)


class Others:
    """Nodes by address; None: nobody answers there."""

    def __init__(self, **logs: PartitionLog | None) -> None:
        self.logs = logs
        self.asked: list[str] = []
        self.committed = 0  # as they know it
        self.meanwhile: Callable[[], None] = lambda: None

    async def call(self, address: str, method: str, request: pb.FetchRequest, *, timeout: float) -> Any:
        assert (method, request.epoch, request.cluster_id) == ("Fetch", 0, 77)
        self.asked.append(address)
        log = self.logs[address]
        if log is None:
            raise Unavailable("no connection")
        self.meanwhile()
        run = copying.read_run(log, request.first, request.end, 150)  # small answers: several are needed
        return pb.FetchReply(entries=run.entries, data=run.data, committed=self.committed)


class RepairerRig:
    def __init__(self, mine: PartitionLog | None, **logs: PartitionLog | None) -> None:
        self.loop = VirtualLoop()
        self.others = Others(**logs)
        self.mended: list[tuple[int, int]] = []
        self.failures: list[BaseException] = []
        self.disk = FakeDisk(self.loop, self.failures.append, held=True)
        self.mine = mine
        self.repairer = Repairer(
            self.others,  # type: ignore[arg-type]
            cluster_id=77,
            log_of=lambda key: self.mine,
            others=lambda key: list(logs),
            mended=lambda key, *range_: self.mended.append(range_),
            missed=self.missed,
            run=self.disk.run,
            on_failure=self.failures.append,
            spawn=lambda work: self.tasks.append(self.loop.create_task(work)),
        )
        self.tasks: list[Any] = []

    async def missed(self, key: object, first: int, end: int) -> None: ...

    def damaged(self, first: int, end: int) -> None:
        self.repairer.damaged(KEY, first, end)
        self.disk.work()

    def pass_time(self) -> None:
        self.loop.pass_time(RETRY_SECONDS + 1)
        self.disk.work()


def verifies(log: PartitionLog) -> bool:
    try:
        return all(log.read(log.entry(log_id)) for log_id in range(log.start.log_id, log.end.log_id))
    except LogCorrupt:
        return False


def test_a_range_is_fetched_in_pieces_and_written_where_it_was() -> None:
    mine = replica()
    for log_id in range(4, 8):
        damage(mine, log_id)
    rig = RepairerRig(mine, a=replica())
    rig.damaged(4, 8)
    assert verifies(mine) and rig.mended == [(4, 8)] and len(rig.others.asked) == 4


def test_who_has_another_log_or_the_same_damage_or_is_away_is_passed_over() -> None:
    mine, same = replica(), replica()
    damage(mine, 5)
    damage(same, 5)
    rig = RepairerRig(mine, away=None, other=replica(seed=2), same=same, good=replica())
    rig.damaged(5, 6)
    assert verifies(mine) and rig.mended == [(5, 6)]
    assert rig.others.asked == ["away", "other", "same", "good"]


def test_it_is_tried_again_until_somebody_has_it() -> None:
    mine = replica()
    damage(mine, 5)
    rig = RepairerRig(mine, a=None)
    rig.damaged(5, 6)
    rig.damaged(5, 6)  # found again meanwhile: one repair at a time
    assert rig.others.asked == ["a"] and not rig.mended
    rig.others.logs["a"] = replica()
    rig.pass_time()
    assert verifies(mine) and rig.mended == [(5, 6)] and rig.others.asked == ["a", "a"]


def test_it_is_tried_again_at_once_when_a_node_comes() -> None:
    """Nobody may lead before: half a minute is long."""
    mine = replica()
    damage(mine, 5)
    rig = RepairerRig(mine, a=None)
    rig.damaged(5, 6)
    rig.others.logs["a"] = replica()
    rig.repairer.ask_again()
    rig.disk.work()
    assert verifies(mine) and rig.mended == [(5, 6)]


def test_what_was_given_up_is_asked_for_less_and_less_often_until_a_node_comes() -> None:
    """Nobody waits for it any more; but a disk may be brought back from a drawer."""
    mine = replica()
    damage(mine, 5)
    mine.repair.giving_up(5, 6)()
    rig = RepairerRig(mine, a=None)
    rig.damaged(5, 6)
    rig.loop.pass_time(24 * 3600.0)
    assert 24 <= len(rig.others.asked) <= 24 + 8
    rig.others.logs["a"] = replica()
    rig.repairer.ask_again()
    rig.disk.work()
    assert verifies(mine) and rig.mended == [(5, 6)]


def test_what_is_found_later_does_not_wait_for_what_nobody_has() -> None:
    mine, other = replica(), replica()
    damage(mine, 3)
    damage(mine, 6)
    damage(other, 3)
    rig = RepairerRig(mine, a=other)
    rig.damaged(3, 4)
    rig.damaged(6, 7)
    assert rig.mended == [(6, 7)]


def test_it_ends_when_the_partition_is_gone() -> None:
    mine = replica()
    damage(mine, 5)
    rig = RepairerRig(mine, a=None)
    rig.damaged(5, 6)
    rig.mine = None
    rig.pass_time()
    assert rig.others.asked == ["a"] and rig.tasks[0].done() and not rig.loop.errors


def test_ranges_that_are_found_while_one_is_mended_are_mended_too() -> None:
    mine = replica()
    damage(mine, 3)
    damage(mine, 6)
    rig = RepairerRig(mine, a=None)
    rig.damaged(3, 4)
    rig.damaged(6, 7)
    rig.others.logs["a"] = replica()
    rig.pass_time()
    assert verifies(mine) and rig.mended == [(3, 4), (6, 7)] and rig.tasks[0].done()


def test_nothing_is_written_on_the_loop_nor_behind_a_cut_that_came_meanwhile() -> None:
    mine = replica()
    damage(mine, 5)
    rig = RepairerRig(mine, a=replica())
    rig.repairer.damaged(KEY, 5, 6)
    rig.loop.turn()
    assert len(rig.disk.jobs) == 1 and not verifies(mine) and not rig.mended
    rig.disk.work()
    assert verifies(mine)
    damage(mine, 6)
    rig.others.meanwhile = lambda: mine.cutting(4)()
    rig.damaged(6, 7)
    assert not rig.disk.jobs and not rig.tasks[-1].done()
    rig.pass_time()
    assert rig.tasks[-1].done() and not rig.tasks[-1].exception() and rig.mended == [(5, 6)]


def test_a_disk_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replica()
    damage(mine, 5)
    rig = RepairerRig(mine, a=replica())
    monkeypatch.setattr(LogRepair, "mending", lambda repair, batches, **how: failing)
    rig.damaged(5, 6)
    assert {str(error) for error in rig.failures} == {"fsync"} and not rig.mended


def failing() -> None:
    raise Poisoned("fsync")


@pytest.mark.parametrize("when", ["opened", "written"])
def test_what_can_not_be_written_just_now_is_written_later(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors, or room for what was a hole, may be there again in a moment; a range that is not synced is damaged
    as it was."""
    mine = replica()
    damage(mine, 5)
    rig = RepairerRig(mine, a=replica())

    def full(*_: object, **how: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LogRepair, "mending", full if when == "opened" else lambda repair, batches, **how: full)
        rig.damaged(5, 6)
        assert not rig.failures and not rig.mended
    rig.pass_time()
    assert rig.mended == [(5, 6)] and verifies(mine)


def test_at_the_end_of_a_log_only_what_is_committed_elsewhere_counts() -> None:
    """Nothing behind it says what was there: a replica that parted from the others has another batch in its place."""
    mine, other = replica(), replica()
    end = mine.end.log_id
    damage(mine, end - 1)
    entry, pair = other.entry(end - 1), mine.files.pair_of(end - 1)

    def whole() -> bool:  # on the disk: the log itself has its last batch in memory
        return pair.read_data(entry.position, entry.size) == other.read(entry)

    rig = RepairerRig(mine, other=other)
    rig.damaged(end - 1, end)
    assert rig.others.asked == ["other"] and not rig.mended and not whole()
    rig.others.committed = end
    rig.pass_time()
    assert rig.mended == [(end - 1, end)] and whole()


def test_damaged_entries_are_followed_up_to_one_that_proves_them_and_fetched_again() -> None:
    """However long the range, no more than one answer is held in memory."""
    mine = replica()
    for log_id in range(4, 8):
        damage(mine, log_id, entry=True)
    rig = RepairerRig(mine, a=replica())
    rig.damaged(4, 8)
    assert verifies(mine) and rig.mended == [(4, 8)]
    assert len(rig.others.asked) == 1 + 4 + 4, "nothing is proven; followed; written"


def test_a_replica_that_parted_behind_the_range_gives_nothing_of_damaged_entries() -> None:
    mine, fork = replica(), replica(batches=6)
    add(fork, b"another one")
    for log_id in range(5, 8):
        damage(mine, log_id, entry=True)
    rig = RepairerRig(mine, fork=fork)
    before = [mine.files.pair_of(n).read_slots(n, 1) for n in range(5, 8)]
    rig.damaged(5, 8)
    assert not rig.mended and [mine.files.pair_of(n).read_slots(n, 1) for n in range(5, 8)] == before


def test_a_replica_that_has_another_content_the_second_time_gives_nothing_more() -> None:
    mine, other = replica(), replica()
    for log_id in range(5, 8):
        damage(mine, log_id, entry=True)
    rig = RepairerRig(mine, a=other)

    def meanwhile() -> None:
        if len(rig.others.asked) == 5:  # between the two passes
            other.cutting(5)()
            add(other, b"another one")

    rig.others.meanwhile = meanwhile
    rig.damaged(5, 8)
    assert not rig.mended and mine.files.pair_of(5).read_entry(5) is None


def test_a_range_with_more_damage_right_behind_it_is_proven_by_nothing() -> None:
    mine = replica()
    for log_id in range(5, 8):
        damage(mine, log_id, entry=True)
    rig = RepairerRig(mine, a=replica())
    rig.damaged(5, 7)
    assert not rig.mended and not rig.tasks[0].done(), "it is tried again"
    rig.damaged(5, 8)  # whoever found the rest tells the whole
    rig.pass_time()
    assert verifies(mine) and (5, 8) in rig.mended


def test_what_one_replica_lacks_another_one_gives() -> None:
    """Each has damage of its own: none has all of the range."""
    mine, a, b = replica(), replica(), replica()
    for log_id in range(4, 8):
        damage(mine, log_id)
    damage(a, 6)
    damage(b, 4)
    rig = RepairerRig(mine, a=a, b=b)
    rig.damaged(4, 8)
    assert verifies(mine) and rig.mended == [(4, 8)]


def test_what_others_gave_up_mends_nothing() -> None:
    mine, other = replica(), replica()
    for log in (mine, other):
        damage(log, 5)
    other.repair.giving_up(5, 6)()
    rig = RepairerRig(mine, a=other)
    rig.damaged(5, 6)
    assert not rig.mended and not mine.entry(5).flags & LOST


def test_what_retention_has_gone_past_is_not_asked_of_the_leader() -> None:
    mine = replica()
    damage(mine, 2)
    roll(mine)
    start = mine.end.log_id
    mine.forget_pairs(mine.end)
    rig = RepairerRig(mine, a=replica())
    task = rig.loop.create_task(rig.repairer.mend_as_leader(KEY, mine, "a", 1, 2, 3))
    rig.loop.turn()
    assert mine.start.log_id == start and task.done() and task.exception() is None and not rig.others.asked
