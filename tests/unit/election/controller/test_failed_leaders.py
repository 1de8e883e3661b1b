"""Which nodes come last after they did not lead, and when a leader that runs may be replaced again."""

from __future__ import annotations

from nsqha.election.controller.failed_leaders import FORGET_S, LAST_S, REPLACE_S, RETURN_S, FailedLeaders
from nsqha.election.model import NodeInfo
from nsqha.election.placement import PartitionName

NAME, OTHER = PartitionName("t", 1, 0), PartitionName("t", 1, 1)
NODES = {1: NodeInfo(1, registration=7), 2: NodeInfo(2, registration=8)}


def test_a_node_that_failed_comes_last_for_twice_as_long_each_time() -> None:
    failed, now, lengths = FailedLeaders(), 100.0, []
    for _ in range(9):
        failed.failed(NAME, 1, 7, now)
        length = next(s for s in range(1, 2000) if not failed.last(NAME, NODES, now + s))
        lengths.append(float(length))
        now += length
    assert lengths[:4] == [LAST_S[0], 2 * LAST_S[0], 4 * LAST_S[0], 8 * LAST_S[0]]
    assert max(lengths) == LAST_S[1]


def test_a_failure_is_of_one_partition_and_one_life() -> None:
    failed = FailedLeaders()
    failed.failed(NAME, 1, 7, 0.0)
    assert failed.last(NAME, NODES, 1.0) == {1}
    assert not failed.last(OTHER, NODES, 1.0)
    assert not failed.last(NAME, {1: NodeInfo(1, registration=9)}, 1.0)
    failed.forget(NAME)
    assert not failed.last(NAME, NODES, 1.0)


def test_replacements_of_leaders_that_run_are_at_most_three_a_minute() -> None:
    failed, now, times = FailedLeaders(), 0.0, []
    while now < 600.0:
        failed.replaced(NAME, now)
        times.append(now)
        now = failed.next_due(NAME)
    assert times[:2] == [0.0, REPLACE_S[0]]
    assert all(sum(begin <= at < begin + 60.0 for at in times) <= 3 for begin in range(600))


def test_what_is_long_past_does_not_count() -> None:
    failed = FailedLeaders()
    for now in (0.0, 10.0):
        failed.failed(NAME, 1, 7, now)
        failed.replaced(NAME, now)
    late = 100.0 + FORGET_S
    failed.failed(NAME, 1, 7, late)
    failed.replaced(NAME, late)
    assert not failed.last(NAME, NODES, late + LAST_S[0])
    assert failed.next_due(NAME) == late + REPLACE_S[0]


def test_a_node_that_loses_the_lead_again_gets_it_back_later_each_time() -> None:
    failed, now, pauses = FailedLeaders(), 100.0, []
    for _ in range(7):
        failed.lost(NAME, 1, now)
        pause = next(s for s in range(2000) if failed.may_return(NAME, 1, now + s))
        pauses.append(float(pause))
        now += pause + 5.0
    assert pauses == [0.0, *(min(RETURN_S[0] * 2**n, RETURN_S[1]) for n in range(6))]
    failed.lost(NAME, 1, now)
    assert failed.may_return(NAME, 2, now) and failed.may_return(OTHER, 1, now) and not failed.may_return(NAME, 1, now)
    failed.lost(NAME, 1, now + RETURN_S[1] + FORGET_S)
    assert failed.may_return(NAME, 1, now + RETURN_S[1] + FORGET_S), "what is long past does not count"
