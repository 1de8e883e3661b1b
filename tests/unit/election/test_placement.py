"""Where replicas go: rules that hold for every cluster, and small tables."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.placement import (
    CountedLoad,
    Load,
    Move,
    PartitionName,
    Transfer,
    able,
    balance,
    fill,
    host_of,
    min_isr_of,
    place,
    replicas_wanted,
    spread,
    staying,
)


def cluster(*labels: str) -> dict[int, NodeInfo]:
    """Labels are "zone/host", or empty."""
    return {
        uid: NodeInfo(uid, zone=label.partition("/")[0], host=label.partition("/")[2])
        for uid, label in enumerate(labels, 1)
    }


def name(number: int) -> PartitionName:
    return PartitionName("t", 1, number)


def metas(*lists: tuple[int, ...], leaders: tuple[int, ...] = ()) -> dict[PartitionName, PartitionMeta]:
    return {
        name(n): PartitionMeta(
            leader=leaders[n] if leaders else replicas[0], isr=dict.fromkeys(replicas, 1), replicas=replicas
        )
        for n, replicas in enumerate(lists)
    }


def test_a_node_that_has_not_joined_gets_no_replica_and_keeps_what_it_leads() -> None:
    nodes = {1: NodeInfo(1), 2: NodeInfo(2, joining="no connection"), 3: NodeInfo(3, leaving=True)}
    assert set(able(nodes)) == {1}
    assert set(staying(nodes)) == {1, 2}


def test_replicas_are_spread_over_zones_before_anything_else() -> None:
    nodes = cluster("a/1", "a/2", "b/3", "c/4")
    assert fill((), 3, nodes, Load()) == (1, 3, 4)
    assert fill((4,), 3, nodes, Load.of([(1,), (1,), (3,), (3,)])) == (4, 2, 3)


def test_never_two_on_one_host_even_if_the_list_stays_short() -> None:
    nodes = cluster("a/1", "a/1", "b/1")
    assert fill((), 3, nodes, Load()) == (1,)
    assert replicas_wanted(TopicSettings(), nodes) == 1


def test_nodes_without_a_host_label_are_hosts_of_their_own() -> None:
    assert len(fill((), 3, cluster("", "", ""), Load())) == 3


def test_the_first_place_goes_to_who_has_fewest_first_places() -> None:
    nodes = cluster("", "", "")
    placed = place(range(6), 3, nodes, Load())
    assert Counter(replicas[0] for replicas in placed.values()) == {1: 2, 2: 2, 3: 2}
    assert place([0], 2, nodes, Load(), prefer=3)[0][0] == 3
    assert len({replicas[:2] for replicas in placed.values()}) == 6, "a node that dies has more than one heir"


def test_defaults() -> None:
    five = cluster("", "", "", "", "")
    assert replicas_wanted(TopicSettings(), five) == 3
    assert replicas_wanted(TopicSettings(replicas=5), five) == 5
    assert [min_isr_of(TopicSettings(), n) for n in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]
    assert min_isr_of(TopicSettings(replicas=3, min_isr=1), 3) == 1


def test_nodes_that_go_get_nothing() -> None:
    nodes = {
        1: NodeInfo(1, poisoned="EIO"),
        2: NodeInfo(2, leaving=True),
        3: NodeInfo(3),
        4: NodeInfo(4),
    }
    assert list(able(nodes, [3])) == [4]


def test_balance_takes_from_the_fullest_first_and_not_more_than_the_limit() -> None:
    nodes = cluster("", "", "")
    parts = metas((1, 2), (2, 1), (3, 2), leaders=(2, 2, 2))
    assert balance(parts, nodes, 1) == [Transfer(name(0), 2, 1)]
    assert balance(parts, nodes, 9) == [Transfer(name(0), 2, 1), Transfer(name(2), 2, 3)]
    assert balance(metas((1, 2)), nodes, 9) == []


def test_balance_leaves_out_who_is_not_in_the_isr_or_not_able() -> None:
    parts = metas((1, 2), leaders=(2,))
    assert balance(parts, cluster("", ""), 1)
    assert not balance(parts, {2: NodeInfo(2)}, 1)
    behind = {n: PartitionMeta(leader=2, isr={2: 1}, replicas=(1, 2)) for n in parts}
    assert not balance(behind, cluster("", ""), 1)


def test_spread_moves_to_empty_nodes_and_reorders() -> None:
    nodes = cluster("", "", "")
    assert spread(metas((1, 2), (1, 2)), nodes, 9) == [Move(name(0), (3, 2))]
    assert spread(metas((1, 2), (1, 2)), cluster("", ""), 9) == [Move(name(0), (2, 1))]
    assert spread(metas((1, 2)), cluster("", ""), 9) == [], "one first place more is even enough"


labels = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "1", "2", "3"])), min_size=1, max_size=7)


@given(labels, st.integers(1, 5), st.integers(1, 20))
def test_placement_keeps_its_rules(found: list[tuple[str, str]], replicas: int, partitions: int) -> None:
    nodes = cluster(*(f"{zone}/{zone}{host}" if host else f"{zone}/" for zone, host in found))
    load = Load()
    placed = place(range(partitions), replicas, nodes, load)
    assert placed == place(range(partitions), replicas, nodes, Load()), "the same input has the same answer"
    hosts = {host_of(node) for node in nodes.values()}
    zones = {node.zone for node in nodes.values()}
    for chosen in placed.values():
        assert len({host_of(nodes[uid]) for uid in chosen}) == len(chosen) == min(replicas, len(hosts))
        assert len({nodes[uid].zone for uid in chosen}) == min(len(chosen), len(zones))
    if len(hosts) == len(nodes) and len(zones) == 1:
        counts = [load.replicas[uid] for uid in nodes]
        assert max(counts) - min(counts) <= 1 + (replicas > 1)


@given(st.lists(st.permutations([1, 2, 3, 4]), min_size=1, max_size=12), st.integers(1, 3))
def test_spread_ends_and_leaves_everything_even(orders: list[list[int]], replicas: int) -> None:
    nodes = cluster("", "", "", "", "")
    lists = {name(n): tuple(order[:replicas]) for n, order in enumerate(orders)}
    for _ in range(100):
        parts = {key: PartitionMeta(leader=r[0], isr=dict.fromkeys(r, 1), replicas=r) for key, r in lists.items()}
        moves = spread(parts, nodes, 3)
        if not moves:
            break
        assert len(moves) <= 3
        lists |= {move.name: move.replicas for move in moves}
    else:
        raise AssertionError("it does not end")
    assert all(len(set(r)) == replicas for r in lists.values())
    load = Load.of(lists.values())
    counts = [load.replicas[uid] for uid in nodes]
    assert max(counts) - min(counts) <= 1


def test_the_load_is_counted_again_only_where_topics_changed() -> None:
    def topic(name: str, *lists: tuple[int, ...]) -> Versioned[TopicRecord]:
        partitions = {number: PartitionMeta(replicas=replicas) for number, replicas in enumerate(lists)}
        return Versioned(TopicRecord(name, 1, 1, partitions=partitions), 1)

    counted = CountedLoad()
    topics = {f"t{number}": topic(f"t{number}", (1, 2, 3)) for number in range(1000)}
    counted.of(topics)
    before = counted.counted
    topics = {**topics, "t5": topic("t5", (3, 1), (2, 1)), "new": topic("new", (2, 3))}
    del topics["t9"]
    own = counted.of(topics)
    assert counted.counted == before + 2
    assert own == Load.of(m.replicas for t in topics.values() for m in t.record.partitions.values())
    own.add((1, 2))
    assert counted.of(topics) != own, "what a plan adds stays with it"
