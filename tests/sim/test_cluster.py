"""Whole clusters under virtual time: scenes that once went wrong, forty drawn lives, and the simulation itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sim.cluster import CHANNEL, Plan, SimCluster
from tests.sim.mutants import MUTANTS, find
from tests.sim.node import SimNode
from tests.sim.run import run_seed

SEEDS = 40


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    """Three healthy nodes with a topic and clients."""
    with SimCluster(Plan(seed=1, pause_seconds=0.1)) as made:
        made.start()
        made.clients()
        made.run_for(1.0)
        yield made


def leader(cluster: SimCluster) -> SimNode:
    return next(node for node in cluster.nodes if node.replicas is not None and node.replicas.leading)


def test_a_killed_leader_is_replaced_and_nothing_is_lost(cluster: SimCluster) -> None:
    dead = leader(cluster)
    dead.end("killed")
    before = cluster.scheduler.now
    cluster.until(lambda: any(node.up and node.replicas and node.replicas.leading for node in cluster.nodes), 1.0, "-")
    assert cluster.scheduler.now - before <= 0.2
    cluster.run_for(2.0)
    cluster.heal()
    cluster.converge()
    cluster.check_end()
    assert cluster.history.acked and not cluster.history.missing("t0", CHANNEL)


def test_a_node_that_is_back_before_its_lease_ends_joins_again(cluster: SimCluster) -> None:
    """It serves before it may register: leaders that reach it meanwhile must learn its registration afterwards."""
    follower = next(node for node in cluster.nodes if node is not leader(cluster))
    cluster.keep_down.add(follower.name)
    follower.end("killed")
    cluster.until(lambda: all(len(meta.isr) == 2 for _, meta in cluster.metas()), 5.0, "it leaves the ISR")
    follower.start()
    cluster.until(lambda: all(len(meta.isr) == 3 for _, meta in cluster.metas()), 10.0, "it joins")


def test_all_machines_lose_power_at_once(cluster: SimCluster) -> None:
    for node in cluster.nodes:
        node.end("power loss", power=True)
    cluster.run_for(1.0)
    cluster.heal()
    cluster.converge()
    cluster.check_end()


@pytest.mark.parametrize("first", range(0, SEEDS, 5))
def test_drawn_lives(first: int) -> None:
    for seed in range(first, first + 5):
        life = run_seed(seed)
        assert not life.violation, str(life)
        assert life.acked, str(life)


@pytest.mark.parametrize("name", ["ack_from_the_page_cache", "epoch_resumed", "floor_ignored", "opened_anywhere"])
def test_planted_bugs_are_noticed(name: str) -> None:
    """A few of `make sim-mutants`, those that are found soon."""
    _, lives, _ = find(name, 10)
    assert lives


def test_a_seed_is_one_life() -> None:
    """In another process, with other hashes of strings, too."""
    code = "from tests.sim.run import run_seed; print(run_seed(3).fingerprint)"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": str(n)}, capture_output=True, text=True, check=True
        ).stdout
        for n in (1, 2)
    }
    assert told == {f"{run_seed(3).fingerprint}\n"}


def test_every_mutant_is_known_by_its_rule() -> None:
    assert len(MUTANTS) >= 10
