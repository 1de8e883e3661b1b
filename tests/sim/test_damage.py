"""Scenes of damage: what drawn lives come to seldom, or never."""

from __future__ import annotations

import pytest

from nsqha.election.placement import PartitionName
from nsqha.server.opening import durable_everywhere
from tests.sim.cluster import CHANNEL
from tests.sim.faults import Misfortune
from tests.sim.scenes import SELDOM, all_down, all_up, flip, healthy


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


def test_a_log_that_was_trimmed_and_fell_silent_is_led_again() -> None:
    """Its checkpoint is its last batch: nothing behind says that it is committed, and nobody has it from elsewhere."""
    with healthy(retention_seconds=0.5, segment_bytes=2 << 10) as cluster:
        for publisher in cluster.publishers:
            publisher.stopped = True
        ((key, _),) = cluster.metas()
        logs = [log_ for _, log_, _, _ in cluster.comparison.holders(key)]
        cluster.until(lambda: all(len(log_.pairs) == 1 and log_.start.log_id > 1 for log_ in logs), 30.0, "trimmed")
        assert all(durable_everywhere(log_) < log_.end.log_id for log_ in logs), "else nothing is shown"
        all_down(cluster)
        all_up(cluster)
        cluster.until(cluster.comparison.in_sync, 30.0, "it is led again")
