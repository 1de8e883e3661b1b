"""One epoch of one partition: whose acks count, what the record does to it, and how long it waits for a successor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.clock import ManualClock
from nsqha.election.model import NodeInfo, PartitionMeta
from nsqha.errors import Conflict, NsqhaError, OutcomeUnknown, StaleMetadata, Unavailable
from nsqha.replication.leader import LeaderReplica
from nsqha.replication.pace import SharedRate
from nsqha.server.replica.leading.leadership import (
    HOLD_SECONDS_MAX,
    Leadership,
    LeadershipRuntime,
    PublishHold,
    waits_seconds,
)
from nsqha.server.runtime.measures import Measures
from tests.unit.server.replica_rig import A, B, FakeLinks
from tests.unit.server.shell_rig import NODE, PartitionRig

META = PartitionMeta(
    leader=NODE, epoch=1, isr={NODE: 70, A: 71}, replicas=(NODE, A, B), min_isr=2, version=5, registration=9
)


class Records:
    """The record in the metadata store; `error` is raised by the next write."""

    def __init__(self) -> None:
        self.meta = META
        self.error: Exception | None = None
        self.away = False
        self.silent: asyncio.Future[None] | None = None  # a read waits for this
        self.late: asyncio.Future[None] | None = None  # a proposal does
        self.proposed: list[PartitionMeta] = []
        self.reads = 0

    async def propose(self, meta: PartitionMeta, registered: Mapping[int, int]) -> PartitionMeta:
        self.proposed.append(meta)
        if self.late is not None:
            await self.late
        if self.error is not None:
            raise self.error
        self.meta = replace(meta, version=meta.version + 1)
        return self.meta

    async def fence(self, version: int) -> PartitionMeta:
        if self.error is not None:
            raise self.error
        self.meta = replace(self.meta, version=self.meta.version + 1)
        return self.meta

    async def read(self) -> PartitionMeta | None:
        self.reads += 1
        if self.silent is not None:
            await self.silent
        if self.away:
            raise Unavailable("etcd can not be reached")
        return self.meta


class Leading:
    """A leader with A in its ISR, and B that may join."""

    def __init__(self, *, sync: str = "interval", meta: PartitionMeta = META) -> None:
        self.rig = PartitionRig(sync=sync)
        leader = LeaderReplica(
            node=NODE,
            epoch=1,
            isr=meta.isr,
            min_isr=2,
            sync_always=sync == "always",
            end=self.rig.log.end.log_id,
            durable=self.rig.log.local_durable,
        )
        self.rig.lead(leader, serving=True)
        self.partition = self.rig.partition
        self.records = Records()
        self.links = FakeLinks()
        self.ended: list[str] = []
        self.ticking: dict[Leadership, None] = {}
        nodes = {node: NodeInfo(node, grpc_address=f"n{node}", peer_address=f"n{node}") for node in (A, B)}
        lent = LeadershipRuntime(
            NODE,
            self.rig.clock,
            links=cast(Any, self.links),
            nodes=lambda: nodes,
            spawn=lambda work: cast(Any, self.rig.loop.create_task(work)),
            step_down=lambda leadership, why: self.ended.append(why),
            ticking=self.ticking,
            measures=Measures(),
            push_rate=SharedRate(1000),
        )
        self.nodes = nodes
        self.leadership = Leadership(
            lent, self.partition, meta, key=(1, 0), topic="t", log_uid=70, records=self.records
        )
        self.leadership.start()

    @property
    def end(self) -> int:
        return self.rig.log.end.log_id

    def heard(self, node: int, log_uid: int, *, end: int | None = None, durable: int = 0, opened: bool = False) -> None:
        at = self.end if end is None else end
        self.leadership.heard(node, registration=3, log_uid=log_uid, end=at, durable=durable, opened=opened)
        self.rig.turn()

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.rig.pass_time(0.1)
            if self.leadership in self.ticking:
                self.leadership.tick()
            self.rig.turn()


def test_everybody_with_a_replica_is_pushed_to() -> None:
    assert sorted(Leading().links.added) == [A, B]


def test_pushes_to_who_is_far_behind_rest_unless_messages_may_wait_for_it() -> None:
    leading = Leading()
    rests = leading.links.rests
    assert (rests[A](5000), rests[B](5000)) == (0.0, 4.0), "A is in the ISR; a second's worth goes at once"
    del leading.nodes[A]
    assert rests[B](5000) == 0.0, "fewer than min_isr live: B may be the next one that counts"


def test_an_ack_counts_under_the_name_that_the_record_has_and_no_other() -> None:
    leading = Leading()
    leading.records.error = Conflict("no joins today")
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 99)
    leading.heard(B, 71)
    assert not outcome.answers
    leading.heard(A, 71)
    assert outcome.answers == ["OK"]


def test_what_was_acknowledged_before_a_new_stream_is_void() -> None:
    leading = Leading(sync="always")
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 71, durable=leading.end)
    leading.heard(A, 71, end=1, durable=1, opened=True)  # it came back without it
    leading.rig.disk.sync()
    assert not outcome.answers
    leading.heard(A, 71, durable=leading.end)
    assert outcome.answers == ["OK"]


def test_a_commit_is_told_on_and_what_was_made_to_send_the_batch_is_let_go() -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.links.committed_of.clear()
    before = leading.end
    leading.rig.publish(b"m")
    leading.rig.turn()
    leading.leadership.piece = cast(Any, "made")
    leading.heard(A, 71, end=before)
    assert not leading.links.committed_of and leading.leadership.piece is not None
    leading.heard(A, 71)
    assert leading.links.committed_of == [leading.leadership] and leading.leadership.piece is None


def test_with_sync_always_only_the_durable_end_counts() -> None:
    leading = Leading(sync="always")
    outcome = leading.rig.publish(b"m")
    leading.rig.disk.sync()
    leading.heard(A, 71, durable=leading.end - 1)
    assert not outcome.answers
    leading.heard(A, 71, durable=leading.end)
    assert outcome.answers == ["OK"]


def test_a_replica_that_caught_up_joins_and_is_needed_from_then_on() -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.heard(B, 72, opened=True)
    leading.passes(0.2)
    assert leading.leadership.meta.isr == {NODE: 70, A: 71, B: 72}
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 71)
    assert not outcome.answers
    leading.heard(B, 72)
    assert outcome.answers == ["OK"]


def settled() -> Leading:
    """A leader whose replicas all have everything."""
    leading = Leading()
    leading.heard(A, 71, opened=True)
    leading.heard(B, 72, opened=True)
    leading.passes(0.2)
    leading.heard(A, 71)
    leading.heard(B, 72)
    leading.passes(0.1)
    assert leading.leadership.meta.isr == {NODE: 70, A: 71, B: 72}
    return leading


def test_a_leader_that_waits_for_nothing_gets_no_ticks() -> None:
    leading = settled()
    assert not leading.ticking
    leading.rig.publish(b"m")
    leading.rig.turn()
    assert leading.leadership in leading.ticking
    leading.passes(0.2)
    assert leading.leadership in leading.ticking, "its followers have not acknowledged"
    leading.heard(A, 71)
    leading.heard(B, 72)
    leading.passes(0.1)
    assert not leading.ticking


def test_a_follower_that_is_late_after_a_quiet_hour_has_its_time() -> None:
    leading = settled()
    leading.rig.pass_time(3600.0)
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 71)
    leading.passes(1.5)
    assert not outcome.answers and B in leading.leadership.meta.isr
    leading.passes(1.0)
    assert outcome.answers == ["OK"] and B not in leading.leadership.meta.isr


def test_a_follower_that_is_lost_in_a_quiet_hour_leaves() -> None:
    leading = settled()
    leading.rig.pass_time(3600.0)
    leading.leadership.lost(B)
    assert B in leading.leadership.meta.isr
    leading.passes(0.5)
    assert B not in leading.leadership.meta.isr


@pytest.mark.parametrize("error", [OutcomeUnknown("?"), StaleMetadata("another etcd"), KeyError("a bug")])
def test_a_join_that_may_be_in_force_is_counted_with(error: Exception) -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.records.error = error
    leading.heard(B, 72, opened=True)
    assert len(leading.records.proposed) == 1
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 71)
    assert not outcome.answers, "B may be elected, and does not have it"
    leading.heard(B, 72)
    assert outcome.answers == ["OK"]


@pytest.mark.parametrize("error", [Conflict("changed"), Unavailable("away")])
def test_a_join_that_was_refused_is_not(error: NsqhaError) -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.records.error = error
    leading.heard(B, 72, opened=True)
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 71)
    assert outcome.answers == ["OK"]


def test_a_leader_says_for_how_long_it_has_acknowledged_nothing() -> None:
    """A publish that waits, or a member of the ISR that is lost also while nothing is published."""
    run = Leading()
    run.heard(A, 71, opened=True)
    assert waits_seconds(run.leadership) == 0.0
    run.rig.publish(b"waits")
    run.rig.turn()
    run.rig.pass_time(0.7)
    assert waits_seconds(run.leadership) == pytest.approx(0.7)
    run.heard(A, 71)
    assert waits_seconds(run.leadership) == 0.0
    run.leadership.lost(A)
    assert waits_seconds(run.leadership) > 0.0, "at once"
    run.passes(0.5)
    assert waits_seconds(run.leadership) == pytest.approx(0.5)
    run.heard(A, 71, opened=True)
    assert waits_seconds(run.leadership) == 0.0


def test_another_leader_in_the_record_ends_it() -> None:
    leading = Leading()
    leading.leadership.refreshed(replace(META, leader=A, epoch=2, version=6))
    assert len(leading.ended) == 1


def test_an_older_record_changes_nothing() -> None:
    leading = Leading()
    leading.leadership.refreshed(replace(META, leader=A, epoch=1, version=4))
    assert not leading.ended and leading.leadership.meta is META


def test_a_follower_that_promised_another_epoch_makes_it_read_the_record() -> None:
    leading = Leading()
    leading.records.meta = replace(META, leader=A, epoch=2, version=6)
    leading.leadership.fenced(A, 2)
    leading.rig.turn()
    assert leading.records.reads == 1 and len(leading.ended) == 1


def test_without_the_record_a_later_promise_ends_it_and_an_older_one_does_not() -> None:
    leading = Leading()
    leading.records.away = True
    for promised in (0, META.epoch):
        leading.leadership.fenced(A, promised)
        leading.rig.turn()
    assert leading.records.reads == 2 and not leading.ended
    leading.leadership.fenced(A, META.epoch + 1)
    leading.rig.turn()
    assert len(leading.ended) == 1


def test_reads_do_not_pile_up_while_the_metadata_say_nothing() -> None:
    """An etcd that hangs takes seconds for each, and a record that has to be read is asked for ten times a second."""
    leading = Leading()
    leading.records.error = Unavailable("etcd can not be reached")
    leading.records.silent = leading.rig.loop.create_future()
    leading.heard(A, 71)
    leading.heard(B, 72, opened=True)  # its join is refused, so the record is to be read
    leading.passes(60)
    assert leading.records.reads == 1
    silent, leading.records.silent = leading.records.silent, None
    leading.records.away = True
    silent.set_result(None)
    leading.passes(0.5)
    assert leading.records.reads > 1, "it is asked again after one that failed"


def test_a_promise_that_is_heard_of_during_a_read_has_it_read_again() -> None:
    leading = Leading()
    silent = leading.records.silent = leading.rig.loop.create_future()
    leading.leadership.fenced(A, META.epoch)
    leading.rig.turn()
    leading.leadership.fenced(A, META.epoch + 1)  # perhaps of a record that the read under way does not see
    leading.rig.turn()
    silent.set_result(None)
    leading.rig.turn()
    assert leading.records.reads == 2


def test_publishes_wait_for_a_successor_and_go_on_when_it_is_given_up() -> None:
    leading = Leading()
    leading.leadership.refreshed(replace(META, successor=A, version=6))
    outcome = leading.rig.publish(b"m")
    end = leading.end
    leading.passes(0.5)
    assert leading.end == end
    leading.leadership.refreshed(replace(META, version=7))
    leading.rig.turn()
    leading.heard(A, 71)
    assert outcome.answers == ["OK"]


def test_publishes_do_not_wait_for_ever_where_nobody_says_that_it_is_given_up() -> None:
    leading = Leading()
    leading.records.error = Unavailable("etcd can not be reached")
    leading.leadership.refreshed(replace(META, successor=A, version=6))
    outcome = leading.rig.publish(b"m")
    for _ in range(round(HOLD_SECONDS_MAX * 10) + 2):
        leading.heard(A, 71)
        leading.passes(0.1)
    leading.heard(A, 71)
    assert outcome.answers == ["OK"]


def test_after_its_end_nothing_counts() -> None:
    leading = Leading()
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.leadership.stop()
    leading.heard(A, 71)
    leading.passes(1)
    assert not outcome.answers and not leading.records.proposed


def test_a_leader_that_shuts_down_hands_over_when_all_is_committed() -> None:
    leading = Leading()
    leading.heard(A, 71)
    before = leading.rig.publish(b"before")
    leading.rig.turn()
    leading.leadership.retire()
    after = leading.rig.publish(b"after")
    leading.rig.turn()
    assert not before.answers and not leading.records.proposed
    leading.heard(A, 71)
    assert before.answers == ["OK"]
    assert not after.answers  # it is the next leader's
    (meta,) = leading.records.proposed
    assert (meta.leader, meta.epoch, meta.registration) == (A, META.epoch + 1, 3)
    assert leading.ended


def test_a_leader_hands_over_when_the_last_words_that_a_roll_holds_up_are_committed() -> None:
    leading = Leading()
    leading.heard(A, 71)
    consumer = leading.rig.consume(10)
    leading.rig.publish(b"m")
    leading.rig.turn()
    leading.heard(A, 71)
    leading.partition.files.roll()
    leading.rig.fin(consumer, consumer.wire.messages[0][0])
    leading.leadership.retire()
    leading.passes(0.5)
    assert not leading.records.proposed, "it has everything but these"
    leading.rig.disk.work()
    leading.passes(0.1)
    assert not leading.records.proposed
    leading.heard(A, 71)
    assert leading.rig.cursors.channels["c"].committed.floor == 1
    assert leading.records.proposed[0].leader == A


def test_a_leader_whose_roll_does_not_end_hands_over_without_last_words() -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.partition.files.roll()
    leading.leadership.retire()
    leading.passes(HOLD_SECONDS_MAX + 0.2)
    assert leading.records.proposed[0].leader == A


def test_a_leader_that_shuts_down_and_has_nobody_to_hand_over_to_goes_on() -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.leadership.lost(A)
    leading.leadership.retire()
    outcome = leading.rig.publish(b"m")
    leading.rig.turn()
    leading.leadership.heard(A, registration=0, log_uid=71, end=leading.end, durable=0, opened=False)
    assert outcome.answers == ["OK"]


def test_nobody_waits_for_a_follower_that_could_not_lead() -> None:
    leading = Leading()
    leading.leadership.heard(A, registration=3, log_uid=71, end=leading.end, durable=0, fit=False, opened=False)
    leading.leadership.retire()
    leading.passes(1)
    assert not leading.records.proposed and not leading.ended
    leading.heard(A, 71)
    leading.passes(0.1)
    assert [meta.leader for meta in leading.records.proposed] == [A]


def test_nothing_is_written_from_the_moment_on_at_which_the_next_leader_is_named() -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.leadership.lost(A)
    leading.leadership.retire()
    end = leading.end
    outcome = leading.rig.publish(b"written at the end of this tick")
    leading.leadership.heard(A, registration=3, log_uid=71, end=end, durable=0, opened=True)
    leading.rig.turn()
    assert len(leading.records.proposed) == 1 and leading.end == end and not outcome.answers


def test_what_waits_at_a_leader_that_handed_over_is_not_written_there() -> None:
    leading = Leading()
    leading.heard(A, 71)
    leading.leadership.retire()
    outcome = leading.rig.publish(b"m")
    end = leading.end
    leading.rig.turn()
    assert leading.ended
    leading.passes(HOLD_SECONDS_MAX + 1)
    assert leading.end == end and not outcome.answers


def test_what_waits_is_not_written_when_the_next_leader_is_heard_first() -> None:
    """It opens its streams as soon as it has the record, perhaps before the store's answer is read here."""
    leading = Leading()
    late = leading.records.late = leading.rig.loop.create_future()
    leading.heard(A, 71)
    leading.leadership.retire()
    outcome = leading.rig.publish(b"m")
    end = leading.end
    for node in (A, B):
        leading.leadership.fenced(node, 0)  # not even that tells
        leading.leadership.lost(node)
    leading.passes(0.5)
    assert leading.records.proposed[-1].leader == A and not leading.ended
    assert leading.end == end and not outcome.answers
    late.set_result(None)
    leading.passes(0.1)
    assert leading.end == end and leading.ended


def test_who_is_told_of_a_later_epoch_writes_nothing_more() -> None:
    """Elected by others, while this node knew of nothing. Publishers hear that it is not stored, and try there."""
    leading = Leading()
    silent = leading.records.silent = leading.rig.loop.create_future()
    leading.leadership.fenced(B, META.epoch)
    written = leading.rig.publish(b"m")
    leading.passes(0.1)
    leading.heard(A, 71)
    assert written.answers == ["OK"], "that one has promised no later epoch"
    leading.leadership.fenced(B, META.epoch + 1)
    outcome = leading.rig.publish(b"m")
    end = leading.end
    leading.passes(0.5)
    assert leading.end == end
    leading.rig.loop.run_until_complete(leading.partition.release("another node leads"))
    silent.set_result(None)
    leading.rig.turn()
    assert outcome.answers == ["not stored: another node leads"]


def test_who_reads_of_a_later_epoch_writes_nothing_more() -> None:
    leading = Leading()
    leading.leadership.refreshed(replace(META, leader=A, epoch=2, version=6))
    end = leading.end
    leading.rig.publish(b"m")
    leading.passes(HOLD_SECONDS_MAX + 1)
    assert leading.end == end and leading.ended


def test_an_epoch_that_nobody_leads_holds_publishes_for_a_while_only_and_once() -> None:
    """As after the metadata were taken back to an earlier state: the promise stays, and the record is of before."""
    leading = Leading()
    leading.leadership.fenced(B, META.epoch + 1)
    outcome = leading.rig.publish(b"m")
    for _ in range(round(HOLD_SECONDS_MAX * 10) + 2):
        leading.leadership.fenced(B, META.epoch + 1)
        leading.heard(A, 71)
        leading.passes(0.1)
    leading.heard(A, 71)
    assert outcome.answers == ["OK"]


def test_publishes_are_held_for_one_successor_at_a_time_and_not_for_ever() -> None:
    held: list[bool] = []
    clock = ManualClock()
    hold = PublishHold(cast(Any, SimpleNamespace(hand_over=held.append)), clock)
    hold.wait_for(0)
    hold.release_overdue()
    assert held == []
    hold.wait_for(A)
    hold.wait_for(A)
    clock.advance(HOLD_SECONDS_MAX - 0.1)
    hold.release_overdue()
    assert held == [True]
    hold.wait_for(B)
    clock.advance(HOLD_SECONDS_MAX - 0.1)
    hold.release_overdue()
    assert held == [True, True], "another one has its time"
    clock.advance(0.2)
    hold.release_overdue()
    hold.wait_for(0)
    assert held == [True, True, False, False]


def test_a_successor_that_comes_and_goes_does_not_prolong_the_hold() -> None:
    held: list[bool] = []
    clock = ManualClock()
    hold = PublishHold(cast(Any, SimpleNamespace(hand_over=held.append)), clock)
    hold.epoch_begun(2)
    for node in (A, 0, B, 0):
        clock.advance(HOLD_SECONDS_MAX / 4)
        hold.wait_for(node)
    assert held == [True] and hold.holds
    hold.release_overdue()
    hold.epoch_begun(2)
    assert held == [True, False] and not hold.holds
    hold.epoch_begun(3)
    assert held == [True, False, True]
