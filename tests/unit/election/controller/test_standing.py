"""What is thought of nodes: it ends with the life that it was thought of."""

from __future__ import annotations

from dataclasses import replace

from nsqha.election.controller.node_health import NodeHealth
from nsqha.election.controller.pending_probes import PendingProbes
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.model import NodeInfo, PartitionMeta
from nsqha.election.placement import PartitionName

A, B, C, D = 1, 2, 3, 4
NODES = {uid: NodeInfo(uid, registration=7) for uid in (A, B, C)}


def standing() -> NodeHealth:
    made = NodeHealth()
    assert sorted(made.changed(NODES, 0.0)) == [A, B, C]
    return made


def test_a_suspicion_ends_with_an_answer_or_becomes_silence() -> None:
    of = standing()
    assert of.suspect(A, 1.0) and not of.suspect(A, 2.0) and of.suspected_since(A) == 1.0
    assert not of.suspect(D, 1.0), "nobody knows it"
    assert of.answered(A, 7, 2.0) and not of.answered(A, 7, 2.0) and of.suspected_since(A) is None
    of.suspect(A, 3.0)
    assert of.not_answered(A) and not of.not_answered(A)
    assert of.silent == {A: 3.0} and not of.suspect(A, 4.0)
    assert of.answered(A, 7, 2.0) and not of.silent


def test_another_life_begins_without_a_past() -> None:
    of = standing()
    of.suspect(A, 1.0)
    of.not_answered(A)
    of.blamed(B, frozenset({A, C}), 1.0)
    assert of.changed({**NODES, A: replace(NODES[A], registration=8)}, 2.0) == [A]
    assert not of.silent and of.suspect(A, 3.0)
    assert of.blamed(B, frozenset({A, C}), 3.0) == ([], [A]), "blamed anew"


def test_whom_a_node_blames_no_more_and_whom_anew() -> None:
    of = standing()
    assert of.blamed(B, frozenset({A}), 1.0) == ([], [A])
    assert of.blamed(B, frozenset({A, C}), 2.0) == ([], [C])
    assert of.blamed(B, frozenset({C}), 3.0) == ([A], [])


def test_a_leader_is_cut_off_when_too_few_are_left_who_do_not_blame_it() -> None:
    of = standing()
    meta = PartitionMeta(leader=A, epoch=1, isr={A: 1, B: 2, C: 3}, replicas=(A, B, C), min_isr=2)
    of.blamed(B, frozenset({A}), 1.0)
    assert not of.cut_off(meta, 9.0, after=2.0), "it commits with C"
    of.blamed(C, frozenset({A}), 8.0)
    assert not of.cut_off(meta, 9.0, after=2.0) and of.cut_off(meta, 10.0, after=2.0)
    assert not of.cut_off(replace(meta, isr={A: 1}), 10.0, after=2.0)


def test_a_leader_that_is_not_heard_for_long_is_cut_off_too() -> None:
    of = standing()
    meta = PartitionMeta(leader=A, epoch=1, isr={A: 1, B: 2, C: 3}, replicas=(A, B, C), min_isr=2)
    of.blamed(B, frozenset({A}), 1.0)
    assert of.unheard(C, frozenset({A}), 2.0) == ([], [A])
    assert not of.cut_off(meta, 3.0, after=2.0) and of.cut_off(meta, 4.0, after=2.0)
    assert of.unheard(C, frozenset(), 5.0) == ([A], [])
    assert not of.cut_off(meta, 9.0, after=2.0)


def test_witnesses_are_those_who_are_heard_themselves() -> None:
    of = standing()
    of.blamed(B, frozenset({A}), 1.0)
    of.unheard(C, frozenset({A}), 1.0)
    assert of.witnesses(A) == {B, C}
    of.suspect(C, 2.0)
    of.not_answered(C)
    assert of.witnesses(A) == {B}


def test_a_stream_that_is_open_is_one_until_it_ends_or_the_node_answers() -> None:
    of = standing()
    of.suspect(A, 1.0, open_=True)
    of.suspect(B, 1.0)
    assert of.linked(A) and not of.linked(B)
    of.not_answered(A)
    assert of.linked(A)
    of.link(A, 2.0, open_=False)
    assert not of.linked(A) and A in of.silent
    of.suspect(C, 3.0, open_=True)
    of.answered(C, 7, 4.0)
    assert not of.linked(C)


def test_a_leader_restarted_when_its_record_or_it_itself_says_so() -> None:
    of = standing()
    meta = PartitionMeta(leader=A, epoch=1, isr={A: 1}, replicas=(A,), registration=7)
    assert not of.restarted(meta)
    of.answered(A, 9, 2.0)
    assert of.restarted(meta) and not of.restarted(replace(meta, registration=0))


def test_who_shuts_down_and_since_when() -> None:
    of = standing()
    leaving = {**NODES, A: replace(NODES[A], leaving=True)}
    of.changed(leaving, 5.0)
    of.changed({**leaving, A: replace(leaving[A], host="h")}, 6.0)
    assert of.leaving == {A: 5.0}
    of.changed(NODES, 7.0)
    assert not of.leaving


def test_one_question_at_a_time_to_each_node_and_one_that_is_urgent() -> None:
    questions = PendingProbes(limits := ControllerLimits())
    first = questions.ask(A, [(1, 0)], 0.0)
    assert first is not None and questions.ask(A, [(1, 1)], 0.0) is None
    urgent, other = questions.ask(A, [(1, 0)], 0.0, urgent=True), questions.ask(B, [(1, 0)], 0.0)
    assert urgent is not None and other is not None and len({first.number, urgent.number, other.number}) == 3
    waiting = PartitionName("t", 1, 1)
    questions.wait(A, False, [waiting])
    asked, names = questions.returned(first.number, A)
    assert asked is not None and asked.keys == {(1, 0)} and names == {waiting}
    assert questions.returned(first.number, A) == (None, set())
    lost = questions.ask(A, [(1, 0)], 1.0)
    assert lost is not None and questions.ask(A, [], 1.0 + 2 * limits.probe_s) is not None, "it counts as lost"


def test_parts_of_many_partitions_are_under_way_together_up_to_a_bound() -> None:
    questions = PendingProbes(limits := ControllerLimits(keys_max=10, key_s=0.1))
    keys = [(1, number) for number in range(16)]
    parts = [questions.ask_part(B, keys[n : n + 4], 0.0, urgent=False, suspected=False) for n in range(0, 16, 4)]
    assert [part.keys for part in parts if part is not None] == [tuple(keys[:4]), tuple(keys[4:8])]
    first, second = parts[0], parts[1]
    assert first is not None and second is not None
    assert first.timeout_s == limits.probe_s + 0.1 * 3 and second.timeout_s == limits.probe_s + 0.1 * 7
    assert questions.ask(B, [], 0.0) is None, "other questions wait until all is answered"
    assert questions.asked(B, keys[0], 0.0, 0.1) and questions.asked(B, keys[7], 0.0, 0.1)
    waiting = PartitionName("t", 1, 8)
    questions.wait(B, False, [waiting])
    asked, names = questions.returned(second.number, B)
    assert asked is not None and asked.keys == set(keys[4:8]) and names == {waiting}
    assert questions.asked(B, keys[0], 0.0, 0.1) and not questions.asked(B, keys[7], 0.0, 0.1)
    assert questions.ask_part(B, keys[8:12], 0.1, urgent=False, suspected=False) is not None
    assert questions.ask_part(B, keys, 10.0, urgent=False, suspected=False) is not None, "the others count as lost"
    assert questions.returned(first.number, B) == (None, set())


def test_a_part_with_more_than_the_bound_is_asked_alone() -> None:
    questions = PendingProbes(ControllerLimits(keys_max=3))
    keys = [(1, number) for number in range(8)]
    part = questions.ask_part(B, keys[:4], 0.0, urgent=False, suspected=False)
    assert part is not None and part.keys == tuple(keys[:3])
    assert questions.ask_part(B, keys[4:], 0.0, urgent=False, suspected=False) is None


def test_who_is_asked_for_many_has_more_time_unless_it_is_suspected() -> None:
    questions = PendingProbes(limits := ControllerLimits())
    keys = [(1, number) for number in range(limits.round_keys)]
    leader = questions.ask(A, keys, 0.0, urgent=True)
    follower = questions.ask(B, keys, 0.0, urgent=True, suspected=False)
    assert leader is not None and leader.timeout_s == limits.doubt_s
    assert follower is not None and follower.timeout_s == limits.doubt_s + limits.key_s * (len(keys) - 1)
    assert questions.asked(B, (1, 0), 0.0, 0.1) and not questions.asked(B, (2, 0), 0.0, 0.1)
    assert not questions.asked(B, (1, 0), 0.05, 0.1), "before the doubt"
    assert not questions.asked(B, (1, 0), 0.0, 2 * follower.timeout_s), "it counts as lost"
