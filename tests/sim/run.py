"""Lives of simulated clusters, one for each seed.

    python -m tests.sim.run --seeds 10000        until one fails; 0..9999
    python -m tests.sim.run --seed 17 --tell     one, with everything that the nodes and the controller say

The same seed and the same code give the same life. A failure prints the seed, what was broken, and what befell the
cluster until then.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tests.sim.cluster import SimCluster
from tests.sim.faults import Misfortune
from tests.sim.invariants import Violation
from tests.sim.plan import Plan

STORY_LINES = 60
LOOKS = 5  # at channel states, while there is misfortune


@dataclass
class Life:
    """What became of one seed."""

    seed: int
    longer: float = 1.0
    violation: str = ""
    story: list[str] = field(default_factory=list)
    virtual_seconds: float = 0.0
    acked: int = 0
    unknown: int = 0
    failed: int = 0
    commits: int = 0
    turns: int = 0
    fingerprint: tuple[object, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        story = "".join(f"\n  {line}" for line in self.story[-STORY_LINES:])
        longer = "" if self.longer == 1 else f' ARGS="--longer {self.longer:g}"'
        return f"seed {self.seed}: {self.violation}\n{story}\n\nagain: make sim SEED={self.seed}{longer}\n"


def run_seed(seed: int, *, tell: bool = False, longer: float = 1.0) -> Life:
    """One life from start to the final comparison; `longer`: misfortune lasts so many times as long."""
    collecting = gc.isenabled()
    gc.disable()  # when garbage is looked for, and weak references end, is nothing that a seed decides
    try:
        return _run_seed(seed, tell, longer)
    finally:
        if collecting:
            gc.enable()


def _run_seed(seed: int, tell: bool, longer: float) -> Life:
    life = Life(seed, longer)
    plan = Plan.draw(seed)
    plan.seconds *= longer
    cluster = SimCluster(plan)
    with cluster:
        teller = Teller(cluster) if tell else None
        if teller is not None:
            print(plan, file=sys.stderr)
            logging.getLogger("nsqha").addHandler(teller)
            logging.getLogger("nsqha").setLevel(logging.DEBUG)
        try:
            cluster.start()
            cluster.clients()
            misfortune = Misfortune(cluster, cluster.new_rng())
            for _ in range(LOOKS):
                cluster.run_for(plan.seconds / LOOKS)
                cluster.comparison.states()
            misfortune.stop()
            assert cluster.operators is not None
            cluster.operators.stop()
            if cluster.batch_readers is not None:
                cluster.batch_readers.stop()
            cluster.end_well()
        except Violation as violation:
            life.violation = str(violation)
        except Exception as error:
            life.violation = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
        finally:
            if teller is not None:
                logging.getLogger("nsqha").removeHandler(teller)
        if life.violation:
            for problem in cluster.errors:
                if isinstance(problem, BaseException):
                    life.violation += "\n" + "".join(traceback.format_exception(problem))
        history = cluster.history
        life.story = [f"{plan}", *cluster.events]
        life.virtual_seconds = cluster.time
        life.acked, life.unknown, life.failed = len(history.acked), len(history.unknown), len(history.failed)
        life.commits = cluster.oracle.commits
        life.turns = cluster.scheduler.turns
        life.counts = dict(cluster.counts)
        life.fingerprint = (
            life.turns,
            cluster.time,
            life.acked,
            life.unknown,
            life.failed,
            sum(sum(came.values()) for came in history.delivered.values()),
            tuple(sorted(cluster.oracle.committed.values())),
            cluster.oracle.digest(),
            cluster.metadata.store.records.revision,
        )
    return life


class Teller(logging.Handler):
    """Log lines of all processes, with virtual time and name."""

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._told = 0

    def emit(self, record: logging.LogRecord) -> None:
        cluster = self._cluster
        for line in cluster.events[self._told :]:
            print(f"*** {line}", file=sys.stderr)
        self._told = len(cluster.events)
        loop = cluster.scheduler.current
        name = "" if loop is None else loop.name
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else record.exc_info
        print(f"{cluster.time:9.4f} {name:4} {record.name[6:]:12} {record.getMessage()} {error or ''}", file=sys.stderr)


def _alone(longer: float, seed: int) -> Life:
    life = run_seed(seed, longer=longer)
    gc.collect()
    return life


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make sim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many, beginning with --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--longer", type=float, default=1.0, help="misfortune lasts so many times as long")
    parser.add_argument("--tell", action="store_true", help="what the processes say, on standard error")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        life = run_seed(options.seed, tell=options.tell, longer=options.longer)
        print(life if life.violation else f"seed {life.seed}: fine; {life.fingerprint}")
        return 1 if life.violation else 0
    return _many(options)


def _many(options: argparse.Namespace) -> int:
    started = time.monotonic()
    total: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    seeds = range(options.first, options.first + options.seeds)
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=50) as pool:
        for life in pool.imap_unordered(partial(_alone, options.longer), seeds):
            total.update(lives=1, acked=life.acked, unknown=life.unknown, refused=life.failed, commits=life.commits)
            total["virtual seconds"] += round(life.virtual_seconds)
            counts.update(life.counts)
            if life.violation:
                failed.append(life.seed)
                print(life, flush=True)
                if not options.keep_going:
                    pool.terminate()
                    break
            if total["lives"] % 500 == 0:
                print(f"{total['lives']} lives, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(f"{dict(total)} in {time.monotonic() - started:.0f} s")
    print(f"what befell them: {dict(sorted(counts.items()))}")
    if failed:
        print(f"failed: {sorted(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
