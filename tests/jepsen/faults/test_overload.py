"""What proves that a CPU quota bit: who wanted more was held back, and somebody did."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from tests.jepsen.deployment import Broker, Deployment
from tests.jepsen.faults import overload
from tests.jepsen.faults.fault import DidNotBite
from tests.jepsen.faults.overload import limited


@dataclass
class CountedGroup:
    """Stands for a control group: counters that a test sets."""

    periods: int = 0
    seconds: float = 0.0
    quota: float | None = None

    def add(self, pid: int) -> None:
        pass

    def cpu(self, cores: float | None) -> None:
        self.quota = cores

    def throttled(self) -> int:
        return self.periods

    def cpu_used(self) -> float:
        return self.seconds


@dataclass
class NamedBroker:
    name: str
    pid: int = 1


class GroupsOnly:
    """Stands for a deployment."""

    def __init__(self) -> None:
        self.groups = {name: CountedGroup() for name in ("n1", "n2", "n3")}

    @property
    def whole_nodes(self) -> list[Broker]:
        return [cast(Broker, NamedBroker(name)) for name in self.groups]

    def group(self, name: str) -> CountedGroup:
        return self.groups[name]


def proof_of(periods: tuple[int, ...], used: tuple[float, ...]) -> str:
    """Of a quota of a tenth of a core, with these counters when it is lifted."""
    deployment = GroupsOnly()
    victims = [cast(Broker, NamedBroker(name)) for name in deployment.groups]
    injected = limited(cast(Deployment, deployment), victims, 0.1)
    for group, count, seconds in zip(deployment.groups.values(), periods, used, strict=True):
        group.periods, group.seconds = count, seconds
    injected.heal()
    return injected.proof()


def test_a_broker_that_needed_no_more_than_its_quota_may_be_left_alone_by_it() -> None:
    assert "n1 5" in proof_of((5, 0, 2), (1e6, 0.0, 1e6))


def test_a_quota_that_held_nobody_back_did_not_bite() -> None:
    with pytest.raises(DidNotBite, match="nobody"):
        proof_of((0, 0, 0), (0.0, 0.0, 0.0))


def test_a_quota_that_spared_who_wanted_more_did_not_bite() -> None:
    with pytest.raises(DidNotBite, match="n2"):
        proof_of((5, 0, 2), (1e6, 1e6, 1e6))


@pytest.mark.parametrize(("cores", "least", "most"), [(0.08, 0.035, 0.04), (8.0, 0.05, 0.25), (0.0, 0.01, 0.01)])
def test_the_busiest_gets_less_than_it_uses(
    cores: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, clock = GroupsOnly(), [5.0]

    def pause(seconds: float) -> None:
        clock[0] += seconds
        deployment.groups["n2"].seconds += cores * seconds

    monkeypatch.setattr(overload, "pause", pause)
    monkeypatch.setattr(overload, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    overload.quota(cast(Deployment, deployment), random.Random(3))
    assert {group.quota for group in deployment.groups.values()} == {deployment.groups["n2"].quota}
    assert least <= (deployment.groups["n2"].quota or 0) <= most + 1e-9
