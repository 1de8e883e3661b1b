"""Looks for one planted bug: rounds of its faults until a checker sees something, or time is up.

    found = hunted(BUGS["floor_ignored"], seed=7, seconds=1800)

A round is a load of its own on the same cluster. After it all brokers are killed, what the clients saw is judged with
what the replicas have in their files, and they start again. The same without the bug, with the same seed and as many
rounds, has to be green.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from nsqha.errors import LogCorrupt
from tests.integration.servers import CannotStart
from tests.jepsen.load import cluster as cluster_load
from tests.jepsen.planted.bugs import Bug
from tests.jepsen.schedules import ROUND_SECONDS, Schedule, Scripted, Swarm
from tests.jepsen.suite import Plan, Suite

DRAIN_SECONDS = 45.0  # what has not come out by then is not waited for: more than a consumer tries a dead connection

FINDINGS = (AssertionError, CannotStart, LogCorrupt)

# What a checker says when it sees something, and its name.
SAYINGS = (
    (r"not delivered in time", "unseen"),
    (r"have other (?:entries|bytes)|do not meet|ends at \d+, below", "storage"),
    (r"ended while starting|does not listen", "start"),
    (r"are not mended", "repair"),
    (r"every ISR is full", "liveness"),
    (r"does not verify|not its own|does not follow", "storage"),
    (r"publishes are OK'd", "availability"),
    (r"not within \d+ s", "liveness"),
    (r"dead letter", "dead letters"),
)


@dataclass(frozen=True)
class Found:
    """What saw it, after how long and how many rounds, and which faults there had been in the last of them."""

    checkers: str
    faults: str
    seconds: float
    rounds: int
    text: str


class Rounds(Suite):
    """A run that goes on until something is wrong."""

    def __init__(self, folder: Path, plan: Plan, most: int) -> None:
        super().__init__(folder, plan)
        self.rounds = 0
        self.faults: list[str] = []  # of the round under way
        self._most = most

    def go(self, seconds: float, rounds: float = float("inf")) -> None:
        """One of FINDINGS at the first of them."""
        with self.deployed() as deployment, patch.object(cluster_load, "DRAIN_SECONDS", DRAIN_SECONDS):
            until = time.monotonic() + seconds
            while time.monotonic() < until and self.rounds < rounds:
                before = self.figures.counts.copy()
                self.rounds += 1
                deployment.start()  # whom the judgement of the round before has killed
                try:
                    self.loaded(deployment, self._schedule())
                    self.judge(deployment)
                finally:
                    self.faults = sorted(self.figures.counts - before)

    def _schedule(self) -> Schedule:
        plan = self._plan
        if plan.swarm:
            return Swarm(plan.kinds, ROUND_SECONDS)
        return Scripted(plan.kinds, self._most)


def hunted(bug: Bug, folder: Path, *, seed: int, seconds: float) -> Found | None:
    """None: it survived."""
    began = time.monotonic()
    run = Rounds(folder, bug.hunt.plan(seed, (bug.plant,)), bug.hunt.most)
    try:
        run.go(seconds)
    except FINDINGS as error:
        took = time.monotonic() - began
        return Found(checkers(str(error)), ", ".join(run.faults), took, run.rounds, str(error))
    return None


def control(bug: Bug, folder: Path, *, seed: int, rounds: int) -> str:
    """What is wrong with the same run without the bug; empty: nothing."""
    run = Rounds(folder, bug.hunt.plan(seed), bug.hunt.most)
    try:
        run.go(float("inf"), rounds)
    except FINDINGS as error:
        return str(error)
    return "; ".join(run.figures.invalid)


def checkers(text: str) -> str:
    """Who saw it, from what was said: the problems of the report, or else the first that has said so."""
    if problems := re.findall(r"^([A-Z ]+): \d+$", text, re.MULTILINE):
        return ", ".join(problem.lower() for problem in problems)
    return next((name for pattern, name in SAYINGS if re.search(pattern, text)), "?")
