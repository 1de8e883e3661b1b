"""kill -9 in a cluster, one member after the other under load: how long nothing is OK'd, and whether anything is lost.

    python -m tests.jepsen.cluster_crash --kills 30 [--seed N] [--sync always] [--only leader] [--keep DIR]

Who is killed is drawn by lot, see VICTIMS. After each kill the cluster heals before the next one. Three figures per
kill of a leader:

    election   from the kill to the record that names another leader, as the metadata has it
    gap        the longest time in which no client had an OK
    publish    the longest that one publish to another node took, by a client that has one under way at a time

The seed fixes the draws, not the machine's timing.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.cluster import Cluster, Member, UnderLoad, pause
from tests.integration.servers import Daemon, wait_until
from tests.jepsen import history
from tests.jepsen.checker import Report

VICTIMS = {"leader": 12, "follower": 3, "controller": 2, "leader and controller": 2, "etcd": 1}
AFTER_SECONDS = 3.0  # after a kill: what it costs shows within this time
AWAY_SECONDS = (0.0, 2.0)  # then, before the victim is started again
TOPIC = "orders"


@dataclass
class Figures:
    """Seconds, one for each kill of the leader alone unless it says otherwise."""

    kills: Counter[str] = field(default_factory=Counter)
    elections: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    publishes: list[float] = field(default_factory=list)
    gaps_both: list[float] = field(default_factory=list)  # the controller was killed with it: its lease runs out first
    gaps_others: list[float] = field(default_factory=list)  # anything but the leader was killed
    rejoins: list[float] = field(default_factory=list)  # from the start of a node to the full ISR

    def __str__(self) -> str:
        rows = [
            ("election", self.elections),
            ("gap", self.gaps),
            ("publish", self.publishes),
            ("gap, controller too", self.gaps_both),
            ("gap, others killed", self.gaps_others),
            ("rejoin", self.rejoins),
        ]
        kills = ", ".join(f"{name} {n}" for name, n in self.kills.most_common())
        lines = [f"kills {self.kills.total()}: {kills}"]
        lines += [f"{name:20s} {quantiles(values)}" for name, values in rows]
        return "\n".join(lines)


def quantiles(values: Sequence[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)

    def at(q: float) -> str:
        return f"{ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1000:.0f} ms"

    return f"p50 {at(0.5)}, p90 {at(0.9)}, p99 {at(0.99)}, worst {at(1.0)}, of {len(ordered)}"


class Killer:
    """Kills, measures, heals."""

    def __init__(self, cluster: Cluster, load: UnderLoad, rng: random.Random) -> None:
        self.figures = Figures()
        self._cluster = cluster
        self._load = load
        self._rng = rng

    def once(self, kind: str) -> None:
        """One kill, and everything well again."""
        cluster, clients, figures = self._cluster, self._load.clients, self.figures
        before = cluster.wait_isr(TOPIC, 3)
        leader = cluster.member(before.leader)
        assert leader is not None
        victims = self._victims(kind, leader)
        pause(self._rng.uniform(0.3, 1.0))
        clients.avoid = cluster.nodes.index(leader) if leader in victims else None
        pause(0.1)
        figures.kills[kind] += 1
        killed, at = time.monotonic(), clients.now()
        for victim in victims:
            victim.kill()
        if kind == "etcd":
            cluster.etcd.kill()
        if leader in victims:
            wait_until(lambda: self._led_anew(before.epoch), "another node leads", 30)
            if kind == "leader":
                figures.elections.append(time.monotonic() - killed)
        pause(max(0.0, AFTER_SECONDS - (time.monotonic() - killed)))
        until = clients.now()
        gap = clients.gap(at, until)
        if kind == "leader":
            figures.gaps.append(gap)
            figures.publishes.append(clients.worst_probe(at, until))
        else:
            (figures.gaps_both if leader in victims else figures.gaps_others).append(gap)
        print(f"{figures.kills.total():4d} {kind:22s} gap {gap * 1000:5.0f} ms", flush=True)
        pause(self._rng.uniform(*AWAY_SECONDS))
        self._heal(victims)

    def _victims(self, kind: str, leader: Member) -> list[Daemon]:
        victims: list[Daemon] = []
        if "leader" in kind:
            victims.append(leader)
        if kind == "follower":
            victims.append(self._rng.choice([node for node in self._cluster.nodes if node is not leader]))
        if "controller" in kind:
            victims.append(wait_until(self._cluster.active_lookupd, "there is a controller"))
        return victims

    def _led_anew(self, epoch: int) -> bool:
        meta = self._cluster.store.view().topics[TOPIC].record.partitions[0]
        return meta.epoch > epoch and meta.leader in self._cluster.store.view().nodes

    def _heal(self, victims: Sequence[Daemon]) -> None:
        cluster = self._cluster
        began = time.monotonic()
        if cluster.etcd._process is None:
            cluster.etcd.start()
        for victim in victims:
            victim.spawn()
        cluster.wait_listening(victims)
        cluster.wait_registered(len(cluster.nodes))
        cluster.wait_isr(TOPIC, 3, seconds=60)
        if any(isinstance(victim, Member) for victim in victims):
            self.figures.rejoins.append(time.monotonic() - began)


def run(directory: Path, *, kills: int, seed: int, sync: str, only: str | None) -> tuple[Figures, Report]:
    """AssertionError with everything that is known, if something is wrong."""
    rng = random.Random(f"{seed} killer")
    with Cluster.running(directory, lookupds=2, sync=sync) as cluster:
        cluster.create(TOPIC, "steady", "other")
        load = UnderLoad(cluster, TOPIC, "steady", "other", seed=seed)
        with keeping(load, directory), load:
            killer = Killer(cluster, load, rng)
            for _ in range(kills):
                killer.once(only or rng.choices(list(VICTIMS), list(VICTIMS.values()))[0])
        cluster.check_replicas()
    return killer.figures, load.report


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
    parser.add_argument("--only", choices=list(VICTIMS), help="kill nobody else")
    parser.add_argument("--keep", type=Path, help="folder for data, logs and the history (default: temporary)")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    directory = args.keep or Path(tempfile.mkdtemp(prefix="nsqha-cluster-"))
    print(f"seed {seed}, {args.kills} kills, sync={args.sync}, in {directory}", flush=True)
    try:
        figures, report = run(directory, kills=args.kills, seed=seed, sync=args.sync, only=args.only)
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
