"""States of partitions, and how many there are of each."""

from __future__ import annotations

from nsqha.election import health
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName


def meta(leader: int, *isr: int) -> PartitionMeta:
    return PartitionMeta(leader, isr=dict.fromkeys(isr, 7), replicas=(1, 2, 3), min_isr=2)


def test_members_that_are_away_acknowledge_nothing() -> None:
    records = [meta(1, 1, 2, 3), meta(1, 1, 2), meta(1, 1, 3), meta(1, 1), meta(3, 1, 2, 3), meta(0)]
    found = {PartitionName("t", 7, number): record for number, record in enumerate(records)}
    everybody, two = {1, 2, 3}, {1, 2}
    assert health.counts(found, everybody) == {
        health.OK: 2, health.UNDER: 2, health.BELOW: 1, health.LEADERLESS: 1,
    }  # fmt: skip
    assert health.counts(found, two) == {
        health.OK: 0, health.UNDER: 2, health.BELOW: 2, health.LEADERLESS: 2,
    }  # fmt: skip
    assert health.counts(found, everybody, {PartitionName("t", 7, 0)}) == {
        health.OK: 1, health.UNDER: 2, health.BELOW: 1, health.LEADERLESS: 2,
    }, "its leader runs and does not lead"  # fmt: skip
