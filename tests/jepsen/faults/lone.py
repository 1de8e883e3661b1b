"""S1-S6: kill -9 of a node that is alone, at moments that its clients make.

    S1  it serves                S3  a topic has just been asked for      S5  a topic is just being deleted
    S2  it starts                S4  a channel has just been asked for    S6  a channel is just being paused

The broker is started again at once, so nothing has to be healed. The proof is the signal that ended it.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from tests.integration.cluster import pause
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.lone import LoneNode

SERVING_SECONDS = 3.0  # at most, before a kill while serving
START_UP_SECONDS = 1.0  # at most, after exec
STARTS = (1, 1, 1, 2, 3)  # kills in a row while it starts
AFTER_MOMENT_SECONDS = 0.02
MOMENT_WAIT_SECONDS = 4.0

Inject = Callable[[LoneNode, random.Random], Injected]


def injected(node: LoneNode, statuses: list[int], moment: str) -> Injected:
    def proof() -> str:
        bitten(set(statuses) == {-signal.SIGKILL}, f"ended with {statuses}, not by SIGKILL")
        return f"{len(statuses)} ended by SIGKILL"

    return Injected(f"kill -9: {moment}", frozenset([node.name]), lambda: None, proof)


def while_serving(node: LoneNode, rng: random.Random) -> Injected:
    pause(rng.uniform(0, SERVING_SECONDS) * node.pace)
    return injected(node, [node.kill_and_start("serving")], "serving")


def while_starting(node: LoneNode, rng: random.Random) -> Injected:
    """Again and again, before it may have served."""
    statuses = [node.kill_and_start("serving")]
    for _ in range(rng.choice(STARTS)):
        pause(rng.uniform(0, START_UP_SECONDS))
        statuses.append(node.kill_and_start("start-up"))
    return injected(node, statuses, "start-up")


def at(moment: str) -> Inject:
    """When a client has just sent what the moment is called by; while serving, if nobody does."""

    def inject(node: LoneNode, rng: random.Random) -> Injected:
        there = moment if node.moment(moment, MOMENT_WAIT_SECONDS) else "serving"
        pause(rng.uniform(0, AFTER_MOMENT_SECONDS))
        return injected(node, [node.kill_and_start(there)], there)

    return inject


def kind(number: str, moment: str, inject: Inject, weight: int) -> FaultKind:
    return FaultKind(
        number, f"kill -9 of a lone node: {moment}", "nothing lost", inject, (0.0, 0.0), settle=60.0, weight=weight
    )


KINDS = (
    kind("S1", "serving", while_serving, 48),
    kind("S2", "start-up", while_starting, 14),
    kind("S3", "topic creation", at("topic creation"), 10),
    kind("S4", "channel creation", at("channel creation"), 8),
    kind("S5", "topic deletion", at("topic deletion"), 6),
    kind("S6", "pause", at("pause"), 6),
)
