"""What a controller does for each partition of a dead leader does not grow with their number."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, ItemsView
from dataclasses import replace

import pytest

from benchmarks.elections import NODES, answer, elect_all, judged, topics
from nsqha.election.controller.controller import ControllerMachine
from nsqha.election.controller.elections import Elections
from nsqha.election.controller.events import (
    Answered,
    Metadata,
    NotAnswered,
    Probe,
    PutDone,
    PutPartition,
    Say,
    Suspect,
    Tick,
)
from nsqha.election.controller.rounds import ControllerLimits, Round, TopicPartition
from nsqha.election.elect import ReplicaReport
from nsqha.election.model import PartitionMeta
from nsqha.election.placement import PartitionName

# A twentieth of what is asked and scanned at a time, and twenty times as long: hundreds are as thousands are.
SMALL = ControllerLimits(round_keys=12, keys_max=50, scan_parts=100, key_s=0.006)


def test_ten_times_as_many_are_judged_as_often_each() -> None:
    times = {}
    for count in (60, 600):
        with judged() as ballots:
            elect_all(count, SMALL)
        times[count] = len(ballots) / count
    assert max(times.values()) < 1.2, times


def test_each_is_looked_at_a_few_times_and_not_at_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Counter[PartitionName]()
    reason = Elections.reason

    def counted(of: Elections, part: TopicPartition, now: float) -> str:
        looked[part.name] += 1
        return reason(of, part, now)

    monkeypatch.setattr(Elections, "reason", counted)
    elect_all(600, ControllerLimits())
    # When the record is new, suspected, silent, when all have answered, and when it is written; and a scan or two.
    assert len(looked) == 600 and looked.total() <= 6.5 * 600


def begun(count: int, limits: ControllerLimits) -> tuple[ControllerMachine, list[Probe]]:
    """A machine whose nodes were asked for all partitions, as their leader has refused."""
    machine = ControllerMachine(100.0, limits)
    machine.step(Metadata(topics(count), NODES, {}), 100.0)
    asked = [action for action in machine.step(Suspect(1, "reset"), 100.0) if isinstance(action, Probe)]
    leader = next(probe for probe in asked if probe.node == 1)
    more = machine.step(NotAnswered(leader.number, 1, "refused"), 100.001)
    assert not any(isinstance(action, PutPartition) for action in more)
    asked += [action for action in more if isinstance(action, Probe)]
    return machine, [probe for probe in asked if probe.node != 1]


def test_nodes_are_asked_for_all_at_once_and_the_first_are_elected_meanwhile() -> None:
    machine, asked = begun(200, ControllerLimits(round_keys=50))
    assert [(probe.node, len(probe.keys)) for probe in asked] == [(2, 50), (3, 50)] * 4
    elected: list[str] = []
    for n, probe in enumerate(asked):
        actions = machine.step(answer(probe), 100.01 + 0.001 * n)
        elected += [action.name.topic for action in actions if isinstance(action, PutPartition)]
        assert len(elected) == (n + 1) // 2 * 50
    assert elected == sorted(f"t{n}" for n in range(200)), "those that are asked for first are elected first"


def test_who_answers_late_for_the_last_of_many_is_waited_for_as_for_the_first() -> None:
    machine, asked = begun(1000, ControllerLimits())
    assert {probe.timeout_s for probe in asked} == {0.1 + 0.001 * 999}
    led, last = Counter[int](), asked[-1]
    for n, probe in enumerate([*asked[:-1], last]):
        if probe is last:
            assert not any(isinstance(action, PutPartition) for action in machine.step(Tick(), 100.3))
        for action in machine.step(answer(probe), 100.31 if probe is last else 100.01 + 0.01 * n):
            if isinstance(action, PutPartition):
                led[action.meta.leader] += 1
                done = replace(action.meta, version=action.meta.version + 1)
                machine.step(PutDone(action.name, "applied", done), 100.1)
    assert led.total() == 1000


@pytest.mark.parametrize(("count", "in_time"), [(3, 1.1), (1000, 2.1)])
def test_elections_say_what_they_wait_for_when_so_many_take_no_longer(count: int, in_time: float) -> None:
    machine, _ = begun(count, ControllerLimits())
    said: list[float] = []
    for n in range(300):
        at = 0.01 * n
        for action in machine.step(Tick(), 100.0 + at):
            if isinstance(action, Say) and action.event == "election_waits":
                said.append(at)
    assert len(said) == count
    assert in_time < min(said) <= max(said) < in_time + 0.5


def test_a_node_that_is_silent_is_not_waited_for_whatever_it_was_asked_for() -> None:
    machine = ControllerMachine(100.0, ControllerLimits(keys_max=20))
    machine.step(Metadata(topics(60), NODES, {}), 100.0)
    asked = deque(action for action in machine.step(Suspect(1, "reset"), 100.0) if isinstance(action, Probe))
    elected: set[PartitionName] = set()
    refused = False
    while asked:
        probe = asked.popleft()
        if probe.node == 1 and refused:
            continue  # no more is heard of it
        refused |= probe.node == 1
        for action in machine.step(answer(probe), 100.01):
            if isinstance(action, Probe):
                asked.append(action)
            elif isinstance(action, PutPartition):
                elected.add(action.name)
    assert len(elected) == 60


def looked_at(
    monkeypatch: pytest.MonkeyPatch, machine: ControllerMachine, times: int, now: float = 100.0
) -> list[list[PartitionName]]:
    """The partitions that each of so many scans judges the leader of."""
    looked: list[PartitionName] = []

    def reason(_: Elections, part: TopicPartition, now: float) -> str:
        looked.append(part.name)
        return ""

    monkeypatch.setattr(Elections, "reason", reason)
    scans: list[list[PartitionName]] = []
    for n in range(times):
        machine.step(Tick(), now + n)
        scans.append(looked[:])
        looked.clear()
    return scans


def test_a_scan_looks_at_so_many_and_in_turn_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = ControllerMachine(100.0, replace(SMALL, scan_parts=4))
    machine.step(Metadata(topics(10), NODES, {}), 100.0)
    machine.state.standing.unheard(2, frozenset({1}), 100.0)
    scans = looked_at(monkeypatch, machine, 6)
    assert [len(scan) for scan in scans] == [4, 4, 2] * 2
    assert scans[3:] == scans[:3] and len({name for scan in scans for name in scan}) == 10


TROUBLES: dict[str, Callable[[ControllerMachine, PartitionName], object]] = {
    "silent": lambda m, _: m.state.standing.silent.update({1: 100.0}),
    "lost by a follower": lambda m, _: m.state.standing.blamed(2, frozenset({1}), 100.0),
    "not heard by one": lambda m, _: m.state.standing.unheard(2, frozenset({1}), 100.0),
    "in a later life": lambda m, _: m.state.standing.answered(1, 12, 100.0),
    "gone": lambda m, _: m.state.standing.changed({uid: NODES[uid] for uid in (2, 3)}, 100.0),
    "disk closed": lambda m, _: m.state.standing.changed({**NODES, 1: replace(NODES[1], poisoned="EIO")}, 100.0),
    "does not lead": lambda m, name: answered(m, name, ReplicaReport(11, 1, 1, 5)),
    "commits nothing": lambda m, name: answered(m, name, ReplicaReport(11, 1, 1, 5, committed=1, leading=True)),
    "its round has no time": lambda m, name: m.state.rounds.update({name: Round("watch", "", 100.0)}),
}


def answered(machine: ControllerMachine, name: PartitionName, report: ReplicaReport) -> None:
    state = machine.state
    state.leader_check.answered(state.parts[name], 1, report, 100.0)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_scans_judge_no_leader_of_which_nothing_bad_is_known(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    machine = ControllerMachine(100.0)
    machine.step(Metadata(topics(10), NODES, {}), 100.0)
    machine.step(Tick(), 100.0)
    name = min(machine.state.parts)
    asked = [probe for probe in machine.step(Tick(), 102.1) if isinstance(probe, Probe)]
    for probe in asked:
        report = ReplicaReport(NODES[probe.node].registration, probe.node, 1, 5, committed=5, leading=probe.node == 1)
        reports = dict.fromkeys(probe.keys, report)
        machine.step(Answered(probe.number, probe.node, report.registration, reports), 102.2)
    with monkeypatch.context() as patch:
        assert looked_at(patch, machine, 3, 103.0) == [[], [], []]
    TROUBLES[trouble](machine, name)
    with monkeypatch.context() as patch:
        (looked,) = looked_at(patch, machine, 1, 106.0)
    assert set(looked) == {name} or len(set(looked)) == 10


class CountedWalks(dict[PartitionName, PartitionMeta]):
    walks = 0

    def items(self) -> ItemsView[PartitionName, PartitionMeta]:
        self.walks += 1
        return super().items()


def test_plans_look_at_partitions_again_when_one_of_them_or_a_node_has_changed() -> None:
    machine = ControllerMachine(100.0)
    machine.step(Metadata(topics(10), NODES, {}), 100.0)
    planner, planned = machine.state.planner, machine.state.planned
    planned._metas = metas = CountedWalks(planned._metas)

    def walks(now: float) -> int:
        before = metas.walks
        planner.plan(machine.state.world(), now)
        return metas.walks - before

    assert walks(101.0) == 1 and walks(101.5) == 0
    name = min(machine.state.parts)
    part = machine.state.parts[name]
    planned.put(name, replace(part.meta, replicas=(1, 2)), part.settings)
    assert walks(102.0) == 1 and planner.plan(machine.state.world(), 120.0).intents, "one has too few replicas"
    planned.put(name, part.meta, part.settings)
    assert walks(103.0) == 1 and walks(103.5) == 0
    planner.decommissions = frozenset({3})
    assert walks(104.0) >= 1
