"""Dead letters: who dies, what is kept of them, what an operator may do."""

from __future__ import annotations

import pytest

from nsqha.cursor.deferred import overlay as overlay_module
from nsqha.cursor.deferred.dead import DEAD_FROM, Reason, clear_alive, dead_due_ns, death_of
from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred
from nsqha.cursor.live.acting import Action, act
from nsqha.cursor.live.channel import Channel, Redelivery
from nsqha.cursor.live.looking import MessageState, held, page_of
from nsqha.cursor.policy import DeathPolicy
from nsqha.election.policy import ChannelPolicy, in_force
from nsqha.errors import Conflict, LimitReached, NotFound
from tests.unit.cursor.tiny import Leader

FIRST = (0, -1)


def dead_of(channel: Channel) -> list[tuple[int, int, Reason]]:
    """(offset, attempts, reason) in order of death."""
    refs = channel.cursor.deferred_overlay.dead_letters((0, 0), 1000)
    return [(ref.offset, ref.attempts, death_of(ref.due_ns)[1]) for ref in refs]


def failing(leader: Leader, channel: Channel, count: int = 1) -> None:
    """Deliver what there is and have it fail by REQ."""
    for offset in leader.deliver(channel, count) or [r.offset for r in leader.redeliver(channel, count)]:
        assert channel.req(offset, 1, 0, leader.now) is None


def test_a_due_time_says_when_and_why():
    now = 1_790_000_000_123_456_789
    for reason in Reason:
        died_ns, found = death_of(dead_due_ns(now, reason))
        assert found is reason
        assert 0 <= now - died_ns < 8
    assert dead_due_ns(1 << 62, Reason.OPERATOR) < 1 << 63, "a clock that is wrong by a century"
    assert dead_due_ns(-1, Reason.REQUEUED) >= DEAD_FROM


@pytest.mark.parametrize("dead", [0, 1, 5])
def test_clearing_what_is_alive(dead):
    held_ = MemoryDeferred()
    for offset in range(3):
        held_.put(Deferred(offset, 1000 + offset, 1))
    letters = [Deferred(10 + n, dead_due_ns(n * 1000, Reason.REQUEUED), 2) for n in range(dead)]
    for letter in letters:
        held_.put(letter)
    clear_alive(held_)
    assert list(held_.items()) == letters


def test_each_way_to_die():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(max_attempts=2)
    leader.publish(3)
    leader.deliver(channel, timeout=10)
    for offset in range(3):
        channel.req(offset, 1, 0, leader.now)
    assert len(leader.redeliver(channel, 2, timeout=10)) == 2
    assert len(leader.redeliver(channel, owner=2)) == 1
    channel.req(0, 1, 5000, leader.now)
    leader.clock.advance(10)
    channel.expire(leader.now)
    channel.detach(2, leader.now)
    assert dead_of(channel) == [(0, 2, Reason.REQUEUED), (1, 2, Reason.TIMED_OUT), (2, 2, Reason.DISCONNECTED)]
    leader.flush()
    assert channel.committed.floor == 3, "the floor does not wait for the dead"
    assert (channel.cursor.depth(3), channel.cursor.deferred_count) == (0, 0)
    assert channel.cursor.oldest_unfinished(3) is None
    assert channel.next_deadline() is None
    again = leader.restart().cursors.channels["c"]
    assert dead_of(again) == dead_of(channel)
    assert again.cursor.deferred_overlay.dead == 3


def test_what_failed_twice_is_in_the_log():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(max_attempts=3)
    leader.publish(1)
    failing(leader, channel)
    failing(leader, channel)
    leader.flush()
    after_crash = leader.restart(record=leader.record)
    after_crash.cursors.requests.reconcile(leader.record._replace(version=99))
    assert after_crash.redeliver(after_crash.cursors.channels["c"]) == [Redelivery(0, 3)]


def test_beyond_the_bound_nothing_dies_and_nothing_is_lost():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(max_attempts=1, dead_max=2)
    leader.publish(4)
    failing(leader, channel, 4)
    assert len(dead_of(channel)) == 2
    assert leader.redeliver(channel) == []
    leader.clock.advance(60)
    assert leader.redeliver(channel) == [Redelivery(2, 1), Redelivery(3, 1)], "the wire shows no more than max_attempts"
    act(channel.cursor, 0, Action.FINISH, leader.now)
    channel.req(2, 1, 0, leader.now)
    channel.req(3, 1, 0, leader.now)
    assert [offset for offset, *_ in dead_of(channel)] == [1, 2]
    with pytest.raises(LimitReached, match="as many as it may"):
        act(channel.cursor, 3, Action.KILL, leader.now)


def test_what_may_not_die_does_not_wait_for_a_year():
    def waits(**said: object) -> float:
        death = DeathPolicy.of(in_force(ChannelPolicy(max_attempts=1, **said), ChannelPolicy()))  # type: ignore[arg-type]
        assert death is not None
        return death.breaker_s

    assert waits(retry_ms=1000) == 60, "the default of retry_max is a bound, not a delay"
    assert waits(retry_ms=1000, retry_max_ms=30_000) == 60
    assert waits(retry_ms=1000, retry_max_ms=600_000) == 600


def test_dropped_or_ephemeral_the_dead_are_finished_and_counted():
    leader = Leader()
    leader.ask(max_attempts=1, dead_letter="drop")
    channel = leader.create("c")
    leader.cursors.requests.create_ephemeral("e#ephemeral", 9)
    leader.flush()
    ephemeral = leader.cursors.channels["e#ephemeral"]
    leader.publish(2)
    failing(leader, channel, 2)
    leader.ask(max_attempts=1)
    failing(leader, ephemeral, 2)
    for dropping in (channel, ephemeral):
        assert dead_of(dropping) == []
        assert dropping.cursor.floor == 2
        assert dropping.cursor.dead.died[Reason.REQUEUED] == 2


def test_a_retry_that_is_too_old_dies_where_the_dead_are_kept():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(ttl_ms=1000, dead_letter="keep")
    leader.publish(1)
    failing(leader, channel)
    leader.clock.advance(2)
    leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns: 1)
    assert leader.redeliver(channel) == []
    assert dead_of(channel) == [(0, 1, Reason.EXPIRED)]
    assert channel.cursor.passing.expired == 0, "it is counted once"


@pytest.mark.parametrize("few", [0, 1, 1000])
def test_the_oldest_that_waits_and_the_oldest_that_is_dead(few: int, monkeypatch: pytest.MonkeyPatch):
    """However many are dead below what waits, committed or not."""
    monkeypatch.setattr(overlay_module, "_FEW", few)
    leader = Leader()
    channel = leader.create("c")
    overlay = channel.cursor.deferred_overlay
    leader.ask(max_attempts=1)
    leader.publish(6)
    leader.deliver(channel, 6)
    assert (overlay.lowest_waiting(), overlay.dead_letters(FIRST, 1)) == (None, [])
    for offset in (2, 0, 1):
        leader.clock.advance(1)
        channel.req(offset, 1, 0, leader.now)
    (first,) = overlay.dead_letters(FIRST, 1)
    assert first.offset == 2
    assert overlay.lowest_waiting() is None
    leader.flush()
    act(channel.cursor, 4, Action.DEFER, leader.now, due_ns=leader.now.wall_ns + 10**12)
    assert (overlay.lowest_waiting(), overlay.dead_letters(FIRST, 1)) == (4, [first])
    leader.flush()
    assert (overlay.lowest_waiting(), overlay.dead_letters(FIRST, 1)) == (4, [first])
    act(channel.cursor, 2, Action.FINISH, leader.now)
    assert [ref.offset for ref in overlay.dead_letters(FIRST, 1)] == [0], "in front of it is what is not committed yet"
    assert [ref.offset for ref in overlay.dead_letters(FIRST, 9)] == [0, 1]
    act(channel.cursor, 1, Action.REQUEUE, leader.now)
    assert overlay.lowest_waiting() == 1
    leader.flush()
    assert [redelivery.offset for redelivery in leader.redeliver(channel)] == [1]
    channel.req(1, 1, 0, leader.now)
    assert overlay.lowest_waiting() == 4


def test_raised_it_begins_anew():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(max_attempts=1)
    leader.publish(1)
    failing(leader, channel)
    leader.flush()
    act(channel.cursor, 0, Action.REQUEUE, leader.now)
    assert leader.redeliver(channel) == [Redelivery(0, 1)]
    leader.fin(channel, 0)
    leader.flush()
    assert (dead_of(channel), len(channel.committed.deferred)) == ([], 0)


def test_a_death_frees_what_follows_in_an_ordered_channel():
    leader = Leader(ordered=True)
    channel = leader.create("c")
    leader.ask(max_attempts=1)
    leader.publish(2)
    failing(leader, channel)
    assert leader.deliver(channel) == [], "its death is not committed yet"
    leader.flush()
    assert leader.deliver(channel) == [1]


def test_an_ordered_reader_that_was_moved_back_passes_over_the_dead():
    leader = Leader(ordered=True)
    channel = leader.create("c")
    leader.ask(max_attempts=1)
    leader.publish(2)
    failing(leader, channel)
    leader.flush()
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    assert leader.deliver(channel) == [], "that it passed over it is not committed yet"
    leader.flush()
    assert leader.deliver(channel) == [1]


# ---- single messages


def test_what_may_be_done_in_each_state():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(6)
    leader.deliver(channel, 4)
    leader.fin(channel, 0)
    channel.req(1, 1, 0, leader.now)
    channel.req(2, 1, 3_600_000, leader.now)
    states = [found.state.name for offset in range(6) if (found := held(channel.cursor, offset)) is not None]
    assert states == ["FINISHED", "WAITING", "DEFERRED", "IN_FLIGHT", "UNREAD", "UNREAD"]
    assert held(channel.cursor, 6) is None
    with pytest.raises(NotFound):
        act(channel.cursor, 6, Action.FINISH, leader.now)
    with pytest.raises(Conflict, match="finished already"):
        act(channel.cursor, 0, Action.KILL, leader.now)
    with pytest.raises(Conflict, match="it is unread"):
        act(channel.cursor, 4, Action.DEFER, leader.now, due_ns=1)
    assert act(channel.cursor, 3, Action.KILL, leader.now) == 1, "owner 1 had it"
    assert channel.fin(3, 1) == "ID not in flight"
    with pytest.raises(Conflict, match="dead already"):
        act(channel.cursor, 3, Action.KILL, leader.now)
    for offset in (1, 2, 3, 5):
        act(channel.cursor, offset, Action.FINISH, leader.now)
    assert channel.in_flight == 0
    leader.flush()
    after_crash = leader.restart().cursors.channels["c"]
    assert (after_crash.cursor.next_read, after_crash.cursor.depth(6)) == (4, 1)


def test_pages_meet_each_message_once():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(20)
    leader.deliver(channel, 16)
    for offset in range(8):
        channel.req(offset, 1, 3_600_000 if offset % 2 else 0, leader.now)
    for offset in range(8, 12):
        act(channel.cursor, offset, Action.KILL, leader.now)
        leader.clock.advance(0.001)
    expected = {
        MessageState.WAITING: [0, 2, 4, 6],
        MessageState.DEFERRED: [1, 3, 5, 7],
        MessageState.DEAD: [8, 9, 10, 11],
        MessageState.IN_FLIGHT: [12, 13, 14, 15],
    }
    for state, offsets in expected.items():
        for flushed in (False, True):
            for size in (1, 3, 4, 100):
                found: list[int] = []
                after: tuple[int, int] | None = FIRST
                while after is not None:
                    page = page_of(channel.cursor, state, after, size)
                    found += [message.offset for message in page.messages]
                    after = page.next
                assert found == offsets, (state, flushed, size)
            leader.flush()
    with pytest.raises(ValueError, match="nsqha peek"):
        page_of(channel.cursor, MessageState.UNREAD, FIRST, 1)


def test_a_finish_in_front_of_the_reader_is_a_range_in_the_log():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(5)
    act(channel.cursor, 3, Action.FINISH, leader.now)
    assert channel.cursor.depth(5) == 4
    leader.flush()
    assert list(channel.committed.ranges) == [(3, 4)]
    assert leader.deliver(channel) == [0, 1, 2, 4]
    leader.fin(channel, 0, 1, 2, 4)
    leader.flush()
    assert (channel.committed.floor, list(channel.committed.ranges)) == (5, [])


@pytest.mark.parametrize("action", [Action.REQUEUE, Action.FINISH])
def test_what_is_done_to_a_dead_letter_while_an_empty_is_on_its_way_holds(action):
    leader = Leader()
    channel = leader.create("c")
    leader.ask(max_attempts=1)
    leader.publish(2)
    failing(leader, channel)
    leader.flush()
    leader.hold = True
    leader.cursors.requests.empty("c")
    leader.flush()
    act(channel.cursor, 0, action, leader.now)
    leader.commit()
    leader.hold = False
    leader.flush()
    assert dead_of(channel) == []
    raised = [Redelivery(0, 1)] if action is Action.REQUEUE else []
    assert leader.redeliver(channel) == raised
    assert len(channel.committed.deferred) == len(raised)


def test_an_operator_kills_no_more_than_the_bound():
    leader = Leader()
    channel = leader.create("c")
    leader.ask(dead_max=1)
    leader.publish(2)
    act_on = leader.deliver(channel)
    act(channel.cursor, act_on[0], Action.KILL, leader.now)
    with pytest.raises(LimitReached, match="has 1 dead letters"):
        act(channel.cursor, act_on[1], Action.KILL, leader.now)


@pytest.mark.parametrize("before", [False, True])
def test_a_deferred_message_that_is_finished_in_front_of_the_reader_counts_once(before):
    leader = Leader()
    channel = leader.create("c")
    leader.publish(4)
    leader.deliver(channel, 2)
    channel.req(1, 1, 60_000, leader.now)
    leader.flush()
    leader.hold = True
    leader.cursors.requests.seek("c", 0)
    leader.flush()
    if before:
        act(channel.cursor, 1, Action.FINISH, leader.now)
    leader.commit()
    if not before:
        assert (channel.cursor.depth(4), channel.cursor.deferred_count) == (3, 1)
        act(channel.cursor, 1, Action.FINISH, leader.now)
    assert (channel.cursor.depth(4), channel.cursor.deferred_count) == (3, 0)
    leader.hold = False
    leader.flush()
    assert (channel.cursor.depth(4), channel.cursor.deferred_count) == (3, 0)
    assert leader.deliver(channel) == [0, 2, 3]


@pytest.mark.parametrize("action", [Action.REQUEUE, Action.DEFER])
def test_what_was_finished_is_put_back(action):
    leader = Leader()
    channel = leader.create("c")
    leader.publish(3)
    leader.deliver(channel)
    leader.fin(channel, 0, 1, 2)
    leader.flush()
    due_ns = leader.now.wall_ns + 10**9
    assert act(channel.cursor, 1, action, leader.now, due_ns=due_ns) == 0
    assert (channel.cursor.depth(3), channel.cursor.deferred_count) == (0, 1)
    leader.flush()
    again = leader.restart()
    leader.clock.advance(1)
    channel = again.cursors.channels["c"]
    assert again.redeliver(channel) == [Redelivery(1, 1)]
    assert again.fin(channel, 1) == [None]
    again.flush()
    assert (channel.committed.floor, len(channel.committed.deferred)) == (3, 0)


def test_what_the_log_need_not_have_is_not_put_back():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(2)
    leader.publish(2)
    leader.deliver(channel)
    leader.fin(channel, 0, 1, 2, 3)
    leader.flush()
    leader.cursors.retention.propose_log_start(2, leader.log.batches[3][0].end_position)
    leader.flush()
    with pytest.raises(Conflict, match="the log need not have it"):
        act(channel.cursor, 0, Action.REQUEUE, leader.now)
    act(channel.cursor, 2, Action.REQUEUE, leader.now)
    with pytest.raises(Conflict, match="finished already"):
        act(channel.cursor, 3, Action.FINISH, leader.now)


def test_a_publish_that_was_cancelled_is_put_back_before_the_reader_comes():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(3)
    act(channel.cursor, 1, Action.FINISH, leader.now)
    leader.flush()
    act(channel.cursor, 1, Action.REQUEUE, leader.now)
    act(channel.cursor, 1, Action.REQUEUE, leader.now)
    assert (channel.cursor.depth(3), channel.cursor.deferred_count) == (2, 1)
    leader.flush()
    assert (channel.cursor.depth(3), channel.cursor.deferred_count) == (2, 1)
    assert leader.deliver(channel) == [0, 2]
    assert leader.redeliver(channel) == [Redelivery(1, 1)]
    assert leader.fin(channel, 0, 1, 2) == [None] * 3
    leader.flush()
    assert channel.committed.floor == 3
