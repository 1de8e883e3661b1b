"""Holds: what a batch reader keeps from retention, for how long, and that it outlives whoever leads."""

from __future__ import annotations

import pytest

from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.cursor.committed import checkpoint, loading
from nsqha.cursor.committed.holds import HOLD_MS_MAX, HOLDS_MAX, LIFE_MS_MAX, RELEASED, Holds, LiveHold
from nsqha.cursor.committed.loading import CACHE
from nsqha.cursor.events import LogHold
from nsqha.errors import LimitReached
from tests.unit.cursor.cache_rig import MAP, CacheRig, flush, load
from tests.unit.cursor.tiny import Leader, TinyLog

SECOND = 1_000_000_000
NOW = 1_000 * SECOND


def hold(leader: Leader, id_: int, offset: int, seconds: float = 60) -> None:
    now_ns = leader.now.wall_ns
    leader.cursors.retention.hold(id_, offset, now_ns + round(seconds * SECOND), now_ns=now_ns)
    leader.flush()


def read_log(count: int = 9) -> Leader:
    """Messages that a channel has finished: nothing but holds keeps them."""
    leader = Leader()
    channel = leader.create("a")
    leader.publish(count)
    leader.fin(channel, *leader.deliver(channel))
    leader.flush()
    return leader


def log_start_after(leader: Leader, offset: int) -> int:
    """Propose a log start as a leader does that knows of no hold."""
    leader.cursors.retention.propose_log_start(offset, leader.log.end_position)
    leader.flush()
    return leader.cursors.state.log_start[0]


def test_a_log_start_is_capped_by_the_lowest_live_hold():
    leader = read_log()
    hold(leader, 1, 5)
    hold(leader, 2, 3)
    assert log_start_after(leader, 9) == 3
    leader.cursors.retention.release(2)
    assert log_start_after(leader, 9) == 5


def test_a_hold_ends_with_its_time_and_not_a_moment_earlier():
    leader = read_log()
    hold(leader, 1, 5, seconds=60)
    leader.clock.advance(59)
    assert log_start_after(leader, 9) == 5
    leader.clock.advance(1)
    assert log_start_after(leader, 9) == 9
    assert len(leader.cursors.state.holds) == 0, "it is forgotten"


def test_a_renewal_puts_the_end_off_and_lowers_the_offset_if_it_is_asked_to():
    leader = read_log()
    hold(leader, 1, 5, seconds=60)
    leader.clock.advance(50)
    hold(leader, 1, 7, seconds=60)
    leader.clock.advance(50)
    assert log_start_after(leader, 9) == 5
    hold(leader, 1, 2)
    assert leader.cursors.retention.holds(leader.now.wall_ns)[1].offset == 5, "what is below the log start is gone"


def test_a_hold_begins_at_the_log_start_at_the_lowest():
    leader = read_log()
    assert log_start_after(leader, 4) == 4
    hold(leader, 1, 0)
    assert leader.cursors.retention.holds(leader.now.wall_ns)[1].offset == 4


@pytest.mark.parametrize("how", ["log", "checkpoint"])
def test_a_hold_outlives_a_leader(how):
    leader = read_log()
    hold(leader, 1, 5)
    if how == "checkpoint":
        assert log_start_after(leader, 5) == 5
        leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
        leader.flush()
    loaded = loading.load(leader.log, leader.log.read)
    assert loaded.source == {"log": loading.LOG_START, "checkpoint": loading.CHECKPOINT}[how]
    assert checkpoint.encode(loaded.state) == checkpoint.encode(leader.cursors.state)
    after = leader.restart()
    assert log_start_after(after, 9) == 5
    after.clock.advance(60)
    assert log_start_after(after, 9) == 9


def test_a_hold_that_was_not_committed_is_none_after_a_crash():
    leader = read_log()
    leader.hold = True
    hold(leader, 1, 5)
    assert not leader.cursors.retention.holds(leader.now.wall_ns), "not before it is committed"
    del leader.log.batches[-1]
    leader.log.log_id -= 1
    leader.log.end_position = leader.log.batches[-1][0].end_position
    assert log_start_after(leader.restart(), 9) == 9


def test_the_cache_knows_holds(path):
    rig = CacheRig(path)
    rig.leader.publish(4)
    hold(rig.leader, 7, 3)
    assert flush(rig.cache)
    rig.cache.close()
    cache = LmdbCache.open(path, map_bytes=MAP)
    loaded, _ = load(cache, rig.leader.log)
    assert loaded.source == CACHE
    assert [id_ for id_, *_ in loaded.state.holds.rows()] == [7]
    assert checkpoint.digest(loaded.state) == checkpoint.digest(TinyLog.rebuild(rig.leader.log))
    cache.close()


def test_a_state_with_a_hold_differs_from_one_without():
    leader = read_log()
    before = checkpoint.digest(leader.cursors.state)
    leader.cursors.state.holds.put(1, LiveHold(1, 2, 3))
    assert checkpoint.digest(leader.cursors.state) != before


def test_a_snapshot_keeps_the_holds_that_it_was_taken_with():
    leader = read_log()
    hold(leader, 1, 5)
    snapshot = leader.cursors.state.snapshot()
    hold(leader, 2, 3)
    assert [id_ for id_, *_ in snapshot.holds.rows()] == [1]


# ---- the leader proposes nothing that would be capped


def test_the_leader_stays_below_what_is_held():
    """A file border at the offset of a hold may have files of events in front that begin at the same offset."""
    leader = read_log()
    hold(leader, 1, 5)
    assert leader.cursors.retention.log_start_limit(leader.now.wall_ns) == 4
    leader.clock.advance(60)
    assert leader.cursors.retention.log_start_limit(leader.now.wall_ns) == 9
    assert leader.cursors.retention.log_start_limit() == 4, "who has no clock takes every hold for a live one"


def test_the_leader_refuses_one_hold_too_many_and_renews_the_others():
    leader = read_log()
    for id_ in range(1, HOLDS_MAX + 1):
        hold(leader, id_, 5)
    with pytest.raises(LimitReached, match="64 readers"):
        hold(leader, 0, 5)
    hold(leader, 3, 5)
    leader.clock.advance(60)
    hold(leader, 0, 5)
    assert len(leader.cursors.state.holds) == 1


def test_holds_that_wait_to_be_written_count():
    leader = read_log()
    for id_ in range(HOLDS_MAX):
        leader.cursors.retention.hold(id_, 0, NOW * NOW, now_ns=0)
    with pytest.raises(LimitReached):
        leader.cursors.retention.hold(HOLDS_MAX, 0, NOW * NOW, now_ns=0)


# ---- what is applied is bounded, whoever wrote it


def test_one_hold_too_many_is_ignored_when_it_is_applied():
    holds = Holds()
    for id_ in range(HOLDS_MAX + 1):
        holds.apply(LogHold(id_, 0, NOW + 1), log_start=0, timestamp_ns=NOW)
    assert [id_ for id_, *_ in holds.rows()] == list(range(HOLDS_MAX))
    holds.apply(LogHold(HOLDS_MAX, 0, NOW + 9), log_start=0, timestamp_ns=NOW + 1)
    assert [id_ for id_, *_ in holds.rows()] == [HOLDS_MAX], "the others are over"


def test_no_renewal_lasts_longer_than_six_hours_and_no_hold_longer_than_a_week():
    holds = Holds()
    now = NOW
    holds.apply(LogHold(1, 0, 1 << 62), log_start=0, timestamp_ns=now)
    while (held := holds.get(1)) is not None:
        assert held.until_ns <= now + HOLD_MS_MAX * 1_000_000
        now = held.until_ns - 1
        holds.apply(LogHold(1, 0, 1 << 62), log_start=0, timestamp_ns=now)
        if holds.get(1) == held:
            break
    assert held is not None and held.until_ns == NOW + LIFE_MS_MAX * 1_000_000
    holds.apply(LogHold(2, 0, 1 << 62), log_start=0, timestamp_ns=held.until_ns)
    assert holds.get(1) is None


@pytest.mark.parametrize("until_ns", [RELEASED, NOW, NOW - 1, -1])
def test_a_hold_that_comes_too_late_or_is_released_holds_nothing(until_ns):
    holds = Holds()
    holds.apply(LogHold(1, 0, NOW + 1), log_start=0, timestamp_ns=NOW)
    holds.apply(LogHold(1, 0, until_ns), log_start=0, timestamp_ns=NOW)
    assert len(holds) == 0
