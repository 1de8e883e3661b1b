"""Which leaders are asked whether they lead: all in doubt each time, and of many others some in turn."""

from __future__ import annotations

from dataclasses import replace

from nsqha.election.controller.leader_check import LeaderCheck
from nsqha.election.controller.rounds import ControllerLimits, TopicPartition
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import PartitionMeta, TopicSettings
from nsqha.election.placement import PartitionName

LIMITS = ControllerLimits(audit_keys=20, keys_max=100)
LEADS = ReplicaReport(1, 1, last_epoch=1, end=2, committed=2, promise=1, leading=True)


def led(count: int) -> dict[PartitionName, TopicPartition]:
    meta = PartitionMeta(epoch=1, leader=1, isr={1: 1, 2: 2}, replicas=(1, 2))
    names = [PartitionName("t", 7, number) for number in range(count)]
    return {name: TopicPartition(name, TopicSettings(), meta) for name in names}


def confirmed(count: int) -> tuple[LeaderCheck, dict[PartitionName, TopicPartition]]:
    check, parts = LeaderCheck(LIMITS), led(count)
    for part in parts.values():
        check.answered(part, 1, LEADS, 0.0)
    return check, parts


def test_many_partitions_that_are_led_cost_a_request_what_a_few_do() -> None:
    check, parts = confirmed(50)
    turns = [check.turn(1, parts) for _ in range(5)]
    assert [len(turn) for turn in turns] == [20] * 5
    assert {key for turn in turns[:3] for key in turn} == {part.key for part in parts.values()}


def test_who_has_not_said_that_it_leads_is_asked_each_time() -> None:
    check, parts = confirmed(50)
    newly = PartitionName("t", 7, 3)
    parts[newly].meta = replace(parts[newly].meta, epoch=2)
    assert all(parts[newly].key in check.turn(1, parts) for _ in range(5))


def test_who_said_once_that_it_leads_no_more_is_asked_each_time_from_then_on() -> None:
    check, parts = confirmed(50)
    stepped_down, stuck = (parts[PartitionName("t", 7, number)] for number in (11, 12))
    check.answered(stepped_down, 1, replace(LEADS, leading=False), 2.0)
    check.answered(stuck, 1, replace(LEADS, end=9), 2.0)
    for _ in range(5):
        assert {stepped_down.key, stuck.key} <= set(check.turn(1, parts))


def test_a_request_has_a_bound_whatever_is_in_doubt() -> None:
    check, parts = LeaderCheck(LIMITS), led(500)
    assert len(check.turn(1, parts, [(9, 9)])) == 100


def test_a_leader_that_answers_twice_that_it_does_not_lead_counts_as_none() -> None:
    """After one answer it may be about to begin. One that declined its epoch never begins."""
    check, parts = confirmed(3)
    idle, declined, _ = parts.values()
    none = replace(LEADS, leading=False, promise=idle.meta.epoch)
    check.answered(idle, 1, none, 2.0)
    check.answered(declined, 1, replace(none, declines="its clock is wrong", declined_epoch=declined.meta.epoch), 2.0)
    assert check.not_leading() == {declined.name}
    check.answered(idle, 1, none, 4.0)
    assert check.not_leading() == {idle.name, declined.name}
    check.answered(idle, 1, LEADS, 6.0)
    assert check.not_leading() == {declined.name}
