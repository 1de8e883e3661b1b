"""Random faults in a cluster, several at a time, for as long as you like: `make jepsen SECONDS=600`.

    python -m tests.jepsen.swarm --seconds 600 [--seed N] [--sync always] [--nodes 3] [--keep DIR]

Each round draws which kinds of faults it has at all (a swarm: what hides behind one kind shows when that kind is off)
and how fast they come; then faults are injected and healed, in any order, on any member:

    kill      kill -9, later started again          stop    SIGTERM, later started again
    freeze    SIGSTOP, later SIGCONT                etcd    killed or frozen
    lookupd   killed or frozen                      wipe    killed, and its disk is lost (an operator says so)

At the end of a round everything is healed; all that was OK'd must come out, all replicas must meet, and the next round
goes on with the same cluster. At the end everybody is killed and the files are compared byte by byte.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration.cluster import Cluster, Member, UnderLoad, freeze, pause, posted, thaw
from tests.integration.servers import Daemon, wait_until
from tests.jepsen.cluster_crash import keeping

KINDS = ("kill", "stop", "freeze", "etcd", "lookupd", "wipe")
ROUND_SECONDS = 25.0
BETWEEN_SECONDS = (0.05, 4.0)  # two faults, or a fault and a healing


@dataclass
class Fault:
    """Something that is wrong, and how it is put right."""

    text: str
    victim: object
    heal: Callable[[], None]


class Swarm:
    """Injects and heals; knows what is wrong at the moment."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = rng
        self._faults: list[Fault] = []
        self._began = time.monotonic()

    def round(self, seconds: float) -> None:
        """Faults for a while, then everything healed."""
        rng = self._rng
        kinds = [kind for kind in KINDS if rng.random() < 0.5] or ["kill"]
        most = rng.choice((1, 2, 3, 6))
        low, high = sorted(rng.uniform(*BETWEEN_SECONDS) for _ in range(2))
        self._say(f"round with {', '.join(kinds)}, at most {most} at a time, every {low:.1f}-{high:.1f} s")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pause(rng.uniform(low, high))
            if self._faults and (len(self._faults) >= most or rng.random() < 0.4):
                self._heal(rng.randrange(len(self._faults)))
            else:
                self._inject(rng.choice(kinds))
        self.heal_all()

    def heal_all(self) -> None:
        while self._faults:
            self._heal(0)
        for daemon in self._cluster.daemons:
            if ended(daemon) and "etcd" in daemon.log():
                self._say(f"again  {daemon.directory.name}, which could not start without etcd")
                daemon.kill()
                daemon.spawn()
        self._cluster.wait_listening(self._cluster.daemons)
        self._cluster.wait_registered(len(self._cluster.nodes))

    def _heal(self, index: int) -> None:
        fault = self._faults.pop(index)
        self._say(f"heal   {fault.text}")
        fault.heal()

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:8.2f} {text}", flush=True)

    # ---- faults

    def _inject(self, kind: str) -> None:
        broken = [fault.victim for fault in self._faults]
        if kind == "etcd":
            if self._cluster.etcd not in broken:
                self._etcd()
            return
        members: list[Daemon] = list(self._cluster.lookupds if kind == "lookupd" else self._cluster.nodes)
        whole = [member for member in members if member not in broken]
        if kind == "wipe" and (broken or not self._cluster.all_in_sync()):
            return  # losing a disk is survived with the others whole, and not promised otherwise
        if whole:
            victim = self._rng.choice(whole)
            {"kill": self._kill, "stop": self._stop, "freeze": self._freeze, "wipe": self._wipe}.get(
                kind, self._rng.choice((self._kill, self._freeze))
            )(victim)

    def _add(self, kind: str, victim: object, name: str, heal: Callable[[], None]) -> None:
        self.counts[kind] += 1
        self._faults.append(Fault(f"{kind} {name}", victim, heal))
        self._say(f"inject {kind} {name}")

    def _kill(self, victim: Daemon) -> None:
        victim.kill()
        self._add("kill", victim, victim.directory.name, victim.spawn)

    def _stop(self, victim: Daemon) -> None:
        serving = started(victim)
        status = victim.stop()
        assert status == 0 or not serving, f"{victim.directory.name} ended with status {status}"
        self._add("stop", victim, victim.directory.name, victim.spawn)

    def _freeze(self, victim: Daemon) -> None:
        freeze(victim)
        self._add("freeze", victim, victim.directory.name, lambda: thaw(victim))

    def _etcd(self) -> None:
        etcd = self._cluster.etcd
        if self._rng.random() < 0.5:
            etcd.kill()
            self._add("kill", etcd, "etcd", etcd.start)
        else:
            etcd.freeze()
            self._add("freeze", etcd, "etcd", etcd.thaw)

    def _wipe(self, victim: Daemon) -> None:
        assert isinstance(victim, Member)
        cluster, lost = self._cluster, self._cluster.uid(victim)
        victim.kill()
        victim.wipe()

        def heal() -> None:
            victim.spawn()
            cluster.wait_listening([victim])
            wait_until(lambda: cluster.uid(victim) not in (0, lost), f"{victim} is another node now")
            wait_until(lambda: posted(cluster.lookupd, f"/cluster/decommission?node={lost:016x}"), "decommissioned")
            wait_until(lambda: lost not in cluster.named_in_records(), "it is replaced", 60)

        self._add("wipe", victim, victim.name, heal)


def ended(daemon: Daemon) -> bool:
    """Whether it ended by itself."""
    return daemon._process is not None and daemon._process.poll() is not None


def started(daemon: Daemon) -> bool:
    return daemon._process is not None and not ended(daemon) and daemon.listening()


def run(directory: Path, *, seconds: float, seed: int, sync: str, nodes: int) -> str:
    """Figures. AssertionError with everything that is known, if something is wrong."""
    rng = random.Random(f"{seed} swarm")
    until = time.monotonic() + seconds
    rounds = ok = unknown = 0
    with Cluster.running(directory, nodes=nodes, lookupds=2, sync=sync) as cluster:
        swarm = Swarm(cluster, rng)
        while time.monotonic() < until:
            rounds += 1
            topic = f"orders-{rounds}"  # numbers of messages begin again with each load
            cluster.create(topic, "steady", "other")
            anywhere = rng.random() < 0.5
            load = UnderLoad(
                cluster, topic, "steady", "other", seed=rng.randrange(1 << 30), any_node=anywhere, consumers=3
            )
            with keeping(load, directory), load:
                swarm.round(min(ROUND_SECONDS, max(5.0, until - time.monotonic())))
                wait_until(cluster.all_in_sync, "every ISR is full again", 60)
            figures = load.report.figures
            ok, unknown = ok + figures.ok, unknown + figures.unknown
        cluster.check_replicas()
    faults = ", ".join(f"{name} {n}" for name, n in swarm.counts.most_common())
    return f"{rounds} rounds; faults: {faults}; OK {ok}, unknown {unknown}; nothing lost, replicas are the same"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--sync", choices=("always", "interval", "none"), default="always")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for data, logs and the history (default: temporary)")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    directory = args.keep or Path(tempfile.mkdtemp(prefix="nsqha-swarm-"))
    print(f"seed {seed}, {args.seconds:.0f} s, sync={args.sync}, in {directory}", flush=True)
    try:
        print(run(directory, seconds=args.seconds, seed=seed, sync=args.sync, nodes=args.nodes))
    except AssertionError as error:
        print(f"FAILED: {error}\nseed {seed}; everything is in {directory}")
        return 1
    if not args.keep:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
