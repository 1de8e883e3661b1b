"""E1-E3: the metadata store is killed or stands still."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence

from tests.etcd_server import EtcdServer
from tests.jepsen.deployment import Deployment, NotNow
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.processes import cpu_seconds

MAJORITY = 2
Members = Callable[[Deployment, random.Random], Sequence[EtcdServer]]


def etcd_leader(deployment: Deployment, rng: random.Random) -> list[EtcdServer]:
    for member in deployment.whole_etcds:
        try:
            if member.leads():
                return [member]
        except OSError:
            continue
    raise NotNow("no leader of etcd that is whole")


def two_members(deployment: Deployment, rng: random.Random) -> list[EtcdServer]:
    if len(deployment.whole_etcds) < MAJORITY:
        raise NotNow("too few members are whole")
    return rng.sample(deployment.whole_etcds, MAJORITY)


def names(members: Sequence[EtcdServer]) -> frozenset[str]:
    return frozenset(member.name for member in members)


def killed(choose: Members) -> Callable[[Deployment, random.Random], Injected]:
    def inject(deployment: Deployment, rng: random.Random) -> Injected:
        members = choose(deployment, rng)
        statuses = []
        for member in members:
            process = member._process
            assert process is not None
            member.kill()
            statuses.append(process.returncode)

        def heal() -> None:
            for member in members:
                member.spawn()

        def proof() -> str:
            bitten(set(statuses) == {-signal.SIGKILL}, f"ended with {statuses}, not by SIGKILL")
            return f"{len(statuses)} ended by SIGKILL"

        return Injected(f"kill -9 etcd {', '.join(sorted(names(members)))}", names(members), heal, proof)

    return inject


def stopped(deployment: Deployment, rng: random.Random) -> Injected:
    (member,) = etcd_leader(deployment, rng)
    process = member._process
    assert process is not None
    member.freeze()
    began, before = time.monotonic(), cpu_seconds(process.pid)
    used: list[float] = []

    def heal() -> None:
        used.extend((cpu_seconds(process.pid) - before, time.monotonic() - began))
        member.thaw()

    def proof() -> str:
        bitten(not used[0], f"{used[0]} s of CPU were used while it stood still")
        return f"stood still for {used[1]:.1f} s"

    return Injected(f"SIGSTOP etcd {member.name}, its leader", names([member]), heal, proof)


KINDS = (
    FaultKind("E1", "kill -9 of etcd's leader", "publishes go on", killed(etcd_leader), weight=2),
    FaultKind("E2", "kill -9 of two of three etcd members", "publishes go on", killed(two_members), (3.0, 20.0)),
    FaultKind("E3", "SIGSTOP of etcd's leader", "publishes go on", stopped, (2.0, 10.0)),
)
