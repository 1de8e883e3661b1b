"""D1-D7: disks that lose power, are full, fail, turn read-only, are slow or hang.

    D1  power loss of one broker           D5  writes of data get EIO
    D2  power loss of all brokers          D6  the file system turns read-only
    D3  power loss of one, while others    D7  a slow disk, and one that hangs
        are cut off and stopped
    D4  no room on a disk

A host without power ends in one moment, with what it has written and not synced, and says nothing more: its process is
stopped first and cut off before it is killed, so that nobody gets the FIN and RST that the kernel sends then. Names
that were not synced go, too (`tests.jepsen.switches.names`). It boots with another boot id, or with the same, as when
an error shut a file system down.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nsqha.errors import NsqhaError
from tests.integration.cluster import freeze, pause, thaw
from tests.integration.servers import wait_until
from tests.jepsen.deployment import CLIENTS, Broker, Deployment, NotNow, name_of, one_of
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.network import both_ways, cut_in, lost
from tests.jepsen.hosts.groups import Group

Victims = Callable[[Deployment, random.Random], Sequence[Broker]]
Inject = Callable[[Deployment, random.Random], Injected]

DISKS = frozenset(("namespaces", "disks"))
LAZY = frozenset(("interval", "none"))
MIB = 1 << 20
LEFT_BYTES = (0, MIB, 100 * MIB)  # of a full disk; all are less than a broker wants
WRITES_PER_SECOND = (2, 5, 20, 100)  # of a slow disk: 500 to 10 ms for each fsync
PROBE_SECONDS = 0.5  # of writes, and three at least: the kernel lets a few pass at once
SHRUNK_SECONDS = 15.0
WITHOUT_SECONDS = (1.0, 5.0)


def leader(deployment: Deployment, rng: random.Random) -> list[Broker]:
    return [deployment.leader_of()]


def follower(deployment: Deployment, rng: random.Random) -> list[Broker]:
    return [one_of(rng, deployment.followers_of())]


def anyone(deployment: Deployment, rng: random.Random) -> list[Broker]:
    return [one_of(rng, deployment.whole_nodes)]


def everybody(deployment: Deployment, rng: random.Random) -> list[Broker]:
    if len(deployment.whole_nodes) < len(deployment.nodes):
        raise NotNow("somebody is broken already")
    return deployment.whole_nodes


def all_well(deployment: Deployment) -> None:
    """NotNow unless nothing is broken and every ISR is full: a copy that is lost is survived with the others whole."""
    try:
        well = not deployment.broken and deployment.all_in_sync()
    except NsqhaError:
        well = False
    if not well:
        raise NotNow("somebody is broken, or not in sync")


def names(victims: Iterable[Broker]) -> str:
    return ", ".join(map(name_of, victims))


def frozen_names(victims: Iterable[Broker]) -> frozenset[str]:
    return frozenset(map(name_of, victims))


def again(victim: Broker) -> None:
    """Started again, also if it has ended by itself."""
    victim.kill()
    victim.spawn()


def ended(victim: Broker) -> int | None:
    """The exit status of one that ended by itself."""
    return None if victim._process is None else victim._process.poll()


# ---- D1, D2, D3


class Outage:
    """Brokers without power, from now on until `end`."""

    def __init__(self, deployment: Deployment, victims: Sequence[Broker], *, reboots: bool) -> None:
        self._deployment = deployment
        self._victims = victims
        self._reboots = reboots
        self._kept: list[str] = []
        for victim in victims:
            freeze(victim)  # or it would still sync what it has written
        for victim in victims:
            deployment.disks[victim.name].shut_down()
        everyone = [*deployment.names, CLIENTS]
        self._cut = cut_in(deployment, both_ways(map(name_of, victims), everyone))
        for victim in victims:
            victim.kill()

    def end(self) -> None:
        network = self._deployment.network
        assert network is not None
        for victim in self._victims:
            try:
                self._deployment.disks[victim.name].boot()
            except AssertionError as error:
                self._kept.append(str(error))
            victim.names.forget()
            if self._reboots:
                network.namespaces(victim.name).boot()
        self._cut.heal()
        for victim in self._victims:
            victim.spawn()

    def proof(self) -> str:
        bitten(not self._kept, "; ".join(self._kept))
        return f"what was written last is gone on {len(self._victims)} disks"


def power_loss(choose: Victims, *, lazy: bool = False) -> Inject:
    """`lazy`: without fsync before OK. Then the others have to be whole before, and until all are in sync again."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        if lazy:
            all_well(deployment)
        victims = choose(deployment, rng)
        reboots = rng.random() < 0.5
        outage = Outage(deployment, victims, reboots=reboots)

        def heal() -> None:
            outage.end()
            if lazy:
                deployment.settle(60)

        what = f"power loss of {names(victims)}, {'another' if reboots else 'the same'} boot id"
        return Injected(what, frozen_names(victims), heal, outage.proof)

    return inject


def power_loss_in_turn(deployment: Deployment, rng: random.Random) -> Injected:
    """The order that loses messages where a majority of page caches counts as stored: one is cut off, another loses
    power and comes back with the first, while the only one that has everything stands still."""
    all_well(deployment)
    away, other = rng.sample(deployment.followers_of(), 2)
    first, dark = rng.sample([*leader(deployment, rng), other], 2)
    cut = cut_in(deployment, both_ways([away.name], [*deployment.names, CLIENTS]))
    wait_until(lambda: deployment.epoch_and_isr()[1] < 3, "the ISR goes on without who is cut off", SHRUNK_SECONDS)
    pause(rng.uniform(0.3, 1.5))  # acknowledged by two
    outage = Outage(deployment, [dark], reboots=rng.random() < 0.5)
    freeze(first)
    outage.end()
    cut.heal()
    wait_until(dark.listening, f"{dark} listens", 60)
    pause(rng.uniform(*WITHOUT_SECONDS))  # two of three are there, and may go on only with all that was acknowledged
    victims = [first, away, dark]

    def heal() -> None:
        thaw(first)

    what = f"{away} cut off, power loss of {dark}, then {first} stopped, which has all"
    return Injected(what, frozen_names(victims), heal, lambda: f"{outage.proof()}; {lost(cut)}")


# ---- D4


def full(choose: Victims) -> Inject:
    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        victims = choose(deployment, rng)
        left = rng.choice(LEFT_BYTES)
        disks = [deployment.disks[victim.name] for victim in victims]
        for disk in disks:
            disk.fill(left)
        free = max(disk.free_bytes() for disk in disks)
        refused = [disk.refuses() for disk in disks] if not left else []

        def heal() -> None:
            for disk in disks:
                disk.free()
            for victim in victims:
                if ended(victim) is not None:
                    again(victim)

        def proof() -> str:
            bitten(free <= left, f"{free} bytes were free")
            bitten(set(refused) <= {"ENOSPC"}, f"a write was answered with {refused}")
            return f"{free} bytes were free{', a write got ENOSPC' if refused else ''}"

        return Injected(f"{left >> 20} MiB left on {names(victims)}", frozen_names(victims), heal, proof)

    return inject


# ---- D5, D6


def failing(choose: Victims, *, error: str) -> Inject:
    """`error`: what a write or its fsync gets, EIO or EROFS."""

    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        (victim,) = choose(deployment, rng)
        disk = deployment.disks[victim.name]
        if error == "EIO":
            disk.fail_data()
        else:
            disk.read_only()
        got = disk.refuses()
        status: list[int | None] = []

        def heal() -> None:
            status.append(ended(victim))
            if status[0] is None:
                os.kill(victim.pid, signal.SIGKILL)
            disk.work_again()  # or the kernel may not let it end: what it wrote waits for the disk
            victim.kill()
            disk.repair()
            victim.spawn()

        def proof() -> str:
            bitten(got == error, f"a write got {got or 'no error'}")
            said = "it went on" if status[0] is None else f"it ended with status {status[0]}"
            return f"a write got {got}, {said}"

        return Injected(f"{error} from the disk of {victim}", frozen_names([victim]), heal, proof)

    return inject


# ---- D7


def slow(choose: Victims) -> Inject:
    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        (victim,) = choose(deployment, rng)
        disk, writes = deployment.disks[victim.name], rng.choice(WRITES_PER_SECOND)
        group = Group(f"slow-{victim.name}-{time.monotonic_ns()}", controllers=("blkio",))
        group.add(victim.pid)
        group.slow(disk.device, writes)
        count = max(3, round(writes * PROBE_SECONDS))
        out, many = f"of={disk.at / 'slow'}", f"count={count}"
        probe = [*group.prefix, "dd", "if=/dev/zero", out, "bs=4k", many, "oflag=dsync"]
        began = time.monotonic()
        subprocess.run(probe, check=True, capture_output=True)
        took = time.monotonic() - began

        def heal() -> None:
            group.slow(disk.device, None)
            group.close()
            (disk.at / "slow").unlink()

        def proof() -> str:
            bitten(took >= count / writes / 2, f"{count} writes took {took:.3f} s")
            return f"{count} writes took {took:.2f} s"

        return Injected(f"{writes} writes a second on {victim}", frozen_names([victim]), heal, proof)

    return inject


def hanging(choose: Victims) -> Inject:
    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        (victim,) = choose(deployment, rng)
        disk = deployment.disks[victim.name]
        disk.hang()
        began = time.monotonic()
        writer = subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={disk.at / 'hung'}", "count=1"], stderr=subprocess.DEVNULL
        )
        waited: list[float] = []

        def heal() -> None:
            if writer.poll() is None:
                waited.append(time.monotonic() - began)
            disk.go_on()
            writer.wait(30)
            (disk.at / "hung").unlink()

        def proof() -> str:
            bitten(waited, "a write did not wait")
            return f"a write waited for {waited[0]:.1f} s"

        return Injected(f"the disk of {victim} hangs", frozen_names([victim]), heal, proof)

    return inject


def kind(number: str, title: str, promise: str, inject: Inject, **others: Any) -> FaultKind:
    """As most of them are."""
    usual: dict[str, Any] = {"seconds": (2.0, 8.0), "needs": DISKS, "settle": 60.0, "weight": 2}
    return FaultKind(number, title, promise, inject, **{**usual, **others})


SYNCED = frozenset(("always",))
SLOW = {"needs": DISKS | {"groups"}}
NOTHING = "nothing OK'd is lost"
CLOSED = "its directory is closed, another leads"
KINDS = (
    kind("D1-leader", "power loss of the leader", NOTHING, power_loss(leader), syncs=SYNCED),
    kind("D1-follower", "power loss of a follower", NOTHING, power_loss(follower), syncs=SYNCED),
    kind(
        "D1-lazy", "power loss of one that syncs later", NOTHING, power_loss(anyone, lazy=True), syncs=LAZY, alone=True
    ),
    kind("D2", "power loss of all brokers in one moment", NOTHING, power_loss(everybody), syncs=SYNCED),
    kind("D3", "power loss of one, others cut off and stopped", NOTHING, power_loss_in_turn, alone=True),
    kind("D4-leader", "no room on the leader's disk", "refused, then taken again", full(leader)),
    kind("D4-follower", "no room on a follower's disk", NOTHING, full(follower)),
    kind("D4-all", "no room on any broker's disk", "refused, then taken again", full(everybody)),
    kind("D5-leader", "EIO for writes of the leader", CLOSED, failing(leader, error="EIO"), syncs=SYNCED),
    kind("D5-follower", "EIO for writes of a follower", NOTHING, failing(follower, error="EIO"), syncs=SYNCED),
    kind("D6-leader", "the leader's disk turns read-only", CLOSED, failing(leader, error="EROFS"), syncs=SYNCED),
    kind("D6-follower", "a follower's disk turns read-only", NOTHING, failing(follower, error="EROFS"), syncs=SYNCED),
    kind("D7-slow-leader", "the leader's disk is slow", "handed over", slow(leader), **SLOW),
    kind("D7-slow", "a follower's disk is slow", "it leaves the ISR", slow(follower), **SLOW),
    kind("D7-hang", "the leader's disk hangs", "handed over", hanging(leader), seconds=(4.0, 16.0)),
)
