"""Many small histories of a cluster under faults. What must never happen is asserted inside the rig, while it runs: two
leaders of one epoch, or a leader that lacks what was acknowledged. What must happen in the end is asserted here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsqha.election.controller.events import Blamed, Suspect, Unheard
from nsqha.election.controller.planner import PlanLimits
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.moves import decommission_name
from tests.unit.election.cluster_rig import Cluster

LIMITS = ControllerLimits(plan=PlanLimits(settle_s=2.0, replace_after_s=30.0, emergency_after_s=15.0))
SEEDS = range(25)


def fault(c: Cluster) -> None:
    """One thing that goes wrong, or that an operator does; at most one node of five is down at a time."""
    rng = c.rng
    down = [uid for uid, node in c.nodes.items() if not node.up]
    up = [uid for uid, node in c.nodes.items() if node.up]
    kind = rng.choice(
        ("kill", "kill", "restart", "suspect", "blame", "controller", "leave", "lossy", "silent", "unheard")
    )
    if kind == "kill" and not down and not any(node.silent for node in c.nodes.values()):
        c.kill(rng.choice(up), heard=rng.random() < 0.8)
    elif kind == "restart" and down:
        c.restart(down[0])
    elif kind == "suspect":
        c.feed(Suspect(rng.choice(up), "a rumour"))
    elif kind == "blame":
        c.feed(Blamed(rng.choice(up), frozenset(rng.sample(up, 2))))
    elif kind == "unheard":
        for uid in rng.sample(up, rng.randint(1, len(up) - 1)):
            c.feed(Blamed(uid, frozenset(), frozenset(rng.sample(up, 2))))
        c.feed(Unheard(rng.choice(up)))
    elif kind == "controller":
        c.new_controller()
    elif kind == "leave":
        node = c.nodes[rng.choice(up)]
        node.info = node.session.update(replace(node.info, leaving=rng.random() < 0.5))
    elif kind == "lossy":
        c.lose_cas = rng.choice((0.0, 0.3))
    elif kind == "silent" and not down:
        node = c.nodes[rng.choice(up)]
        node.silent = not node.silent


def heal(c: Cluster) -> None:
    c.lose_cas = 0.0
    for uid in c.nodes:
        c.feed(Blamed(uid, frozenset()))
    for _ in range(2):
        for node in c.nodes.values():
            node.silent = False
            if not node.up:
                c.restart(node.uid)
            elif node.info.leaving:
                node.info = node.session.update(replace(node.info, leaving=False))
        c.run(4.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_come_and_go_and_nothing_acknowledged_is_lost(seed: int) -> None:
    c = Cluster(seed, nodes=5, zones=3, limits=LIMITS)
    for topic in ("a", "b"):
        c.create(topic, partitions=2)
    c.run(1.0)
    for _ in range(40):
        fault(c)
        for _ in range(3):
            c.publish()
            c.run(c.rng.choice((0.02, 0.1, 0.5)))
    heal(c)
    c.run(40.0)
    for name, meta in c.parts().items():
        assert c.healthy(name, meta), f"{name}: {meta}"
        assert len(meta.isr) >= meta.min_isr == 2
        assert not meta.successor
    assert not c.machine.state.rounds
    assert any(c.acked.values())


@pytest.mark.parametrize("seed", range(5))
def test_a_node_is_emptied_while_others_die(seed: int) -> None:
    c = Cluster(seed, nodes=5, limits=LIMITS)
    c.create("a", partitions=4)
    c.run(1.0)
    c.store.intents.put(decommission_name(5), {"node": 5})
    for _ in range(4):
        c.publish()
        c.run(1.0)
        c.new_controller()
    c.kill(1 + seed % 4)
    c.run(60.0)
    for name, meta in c.parts().items():
        assert 5 not in meta.replicas and c.healthy(name, meta)


@pytest.mark.parametrize("seed", range(5))
def test_the_only_replicas_come_back_with_other_logs(seed: int) -> None:
    """sync=interval: every member has to answer before one is chosen, and it is said."""
    c = Cluster(seed, nodes=3, limits=LIMITS)
    c.create("a", sync="interval")
    c.run(1.0)
    c.publish()
    for uid in (1, 2, 3):
        c.kill(uid)
    c.run(4.0)
    c.acked.clear()  # what may be lost is not asked for again
    for uid in (1, 2):
        c.restart(uid, lost_log=True)
    c.run(20.0)
    (meta,) = c.parts().values()
    assert meta.leader not in (1, 2) or meta.registration < c.nodes[meta.leader].info.registration, "one is missing"
    assert not c.events("possible_loss")
    c.restart(3, lost_log=True)
    c.run(2.0)
    (found,) = c.parts().items()
    assert c.healthy(*found)
    assert len(c.events("possible_loss")) == 1
