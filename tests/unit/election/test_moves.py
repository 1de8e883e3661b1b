"""A move, step by step, from any state in which it can be found."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nsqha.election.controller.events import PutIntent
from nsqha.election.controller.planner import PlanLimits, Planner, World
from nsqha.election.model import MOVED_FROM_MAX, NodeInfo, PartitionMeta, TopicRecord, TopicSettings
from nsqha.election.moves import (
    BALANCE,
    Done,
    HandOver,
    Joining,
    Put,
    decommission_name,
    move_intent,
    move_name,
    next_step,
    node_name,
    read_intents,
)
from nsqha.election.placement import Move, PartitionName
from nsqha.election.rules import tombstone_of

SETTINGS = TopicSettings()
START = PartitionMeta(leader=1, epoch=4, isr={1: 10, 2: 20, 3: 30}, replicas=(1, 2, 3), min_isr=2, version=7)


def test_a_leader_is_moved_away_without_a_moment_of_fewer_members() -> None:
    wanted = (4, 2, 3)
    step = next_step(START, wanted, SETTINGS)
    assert step == Put(replace(START, replicas=(1, 2, 3, 4)), "replicas_added")
    assert isinstance(step, Put)
    assert next_step(step.meta, wanted, SETTINGS) == Joining((4,))
    joined = replace(step.meta, isr={**START.isr, 4: 40})
    assert next_step(joined, wanted, SETTINGS) == HandOver(wanted)
    led = replace(joined, leader=4, epoch=5)
    last = next_step(led, wanted, SETTINGS)
    assert last == Put(replace(led, replicas=wanted, isr={4: 40, 2: 20, 3: 30}, moved_from=(1,)), "replicas_moved")
    assert isinstance(last, Put)
    assert next_step(last.meta, wanted, SETTINGS) == Done()


def test_more_replicas_raise_the_floor_only_when_they_are_there() -> None:
    one = PartitionMeta(leader=1, isr={1: 10}, replicas=(1,), min_isr=1)
    grown = replace(one, replicas=(1, 2, 3))
    assert next_step(grown, (1, 2, 3), SETTINGS) == Joining((2, 3))
    joined = replace(grown, isr={1: 10, 2: 20, 3: 30})
    assert next_step(joined, (1, 2, 3), SETTINGS) == Put(replace(joined, min_isr=2), "replicas_moved")


def test_fewer_replicas_lower_the_floor_with_the_isr() -> None:
    assert next_step(START, (1,), SETTINGS) == Put(
        replace(START, replicas=(1,), isr={1: 10}, min_isr=1, moved_from=(2, 3)), "replicas_moved"
    )


def test_who_had_a_replica_is_remembered_until_it_has_one_again() -> None:
    """Its node may be down: it keeps the files, and hears of the topic's deletion only if the tombstone names it."""

    def moved(meta: PartitionMeta, *wanted: int) -> PartitionMeta:
        ready = replace(meta, replicas=tuple({*meta.replicas, *wanted}), isr={**meta.isr, **dict.fromkeys(wanted, 9)})
        step = next_step(ready, wanted, SETTINGS)
        assert isinstance(step, Put) and next_step(step.meta, wanted, SETTINGS) == Done()
        return step.meta

    meta = moved(replace(START, leader=3), 3, 4, 5)
    assert meta.moved_from == (1, 2)
    assert tombstone_of(TopicRecord("t", 7, 0, partitions={0: meta})).nodes == (1, 2, 3, 4, 5)
    meta = moved(meta, 3, 1, 4)
    assert meta.moved_from == (2, 5)
    for uid in range(100, 200):
        meta = moved(meta, 3, uid)
    assert len(meta.moved_from) == MOVED_FROM_MAX and meta.moved_from[-1] == 198


uids = st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True)


@given(uids, uids, st.data())
def test_every_move_ends_and_never_goes_below_the_floor(old: list[int], new: list[int], data: st.DataObject) -> None:
    leader = data.draw(st.sampled_from(old))
    isr = {uid: uid * 10 for uid in old if uid == leader or data.draw(st.booleans())}
    meta = PartitionMeta(leader=leader, isr=isr, replicas=tuple(old), min_isr=min(len(isr), len(old) // 2 + 1))
    for _ in range(10):
        step = next_step(meta, tuple(new), SETTINGS)
        match step:
            case Put(changed):
                assert len(changed.isr) >= changed.min_isr
                assert changed.leader in changed.isr and set(changed.isr) <= set(changed.replicas)
                meta = changed
            case Joining(nodes):
                meta = replace(meta, isr={**meta.isr, **{uid: uid * 10 for uid in nodes}})
            case HandOver(candidates):
                assert set(candidates) <= set(meta.isr)
                meta = replace(meta, leader=candidates[0])
            case Done():
                break
    else:
        raise AssertionError("it does not end")
    assert meta.replicas == tuple(new) and set(meta.isr) == set(new)
    assert meta.min_isr == len(new) // 2 + 1


def test_intents_are_read_back_and_others_left_alone() -> None:
    name = PartitionName("t", 0xAB, 3)
    found = read_intents(
        {
            move_name(name): move_intent(Move(name, (1, 2)), "operator"),
            decommission_name(9): {"node": 9},
            BALANCE: {"paused": True},
            node_name(9): {"node": 9, "name": "node-9"},
            "names/broken": {"node": 9},
            "moves/broken": {"topic": "t"},
            "other/thing": {"x": 1},
        }
    )
    assert found.moves == {name: (1, 2)} and found.decommissions == {9} and found.balance_paused
    assert found.names == {9: "node-9"}


def test_a_move_to_a_node_that_stays_away_goes_elsewhere_though_no_other_may_begin() -> None:
    """It never ends by itself: as many of them as may be under way at once would stop all moves for good."""
    name = PartitionName("t", 7, 0)
    nodes = {uid: NodeInfo(uid, f"n{uid}", registration=uid) for uid in (1, 2, 3, 5)}
    meta = PartitionMeta(leader=1, epoch=2, isr={1: 11, 2: 22, 3: 33}, replicas=(1, 2, 3), min_isr=2, version=4)
    world = World({name: meta}, {name: TopicSettings(replicas=3)}, nodes)
    intents = {
        move_name(name): move_intent(Move(name, (1, 2, 4)), "node_decommissioned"),
        decommission_name(3): {"node": 3},
    }
    planner = Planner(0.0, PlanLimits(moves_max=1, replace_after_s=20.0))
    for now in (0.0, 10.0, 25.0):
        planner.metadata(world, intents, dict.fromkeys(intents, 1), now)
        steps = planner.plan(world, now)
        puts = [step for step in steps.intents if isinstance(step, PutIntent) and step.name == move_name(name)]
        assert [put.intent["replicas"] for put in puts] == ([[1, 2, 5]] if now > 20 else [])
