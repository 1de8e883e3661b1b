"""Who may be elected, rule by rule, and what no set of answers may ever lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.election.elect import CUT_WAIT_S, FIRST_WAIT_S, GATHER_S, Ballot, Elected, ReplicaReport, Wait, choose
from nsqha.election.model import NodeInfo, PartitionMeta, Sync

A, B, C, D = 1, 2, 3, 4
ISR = {A: 0xA, B: 0xB, C: 0xC}
META = PartitionMeta(leader=A, epoch=5, isr=ISR, replicas=(A, B, C), min_isr=2, registration=11, version=77)
NODES = {uid: NodeInfo(uid, registration=uid * 10 + 1) for uid in (A, B, C, D)}


def said(uid: int, end: int = 10, last_epoch: int = 5, **changes: object) -> ReplicaReport:
    report = ReplicaReport(NODES[uid].registration, ISR.get(uid, 0xD), last_epoch, end)
    return replace(report, **changes)  # type: ignore[arg-type]


def ballot(
    *reports: tuple[int, ReplicaReport],
    meta: PartitionMeta = META,
    sync: Sync = "always",
    failed: tuple[int, ...] = (A,),
    waited: float = 0.0,
    nodes: Mapping[int, NodeInfo] = NODES,
    last: tuple[int, ...] = (),
) -> Ballot:
    return Ballot(
        meta, sync, dict(reports), frozenset(failed), nodes, 100.0, 100.0 + waited, frozenset(failed), frozenset(last)
    )


def elected(b: Ballot) -> Elected:
    found = choose(b)
    assert isinstance(found, Elected), found
    return found


def waiting(b: Ballot) -> Wait:
    found = choose(b)
    assert isinstance(found, Wait), found
    return found


def test_the_dead_leader_leaves_the_isr_and_the_next_epoch_begins() -> None:
    meta = elected(ballot((B, said(B)), (C, said(C)))).meta
    assert meta == replace(META, leader=B, epoch=6, registration=21, isr={B: 0xB, C: 0xC})


def test_the_floor_keeps_a_dead_leader_in_the_isr() -> None:
    two = replace(META, isr={A: 0xA, B: 0xB})
    assert elected(ballot((B, said(B)), meta=two)).meta.isr == two.isr


def test_more_of_the_log_goes_first_and_the_last_epoch_before_the_end() -> None:
    assert elected(ballot((B, said(B, 10)), (C, said(C, 11)))).leader == C
    assert elected(ballot((B, said(B, 99, 4)), (C, said(C, 11, 5)))).leader == C


def test_the_order_of_the_replicas_breaks_ties() -> None:
    order = replace(META, replicas=(C, A, B))
    assert elected(ballot((B, said(B)), (C, said(C)), meta=order)).leader == C


def test_a_node_that_leaves_is_chosen_only_if_nobody_else_can_be() -> None:
    assert elected(ballot((B, said(B, 99)), (C, said(C)), last=(B,))).leader == C
    assert elected(ballot((B, said(B)), failed=(A, C), last=(B,))).leader == B


def test_silent_members_are_waited_for_a_moment() -> None:
    one = ballot((B, said(B)))
    assert waiting(one).until == 100.0 + GATHER_S
    assert elected(ballot((B, said(B)), waited=GATHER_S)).leader == B
    assert elected(ballot((B, said(B)), failed=(A, C))).leader == B


def test_only_the_log_that_the_isr_names_counts() -> None:
    assert elected(ballot((B, said(B, 99, log_uid=0xBB)), (C, said(C)))).leader == C


def test_a_replica_outside_the_isr_is_never_chosen() -> None:
    fewer = replace(META, isr={A: 0xA, B: 0xB})
    assert elected(ballot((B, said(B)), (C, said(C, 99)), meta=fewer)).leader == B
    wait = waiting(ballot((D, said(D, 99)), waited=1e6))
    assert "0000000000000002" in wait.why and not wait.operator


@pytest.mark.parametrize("bad", [{"registration": 20}, {"poisoned": "EIO"}, {"corrupt": True}])
def test_another_life_a_closed_disk_and_a_damaged_log_can_not_lead(bad: dict[str, Any]) -> None:
    assert elected(ballot((B, replace(said(B, 99), **bad)), (C, said(C)), waited=1.0)).leader == C
    assert isinstance(choose(ballot((B, replace(said(B), **bad)), waited=1e6)), Wait)


def test_a_node_without_a_registration_can_not_lead() -> None:
    nodes = {uid: node for uid, node in NODES.items() if uid != B}
    assert isinstance(choose(ballot((B, said(B)), nodes=nodes, waited=1e6)), Wait)


def test_the_epoch_is_above_every_promise_heard() -> None:
    assert elected(ballot((B, said(B, promise=9)), (C, said(C, promise=7)))).meta.epoch == 10


def test_a_cut_replica_waits_for_all_or_ten_seconds() -> None:
    cut = (B, said(B, cut=True))
    assert waiting(ballot(cut, failed=(A, C))).until == 100.0 + CUT_WAIT_S
    assert elected(ballot(cut, failed=(A, C), waited=CUT_WAIT_S)).leader == B
    everyone = ballot(cut, (A, said(A, 9, cut=True)), (C, said(C, 9, cut=True)), failed=())
    assert elected(everyone).leader == B


def test_a_whole_replica_goes_before_a_cut_one_that_has_more() -> None:
    assert elected(ballot((B, said(B, 99, cut=True)), (C, said(C)))).leader == C


def test_a_cut_replica_is_passed_over_while_a_member_has_more() -> None:
    more = (C, said(C, 99, log_uid=0xCC))
    assert isinstance(choose(ballot((B, said(B, cut=True)), more, waited=1e6)), Wait)
    everyone = ballot((A, said(A, 1, log_uid=0xAA)), (B, said(B, cut=True)), more, failed=(), sync="interval")
    found = elected(everyone)
    assert found.leader == C and found.loss and found.meta.isr == {C: 0xCC}
    assert waiting(replace(everyone, sync="always")).operator


LOST = ((A, said(A, 9, log_uid=0xA1)), (B, said(B, 12, log_uid=0xB1)), (C, said(C, 11, log_uid=0xC1)))


@pytest.mark.parametrize("sync", ["interval", "none"])
def test_when_every_log_is_another_one_the_longest_leads_alone_and_loss_is_possible(sync: Sync) -> None:
    found = elected(ballot(*LOST, sync=sync, failed=()))
    assert found.loss
    assert found.meta == replace(META, leader=B, epoch=6, registration=21, isr={B: 0xB1})


def test_lost_logs_wait_for_every_member_however_long() -> None:
    wait = waiting(ballot(*LOST[1:], sync="interval", waited=1e6))
    assert "0000000000000001" in wait.why and not wait.operator


def test_lost_logs_with_sync_always_are_an_operators() -> None:
    assert waiting(ballot(*LOST, failed=())).operator


def test_lost_logs_with_damage_are_passed_over() -> None:
    damaged = (B, said(B, 12, log_uid=0xB1, corrupt=True))
    assert elected(ballot(LOST[0], damaged, LOST[2], sync="interval", failed=())).leader == C


def test_the_only_replica_leads_itself_whatever_happened() -> None:
    one = replace(META, isr={A: 0xA}, replicas=(A,), min_isr=1)
    assert elected(ballot((A, said(A, cut=True)), meta=one, failed=())).loss == ""
    assert elected(ballot((A, said(A, corrupt=True)), meta=one, failed=())).loss == ""
    found = elected(ballot((A, said(A, log_uid=0xA1, corrupt=True)), meta=one, failed=()))
    assert found.loss and found.meta.isr == {A: 0xA1}


def test_a_closed_disk_is_never_led_from() -> None:
    one = replace(META, isr={A: 0xA}, replicas=(A,), min_isr=1)
    assert waiting(ballot((A, said(A, poisoned="EIO")), meta=one, failed=())).operator


def test_a_new_partition_is_begun_by_the_preferred_replica() -> None:
    new = PartitionMeta(replicas=(B, A, C), min_isr=2, version=3)
    assert isinstance(choose(ballot(meta=new, failed=())), Wait)
    found = elected(ballot((A, said(A, 0)), (B, said(B, 0)), (C, said(C, 0)), meta=new, failed=()))
    led = replace(new, leader=B, epoch=2, registration=21, isr={B: 0xB}, nothing_acked=True)
    assert found.meta == led, "below min_isr it acknowledges nothing, and the record says so"
    alone = replace(new, min_isr=1)
    assert not elected(ballot((B, said(B, 0)), meta=alone, failed=(A, C))).meta.nothing_acked
    assert isinstance(choose(ballot((A, said(A, 0, log_uid=0)), meta=new, failed=(), waited=1e6)), Wait)
    others = ((A, said(A, 0)), (C, said(C, 0)))
    assert waiting(ballot(*others, meta=new, failed=(), waited=GATHER_S)).until == 100.0 + FIRST_WAIT_S
    assert elected(ballot(*others, meta=new, failed=(), waited=FIRST_WAIT_S)).leader == A
    assert elected(ballot(*others, meta=new, failed=(B,))).leader == A


def test_a_partition_that_never_acknowledged_anything_is_begun_by_another_replica() -> None:
    began = replace(META, isr={A: 0xA}, nothing_acked=True)
    found = elected(ballot((B, said(B, 0)), (C, said(C, 0)), meta=began, nodes={B: NODES[B], C: NODES[C]}))
    assert (found.leader, found.meta.isr, found.meta.nothing_acked) == (B, {B: 0xB}, True)
    assert not found.loss
    used = replace(began, nothing_acked=False)
    assert isinstance(choose(ballot((B, said(B, 0)), (C, said(C, 0)), meta=used, waited=1e6)), Wait)


def test_a_transfer_that_was_asked_for_is_over_with_the_election() -> None:
    assert elected(ballot((B, said(B)), (C, said(C)), meta=replace(META, successor=C))).meta.successor == 0


reports = st.builds(
    ReplicaReport,
    registration=st.sampled_from([11, 21, 31, 41]),
    log_uid=st.sampled_from([0, 0xA, 0xB, 0xC, 0xD]),
    last_epoch=st.integers(0, 7),
    end=st.integers(0, 4),
    promise=st.integers(0, 9),
    poisoned=st.sampled_from(["", "EIO"]),
    cut=st.booleans(),
    corrupt=st.booleans(),
)
members = st.sets(st.sampled_from([A, B, C]), min_size=1)


@given(
    answers=st.dictionaries(st.sampled_from([A, B, C, D]), reports),
    isr=members,
    failed=st.frozensets(st.sampled_from([A, B, C])),
    sync=st.sampled_from(["always", "interval", "none"]),
    alive=st.sets(st.sampled_from([A, B, C, D])),
    waited=st.sampled_from([0.0, 1.0, 20.0]),
)
def test_no_answers_lead_to_an_unsafe_record(
    answers: dict[int, ReplicaReport],
    isr: set[int],
    failed: frozenset[int],
    sync: Sync,
    alive: set[int],
    waited: float,
) -> None:
    meta = replace(META, isr={uid: ISR[uid] for uid in isr}, replicas=(A, B, C))
    nodes = {uid: NODES[uid] for uid in alive}
    found = choose(Ballot(meta, sync, answers, failed, nodes, 0.0, waited, failed))
    if isinstance(found, Wait):
        return
    new, report = found.meta, answers[found.leader]
    assert new.leader in isr, "only a member of the ISR"
    assert new.registration == nodes[new.leader].registration == report.registration, "by its present life"
    assert new.epoch > max([meta.epoch, *(r.promise for r in answers.values())])
    assert new.version == meta.version
    assert not report.poisoned and not report.corrupt
    if found.loss:
        assert sync != "always" and set(answers) >= isr
        assert new.isr == {new.leader: report.log_uid}
        return
    assert report.log_uid == meta.isr[new.leader]
    assert set(new.isr.items()) <= set(meta.isr.items())
    assert len(new.isr) >= min(meta.min_isr, len(isr))
    assert set(meta.isr) - set(new.isr) <= {meta.leader} & failed
