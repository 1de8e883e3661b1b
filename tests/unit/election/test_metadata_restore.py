"""What metadata that went back become, from what nodes have: case by case, and what no evidence may lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.election.elect import ReplicaReport
from nsqha.election.metadata_restore import (
    CHANNELS_MARGIN,
    Decision,
    Known,
    NodeInventory,
    RestorePlan,
    TopicPlan,
    plan,
)
from nsqha.election.model import (
    ChannelInfo,
    ChannelList,
    ClusterRecord,
    PartitionMeta,
    TopicRecord,
    TopicSettings,
    Versioned,
)

A, B, C, D = 1, 2, 3, 4
CLUSTER = ClusterRecord(0xC105)
LOGS = {A: 0xA, B: 0xB, C: 0xC, D: 0xD}
META = PartitionMeta(
    leader=A, epoch=5, isr={A: 0xA, B: 0xB, C: 0xC}, replicas=(A, B, C), min_isr=2, version=40, moved_from=(D,)
)
CHANNELS = ChannelList(version=3, channels={"billing": ChannelInfo(7)})
ORDERS = TopicRecord("orders", 0x10, replace(CLUSTER, salt_counter=1).next_salt(), TopicSettings(), CHANNELS, {0: META})
KEY = (ORDERS.uid, 0)


def has(uid: int, last_epoch: int = 5, end: int = 100, promise: int = 5, **changes: Any) -> ReplicaReport:
    return replace(ReplicaReport(0, LOGS[uid], last_epoch, end, promise), **changes)


def node(uid: int, *, topics: tuple[Known, ...] = (), **changes: Any) -> NodeInventory:
    """By default one that has the partition as everybody has it."""
    replicas = changes.pop("replicas", {KEY: has(uid)})
    return replace(NodeInventory(uid, f"n{uid}", replicas=replicas, topics=topics), **changes)


def planned(*nodes: NodeInventory, topics: Mapping[str, TopicRecord] | None = None, **options: Any) -> RestorePlan:
    stored = {"orders": ORDERS} if topics is None else topics
    options.setdefault("accepted", 0)
    options.setdefault("tombstones", ())
    return plan(
        {name: Versioned(record, 30) for name, record in stored.items()},
        options.pop("tombstones"),
        options.pop("accepted"),
        {n.uid: n for n in nodes},
        salt_constant=CLUSTER.salt_constant,
        **options,
    )


def topic(found: RestorePlan, name: str = "orders") -> TopicPlan:
    return next(t for t in found.topics if t.record.name == name)


def decided(found: RestorePlan) -> Decision:
    (decision,) = topic(found).decisions
    return decision


def after(found: RestorePlan) -> PartitionMeta:
    meta = decided(found).after
    assert meta is not None
    return meta


# ---- one partition


@pytest.mark.parametrize(
    ("reports", "isr", "epoch"),
    [
        ({}, {A, B, C}, 6),
        ({A: {"end": 101}}, {A}, 6),
        ({A: {"end": 90}, B: {"end": 101}, C: {"end": 101}}, {B, C}, 6),
        ({A: {"end": 500}, C: {"last_epoch": 6, "end": 80, "promise": 6}}, {C}, 7),  # who has more of less is behind
        ({B: {"promise": 12}}, {A, B, C}, 13),
        ({B: {"last_epoch": 12, "promise": 4}}, {B}, 13),  # a promise that was lost does not lower it
        ({A: {"log_uid": 0, "end": 900}}, {B, C}, 6),  # no log at all
        ({A: {"corrupt": True}}, {A, B, C}, 6),
        ({A: {"cut": True}}, {A, B, C}, 6),
    ],
)
def test_who_is_in_sync_and_in_which_epoch(reports: Mapping[int, Mapping[str, Any]], isr: set[int], epoch: int) -> None:
    found = planned(*(node(uid, replicas={KEY: has(uid, **reports.get(uid, {}))}) for uid in (A, B, C)))
    meta = after(found)
    assert (set(meta.isr), meta.epoch, meta.leader, meta.registration) == (isr, epoch, 0, 0)
    assert all(log_uid == LOGS[uid] for uid, log_uid in meta.isr.items())
    assert (meta.replicas, meta.min_isr, meta.version, meta.moved_from) == ((A, B, C), 2, 40, (D,))
    assert not decided(found).loss and found.hold


def test_the_log_that_counts_is_the_one_that_is_there() -> None:
    begun_anew = {KEY: has(A, log_uid=0xAA)}
    assert after(planned(node(A, replicas=begun_anew), node(B), node(C))).isr == {A: 0xAA, B: 0xB, C: 0xC}


def test_a_node_that_is_not_heard_is_named_with_what_that_may_cost() -> None:
    one_away = planned(node(A), node(B))
    assert one_away.unheard == (C,) and decided(one_away).missing == (C,)
    assert not decided(one_away).loss, "two acknowledged whatever was: one of them was heard"
    assert C in after(one_away).replicas
    two_away = planned(node(A))
    assert two_away.unheard == (B, C) and "2 of its replicas did not answer" in decided(two_away).loss
    has_nothing = planned(node(A), node(B, replicas={}))
    assert "2 of its replicas did not answer or have lost their log" in decided(has_nothing).loss
    doubtful = planned(node(A, replicas={KEY: has(A, cut=True)}), node(B))
    assert "has damage" in decided(doubtful).loss


@pytest.mark.parametrize("lost", [{}, {"log_uid": 0}, {"log_uid": 0xAA, "end": 3}])
def test_replicas_that_were_heard_and_have_lost_their_log_are_told(lost: Mapping[str, Any]) -> None:
    """What the two acknowledged without the third is nowhere any more, though every node was heard."""
    empty = {B: {KEY: has(B, **lost)} if lost else {}, C: {KEY: has(C, **lost)} if lost else {}}
    found = planned(node(A), *(node(uid, replicas=replicas) for uid, replicas in empty.items()))
    assert set(after(found).isr) == {A} and not found.unheard
    assert decided(found).loss == "2 of its replicas have lost their log, and 2 are enough to acknowledge"
    one = planned(node(A), node(B, replicas=empty[B]), node(C))
    assert not decided(one).loss, "whatever was acknowledged is on A or on C"
    doubtful = planned(node(A, replicas={KEY: has(A, cut=True)}), node(B, replicas=empty[B]), node(C))
    assert "has damage" in decided(doubtful).loss


def test_damage_where_nobody_else_has_as_much_is_told() -> None:
    """What it had behind its end may be gone, and nobody else has what is left."""
    ahead = planned(node(A, replicas={KEY: has(A, end=101, corrupt=True)}), node(B), node(C))
    assert set(after(ahead).isr) == {A} and "has damage" in decided(ahead).loss
    everybody = planned(*(node(uid, replicas={KEY: has(uid, corrupt=True)}) for uid in (A, B, C)))
    assert set(after(everybody).isr) == {A, B, C} and "has damage" in decided(everybody).loss


def test_a_partition_that_only_those_have_who_were_not_heard_waits_for_them() -> None:
    found = planned(node(D, replicas={}))
    assert decided(found).waits and not decided(found).loss
    assert after(found).isr == META.isr and after(found).epoch == 6


def test_a_partition_of_which_nobody_has_anything_begins_empty_and_that_is_said() -> None:
    found = planned(*(node(uid, replicas={}) for uid in (A, B, C)))
    assert after(found).isr == {} and after(found).replicas == (A, B, C)
    assert decided(found).loss == "no node has anything of it"


def test_a_replica_that_was_moved_since_counts_where_it_is_now() -> None:
    found = planned(node(A, replicas={}), node(B), node(C), node(D, replicas={KEY: has(D, end=120)}))
    assert after(found).isr == {D: 0xD}
    assert after(found).replicas == (B, C, D)


def test_too_few_that_have_it_are_filled_up_with_who_was_to_have_it() -> None:
    found = planned(node(A, replicas={}), node(B), node(C, replicas={}))
    assert after(found).isr == {B: 0xB} and after(found).replicas == (A, B, C)


def test_nobody_who_believes_the_metadata_outvotes_what_nodes_have() -> None:
    """D was away, took the old metadata for new, and was elected by them."""
    stored = replace(ORDERS, partitions={0: replace(META, epoch=6, leader=D, isr={D: 0xD}, replicas=(A, B, D))})
    believing = node(D, waiting=False, replicas={KEY: has(D, end=60, promise=6)})
    found = planned(node(A), node(B), node(C, replicas={}), believing, topics={"orders": stored})
    assert found.hold and set(after(found).isr) == {A, B} and after(found).epoch == 7


def test_a_replica_that_was_given_up_since_is_not_waited_for() -> None:
    """The metadata still name D, which was taken away for good; who ran saw that."""
    stored = replace(ORDERS, partitions={0: replace(META, replicas=(A, B, D), isr={A: 0xA, D: 0xD})})
    views = [node(uid, topics=seen(ORDERS), view_revision=60) for uid in (A, B, C)]
    found = planned(*views, topics={"orders": stored})
    assert not found.unheard and not decided(found).missing and D not in after(found).replicas
    assert planned(node(A), node(B), node(C), topics={"orders": stored}).unheard == (D,), "who was stopped did not"


def test_replicas_moved_while_all_who_answer_were_away_are_not_forgotten() -> None:
    """C led, gave A's and B's replicas to D and another, and all three are dead now."""
    unaware = planned(node(A), node(B), also_named=(D, 5))
    assert unaware.unheard == (C, D, 5)
    assert "moved to nodes that did not answer" in decided(unaware).loss
    aware = planned(node(A, topics=seen(ORDERS), view_revision=60), node(B), also_named=(D, 5))
    assert not decided(aware).loss, "A saw the records until the end: nothing was moved"
    assert not decided(planned(node(A), node(B), node(C), also_named=(D,))).loss, "one alone could not acknowledge"


# ---- topics


def seen(record: TopicRecord, version: int = 50) -> tuple[Known, ...]:
    return (Known(record, version),)


def test_what_a_node_has_seen_last_is_how_a_topic_comes_back() -> None:
    newer = replace(
        ORDERS,
        settings=TopicSettings(retention_ms=-1),
        channels=replace(CHANNELS, version=9, paused=True),
        partitions={0: replace(META, epoch=8, replicas=(C, B, A), version=70), 1: replace(META, version=71)},
    )
    older = replace(ORDERS, partitions={0: replace(META, version=60)})
    nodes = [node(A, topics=seen(older, 45), view_revision=61), node(B, topics=seen(newer), view_revision=80), node(C)]
    found = topic(planned(*nodes))
    assert found.version == 30 and not found.restored
    assert found.record.settings == TopicSettings(retention_ms=-1, partitions=2)
    assert found.record.channels.paused and found.record.channels.version == 9 + CHANNELS_MARGIN + 1
    assert found.record.partitions[0].epoch == 9 and found.record.partitions[0].replicas == (C, B, A)
    assert found.record.partitions[1].isr == {}
    lagging = [node(A, topics=seen(newer, 45)), node(B, topics=seen(older, 50)), node(C)]
    assert topic(planned(*lagging)).record.partitions[0].replicas == (C, B, A), "partitions have versions of their own"


def test_what_a_log_tells_is_less_than_what_the_metadata_say() -> None:
    told = TopicRecord("orders", ORDERS.uid, ORDERS.salt, channels=ChannelList(5, False, {"late": ChannelInfo(8)}))
    found = topic(planned(node(A, topics=seen(told, 0)), node(B), node(C)))
    assert found.record.partitions[0].replicas == (A, B, C)
    assert set(found.record.channels.channels) == {"late"}, "but channels are in it, and newer"
    assert found.record.channels.version > 5 + CHANNELS_MARGIN


def test_policies_come_from_records_whatever_newer_logs_say() -> None:
    """A log has the list of channels, and not what was asked of them."""
    asked = CHANNELS.with_policy("billing", {"retry_ms": 1000}).with_policy("*", {"skip": True})
    log = ChannelList(asked.version + 3, False, {"billing": ChannelInfo(7), "late": ChannelInfo(8)})
    told = TopicRecord("orders", ORDERS.uid, ORDERS.salt, channels=log)
    same = replace(told, channels=replace(log, version=asked.version, channels={"billing": ChannelInfo(7)}))
    for logged in (told, same):
        nodes = [node(A, topics=seen(logged, 0)), node(B, topics=seen(replace(ORDERS, channels=asked))), node(C)]
        channels = topic(planned(*nodes)).record.channels
        assert channels.own_policy("billing").said == {"retry_ms": 1000}
        assert channels.defaults.said == {"skip": True}
        assert set(channels.channels) == set(logged.channels.channels)
    again = replace(told, channels=replace(log, channels={"billing": ChannelInfo(9)}))
    nodes = [node(A, topics=seen(again, 0)), node(B, topics=seen(replace(ORDERS, channels=asked))), node(C)]
    assert not topic(planned(*nodes)).record.channels.own_policy("billing").said, "another channel of the name"


def test_a_topic_that_the_metadata_do_not_have_is_put_back() -> None:
    found = planned(*(node(uid, topics=seen(ORDERS)) for uid in (A, B, C)), topics={})
    assert topic(found).restored and after(found).isr == META.isr and after(found).version == 0
    told = TopicRecord("orders", ORDERS.uid, ORDERS.salt, channels=CHANNELS)
    found = planned(*(node(uid, topics=seen(told, 0)) for uid in (A, B, C)), topics={})
    assert topic(found).restored and topic(found).record.settings.partitions == 1
    assert (after(found).replicas, after(found).min_isr) == ((A, B, C), 2)


def test_a_deleted_topic_is_not_put_back() -> None:
    assert not planned(node(A, topics=seen(ORDERS)), topics={}, tombstones=[ORDERS.uid]).topics
    gone = [node(uid, replicas={}, view_revision=90) for uid in (A, B, C)]
    found = planned(*gone)
    assert set(found.delete) == {"orders"} and not found.topics
    assert not planned(*gone[:2]).delete, "who was not heard may have it"
    assert not planned(gone[0], gone[1], node(C)).delete, "a node has it"
    lagging = [replace(n, view_revision=29) for n in gone]
    assert not planned(*lagging).delete, "their views are of before it was made"
    knows = node(C, replicas={}, view_revision=91, topics=seen(ORDERS))
    assert not planned(*gone[:2], knows).delete, "whoever has seen more knows it"


def test_of_two_lives_of_a_topic_the_later_one_goes_on() -> None:
    later = replace(ORDERS, uid=0x20, salt=replace(CLUSTER, salt_counter=9).next_salt())
    key = (later.uid, 0)
    nodes = [node(uid, replicas={key: has(uid)}, topics=seen(later)) for uid in (A, B)]
    has_both = node(C, replicas={KEY: has(C), key: has(C)}, topics=seen(ORDERS))
    found = planned(*nodes, has_both)
    assert topic(found).record.uid == later.uid and topic(found).restored
    assert {name: t.record.uid for name, t in found.delete.items()} == {"orders": ORDERS.uid}
    assert not found.left, "the files go with the topic"
    unknown = planned(*nodes, has_both, topics={})
    assert not unknown.delete and unknown.left == ((C, "orders"),)


def test_a_life_with_data_is_not_given_up_for_one_without() -> None:
    empty = replace(ORDERS, uid=0x20, salt=replace(CLUSTER, salt_counter=9).next_salt())
    nodes = [node(uid, topics=seen(ORDERS)) for uid in (A, B, C)]
    assert topic(planned(*nodes, topics={"orders": empty})).record.uid == ORDERS.uid


def test_an_ephemeral_topic_lives_and_dies_with_its_node() -> None:
    ephemeral = replace(ORDERS, name="orders#ephemeral")
    found = planned(node(A, replicas={}), node(B, replicas={}), topics={"orders#ephemeral": ephemeral})
    assert not found.topics and not found.unheard


# ---- generations


def test_a_node_that_was_away_follows_what_was_decided_without_it() -> None:
    stored = replace(ORDERS, partitions={0: replace(META, epoch=20)})
    back = node(C, replicas={KEY: has(C, promise=9)})
    others = [node(uid, waiting=False, generation=1, replicas={KEY: has(uid, promise=20)}) for uid in (A, B)]
    found = planned(back, *others, topics={"orders": stored}, accepted=1)
    assert not found.hold and decided(found).after is None and found.generation == 2
    reaches = replace(back, replicas={KEY: has(C, promise=20)})
    assert planned(reaches, *others, topics={"orders": stored}, accepted=1).hold, "its promise is in the way"
    brings = replace(back, topics=seen(replace(ORDERS, name="forgotten", uid=0x30)))
    assert planned(brings, *others, topics={"orders": stored}, accepted=1).hold, "a topic that nobody else knows"
    assert planned(replace(back, generation=1), *others, topics={"orders": stored}, accepted=1).hold, "put back twice"


def test_a_generation_is_above_every_one_that_was_followed() -> None:
    found = planned(node(A, generation=4), node(B, generation=3), node(C), accepted=2)
    assert found.generation == 5 and found.hold and found.nodes == (A, B, C)


# ---- whatever the evidence

REPORTS = st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 12), st.booleans())


@given(st.dictionaries(st.sampled_from((A, B, C)), REPORTS, min_size=1), st.integers(1, 12))
def test_no_evidence_lets_an_old_leader_go_on_or_gives_up_what_somebody_has(
    reports: dict[int, tuple[int, int, int, bool]], epoch: int
) -> None:
    replicas = {
        uid: has(uid, last_epoch=e, end=end, promise=promise, corrupt=bad)
        for uid, (e, end, promise, bad) in reports.items()
    }
    stored = replace(ORDERS, partitions={0: replace(META, epoch=epoch)})
    found = planned(*(node(uid, replicas={KEY: r}) for uid, r in replicas.items()), topics={"orders": stored})
    meta = after(found)
    assert meta.epoch > max(epoch, *(max(r.promise, r.last_epoch) for r in replicas.values()))
    most = max(r.reach for r in replicas.values())
    assert {uid for uid, r in replicas.items() if r.reach == most} == set(meta.isr)
    assert set(meta.isr) <= set(meta.replicas) and meta.leader == 0
    away = {A, B, C} - set(replicas)
    assert set(decided(found).missing) == away
    assert bool(decided(found).loss) >= (len(away) >= META.min_isr)
    again = planned(
        *(node(uid, replicas={KEY: r}) for uid, r in replicas.items()), topics={"orders": topic(found).record}
    )
    assert (after(again).isr, after(again).replicas) == (meta.isr, meta.replicas), "broken off, and run again"
    assert after(again).epoch > meta.epoch
