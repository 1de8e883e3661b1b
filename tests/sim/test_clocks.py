"""Wall clocks that are wrong: nothing is removed too early, stamps and time seeks stay right within the bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nsqha.commitlog.log import PartitionLog
from tests.sim.cluster import SimCluster
from tests.sim.loop import START, WALL_NS
from tests.sim.node import SimNode
from tests.sim.scenes import a_follower, healthy, leader

HOUR = 3600.0
YEARS = 10 * 365.25 * 24 * HOUR
BOUND = 10.0  # --max-clock-skew
SLACK = 1.0  # reading a clock over the network, and what had come before the first comparison
RETENTION = 150.0  # longer than all that comes before a scene asks whether anything is old
EPOCHS_A_MINUTE = 3
A_SECOND, TEN_MINUTES = 1.0, 600.0

STEPS = {"an hour ahead": HOUR, "an hour behind": -HOUR, "ten years ahead": YEARS}


WRONG = [  # at which node, how, and how long; the matrix of faults that stay has every step at every role
    *(("leader", step, lasts) for step in STEPS for lasts in (A_SECOND, TEN_MINUTES)),
    ("follower", "an hour behind", A_SECOND),
    ("follower", "ten years ahead", A_SECOND),
    ("follower", "ten years ahead", TEN_MINUTES),
]


@contextmanager
def compared(retention: float = RETENTION) -> Iterator[SimCluster]:
    """A cluster whose nodes know each other's clocks. Its publishers are slow: simulated time costs what happens."""
    with healthy(pause_seconds=4.0, retention_seconds=retention, segment_bytes=1024) as cluster:
        cluster.run_for(10.0)
        yield cluster


def true_ns(cluster: SimCluster) -> int:
    return WALL_NS + round((cluster.scheduler.now - START) * 1e9)


def log_of(cluster: SimCluster, node: SimNode | None = None) -> PartitionLog:
    ((key, _),) = cluster.metas()
    replicas = (node or leader(cluster)).replicas
    log = replicas.table.log_of(key) if replicas is not None else None
    assert log is not None
    return log


def epoch(cluster: SimCluster) -> int:
    ((_, meta),) = cluster.metas()
    assert isinstance(meta.epoch, int)
    return meta.epoch


def stamps_are_right(cluster: SimCluster) -> None:
    last = log_of(cluster).last
    assert last is not None
    assert abs(last.timestamp_ns - true_ns(cluster)) <= (BOUND + SLACK + 2.0) * 1e9, "written in the last two seconds"


def a_time_seek_is_right(cluster: SimCluster, marks: list[tuple[int, int]]) -> None:
    """Nothing that was written after a time is passed over, but for the bound; nor is more repeated."""
    log, bound = log_of(cluster), round((BOUND + SLACK) * 1e9)
    for when, end in marks:
        found = log.entry_for_time(when - bound)
        assert found is not None and found.log_id <= end, "it passes over what is newer"
        found = log.entry_for_time(when + bound)
        assert found is None or found.log_id >= end, "it repeats what is older"


@pytest.mark.parametrize(("who", "step", "lasts"), WRONG)
def test_a_wrong_clock_costs_nothing_but_the_lead(who: str, step: str, lasts: float) -> None:
    retention = RETENTION + lasts
    with compared(retention) as cluster:
        first, before, acked = log_of(cluster).start, epoch(cluster), len(cluster.history.acked)
        victim = leader(cluster) if who == "leader" else a_follower(cluster)
        marks: list[tuple[int, int]] = []
        cluster.set_clock(victim, STEPS[step])
        for _ in range(10):
            cluster.run_for(lasts / 10)
            marks.append((true_ns(cluster), log_of(cluster).end.log_id))
        if lasts > 60.0:
            stamps_are_right(cluster)
            assert leader(cluster) is not victim
            assert len(cluster.history.acked) > acked + lasts / 5, "others lead"
        else:
            assert epoch(cluster) == before, "one step is no reason to change leaders"
        assert epoch(cluster) - before <= EPOCHS_A_MINUTE * max(1.0, lasts / 60)
        assert all(log_of(cluster, node).start == first for node in cluster.nodes), "nothing is old"
        cluster.set_clock(victim, 0.0)
        cluster.run_for(60.0)
        stamps_are_right(cluster)
        a_time_seek_is_right(cluster, marks)
        assert log_of(cluster).start == first
        cluster.run_for(retention)
        assert log_of(cluster).start.offset > first.offset, "what is old goes again"
        cluster.end_well()


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_starts_with_a_wrong_clock_removes_nothing(step: str) -> None:
    with compared() as cluster:
        first, victim = log_of(cluster).start, leader(cluster)
        cluster.keep_down.add(victim.name)
        victim.end("killed")
        cluster.set_clock(victim, STEPS[step])
        cluster.run_for(10.0)
        cluster.keep_down.clear()
        victim.start()
        cluster.run_for(60.0)
        stamps_are_right(cluster)
        assert leader(cluster) is not victim
        assert all(log_of(cluster, node).start == first for node in cluster.nodes)
        cluster.set_clock(victim, 0.0)
        cluster.run_for(60.0)
        assert leader(cluster) is victim, "it is the first replica, and may lead again"
        cluster.end_well()


def test_nothing_is_old_while_two_nodes_disagree_and_the_third_is_away() -> None:
    """Of the two that are left neither knows which one is wrong: what is old stays until they agree."""
    with compared() as cluster:
        first, away, victim = log_of(cluster).start, a_follower(cluster), leader(cluster)
        cluster.keep_down.add(away.name)
        away.end("killed")
        cluster.run_for(30.0)
        before = epoch(cluster)
        cluster.set_clock(victim, YEARS)
        cluster.run_for(TEN_MINUTES + 120.0)  # longer than a node that is alone disbelieves a step
        assert epoch(cluster) == before, "no majority says that it is wrong"
        stamps_are_right(cluster)
        assert log_of(cluster).start == first, "while clocks disagree nothing is old"
        cluster.set_clock(victim, 0.0)
        cluster.run_for(60.0)
        assert log_of(cluster).start.offset > first.offset
        cluster.end_well()


def test_a_follower_with_a_wrong_clock_counts_while_another_one_is_away() -> None:
    """It declines to lead, and nothing else: with it two of three have what is acknowledged."""
    with compared() as cluster:
        victim = a_follower(cluster)
        cluster.set_clock(victim, HOUR)
        cluster.run_for(30.0)
        assert victim.uid in cluster.metas()[0][1].isr
        other = next(node for node in cluster.nodes if node not in (victim, leader(cluster)))
        cluster.keep_down.add(other.name)
        other.end("killed")
        cluster.run_for(10.0)
        acked = len(cluster.history.acked)
        cluster.run_for(10.0)
        assert len(cluster.history.acked) > acked
        cluster.end_well()


def test_a_replica_with_a_wrong_clock_joins_again_after_a_restart() -> None:
    with compared() as cluster:
        victim = a_follower(cluster)
        cluster.set_clock(victim, -HOUR)
        cluster.run_for(30.0)
        cluster.keep_down.add(victim.name)
        victim.end("killed")
        cluster.until(lambda: victim.uid not in cluster.metas()[0][1].isr, 30.0, "it left")
        cluster.keep_down.clear()
        victim.start()
        cluster.until(lambda: victim.uid in cluster.metas()[0][1].isr, 60.0, "it is in sync again")
        cluster.end_well()
