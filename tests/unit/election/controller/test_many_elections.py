"""What a controller does for each partition of a dead leader does not grow with their number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.elections import NODES, elect_all, judged, topics
from nsqha.election.controller.controller import ControllerMachine
from nsqha.election.controller.elections import Elections
from nsqha.election.controller.events import Metadata, Tick
from nsqha.election.controller.rounds import ControllerLimits, TopicPartition
from nsqha.election.placement import PartitionName

# A twentieth of what is asked and scanned at a time, and twenty times as long: hundreds are as thousands are.
SMALL = ControllerLimits(round_keys=12, keys_max=50, scan_parts=100, key_s=0.006)


def test_ten_times_as_many_are_judged_as_often_each() -> None:
    times = {}
    for count in (60, 600):
        with judged() as ballots:
            elect_all(count, SMALL)
        times[count] = len(ballots) / count
    assert times[600] < 1.5 * times[60] < 6, times


def test_a_scan_looks_at_so_many_and_in_turn_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[PartitionName] = []

    def reason(_: Elections, part: TopicPartition, now: float) -> str:
        looked.append(part.name)
        return ""

    machine = ControllerMachine(100.0, replace(SMALL, scan_parts=4))
    machine.step(Metadata(topics(10), NODES, {}), 100.0)
    monkeypatch.setattr(Elections, "reason", reason)
    scans: list[list[PartitionName]] = []
    for n in range(6):
        machine.step(Tick(), 100.0 + n)
        scans.append(looked[:])
        looked.clear()
    assert [len(scan) for scan in scans] == [4, 4, 2] * 2
    assert scans[3:] == scans[:3] and len({name for scan in scans for name in scan}) == 10
