"""The matrix of faults that stay for ten minutes: every kind of fault, at every role that a machine can have.

    python -m tests.sim.fault_matrix --seeds 50                         all cells
    python -m tests.sim.fault_matrix --cell store_away-leader --seed 3  one life; --tell: with what the processes say

The cluster has four nodes and two controllers; its one partition has three replicas, with `min_isr` 2. A machine is
called by its role at the beginning: `leader`, `follower`, `second` (the other follower), `other` (a node without a
replica), `controller` (the active one) and `standby`. A cell says which links are cut, which machines do not do their
work, and which do not reach the metadata store. From that follows whether publishes must be acknowledged in each minute
of the fault: two replicas that work, that reach each other, and that reach the store are a majority of the ISR. In no
minute may the partition have more than three new epochs, and once the fault is over all invariants must hold.
"""

from __future__ import annotations

import argparse
import errno
import gc
import itertools
import logging
import multiprocessing
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from nsqha.election.model import PartitionMeta
from tests.sim.cluster import SimCluster
from tests.sim.invariants import Violation
from tests.sim.node import Machine, SimController, SimNode
from tests.sim.run import Teller
from tests.sim.scenes import healthy, leader

MINUTES = 10
EPOCHS_A_MINUTE = 3
PUBLISHERS = 4
PAUSE = 4.0  # of each publisher between two messages: more of them would only take longer
SETTLES = 15.0  # leases and pings end, and a leader that does not serve is noticed

REPLICAS = ("leader", "follower", "second")
NODES = (*REPLICAS, "other")
CONTROLLERS = ("controller", "standby")
ROLES = (*NODES, *CONTROLLERS)
VICTIMS = ("leader", "follower", "controller", "other")

LIFE_SECONDS = 300.0  # of the clock on the wall: a life takes a few
LIFE_BYTES = 4 << 30  # of addresses: a life has some hundred MiB

Link = tuple[str, str]  # from one role to another
Roles = Mapping[str, Machine]
Job = tuple[str, int, bool]  # cell, seed, whether the processes tell what they do
Fault = Callable[[SimCluster, Machine], Callable[[], None]]  # begins at a machine; returns what ends it


@dataclass(frozen=True)
class Cell:
    """One fault: what is cut, and what befalls which machines."""

    name: str
    cut: frozenset[Link] = frozenset()
    faults: tuple[tuple[Fault, str], ...] = ()  # each with the role of its machine
    idle: frozenset[str] = frozenset()  # roles that need not do their work
    no_store: frozenset[str] = frozenset()  # roles that do not reach the metadata store

    @property
    def served(self) -> bool:
        """Whether most of the ISR can serve, and the store: two replicas that need nobody else."""
        able = [role for role in REPLICAS if role not in self.idle | self.no_store]
        return any(not self.cut & {(a, b), (b, a)} for a, b in itertools.combinations(able, 2))


# ---- cuts


def both_ways(pairs: Iterable[Link]) -> frozenset[Link]:
    return frozenset(link for a, b in pairs for link in ((a, b), (b, a)))


def between(some: Iterable[str], others: Iterable[str]) -> frozenset[Link]:
    """Nothing gets from these to those, nor back."""
    return both_ways(itertools.product(some, others))


def rest(*roles: str) -> tuple[str, ...]:
    return tuple(role for role in ROLES if role not in roles)


def ring(order: tuple[str, ...]) -> frozenset[Link]:
    """Each of these reaches its two neighbours in the order, and none of the others."""
    near = both_ways(zip(order, (*order[1:], order[0]), strict=True))
    return frozenset(itertools.permutations(order, 2)) - near


def links() -> Iterable[Cell]:
    pairs = [
        pair
        for pair in itertools.combinations(ROLES, 2)
        if pair not in {("leader", "second"), ("second", "other"), ("second", "controller"), ("second", "standby")}
    ]  # both followers are the same there
    for a, b in pairs:
        yield Cell(f"pair-{a}-{b}", both_ways([(a, b)]))
        yield Cell(f"one_way-{a}-{b}", frozenset({(a, b)}))
        if (a, b) != ("follower", "second"):
            yield Cell(f"one_way-{b}-{a}", frozenset({(b, a)}))


def cuts() -> Iterable[Cell]:
    """Those of one machine, or of several that stay together."""
    for victim in VICTIMS:
        far = CONTROLLERS if victim in NODES else NODES
        yield Cell(f"controllers_only-{victim}", between([victim], far))
        if victim in NODES:
            yield Cell(f"peers_only-{victim}", between([victim], [node for node in NODES if node != victim]))
        yield Cell(f"from_all-{victim}", between([victim], rest(victim)))
        yield Cell(f"nothing_arrives-{victim}", frozenset((role, victim) for role in rest(victim)))
        yield Cell(f"nothing_leaves-{victim}", frozenset((victim, role) for role in rest(victim)))
        alone = frozenset({victim})
        yield Cell(f"zone-{victim}", between(alone, rest(victim)), ((store_away, victim),), no_store=alone)
    for victim in ("leader", "follower", "other"):
        zone = (victim, "controller")
        yield Cell(f"zone_with_controller-{victim}", between(zone, rest(*zone)))
    yield Cell("ring-leader", ring(("leader", "follower", "other", "second")))
    yield Cell("ring-follower", ring(("follower", "other", "leader", "second")))
    yield Cell("ring-other", ring(("other", "leader", "second", "follower")))
    yield Cell("ring-controller", ring(("controller", "leader", "follower", "standby", "second", "other")))
    yield Cell("bridge-leader", between(("follower", "controller"), ("second", "other", "standby")))
    yield Cell("bridge-follower", between(("leader", "controller"), ("second", "other", "standby")))
    yield Cell("bridge-controller", between(("leader", "follower"), ("second", "other", "standby")))
    yield Cell("bridge-other", between(("leader", "controller"), ("follower", "second", "standby")))


# ---- what befalls a machine


def store_away(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
    cluster.metadata.reach(machine.name, False)
    return lambda: cluster.metadata.reach(machine.name, True)


def peer_port(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
    """Calls work, streams do not."""
    cluster.net.close_peer_port(machine.name)
    return cluster.net.heal_all


def frozen(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
    machine.freeze()
    return machine.thaw


def stopping(stopped: float, running: float) -> Fault:
    """A process that is stopped again and again; a new one at its place, too."""

    def begin(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
        over = False

        def stop() -> None:
            if not over:
                machine.freeze()
                cluster.world.call_later(stopped, run)

        def run() -> None:
            if not over:
                machine.thaw()
                cluster.world.call_later(running, stop)

        def end() -> None:
            nonlocal over
            over = True
            machine.thaw()

        stop()
        return end

    return begin


def slow_disk(seconds: float) -> Fault:
    def begin(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
        before, machine.disk_seconds = machine.disk_seconds, seconds

        def end() -> None:
            machine.disk_seconds = before

        return end

    return begin


def failing_disk(code: int, *operations: str, path: str = "") -> Fault:
    """The disk of every process that runs there refuses these, where part of the path is `path`."""

    def begin(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
        assert isinstance(machine, SimNode)
        machine.storage.stays(*operations, path=path, code=code)
        return lambda: machine.storage.heal()  # that of the process which then runs

    return begin


def low_disk(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
    """Less free space than it wants; writes still succeed."""
    assert isinstance(machine, SimNode)
    machine.disk_low(True)
    return lambda: machine.disk_low(False)


def clock(seconds: float) -> Fault:
    def begin(cluster: SimCluster, machine: Machine) -> Callable[[], None]:
        assert isinstance(machine, SimNode | SimController)
        cluster.set_clock(machine, seconds)

        def end() -> None:
            cluster.set_clock(machine, 0.0)

        return end

    return begin


HOUR = 3600.0
YEAR = 365 * 24 * HOUR
IDLE: dict[str, Fault] = {  # the machine need not do its work
    "frozen": frozen,
    "stuttering_process": stopping(stopped=2.0, running=0.5),
    "full_disk": failing_disk(errno.ENOSPC, "pwrite", "create", "allocate"),
    "low_disk": low_disk,
    "failing_writes": failing_disk(errno.EIO, "pwrite"),
    "failing_data_writes": failing_disk(errno.EIO, "pwrite", path="segment"),  # the journal lies elsewhere
    "failing_syncs": failing_disk(errno.EIO, "sync"),
    "very_slow_disk": slow_disk(5.0),
    "clock_10_years_ahead": clock(10 * YEAR),
    "clock_an_hour_ahead": clock(HOUR),
    "clock_an_hour_behind": clock(-HOUR),
    "peer_port": peer_port,
}
WORKING: dict[str, Fault] = {  # it does, late
    "slow_process": stopping(stopped=0.3, running=0.03),
    "slow_disk": slow_disk(0.5),
}


def befallen() -> Iterable[Cell]:
    for victim in VICTIMS:
        alone = frozenset({victim})
        yield Cell(f"store_away-{victim}", faults=((store_away, victim),), no_store=alone)
        for name, fault in {**IDLE, **WORKING}.items():
            if victim in NODES or not ("disk" in name or "failing" in name or name == "peer_port"):
                yield Cell(f"{name}-{victim}", faults=((fault, victim),), idle=alone if name in IDLE else frozenset())


CELLS = {cell.name: cell for cell in (*links(), *cuts(), *befallen())}


# ---- one life


def roles(cluster: SimCluster) -> Roles:
    """Who is what before the fault."""
    leads = leader(cluster)
    meta = meta_of(cluster)
    followers = [node for node in cluster.nodes if node.uid in meta.replicas and node is not leads]
    (other,) = [node for node in cluster.nodes if node.uid not in meta.replicas]
    active = [each for each in cluster.controllers if each.shell is not None and each.shell.term is not None]
    (standby,) = [each for each in cluster.controllers if each not in active]
    found: list[SimNode | SimController] = [leads, *followers, other, *active, standby]
    return dict(zip(ROLES, found, strict=True))


def meta_of(cluster: SimCluster) -> PartitionMeta:
    ((_, meta),) = cluster.metas()
    assert isinstance(meta, PartitionMeta)
    return meta


def live(cell: Cell, seed: int, on_cluster: Callable[[SimCluster], None] = lambda cluster: None) -> None:
    """One life with this fault. Violation."""
    with healthy(seed=seed, nodes=4, controllers=2, publishers=PUBLISHERS, pause_seconds=PAUSE) as cluster:
        on_cluster(cluster)
        machines = roles(cluster)
        cluster.note(f"{cell.name}: { ({role: machine.name for role, machine in machines.items()}) }")
        for a, b in sorted(cell.cut):
            cluster.net.partition(machines[a].name, machines[b].name, both=False)
        ends = [fault(cluster, machines[role]) for fault, role in cell.faults]
        stays(cluster, served=cell.served)
        for end in ends:
            end()
        cluster.end_well()


def stays(cluster: SimCluster, *, served: bool) -> None:
    """Ten minutes, and SETTLES before the first acknowledgement is asked for."""
    for minute in range(MINUTES):
        epoch = meta_of(cluster).epoch
        settles = 0.0 if minute else SETTLES
        cluster.run_for(settles)
        acked = len(cluster.history.acked)
        cluster.run_for(60.0 - settles)
        gc.collect()  # always at the same moments of a life, so that it is the same one again
        epochs = meta_of(cluster).epoch - epoch
        if epochs > EPOCHS_A_MINUTE:
            raise Violation(f"{epochs} epochs in minute {minute}: {cluster.state()}")
        if served and len(cluster.history.acked) == acked:
            raise Violation(f"no acknowledgement in minute {minute}: {cluster.state()}")


# ---- many of them


@dataclass(frozen=True)
class Outcome:
    cell: str
    seed: int
    violation: str

    def __str__(self) -> str:
        return (
            f"{self.cell}, seed {self.seed}: {self.violation}\nagain: make sim-matrix CELL={self.cell} SEED={self.seed}"
        )


def outcome_of(job: Job) -> Outcome:
    """Live one life; the same cell, seed and code give the same one."""
    name, seed, tell = job
    collecting = gc.isenabled()
    gc.disable()  # when garbage is looked for, and weak references end, is nothing that a seed decides
    gc.freeze()  # what was there before is no garbage of this life, and there is much of it in a test run
    try:
        live(CELLS[name], seed, _tell if tell else lambda cluster: None)
    except Violation as violation:
        return Outcome(name, seed, str(violation))
    except Exception as error:
        return Outcome(name, seed, "".join(traceback.format_exception(error)))
    finally:
        gc.unfreeze()
        gc.collect()
        if collecting:
            gc.enable()
    return Outcome(name, seed, "")


def _tell(cluster: SimCluster) -> None:
    logging.getLogger("nsqha").addHandler(Teller(cluster))
    logging.getLogger("nsqha").setLevel(logging.DEBUG)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make sim-matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=50, help="how many for each cell, beginning with --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--cell", default="", help="only cells whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the cells, and whether they must serve")
    parser.add_argument("--tell", action="store_true", help="what the processes say, on standard error")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    cells = [options.cell] if options.cell in CELLS else [name for name in CELLS if options.cell in name]
    if not cells:
        parser.error(f"no cell has {options.cell!r} in its name; --list prints all of them")
    if options.list:
        for name in cells:
            print(f"{name}{'' if CELLS[name].served else '  (need not serve)'}")
        return 0
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    jobs = [(name, seed, options.tell) for seed in seeds for name in cells]
    started, failed = time.monotonic(), []
    for outcome in _outcomes(jobs, options.workers):
        if outcome.violation:
            failed.append((outcome.cell, outcome.seed))
            print(outcome, flush=True)
    print(f"{len(jobs)} lives of {len(cells)} cells in {time.monotonic() - started:.0f} s, {len(failed)} failed")
    for name, seed in sorted(failed):
        print(f"make sim-matrix CELL={name} SEED={seed}")
    return 1 if failed else 0


def _outcomes(jobs: list[Job], workers: int) -> Iterator[Outcome]:
    if len(jobs) == 1:
        yield outcome_of(jobs[0])
        return
    # Each life has a process of its own: one that hangs or dies costs its life, and holds up no other.
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(_in_a_process, jobs)


def _in_a_process(job: Job) -> Outcome:
    name, seed, _ = job
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sim.cluster"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIFE_SECONDS):
            return Outcome(name, seed, f"it takes longer than {LIFE_SECONDS} s")
        outcome: Outcome = ours.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome(name, seed, f"its process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


def _send_outcome(job: Job, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIFE_BYTES, LIFE_BYTES))
    pipe.send(outcome_of(job))


if __name__ == "__main__":
    sys.exit(main())
