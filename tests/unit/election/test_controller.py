"""Stories of a controller over simulated nodes: what happens, and how long it may take in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.election.events import Suspect
from nsqha.election.moves import decommission_name
from nsqha.election.planner import PlanLimits
from nsqha.election.rounds import Limits
from tests.unit.election.cluster_rig import Cluster

QUICK = Limits(plan=PlanLimits(settle_s=1.0, replace_after_s=20.0, emergency_after_s=10.0))


def cluster(seed: int = 1, *, nodes: int = 3, **settings: int) -> Cluster:
    found = Cluster(seed, nodes=nodes, limits=QUICK)
    found.create("t", **settings)
    found.run(1.0)
    return found


def test_a_new_topic_is_placed_and_led_and_its_replicas_join() -> None:
    c = cluster(partitions=3)
    metas = [c.meta("t", n) for n in range(3)]
    assert all(sorted(meta.replicas) == [1, 2, 3] and set(meta.isr) == {1, 2, 3} for meta in metas)
    assert sorted(meta.leader for meta in metas) == [1, 2, 3]
    assert all(meta.min_isr == 2 for meta in metas)


def test_a_killed_leader_is_replaced_in_far_less_than_its_lease() -> None:
    c = cluster()
    before = c.meta("t")
    c.kill(before.leader)
    c.run(0.1)
    after = c.meta("t")
    assert after.leader not in (0, before.leader) and after.epoch > before.epoch
    assert before.leader not in after.isr
    (told,) = c.events("leader_elected")[-1:]
    assert told["why"] == "leader does not answer"
    assert isinstance(told["seconds"], float) and 0 < told["seconds"] < 0.1


def test_a_leader_that_still_answers_keeps_its_epoch() -> None:
    c = cluster()
    before = c.meta("t")
    c.feed(Suspect(before.leader, "stream ended"))
    c.run(1.0)
    assert c.meta("t").epoch == before.epoch
    assert not c.machine.rounds


def test_a_silent_host_is_replaced_after_the_doubt() -> None:
    c = cluster()
    before = c.meta("t")
    c.nodes[before.leader].silent = True
    c.feed(Suspect(before.leader, "blamed"))
    c.run(0.2)
    assert c.meta("t").leader != before.leader


def test_without_any_news_the_lease_is_the_backstop() -> None:
    c = cluster()
    before = c.meta("t")
    c.kill(before.leader, heard=False)
    c.run(1.0)
    assert c.meta("t").leader == before.leader
    c.run(3.0)
    assert c.meta("t").leader != before.leader


def test_leaderships_come_back_to_the_first_replica() -> None:
    c = cluster()
    first = c.meta("t").replicas[0]
    assert c.meta("t").leader == first
    c.kill(first)
    c.run(4.0)
    c.restart(first)
    c.run(10.0)
    meta = c.meta("t")
    assert meta.leader == first and set(meta.isr) == {1, 2, 3}
    assert c.events("leader_elected")[-1]["why"] == "transfer"


def test_a_node_that_leaves_hands_over_first() -> None:
    c = cluster()
    before = c.meta("t")
    node = c.nodes[before.leader]
    node.info = node.session.update(replace(node.info, leaving=True))
    c.run(0.3)
    after = c.meta("t")
    assert after.leader != before.leader and after.isr == before.isr and after.successor == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_decommissioned_node_is_emptied(seed: int) -> None:
    c = cluster(seed, nodes=4, partitions=6)
    c.store.put_intent(decommission_name(2), {"node": 2})
    c.run(60.0)
    metas = c.parts()
    assert all(2 not in meta.replicas and 2 not in meta.isr for meta in metas.values())
    assert all(len(meta.replicas) == 3 and c.healthy(name, meta) for name, meta in metas.items())
    assert not [name for name in c.store.intents() if name.startswith("moves/")]


def test_a_node_that_stays_away_is_replaced() -> None:
    c = cluster(nodes=4)
    gone = c.meta("t").replicas[1]
    c.kill(gone)
    c.run(60.0)
    meta = c.meta("t")
    assert gone not in meta.replicas and len(meta.replicas) == 3 and set(meta.isr) == set(meta.replicas)


def test_a_topic_of_a_small_cluster_grows_with_it() -> None:
    c = Cluster(1, nodes=3, limits=QUICK)
    for uid in (2, 3):
        c.kill(uid)
    c.run(5.0)
    c.create("t")
    c.run(1.0)
    assert c.meta("t").replicas == (1,) and c.meta("t").min_isr == 1
    c.restart(2)
    c.restart(3)
    c.run(20.0)
    assert set(c.meta("t").isr) == {1, 2, 3} and c.meta("t").min_isr == 2


def test_a_record_that_is_missing_ends_the_work_and_nothing_else() -> None:
    c = cluster()
    c.store.delete_topic("t")
    c.run(1.0)
    assert not c.machine.parts and not c.machine.rounds


def test_another_controller_goes_on_with_a_transfer() -> None:
    c = cluster()
    meta = c.meta("t")
    target = meta.replicas[1]
    name = next(iter(c.parts()))
    c.store.replace_partition("t", name.uid, 0, replace(meta, successor=target))
    c.new_controller()
    c.run(0.5)
    assert c.meta("t").leader == target
