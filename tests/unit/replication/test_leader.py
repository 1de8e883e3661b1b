"""The commit rule: min over the effective ISR, never back, nothing below the floor of members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.replication.leader import LeaderReplica


def leader(*, sync_always: bool = False, isr: tuple[int, ...] = (1,), min_isr: int = 1) -> LeaderReplica:
    return LeaderReplica(node=1, epoch=7, isr=isr, min_isr=min_isr, sync_always=sync_always, end=0, durable=0)


def test_one_replica_commits_what_it_wrote() -> None:
    core = leader()
    assert core.written(3)
    assert core.committed == 3
    assert core.durable == 0


def test_sync_always_waits_for_the_disk_round() -> None:
    core = leader(sync_always=True)
    assert not core.written(3)
    assert core.committed == 0
    assert core.acked(1, end=3, durable=2)
    assert core.committed == 2


def test_a_second_replica_is_one_more_acknowledgement() -> None:
    core = leader(isr=(1, 2), min_isr=2)
    assert not core.written(5)
    assert core.acked(2, end=4, durable=0)
    assert core.committed == 4


def test_nothing_commits_below_the_floor_of_members() -> None:
    core = leader(isr=(1,), min_isr=2)
    assert not core.written(5)
    assert core.committed == 0
    assert not core.set_isr((1, 2), (1, 2))
    assert core.acked(2, end=5, durable=5)
    assert core.committed == 5


def test_what_keeps_from_committing_is_told() -> None:
    core = leader(isr=(1, 2), min_isr=2)
    assert core.waits_for == "", "nothing is written"
    core.written(5)
    assert core.waits_for == "only 1 of 2 in-sync replicas acknowledge, and min_isr is 2"
    core.acked(2, end=5, durable=0)
    assert core.waits_for == ""
    core.set_isr((1,), (1,))
    assert core.waits_for == "fewer than 2 replicas (min_isr) are in sync"
    core = leader(isr=(1, 2, 3), min_isr=2)
    core.written(5)
    assert core.waits_for == "", "one of them may leave the ISR"


def test_a_member_that_is_only_proposed_does_not_help_over_the_floor() -> None:
    core = leader(isr=(1,), min_isr=2)
    core.written(5)
    assert not core.set_isr((1,), (1, 2), acked={2: (5, 5)})
    assert core.committed == 0
    assert core.set_isr((1, 2), (1, 2))
    assert core.committed == 5


def test_a_member_that_left_no_longer_holds_back() -> None:
    core = leader(isr=(1, 2, 3), min_isr=2)
    core.written(9)
    core.acked(2, end=9, durable=0)
    assert core.committed == 0
    assert core.set_isr((1, 2), (1, 2))
    assert core.committed == 9


def test_who_is_proposed_holds_back_until_it_is_certain() -> None:
    core = leader(isr=(1, 2), min_isr=2)
    core.written(9)
    core.set_isr((1, 2), (1, 2, 3), acked={3: (4, 4)})
    core.acked(2, end=9, durable=0)
    assert core.committed == 4
    assert core.acked(3, end=9, durable=9)
    assert core.committed == 9


def test_a_replica_that_comes_back_with_less_counts_for_less() -> None:
    core = leader(isr=(1, 2, 3), min_isr=2)
    core.written(9)
    core.acked(2, end=9, durable=9)
    core.opened(2, end=6, durable=6)
    core.acked(3, end=9, durable=9)
    assert core.committed == 6
    assert core.durable == 0
    assert core.acked(2, end=9, durable=6)
    assert core.committed == 9


def test_what_is_restated_with_the_isr_may_be_less_as_well() -> None:
    core = leader(isr=(1, 2, 3), min_isr=2)
    core.written(9)
    core.acked(2, end=9, durable=9)
    core.acked(3, end=5, durable=5)
    core.set_isr((1, 2, 3), (1, 2, 3), acked={2: (7, 7), 3: (5, 5)})
    core.acked(3, end=9, durable=9)
    assert core.committed == 7


def test_committed_does_not_fall_when_a_replica_comes_back_with_less() -> None:
    core = leader(isr=(1, 2), min_isr=2)
    core.written(9)
    core.acked(2, end=9, durable=9)
    assert not core.opened(2, end=0, durable=0)
    assert core.committed == 9


def test_the_floor_may_be_changed() -> None:
    core = leader(isr=(1, 2), min_isr=3)
    core.written(9)
    core.acked(2, end=9, durable=9)
    assert core.committed == 0
    assert core.set_isr((1, 2), (1, 2), min_isr=2)
    assert core.committed == 9


@pytest.mark.parametrize("sets", [((2,), (1, 2)), ((1, 2), (1,))])
def test_sets_that_break_the_rules_are_refused(sets: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(AssertionError):
        leader(isr=(1, 2)).set_isr(*sets)


def test_an_unknown_node_changes_nothing() -> None:
    core = leader()
    assert not core.acked(9, end=100, durable=100)
    assert core.committed == 0


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30), st.integers(0, 30)), max_size=40),
)
def test_committed_is_the_minimum_and_never_falls(sync_always: bool, acks: list[tuple[int, int, int]]) -> None:
    core = leader(sync_always=sync_always, isr=(1, 2, 3), min_isr=2)
    known = {1: [0, 0], 2: [0, 0], 3: [0, 0]}
    before = 0
    for node, end, durable in acks:
        durable = min(durable, end)
        known[node] = [max(known[node][0], end), max(known[node][1], durable)]
        moved = core.acked(node, end=end, durable=durable)
        expected = min(k[1 if sync_always else 0] for k in known.values())
        assert core.committed == max(before, expected)
        assert moved == (core.committed > before)
        before = core.committed
