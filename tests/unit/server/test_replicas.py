"""Roles of this node's replicas: promises before answers, one role at a time, and files that fit the journal."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.election.model import ChannelList, PartitionMeta
from nsqha.errors import AppendFailed
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import PeerIdentity
from tests.sim.storage import SimStorage
from tests.unit.server.replica_rig import (
    CLUSTER,
    KEY,
    REGISTRATION,
    A,
    B,
    ReplicaRig,
    add,
    copy_of,
    log_of,
    pause,
    run,
    serving,
)


async def followed(rig: ReplicaRig, epoch: int = 1) -> tuple[Any, Any]:
    """A follower of A, in sync, and A's stream and log."""
    await rig.settle(rig.record(leader=A, epoch=epoch, isr={A: 5}))
    log_ = log_of()
    stream = rig.leader(A)
    opened = await stream.open(epoch, log_)
    assert opened.DESCRIPTOR.name == "Opened" and not opened.behind
    return stream, log_


def promised(rig: ReplicaRig) -> int:
    """What a start would find now."""
    from nsqha.commitlog.journal import inspect

    found = [r for key, r in inspect(rig.storage, "data").partitions.items() if tuple(key) == KEY]
    return found[0].promise if found else 0


# ---- promises


def test_a_log_that_the_record_names_and_nobody_made_is_made_under_that_name() -> None:
    """Killed between the record of a new topic and its log: below the floor nothing can have been acknowledged."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=rig.node, epoch=1, isr={rig.node: 0xABC}, nothing_acked=True))
        follower = rig.replicas.followers[KEY]
        assert follower.log_uid == 0xABC and follower.epoch == 1  # of an earlier life: only a new epoch can be led

    run(scenario)


def test_a_floor_that_was_raised_after_messages_were_acknowledged_makes_no_log_forgettable() -> None:
    """Acknowledged with min_isr=1, then min_isr=2, then the data directory of before the topic: they are not here."""

    async def scenario() -> None:
        rig = ReplicaRig()
        created = PartitionMeta(leader=rig.node, isr={rig.node: 0xABC}, min_isr=1, nothing_acked=True)
        raised = replace(created, min_isr=2)
        await rig.settle(rig.record(leader=rig.node, epoch=1, isr=raised.isr, nothing_acked=raised.nothing_acked))
        assert rig.replicas.followers[KEY].log_uid != 0xABC

    run(scenario)


@pytest.mark.parametrize("change", [{"nothing_acked": False}, {"min_isr": 1}, {"epoch": 2}, {"others": {A: 5}}])
def test_a_log_that_may_have_had_something_acknowledged_gets_another_name(change: dict[str, Any]) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        others = change.get("others", {})
        meta = {"leader": A, "epoch": 1, "nothing_acked": True}
        meta |= {key: value for key, value in change.items() if key != "others"}
        await rig.settle(rig.record(isr={rig.node: 0xABC} | others, **meta))
        assert rig.replicas.followers[KEY].log_uid != 0xABC

    run(scenario)


def test_files_go_only_if_the_record_as_it_is_now_names_this_node_no_more() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await followed(rig)
        old = rig.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B))
        rig.record(leader=A, epoch=1, isr={A: 5})  # moved back before the watch told of the move
        await rig.settle(old)
        assert KEY in rig.replicas.followers
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B)))
        assert KEY not in rig.replicas.followers

    run(scenario)


def test_files_that_went_are_gone_for_good() -> None:
    """The record of their deletion goes next: nobody would look for them again after a power loss."""

    async def scenario() -> None:
        storage = SimStorage()
        rig = ReplicaRig(storage)
        await followed(rig)
        assert any("/topics/" in path for path in storage.contents())
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B)))
        for seed in range(10):
            assert not any("/topics/" in path for path in storage.crash(random.Random(seed)).contents())

    run(scenario)


def test_files_of_a_replica_that_was_moved_away_while_its_node_was_down_go() -> None:
    async def scenario() -> None:
        rig = ReplicaRig(SimStorage())
        await followed(rig)
        await rig.replicas.followers.pop(KEY).close()  # as if this process had begun now
        moved = rig.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B))
        await rig.replicas.recover(moved)
        assert not rig.replicas.followers and rig.opener.has_files(moved.record, 0), "by a linearizable read only"
        await rig.settle(moved)
        assert not rig.opener.has_files(moved.record, 0) and not rig.opener.knows(KEY)

    run(scenario)


def test_a_damaged_end_is_not_led() -> None:
    async def scenario() -> None:
        rig = ReplicaRig(SimStorage())
        log_uid = await fit_to_lead(rig)
        follower = rig.follower
        for body in (b"a", b"b"):
            add(follower.log, 1, body)
        path = next(path for path in rig.storage.contents() if path.endswith(".commitlog"))
        rig.storage.flip(path, 8 * (2 * ENTRY_BYTES + 10))
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        await rig.settle(record)
        assert not rig.replicas.leading and KEY in rig.replicas.followers
        assert rig.replicas.doubts(KEY) == (False, True)

    run(scenario)


def test_the_promise_is_durable_before_the_answer() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log_ = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        other = rig.leader(B)
        rig.disk.gate.clear()
        other.ask(2, log_)
        await pause()
        assert not other.opened and promised(rig) == 1
        rig.disk.gate.set()
        await pause()
        assert other.opened[0].epoch == 2 and promised(rig) == 2

    run(scenario)


def test_nothing_of_the_old_leader_is_taken_while_the_promise_is_written() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log_ = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        other = rig.leader(B)
        rig.disk.gate.clear()
        other.ask(2, log_)
        await pause()
        stream.take()
        other.close()  # the new leader is never answered, but the promise stands
        rig.disk.gate.set()
        await pause()
        add(log_, 1, b"late")
        stream.push(1, log_, 1)
        await pause()
        assert promised(rig) == 2 and not stream.acks
        assert stream.refused[0].refusal == pb.REFUSAL_FENCED and rig.follower.log.end.log_id == 1

    run(scenario)


def test_a_promise_that_could_not_be_written_is_written_before_the_next_answer(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log_ = await followed(rig)
        rig.record(leader=B, epoch=2, isr={B: 6})
        other = rig.leader(B)
        write = rig.journal._store

        def full(*_: Any) -> None:
            raise AppendFailed("disk full")

        monkeypatch.setattr(rig.journal, "_store", full)
        refused = await other.open(2, log_)
        assert refused.refusal == pb.REFUSAL_UNKNOWN
        refused = await other.open(2, log_)
        assert refused.DESCRIPTOR.name == "Refused", "answered on the account of a promise that is not durable"
        monkeypatch.setattr(rig.journal, "_store", write)
        opened = await other.open(2, log_)
        assert opened.DESCRIPTOR.name == "Opened" and promised(rig) == 2

    run(scenario)


def test_housekeeping_that_takes_the_files_while_a_promise_is_written_stops_no_catch_up() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        _stream, log_ = await followed(rig)
        add(log_, 1, b"one")
        rig.record(leader=B, epoch=2, isr={B: 6})
        rig.peers.serves = serving(log_, 2)
        other = rig.leader(B)
        rig.disk.gate.clear()
        other.ask(2, log_)
        await pause()
        rig.follower.exclusively(rig.follower._roll())
        rig.disk.gate.set()
        await pause(1)
        assert not rig.errors
        assert [opened.behind for opened in other.opened] == [True, False]

    run(scenario)


def test_a_stale_leader_is_fenced() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log_ = await followed(rig, epoch=3)
        stale = rig.leader(B)
        refused = await stale.open(2, log_)
        assert refused.refusal == pb.REFUSAL_FENCED and refused.promised == 3
        add(log_, 3, b"one")
        stream.push(3, log_, 1)
        await pause()
        assert stream.acks[-1].end == 2, "the one it follows goes on"

    run(scenario)


def test_an_open_that_the_metadata_does_not_confirm_is_refused() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
        liar = rig.leader(B)
        refused = await liar.open(2, log_of())
        assert refused.refusal == pb.REFUSAL_UNKNOWN
        refused = await liar.open(9, log_of())
        assert refused.refusal == pb.REFUSAL_UNKNOWN
        assert promised(rig) < 9

    run(scenario)


# ---- catch-up and its files


async def diverged(rig: ReplicaRig) -> tuple[Any, Any, Any]:
    """A follower with batches of epoch 1 that the leader of epoch 2 does not have."""
    stream, old = await followed(rig)
    for _ in range(4):
        add(old, 1, b"old")
    stream.push(1, old, 1)
    await pause()
    assert rig.follower.log.end.log_id == 5
    new = copy_of(old, 3)
    for _ in range(4):
        add(new, 2, b"new")
    rig.record(leader=B, epoch=2, isr={B: 6})
    rig.peers.serves = serving(new, 2)
    return rig.leader(B), old, new


def test_what_the_leader_does_not_have_is_cut_and_what_is_missing_pulled() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _, new = await diverged(rig)
        other.ask(2, new, start=3)
        await pause(1)
        log_ = rig.follower.log
        assert [e.chain for e in log_.entries(1, 99)] == [e.chain for e in new.entries(1, 99)]
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None
        assert [opened.behind for opened in other.opened] == [True, False]
        assert other.opened[-1].end == 7 and not rig.errors

    run(scenario)


def test_a_cut_that_has_begun_ends_though_another_leader_comes() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, old, new = await diverged(rig)
        rig.disk.gate.clear()
        rig.peers.gate.clear()
        other.ask(2, new, start=3)
        await pause()  # the promise waits
        rig.disk.gate.set()
        await pause()
        rig.disk.gate.clear()
        rig.peers.gate.set()
        await pause()  # the intent of the cut is on its way
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is not None
        third = copy_of(old, 5)
        rig.record(leader=A, epoch=3, isr={A: 5})
        stream = rig.leader(A)
        rig.peers.serves = serving(third, 3)
        stream.ask(3, third)
        await pause()
        rig.disk.gate.set()
        await pause(1)
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None, "the next start would cut what was acknowledged since"
        assert rig.follower.log.end.log_id == 5 and not stream.opened[-1].behind

    run(scenario)


def test_a_log_is_cut_off_the_loop_and_ends_there_at_once() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _old, new = await diverged(rig)
        jobs: list[Any] = []
        monitored = rig.disk.run
        rig.disk.run = lambda job: (jobs.append(job), monitored(job))[1]  # type: ignore[method-assign]
        cutting = rig.follower.log.cutting
        cuts: list[Any] = []

        def kept(log_id: int) -> Any:
            cuts.append((log_id, cutting(log_id)))
            rig.disk.gate.clear()
            return cuts[-1][1]

        rig.follower.log.cutting = kept  # type: ignore[method-assign]
        other.ask(2, new, start=3)
        await pause()
        log_ = rig.follower.log
        assert cuts[0][0] == 3 and jobs[-1] is cuts[0][1] and log_.end.log_id == 3
        assert log_.snapshot()._pairs[0].commitlog.size() > log_.entry_before(3).log_id * 80 + 80, "not cut yet"
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is not None
        reply = await rig.replicas.answers.status(PeerIdentity("x"), pb.StatusRequest(cluster_id=CLUSTER))
        assert reply.replicas[0].end == 3 and reply.replicas[0].chain == log_.entry(2).chain
        rig.disk.gate.set()
        await pause(1)
        assert log_.end.log_id == 7 and not rig.errors

    run(scenario)


def test_a_cut_whose_intent_can_not_be_written_is_not_left_for_the_next_start(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _old, new = await diverged(rig)
        other.ask(2, new, start=3)

        staged = rig.journal.stage_cut

        def stage_and_fill(*args: Any) -> None:
            staged(*args)

            def full(*_: Any) -> None:
                raise AppendFailed("disk full")

            monkeypatch.setattr(rig.journal, "_store", full)

        monkeypatch.setattr(rig.journal, "stage_cut", stage_and_fill)
        await pause()
        record = rig.journal.record(KEY)
        assert record is not None and record.cut is None and rig.follower.log.end.log_id == 5
        monkeypatch.undo()
        await pause(2)
        assert rig.follower.log.end.log_id == 7

    run(scenario)


def test_a_disk_that_fails_during_catch_up_ends_the_node() -> None:
    async def scenario() -> None:
        rig = ReplicaRig(SimStorage())
        other, _, new = await diverged(rig)
        rig.storage.fail("sync", "segment")
        other.ask(2, new, start=3)
        await pause(1)
        assert len(rig.failures) == 1, rig.failures

    run(scenario)


def test_a_round_of_before_a_cut_acknowledges_nothing_that_came_after() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, old, new = await diverged(rig)
        add(old, 1, b"late")
        rig.disk.rounds_held = True
        rig.follower.log.append_copy(old.entry(5), old.read(old.entry(5)))
        rig.disk.request(rig.follower)
        rig.disk.begin()
        other.ask(2, new, start=3)
        await pause(1)
        assert rig.follower.log.end.log_id == 7
        rig.disk.end()
        await pause()
        assert other.acks[-1].end == 7 and other.acks[-1].durable <= 3

    run(scenario)


def test_after_catching_up_the_leader_hears_that_it_is_durable_without_another_append() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        other, _, new = await diverged(rig)
        other.ask(2, new, start=3)
        await pause(1)
        assert (other.acks[-1].end, other.acks[-1].durable) == (7, 7)

    run(scenario)


# ---- what recovery cut


async def cut(rig: ReplicaRig) -> tuple[Any, Any, Any]:
    """A member with two of its leader's five batches, since recovery cut the end of what it had."""
    await rig.settle(rig.record(leader=A, epoch=2, isr={A: 5}))
    log_ = log_of(1, 2, 2, 2, 2)
    stream = rig.leader(A)
    await stream.open(2, log_of())
    stream.push(2, log_, 1, 3)
    await pause()
    rig.replicas._cut.add(KEY)
    stream.take()
    return rig.leader(A), log_, stream


def test_an_end_that_was_cut_counts_as_cut_until_all_that_is_committed_has_come_again() -> None:
    """Then an election need not wait for others that might have more."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log_, _ = await cut(rig)
        opened = await stream.open(2, log_, start=2)
        assert not opened.behind and rig.replicas.doubts(KEY) == (True, False), "the leader has more"
        stream.push(2, log_, 3, 5, committed=6)
        await pause()
        assert rig.replicas.doubts(KEY) == (True, False), "one committed batch is still missing"
        stream.push(2, log_, 5, committed=6)
        await pause()
        stream.close()  # elections are held when the leader is gone
        assert rig.replicas.doubts(KEY) == (False, False)

    run(scenario)


def test_what_a_new_leader_knows_to_be_committed_is_not_all_that_is() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        stream, log_, _ = await cut(rig)
        await stream.open(2, log_, start=5)  # all before its epoch may be committed, though it knows of little
        stream.push(2, log_, 3, 4, committed=2)
        await pause()
        assert rig.replicas.doubts(KEY) == (True, False)
        stream.push(2, log_, 4, 5, committed=2)
        await pause()
        assert rig.replicas.doubts(KEY) == (False, False)

    run(scenario)


def test_the_log_of_a_leader_is_whole_whatever_was_cut_before() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        rig.replicas._cut.add(KEY)
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION))
        assert KEY in rig.replicas.leading and rig.replicas.doubts(KEY) == (False, False)

    run(scenario)


# ---- deleted topics


def test_a_record_whose_topic_was_deleted_meanwhile_makes_no_files() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        record = rig.record(leader=A, epoch=1, isr={A: 5})
        rig.topic = None
        await rig.settle(record)
        assert not rig.replicas.followers and rig.journal.record(KEY) is None

    run(scenario)


def test_a_deleted_topic_leaves_by_its_uid_whatever_has_its_name_now() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await followed(rig)
        await rig.replicas.drop(KEY[0] + 1, range(1))
        assert rig.replicas.followers
        await rig.replicas.drop(KEY[0], range(1))
        assert not rig.replicas.followers

    run(scenario)


# ---- leading


async def fit_to_lead(rig: ReplicaRig) -> int:
    """A replica with a log; the name of that log."""
    await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
    return rig.follower.log_uid


def test_it_leads_only_after_the_promise_is_durable() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        rig.disk.gate.clear()
        task = asyncio.ensure_future(rig.settle(record))
        await pause()
        assert not rig.replicas.leading and not rig.topic.led
        rig.disk.gate.set()
        await task
        assert rig.replicas.leading[KEY].epoch == 2 and promised(rig) == 2 and rig.topic.led

    run(scenario)


def test_channels_that_were_made_here_since_the_record_was_read_are_in_the_epoch_start() -> None:
    """Whoever made them read who leads after that, found this node, and asks nobody else."""

    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(
            leader=rig.node, epoch=2, isr={rig.node: log_uid}, registration=REGISTRATION, min_isr=1
        )
        rig.disk.gate.clear()
        task = asyncio.ensure_future(rig.settle(record))
        await pause()
        rig.topic.record = replace(rig.topic.record, channels=ChannelList().with_channel("c", 1))
        rig.disk.gate.set()
        await task
        await pause()
        assert list(rig.replicas.leading[KEY].partition.cursors.channels) == ["c"]

    run(scenario)


@pytest.mark.parametrize("wrong", ["life", "log", "epoch"])
def test_it_does_not_lead_with_another_life_log_or_epoch(wrong: str) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(
            leader=rig.node,
            epoch=1 if wrong == "epoch" else 2,
            isr={rig.node: log_uid + (wrong == "log"), A: 5},
            registration=REGISTRATION - (wrong == "life"),
        )
        await rig.settle(record)
        assert not rig.replicas.leading and KEY in rig.replicas.followers

    run(scenario)


def test_an_epoch_that_was_promised_to_another_is_not_led() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await followed(rig, epoch=2)
        log_uid = rig.follower.log_uid
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid}, registration=REGISTRATION))
        assert not rig.replicas.leading

    run(scenario)


def test_a_promise_that_fails_leaves_a_follower_and_is_tried_again(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        log_ = rig.follower.log

        def full(*_: Any) -> None:
            raise AppendFailed("disk full")

        monkeypatch.setattr(rig.journal, "_store", full)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        await rig.settle(record)
        assert not rig.replicas.leading and rig.follower.log is log_
        monkeypatch.undo()
        await pause(3)
        assert rig.replicas.leading[KEY].epoch == 2, "nobody else would ever lead it"

    run(scenario)


def test_an_election_while_the_metadata_can_not_be_read_is_looked_at_again() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        rig.store.down = True
        await rig.settle(record)
        assert not rig.replicas.leading
        rig.store.down = False
        await pause(3)
        assert rig.replicas.leading[KEY].epoch == 2

    run(scenario)


def test_a_leader_that_is_asked_for_a_higher_epoch_steps_down_first() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        await rig.settle(record)
        await pause()
        partition = rig.replicas.leading[KEY].partition
        assert partition.log.end.log_id == 2
        new = log_of(3)
        rig.record(leader=B, epoch=3, isr={B: 6})
        rig.peers.serves = serving(new, 3)
        other = rig.leader(B)
        other.ask(3, new, start=1)
        await pause(1)
        assert not rig.replicas.leading and partition.closed and not rig.topic.led
        assert [e.epoch for e in rig.follower.log.entries(1, 99)] == [3], "its own start was never committed"
        assert not rig.errors

    run(scenario)


def test_a_follower_has_streams_to_the_other_followers_in_case_it_has_to_lead() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        assert rig.links.prepared == {(B, f"n{B}")}
        rig.links.prepared.clear()
        rig.replicas.nodes_changed()
        assert rig.links.prepared == {(B, f"n{B}")}, "it may be another life, which the last stream did not reach"

    run(scenario)
