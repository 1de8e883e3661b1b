"""C1-C3: wall clocks that are wrong: they jump, drift, or are set to and fro ten times a second.

One broker at a time has a wrong clock, and the others agree on the time: what a cluster promises. A clock proves that
it was wrong by how often its broker looked at it meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from tests.jepsen.deployment import Broker, Deployment, NotNow, one_of
from tests.jepsen.faults.fault import FaultKind, Injected, bitten

HOUR_NS = 3600 * 10**9
JUMPS_NS = tuple(sign * hours * HOUR_NS for sign in (-1, 1) for hours in (1, 72))
RATES = (0.5, 3.0)
STROBE_SECONDS = 0.1
STROBE_NS = 30 * 10**9


def chosen(deployment: Deployment, rng: random.Random) -> Broker:
    """NotNow if another clock is wrong: then no majority may agree."""
    if any(broker.clock.wrong for broker in deployment.brokers):
        raise NotNow("a clock is wrong already")
    return one_of(rng, deployment.whole_nodes)


def injected(what: str, broker: Broker, end: Callable[[], None] = lambda: None) -> Injected:
    """The clock is wrong now; `end`: what else is to end before it is right."""
    looks: list[int] = []

    def heal() -> None:
        end()
        looks.append(broker.clock.looks())
        broker.clock.set()

    def proof() -> str:
        bitten(looks[0], "the broker did not look at its clock")
        return f"the broker looked at its clock {looks[0]} times"

    return Injected(what, frozenset([broker.name]), heal, proof)


def jump(deployment: Deployment, rng: random.Random) -> Injected:
    broker, offset = chosen(deployment, rng), rng.choice(JUMPS_NS)
    broker.clock.set(offset_ns=offset)
    return injected(f"the clock of {broker} is {offset / HOUR_NS:+.0f} h off", broker)


def drift(deployment: Deployment, rng: random.Random) -> Injected:
    broker, rate = chosen(deployment, rng), rng.choice(RATES)
    broker.clock.set(rate=rate)
    return injected(f"the clock of {broker} runs {rate} times as fast", broker)


def strobe(deployment: Deployment, rng: random.Random) -> Injected:
    broker, enough = chosen(deployment, rng), threading.Event()
    broker.clock.set(offset_ns=STROBE_NS)

    def run() -> None:
        sign = 1
        while not enough.wait(STROBE_SECONDS):
            sign = -sign
            broker.clock.move(offset_ns=sign * STROBE_NS)

    thread = threading.Thread(target=run, name="strobe")
    thread.start()

    def end() -> None:
        enough.set()
        thread.join()

    return injected(f"the clock of {broker} is set ten times a second", broker, end)


KINDS = (
    FaultKind("C1", "a wall clock jumps by an hour or three days", "order and delays hold", jump, (3.0, 12.0)),
    FaultKind("C2", "a wall clock runs too fast or too slow", "leases as they were", drift, (3.0, 12.0)),
    FaultKind("C3", "a wall clock is set to and fro", "no crash, stamps never fall", strobe, (3.0, 12.0)),
)
