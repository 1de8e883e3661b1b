"""Which faults are meant by words, which of them a machine can have, what proves itself, and what a night draws."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.errors import Unavailable
from tests.jepsen import night, suite
from tests.jepsen.deployment import Deployment, NotNow
from tests.jepsen.faults.fault import DidNotBite, FaultKind, Injected, bitten
from tests.jepsen.faults.table import FAULTS, LONE_FAULTS, chosen, possible
from tests.jepsen.injection import FaultFigures, Injector, longest_gap
from tests.jepsen.schedules import Swarm

ISSUE = [
    *(f"N{n}" for n in range(1, 13)),
    *("P1", "P2", "P3", "P4", "P5", "P7", "P8"),
    *(f"E{n}" for n in range(1, 8)),
    *(f"D{n}" for n in range(1, 14)),
    *(f"{letter}{n}" for letter, most in (("C", 3), ("M", 4), ("L", 4)) for n in range(1, most + 1)),
]


class BrokenThings:
    """Stands for a deployment: who is broken."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.settled = 0

    def settle(self, seconds: float) -> float:
        assert not self.broken
        self.settled += 1
        return 0.5


@dataclass
class QuietClients:
    """Stand for a load: an own clock, and what was recorded."""

    t: float = 0.0
    avoid: Any = None
    oks: list[float] = field(default_factory=list)
    ended: list[tuple[int, str, bool]] = field(default_factory=list)

    def now(self) -> float:
        self.t += 0.01
        return self.t

    def worst_probe(self, since: float, until: float) -> float:
        return 0.0

    def fault_begun(self, fault: str, what: str, victims: Iterable[str]) -> int:
        return 1

    def fault_ended(self, op: int, proof: str, *, bit: bool) -> None:
        self.ended.append((op, proof, bit))

    def healed(self, settle: float) -> None:
        pass


def kind(victim: str = "n1", *, counter: int = 3, alone: bool = False) -> FaultKind:
    """A fault of one victim, whose counter says how often it bit."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        if victim in deployment.broken:
            raise NotNow(victim)

        def proof() -> str:
            bitten(counter, "nothing was counted")
            return f"{counter} counted"

        return Injected(victim, frozenset([victim]), lambda: None, proof)

    return FaultKind(f"X1-{victim}", "", "", inject, seconds=(0.0, 0.1), alone=alone)


def injector() -> tuple[Injector, BrokenThings, QuietClients]:
    things, clients = BrokenThings(), QuietClients()
    return Injector(cast(Deployment, things), random.Random(1), clients, FaultFigures()), things, clients


def test_a_victim_is_broken_until_it_is_healed_and_nobody_breaks_it_twice() -> None:
    hands, things, clients = injector()
    fault = hands.inject(kind())
    assert fault is not None
    assert things.broken == {"n1"}
    assert hands.inject(kind()) is None, "it is broken already"
    assert hands.inject(kind("n2")) is not None
    hands.heal(fault)
    assert things.broken == {"n2"}
    assert clients.ended == [(1, "3 counted", True)]


def test_a_fault_that_did_not_bite_makes_the_run_invalid_and_is_healed() -> None:
    hands, things, clients = injector()
    fault = hands.inject(kind(counter=0))
    assert fault is not None
    hands.heal(fault)
    assert not things.broken
    assert hands.figures.invalid == ["X1-n1 (n1): nothing was counted"]
    assert clients.ended == [(1, "nothing was counted", False)]


def put_off(hands: Injector, *, proof: bool, error: Exception) -> list[str]:
    """n1 is broken; its healing, or its proof, fails while n2 is broken. What was done, in order, as it grows."""
    fault, done = hands.inject(kind("n1")), list[str]()
    assert fault is not None

    def needs_the_other(what: str, fails: bool) -> str:
        done.append(what)
        if fails and "n2" in hands.deployment.broken:
            raise error
        return what

    fault.injected.heal = lambda: cast(None, needs_the_other("heal", not proof))
    fault.injected.proof = lambda: needs_the_other("proof", proof)
    return done


@pytest.mark.parametrize("error", [NotNow("nobody answers"), Unavailable("etcd does not answer")])
@pytest.mark.parametrize("proof", [True, False])
def test_what_can_not_be_healed_or_proven_yet_is_put_off(
    proof: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.jepsen.injection.pause", lambda seconds: None)
    hands, things, clients = injector()
    done = put_off(hands, proof=proof, error=error)
    assert hands.inject(kind("n2")) is not None
    assert not hands.heal(hands.active[0])
    assert things.broken == {"n1", "n2"} and not clients.ended
    hands.heal_all()
    assert not things.broken and not hands.active and not hands.figures.invalid
    assert done.count("proof") == (3 if proof else 1) and done.count("heal") == (1 if proof else 3)


def test_what_can_never_be_healed_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.jepsen.injection.pause", lambda seconds: None)
    monkeypatch.setattr("tests.jepsen.injection.HEAL_SECONDS", 0.0)
    hands, things, _ = injector()
    put_off(hands, proof=False, error=NotNow("nobody answers"))
    things.broken.add("n2")
    with pytest.raises(AssertionError, match="X1-n1 can not be healed"):
        hands.heal_all()


@dataclass
class EndedDaemon:
    """Stands for a broker that has ended, with a last word."""

    said: str
    name: str
    spawned: int = 0

    @property
    def directory(self) -> Path:
        return Path(self.name)

    @property
    def _process(self) -> Any:
        return None if self.spawned else SimpleNamespace(poll=lambda: 1)

    def log(self) -> str:
        return self.said

    def kill(self) -> None: ...

    def spawn(self) -> None:
        self.spawned += 1

    def listening(self) -> bool:
        return bool(self.spawned)


def test_who_ended_for_want_of_etcd_is_started_again_unless_it_is_broken() -> None:
    away = "[nsqd] FATAL: etcd at 10.0.0.1:2379 does not answer: late; start it, or correct --etcd-endpoint"
    lost = EndedDaemon(away, "n1")
    broken = EndedDaemon(away, "n2")
    other = EndedDaemon("INFO: the watch on etcd broke\n[nsqd] FATAL: the disk is full", "n3")
    things: Any = SimpleNamespace(daemons=[lost, broken, other], is_broken=lambda daemon: daemon is broken)
    Deployment.revive(things)
    assert (lost.spawned, broken.spawned, other.spawned) == (1, 0, 0)
    Deployment.wait_listening(things, [cast(Any, broken)])
    assert broken.spawned == 1, "whoever waits for it wants it"


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_a_fault_that_wants_to_be_alone_is_alone(first: bool, second: bool) -> None:
    hands, _, _ = injector()
    assert hands.inject(kind("n1", alone=first)) is not None
    assert hands.inject(kind("n2", alone=second)) is None


def test_what_heals_at_the_end_of_a_failed_run_does_not_hide_why_it_failed() -> None:
    hands, _, _ = injector()
    fault = hands.inject(kind())
    assert fault is not None

    def heal() -> None:
        raise DidNotBite("again")

    fault.injected.heal = heal
    hands.heal_whatever()
    assert hands.active == []


def test_a_round_ends_with_everything_healed_and_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.jepsen.schedules.pause", lambda seconds: None)
    monkeypatch.setattr("tests.jepsen.injection.pause", lambda seconds: None)
    hands, things, _ = injector()
    clock = itertools.count(step=0.5)
    monkeypatch.setattr("tests.jepsen.schedules.time", SimpleNamespace(monotonic=lambda: next(clock)))
    for _ in range(20):
        Swarm([kind("n1"), kind("n2"), kind("n3")], 20.0).run(hands)
        assert not things.broken and not hands.active
    assert things.settled == 20
    assert hands.figures.counts.total() > 50


def test_every_kind_that_was_asked_for_is_there() -> None:
    assert {kind.family for kind in FAULTS.values()} >= set(ISSUE)
    assert all(kind.id == name for name, kind in FAULTS.items())


def test_words_mean_ids_families_and_letters() -> None:
    assert [kind.id for kind in chosen(["P1-leader", "P3"])] == ["P1-leader", "P3"]
    assert {kind.family for kind in chosen(["P1"])} == {"P1"}
    assert {kind.family for kind in chosen(["L"])} == {"L1", "L2", "L3", "L4"}
    with pytest.raises(ValueError, match="there is no fault P99; there are N1-leader, "):
        chosen(["P99"])


def test_what_the_machine_has_not_and_what_the_mode_does_not_promise_is_left_out() -> None:
    able, others = possible(chosen(["P1-leader", "N2-halves", "D2"]), {"namespaces", "disks"}, "none")
    assert [kind.id for kind in able] == ["P1-leader", "N2-halves"]
    assert others == ["D2 promises nothing with sync=none"]
    assert possible(chosen(["N2-halves"]), (), "always") == ([], ["N2-halves needs namespaces"])


def test_the_longest_gap_may_be_at_either_end() -> None:
    assert longest_gap([1.0, 2.0, 2.5], 0.5, 4.0) == (1.5, 2.5)
    assert longest_gap([3.9], 0.0, 4.0) == (3.9, 0.0)
    assert longest_gap([], 1.0, 4.0) == (3.0, 1.0)


def test_a_night_draws_runs_of_all_modes_whose_words_repeat_them(tmp_path: Path) -> None:
    here = frozenset({"namespaces", "disks", "firewall", "links", "groups"})
    runs = list(itertools.islice(night.drawn(random.Random(3), here), 60))
    assert {run.sync for run in runs} == {"always", "interval", "none"}
    assert 10 < sum(1 for run in runs if run.faults) < 50
    for run in runs:
        args = suite.parsed(run.words(tmp_path))
        assert (args.seed, args.sync, args.minutes, args.keep) == (run.seed, run.sync, run.minutes, tmp_path)
        assert [kind.id for kind in possible(chosen(run.faults), here, run.sync)[0]] == list(run.faults)


def test_a_run_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "from tests.jepsen import suite; suite.tell_stacks(); print(1, flush=True); import time; time.sleep(60)"
    monkeypatch.setattr(night, "LONGEST_SECONDS", 0.0)
    with (tmp_path / "out").open("wb") as out:
        hung = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=out)
        assert hung.stdout is not None and hung.stdout.readline() == b"1\n"
        of_one = night.Night(tmp_path)
        of_one._under_way = hung
        assert of_one._result(hung) == "HUNG" and hung.returncode is not None
        hung.stdout.close()
    assert 'File "<string>", line 1 in <module>' in (tmp_path / "out").read_text()


def test_a_lone_node_has_faults_of_its_own() -> None:
    assert [kind.id for kind in chosen(["S"], LONE_FAULTS)] == list(LONE_FAULTS)
    with pytest.raises(ValueError, match="S1, S2"):
        chosen(["N1"], LONE_FAULTS)
    plan = suite.planned(suite.parsed(["--lone", "--count", "3", "--partitions", "2"]))
    assert (plan.lone, plan.apart, plan.swarm, plan.drawn, plan.partitions) == (True, False, False, True, 2)
