"""The fault suite for hours, by itself: runs with drawn seeds, sync modes and schedules, one after the other.

    python -m tests.jepsen.night [--hours 8] [--keep DIR] [--seed N] [--rate 500]

A run that failed, or was invalid, keeps its folder in DIR: its data, logs, histories and reports; and the night goes
on. Each run is a line of DIR/night.jsonl, with the words that repeat it, and its figures are in DIR/reports. At
the end, and when somebody asks (`python -m tests.jepsen.report.total DIR/reports`), all of them are told as one. Ctrl-C
ends the run that is under way in the ordinary way, and then the night. The exit status is 0 if no run failed.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.jepsen.faults.fault import SYNCS
from tests.jepsen.faults.table import FAULTS, possible
from tests.jepsen.hosts.probe import capabilities, lacking
from tests.jepsen.report.total import Total

MINUTES = 10.0  # of a run, beside its beginning and its end
LONGEST_SECONDS = 60 * MINUTES + 900.0  # after which it hangs
END_SECONDS = 120.0  # in which an interrupted run has cleaned up
SCRIPTED = 0.4  # of the runs; the others are swarms
KINDS_AT_A_TIME = 8  # of a script
RESULTS = {0: "green", 1: "FAILED", 2: "INVALID"}


@dataclass(frozen=True)
class NightRun:
    """One run."""

    seed: int
    sync: str
    minutes: float
    faults: tuple[str, ...]  # of a script; empty: a swarm of all
    rate: float = 500.0  # messages a second, about

    def words(self, keep: Path) -> list[str]:
        words = [f"--seed={self.seed}", f"--sync={self.sync}", f"--minutes={self.minutes:g}", f"--keep={keep}"]
        words += [f"--rate={self.rate:g}"]
        return words + ([f"--fault={','.join(self.faults)}"] if self.faults else [])


def drawn(rng: random.Random, here: frozenset[str], rate: float = 500.0) -> Iterator[NightRun]:
    """Without an end. In every sync mode, with what promises something under it; `always` as often as the others."""
    while True:
        sync = rng.choice(("always", *sorted(SYNCS)))
        able, _ = possible(FAULTS.values(), here, sync)
        some = rng.sample([kind.id for kind in able], min(KINDS_AT_A_TIME, len(able)))
        faults = tuple(some) if rng.random() < SCRIPTED else ()
        yield NightRun(rng.randrange(1 << 31), sync, MINUTES, faults, rate)


class Night:
    """Starts one run after the other, and remembers."""

    def __init__(self, folder: Path) -> None:
        self.results: Counter[str] = Counter()
        self.reports = folder / "reports"
        self._folder = folder
        self._under_way: subprocess.Popen[bytes] | None = None

    def run(self, each: NightRun) -> str:
        """The result: green, FAILED, INVALID, or another exit status."""
        keep = self._folder / f"{each.seed}-{each.sync}"
        keep.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.jepsen.suite", *each.words(keep / "run")]
        began = time.monotonic()
        with (keep / "out").open("wb") as out:
            # A group of its own: a terminal's Ctrl-C reaches the night alone, which hands it on.
            self._under_way = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
            result = self._result(self._under_way)
        self._under_way = None
        self.results[result] += 1
        self._note(each, result, time.monotonic() - began, command)
        self._keep_figures(each, keep)
        if result == "green":
            shutil.rmtree(keep)
        return result

    def _keep_figures(self, each: NightRun, keep: Path) -> None:
        """Of every load that was judged."""
        self.reports.mkdir(exist_ok=True)
        for report in keep.glob("run/report-*.json"):
            shutil.copy(report, self.reports / f"{each.seed}-{each.sync}-{report.name}")

    def _result(self, process: subprocess.Popen[bytes]) -> str:
        try:
            status = process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it says where it waits
            self.interrupt()
            return "HUNG"
        return RESULTS.get(status, f"status {status}")

    def interrupt(self) -> None:
        """End the run that is under way; it cleans up."""
        process = self._under_way
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # namespaces, mounts and daemons end with it
            process.wait()

    def _note(self, each: NightRun, result: str, seconds: float, command: list[str]) -> None:
        line = {"result": result, "seconds": round(seconds), "seed": each.seed, "sync": each.sync, "run": command[3:]}
        with (self._folder / "night.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        what = " ".join(each.faults) or "swarm"
        print(f"{result:8s} {seconds:5.0f} s  seed {each.seed} {each.sync} {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--keep", type=Path, default=Path("jepsen-night"), help="folder for what failed")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn for the runs")
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second, about")
    args = parser.parse_args()
    if missing := lacking({"namespaces", "disks"}):
        print(f"hosts can not be made here: {missing}")
        return 1
    args.keep.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.hours:g} hours; what fails is kept in {args.keep}", flush=True)
    night, until = Night(args.keep), time.monotonic() + 3600 * args.hours
    try:
        for each in drawn(random.Random(seed), capabilities(), args.rate):
            if time.monotonic() >= until:
                break
            night.run(each)
    except KeyboardInterrupt:
        night.interrupt()
        print("interrupted")
    print(f"{night.results.total()} runs: " + ", ".join(f"{name} {n}" for name, n in night.results.most_common()))
    print(Total(sorted(night.reports.glob("*.json"))))
    return 0 if set(night.results) <= {"green"} else 1


if __name__ == "__main__":
    sys.exit(main())
