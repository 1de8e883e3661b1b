"""Damage that recovery found where nobody may lead: mended from one another, or given up, as an operator says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nsqha.commitlog import copying
from nsqha.commitlog.journal import inspect
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.storage import MemStorage
from nsqha.cursor.events import EpochStart
from nsqha.errors import LogCorrupt, NotFound, Unavailable
from nsqha.frames import HAS_EVENTS
from nsqha.pb.v1 import replication_pb2 as pb
from tests.unit.server.replica_rig import (
    KEY,
    REGISTRATION,
    A,
    LeaderStream,
    ReplicaRig,
    add,
    copy_of,
    followed,
    log_of,
    pause,
    run,
    serving,
)

COMMITTED = 8
SEGMENT, COMMITLOG = (f"data/topics/t-0000000000000051/0/{0:020}.{kind}" for kind in ("segment", "commitlog"))


async def member(storage: MemStorage, leader: PartitionLog | None = None) -> tuple[int, PartitionLog]:
    """A member of the ISR dies with nine batches; the name of its log, and that of its leader."""
    rig = ReplicaRig(storage)
    stream, _ = await followed(rig)
    leader = leader or log_of(*[1] * 9)
    stream.push(1, leader, 1, committed=COMMITTED)
    await pause()
    log_uid = rig.follower.log_uid
    rig.opener.stage_durable(KEY, rig.follower.log)
    await rig.writer.promise()
    stream.close()
    rig.journal.close()
    return log_uid, leader


def damage(storage: MemStorage, leader: PartitionLog, log_id: int) -> None:
    """A batch with its entry: of what is known to be durable a restart reads only entries."""
    entry = leader.entry(log_id)
    storage.open(SEGMENT).pwrite(b"\xff\xff", entry.position + 3)
    storage.open(COMMITLOG).pwrite(b"\xff", 80 * log_id + 50)


async def back(storage: MemStorage, log_uid: int) -> ReplicaRig:
    """The node starts again; nobody leads, as all members have damage."""
    rig = ReplicaRig(storage)
    record = rig.record(leader=A, epoch=1, isr={A: 5, rig.node: log_uid})
    await rig.replicas.recover(record)
    await rig.settle(record)
    return rig


async def damaged(*log_ids: int) -> tuple[ReplicaRig, PartitionLog, int]:
    """The member is back with damage in these batches; the log of its leader, and the name that its own one had."""
    storage = MemStorage()
    log_uid, leader = await member(storage)
    for log_id in log_ids:
        damage(storage, leader, log_id)
    return await back(storage, log_uid), leader, log_uid


def has(log: PartitionLog, *without: int) -> Callable[[str, Any], Any]:
    """Another replica that leads nothing."""

    def answer(method: str, request: Any) -> Any:
        if request.epoch or request.first >= log.end.log_id:
            raise NotFound("not here")
        if request.first in without:
            raise LogCorrupt("damaged here, too")
        run = copying.read_run(log, request.first, min([request.end, *(n for n in without if n > request.first)]), 999)
        return pb.FetchReply(entries=run.entries, data=run.data, committed=COMMITTED, end=log.end.log_id)

    return answer


async def house(rig: ReplicaRig, seconds: float = 3.0) -> None:
    for _ in range(int(seconds * 2)):
        rig.replicas.keep_house()
        await pause(0.5)


async def status(rig: ReplicaRig) -> Any:
    """What its replica says of itself."""
    reply = await rig.replicas.answers.status(None, pb.StatusRequest(cluster_id=9))  # type: ignore[arg-type]
    return reply.replicas[0]


def test_a_log_whose_damage_others_mend_goes_by_its_old_name_again() -> None:
    """So it can be elected, though no member of the ISR was without damage."""

    async def scenario() -> None:
        rig, leader, log_uid = await damaged(5)
        told = await status(rig)
        assert told.corrupt and told.log_uid != log_uid
        assert [(d.first, d.end, d.first_offset, d.end_offset) for d in told.damage] == [(5, 6, 4, 5)]
        rig.peers.serves = has(leader)
        await house(rig)
        told = await status(rig)
        assert not told.corrupt and told.log_uid == log_uid and not told.damage
        record = rig.journal.record(KEY)
        assert record is not None and record.log_uid == log_uid and record.local_durable == 10
        state: Any = rig.follower.applier.state
        assert state is not None and rig.follower.log.read(leader.entry(5)) == leader.read(leader.entry(5))
        rig.journal.close()
        again = await back(rig.storage, log_uid)
        assert again.follower.log_uid == log_uid and not again.errors

    run(scenario)


def test_a_log_not_mended_before_a_restart_may_still_win_its_old_name() -> None:
    """Else what only this replica has would never be offered again, once the others could mend its damage."""

    async def scenario() -> None:
        storage = MemStorage()
        log_uid, leader = await member(storage)
        damage(storage, leader, 5)
        for _ in range(2):
            rig = await back(storage, log_uid)
            await house(rig)
            told = await status(rig)
            assert told.corrupt and told.log_uid != log_uid
            rig.journal.close()
        rig = await back(storage, log_uid)
        rig.peers.serves = has(leader)
        await house(rig)
        told = await status(rig)
        assert not told.corrupt and told.log_uid == log_uid and not told.damage

    run(scenario)


def test_a_damaged_log_that_a_leader_took_on_has_lost_its_old_name_durably() -> None:
    """From there on that log counts: it may cut, or have marked as lost, what the ISR counts on by that name."""

    async def scenario() -> None:
        rig, leader, log_uid = await damaged(5)
        assert (await rig.leader(A).open(1, leader, start=1)).behind
        record = inspect(rig.storage, "data").partitions[KEY]
        assert record.log_uid == rig.follower.log_uid != log_uid

    run(scenario)


def test_channels_unreadable_at_a_start_are_mended_without_a_leader() -> None:
    """They are below what is known to be durable, where a start looks at no frames but theirs."""

    async def scenario() -> None:
        storage, leader = MemStorage(), log_of()
        events = EpochStart(1, A).encode()
        leader.append(bytearray(events), count=0, flags=HAS_EVENTS, timestamp_ns=1, epoch=1, durable=0)
        for _ in range(8):
            add(leader, 1, b"m", durable=COMMITTED)
        log_uid, _ = await member(storage, leader)
        storage.open(SEGMENT).pwrite(b"\xff", 3)
        rig = await back(storage, log_uid)
        assert rig.follower.applier.state is None and (await status(rig)).corrupt
        rig.peers.serves = has(leader)
        await house(rig)
        state: Any = rig.follower.applier.state
        assert state is not None and state.epoch == 1 and not (await status(rig)).corrupt

    run(scenario)


def test_a_log_of_which_a_part_stays_damaged_does_not_get_its_name_back() -> None:
    async def scenario() -> None:
        rig, leader, log_uid = await damaged(5, 8)
        rig.peers.serves = has(leader, 8)
        await house(rig)
        told = await status(rig)
        assert told.corrupt and told.log_uid != log_uid and [(d.first, d.end) for d in told.damage] == [(8, 9)]

    run(scenario)


def test_a_log_that_lost_its_end_does_not_get_its_name_back() -> None:
    async def scenario() -> None:
        storage = MemStorage()
        log_uid, leader = await member(storage)
        damage(storage, leader, 5)
        storage.open(COMMITLOG).truncate(80 * 9)
        rig = await back(storage, log_uid)
        rig.peers.serves = has(leader)
        await house(rig)
        told = await status(rig)
        assert told.corrupt and told.log_uid != log_uid and [(d.first, d.end) for d in told.damage] == [(9, 10)]

    run(scenario)


async def elected(rig: ReplicaRig, log_uid: int = 0, *, epoch: int = 2, accepted: int = 0) -> None:
    """`log_uid`: if it is not what the log is called now; `accepted`: the epoch for which an operator said so."""
    isr = {rig.node: log_uid or rig.follower.log_uid}
    meta = {"min_isr": 1, "damage_accepted": accepted}
    await rig.settle(rig.record(leader=rig.node, epoch=epoch, isr=isr, registration=REGISTRATION, **meta))
    await pause(0.5)


def test_it_leads_in_spite_of_damage_only_if_an_operator_said_so_for_this_epoch() -> None:
    async def scenario() -> None:
        rig, leader, _ = await damaged(5)
        await elected(rig)
        assert KEY not in rig.replicas.leading and not rig.follower.log.entry(5).lost
        await elected(rig, epoch=3, accepted=2)
        assert KEY not in rig.replicas.leading
        await elected(rig, epoch=4, accepted=4)
        leadership = rig.replicas.leading[KEY]
        await pause(0.5)
        assert leadership.log.entry(5).lost and leadership.partition.serving and not rig.errors
        assert leadership.log.read(leadership.log.entry(6)) == leader.read(leader.entry(6))
        told = await status(rig)
        assert not told.corrupt and [(d.first, d.end) for d in told.damage] == [(5, 6)]

    run(scenario)


def test_one_that_was_elected_leads_once_it_is_mended() -> None:
    """The record stays as it is, and the next election is seconds away."""

    async def scenario() -> None:
        rig, leader, log_uid = await damaged(5)
        await elected(rig, log_uid)
        await house(rig)
        assert KEY not in rig.replicas.leading
        rig.peers.serves = has(leader)
        rig.replicas.nodes_changed()
        await house(rig)
        assert rig.replicas.leading[KEY].epoch == 2

    run(scenario)


def test_what_another_replica_has_is_not_given_up() -> None:
    async def scenario() -> None:
        rig, leader, _ = await damaged(3, 5)
        rig.peers.serves = has(leader, 5)
        await elected(rig, accepted=2)
        log = rig.replicas.leading[KEY].log
        assert log.entry(5).lost and log.read(log.entry(3)) == leader.read(leader.entry(3))

    run(scenario)


def test_what_was_given_up_is_taken_when_somebody_comes_back_with_it() -> None:
    async def scenario() -> None:
        rig, leader, _ = await damaged(5)
        await elected(rig, accepted=2)
        log = rig.replicas.leading[KEY].log
        assert log.entry(5).lost
        assert await rig.replicas.integrity.mark_lost.give_up(KEY) == [], "once is enough"
        assert rig.replicas.integrity.corrupt.known(KEY) == [(5, 6)]
        await house(rig, 1)
        rig.peers.serves = has(leader)
        await house(rig, 31)
        assert log.entry(5) == leader.entry(5) and log.read(log.entry(5)) == leader.read(leader.entry(5))
        assert not (await status(rig)).damage

    run(scenario)


def leads(log: PartitionLog, epoch: int) -> Callable[[str, Any], Any]:
    """A leader that has given up what is marked."""
    others = serving(log, epoch)

    def answer(method: str, request: Any) -> Any:
        if method != "Fetch" or not request.epoch:
            return has(log, *(n for n in range(1, log.end.log_id) if log.entry(n).lost))(method, request)
        if request.epoch != epoch:
            raise Unavailable("another epoch")
        end = request.end or log.end.log_id
        if request.first >= end:
            return pb.FetchReply(end=log.end.log_id)
        run = copying.read_run(log, request.first, end, request.max_bytes, lost=True)
        return pb.FetchReply(entries=run.entries, data=run.data, committed=COMMITTED, end=log.end.log_id)

    return lambda method, request: others(method, request) if method == "EpochEnd" else answer(method, request)


def lost(log: PartitionLog, log_id: int, *, entry_too: bool = False) -> PartitionLog:
    """The same log, of a leader who gave a batch up."""
    other = copy_of(log, log.end.log_id)
    other.shelf.clear()
    entry, pair = other.entry(log_id), other.files.pair_of(log_id)
    pair.segment.pwrite(b"\xff\xff", entry.position - pair.position + 3)
    if entry_too:
        pair.commitlog.pwrite(b"\xff", pair.slot(log_id) + 50)
    assert other.repair.giving_up(log_id, log_id + 1)() == [(log_id, log_id + 1)]
    return other


async def asked(rig: ReplicaRig, leader: PartitionLog, serves: Callable[..., Any], seconds: float = 1) -> LeaderStream:
    """A leader of epoch 1 opens a stream, and serves what it is asked for."""
    rig.peers.serves = serves
    stream = rig.leader(A)
    stream.ask(1, leader)
    await pause(seconds)
    return stream


def test_a_follower_gets_what_was_given_up_as_lost_and_goes_on_behind_it() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        leader = lost(log_of(*[1] * 9), 5)
        stream = await asked(rig, leader, leads(leader, 1))
        assert rig.follower.log.end == leader.end and rig.follower.log.entry(5).lost and not rig.follower.behind
        stream.push(1, log_of(*[1] * 10), 10, committed=11)
        await pause()
        state: Any = rig.follower.applier.state
        assert (
            state is not None and state.applied.log_id == 10 and rig.replicas.integrity.corrupt.known(KEY) == [(5, 6)]
        )

    run(scenario)


def test_a_replica_with_damage_of_its_own_keeps_what_its_leader_has_lost() -> None:
    """It would be cut off with the rest behind its own damage: the last good copy."""

    async def scenario() -> None:
        rig, good, _ = await damaged(3)
        leader = lost(good, 5)
        await asked(rig, leader, leads(leader, 1))
        log = rig.follower.log
        assert not rig.follower.behind and not list(rig.replicas.integrity.corrupt.known(KEY))
        assert [log.read(log.entry(n)) for n in range(1, 10)] == [good.read(good.entry(n)) for n in range(1, 10)]

    run(scenario)


@pytest.mark.parametrize("entry_too", [False, True])
@pytest.mark.parametrize("log_id", [3, 8])
def test_a_replica_marks_the_damage_that_its_leader_gave_up_and_keeps_the_rest(entry_too: bool, log_id: int) -> None:
    """Also right before the last batch, of which a leader without other members does not know whether it is committed:
    it waits for this one."""

    async def scenario() -> None:
        rig, good, _ = await damaged(log_id)
        before, past = rig.follower.log, rig.follower.log.past
        leader = lost(good, log_id, entry_too=entry_too)
        await asked(rig, leader, leads(leader, 1))
        log = rig.follower.log
        assert log is before and log.past is past, "nothing was cut"
        assert log.entry(log_id) == leader.entry(log_id) and log.entry(log_id).lost and not rig.follower.behind
        assert rig.replicas.integrity.suspects.unsound_from(KEY) is None
        assert rig.replicas.integrity.corrupt.known(KEY) == [(log_id, log_id + 1)]
        assert (await status(rig)).corrupt is False

    run(scenario)


def test_a_replica_waits_where_its_leader_has_damage_too_and_nobody_has_decided() -> None:
    """The one may have what the other lacks behind it; nothing is cut."""

    async def scenario() -> None:
        rig, good, _ = await damaged(3)

        def serves(method: str, request: Any) -> Any:
            if method == "Fetch" and request.first == 3:
                raise LogCorrupt("damaged here, too")
            return leads(good, 1)(method, request)

        await asked(rig, good, serves, 5)
        assert rig.follower.log.end == good.end and rig.follower.behind

    run(scenario)
