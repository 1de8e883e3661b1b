"""Faults whose order of events is the one in which a certain rule matters: what drawn faults come to rarely.

    D1-first      the leader has a slow disk, loses power, and is back while its followers stand still
    D1-second     followers have slow disks, lose power, and are back while the leader stands still
    D8-first      all are killed; the first to come back has damage in its last batch
    D10-first     all are killed; the first to come back has an older copy of its disk
    N1-behind     a follower is away until the ISR goes on without it; it comes back as the leader is killed
    N9-behind     ... and comes back on a slow line; then the leader is killed, and the other follower stands still

They are faults like those of `tests.jepsen.faults`: each proves that it bit, and the product loses nothing under it.
Rounds of `tests.jepsen.planted` take them by their ids; the schedules of `make jepsen` do not draw them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.integration.cluster import freeze, pause, thaw
from tests.integration.servers import wait_until
from tests.jepsen.deployment import Broker, Deployment, one_of
from tests.jepsen.faults.damage import SEGMENT, forget_cached, last_log, size_of, started
from tests.jepsen.faults.disks import (
    DISKS,
    SHRUNK_SECONDS,
    SYNCED,
    Outage,
    all_well,
    everybody,
    frozen_names,
)
from tests.jepsen.faults.disks import (
    names as named,
)
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.network import both_ways, cut_in, lost
from tests.jepsen.faults.processes import kill
from tests.jepsen.faults.table import chosen as chosen_of_all
from tests.jepsen.hosts.groups import Group
from tests.jepsen.hosts.links import Link, Trouble

WRITES_PER_SECOND = 20  # of a slow disk: a round takes hundreds of milliseconds
SLOW_SECONDS = (1.5, 3.0)
ALONE_SECONDS = (12.0, 14.0)  # more than an election waits for those who may have more
BEHIND_SECONDS = (1.0, 2.0)
COPY_SECONDS = (1.0, 2.0)  # what an older copy lacks
JOIN_SECONDS = 6.0
THIN = Trouble(rate=60_000, queue=20_000)  # bytes a second: less than what is published


class SlowDisks:
    """Brokers whose writes are few a second, until `end`."""

    def __init__(self, deployment: Deployment, brokers: Iterable[Broker]) -> None:
        self._groups: list[tuple[Group, str]] = []
        self._began = time.monotonic()
        for broker in brokers:
            group = Group(f"slow-{broker.name}-{time.monotonic_ns()}", controllers=("blkio",))
            device = deployment.disks[broker.name].device
            group.add(broker.pid)
            group.slow(device, WRITES_PER_SECOND)
            self._groups.append((group, device))
        self._before = [group.writes(device) for group, device in self._groups]
        self.writes: list[int] = []
        self.seconds = 0.0

    def end(self) -> None:
        for (group, device), before in zip(self._groups, self._before, strict=True):
            self.writes.append(group.writes(device) - before)
            group.slow(device, None)
            group.close()
        self.seconds = time.monotonic() - self._began

    def proof(self) -> str:
        bitten(all(self.writes), f"nothing was written by one of them: {self.writes}")
        most = (self.seconds + 1) * WRITES_PER_SECOND + 1
        bitten(max(self.writes) <= most, f"{self.writes} writes in {self.seconds:.1f} s")
        return f"{self.writes} writes in {self.seconds:.1f} s"


# ---- power and disks


def slow_and_dark(*, leader: bool) -> Callable[[Deployment, random.Random], Injected]:
    """The leader, or its followers, lose what was written and not yet synced: much, as their disks are slow. The rest,
    who have it all, stand still until those that are back could have been elected."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        all_well(deployment)
        sides = [deployment.leader_of()], deployment.followers_of()
        dark, others = sides if leader else sides[::-1]
        slow = SlowDisks(deployment, dark)
        pause(rng.uniform(*SLOW_SECONDS))
        for broker in others:
            freeze(broker)
        outage = Outage(deployment, dark, reboots=rng.random() < 0.5)
        slow.end()
        outage.end()
        for broker in dark:
            wait_until(broker.listening, f"{broker} listens", 60)
        pause(rng.uniform(*ALONE_SECONDS))

        def heal() -> None:
            for broker in others:
                thaw(broker)

        what = f"power loss of {named(dark)} with slow disks, {named(others)} stopped"
        proof = lambda: f"{slow.proof()}; {outage.proof()}"  # noqa: E731
        return Injected(what, frozen_names([*dark, *others]), heal, proof)

    return inject


# ---- the first to come back


def first_back(
    prepare: Callable[[Deployment, Broker, random.Random], object],
    damage: Callable[[Deployment, Broker, random.Random, Any], Callable[[], str]],
    what: str,
) -> Callable[[Deployment, random.Random], Injected]:
    """All are killed. One comes back, as `damage` has left it, and has time to be elected before the others come."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        all_well(deployment)
        broker = one_of(rng, deployment.followers_of())
        known = prepare(deployment, broker, rng)
        victims = everybody(deployment, rng)
        for victim in victims:
            kill(victim)
        proof = damage(deployment, broker, rng, known)
        started(broker)
        pause(rng.uniform(*ALONE_SECONDS))

        def heal() -> None:
            for victim in victims:
                if victim is not broker:
                    victim.spawn()

        return Injected(f"all killed; {broker} is back first, {what}", frozen_names(victims), heal, proof)

    return inject


def copied(deployment: Deployment, broker: Broker, rng: random.Random) -> Path:
    """A copy of its disk, and one start since: a younger one is not recognised."""
    snapshot = deployment.disks[broker.name].snapshot()
    broker.stop()
    broker.start()
    deployment.settle(60)
    pause(rng.uniform(*COPY_SECONDS))
    return snapshot


def put_back(deployment: Deployment, broker: Broker, rng: random.Random, snapshot: Path) -> Callable[[], str]:
    before = size_of(broker)
    deployment.disks[broker.name].put_back(snapshot)
    snapshot.unlink()
    lacking = before - size_of(broker)

    def proof() -> str:
        bitten(lacking > 0, "the copy has all that there was")
        return f"its logs lack {lacking} bytes"

    return proof


def last_batch_damaged(deployment: Deployment, broker: Broker, rng: random.Random, known: object) -> Callable[[], str]:
    path = last_log(SEGMENT)(broker, rng)
    at = len(path.read_bytes().rstrip(b"\0")) - 1
    with path.open("r+b", buffering=0) as file:
        good = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([good[0] ^ 1]), at)
        os.fsync(file.fileno())
    forget_cached(path)

    def proof() -> str:
        bitten(at > 0, "the log was empty")
        return f"a bit of byte {at} of {path.name} was flipped"

    return proof


# ---- behind the others


class Behind:
    """A follower that other brokers do not reach, until the ISR goes on without it. It loses nobody else."""

    def __init__(self, deployment: Deployment, rng: random.Random) -> None:
        all_well(deployment)
        self.leader = deployment.leader_of()
        self.away, self.other = rng.sample(deployment.followers_of(), 2)
        self.cut = cut_in(deployment, both_ways([self.away.name], [self.leader.name, self.other.name]))
        wait_until(lambda: deployment.epoch_and_isr()[1] < 3, "the ISR goes on without who is cut off", SHRUNK_SECONDS)
        pause(rng.uniform(*BEHIND_SECONDS))


def behind_and_killed(deployment: Deployment, rng: random.Random) -> Injected:
    """Who is back now lacks what was acknowledged without it, and may not be elected."""
    behind = Behind(deployment, rng)
    kill(behind.leader)
    behind.cut.heal()
    what = f"{behind.away} was cut off until the ISR went on without it, and {behind.leader} killed"
    return Injected(what, frozen_names([behind.leader]), behind.leader.spawn, lambda: lost(behind.cut))


def behind_and_joining(deployment: Deployment, rng: random.Random) -> Injected:
    """Who takes long to catch up may not count before it has, as only it is left a moment later."""
    behind = Behind(deployment, rng)
    assert deployment.network is not None
    link = Link(deployment.network, behind.away.name)
    link.trouble(received=THIN)
    behind.cut.heal()
    until = time.monotonic() + JOIN_SECONDS
    while deployment.epoch_and_isr()[1] < 3 and time.monotonic() < until:
        time.sleep(0.005)
    freeze(behind.other)
    kill(behind.leader)
    carried = link.unplug()
    pause(rng.uniform(*BEHIND_SECONDS))
    victims = [behind.leader, behind.other]

    def heal() -> None:
        thaw(behind.other)
        behind.leader.spawn()

    def proof() -> str:
        bitten(carried.delayed, "no packet was late")
        return f"{lost(behind.cut)}, {carried.delayed} were late"

    what = f"{behind.away} is back on a slow line; {behind.leader} killed, {behind.other} stopped"
    return Injected(what, frozen_names(victims), heal, proof)


def kind(number: str, title: str, promise: str, inject: Callable[[Deployment, random.Random], Injected]) -> FaultKind:
    needs = DISKS | {"groups", "links"}
    return FaultKind(number, title, promise, inject, (2.0, 4.0), needs, SYNCED, settle=60.0, alone=True)


KINDS = (
    kind("D1-first", "a slow leader loses power, others are stopped", "nothing lost", slow_and_dark(leader=True)),
    kind("D1-second", "slow followers lose power, the leader is stopped", "nothing lost", slow_and_dark(leader=False)),
    kind(
        "D8-first",
        "the first one back has damage in its last batch",
        "it is not believed",
        first_back(lambda *_: None, last_batch_damaged, "with damage in its last batch"),
    ),
    kind(
        "D10-first",
        "the first one back has an older disk",
        "it is not elected",
        first_back(copied, put_back, "with an older disk"),
    ),
    kind("N1-behind", "who was away comes back as the leader is killed", "it is not elected", behind_and_killed),
    kind("N9-behind", "who was away comes back slowly, and only it is left", "it is not elected", behind_and_joining),
)
DIRECTED = {each.id: each for each in KINDS}


def chosen(words: Sequence[str]) -> list[FaultKind]:
    """Of these and of the table; ValueError names a word that is none."""
    found: list[FaultKind] = []
    for word in words:
        found += [DIRECTED[word]] if word in DIRECTED else chosen_of_all([word])
    return found
