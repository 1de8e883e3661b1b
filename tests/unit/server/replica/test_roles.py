"""Roles of this node's replicas: one role at a time, promised before it is taken, and files that fit the record."""

from __future__ import annotations

import asyncio
import errno
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.log import LogLimits
from nsqha.election.model import ChannelList, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.errors import AppendFailed, LogCorrupt
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.partition.partition import Partition
from nsqha.server.replica.leader_roles import ROUND_TICKS, TICKS_MAX, LeaderRoles
from nsqha.server.replica.leading.leadership import Leadership
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import drop_pairs, roll
from tests.unit.server.replica_rig import (
    KEY,
    REGISTRATION,
    UID,
    A,
    B,
    ReplicaRig,
    add,
    fit_to_lead,
    followed,
    log_of,
    pause,
    promised,
    run,
    serving,
)

# ---- which logs there are


def test_a_log_that_the_record_names_and_nobody_made_is_made_under_that_name() -> None:
    """Killed between the record of a new topic and its log: below the floor nothing can have been acknowledged."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=rig.node, epoch=1, isr={rig.node: 0xABC}, nothing_acked=True))
        follower = rig.replicas.followers[KEY]
        assert follower.log_uid == 0xABC and follower.epoch == 1  # of an earlier life: only a new epoch can be led

    run(scenario)


def test_a_floor_raised_after_acknowledgements_makes_no_log_forgettable() -> None:
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
        assert not rig.replicas.followers and rig.opener.folders.exists(moved.record, 0), "by a linearizable read only"
        await rig.settle(moved)
        assert not rig.opener.folders.exists(moved.record, 0) and not rig.opener.knows(KEY)

    run(scenario)


@pytest.mark.parametrize("fails", [False, True])
def test_a_replica_that_is_moved_away_before_it_is_made_does_not_stay(fails: bool, monkeypatch: Any) -> None:
    """The second record names this node no more, and so far nothing shows that it is to have the partition."""

    async def scenario() -> None:
        rig = ReplicaRig(SimStorage())
        named = rig.record(leader=A, epoch=1, isr={A: 5})
        moved = rig.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B))
        if fails:

            def full(*_: object, **__: object) -> None:
                raise OSError(errno.ENOSPC, "full")

            with monkeypatch.context() as patched:
                patched.setattr(rig.storage, "open", full)
                await rig.settle(named)
            await rig.settle(moved)
            await pause(2)
        else:
            await asyncio.gather(rig.settle(named), rig.settle(moved))
        assert KEY not in rig.replicas.followers and not rig.opener.folders.exists(moved.record, 0)
        assert not rig.replicas.table.settling

    run(scenario)


def test_files_that_can_not_go_when_their_replica_was_moved_away_go_later(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig(SimStorage())
        await followed(rig)
        moved = rig.record(leader=A, epoch=1, isr={A: 5}, replicas=(A, B))

        def busy(*_: object) -> None:
            raise OSError(errno.EBUSY, "busy")

        with monkeypatch.context() as patched:
            patched.setattr(rig.storage, "remove", busy)
            await rig.settle(moved)
        assert rig.opener.folders.exists(moved.record, 0)
        await pause(2)
        assert not rig.opener.folders.exists(moved.record, 0) and not rig.errors

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
        assert rig.replicas.integrity.suspects.doubts(KEY) == (False, True)

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
        await rig.replicas.removal.drop(KEY[0] + 1, range(1))
        assert rig.replicas.followers
        await rig.replicas.removal.drop(KEY[0], range(1))
        assert not rig.replicas.followers
        assert not list(rig.replicas.table.locks), "topics come and go for years"

    run(scenario)


# ---- leading


def test_it_leads_only_after_the_promise_is_durable() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        rig.disk.hold()
        task = asyncio.ensure_future(rig.settle(record))
        await pause()
        assert not rig.replicas.leading and not rig.topic.led
        rig.disk.release()
        await task
        assert rig.replicas.leading[KEY].epoch == 2 and promised(rig) == 2 and rig.topic.led

    run(scenario)


def test_who_led_before_hears_that_this_node_leads() -> None:
    """Else it waits for acks: this node takes nothing from it any more, and has no stream to a node without a lease."""

    async def scenario() -> None:
        rig = ReplicaRig()
        stream, _log = await followed(rig)
        isr = {rig.node: rig.follower.log_uid, A: 5}
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        await pause()
        assert rig.replicas.leading[KEY].epoch == 2
        assert [(r.epoch, r.refusal, r.promised) for r in stream.refused] == [(1, pb.REFUSAL_FENCED, 2)]

    run(scenario)


def test_channels_made_here_since_the_record_was_read_are_in_the_epoch_start() -> None:
    """Whoever made them read who leads after that, found this node, and asks nobody else."""

    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid}, registration=REGISTRATION, min_isr=1)
        rig.disk.hold()
        task = asyncio.ensure_future(rig.settle(record))
        await pause()
        record = replace(rig.topic.record, channels=ChannelList().with_channel("c", 1))
        rig.topic.versioned = Versioned(record, 2)
        rig.disk.release()
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
        log = rig.follower.log

        def full(*_: Any) -> None:
            raise AppendFailed("disk full")

        monkeypatch.setattr(rig.journal._file, "_store", full)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        await rig.settle(record)
        assert not rig.replicas.leading and rig.follower.log is log
        monkeypatch.undo()
        await pause(3)
        assert rig.replicas.leading[KEY].epoch == 2, "nobody else would ever lead it"

    run(scenario)


def test_an_election_while_the_metadata_can_not_be_read_is_looked_at_again() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION)
        rig.metadata.away = True
        await rig.settle(record)
        assert not rig.replicas.leading
        rig.metadata.away = False
        await pause(3)
        assert rig.replicas.leading[KEY].epoch == 2

    run(scenario)


@pytest.mark.parametrize("error", [LogCorrupt("it was whole a moment ago"), OSError(errno.EMFILE, "Too many files")])
def test_a_log_that_can_not_be_read_when_its_epoch_is_to_begin_is_followed_on(
    error: Exception, monkeypatch: Any
) -> None:
    """A leadership that never began would pass for one with the controller, and with publishers."""

    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        log = rig.follower.log

        def damaged(*_: Any) -> None:
            raise error

        monkeypatch.setattr(Partition, "start_epoch", damaged)
        isr = {rig.node: log_uid, A: 5}
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        assert not rig.replicas.leading and not rig.topic.led and rig.follower.epoch == 2
        assert rig.follower.log is log, "nobody else has its files"
        monkeypatch.undo()
        await rig.settle(rig.record(leader=rig.node, epoch=3, isr=isr, registration=REGISTRATION))
        assert rig.replicas.leading[KEY].epoch == 3

    run(scenario)


def test_a_log_that_is_begun_anew_while_its_node_is_elected_is_followed_on() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=A, epoch=1, isr={A: 5}))
        trimmed = log_of(1, 1, limits=LogLimits(segment_bytes=1))
        roll(trimmed)
        add(trimmed, 1, b"more")
        drop_pairs(trimmed, trimmed.pairs[0].end)
        rig.peers.serves = serving(trimmed, 1)
        rig.peers.gate.clear()
        stream = rig.leader(A)
        opened = await stream.open(1, trimmed)
        assert opened.behind
        rig.disk.hold()
        rig.peers.gate.set()
        await pause()  # the new name is on its way into the journal
        isr = {rig.node: rig.follower.log_uid, A: 5}
        settling = asyncio.create_task(
            rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        )
        await pause()
        rig.disk.release()
        await settling
        assert not rig.replicas.leading and rig.follower.log.start.log_id == trimmed.start.log_id
        rig.record(leader=A, epoch=3, isr={A: 5})
        rig.peers.serves = serving(trimmed, 3)
        assert (await rig.leader(A).open(3, trimmed)).DESCRIPTOR.name == "Opened"
        await pause(1)
        assert rig.follower.log.end.log_id == trimmed.end.log_id and not rig.errors

    run(scenario)


@pytest.mark.parametrize("what", ["tick", "nodes_changed"])
def test_a_leadership_that_breaks_ends_and_holds_up_no_other(what: str, monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        isr = {rig.node: log_uid, A: 5}
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        broken, seen = rig.replicas.leading[KEY], []

        def step(leadership: Any) -> None:
            seen.append(leadership)
            assert leadership is not broken, "an invariant"

        other: Any = type("Other", (), {"stop": lambda self: None})()
        rig.replicas.leading[UID + 1, 0] = other
        rig.replicas.table.ticking[other] = None
        monkeypatch.setattr(Leadership, what, step)
        getattr(rig.replicas, what)()
        await pause(1)
        assert seen == [broken, other] and list(rig.replicas.leading) == [(UID + 1, 0)]
        assert KEY in rig.replicas.followers and not rig.topic.led
        rig.replicas.leading.clear()

    run(scenario)


@pytest.mark.parametrize("many", [TICKS_MAX + 50, 12 * TICKS_MAX])
def test_of_many_leaderships_that_wait_some_get_a_tick_each_time_in_turn(many: int, monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        ticked: list[Any] = []
        monkeypatch.setattr(Leadership, "tick", ticked.append)
        waiting: list[Any] = [type("Waiting", (), {"key": (UID + n, 0)})() for n in range(many)]
        rig.replicas.table.ticking.update(dict.fromkeys(waiting))
        some = max(TICKS_MAX, many // ROUND_TICKS)
        for _ in range(-(-many // some)):
            rig.replicas.tick()
        assert ticked == waiting  # each in one second, however many they are
        ticked.clear()
        rig.replicas.tick()
        assert ticked == waiting[:some]
        gone = waiting[some]  # waits no more, and had its tick to come
        del rig.replicas.table.ticking[gone]
        rig.replicas.tick()
        assert gone not in ticked and waiting[some + 1] in ticked
        for one in waiting[TICKS_MAX:]:
            rig.replicas.table.ticking.pop(one, None)
        rig.replicas.tick()
        assert ticked[-TICKS_MAX:] == waiting[:TICKS_MAX]
        rig.replicas.table.ticking.clear()

    run(scenario)


def test_while_many_begin_no_more_leaderships_get_a_tick_than_must(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        ticked: list[Any] = []
        monkeypatch.setattr(Leadership, "tick", ticked.append)
        monkeypatch.setattr(LeaderRoles, "beginning", TICKS_MAX + 1)
        waiting: list[Any] = [type("Waiting", (), {"key": (UID + n, 0)})() for n in range(TICKS_MAX + 50)]
        rig.replicas.table.ticking.update(dict.fromkeys(waiting))
        rig.replicas.tick()
        assert ticked == waiting[: len(waiting) // ROUND_TICKS]
        for _ in range(ROUND_TICKS - 1):
            rig.replicas.tick()
        assert ticked == waiting
        rig.replicas.table.ticking.clear()

    run(scenario)


def test_what_a_pause_of_the_process_held_back_goes_on_after_it(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await rig.settle(rig.record(leader=rig.node, epoch=1, isr={rig.node: 0xABC}, nothing_acked=True))
        woken: list[int] = []
        deliveries = SimpleNamespace(wake_all=lambda: woken.append(1))
        leading: Any = SimpleNamespace(partition=SimpleNamespace(deliveries=deliveries))
        rig.replicas.leading[UID + 1, 0] = leading
        clock: Any = rig.replicas._runtime.clock
        for seconds, times in ((0.1, 0), (5.0, 0), (0.1, 0), (0.1, 1), (0.1, 1)):
            clock.advance(seconds)
            rig.replicas.tick()
            assert len(woken) == times
        del rig.replicas.leading[UID + 1, 0]

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


def test_a_consumer_that_can_not_be_told_keeps_no_leader_in_office(monkeypatch: Any) -> None:
    """It would pass for the leader with the controller, and take publishes that nobody is sent."""

    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        isr = {rig.node: log_uid, A: 5}
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        partition = rig.replicas.leading[KEY].partition

        told: list[object] = []

        def broken(*what: object) -> None:
            told.append(what[0])
            raise RuntimeError("a bug")

        monkeypatch.setattr(rig.topic, "remove_led", broken)
        monkeypatch.setattr(rig.replicas._leader_roles, "_leaders_changed", broken)
        await rig.settle(rig.record(leader=A, epoch=3, isr=isr))
        assert partition.closed and not rig.replicas.leading and KEY in rig.replicas.followers and not rig.errors
        assert told == [partition, "t"], "who reads it from elsewhere has to know, whoever else could not be told"

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


def test_a_partition_is_led_while_another_one_of_the_topic_can_not_be_settled() -> None:
    """Its files are taken, or its record is read again and again."""

    async def scenario() -> None:
        rig = ReplicaRig()
        metas = {n: PartitionMeta(leader=A, epoch=1, isr={A: 5}, replicas=(A, B, rig.node), version=1) for n in (0, 1)}
        record = TopicRecord("t", UID, 3, TopicSettings(partitions=2), partitions=metas)
        rig.metadata.put(first := Versioned(record, 1))
        await rig.settle(first)
        log_uid = rig.replicas.followers[UID, 1].log_uid
        elected = replace(
            metas[1], leader=rig.node, epoch=2, isr={rig.node: log_uid, A: 5}, registration=REGISTRATION, version=2
        )
        next_ = Versioned(replace(record, partitions={0: replace(metas[0], version=2), 1: elected}), 2)
        rig.metadata.put(next_)
        async with rig.replicas.table.changing((UID, 0)):
            rig.spawn(rig.settle(next_))
            await pause()
            assert list(rig.replicas.leading) == [(UID, 1)]

    run(scenario)


def test_news_that_change_no_role_are_taken_at_once() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        isr = {rig.node: log_uid, A: 5}
        rig.replicas.begin_to_settle(following := rig.record(leader=A, epoch=1, isr={A: 5}))
        assert rig.replicas.table.records[KEY] is following and not rig.tasks
        rig.replicas.begin_to_settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        assert KEY not in rig.replicas.leading
        await pause()
        leadership = rig.replicas.leading[KEY]
        news = rig.record(leader=rig.node, epoch=2, isr={**isr, B: 6}, registration=REGISTRATION)
        rig.replicas.begin_to_settle(news)
        assert set(leadership.meta.isr) == {rig.node, A, B} and not rig.tasks
        rig.replicas.begin_to_settle(rig.record(leader=A, epoch=3, isr=isr))
        await pause()
        assert KEY in rig.replicas.followers and not rig.replicas.leading and not rig.replicas.table.settling

    run(scenario)


@pytest.mark.parametrize("led", [False, True])
def test_news_wait_for_the_change_of_role_that_is_under_way(led: bool) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        isr = {rig.node: log_uid, A: 5}
        if led:
            await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        before = rig.replicas.table.records[KEY]
        async with rig.replicas.table.changing(KEY):
            rig.replicas.begin_to_settle(
                news := (
                    rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION)
                    if led
                    else rig.record(leader=A, epoch=1, isr={A: 5})
                )
            )
            await pause()
            assert rig.replicas.table.records[KEY] is before
        await pause()
        assert rig.replicas.table.records[KEY] is news and not rig.replicas.table.settling and not rig.errors

    run(scenario)


def test_a_disk_round_is_for_a_role_that_ended_and_not_for_each_record() -> None:
    async def scenario() -> None:
        rig = ReplicaRig(sync="interval")
        log_uid = await fit_to_lead(rig)
        await pause()
        rig.disk.rounds_held = True
        isr = {rig.node: log_uid, A: 5}
        await rig.settle(rig.record(leader=rig.node, epoch=2, isr=isr, registration=REGISTRATION))
        await pause()
        rig.disk.wanting.clear()
        await rig.settle(rig.record(leader=A, epoch=3, isr=isr))
        assert rig.follower in rig.disk.wanting and rig.follower.sync_ticket() is not None
        rig.disk.wanting.clear()
        rig.replicas.begin_to_settle(rig.record(leader=A, epoch=3, isr={**isr, B: 6}))
        await rig.settle(rig.record(leader=A, epoch=3, isr=isr))
        assert not rig.disk.wanting
        await rig.settle(rig.record(leader=A, epoch=3, isr=isr, sync="always"))
        assert rig.follower in rig.disk.wanting and rig.follower.sync == "always"

    run(scenario)


def test_a_log_that_recovery_refuses_is_retried_with_back_off_and_logged_once(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads millions of entries, and a leader asks once a second."""

    async def scenario() -> None:
        rig = ReplicaRig()
        await followed(rig)
        await rig.replicas.followers.pop(KEY).close()  # as if this process had begun now
        record, tried = rig.record(leader=A, epoch=1, isr={A: 5}), []
        clock: Any = rig.replicas.logs._clock

        def refuses(*_: object) -> Any:
            tried.append(clock.monotonic())
            raise LogCorrupt("2000000 entries are missing")

        with monkeypatch.context() as patched:
            patched.setattr(rig.opener, "recover", refuses)
            await rig.replicas.recover(record)
            stream = rig.leader(A)
            for second in range(2000):
                clock.advance(1.0)
                await rig.settle(record)
                if second % 100 == 0:
                    assert (await stream.open(1, log_of())).why == "2000000 entries are missing"
            assert 10 < len(tried) < 15 and tried[1] - tried[0] == 1.0 and tried[-1] - tried[-2] >= 500.0
            assert [r.getMessage() for r in caplog.records if "missing" in r.getMessage()] == [
                "t/0: 2000000 entries are missing"
            ]
        clock.advance(600.0)
        await rig.settle(record)
        assert KEY in rig.replicas.followers and not rig.replicas.logs.unusable

    run(scenario)


def test_nothing_is_kept_of_a_log_that_could_not_be_opened_when_its_topic_is_deleted(monkeypatch: Any) -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        await followed(rig)
        await rig.replicas.followers.pop(KEY).close()

        def refuses(*_: object) -> Any:
            raise LogCorrupt("nothing can be read")

        monkeypatch.setattr(rig.opener, "recover", refuses)
        await rig.replicas.recover(rig.record(leader=A, epoch=1, isr={A: 5}))
        assert rig.replicas.logs.unusable
        await rig.replicas.removal.drop(KEY[0], [KEY[1]])
        assert not rig.replicas.logs.unusable

    run(scenario)


def test_a_record_that_this_process_has_just_written_is_not_read_again() -> None:
    async def scenario() -> None:
        rig = ReplicaRig()
        log_uid = await fit_to_lead(rig)
        record = rig.record(leader=rig.node, epoch=2, isr={rig.node: log_uid}, registration=REGISTRATION, min_isr=1)
        rig.metadata.away = True
        await rig.replicas.settle(record, written=True)
        assert rig.replicas.leading[KEY].epoch == 2 and promised(rig) == 2

    run(scenario)
