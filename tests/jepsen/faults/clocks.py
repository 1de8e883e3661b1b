"""C1-C3: wall clocks that are wrong: they jump, drift, or are set to and fro ten times a second. T1: monotonic clocks
that began at other times.

One broker at a time has a wrong clock, and the others agree on the time: what a cluster promises. A clock proves that
it was wrong by how often its broker looked at it meanwhile.

Machines that were not started together have other monotonic clocks, all of them right: nothing that one says of its own
may mean anything to another. So daemons are started in time namespaces of their own; the kernel says by how much the
clocks of their processes are off.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from tests.integration.servers import Daemon, Host, wait_until
from tests.jepsen.deployment import Broker, Deployment, NotNow, name_of, one_of
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.hosts.namespaces import TimeNamespace, monotonic_offset

HOUR_NS = 3600 * 10**9
JUMPS_NS = tuple(sign * hours * HOUR_NS for sign in (-1, 1) for hours in (1, 72))
RATES = (0.5, 3.0)
STROBE_SECONDS = 0.1
STROBE_NS = 30 * 10**9
RESTART_SECONDS = 60.0


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


# ---- T1


def started_at_other_times(deployment: Deployment, rng: random.Random) -> Injected:
    """Brokers and lookup daemons go on one after the other, each on a machine that was started at another time."""
    if deployment.broken or not deployment.all_in_sync():
        raise NotNow("somebody is broken or behind")
    daemons: list[Daemon] = [*deployment.brokers, *deployment.lookupds]
    victims = rng.sample(daemons, rng.randint(2, len(daemons)))
    offsets = rng.sample(offsets_seconds(), len(victims))
    spaces = [TimeNamespace(offset) for offset in offsets]
    hosts = [victim.host for victim in victims]
    for victim, space in zip(victims, spaces, strict=True):
        restarted(deployment, victim, Host(victim.host.ip, (*victim.host.prefix, *space.prefix)))
    seen = [monotonic_offset(victim.pid) for victim in victims]

    def heal() -> None:
        seen.extend(monotonic_offset(victim.pid) for victim in victims)
        for victim, host in zip(victims, hosts, strict=True):
            restarted(deployment, victim, host)
        for space in spaces:
            space.end()
        seen.extend(monotonic_offset(victim.pid) for victim in victims)

    def proof() -> str:
        wanted = [*offsets, *offsets, *(0 for _ in offsets)]
        bitten(seen == wanted, f"the clocks were off by {seen}, and not by {wanted}")
        return f"/proc/PID/timens_offsets: {', '.join(f'{offset:+d} s' for offset in offsets)}, then 0"

    names = [name_of(victim) for victim in victims]
    what = ", ".join(f"{name} {offset:+d} s" for name, offset in zip(names, offsets, strict=True))
    return Injected(f"monotonic clocks: {what}", frozenset(names), heal, proof)


def offsets_seconds() -> list[int]:
    """Of machines that were started later than this one, and earlier."""
    up = int(time.clock_gettime(time.CLOCK_MONOTONIC))
    return [-up // 2, -up // 3, 60, 3600, 400 * 86_400]


def restarted(deployment: Deployment, daemon: Daemon, host: Host) -> None:
    """Stopped well, and started there."""
    status = daemon.stop()
    assert status == 0, f"{name_of(daemon)} did not stop well: status {status}\n{daemon.log()[-2000:]}"
    daemon.host = host
    daemon.start()
    wait_until(deployment.all_in_sync, "every ISR is full", RESTART_SECONDS)


KINDS = (
    FaultKind("C1", "a wall clock jumps by an hour or three days", "order and delays hold", jump, (3.0, 12.0)),
    FaultKind("C2", "a wall clock runs too fast or too slow", "leases as they were", drift, (3.0, 12.0)),
    FaultKind("C3", "a wall clock is set to and fro", "no crash, stamps never fall", strobe, (3.0, 12.0)),
    FaultKind(
        "T1",
        "monotonic clocks began at other times",
        "nobody notices",
        started_at_other_times,
        (5.0, 12.0),
        needs=frozenset(("namespaces", "time namespaces")),
        settle=60.0,
        alone=True,
    ),
)
