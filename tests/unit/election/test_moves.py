"""A move, step by step, from any state in which it can be found."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nsqha.election.controller.events import PutIntent, RemoveIntent
from nsqha.election.controller.planner import PlanLimits, Planner, World
from nsqha.election.model import MOVED_FROM_MAX, NodeInfo, PartitionMeta, TopicRecord, TopicSettings
from nsqha.election.moves import (
    BALANCE,
    Done,
    HandOver,
    Joining,
    Put,
    brought_back,
    decommission_intent,
    decommission_name,
    forget_name,
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


ORDERS = PartitionName("t", 7, 0)


def asked(
    meta: PartitionMeta, nodes: dict[int, NodeInfo], intents: dict[str, dict[str, object]], *, at: float = 0.0,
    limits: PlanLimits | None = None,
) -> list[object]:  # fmt: skip
    """The replicas that a planner asks for, which saw this first at 0."""
    world = World({ORDERS: meta}, {ORDERS: TopicSettings(replicas=3)}, nodes)
    planner = Planner(0.0, limits or PlanLimits())
    for now in sorted({0.0, at}):
        planner.metadata(world, intents, dict.fromkeys(intents, 1), now)
        steps = planner.plan(world, now).intents
    return [step.intent["replicas"] for step in steps if isinstance(step, PutIntent) and step.name.startswith("moves/")]


def live(*uids: int, **names: str) -> dict[int, NodeInfo]:
    found = {uid: NodeInfo(uid, f"n{uid}", host=f"h{uid}", registration=uid) for uid in uids}
    return found | {int(key[1:]): replace(found[int(key[1:])], name=name) for key, name in names.items()}


KEPT = {node_name(3): {"node": 3, "name": "n3"}}


def test_a_node_of_the_same_name_takes_the_place_of_its_predecessor_at_once() -> None:
    assert asked(START, live(1, 2, 9, u9="n3"), KEPT) == [[1, 2, 9]]
    first = replace(START, replicas=(3, 1, 2))
    assert asked(first, live(1, 2, 9, u9="n3"), KEPT) == [[9, 1, 2]], "in its place: it is to lead again"


def test_a_node_that_may_be_another_one_takes_no_place() -> None:
    assert asked(START, live(1, 2, 9), KEPT) == [], "another name"
    assert asked(START, live(1, 2, 8, 9, u8="n3", u9="n3"), KEPT) == [], "two have the name"
    assert asked(START, live(1, 2, 3, 9, u9="n3"), KEPT) == [], "the first one is alive"
    assert asked(START, live(1, 2, 9, u9="n3"), {}) == [], "the name is not known"
    on_one_host = live(1, 2, 9, u9="n3")
    assert asked(START, on_one_host | {9: replace(on_one_host[9], host="h1")}, KEPT) == []
    alone = replace(START, isr={3: 30}, leader=3, min_isr=1)
    assert asked(alone, live(1, 2, 9, u9="n3"), KEPT) == [], "there is no log that it could copy"


def test_a_move_to_a_node_goes_to_its_successor() -> None:
    moving = {
        move_name(ORDERS): move_intent(Move(ORDERS, (1, 2, 4)), "operator"),
        node_name(4): {"node": 4, "name": "n4"},
    }
    assert asked(START, live(1, 2, 3, 9, u9="n4"), moving) == [[1, 2, 9]]


def test_how_long_a_node_is_waited_for_is_chosen() -> None:
    away = live(1, 2, 9)
    assert asked(START, away, {}, at=599.0) == [] and asked(START, away, {}, at=601.0) == [[1, 2, 9]]
    assert asked(START, away, {}, at=61.0, limits=PlanLimits().replacing_after(60.0)) == [[1, 2, 9]]
    never = PlanLimits().replacing_after(0.0)
    assert asked(START, away, {}, at=1e9, limits=never) == []
    assert asked(replace(START, isr={1: 10, 3: 30}), away, {}, at=1e9, limits=never) == []
    assert PlanLimits().replacing_after(5.0).emergency_after_s == 5.0
    assert asked(START, live(1, 2, 9, u9="n3"), KEPT, limits=never) == [[1, 2, 9]], "its successor is not a replacement"


def test_a_forgotten_node_is_replaced_at_once_or_given_up() -> None:
    forgotten = {forget_name(3): {"node": 3}}
    assert asked(START, live(1, 2, 9), forgotten) == [[1, 2, 9]]
    assert asked(START, live(1, 2), forgotten) == [[1, 2]], "no other host has room: one replica less"
    assert asked(replace(START, isr={1: 10, 3: 30}), live(1, 2), forgotten) == [], "not below min_isr"
    assert asked(START, live(1, 2, 3), forgotten) == [], "it is back"


def test_a_request_to_forget_ends_when_no_record_names_the_node() -> None:
    for meta, nodes, ends in (
        (START, live(1, 2), False),
        (START, live(1, 2, 3), True),
        (replace(START, replicas=(1, 2), isr={1: 10, 2: 20}), live(1, 2), True),
    ):
        world = World({ORDERS: meta}, {ORDERS: TopicSettings(replicas=2)}, nodes)
        planner = Planner(0.0, PlanLimits())
        planner.metadata(world, {forget_name(3): {"node": 3}}, {forget_name(3): 5}, 0.0)
        removed = [step for step in planner.plan(world, 0.0).intents if isinstance(step, RemoveIntent)]
        assert (RemoveIntent(forget_name(3), 5) in removed) is ends


def test_many_partitions_go_to_a_successor_at_once() -> None:
    names = [PartitionName("t", 7, number) for number in range(40)]
    world = World(dict.fromkeys(names, START), dict.fromkeys(names, SETTINGS), live(1, 2, 9, u9="n3"))
    planner = Planner(0.0, PlanLimits(moves_max=4, replacements_max=10))
    planner.metadata(world, KEPT, {}, 0.0)
    begun = [step for step in planner.plan(world, 0.0).intents if isinstance(step, PutIntent)]
    assert len([step for step in begun if step.name.startswith("moves/")]) == 10


def test_a_decommission_remembers_what_is_to_be_brought_back() -> None:
    nodes = live(1, 2, 3, 4, 5)
    intent = decommission_intent(3, {ORDERS: START})
    stood_in = replace(START, replicas=(1, 2, 4), isr={1: 10, 2: 20, 4: 40})

    def back(meta: PartitionMeta, moving: tuple[int, ...] = (), alive: dict[int, NodeInfo] = nodes) -> object:
        under_way = {ORDERS: moving} if moving else {}
        return brought_back(3, intent, {ORDERS: meta}, under_way, alive).get(ORDERS)

    assert back(stood_in) == (1, 2, 3)
    assert back(START) is None, "nothing was moved yet"
    assert back(START, moving=(1, 2, 4)) == (1, 2, 3), "the move that is under way is turned round"
    assert back(replace(START, replicas=(5, 1, 4))) == (5, 1, 3), "an operator's move since then stays"
    assert back(replace(START, replicas=(1, 2))) == (1, 2, 3)
    assert back(stood_in, alive=live(1, 2, 4)) is None, "it is away"
    assert back(stood_in, alive=nodes | {3: replace(nodes[3], host="h1")}) is None, "it is on a host with another one"
    assert brought_back(3, {"node": 3}, {ORDERS: stood_in}, {}, nodes) == {}, "an older version did not remember"
    assert brought_back(3, intent, {PartitionName("t", 8, 0): stood_in}, {}, nodes) == {}, "another life of the topic"
