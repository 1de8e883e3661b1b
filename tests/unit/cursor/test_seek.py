"""Moving a cursor, and the way back."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from nsqha.cursor.committed import checkpoint, state
from nsqha.cursor.committed.state import Sought
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.acting import Action, act
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.flight import NOT_IN_FLIGHT
from nsqha.cursor.live.looking import MessageState, held
from nsqha.cursor.partition import Forgotten
from nsqha.cursor.requests import Planning
from nsqha.cursor.seek import SeekPlan
from nsqha.errors import NotFound, NsqhaError
from tests.unit.cursor.tiny import Leader, fins


def at_once(planning: Planning) -> SeekPlan:
    """The plan, however many steps it takes."""
    while True:
        try:
            next(planning)
        except StopIteration as end:
            return end.value


def planned_seek(leader: Leader, name: str, target: int) -> SeekPlan:
    return at_once(leader.cursors.requests.planning_seek(name, target))


def planned_undo(leader: Leader, name: str) -> SeekPlan:
    return at_once(leader.cursors.requests.planning_undo(name))


def leader_with(count: int) -> tuple[Leader, object]:
    leader = Leader()
    channel = leader.create("c")
    leader.publish(count)
    return leader, channel


def test_a_seek_back_delivers_again_from_there():
    leader, channel = leader_with(6)
    leader.fin(channel, *leader.deliver(channel))
    leader.flush()
    plan = planned_seek(leader, "c", 2)
    assert (plan.floor, plan.target, plan.again, plan.skipped, plan.clamped) == (6, 2, 4, 0, False)
    assert channel.cursor.floor == 6, "a plan changes nothing"
    leader.cursors.requests.seek("c", 2)
    assert leader.cursors.urgent
    leader.flush()
    assert leader.deliver(channel) == [2, 3, 4, 5]
    assert leader.restart().deliver(leader.restart().cursors.channels["c"]) == [2, 3, 4, 5]


def test_a_seek_to_the_end_skips_what_is_unread_and_the_target_is_clamped():
    leader, channel = leader_with(6)
    plan = planned_seek(leader, "c", 1000)
    assert (plan.target, plan.skipped, plan.clamped) == (6, 6, True)
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    sought = [effect for effect in leader.effects if isinstance(effect, Sought)]
    assert sought[0].floor == 6
    assert leader.deliver(channel) == []


def test_a_seek_forgets_what_is_in_flight_and_tells_whose_it_was():
    leader, channel = leader_with(6)
    leader.deliver(channel, 2, owner=1)
    leader.deliver(channel, 3, owner=2)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    forgotten = [effect for effect in leader.effects if isinstance(effect, Forgotten)]
    assert forgotten[0].counts == {1: 2, 2: 3}
    assert channel.in_flight == 0
    assert channel.next_deadline() is None


def test_all_that_was_deferred_is_written_before_a_seek_and_stays_deferred():
    """However much that is: otherwise a batch takes a part, and the rest rides with later ones."""
    leader = Leader(limits=ChannelLimits(changes_per_batch=2))
    channel = leader.create("c")
    leader.publish(6)
    for offset in leader.deliver(channel):
        assert channel.req(offset, 1, 60_000, leader.now) is None
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    assert len(channel.cursor.deferred_overlay) == len(channel.committed.deferred) == 6
    leader.clock.advance(61)
    assert [found.offset for found in leader.redeliver(channel)] == [0, 1, 2, 3, 4, 5]


def test_an_old_fin_can_not_finish_a_new_delivery():
    leader, channel = leader_with(3)
    leader.deliver(channel)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.deliver(channel)
    assert channel.touch(0, 1, leader.now, 60.0) == NOT_IN_FLIGHT  # takes nothing off
    assert channel.req(0, 1, 0, leader.now) == NOT_IN_FLIGHT  # the old delivery's answer
    data = fins(1, 2, 0)
    assert channel.fin_run(data, 0, len(data), 1) == (0, 0)
    assert leader.fin(channel, 1, 2) == [NOT_IN_FLIGHT] * 2
    assert channel.fin_run(data, 0, len(data), 1) == (len(data), 3)
    assert channel.cursor.floor == 3


def test_another_connection_has_nothing_to_do_with_it():
    leader, channel = leader_with(1)
    leader.deliver(channel, owner=1)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.deliver(channel, owner=2)
    assert leader.fin(channel, 0, owner=2) == [None]


def test_a_seek_does_not_touch_deferred_messages_nor_their_deliveries():
    leader, channel = leader_with(4)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    channel.req(1, 1, 60_000, leader.now)
    leader.flush()
    leader.clock.advance(60)
    leader.redeliver(channel, 1)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert channel.in_flight == 1
    assert leader.deliver(channel) == [2, 3], "the reader passes over what is deferred"
    assert leader.fin(channel, 0) == [None]
    assert [r.offset for r in leader.redeliver(channel)] == [1]


def test_what_was_requeued_after_the_seek_was_written_is_pending_by_position():
    leader, channel = leader_with(3)
    leader.deliver(channel)
    leader.hold = True
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    channel.req(0, 1, 60_000, leader.now)
    leader.fin(channel, 1)
    leader.flush()
    leader.commit()
    assert leader.deliver(channel) == [0, 1, 2]
    assert len(channel.committed.deferred) == 0


def test_undo_goes_back_with_the_finished_ranges():
    leader, channel = leader_with(6)
    leader.deliver(channel)
    leader.fin(channel, 0, 2, 3)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.fin(channel, *leader.deliver(channel, 1))
    leader.cursors.requests.undo("c")
    leader.flush()
    assert leader.deliver(channel) == [1, 4, 5]


def test_an_undo_can_be_undone():
    leader, channel = leader_with(3)
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    leader.cursors.requests.undo("c")
    leader.flush()
    assert channel.committed.floor == 0
    leader.cursors.requests.undo("c")
    leader.flush()
    assert channel.committed.floor == 3


def test_too_many_ranges_are_left_out_and_the_plan_says_so():
    leader, channel = leader_with(9000)
    leader.deliver(channel)
    leader.fin(channel, *range(1, 9000, 2))
    leader.flush()
    assert not planned_seek(leader, "c", 0).exact
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert channel.committed.undo.ranges is None
    assert len(leader.log.batches[-1][1]) < 100, "the seek's batch"


def test_empty_drops_everything_and_its_undo_brings_it_back():
    leader, channel = leader_with(5)
    leader.deliver(channel, 4)
    channel.req(0, 1, 60_000, leader.now)
    channel.req(1, 1, 0, leader.now)
    leader.fin(channel, 2)
    leader.flush()
    leader.cursors.requests.empty("c")
    leader.flush()
    assert (channel.in_flight, channel.cursor.depth(5), channel.cursor.deferred_count) == (0, 0, 0)
    assert leader.redeliver(channel) == []
    plan = planned_undo(leader, "c")
    assert (plan.deferred_again, plan.deferred_lost) == (1, 0)
    leader.cursors.requests.undo("c")
    leader.flush()
    assert leader.deliver(channel) == [1, 3, 4]
    assert leader.redeliver(channel) == [], "it is not due"
    again = leader.restart()
    for one, live in ((leader, channel), (again, again.cursors.channels["c"])):
        one.clock.advance(60)
        assert [(found.offset, found.attempts) for found in one.redeliver(live)][:1] == [(0, 2)]


def test_what_empty_dropped_comes_back_behind_the_floor_and_through_a_checkpoint(monkeypatch):
    monkeypatch.setattr(state, "UNDO_DEFERRED_MAX", 4)
    leader, channel = leader_with(6)
    for offset in leader.deliver(channel):
        assert channel.req(offset, 1, 60_000, leader.now) is None
    leader.flush()
    assert channel.committed.floor == 6
    leader.cursors.requests.empty("c")
    leader.flush()
    read = checkpoint.decode(checkpoint.encode(leader.cursors.state))
    assert read.channels["c"].undo == channel.committed.undo
    plan = planned_undo(leader, "c")
    assert (plan.deferred_again, plan.deferred_lost) == (4, 2)
    leader.cursors.requests.undo("c")
    leader.flush()
    assert channel.cursor.deferred_count == 4
    leader.clock.advance(61)
    assert [found.offset for found in leader.redeliver(channel)] == [0, 1, 2, 3]


def test_an_undo_says_what_the_log_no_longer_has():
    leader, channel = leader_with(3)
    for offset in leader.deliver(channel):
        assert channel.req(offset, 1, 60_000, leader.now) is None
    leader.flush()
    leader.cursors.requests.empty("c")
    leader.flush()
    leader.cursors.start_at(2, leader.cursors.state.log_start[1])
    plan = planned_undo(leader, "c")
    assert (plan.deferred_again, plan.deferred_lost) == (1, 2)
    leader.cursors.requests.undo("c")
    leader.flush()
    assert [ref.offset for ref in channel.committed.deferred.items()] == [2]


def test_empty_drops_deferred_messages_in_flight_too():
    leader, channel = leader_with(1)
    leader.deliver(channel)
    channel.req(0, 1, 60_000, leader.now)
    leader.flush()
    leader.clock.advance(60)
    leader.redeliver(channel)
    leader.cursors.requests.empty("c")
    leader.flush()
    assert leader.fin(channel, 0) == [NOT_IN_FLIGHT]
    assert channel.in_flight == 0


def test_a_message_met_again_before_its_time_is_deferred():
    leader = Leader()
    channel = leader.create("c")
    due = leader.now.wall_ns + 60_000_000_000
    leader.publish(1, deliver_at=due)
    leader.cursors.requests.empty("c")
    leader.flush()
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert channel.next_run(1, 10) == (0, 1)
    assert channel.meet(0, due, leader.now)
    assert channel.next_run(1, 10) is None
    leader.clock.advance(60)
    assert [r.offset for r in leader.redeliver(channel)] == [0]


def test_seek_of_an_unknown_channel_or_nothing_to_undo():
    leader, _ = leader_with(1)
    with pytest.raises(NotFound):
        leader.cursors.requests.seek("x", 0)
    with pytest.raises(NotFound):
        leader.cursors.requests.undo("c")


# ---- what a plan says is what happens


def counts(plan: SeekPlan) -> tuple[int, int, int, int, int]:
    return plan.again, plan.skipped, plan.deferred, plan.dead, plan.in_flight


def test_an_unfinished_message_below_the_target_is_skipped():
    leader, channel = leader_with(6)
    leader.deliver(channel)
    leader.fin(channel, 0, 2, 3, 4, 5)
    assert counts(planned_seek(leader, "c", 3)) == (3, 1, 0, 0, 1)
    assert counts(planned_seek(leader, "c", 1)) == (4, 0, 0, 0, 1)
    assert counts(planned_seek(leader, "c", TARGET_END)) == (0, 1, 0, 0, 1)


def test_deferred_messages_below_the_floor_do_not_come_again():
    leader, channel = leader_with(5)
    leader.deliver(channel)
    leader.fin(channel, 0)
    for offset in (1, 2, 3, 4):
        channel.req(offset, 1, 3_600_000, leader.now)
    leader.flush()
    assert channel.cursor.floor == 5
    assert counts(planned_seek(leader, "c", 0)) == (1, 0, 4, 0, 0)


def test_an_undo_skips_what_is_in_flight_again():
    leader, channel = leader_with(7)
    leader.fin(channel, *leader.deliver(channel))
    leader.flush()
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    leader.deliver(channel, 6)
    plan = planned_undo(leader, "c")
    assert (plan.target, *counts(plan)) == (7, 0, 7, 0, 0, 6)


def test_an_undo_brings_back_finished_messages_but_those_that_were_finished_then():
    leader, channel = leader_with(6)
    leader.deliver(channel, 4)
    leader.fin(channel, 1, 2)
    leader.cursors.requests.seek("c", TARGET_END)
    leader.flush()
    plan = planned_undo(leader, "c")
    assert (plan.target, *counts(plan)) == (0, 4, 0, 0, 0, 0)


def test_of_what_an_undo_finishes_again_deferred_messages_stay():
    leader, channel = leader_with(4)
    leader.deliver(channel)
    leader.fin(channel, 1, 2)
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    act(channel.cursor, 2, Action.FINISH, leader.now)
    act(channel.cursor, 2, Action.DEFER, leader.now, due_ns=leader.now.wall_ns + 10**12)
    assert counts(planned_undo(leader, "c")) == (0, 1, 1, 0, 0)
    leader.cursors.requests.undo("c")
    leader.flush()
    assert leader.deliver(channel) == [0, 3]
    assert channel.cursor.deferred_count == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_what_happens(seed: int):
    """Whatever was done to single messages before, in the ring, in front of the reader and behind the floor."""
    rng = random.Random(seed)
    leader = Leader(limits=ChannelLimits(changes_per_batch=3))
    channel = leader.create("c")
    leader.ask(max_attempts=3)
    for _ in range(60):
        step(rng, leader, channel)
        if rng.random() < 0.3:
            check_one(rng, leader, channel)


def step(rng: random.Random, leader: Leader, channel: Channel) -> None:
    end, cursor = channel.cursor.end, channel.cursor
    kind = rng.choice(("publish", "deliver", "fin", "req", "act", "wait", "redeliver", "empty"))
    flying = [o for o in range(end) if (h := held(cursor, o)) is not None and h.state is MessageState.IN_FLIGHT]
    if kind == "publish":
        later = rng.random() < 0.2
        leader.publish(rng.randrange(1, 6), deliver_at=leader.now.wall_ns + 10**10 if later else 0)
    elif kind == "deliver":
        leader.deliver(channel, rng.randrange(1, 8))
    elif kind == "redeliver":
        leader.redeliver(channel, rng.randrange(1, 4))
    elif kind == "fin":
        leader.fin(channel, *rng.sample(flying, min(len(flying), 4)))
    elif kind == "req":
        for offset in rng.sample(flying, min(len(flying), 3)):
            channel.req(offset, 1, rng.choice((0, 100, 3_600_000)), leader.now)
    elif kind == "wait":
        leader.clock.advance(rng.choice((0.01, 1.0, 3600.0)))
        rng.choice((leader.flush, lambda: None))()
    elif kind == "empty" and rng.random() < 0.2:
        leader.cursors.requests.empty("c")
        leader.flush()
    elif kind == "act":
        for offset in rng.sample(range(end), min(end, 2)):
            with suppress(NsqhaError):
                act(cursor, offset, rng.choice([*Action]), leader.now, due_ns=leader.now.wall_ns + 10**12)


def check_one(rng: random.Random, leader: Leader, channel: Channel) -> None:
    requests, cursor = leader.cursors.requests, channel.cursor
    end = cursor.end
    before = [held(cursor, offset) for offset in range(end)]
    deferred = {offset for offset in range(end) if offset in cursor.deferred_overlay}
    if channel.committed.undo is not None and rng.random() < 0.5:
        plan = planned_undo(leader, "c")
        requests.undo("c")
    else:
        target = rng.choice((0, TARGET_END, rng.randrange(end + 1)))
        plan = planned_seek(leader, "c", target)
        requests.seek("c", target)
    leader.flush()
    after = [held(cursor, offset) for offset in range(end)]
    again = skipped = 0
    for offset, (was, now) in enumerate(zip(before, after, strict=True)):
        assert was is not None and now is not None
        done, gone = was.state is MessageState.FINISHED, now.state is MessageState.FINISHED
        again += done and now.state is MessageState.UNREAD
        skipped += not done and gone and offset not in deferred
        assert not (gone and offset in deferred), "a seek drops nothing that is deferred"
    states = [held_.state for held_ in before if held_ is not None]
    assert (plan.again, plan.skipped, plan.target) == (again, skipped, channel.committed.floor), (before, after)
    assert plan.dead == states.count(MessageState.DEAD)
    assert plan.deferred == states.count(MessageState.DEFERRED)
    assert (
        plan.in_flight
        == states.count(MessageState.IN_FLIGHT)
        == sum(h.state is MessageState.IN_FLIGHT for h in before if h)
    )
