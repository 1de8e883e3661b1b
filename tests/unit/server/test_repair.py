"""A node mends its copy of a committed range from whoever has it, and goes on asking until somebody does."""

from __future__ import annotations

from typing import Any

from nsqha.commitlog import copying
from nsqha.commitlog.log import PartitionLog
from nsqha.errors import LogCorrupt, Unavailable
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.repair import RETRY_SECONDS, Repairer
from tests.unit.commitlog.test_mend import damage, replica
from tests.unit.server.shell_rig import ManualClock, ManualLoop

KEY = (9, 2)


class Others:
    """Nodes by address; None: nobody answers there."""

    def __init__(self, **logs: PartitionLog | None) -> None:
        self.logs = logs
        self.asked: list[str] = []

    async def call(self, address: str, method: str, request: pb.FetchRequest, *, timeout: float) -> Any:
        assert (method, request.epoch, request.cluster_id) == ("Fetch", 0, 77)
        self.asked.append(address)
        log = self.logs[address]
        if log is None:
            raise Unavailable("no connection")
        run = copying.read_run(log, request.first, request.end, 150)  # small answers: several are needed
        return pb.FetchReply(entries=run.entries, data=run.data)


class Rig:
    def __init__(self, mine: PartitionLog | None, **logs: PartitionLog | None) -> None:
        self.loop = ManualLoop(ManualClock())
        self.others = Others(**logs)
        self.mended: list[tuple[int, int]] = []
        self.mine = mine
        self.repairer = Repairer(
            self.others,  # type: ignore[arg-type]
            cluster_id=77,
            log_of=lambda key: self.mine,
            others=lambda key: list(logs),
            mended=self.mended.append,
            spawn=lambda work: self.tasks.append(self.loop.create_task(work)),
        )
        self.tasks: list[Any] = []

    def damaged(self, first: int, end: int) -> None:
        self.repairer.damaged(KEY, first, end)
        self.loop.turn()


def verifies(log: PartitionLog) -> bool:
    try:
        return all(log.read(log.entry(log_id)) for log_id in range(log.start.log_id, log.end.log_id))
    except LogCorrupt:
        return False


def test_a_range_is_fetched_in_pieces_and_written_where_it_was() -> None:
    mine = replica()
    for log_id in range(4, 8):
        damage(mine, log_id)
    rig = Rig(mine, a=replica())
    rig.damaged(4, 8)
    assert verifies(mine) and rig.mended == [KEY] and len(rig.others.asked) == 4


def test_who_has_another_log_or_the_same_damage_or_is_away_is_passed_over() -> None:
    mine, same = replica(), replica()
    damage(mine, 5)
    damage(same, 5)
    rig = Rig(mine, away=None, other=replica(seed=2), same=same, good=replica())
    rig.damaged(5, 6)
    assert verifies(mine) and rig.mended == [KEY]
    assert rig.others.asked == ["away", "other", "same", "good"]


def test_it_is_tried_again_until_somebody_has_it() -> None:
    mine = replica()
    damage(mine, 5)
    rig = Rig(mine, a=None)
    rig.damaged(5, 6)
    rig.damaged(5, 6)  # found again meanwhile: one repair at a time
    assert rig.others.asked == ["a"] and not rig.mended
    rig.others.logs["a"] = replica()
    rig.loop.pass_time(RETRY_SECONDS + 1)
    assert verifies(mine) and rig.mended == [KEY] and rig.others.asked == ["a", "a"]


def test_it_ends_when_the_partition_is_gone() -> None:
    mine = replica()
    damage(mine, 5)
    rig = Rig(mine, a=None)
    rig.damaged(5, 6)
    rig.mine = None
    rig.loop.pass_time(RETRY_SECONDS + 1)
    assert rig.others.asked == ["a"] and rig.tasks[0].done() and not rig.loop.errors
