"""What is held against a log: an end that recovery cut, until all that counts has come again; the name it goes by."""

from __future__ import annotations

from typing import Any

from nsqha.ranges import RangeSet
from nsqha.server.integrity.suspect_logs import Doubted
from tests.unit.server.replica_rig import (
    KEY,
    REGISTRATION,
    A,
    ReplicaRig,
    fit_to_lead,
    log_of,
    pause,
    run,
)


async def cut(rig: ReplicaRig) -> tuple[Any, Any, Any]:
    """A member with two of its leader's five batches, since recovery cut the end of what it had."""
    await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
    log = log_of(1, 2, 2, 2, 2)
    stream = rig.leader(A)
    await stream.open(2, log_of())
    stream.push(2, log, 1, 3)
    await pause()
    rig.replicas.integrity.suspects._cut.add(KEY)
    stream.take()
    return rig.leader(A), log, stream


def test_a_cut_end_counts_as_cut_until_all_that_is_committed_is_back() -> None:
    """Then an election need not wait for others that might have more."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log, _ = await cut(rig)
        opened = await stream.open(2, log, start=2)
        assert not opened.behind and rig.replicas.integrity.suspects.doubts(KEY) == (True, False), "the leader has more"
        stream.push(2, log, 3, 5, committed=6)
        await pause()
        assert rig.replicas.integrity.suspects.doubts(KEY) == (True, False), "one committed batch is still missing"
        stream.push(2, log, 5, committed=6)
        await pause()
        stream.close()  # elections are held when the leader is gone
        assert rig.replicas.integrity.suspects.doubts(KEY) == (False, False)

    run(scenario)


def test_what_a_new_leader_knows_to_be_committed_is_not_all_that_is() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log, _ = await cut(rig)
        await stream.open(2, log, start=5)  # all before its epoch may be committed, though it knows of little
        stream.push(2, log, 3, 4, committed=2)
        await pause()
        assert rig.replicas.integrity.suspects.doubts(KEY) == (True, False)
        stream.push(2, log, 4, 5, committed=2)
        await pause()
        assert rig.replicas.integrity.suspects.doubts(KEY) == (False, False)

    run(scenario)


def test_the_log_of_a_leader_is_whole_whatever_was_cut_before() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        rig.replicas.integrity.suspects._cut.add(KEY)
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION))
        assert KEY in rig.replicas.leading and rig.replicas.integrity.suspects.doubts(KEY) == (False, False)

    run(scenario)


def test_a_log_whose_doubtful_end_was_cut_off_never_goes_by_its_old_name() -> None:
    """It is shorter than what the ISR counts on, also when all that was damaged in it is mended later."""

    async def scenario() -> None:
        rig = ReplicaRig()
        trust, told = rig.replicas.integrity.suspects, []
        trust.on_whole = lambda key, name: told.append(name)
        for cut_off in (False, True):
            trust._doubted[KEY] = Doubted(2, 5, RangeSet([(2, 4)]))
            if cut_off:
                trust.cut_off(KEY)
            rig.replicas.integrity.corrupt.mended(KEY, 2, 4)
        assert told == [5, 0]

    run(scenario)
