"""What the controller makes of a topic's settings that change while it lives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nsqha.election.controller.planner import PlanLimits, fewer
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.model import NodeInfo, PartitionMeta
from tests.unit.election.cluster_rig import Cluster

QUICK = ControllerLimits(plan=PlanLimits(settle_s=1.0, replace_after_s=20.0, emergency_after_s=10.0))


def cluster(*, nodes: int = 3, **settings: int) -> Cluster:
    found = Cluster(1, nodes=nodes, limits=QUICK)
    found.create("t", **settings)
    found.run(3.0)
    return found


def change(c: Cluster, partitions: int = 1, **settings: Any) -> None:
    topic = c.store.records.topic("t")
    assert topic is not None
    record = topic.record
    new = {n: PartitionMeta() for n in range(len(record.partitions), partitions)}
    record = replace(
        record,
        settings=replace(record.settings, partitions=partitions, **settings),
        partitions={**record.partitions, **new},
    )
    c.store.records.replace("t", topic.version, record)


def test_more_replicas_then_fewer() -> None:
    c = cluster(nodes=4, replicas=1)
    assert len(c.meta("t").replicas) == 1
    change(c, replicas=3)
    c.run(10.0)
    meta = c.meta("t")
    assert (len(meta.replicas), len(meta.isr), meta.min_isr) == (3, 3, 2)
    leader = meta.leader
    change(c, replicas=2)
    c.run(10.0)
    fewer = c.meta("t")
    assert (len(fewer.replicas), len(fewer.isr), fewer.min_isr) == (2, 2, 2)
    assert fewer.leader == leader, "who leads stays"
    assert set(fewer.replicas) == set(fewer.isr) < set(meta.replicas)


def test_replicas_that_are_not_in_sync_go_first() -> None:
    c = cluster(replicas=3)
    meta = c.meta("t")
    away = next(node for node in meta.replicas if node != meta.leader)
    c.kill(away)
    c.run(5.0)
    assert away not in c.meta("t").isr
    change(c, replicas=2)
    c.run(5.0)
    fewer = c.meta("t")
    assert away not in fewer.replicas
    assert len(fewer.isr) == 2


def test_who_is_there_and_not_in_sync_goes_first() -> None:
    nodes = {n: NodeInfo(n) for n in (1, 2, 3, 4)}
    meta = PartitionMeta(leader=3, replicas=(1, 2, 3, 4), isr={2: 9, 3: 9, 4: 9})
    assert fewer(meta, 2, nodes) == ((2, 3), "fewer_replicas")
    assert fewer(meta, 1, nodes) == ((3,), "fewer_replicas")
    assert fewer(meta, 4, nodes) is None


def test_nobody_goes_while_too_few_are_in_sync() -> None:
    c = cluster(replicas=3)
    meta = c.meta("t")
    for node in meta.replicas:
        if node != meta.leader:
            c.kill(node)
    c.run(5.0)
    change(c, replicas=2)
    c.run(5.0)
    assert c.meta("t").replicas == meta.replicas


def test_replicas_by_default_stay() -> None:
    c = cluster(nodes=4, replicas=4)
    change(c, replicas=None)
    c.run(10.0)
    assert len(c.meta("t").replicas) == 4


def test_new_partitions_are_placed_and_led() -> None:
    c = cluster()
    change(c, partitions=3)
    c.run(3.0)
    metas = [c.meta("t", n) for n in range(3)]
    assert all(meta.leader and len(meta.isr) == 3 for meta in metas)
    assert len({meta.leader for meta in metas}) == 3


def test_no_replicas_are_added_while_nobody_leads() -> None:
    """The only one comes back without its log: it is taken for what it has, as nobody else can have more."""
    c = cluster(nodes=4, replicas=1)
    leader = c.meta("t").leader
    c.kill(leader)
    c.run(0.01)
    change(c, replicas=3)
    c.run(10.0)
    assert c.meta("t").replicas == (leader,)
    c.restart(leader, lost_log=True)
    c.run(10.0)
    meta = c.meta("t")
    assert (meta.leader, len(meta.replicas), len(meta.isr)) == (leader, 3, 3)
