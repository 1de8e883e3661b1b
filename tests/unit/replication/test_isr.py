"""The keeper of the ISR: what it proposes, when, and who counts until the outcome is certain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.election.model import PartitionMeta
from nsqha.replication.followers import RemovalCause
from nsqha.replication.isr import (
    Action,
    Applied,
    Effective,
    Fence,
    IsrKeeper,
    IsrLimits,
    KeeperState,
    ProposalRefused,
    Propose,
    Reread,
    StepDown,
    Unknown,
)
from tests.unit.replication.isr_rig import NOW, A, B, C, D, IsrRig, effective, newer, proposal, record

# ---- Shrink


def test_nothing_is_proposed_while_everybody_acknowledges() -> None:
    rig = IsrRig()
    for _ in range(60):
        rig.end += 1
        rig.in_sync(B, C)
        assert rig.step(0.1) == []
    assert rig.keeper.state is KeeperState.STEADY


def test_an_idle_partition_proposes_nothing() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    assert rig.step(60) == []


def test_a_member_that_leaves_something_unacknowledged_is_proposed_to_leave() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    rig.step()
    rig.end += 1
    rig.heard(B, rig.end)
    assert rig.step(1.8) == []
    actions = rig.step(0.5)
    assert proposal(actions).change == "shrink"
    assert proposal(actions).meta == replace(rig.keeper.meta, isr={A: 100, B: 200})
    assert rig.keeper.effective == {A, B, C}, "C counts until the record is known to be without it"
    assert len(actions) == 1


def test_a_slow_member_that_stays_behind_leaves_although_it_acknowledges() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    for _ in range(100):
        rig.end += 2
        rig.heard(B, rig.end)
        rig.heard(C, 10 + (rig.end - 10) // 2)
        if actions := rig.step(0.1):
            assert proposal(actions).meta.isr == {A: 100, B: 200}
            return
    pytest.fail("C kept everybody waiting")


@pytest.mark.parametrize(("delay", "leaves"), [(1.7, False), (2.3, True)])
def test_late_is_who_acknowledges_a_batch_after_replica_timeout(delay: float, leaves: bool) -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    actions: list[Action] = []
    written: list[tuple[float, int]] = []
    while rig.now < NOW + 20 and not actions:
        rig.end += 1
        written.append((rig.now, rig.end))
        rig.heard(B, rig.end)
        rig.heard(C, max([10] + [end for at, end in written if at <= rig.now - delay]))
        actions = rig.step(0.1)
    assert bool(actions) == leaves


def test_who_joined_just_now_is_not_late_for_what_was_there_before() -> None:
    rig = IsrRig(record((A, B)))
    rig.in_sync(B)
    rig.heard(C, 2)
    rig.end = 12
    rig.step(3)
    rig.heard(B, 12)
    rig.heard(C, 11)
    rig.keeper.replied(Applied(newer(proposal(rig.step()).meta)), rig.now)
    assert rig.step(1.5) == []
    assert proposal(rig.step(1)).change == "shrink"


def test_a_lost_stream_is_given_300_ms() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    rig.keeper.followers.lost(C, rig.now)
    assert rig.step(0.2) == []
    assert proposal(rig.step(0.2)).change == "shrink"


def test_a_stream_that_is_back_in_time_changes_nothing() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    rig.keeper.followers.lost(C, rig.now)
    rig.step(0.2)
    rig.heard(C, rig.end)
    assert rig.step(5) == []


def test_a_pause_of_this_process_is_not_held_against_the_members() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    rig.step()
    rig.end += 1
    rig.now += 30
    assert rig.step() == []


def test_sync_always_goes_by_what_is_on_the_disk() -> None:
    rig = IsrRig(sync_always=True)
    rig.heard(B, 10, durable=10)
    rig.heard(C, 10, durable=7)
    assert proposal(rig.step(3)).meta.isr == {A: 100, B: 200}


def test_the_floor_is_kept() -> None:
    rig = IsrRig(record((A, B)))
    rig.heard(C, 1)
    rig.keeper.followers.lost(B, rig.now)
    assert rig.step(20) == []


def test_a_proposal_below_the_floor_stops_the_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IsrKeeper, "_floor", 0)
    rig = IsrRig(record((A, B)))
    rig.keeper.followers.lost(B, rig.now)
    with pytest.raises(AssertionError, match="below the floor"):
        rig.step(1)


def test_who_is_no_replica_any_more_leaves_when_all_replicas_are_in() -> None:
    rig = IsrRig(record((A, B, C, D), min_isr=2))
    rig.in_sync(B, C, D)
    assert proposal(rig.step()).meta.isr == {A: 100, B: 200, C: 300}


# ---- Expand and Swap


def test_a_replica_that_caught_up_joins_and_counts_at_once() -> None:
    rig = IsrRig(record((A, B)))
    rig.in_sync(B)
    rig.heard(C, 9, registration=44)
    actions = rig.step()
    assert actions == [
        Effective(frozenset({A, B, C}), frozenset({A, B}), 2, {B: (10, 0), C: (9, 0)}),
        Propose(replace(rig.keeper.meta, isr={A: 100, B: 200, C: 300}), {C: 44}, "expand", "node 3 caught up"),
    ]
    assert rig.keeper.countable(C, 300)
    assert not rig.keeper.countable(C, 301)


@pytest.mark.parametrize(("end", "committed", "own_end"), [(7, 8, 10), (4, 0, 10), (9, 8, 30)])
def test_who_lacks_committed_or_the_epochs_begin_or_is_far_behind_does_not_join(
    end: int, committed: int, own_end: int
) -> None:
    rig = IsrRig(record((A, B)))
    rig.committed, rig.end = committed, own_end
    rig.in_sync(B)
    rig.heard(C, end)
    assert rig.step(1) == []


def test_who_is_no_replica_does_not_join() -> None:
    rig = IsrRig(record((A, B)))
    rig.in_sync(B, D)
    assert rig.step(1) == []


def test_at_the_floor_a_dead_member_is_swapped() -> None:
    rig = IsrRig(record((A, B)))
    rig.in_sync(B)
    rig.keeper.followers.lost(B, rig.now)
    rig.step(0.5)
    rig.heard(C, 10, registration=9)
    actions = rig.step()
    assert proposal(actions).change == "swap"
    assert proposal(actions).meta.isr == {A: 100, C: 300}
    assert proposal(actions).registered == {C: 9}
    assert effective(actions).nodes == {A, B, C}


def test_below_the_floor_the_isr_only_grows() -> None:
    rig = IsrRig(record((A, B), min_isr=3))
    rig.in_sync(B)
    rig.keeper.followers.lost(B, rig.now)
    assert rig.step(5) == []
    rig.heard(C, 10)
    assert proposal(rig.step()).meta.isr == {A: 100, B: 200, C: 300}


def test_a_new_topic_grows_from_its_leader_alone() -> None:
    rig = IsrRig(record((A,)))
    rig.heard(B, 10)
    assert proposal(rig.step()).meta.isr == {A: 100, B: 200}


def waited_after_a_removal(rig: IsrRig, cause: RemovalCause) -> float:
    """Seconds for which C has to keep up before it is proposed again."""
    rig.in_sync(B, C)
    if cause is RemovalCause.LOST:
        rig.keeper.followers.lost(C, rig.now)
    elif cause is RemovalCause.ANNOUNCED:
        rig.keeper.depart(frozenset({C}), rig.now)
    else:
        rig.end += 1
        rig.heard(B, rig.end)
    asked = proposal(rig.step(4)).meta
    rig.keeper.depart(frozenset(), rig.now)
    rig.keeper.replied(Applied(newer(asked)), rig.now)
    rig.in_sync(B, C)
    since = rig.now
    asked = proposal(rig.step(60)).meta
    assert C in asked.isr
    rig.keeper.replied(Applied(newer(asked)), rig.now)
    return rig.now - since


@pytest.mark.parametrize(
    ("cause", "waits"),
    [
        (RemovalCause.LATE, [1, 2, 4, 8, 16, 30, 30]),
        (RemovalCause.LOST, [1, 2, 4, 4]),
        (RemovalCause.ANNOUNCED, [1, 1, 1]),
    ],
)
def test_a_replica_that_was_removed_keeps_up_for_a_while_before_it_joins_again(
    cause: RemovalCause, waits: list[float]
) -> None:
    """A broker that is started again a few times is back in seconds; one that holds everybody up is not."""
    rig = IsrRig(record((A, B, C)))
    assert [waited_after_a_removal(rig, cause) for _ in waits] == pytest.approx(waits, abs=0.11)


def test_a_restart_is_not_held_against_a_replica_that_was_late_nor_does_it_clear_it() -> None:
    rig = IsrRig(record((A, B, C)))
    late, lost, announced = RemovalCause.LATE, RemovalCause.LOST, RemovalCause.ANNOUNCED
    causes = [late, late, late, late, announced, lost, announced, late]
    waits = [waited_after_a_removal(rig, cause) for cause in causes]
    assert waits == pytest.approx([1, 2, 4, 8, 8, 8, 8, 16], abs=0.11)


def test_a_removal_that_another_node_wrote_is_no_fault_of_the_replica() -> None:
    rig = IsrRig(record((A, B, C)))
    for _ in range(3):
        rig.in_sync(B, C)
        rig.keeper.refreshed(newer(rig.keeper.meta, isr={A: 100, B: 200}), rig.now)
        assert rig.step(0.8) == []
        asked = proposal(rig.step(0.4)).meta
        assert asked.isr == {A: 100, B: 200, C: 300}
        rig.keeper.replied(Applied(newer(asked)), rig.now)


def test_removals_are_forgotten_when_it_has_been_a_member_for_long() -> None:
    """A broker that is restarted once a week for a year does not wait for half a minute each time. A partition that is
    quiet is not watched meanwhile."""
    rig, late = IsrRig(record((A, B, C))), RemovalCause.LATE
    assert [waited_after_a_removal(rig, late) for _ in range(3)] == pytest.approx([1.0, 2.0, 4.0], abs=0.11)
    rig.now += IsrLimits().settle_seconds_max
    assert [waited_after_a_removal(rig, late) for _ in range(2)] == pytest.approx([1.0, 2.0], abs=0.11)


def test_it_need_not_wait_if_nothing_commits_without_it() -> None:
    rig = IsrRig(record((A, B, C)))
    rig.keeper.refreshed(newer(rig.keeper.meta, isr={A: 100}), rig.now)
    rig.in_sync(B)
    assert proposal(rig.step()).meta.isr == {A: 100, B: 200}


# ---- log_uids


def test_a_member_with_another_log_counts_for_nothing_and_leaves() -> None:
    rig = IsrRig()
    rig.in_sync(B)
    rig.heard(C, 2, log_uid=999)
    assert rig.keeper.counted(C) == (0, 0)
    assert not rig.keeper.countable(C, 999)
    assert proposal(rig.step()).meta.isr == {A: 100, B: 200}


def test_at_the_floor_it_joins_again_in_its_place_and_counts_once_in_force() -> None:
    rig = IsrRig(record((A, B)))
    rig.heard(B, 10, log_uid=999, registration=7)
    actions = rig.step()
    assert proposal(actions).meta.isr == {A: 100, B: 999}
    assert proposal(actions).registered == {B: 7}
    assert not rig.keeper.countable(B, 999), "nobody would elect it before"
    actions = rig.keeper.replied(Applied(newer(proposal(actions).meta)), rig.now)
    assert effective(actions).acked == {B: (10, 0)}


def test_a_log_uid_that_was_never_reported_is_nobodys() -> None:
    rig = IsrRig(replace(record(), isr={A: 100, B: 0, C: 300}))
    assert not rig.keeper.countable(B, 0)


# ---- Reply


def expanding() -> tuple[IsrRig, PartitionMeta]:
    rig = IsrRig(record((A, B)))
    rig.in_sync(B, C)
    return rig, proposal(rig.step()).meta


def test_one_proposal_at_a_time() -> None:
    rig, _ = expanding()
    assert rig.keeper.state is KeeperState.WAITING
    rig.keeper.followers.lost(B, rig.now)
    assert rig.step(5) == []


def test_applied_is_in_force() -> None:
    rig, asked = expanding()
    actions = rig.keeper.replied(Applied(newer(asked)), rig.now)
    assert effective(actions).recorded == {A, B, C}
    assert rig.keeper.state is KeeperState.STEADY


def test_refused_with_a_newer_record_goes_on_with_that() -> None:
    rig, _ = expanding()
    actions = rig.keeper.replied(ProposalRefused(newer(rig.keeper.meta, min_isr=1)), rig.now)
    assert effective(actions) == Effective(frozenset({A, B}), frozenset({A, B}), 1, {B: (10, 0)})


def test_refused_for_the_registration_is_not_tried_again_at_once() -> None:
    rig, _ = expanding()
    assert effective(rig.keeper.replied(ProposalRefused(rig.keeper.meta), rig.now)).nodes == {A, B}
    assert rig.step(0.8) == []
    rig.heard(C, 10, registration=2)
    assert proposal(rig.step()).registered == {C: 2}


def test_refused_without_the_record_reads_it_before_anything_else() -> None:
    rig, _ = expanding()
    actions = rig.keeper.replied(ProposalRefused(), rig.now)
    assert Reread() in actions
    assert effective(actions).nodes == {A, B}
    assert rig.step(0.2) == [Reread()]
    rig.keeper.refreshed(newer(rig.keeper.meta), rig.now)
    assert proposal(rig.step(1)).meta.version == 11


def test_another_leader_or_epoch_ends_it() -> None:
    for change in ({"leader": B}, {"epoch": 4}, {"isr": {B: 200}}):
        rig, _ = expanding()
        (action,) = rig.keeper.replied(ProposalRefused(newer(rig.keeper.meta, **change)), rig.now)
        assert isinstance(action, StepDown)
        assert rig.keeper.state is KeeperState.ENDED
        assert rig.step(5) == []
        assert rig.keeper.refreshed(newer(rig.keeper.meta), rig.now) == []


# ---- Unknown


def test_an_unknown_outcome_is_fenced_and_the_union_stays() -> None:
    rig, _ = expanding()
    assert rig.keeper.replied(Unknown(), rig.now) == [Fence(10)]
    assert rig.keeper.state is KeeperState.DOUBT
    assert rig.keeper.effective == {A, B, C}


def test_reading_the_same_version_does_not_end_the_doubt() -> None:
    rig, _ = expanding()
    rig.keeper.replied(Unknown(), rig.now)
    assert rig.keeper.refreshed(rig.keeper.meta, rig.now) == []
    assert rig.keeper.effective == {A, B, C}


def test_a_fence_that_was_applied_ends_it() -> None:
    rig, _ = expanding()
    rig.keeper.replied(Unknown(), rig.now)
    actions = rig.keeper.replied(Applied(newer(rig.keeper.meta)), rig.now)
    assert effective(actions).nodes == {A, B}


def test_a_fence_that_came_too_late_finds_the_proposal_in_force() -> None:
    rig, asked = expanding()
    rig.keeper.replied(Unknown(), rig.now)
    actions = rig.keeper.replied(ProposalRefused(newer(asked)), rig.now)
    assert effective(actions).recorded == {A, B, C}


def test_a_fence_that_was_refused_without_a_word_is_read_after() -> None:
    rig, asked = expanding()
    rig.keeper.replied(Unknown(), rig.now)
    rig.now += 0.2
    assert rig.keeper.replied(ProposalRefused(), rig.now) == [Reread()]
    assert rig.step(0.2) == [Reread()], "a read that failed is asked for again"
    assert rig.keeper.effective == {A, B, C}
    assert effective(rig.keeper.refreshed(newer(asked), rig.now)).recorded == {A, B, C}


def test_a_fence_of_unknown_outcome_is_asked_for_again_but_not_in_a_loop() -> None:
    rig, _ = expanding()
    rig.keeper.replied(Unknown(), rig.now)
    assert rig.keeper.replied(Unknown(), rig.now) == []
    assert rig.step(0.2) == [Fence(10)]


def test_a_watch_faster_than_the_reply_decides_and_the_late_reply_changes_nothing() -> None:
    rig, asked = expanding()
    assert effective(rig.keeper.refreshed(newer(asked), rig.now)).recorded == {A, B, C}
    rig.keeper.followers.lost(B, rig.now)
    assert rig.step(1) == [], "the reply that is still to come must not be taken for another one's"
    assert rig.keeper.replied(Unknown(), rig.now) == []
    assert proposal(rig.step()).change == "shrink"


def test_an_old_copy_of_the_record_changes_nothing() -> None:
    rig, asked = expanding()
    rig.keeper.replied(Applied(newer(asked)), rig.now)
    assert rig.keeper.refreshed(replace(record((A,)), version=9), rig.now) == []
    assert rig.keeper.meta.isr == {A: 100, B: 200, C: 300}


def test_a_shrink_of_unknown_outcome_still_asks_who_would_leave() -> None:
    rig = IsrRig()
    rig.in_sync(B, C)
    rig.keeper.followers.lost(C, rig.now)
    asked = proposal(rig.step(1)).meta
    rig.keeper.replied(Unknown(), rig.now)
    assert rig.keeper.effective == {A, B, C}
    assert effective(rig.keeper.refreshed(newer(asked), rig.now)).nodes == {A, B}


def test_the_limits_have_sensible_defaults() -> None:
    limits = IsrLimits()
    assert limits.lost_seconds < limits.replica_timeout
    assert limits.unwatched_seconds < limits.lost_seconds
