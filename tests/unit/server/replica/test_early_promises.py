"""Promises are journalled as soon as a record shows their epoch, while others read and ask; they count once durable."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nsqha.errors import AppendFailed
from nsqha.pb.v1 import replication_pb2 as pb
from tests.fakes import metadata
from tests.unit.server.replica_rig import (
    KEY,
    REGISTRATION,
    A,
    B,
    ReplicaRig,
    fit_to_lead,
    followed,
    pause,
    promised,
    run,
)


async def left_behind(rig: ReplicaRig) -> Any:
    """A follower whose leader is gone, and that one's log."""
    stream, log = await followed(rig)
    stream.close()
    return log


def test_who_is_elected_promises_while_it_reads_the_record_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        isr = {rig.node: await fit_to_lead(rig), A: 5}
        monkeypatch.setattr(metadata, "SECONDS", 0.5)
        rig.replicas.begin_to_settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        await pause()
        assert promised(rig) == 2 and not rig.replicas.leading
        rig.disk.hold()
        await pause(1)
        assert rig.replicas.leading[KEY].epoch == 2, "no other promise is written"
        rig.disk.release()

    run(scenario)


def test_a_promise_of_an_epoch_that_is_over_keeps_nobody_from_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        isr = {rig.node: log_uid, A: 5}
        monkeypatch.setattr(metadata, "SECONDS", 0.5)
        rig.replicas.begin_to_settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        await pause()
        later = rig.record(leader=rig.node, epoch=3, isr=isr, registration=REGISTRATION)
        await pause(1)
        assert rig.replicas.leading[KEY].epoch == 3 and promised(rig) == 3, "the record says so by now"
        rig.replicas.begin_to_settle(later)
        await pause(1)
        assert rig.replicas.leading[KEY].epoch == 3

    run(scenario)


@pytest.mark.parametrize("wrong", ["life", "log"])
def test_who_can_not_lead_promises_nothing(wrong: str) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        isr = {rig.node: await fit_to_lead(rig) + (wrong == "log"), A: 5}
        life = REGISTRATION - (wrong == "life")
        before = promised(rig)
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=life))
        assert promised(rig) == before and not rig.replicas.leading

    run(scenario)


def test_a_follower_has_promised_when_the_next_leader_asks() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log = await left_behind(rig)
        rig.replicas.begin_to_settle(rig.record(leader=B, epoch=2, isr={B: 6}))
        assert not rig.tasks, "nothing waits for it"
        await pause()
        assert promised(rig) == 2
        rig.disk.hold()
        rig.journal.stage((1, 0), promise=1, log_uid=1, local_durable=0)  # of another partition, not durable yet
        other = rig.leader(B)
        other.ask(2, log)
        await pause()
        assert other.opened[0].epoch == 2
        rig.disk.release()

    run(scenario)


def test_an_answer_waits_for_the_promise_that_is_being_written() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log = await left_behind(rig)
        rig.disk.hold()
        rig.replicas.begin_to_settle(rig.record(leader=B, epoch=2, isr={B: 6}))
        other = rig.leader(B)
        other.ask(2, log)
        await pause()
        assert not other.opened and promised(rig) == 1
        rig.disk.release()
        await pause()
        assert other.opened[0].epoch == 2 and promised(rig) == 2

    run(scenario)


def test_a_promise_that_could_not_be_written_is_written_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log = await left_behind(rig)

        def full(*_: Any) -> None:
            raise AppendFailed("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(rig.journal._file, "_store", full)
            rig.replicas.begin_to_settle(rig.record(leader=B, epoch=2, isr={B: 6}))
            await pause()
            other = rig.leader(B)
            refused = await other.open(2, log)
            assert refused.DESCRIPTOR.name == "Refused" and promised(rig) == 1
        opened = await other.open(2, log)
        assert opened.DESCRIPTOR.name == "Opened" and promised(rig) == 2

    run(scenario)


def test_nothing_is_promised_unasked_while_the_last_leader_is_there() -> None:
    """It may hand over: then it commits its last words with this node."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log = await followed(rig)
        rig.replicas.begin_to_settle(rig.record(leader=B, epoch=2, isr={B: 6}))
        await pause()
        assert promised(rig) == 1 and rig.follower.leader_log.early is None
        answer = await rig.leader(B).open(2, log)
        assert answer.DESCRIPTOR.name == "Opened" and promised(rig) == 2
        assert [(r.epoch, r.refusal) for r in stream.refused] == [(1, pb.REFUSAL_FENCED)]

    run(scenario)


def test_an_old_leader_that_comes_back_finds_the_promise() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log = await left_behind(rig)
        rig.replicas.begin_to_settle(rig.record(leader=B, epoch=2, isr={B: 6}))
        answer = await asyncio.wait_for(rig.leader(A).open(1, log), 5)
        assert (answer.refusal, answer.promised) == (pb.REFUSAL_FENCED, 2)

    run(scenario)
