"""Holds on the leader: asked for, answered when committed, and respected by what trims the log."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from nsqha.commitlog.log import LogLimits
from nsqha.cursor.committed.holds import HOLD_MS_MAX, LiveHold
from nsqha.errors import LimitReached, NotFound, Unavailable
from nsqha.server.partition.holding import hold, live_holds, release, renew
from nsqha.server.partition.retention import AbandonedPolicy
from nsqha.server.segments.renewals import LOOK_SECONDS, RENEW_MS
from tests.unit.server.partition.test_retention import fill, keep_house, skip_to_end
from tests.unit.server.shell_rig import PartitionRig

MINUTE_MS = 60_000


def ask(rig: PartitionRig, question: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = rig.loop.create_task(question)
    rig.turn()
    return task


def answer(rig: PartitionRig, question: Coroutine[Any, Any, Any]) -> Any:
    task = ask(rig, question)
    rig.disk.sync()
    return task.result()


def filled() -> PartitionRig:
    """Many small files that no channel needs any more, and that retention wants to go."""
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    fill(rig, pairs=6)
    skip_to_end(rig)
    rig.disk.sync()
    return rig


def test_a_hold_is_answered_when_it_is_committed() -> None:
    rig = filled()
    task = ask(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    assert not task.done() and not live_holds(rig.partition)
    rig.disk.sync()
    now_ns = rig.clock.wall_ns()
    assert task.result() == LiveHold(2, now_ns + MINUTE_MS * 1_000_000, now_ns) == live_holds(rig.partition)[1]


def test_files_that_are_held_stay_until_the_hold_ends_and_then_go() -> None:
    rig = filled()
    answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    ends = [pair.first.offset for pair in rig.log.pairs]
    assert {1, 2, 3} < set(ends), "each message has files of its own"
    keep_house(rig, 8)
    assert rig.log.start.offset == 1, "the border below what is held"
    written = rig.log.end
    keep_house(rig, 8)
    assert rig.log.end == written, "nothing is proposed that the hold would cap"
    rig.pass_time(60)
    keep_house(rig, 8)
    assert rig.log.start.offset == 5


def test_files_that_are_released_go() -> None:
    rig = filled()
    answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    keep_house(rig, 8)
    assert answer(rig, release(rig.partition, 1)) is True
    assert answer(rig, release(rig.partition, 1)) is False
    keep_house(rig, 8)
    assert rig.log.start.offset == 5


def test_a_hold_that_comes_too_late_says_from_where_on_it_holds() -> None:
    rig = filled()
    keep_house(rig, 8)
    assert rig.log.start.offset == 5
    assert answer(rig, hold(rig.partition, 1, 2, MINUTE_MS)).offset == 5


def test_an_abandoned_channel_keeps_what_a_hold_keeps() -> None:
    rig = PartitionRig(limits=LogLimits(segment_bytes=300))
    fill(rig, pairs=6)
    rig.partition.retention.abandoned = AbandonedPolicy(over_bytes=1)
    answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    keep_house(rig, 8)
    channel = rig.cursors.channels["c"].committed
    assert (channel.abandoned, channel.floor, rig.log.start.offset) == (1, 1, 1)
    rig.pass_time(60)
    keep_house(rig, 8)
    assert (channel.abandoned, channel.floor, rig.log.start.offset) == (5, 5, 5)


def test_a_single_old_pair_is_not_closed_while_it_is_held() -> None:
    rig = PartitionRig()
    rig.store(b"one")
    skip_to_end(rig)
    answer(rig, hold(rig.partition, 1, 0, MINUTE_MS))
    rig.pass_time(1)
    keep_house(rig, 4)
    assert len(rig.log.pairs) == 1
    rig.pass_time(60)
    keep_house(rig, 4)
    assert rig.log.start.offset == 1


def test_a_hold_lasts_also_when_the_last_leaders_clock_was_ahead() -> None:
    """By a day: so are the timestamps."""
    rig = filled()
    rig.clock.wall -= 86_400 * 1_000_000_000
    held = answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    assert held.until_ns == rig.log.last.timestamp_ns + MINUTE_MS * 1_000_000
    keep_house(rig, 8)
    assert rig.log.start.offset == 1 and live_holds(rig.partition)


# ---- renewed


def test_a_renewal_keeps_the_offset_and_writes_nothing_while_more_than_half_is_left() -> None:
    rig = filled()
    first = answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    written = rig.log.end
    rig.pass_time(29)
    assert answer(rig, renew(rig.partition, 1, MINUTE_MS)) == first and rig.log.end == written
    rig.pass_time(2)
    again = answer(rig, renew(rig.partition, 1, MINUTE_MS))
    assert again == (2, rig.clock.wall_ns() + MINUTE_MS * 1_000_000, first.since_ns)


def test_whoever_reads_may_be_cut_off_for_a_quarter_of_an_hour() -> None:
    rig = filled()
    answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    for _ in range(60):
        held = answer(rig, renew(rig.partition, 1, RENEW_MS))
        rig.pass_time(LOOK_SECONDS)  # until just before the next look
        assert held.until_ns - rig.clock.wall_ns() >= 15 * MINUTE_MS * 1_000_000


def test_what_is_over_or_was_never_held_is_not_renewed() -> None:
    rig = filled()
    answer(rig, hold(rig.partition, 1, 2, MINUTE_MS))
    rig.pass_time(60)
    for id_ in (1, 2):
        with pytest.raises(NotFound, match="is not held by 000000000000000"):
            answer(rig, renew(rig.partition, id_, MINUTE_MS))


# ---- refused


@pytest.mark.parametrize("hold_ms", [0, -1, HOLD_MS_MAX + 1])
def test_a_hold_has_a_length(hold_ms: int) -> None:
    with pytest.raises(ValueError, match="6 hours"):
        answer(filled(), hold(PartitionRig().partition, 1, 0, hold_ms))


def test_nothing_is_held_before_the_epoch_has_begun() -> None:
    rig = filled()
    rig.partition.life.serving = False
    for question in (hold(rig.partition, 1, 2, MINUTE_MS), release(rig.partition, 1)):
        with pytest.raises(Unavailable):
            answer(rig, question)
    rig.partition.life.serving = True
    answer(rig, _events(rig))
    assert not live_holds(rig.partition), "nothing was queued either"


async def _events(rig: PartitionRig) -> None:
    await rig.partition.commit_events()


def test_one_reader_too_many_is_told() -> None:
    rig = filled()
    for id_ in range(64):
        rig.cursors.retention.hold(id_, 0, rig.clock.wall_ns() + 1_000_000_000, now_ns=rig.clock.wall_ns())
    with pytest.raises(LimitReached, match="64 readers"):
        answer(rig, hold(rig.partition, 64, 0, MINUTE_MS))
