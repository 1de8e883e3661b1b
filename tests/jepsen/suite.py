"""The fault suite: a cluster on hosts of its own, broken under load, and judged. `make jepsen` runs it.

    python -m tests.jepsen.suite [--fault N1,P1] [--seed N] [--minutes 5] [--sync always] [--count N] [--keep DIR]

With `--fault` these kinds come one after the other, each from a cluster that is well to one that is well again; a
family (P1) stands for its variants, a letter for all of its families. Without, or with `--swarm`, rounds of several at
a time are drawn. `--count N` ends after N faults, in a drawn order. Root and network namespaces are needed;
`--loopback` does without, with the faults that processes alone can have. With `--simple`, and on loopback, one topic of
one partition is under load, so that gaps can be measured. `--tell MS` prints what every member logged around a gap, or
a publish of a prober, that is longer. `--lone`: a node without a cluster, on loopback, which is killed while it serves
and starts, and while topics and channels come and go.

What is asked: all that was OK'd comes out, in order and whole; every ISR is full again in time; the replicas are equal
byte for byte; once all is well, every channel state is what its log says, and no channel stands still; no broker logs
an error that the faults do not explain; every fault proved that it bit. The seed fixes the draws, not the machine's
timing.

Exit status: 0 all of that; 1 something of it is not so, or hosts can not be made here; 2 a fault did not bite: the run
is invalid. The folder of a run that failed is kept: logs, data, and of each load a history and a report.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsqha.cli.brokers.admin import Admin
from tests.integration.cluster import UnderLoad, pause
from tests.integration.servers import CannotStart, wait_until
from tests.jepsen import lone
from tests.jepsen.checkers.errors import unexplained
from tests.jepsen.checkers.judgement import Report
from tests.jepsen.checkers.view import Figures
from tests.jepsen.deployment import CHANNELS, TOPIC, Deployment
from tests.jepsen.faults.fault import SYNCS, FaultKind
from tests.jepsen.faults.table import FAULTS, LONE_FAULTS, chosen, possible
from tests.jepsen.history import History
from tests.jepsen.hosts.network import NotPossible
from tests.jepsen.hosts.probe import capabilities, lacking
from tests.jepsen.injection import SETTLE_SECONDS, FaultFigures, Injector
from tests.jepsen.load import dead_letters
from tests.jepsen.load.dead_letters import FailingMessages
from tests.jepsen.load.plan import TopicPlan, make_topics, named, standard
from tests.jepsen.report.page import RunReport
from tests.jepsen.sampling import SECONDS as SAMPLE_SECONDS
from tests.jepsen.sampling import Sampler
from tests.jepsen.schedules import ROUND_SECONDS, Schedule, Scripted, Swarm

SHORTEST_SECONDS = 5.0  # of a round
CREATE_SECONDS = 30.0  # of topics
VOID = {"did not bite"}  # of the run itself


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    kinds: Sequence[FaultKind]
    seed: int
    sync: str = "always"
    seconds: float = float("inf")
    count: int | None = None  # of faults
    drawn: bool = False  # they come in a drawn order; else in turn
    swarm: bool = False
    apart: bool = True
    lone: bool = False  # one node, which is no cluster; see tests.jepsen.lone
    partitions: int = 1  # of its topics
    pace: float = 1.0  # of its lives
    simple: bool = False  # one topic, of one partition, and more publishers: to measure gaps
    dead: bool = False  # a channel in which some messages always fail; of a simple load
    rate: float = 500.0  # messages a second, about
    nodes: int = 3
    plants: Sequence[str] = ()  # bugs that the daemons have (tests.jepsen.planted)
    tell_above: float = float("inf")  # seconds of a gap
    other_tree: Path | None = None  # the version to which M4 rolls


@dataclass
class Outcomes:
    """What the clients of all loads of a run saw."""

    loads: int = 0
    published: int = 0
    ok: int = 0
    failed: int = 0
    unknown: int = 0
    recovered: int = 0  # unknown, and came out
    delivered: int = 0
    again: int = 0
    dead: int = 0

    def add(self, f: Figures) -> None:
        self.loads += 1
        self.published += f.attempted
        self.ok += f.ok
        self.failed += f.failed
        self.unknown += f.unknown
        self.recovered += f.recovered
        self.delivered += f.delivered
        self.again += f.redelivered + f.repeated

    def __str__(self) -> str:
        lines = [
            f"published {self.published}: OK {self.ok}, failed {self.failed}, unknown {self.unknown} "
            f"(came out: {self.recovered})",
            f"delivered {self.delivered}: again {self.again} ({self.again / max(self.delivered, 1):.1%}; "
            "1% is asked for by REQ)",
        ]
        if self.dead:
            lines.append(f"{self.dead} dead letters, each once, and each came again at attempt 1")
        return "\n".join(lines)


class Suite:
    """One run: a deployment, loads on it one after the other, and what came of them."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.figures = FaultFigures()
        self.outcomes = Outcomes()
        self._folder = folder
        self._plan = plan
        self._rng = random.Random(f"{plan.seed} suite")
        self.judged: Report | None = None  # the last load
        self._loads: list[tuple[list[str], History]] = []  # topics, and what their clients saw

    def run(self) -> None:
        """AssertionError with everything that is known, if something is wrong."""
        plan = self._plan
        with self.deployed() as deployment:
            deployment.other_tree = plan.other_tree
            until = time.monotonic() + plan.seconds
            if plan.swarm:
                while (left := until - time.monotonic()) > 0:
                    self.loaded(deployment, Swarm(plan.kinds, min(ROUND_SECONDS, max(SHORTEST_SECONDS, left))))
            else:
                self.loaded(deployment, Scripted(plan.kinds, plan.count, plan.seconds, plan.drawn))
            self.judge(deployment)

    def deployed(self) -> contextlib.AbstractContextManager[Deployment]:
        """The cluster that the plan asks for."""
        plan = self._plan
        return Deployment.built(self._folder, sync=plan.sync, nodes=plan.nodes, apart=plan.apart, plants=plan.plants)

    def judge(self, deployment: Deployment) -> None:
        """All loads since the last judgement, with what the replicas have in their files. No broker runs afterwards."""
        ends = deployment.check_replicas()
        problems = []
        for node in deployment.brokers:
            odd = unexplained(node.states.errors(), self.figures.counts)
            problems += [f"logged by {node.name}: {line}" for line in odd[:5]]
        loads, self._loads = self._loads, []
        for number, (topics, history) in enumerate(loads, self.outcomes.loads + 1):
            own = {name: end for name, end in ends.items() if name[0] in topics}
            report = RunReport(itertools.chain(history, deployment.stored(own)))
            report.write(self._folder, f"report-{number}")
            self.outcomes.add(report.judged.figures)
            self.judged = report.judged
            if set(report.judged.problems) - VOID:
                problems.append(f"load {number}: {report.judged}")
        assert not problems, "\n".join(problems)

    def loaded(self, deployment: Deployment, schedule: Schedule) -> None:
        """Topics with clients of their own, as numbers of messages begin again with each load."""
        plan, rng, number = self._plan, self._rng, self.outcomes.loads + len(self._loads) + 1
        deployment.topic = f"{TOPIC}-{number}"
        options: dict[str, Any] = {"any_node": plan.swarm and rng.random() < 0.5}
        channels: tuple[str, ...] = ()
        if plan.simple:
            channels = (*CHANNELS, *([dead_letters.CHANNEL] if plan.dead else []))
            deployment.create(deployment.topic, *channels)
        else:
            options["plans"] = made_topics(deployment, number, plan.rate)
        failing = FailingMessages.of(deployment, deployment.topic) if plan.dead else None
        load = Load(
            deployment,
            deployment.topic,
            *channels,
            seed=rng.randrange(1 << 30),
            failing=failing,
            hosts=deployment.addresses,
            enter=deployment.enter_clients,
            sync=plan.sync,
            path=self._folder / f"history-{number}.jsonl",
            **options,
        )
        with load:
            injector = Injector(deployment, rng, load.clients, self.figures)
            injector.tell_above = plan.tell_above
            injector.gaps = plan.simple  # where several leaders are at work some always answer
            with Sampler(deployment, load.clients.record, load.clients.now):
                try:
                    schedule.run(injector)
                    load.clients.healed(SETTLE_SECONDS)
                    injector.settle()
                    pause(2 * SAMPLE_SECONDS)  # which show it
                finally:
                    injector.heal_whatever()
        self._loads.append(([each.name for each in load.clients.plans], load.clients.history))
        self.outcomes.dead += failing.dead if failing is not None else 0


class Load(UnderLoad):
    """Judged when the replicas can be read, and not when it ends. Whether all that was OK'd came out is asked then."""

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.closing(self._background):
            if kind is None:
                self.goes_on()
                self.report = self._background.finish()
                assert not self._background.stuck, f"{self._background.stuck}\n{self.report}"


def made_topics(deployment: Deployment, number: int, rate: float) -> list[TopicPlan]:
    """Those of a standard load, by names of their own."""
    plans = named(standard(rate), f"-{number}")
    with Admin(deployment.nodes[0].grpc, CREATE_SECONDS) as admin:
        make_topics(admin, plans)
    wait_until(deployment.all_in_sync, "all topics are there", CREATE_SECONDS)
    return plans


class LoneSuite(Suite):
    """One run of a node that is alone."""

    def run(self) -> None:
        plan = self._plan
        schedule = Scripted(plan.kinds, plan.count, plan.seconds, plan.drawn)
        report = lone.run(
            self._folder,
            schedule,
            self.figures,
            seed=plan.seed,
            sync=plan.sync,
            partitions=plan.partitions,
            pace=plan.pace,
        )
        self.outcomes.add(report.judged.figures)
        self.judged = report.judged


def run(folder: Path, plan: Plan) -> Suite:
    """A whole run; AssertionError if something is wrong."""
    suite = (LoneSuite if plan.lone else Suite)(folder, plan)
    suite.run()
    return suite


# ---- the command


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", default="", help="ids, families or letters, separated by commas")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--count", type=int, default=None, help="so many faults, in a drawn order")
    parser.add_argument("--sync", choices=sorted(SYNCS), default="always")
    parser.add_argument("--swarm", action="store_true", help="several at a time, also with --fault")
    parser.add_argument("--loopback", action="store_true", help="no hosts: faults of processes only")
    parser.add_argument("--lone", action="store_true", help="one node, no cluster, on loopback: S1 to S6")
    parser.add_argument("--partitions", type=int, default=1, help="of the topics of a lone node")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second")
    parser.add_argument("--simple", action="store_true", help="one topic of one partition: gaps are measured")
    parser.add_argument(
        "--dead", action="store_true", help="a channel with a policy, in which some messages always fail"
    )
    parser.add_argument("--tell", type=float, metavar="MS", help="print the logs around longer gaps and publishes")
    parser.add_argument("--other-tree", type=Path, help="checkout of another version, for M4 (default: one is made)")
    parser.add_argument("--keep", type=Path, help="folder for data, logs and histories (default: temporary)")
    return parser.parse_args(arguments)


def planned(args: argparse.Namespace) -> Plan:
    """ValueError says what is wrong with the words."""
    apart = not (args.loopback or args.lone)
    here = capabilities() if apart else frozenset[str]()
    if apart and (missing := lacking({"namespaces", "disks"})):
        raise ValueError(f"hosts can not be made here, which needs root and namespaces: {missing}")
    words = [word for word in args.fault.split(",") if word]
    table = LONE_FAULTS if args.lone else FAULTS
    kinds, others = possible(chosen(words or table, table), here, args.sync)
    if words and others:
        print("left out: " + "; ".join(others))
    if not kinds:
        raise ValueError("no fault is left")
    return Plan(
        kinds,
        seed=secrets.randbelow(1 << 31) if args.seed is None else args.seed,
        sync=args.sync,
        seconds=float("inf") if args.count is not None else 60 * args.minutes,
        count=args.count,
        drawn=args.lone or args.count is not None,
        swarm=not args.lone and (args.swarm or not (words or args.count is not None)),
        apart=apart,
        lone=args.lone,
        partitions=args.partitions,
        simple=args.simple or args.dead or args.loopback,
        dead=args.dead,
        rate=args.rate,
        nodes=args.nodes,
        other_tree=args.other_tree,
        tell_above=float("inf") if args.tell is None else args.tell / 1000,
    )


def tell_stacks() -> None:
    """SIGUSR1 has this process say on standard error where each of its threads is, and go on."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def main() -> int:
    args = parsed()
    try:
        plan = planned(args)
    except ValueError as error:
        print(error)
        return 1
    folder = args.keep or Path(tempfile.mkdtemp(prefix="nsqha-jepsen-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty; give --keep a folder of its own")
        return 1
    tell_stacks()
    for number in (signal.SIGINT, signal.SIGTERM):  # the former is ignored by what a shell has put aside
        signal.signal(number, signal.default_int_handler)
    print(f"seed {plan.seed}, sync={plan.sync}, {', '.join(kind.id for kind in plan.kinds)}; in {folder}", flush=True)
    try:
        suite = run(folder, plan)
    except NotPossible as error:
        print(f"hosts can not be made here, which needs root and network namespaces: {error}")
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; everything is in {folder}")
        return 130
    except (AssertionError, CannotStart) as error:
        print(f"FAILED: {error}\nseed {plan.seed}; everything is in {folder}")
        return 1
    print(suite.figures)
    print(suite.outcomes)
    if suite.figures.invalid:
        print("INVALID, faults did not bite:\n" + "\n".join(suite.figures.invalid))
        return 2
    if plan.lone:
        print(suite.judged)
    else:
        print("lost 0, torn 0, altered 0, out of order 0; the replicas are the same byte for byte")
    if not args.keep:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
