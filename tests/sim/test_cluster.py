"""Whole clusters under virtual time: scenes that once went wrong, forty drawn lives, and the simulation itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nsqha.commitlog.pairs import COMMITLOG, SEGMENT
from nsqha.election.placement import PartitionName
from tests.sim.cluster import CHANNEL, SimCluster
from tests.sim.faults import Misfortune
from tests.sim.mutants import MUTANTS, find
from tests.sim.node import SimNode
from tests.sim.plan import Plan
from tests.sim.run import run_seed

SEEDS = 40


SELDOM = 1e-9  # of what the test does itself


@contextmanager
def healthy(**plan: Any) -> Iterator[SimCluster]:
    """Three healthy nodes with a topic and clients."""
    with SimCluster(Plan(seed=1, pause_seconds=0.1, **plan)) as made:
        made.start()
        made.clients()
        made.run_for(1.0)
        yield made


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    with healthy() as made:
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
    assert cluster.history.acked and set(cluster.history.acked) <= set(cluster.history.delivered["t0", CHANNEL])


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


def test_a_seek_that_was_answered_survives_its_leader() -> None:
    with healthy(operations={"seek_start": SELDOM}) as cluster:
        assert cluster.operators is not None
        cluster.operators.seek_start()
        ledger = cluster.oracle.ledger
        cluster.until(lambda: ledger.operations[-1].again_from == 0, 2.0, "the seek is answered")
        leader(cluster).end("killed")
        cluster.run_for(1.0)
        cluster.heal()
        cluster.converge()
        cluster.check_end()
        assert min(cluster.history.delivered["t0", CHANNEL].values()) >= 2


def test_a_pause_survives_its_leader() -> None:
    with healthy(operations={"pause_channel": SELDOM}) as cluster:
        assert cluster.operators is not None
        done: list[bool] = []
        cluster.operators.pause(leader(cluster), "t0", CHANNEL, True, done.append)
        cluster.until(lambda: done == [True], 2.0, "the pause is answered")
        leader(cluster).end("killed")
        before = cluster.history.delivered["t0", CHANNEL].total()
        cluster.run_for(2.0)
        assert cluster.history.delivered["t0", CHANNEL].total() == before
        cluster.heal()
        cluster.converge()
        cluster.check_end()


def test_a_failed_fsync_costs_a_log_its_name_though_the_machine_goes_on() -> None:
    """With sync=interval what it had in the page cache was acknowledged, and is gone."""
    with healthy(sync="interval") as cluster:
        follower = next(node for node in cluster.nodes if node is not leader(cluster))
        ((key, meta),) = cluster.metas()
        cluster.keep_down.add(follower.name)
        for node in cluster.nodes:
            if node is not follower:
                cluster.metadata.reach(node.name, False)  # so that it stays in the ISR
                cluster.net.partition(node.name, follower.name)
        follower.storage.fail("sync", path="/topics/")
        cluster.until(lambda: not follower.up, 5.0, "it ends")
        follower.start()
        cluster.run_for(0.5)
        assert follower.replicas is not None
        replica = follower.replicas.followers[key]
        assert replica.log.end.log_id < cluster.oracle.committed[key], "else nothing is shown"
        assert replica.log_uid != meta.isr[follower.uid] == cluster.metas()[0][1].isr[follower.uid]
        cluster.heal()
        cluster.converge()
        cluster.check_end()


def test_files_of_a_deleted_topic_do_not_come_back_with_the_power() -> None:
    with healthy(operations={"delete_topic": SELDOM}) as cluster:
        assert cluster.operators is not None
        cluster.operators.delete_topic()
        cluster.run_for(0.3)
        for node in cluster.nodes:
            node.end("power loss", power=True)
        cluster.run_for(1.0)
        cluster.heal()
        cluster.converge()
        cluster.check_end()


def test_damage_is_mended_from_another_replica() -> None:
    with healthy(faults={"bit_flip": SELDOM}, segment_bytes=2 << 10) as cluster:
        misfortune = Misfortune(cluster, cluster.new_rng())
        for _ in range(10):
            misfortune.bit_flip()
            cluster.run_for(0.2)
        assert cluster.flips and next(cluster.comparison.damage(), None) is not None
        cluster.heal()
        cluster.converge()
        cluster.check_end()


def flip(cluster: SimCluster, node: SimNode, log_id: int, *, entry: bool, keep: bool = True) -> None:
    """Damage a batch on one disk; `keep`: it is to be as it was at the end."""
    ((key, _),) = cluster.metas()
    assert node.replicas is not None
    log_ = node.replicas.log_of(key)
    assert log_ is not None
    known, pair = log_.entry(log_id), log_.pair_of(log_id)
    places = [(pair.path(SEGMENT), known.position - pair.position + 4)]
    if entry:
        places.append((pair.path(COMMITLOG), pair.slot(log_id) + 50))
    for path, at in places:
        if keep:
            cluster.flips.append((node, path, at, node.storage.contents()[path][at]))
        node.storage.flip(path, 8 * at)


def all_down(cluster: SimCluster) -> None:
    for node in cluster.nodes:
        cluster.keep_down.add(node.name)
        node.end("killed")


def all_up(cluster: SimCluster) -> None:
    cluster.keep_down.clear()
    for node in cluster.nodes:
        node.start()
    cluster.until(lambda: all(node.joined for node in cluster.nodes), 15.0, "they are back")


@pytest.mark.parametrize("entry", [False, True])
def test_members_with_damage_of_their_own_mend_one_another_and_one_leads(entry: bool) -> None:
    """After a restart none of them may lead at first: their logs can not be vouched for."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        for n, node in enumerate(cluster.nodes):
            flip(cluster, node, 3 + 2 * n, entry=entry)
        all_down(cluster)
        all_up(cluster)
        cluster.heal()
        cluster.converge()
        cluster.check_end()


@pytest.mark.parametrize("entry", [False, True])
def test_a_batch_that_nobody_has_costs_itself_and_nothing_else(entry: bool) -> None:
    """An operator lets one of the damaged replicas lead, moves the partition to a new node, and channels go on."""
    with healthy(nodes=4, faults={"bit_flip": SELDOM}, operations={"move": SELDOM}) as cluster:
        ((name, key, meta),) = cluster.named_metas()
        holders = [node for node in cluster.nodes if node.uid in meta.replicas]
        ledger = cluster.oracle.ledger
        lost = next(stored.log_id for stored in ledger.messages[key][4:])
        cluster.lost.add((key, lost))
        for n, node in enumerate(holders):
            flip(cluster, node, lost, entry=entry, keep=False)
            flip(cluster, node, lost + 2 + n, entry=True)  # and what others have
        all_down(cluster)
        all_up(cluster)
        assert cluster.operators is not None
        cluster.run_for(10.0)
        if not entry:  # found only when somebody reads it: one of them may lead as soon as the rest is mended
            cluster.until(lambda: any(n.replicas and n.replicas.leading for n in cluster.nodes), 30.0, "one leads")
        else:
            assert not any(node.replicas and node.replicas.leading for node in cluster.nodes)
            assert cluster.operators.elect_unclean(name, key, holders[0]) == ""
            cluster.until(lambda: bool(holders[0].replicas and holders[0].replicas.leading), 30.0, "it leads")
            cluster.until(lambda: len(cluster.metas()[0][1].isr) == 3, 30.0, "the others join")
        new = next(node for node in cluster.nodes if node not in holders)
        wanted = (new.uid, holders[1].uid, holders[2].uid)
        cluster.operators._changes.move({PartitionName(name, *key): wanted})
        for _ in range(40):
            cluster.operators.skip(name)
            cluster.run_for(1.0)
            if set(cluster.metas()[0][1].isr) == set(wanted):
                break
        cluster.heal()
        for reader in cluster.readers:
            reader.diligent = True
        for _ in range(5):  # each channel stops there by itself
            cluster.run_for(1.0)
            cluster.operators.skip(name)
        cluster.converge()
        marks = lambda: [log_.entry(lost).lost for _, log_, _, _ in cluster.comparison.holders(key)]  # noqa: E731
        cluster.until(lambda: marks() == [True] * 3, 60.0, "all have it as lost")
        cluster.check_end()
        given = {stored.body for stored in ledger.messages[key] if stored.log_id == lost}
        came = set(cluster.history.delivered[name, CHANNEL])
        assert given and set(cluster.history.acked) - came <= given


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
    assert len(MUTANTS) >= 30
