"""P1-P5, P7, P8: processes that are killed, stopped, restarted, starved, or whose loop stands still.

    P1  kill -9 of leader, follower, controller, leader and controller, all brokers
    P2  SIGSTOP of leader, follower, controller: shorter and longer than a lease
    P3  SIGTERM of the leader, and a new start when it is gone
    P4  kill -9 within 2 s of a start, again and again
    P5  it kills itself before or after the Nth sync, write, rename, change in etcd, or promise
    P7  a twentieth of a core
    P8  its loop, or all of its Python, stands still for 0.2 to 5 s

A kill proves itself by the exit status that the kernel gave, a stop by a CPU time that stood still until SIGCONT.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.integration.cluster import freeze, pause, thaw
from tests.integration.servers import CannotStart, Daemon, wait_until
from tests.jepsen.deployment import LEASE_SECONDS, Deployment, NotNow, name_of, one_of
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.overload import GROUPS, limited

Victims = Callable[[Deployment, random.Random], Sequence[Daemon]]

CRASHES = 6  # of a P4
BOOT_SECONDS = 2.0  # within which a P4 kills
OFTEN = ("sync", "write", "sync-dir", "cas", "promise")
VISITS = {"sync": 30, "write": 60, "sync-dir": 4, "cas": 3, "promise": 2}
FAILPOINT_SECONDS = 15.0
LONG = (1.0, LEASE_SECONDS + 5.0)


def leader(deployment: Deployment, rng: random.Random) -> list[Daemon]:
    return [deployment.leader_of()]


def follower(deployment: Deployment, rng: random.Random) -> list[Daemon]:
    return [one_of(rng, deployment.followers_of())]


def controller(deployment: Deployment, rng: random.Random) -> list[Daemon]:
    return [deployment.controller_now()]


def both(deployment: Deployment, rng: random.Random) -> list[Daemon]:
    """The controller first, or it may have elected before it dies."""
    return [deployment.controller_now(), deployment.leader_of()]


def everybody(deployment: Deployment, rng: random.Random) -> list[Daemon]:
    return [one_of(rng, [node]) for node in deployment.whole_nodes]


def names(victims: Sequence[Daemon]) -> frozenset[str]:
    return frozenset(map(name_of, victims))


# ---- P1


def killed(choose: Victims) -> Callable[[Deployment, random.Random], Injected]:
    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        victims = choose(deployment, rng)
        statuses = [kill(victim) for victim in victims]

        def heal() -> None:
            for victim in victims:
                victim.spawn()

        def proof() -> str:
            bitten(set(statuses) == {-signal.SIGKILL}, f"ended with {statuses}, not by SIGKILL")
            return f"{len(statuses)} ended by SIGKILL"

        return Injected(f"kill -9 {', '.join(map(name_of, victims))}", names(victims), heal, proof)

    return inject


def kill(victim: Daemon) -> int:
    """Kill it and return the status that the kernel gives; one that ended by itself has another one."""
    process = victim._process
    assert process is not None, f"{name_of(victim)} does not run"
    victim.kill()
    return int(process.returncode)


# ---- P2


def stopped(choose: Victims) -> Callable[[Deployment, random.Random], Injected]:
    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        victims = choose(deployment, rng)
        for victim in victims:
            freeze(victim)
        began, before = time.monotonic(), [cpu_seconds(victim.pid) for victim in victims]
        used: list[float] = []

        def heal() -> None:
            used.extend(cpu_seconds(victim.pid) - cpu for victim, cpu in zip(victims, before, strict=True))
            used.append(time.monotonic() - began)
            for victim in victims:
                thaw(victim)

        def proof() -> str:
            *cpu, seconds = used
            bitten(not any(cpu), f"{cpu} s of CPU were used while it stood still")
            return f"stood still for {seconds:.1f} s"

        return Injected(f"SIGSTOP {', '.join(map(name_of, victims))}", names(victims), heal, proof)

    return inject


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- P3


def terminated(deployment: Deployment, rng: random.Random) -> Injected:
    """The leader ends as a service manager would have it, and starts again when it is gone."""
    (victim,) = leader(deployment, rng)
    victim.terminate()
    status: list[int] = []

    def heal() -> None:
        status.append(victim.wait())
        victim.spawn()

    def proof() -> str:
        assert status == [0], f"{name_of(victim)} did not stop well: status {status}\n{victim.log()[-2000:]}"
        return "ended with status 0"

    return Injected(f"SIGTERM {name_of(victim)}", names([victim]), heal, proof)


# ---- P4


def crash_loop(deployment: Deployment, rng: random.Random) -> Injected:
    """Killed again and again while it starts."""
    victim = one_of(rng, deployment.whole_nodes)
    statuses = [kill(victim)]
    for _ in range(CRASHES - 1):
        victim.spawn()
        pause(rng.uniform(0.1, BOOT_SECONDS))
        statuses.append(kill(victim))

    def proof() -> str:
        bitten(set(statuses) == {-signal.SIGKILL}, f"ended with {statuses}, not all by SIGKILL")
        return f"killed {len(statuses)} times while it started"

    return Injected(f"crash loop of {name_of(victim)}", names([victim]), victim.spawn, proof)


# ---- P5


def at_failpoint(deployment: Deployment, rng: random.Random) -> Injected:
    """It lives once more, and kills itself at a place around a sync, rename, write, change in etcd or promise."""
    victim = one_of(rng, deployment.whole_nodes)
    operation = rng.choice(OFTEN)
    failpoint = f"{rng.choice(('before', 'after'))}-{operation}:{rng.randint(1, VISITS[operation])}"
    kill(victim)
    victim.programmed(failpoints=[failpoint])
    victim.spawn()
    process = victim._process
    assert process is not None
    victim.programmed()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: process.poll() is not None, failpoint, FAILPOINT_SECONDS)
    status = process.poll()
    # One that was not there yet may not go on: it would die later, when no fault is under way.
    victim.kill()
    said = victim.log()

    def proof() -> str:
        if status is None:
            return f"killed: not there within {FAILPOINT_SECONDS:.0f} s: {failpoint}"
        bitten(status == -signal.SIGKILL and "is reached" in said, f"it ended with {status}\n{said[-2000:]}")
        return f"killed itself {failpoint}"

    return Injected(f"{victim.name} dies {failpoint}", names([victim]), victim.spawn, proof)


# ---- P7, P8


def starved(deployment: Deployment, rng: random.Random) -> Injected:
    victim = one_of(rng, deployment.whole_nodes)
    return limited(deployment, [victim], 0.05)


def serves(victim: Daemon) -> bool:
    try:
        return victim.listening()
    except CannotStart:
        return False


def stalled(deployment: Deployment, rng: random.Random) -> Injected:
    """Its loop does nothing for a while, or all of its Python does; the kernel and threads in C go on."""
    victim = one_of(rng, deployment.whole_nodes)
    if not serves(victim):  # what starts after it was asked takes it for what an earlier life was asked for
        raise NotNow(f"{victim.name} does not serve")
    seconds, every, before = rng.uniform(0.2, 5), rng.random() < 0.5, victim.stalls.seconds()
    victim.stalls.stall(seconds, every=every)

    def heal() -> None:
        with contextlib.suppress(AssertionError):  # then it has not bitten
            wait_until(lambda: victim.stalls.seconds() > before, "the stall is over", seconds + 10)

    def proof() -> str:
        stood = victim.stalls.seconds() - before
        bitten(stood > seconds / 2, f"it stood still for {stood:.2f} s")
        return f"stood still for {stood:.2f} s"

    what = f"{'all Python' if every else 'the loop'} of {victim.name} stands still"
    return Injected(what, names([victim]), heal, proof)


KINDS = (
    FaultKind("P1-leader", "kill -9 of the leader", "nothing lost; another leads at once", killed(leader), weight=24),
    FaultKind("P1-follower", "kill -9 of a follower", "no gap", killed(follower)),
    FaultKind("P1-controller", "kill -9 of the controller", "no gap", killed(controller)),
    FaultKind("P1-both", "kill -9 of leader and controller in one moment", "nothing lost", killed(both)),
    FaultKind("P1-all", "kill -9 of all brokers in one moment", "nothing lost", killed(everybody)),
    FaultKind("P2-leader", "SIGSTOP of the leader", "no fork; duplicates only", stopped(leader), LONG, weight=2),
    FaultKind("P2-follower", "SIGSTOP of a follower", "no fork", stopped(follower), LONG, weight=2),
    FaultKind("P2-controller", "SIGSTOP of the controller", "no gap", stopped(controller), LONG, weight=2),
    FaultKind("P3", "SIGTERM of the leader, and a new start", "nothing lost, nothing unknown", terminated, weight=6),
    FaultKind("P4", "kill -9 within 2 s of a start, six times", "no damage, epochs bounded", crash_loop, (0.0, 1.0)),
    FaultKind("P5", "kill at a fail point", "nothing lost, no damage", at_failpoint, (0.0, 2.0)),
    FaultKind("P7", "a twentieth of a core", "leases survive, or others lead", starved, (3.0, 12.0), needs=GROUPS),
    FaultKind("P8", "the event loop stands still", "as P2", stalled, (1.0, 6.0)),
)
