"""Faults in a cluster, one after the other under load: how long nothing is OK'd, and whether anything is lost.

    python -m tests.jepsen.cluster_crash --kills 30 [--seed N] [--sync always] [--only rolling] [--keep DIR]

What is done is drawn by lot, see KINDS; after each fault the cluster heals before the next one.

    leader      kill -9 of the node that leads          rolling   SIGTERM of the leader, started again when it is gone
    follower    kill -9 of another node                 freeze    SIGSTOP of the leader beyond its lease, then SIGCONT
    controller  kill -9 of the active lookup daemon     both      kill -9 of leader and controller in the same moment
    etcd        kill -9                             cut       nobody but clients reaches the leader's host (--only cut)

Three figures for each fault of a leader:

    election   from the fault to the record that names another leader, as the metadata has it
    gap        the longest time in which no client had an OK
    publish    the longest that one publish to another node took, by a client that has one under way at a time

With `--dead` a third channel has a policy, and some of its messages always fail: each must end as one dead letter
(`tests.jepsen.dead_letters`).

The seed fixes the draws, not the machine's timing. `--tell MS` prints what every member logged around a longer gap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.etcd_server import EtcdServer
from tests.integration.cluster import Cluster, Member, UnderLoad, freeze, pause, thaw
from tests.integration.servers import Daemon, Host, free_port, wait_until
from tests.jepsen import dead_letters, history
from tests.jepsen.checker import Report
from tests.jepsen.dead_letters import FailingMessages
from tests.jepsen.hosts.network import Network, NotPossible

KINDS = {"leader": 12, "follower": 3, "controller": 2, "both": 2, "etcd": 1, "rolling": 3, "freeze": 1, "cut": 0}
HIT_LEADER = ("leader", "both", "rolling", "freeze", "cut")
STILL_RUNS = ("freeze", "cut")
LEASE_SECONDS = 3  # as a node's default
AFTER_SECONDS = {"freeze": 8.0, "cut": 8.0}  # from the fault on: what it costs shows within this time
AFTER_SECONDS_DEFAULT = 3.0
AWAY_SECONDS = (0.0, 2.0)  # then, before the victim is started again
TOPIC = "orders"
ETCD = "etcd"  # its folder, and its host


@dataclass
class Figures:
    """Seconds, by kind of fault."""

    kinds: Counter[str] = field(default_factory=Counter)
    elections: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    publishes: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rejoins: list[float] = field(default_factory=list)  # from the start of a node to the full ISR

    def __str__(self) -> str:
        lines = [f"faults {self.kinds.total()}: " + ", ".join(f"{name} {n}" for name, n in self.kinds.most_common())]
        for kind in self.kinds:
            for name, values in (("election", self.elections), ("gap", self.gaps), ("publish", self.publishes)):
                if kind in values:
                    lines.append(f"{kind + ', ' + name:20s} {quantiles(values[kind])}")
        return "\n".join([*lines, f"{'rejoin':20s} {quantiles(self.rejoins)}"])


def quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)

    def at(q: float) -> str:
        return f"{ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1000:.0f} ms"

    return f"p50 {at(0.5)}, p90 {at(0.9)}, p99 {at(0.99)}, worst {at(1.0)}, of {len(ordered)}"


def longest_gap(oks: Sequence[float], since: float, until: float) -> tuple[float, float]:
    """The longest time without an OK within a span, and when it began."""
    marks = [since, *sorted(t for t in oks if since < t < until), until]
    return max((b - a, a) for a, b in pairwise(marks))


class Breaker:
    """Breaks, measures, heals."""

    def __init__(self, cluster: Cluster, load: UnderLoad, rng: random.Random, *, tell_above: float) -> None:
        """`tell_above`: of a gap that is longer, in seconds, the logs are printed."""
        self.figures = Figures()
        self._cluster = cluster
        self._load = load
        self._rng = rng
        self._tell_above = tell_above

    def once(self, kind: str) -> None:
        """One fault, and everything well again."""
        cluster, clients, figures = self._cluster, self._load.clients, self.figures
        before = cluster.wait_isr(TOPIC, 3)
        leader = cluster.member(before.leader)
        assert leader is not None
        victims = self._victims(kind, leader)
        pause(self._rng.uniform(0.3, 1.0))
        clients.avoid = cluster.nodes.index(leader) if leader in victims else None
        pause(0.1)
        figures.kinds[kind] += 1
        began, at, wall = time.monotonic(), clients.now(), datetime.now(UTC)
        self._break(kind, victims)
        if leader in victims:
            wait_until(lambda: self._led_anew(before.epoch), "another node leads", 30)
            figures.elections[kind].append(time.monotonic() - began)
        if kind == "rolling":
            assert leader.wait() == 0, f"{leader} did not stop well: {leader.log()[-2000:]}"
        pause(max(0.0, AFTER_SECONDS.get(kind, AFTER_SECONDS_DEFAULT) - (time.monotonic() - began)))
        until = clients.now()
        gap, since = longest_gap(clients.oks, at, until)
        figures.gaps[kind].append(gap)
        if leader in victims:
            figures.publishes[kind].append(clients.worst_probe(at, until))
        where = f"from {1000 * (since - at):.0f} ms after it on"
        print(
            f"{figures.kinds.total():4d} {kind:10s} gap {gap * 1000:5.0f} ms, {where}, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        if gap > self._tell_above:
            tell(cluster, wall)
        if kind not in STILL_RUNS:
            pause(self._rng.uniform(*AWAY_SECONDS))
        self._heal(kind, victims)

    def _victims(self, kind: str, leader: Member) -> list[Daemon]:
        victims: list[Daemon] = []
        if kind in ("controller", "both"):  # first, or it may have elected before it dies
            victims.append(wait_until(self._cluster.active_lookupd, "there is a controller"))
        if kind in HIT_LEADER:
            victims.append(leader)
        if kind == "follower":
            victims.append(self._rng.choice([node for node in self._cluster.nodes if node is not leader]))
        return victims

    def _break(self, kind: str, victims: Sequence[Daemon]) -> None:
        cluster = self._cluster
        for victim in victims:
            if kind == "cut":
                assert isinstance(cluster, Apart)
                cluster.network.cut_off(victim.directory.name, [*cluster.names, ETCD])
            elif kind == "freeze":
                freeze(victim)
            elif kind == "rolling":
                victim.terminate()
            else:
                victim.kill()
        if kind == "etcd":
            cluster.etcd.kill()

    def _led_anew(self, epoch: int) -> bool:
        meta = self._cluster.store.watch.view().topics[TOPIC].record.partitions[0]
        return meta.epoch > epoch and meta.leader in self._cluster.store.watch.view().nodes

    def _heal(self, kind: str, victims: Sequence[Daemon]) -> None:
        cluster = self._cluster
        began = time.monotonic()
        if kind == "etcd":
            cluster.etcd.start()
        for victim in victims:
            if kind == "cut":
                assert isinstance(cluster, Apart)
                cluster.network.heal()
            elif kind == "freeze":
                thaw(victim)
            else:
                victim.spawn()
        cluster.wait_listening(victims)
        cluster.wait_registered(len(cluster.nodes))
        cluster.wait_isr(TOPIC, 3, seconds=60)
        if any(isinstance(victim, Member) for victim in victims):
            self.figures.rejoins.append(time.monotonic() - began)


class Apart(Cluster):
    """Every member is on a host of its own."""

    network: Network

    def host(self, name: str) -> Host:
        return self.network.host(name)

    @property
    def names(self) -> list[str]:
        return [daemon.directory.name for daemon in self.daemons]


@contextlib.contextmanager
def started(directory: Path, *, sync: str, apart: bool) -> Iterator[Cluster]:
    """Three nodes, two lookup daemons and an etcd: on loopback, or each on its own host. NotPossible if it can not."""
    flags = [f"--lease-ttl={LEASE_SECONDS}s", *(["--insecure-cluster"] if apart else [])]
    options: dict[str, Any] = {"nodes": 3, "lookupds": 2, "sync": sync, "flags": flags}
    if not apart:
        with Cluster.running(directory, **options) as cluster:
            yield cluster
        return
    with Network.made() as network:
        (directory / ETCD).mkdir(parents=True)
        host = network.host(ETCD)
        etcd = EtcdServer(directory / ETCD, client_port=free_port(), ip=host.ip, prefix=host.prefix)
        Apart.network = network
        try:
            etcd.start()
            with Apart(directory, etcd, **options).started() as cluster:
                yield cluster
        finally:
            etcd.kill()


TOLD_BEFORE, TOLD_AFTER = 1.0, 4.0  # seconds around a fault
_LINE = re.compile(r"^\[\w+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) (.*)$")


def tell(cluster: Cluster, since: datetime) -> None:
    """What all members logged around a moment, in order, with milliseconds from there."""
    lines = []
    for daemon in cluster.daemons:
        for text in daemon.log().splitlines():
            if found := _LINE.match(text):
                at = datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").astimezone(UTC)
                seconds = (at - since).total_seconds()
                if -TOLD_BEFORE <= seconds <= TOLD_AFTER:
                    lines.append((seconds, daemon.directory.name, found[2]))
    for seconds, name, text in sorted(lines):
        print(f"     {seconds * 1000:8.1f} {name:9s} {text}", flush=True)


def run(
    directory: Path, *, kills: int, seed: int, sync: str, only: str | None, tell_above: float, dead: bool = False
) -> tuple[Figures, Report]:
    """AssertionError with everything that is known, if something is wrong."""
    rng = random.Random(f"{seed} killer")
    with started(directory, sync=sync, apart=only == "cut") as cluster:
        channels = ("steady", "other", *([dead_letters.CHANNEL] if dead else []))
        cluster.create(TOPIC, *channels)
        failing = FailingMessages.of(cluster, TOPIC) if dead else None
        load = UnderLoad(cluster, TOPIC, *channels, seed=seed, failing=failing)
        with keeping(load, directory), load:
            breaker = Breaker(cluster, load, rng, tell_above=tell_above)
            for _ in range(kills):
                breaker.once(only or rng.choices(list(KINDS), list(KINDS.values()))[0])
        if failing is not None:
            print(f"{failing.dead} dead letters, each once, and each came again at attempt 1", flush=True)
        cluster.check_replicas()
    return breaker.figures, load.report


@contextlib.contextmanager
def keeping(load: UnderLoad, directory: Path) -> Iterator[None]:
    """The history of a run that fails is kept."""
    try:
        yield
    except BaseException:
        history.write(list(load.clients.events), directory / "history.jsonl")
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--sync", choices=("always", "interval", "none"), default="always")
    parser.add_argument("--only", choices=list(KINDS), help="no other kind of fault")
    parser.add_argument(
        "--dead", action="store_true", help="a channel with a policy, in which some messages always fail"
    )
    parser.add_argument("--tell", type=float, metavar="MS", help="print the logs around a gap that is longer")
    parser.add_argument("--keep", type=Path, help="folder for data, logs and the history (default: temporary)")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    directory = args.keep or Path(tempfile.mkdtemp(prefix="nsqha-cluster-"))
    print(f"seed {seed}, {args.kills} faults, sync={args.sync}, in {directory}", flush=True)
    try:
        above = float("inf") if args.tell is None else args.tell / 1000
        figures, report = run(
            directory,
            kills=args.kills,
            seed=seed,
            sync=args.sync,
            only=args.only,
            tell_above=above,
            dead=args.dead,
        )
    except NotPossible as error:
        print(f"hosts can not be made here: {error}")
        return 1
    except AssertionError as error:
        print(f"FAILED: {error}\nseed {seed}; everything is in {directory}")
        return 1
    f = report.figures
    again = f.redelivered + f.repeated
    print(figures)
    print(f"published {f.attempted}: OK {f.ok}, failed {f.failed}, unknown {f.unknown} (came out: {f.recovered})")
    print(f"delivered {f.delivered}: again {again} ({again / max(f.delivered, 1):.1%}; 1% is asked for by REQ)")
    print("lost 0, torn 0, altered 0, out of order 0; the replicas are the same byte for byte")
    if not args.keep:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
