"""Scenes of damage: what drawn lives come to seldom, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from nsqha.commitlog.journal import JOURNAL
from nsqha.commitlog.retention import Retention
from nsqha.election.placement import PartitionName
from nsqha.frames import HAS_EVENTS
from nsqha.server.opening.state_loader import durable_everywhere
from nsqha.server.replica.following.follower import Follower
from tests.sim.cluster import CHANNEL, SimCluster
from tests.sim.faults import Misfortune
from tests.sim.losses import vouched_on_disk
from tests.sim.node import DATA, SimNode
from tests.sim.scenes import SELDOM, a_follower, all_down, all_up, flip, healthy, leader
from tests.sim.storage import SECTOR


def test_damage_is_mended_from_another_replica() -> None:
    with healthy(faults={"bit_flip": SELDOM}, segment_bytes=2 << 10) as cluster:
        misfortune = Misfortune(cluster, cluster.new_rng())
        damaged = False
        for _ in range(10):
            misfortune.bit_flip()
            damaged |= next(cluster.comparison.damage(), None) is not None  # it may be mended in a moment
            cluster.run_for(0.2)
        assert cluster.flips and damaged
        cluster.end_well()


def test_an_empty_follower_finds_its_place_beside_a_damaged_first_entry() -> None:
    """The leader has the batch in memory and does not read it: it answered about epoch 1 when asked about epoch 0."""
    with healthy(nodes=4, faults={"bit_flip": SELDOM}, operations={"move": SELDOM}) as cluster:
        ((name, key, meta),) = cluster.named_metas()
        assert cluster.operators is not None
        first = leader(cluster)
        cluster.keep_down.add(first.name)
        first.end("killed")  # in epoch 1 the place of an empty log is known without asking
        cluster.until(lambda: cluster.metas()[0][1].leader != first.uid, 30.0, "another is elected")
        second = next(node for node in cluster.nodes if node.uid == cluster.metas()[0][1].leader)
        cluster.until(lambda: bool(second.replicas and second.replicas.leading), 30.0, "it leads")
        flip(cluster, second, 1, entry=True)
        new = next(node for node in cluster.nodes if node.uid not in meta.replicas)
        wanted = (*(uid for uid in meta.replicas if uid != first.uid), new.uid)
        cluster.operators._changes.move({PartitionName(name, *key): wanted})
        cluster.until(lambda: set(cluster.metas()[0][1].isr) == set(wanted), 30.0, "the new one is in sync")
        cluster.end_well()


@pytest.mark.parametrize("entry", [False, True])
def test_members_with_damage_of_their_own_mend_one_another_and_one_leads(entry: bool) -> None:
    """After a restart none of them may lead at first: their logs can not be vouched for."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        for n, node in enumerate(cluster.nodes):
            flip(cluster, node, 3 + 2 * n, entry=entry)
        all_down(cluster)
        all_up(cluster)
        cluster.end_well()


def test_members_that_restart_before_they_can_mend_one_another_do_so_later() -> None:
    """Each is alone at first, finds its damage, and nobody has what it lacks."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        for n, node in enumerate(cluster.nodes):
            flip(cluster, node, 3 + 2 * n, entry=True)
        cluster.run_for(1.5)  # the journal knows that they are on the disk
        all_down(cluster)
        for node in [*cluster.nodes, *cluster.nodes]:
            node.start()
            cluster.run_for(8.0)  # the lease of its last life has to end
            node.end("killed")
        all_up(cluster)
        cluster.end_well()


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
        marks = lambda: [log.entry(lost).lost for _, log, _, _ in cluster.comparison.holders(key)]  # noqa: E731
        cluster.until(lambda: marks() == [True] * 3, 60.0, "all have it as lost")
        cluster.check_end()
        given = {stored.body for stored in ledger.messages[key] if stored.log_id == lost}
        came = set(cluster.history.delivered[name, CHANNEL])
        assert given and set(cluster.history.acked) - came <= given


def test_a_log_that_was_trimmed_and_fell_silent_is_led_again() -> None:
    """Its checkpoint is its last batch: nothing behind says that it is committed, and nobody has it from elsewhere."""
    with healthy(retention_seconds=0.5, segment_bytes=2 << 10) as cluster:
        for publisher in cluster.publishers:
            publisher.stopped = True
        ((key, _),) = cluster.metas()
        logs = [log for _, log, _, _ in cluster.comparison.holders(key)]
        cluster.until(lambda: all(len(log.pairs) == 1 and log.start.log_id > 1 for log in logs), 30.0, "trimmed")
        assert all(durable_everywhere(log) < log.end.log_id for log in logs), "else nothing is shown"
        all_down(cluster)
        all_up(cluster)
        cluster.until(cluster.comparison.in_sync, 30.0, "it is led again")


@contextmanager
def only_a_node_that_is_down_has_a_batch() -> Iterator[tuple[SimCluster, SimNode, Callable[[], list[bool]]]]:
    """(cluster, the node, whether each of the others has given it up)."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        ((_, key, meta),) = cluster.named_metas()
        log = next(log for _, log, _, _ in cluster.comparison.holders(key))
        lost = next(n for n in range(2, log.end.log_id) if log.entry(n).flags == 0 and log.entry(n).count)
        has, *damaged = [node for node in cluster.nodes if node.uid != meta.leader] + [leader(cluster)]
        for node in damaged:
            flip(cluster, node, lost, entry=False)
        all_down(cluster)  # so that nobody has it in memory
        cluster.keep_down = {has.name}
        for node in damaged:
            node.start()

        def given_up() -> list[bool]:
            holders = [log for node, log, _, _ in cluster.comparison.holders(key) if node is not has]
            return [log.entry(lost).lost for log in holders]

        yield cluster, has, given_up
        cluster.end_well()


def test_what_was_given_up_is_written_back_when_somebody_has_it() -> None:
    with only_a_node_that_is_down_has_a_batch() as (cluster, _, given_up):
        operators = cluster.operators
        assert operators is not None

        def skipped() -> bool:
            operators.skip("t0")
            return given_up() == [True] * 2

        cluster.until(skipped, 60.0, "it is given up")
        for node in cluster.nodes:
            if node.joined and node.broker is not None:
                node.broker.scrub.scrubber._rate = 0  # it does not have to be found again


def test_nothing_is_given_up_that_somebody_has() -> None:
    """Though it was asked for in vain before, and nobody would ask again so soon."""
    with only_a_node_that_is_down_has_a_batch() as (cluster, has, given_up):
        damaged = [node for node in cluster.nodes if node is not has]
        leads = lambda: any(node.replicas and node.replicas.leading for node in damaged)  # noqa: E731
        cluster.until(leads, 30.0, "one of them leads")
        for node in damaged:
            cluster.net.partition(node.name, has.name)
        flip(cluster, has, 1, entry=False)  # else it would lead, for being whole
        has.start()
        cluster.run_for(15.0)
        assert given_up() == [False] * 2 and next(cluster.comparison.damage(), None) is not None
        assert leads(), "else nobody is asked to give up"
        cluster.net.heal_all()
        assert cluster.operators is not None
        for _ in range(20):
            cluster.operators.skip("t0")
            cluster.run_for(0.1)
            assert not any(given_up()), "somebody has it"


def silent(cluster: SimCluster) -> tuple[SimNode, SimNode, list[SimNode]]:
    """Nothing is published any more. The leader, a follower, all but that."""
    for publisher in cluster.publishers:
        publisher.stopped = True
    cluster.run_for(0.5)
    cluster.publishers.clear()
    leads = leader(cluster)
    node = a_follower(cluster)
    return leads, node, [other for other in cluster.nodes if other is not node]


def test_a_last_batch_that_was_written_whole_is_not_cut_like_a_torn_one() -> None:
    """Its process was killed before its journal, or any batch behind, knew that it is durable; its host goes on."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        ((key, _),) = cluster.metas()
        _, node, others = silent(cluster)
        assert node.replicas is not None and node.journal is not None
        log, last = node.replicas.followers[key].log, cluster.oracle.committed[key] - 1
        assert last == log.end.log_id - 1 >= node.journal._file.written[key].local_durable
        flip(cluster, node, last, entry=True)
        for other in others:
            cluster.metadata.reach(other.name, False)  # so that it stays in the ISR
            cluster.net.partition(other.name, node.name)
        node.end("killed")
        node.start()
        cluster.until(lambda: node.joined, 15.0, "it is back")
        cluster.run_for(0.1)  # somebody is in the ISR without a committed batch, else
        cluster.end_well()


@pytest.mark.parametrize("entry", [False, True])
def test_damage_is_found_at_each_start_until_it_is_mended(entry: bool) -> None:
    """While nobody else is there who could mend it."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        ((key, _),) = cluster.metas()
        _, node, _ = silent(cluster)
        assert node.journal is not None
        damaged = node.journal._file.written[key].local_durable
        assert damaged < cluster.oracle.committed[key] - 1
        flip(cluster, node, damaged, entry=entry)
        all_down(cluster)
        for _ in range(3):
            node.start()
            cluster.until(lambda: node.joined, 15.0, "it is back")
            cluster.run_for(2.0)
            assert node.replicas is not None and node.replicas.integrity.suspects.unsound_from(key) == damaged
            node.end("killed")
        all_up(cluster)
        cluster.end_well()


@pytest.mark.parametrize("entry", [False, True])
def test_a_damaged_batch_that_nobody_has_is_looked_behind(entry: bool) -> None:
    """A follower does not wait for it when a checkpoint behind it says all that it did."""
    with healthy(faults={"bit_flip": SELDOM}, segment_bytes=2 << 10) as cluster:
        ((key, _),) = cluster.metas()
        leads, node, _ = silent(cluster)
        cluster.run_for(4.0)  # its journal knows the end, so the next recovery does not look
        assert node.replicas is not None and leads.replicas is not None
        log = node.replicas.followers[key].log
        damaged = log.end.log_id - 1
        assert log.entry(damaged).flags & HAS_EVENTS and durable_everywhere(log) == damaged
        for holder in cluster.nodes:
            flip(cluster, holder, damaged, entry=False, keep=False)
        cluster.keep_down.add(node.name)
        node.end("killed")
        node.start()

        def follower() -> Follower | None:
            return None if node.replicas is None or not node.joined else node.replicas.followers.get(key)

        cluster.until(lambda: (f := follower()) is not None and f.applier.damage is not None, 15.0, "it waits")
        if entry:
            pair = node.replicas.followers[key].log.files.pair_of(damaged)
            node.storage.flip(pair.path(COMMITLOG), 8 * (pair.slot(damaged) + 50))
        leads.replicas.leading[key].partition.retention.retention = Retention(keep_ns=0, keep_bytes=0)
        cluster.until(
            lambda: (f := follower()) is not None and f.applier.damage is None, 60.0, "it does not wait for ever"
        )
        cluster.until(cluster.comparison.level, 10.0, "all have applied the same")


def test_an_operator_decides_between_a_cut_end_and_a_log_of_another_name() -> None:
    """Of two members one lost power within a write, and the journal of the other one, which has that batch, rotted."""
    with healthy() as cluster:
        ((_, key, meta),) = cluster.named_metas()
        leads, (torn, third) = leader(cluster), [node for node in cluster.nodes if node is not leader(cluster)]
        cluster.keep_down |= {third.name, torn.name, leads.name}
        third.end("killed")
        cluster.until(lambda: third.uid not in cluster.metas()[0][1].isr, 15.0, "it leaves the ISR")
        torn.disk_seconds = 1000.0
        assert torn.replicas is not None
        log = torn.replicas.followers[key].log
        cluster.until(lambda: log.end.log_id > cluster.oracle.committed[key], 5.0, "a batch is written, and not synced")
        pair = log.files.pair_of(log.end.log_id - 1)
        torn.storage._names[pair.path(COMMITLOG)].sync()  # by itself the disk wrote the entry, and not the frames
        torn.storage._names[pair.path(SEGMENT)].forget()
        torn.end("power loss", power=True)
        torn.disk_seconds = 0.001
        leads.end("killed")
        leads.storage.flip(f"{DATA}/{JOURNAL}", 8 * (SECTOR + 40))
        for node in (torn, leads):
            node.start()
        cluster.run_for(20.0)
        assert cluster.metas()[0][1].epoch == meta.epoch, "nobody is elected without an operator"
        cluster.end_well()
        assert cluster.counts["unclean elections"] == 1


def test_what_stood_for_many_batches_stands_for_no_single_one_that_was_given_up() -> None:
    """A disk lost a sector of entries, and one of these batches is damaged on the other replicas too. Whoever had given
    it up gave back the rest, and an empty entry was left in its place: one replica led without what channels had done
    in it, another one never knew it."""
    with healthy(faults={"bit_flip": SELDOM}) as cluster:
        ((_, key, _),) = cluster.named_metas()
        node = leader(cluster)
        assert node.replicas is not None
        log = node.replicas.table.log_of(key)
        assert log is not None
        lost = next(n for n in range(7, 20) if log.entry(n).flags & HAS_EVENTS)
        pair = log.files.pair_of(lost)
        sector = pair.slot(lost) // SECTOR
        assert pair.slot(lost - 1) // SECTOR == sector == pair.slot(lost + 1) // SECTOR
        cluster.lost.add((key, lost))
        for other in cluster.nodes:
            if other is not node:
                flip(cluster, other, lost, entry=False, keep=False)
        node.storage.blank(pair.path(COMMITLOG), sector)
        all_down(cluster)
        all_up(cluster)
        cluster.end_well()


def test_a_batch_counts_as_damaged_and_not_torn_by_entries_that_are_on_the_disk() -> None:
    """What an end that is not synced calls durable goes with the power, and the batch before it is a torn one."""
    said = {1: 1, 2: 1, 3: 2, 4: 4}  # by log id
    entries = lambda first, end: [SimpleNamespace(durable=at) for n, at in said.items() if first <= n < end]  # noqa: E731
    log: Any = SimpleNamespace(local_durable=4, entries=entries)
    assert vouched_on_disk(log) == 2
    log.local_durable = 5
    assert vouched_on_disk(log) == 4
