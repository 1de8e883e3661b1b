"""Whole clusters under virtual time: scenes that once went wrong, forty drawn lives, and the simulation itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha.commitlog.journal import JOURNAL
from nsqha.commitlog.recordfile import MAGIC, SECTOR
from nsqha.pb.v1 import admin_pb2
from tests.sim.cluster import CHANNEL, SimCluster
from tests.sim.mutants import SUITE
from tests.sim.node import DATA
from tests.sim.run import run_seed
from tests.sim.scenes import SELDOM, a_follower, healthy, leader, power_loss

SEEDS = 40


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    with healthy() as made:
        yield made


def test_a_killed_leader_is_replaced_and_nothing_is_lost(cluster: SimCluster) -> None:
    dead = leader(cluster)
    dead.end("killed")
    before = cluster.scheduler.now
    cluster.until(lambda: any(node.up and node.replicas and node.replicas.leading for node in cluster.nodes), 1.0, "-")
    assert cluster.scheduler.now - before <= 0.2
    cluster.run_for(2.0)
    cluster.end_well()
    assert cluster.history.acked and set(cluster.history.acked) <= set(cluster.history.delivered["t0", CHANNEL])


def test_a_node_that_is_back_before_its_lease_ends_joins_again(cluster: SimCluster) -> None:
    """It serves before it may register: leaders that reach it meanwhile must learn its registration afterwards."""
    follower = a_follower(cluster)
    cluster.keep_down.add(follower.name)
    follower.end("killed")
    cluster.until(lambda: all(len(meta.isr) == 2 for _, meta in cluster.metas()), 5.0, "it leaves the ISR")
    follower.start()
    cluster.until(lambda: all(len(meta.isr) == 3 for _, meta in cluster.metas()), 10.0, "it joins")


def test_a_leader_whose_disk_hangs_is_replaced_and_leads_again_when_it_does_not(cluster: SimCluster) -> None:
    """It answers every question, its followers have everything, and only its own disk is waited for."""
    hanging = leader(cluster)
    hanging.disk_seconds = 60.0
    cluster.run_for(1.0)  # what was under way has ended
    before = len(cluster.history.acked)
    cluster.until(lambda: len(cluster.history.acked) > before + 10, 25.0, "publishes are acknowledged again")
    assert leader(cluster) is not hanging
    hanging.disk_seconds = 0.001
    cluster.until(lambda: all(len(meta.isr) == 3 for _, meta in cluster.metas()), 120.0, "it is in sync again")
    cluster.until(lambda: leader(cluster) is hanging, 60.0, "it is the first replica")
    cluster.end_well()


def test_all_machines_lose_power_at_once(cluster: SimCluster) -> None:
    power_loss(cluster)
    cluster.run_for(1.0)
    cluster.end_well()


def test_a_seek_that_was_answered_survives_its_leader() -> None:
    with healthy(operations={"seek_start": SELDOM}) as cluster:
        assert cluster.operators is not None
        cluster.operators.seek_start()
        ledger = cluster.oracle.ledger
        cluster.until(lambda: ledger.operations[-1].again_from == 0, 2.0, "the seek is answered")
        leader(cluster).end("killed")
        cluster.run_for(1.0)
        cluster.end_well()
        assert min(cluster.history.delivered["t0", CHANNEL].values()) >= 2


def test_a_seek_is_not_answered_while_a_failover_could_undo_it() -> None:
    with healthy(operations={"seek_start": SELDOM}) as cluster:
        assert cluster.operators is not None
        alone = leader(cluster)
        for node in cluster.nodes:
            if node is not alone:
                cluster.net.partition(alone.name, node.name)
        cluster.run_for(0.1)  # what was under way has ended
        port = alone.admin
        answers: list[Any] = []
        assert port is not None
        request = admin_pb2.SeekRequest(topic="t0", channel=CHANNEL, target=admin_pb2.SeekTarget(start=True))
        cluster.operators.ask(alone, "seek", lambda: port.seek(request), answers.append)
        cluster.run_for(0.4)
        assert not answers, "it is in no other log"
        cluster.net.heal_all()
        cluster.end_well()


def test_a_join_whose_outcome_is_unknown_may_have_been_done() -> None:
    from tests.scripts.transcript import play

    script = (Path(__file__).parent.parent / "scripts" / "unknown.script").read_text()
    assert play(script) == script


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
        cluster.end_well()


def test_publishing_goes_on_while_the_metadata_are_away_for_all(cluster: SimCluster) -> None:
    """For longer than a lease. Nobody's role changes, then or when they are back and every lease has its time again."""
    ((_, before),) = cluster.metas()
    cluster.metadata.away(True)
    for _ in range(10):
        acked = len(cluster.history.acked)
        cluster.run_for(1.0)
        assert len(cluster.history.acked) > acked
    assert not cluster.history.failed and not cluster.history.unknown
    cluster.metadata.away(False)
    cluster.run_for(5.0)
    ((_, after),) = cluster.metas()
    assert (after.epoch, after.leader, after.isr) == (before.epoch, before.leader, before.isr)
    cluster.end_well()


def test_a_dead_leader_is_replaced_when_the_metadata_are_back(cluster: SimCluster) -> None:
    """Its lease was good for as long as they were away, and has its whole time again."""
    dead = leader(cluster)
    cluster.keep_down.add(dead.name)
    cluster.metadata.away(True)
    dead.end("killed")
    cluster.run_for(6.0)
    cluster.metadata.away(False)
    cluster.until(lambda: any(n.up and n.replicas and n.replicas.leading for n in cluster.nodes), 5.0, "one leads")
    cluster.end_well()


def test_what_is_deferred_for_longer_than_files_stay_comes_all_the_same() -> None:
    with healthy(retention_seconds=0.5, segment_bytes=2 << 10, delay_seconds=6.0, pause_seconds=0.05) as cluster:
        cluster.run_for(10.0)
        cluster.end_well()


@pytest.mark.parametrize("record", [0, 1, -1])
def test_a_journal_that_rots_costs_the_logs_their_names(cluster: SimCluster, record: int) -> None:
    follower = a_follower(cluster)
    ((_, meta),) = cluster.metas()
    cluster.keep_down.add(follower.name)
    follower.end("killed")
    path = f"{DATA}/{JOURNAL}"
    data = follower.storage.contents()[path]
    starts = [at for at in range(0, len(data), SECTOR) if data.startswith(MAGIC, at)]
    assert len(starts) > 2
    follower.storage.flip(path, 8 * (starts[record] + 40))
    follower.start()
    cluster.until(lambda: follower.joined, 10.0, "it is back")
    cluster.end_well()
    ((_, after),) = cluster.metas()
    assert after.isr.keys() == meta.isr.keys() and after.isr[follower.uid] != meta.isr[follower.uid]


def test_files_of_a_deleted_topic_go_where_the_journal_has_forgotten_it() -> None:
    with healthy(operations={"delete_topic": SELDOM}) as cluster:
        assert cluster.operators is not None
        follower = a_follower(cluster)
        path, (doomed,) = f"{DATA}/{JOURNAL}", [key[0] for name, key, _ in cluster.named_metas() if name == "doomed"]

        def records() -> list[tuple[int, bool]]:
            """Where they are, and whether they speak of the topic."""
            data = follower.storage.contents()[path]
            starts = [at for at in range(0, len(data), SECTOR) if data.startswith(MAGIC, at)]
            return [(at, b"%016x-" % doomed in data[at : at + SECTOR]) for at in starts]

        cluster.until(lambda: not all(named for _, named in records()), 20.0, "one does not")
        cluster.keep_down.add(follower.name)
        follower.end("killed")
        for at, named in records():
            if named:
                follower.storage.flip(path, 8 * (at + 40))
        cluster.operators.delete_topic()
        cluster.run_for(1.0)
        cluster.end_well()


def test_an_epoch_whose_leader_has_ended_binds_nobody() -> None:
    """It knows of no pause that is answered now, and what it wrote before may be committed after it."""
    with healthy(operations={"pause_topic": SELDOM}) as cluster:
        assert cluster.operators is not None
        asked = leader(cluster)
        ((_, meta),) = cluster.metas()
        assert cluster.operators.epochs_known(asked, "t0") == {0: meta.epoch}
        for controller in cluster.controllers:
            controller.freeze()
        asked.end("killed")
        asked.start()
        cluster.until(lambda: asked.joined, 10.0, "it is back")
        assert cluster.metas()[0][1].epoch == meta.epoch, "else nothing is shown"
        assert cluster.operators.epochs_known(asked, "t0") == {}


def test_a_failed_fsync_costs_a_log_its_name_though_the_machine_goes_on() -> None:
    """With sync=interval what it had in the page cache was acknowledged, and is gone."""
    with healthy(sync="interval") as cluster:
        follower = a_follower(cluster)
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
        cluster.end_well()


def test_a_node_whose_sync_fails_while_a_replica_is_made_ends(cluster: SimCluster) -> None:
    """It is made again at once, and that sync succeeds: what the first one lost is whole in the page cache alone."""
    follower = a_follower(cluster)
    follower.storage.fail("sync", "/more-")
    topics = leader(cluster).broker.topics  # type: ignore[union-attr]
    leader(cluster).loop.create_task(topics.create_topic("more"))
    cluster.until(lambda: not follower.up, 2.0, "it ends")
    assert cluster.counts["poisoned"] == 1
    cluster.end_well()


def test_files_of_a_deleted_topic_do_not_come_back_with_the_power() -> None:
    with healthy(operations={"delete_topic": SELDOM}) as cluster:
        assert cluster.operators is not None
        cluster.operators.delete_topic()
        cluster.run_for(0.3)
        power_loss(cluster)
        cluster.run_for(1.0)
        cluster.end_well()


@pytest.mark.parametrize("first", range(0, SEEDS, 5))
def test_drawn_lives(first: int) -> None:
    for seed in range(first, first + 5):
        life = run_seed(seed)
        assert not life.violation, str(life)
        assert life.acked, str(life)


@pytest.mark.parametrize("name", ["ack_from_the_page_cache", "epoch_resumed", "floor_ignored", "cut_too_far"])
def test_planted_bugs_are_noticed(name: str) -> None:
    """A few of `make sim-mutants`, those that are found soon."""
    assert SUITE.noticed(name, range(10)) is not None


def test_a_seed_is_one_life() -> None:
    """In another process, with other hashes of strings and other addresses of objects, too."""
    code = (
        "import random; junk = [object() for _ in range({} * 10**5)]; random.Random(1).shuffle(junk); del junk[::2]\n"
        "from tests.sim.run import run_seed; print(run_seed(0).fingerprint)"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code.format(n)],
            env={"PYTHONHASHSEED": str(n)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in (0, 1, 2)
    }
    assert told == {f"{run_seed(0).fingerprint}\n"}


@pytest.mark.parametrize("name", sorted(SUITE.mutants))
def test_every_mutant_fits_the_product(name: str) -> None:
    """What it changes is there."""
    with SUITE.mutants[name].plant():
        pass


def test_every_mutant_is_known_by_its_rule() -> None:
    assert len(SUITE.mutants) >= 48
