"""L1-L4: less of the machine than the brokers want, or more clients than anybody asked for.

L1  a CPU quota for all brokers              L3  descriptors: no more may be opened than are open
L2  a memory limit, until the kernel kills   L4  5,000 clients at once
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time

from tests.integration.cluster import pause
from tests.integration.servers import wait_until
from tests.jepsen.deployment import Broker, Deployment, NotNow, one_of
from tests.jepsen.faults.disks import all_well
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.hosts.groups import Group, descriptors

USED_SECONDS = 1.0
CORES_MIN = 0.01  # the least quota that there is
CLIENTS_AT_ONCE = 5000
CONNECT_SECONDS = 5.0
KNOCKS = 32  # connections that want a descriptor when there is none
STEP_BYTES = 1 << 20
KILL_SECONDS = 40.0
HELLO = b"  V2"
NOP = b"NOP\n"


# ---- L1


def quota(deployment: Deployment, rng: random.Random) -> Injected:
    """Half of what the busiest uses at most, or a load that is light would not feel it."""
    victims = deployment.whole_nodes
    one_of(rng, victims)
    wanted = rng.choice((0.05, 0.1, 0.25))
    return limited(deployment, victims, max(CORES_MIN, min(wanted, most_used(deployment, victims) / 2)))


def most_used(deployment: Deployment, victims: list[Broker]) -> float:
    """Cores that the busiest of them uses, looked at for a while."""
    groups = [deployment.group(victim.name) for victim in victims]
    for group, victim in zip(groups, victims, strict=True):
        group.add(victim.pid)
    before, began = [group.cpu_used() for group in groups], time.monotonic()
    pause(USED_SECONDS)
    used = max(group.cpu_used() - then for group, then in zip(groups, before, strict=True))
    return used / (time.monotonic() - began)


def limited(deployment: Deployment, victims: list[Broker], cores: float) -> Injected:
    """So much of a core each. A broker that is asked for less than that needs no more, and may be left alone by it."""
    quotas = [Quota(deployment.group(victim.name), victim.name, victim.pid, cores) for victim in victims]

    def heal() -> None:
        for each in quotas:
            each.lift()

    def proof() -> str:
        bitten(any(each.periods for each in quotas), f"nobody was out of the quota: {told(quotas)}")
        spared = [each for each in quotas if not each.periods and each.used >= cores]
        bitten(not spared, f"who wanted more was not held back: {told(spared)}")
        return f"periods of 100 ms that were out of the quota, and CPU used: {told(quotas)}"

    names = frozenset(victim.name for victim in victims)
    return Injected(f"{cores:.0%} of a core for {', '.join(sorted(names))}", names, heal, proof)


class Quota:
    """Of one broker, from now on until it is lifted; then how often it was held back and how much it had."""

    def __init__(self, group: Group, name: str, pid: int, cores: float) -> None:
        self.name = name
        self.periods = 0
        self.used = 0.0  # cores
        self._group = group
        self._before = group.throttled()
        group.add(pid)
        self._cpu, self._since = group.cpu_used(), time.monotonic()
        group.cpu(cores)

    def lift(self) -> None:
        seconds = time.monotonic() - self._since
        self.used = (self._group.cpu_used() - self._cpu) / seconds
        self.periods = self._group.throttled() - self._before
        self._group.cpu(None)


def told(quotas: list[Quota]) -> str:
    return ", ".join(f"{each.name} {each.periods} ({each.used:.1%})" for each in quotas)


# ---- L2


def out_of_memory(deployment: Deployment, rng: random.Random) -> Injected:
    """It may have what it has, less what the kernel can take back; so its next page is one too many."""
    all_well(deployment)  # it is started again first, and has to get in sync
    victim = one_of(rng, deployment.whole_nodes)
    group = deployment.group(victim.name)
    before = group.oom_kills()
    victim.stop()
    own, victim.host = victim.host, deployment.host_in(victim.name, group)
    victim.start()
    wait_until(deployment.all_in_sync, f"{victim.name} is in sync", KILL_SECONDS)
    limit = group.memory_used()
    with contextlib.suppress(OSError):  # no more can be taken back
        while group.oom_kills() == before and limit > STEP_BYTES:
            group.memory(limit)
            limit -= STEP_BYTES
    process = victim._process
    assert process is not None
    wait_until(lambda: process.poll() is not None, f"{victim.name} is killed for want of memory", KILL_SECONDS)

    def heal() -> None:
        victim.kill()
        group.memory(None)
        victim.host = own
        victim.spawn()

    def proof() -> str:
        kills = group.oom_kills() - before
        bitten(kills and process.returncode == -signal.SIGKILL, f"{kills} kills; status {process.returncode}")
        return f"{kills} killed by the kernel at {limit >> 20} MiB"

    return Injected(f"{victim.name} runs out of memory", frozenset([victim.name]), heal, proof)


# ---- L3


def out_of_descriptors(deployment: Deployment, rng: random.Random) -> Injected:
    victim = one_of(rng, deployment.whole_nodes)
    pid, spare = victim.pid, rng.choice((0, 2, 8))
    try:
        used = open_numbers(pid)
    except FileNotFoundError:
        used = set()
    if not used:  # nor has one that has ended and is not waited for yet
        raise NotNow(f"{victim.name} has ended")
    limit = max(used) + 1 + spare
    descriptors(pid, limit)
    knocking = crowd(deployment, [victim], limit - len(used) + KNOCKS)
    most: list[int] = []

    def heal() -> None:
        with contextlib.suppress(OSError):
            most.append(len(open_numbers(pid)))
        knocking.close()
        with contextlib.suppress(ProcessLookupError):
            descriptors(pid, None)

    def proof() -> str:
        came = len(knocking.sockets)
        got = most[0] - len(used) if most else came
        bitten(most and most[0] <= limit and got < came, f"{came} clients came, {most} were open of {limit}")
        return f"{came} clients came, and there were {got} descriptors for them"

    return Injected(f"{victim.name} may open {spare} more", frozenset([victim.name]), heal, proof)


def open_numbers(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


# ---- L4


class Crowd:
    """Clients that say hello and no more."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def crowd(deployment: Deployment, nodes: list[Broker], count: int) -> Crowd:
    """So many clients at once, from the clients' host, whether they are taken or not."""
    made = Crowd()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def connect() -> None:
        deployment.enter_clients()
        for number in range(count):
            node = nodes[number % len(nodes)]
            one = socket.socket()
            one.settimeout(CONNECT_SECONDS)
            try:
                one.connect((node.host.ip, node.tcp_port))
                one.sendall(HELLO + NOP)
            except OSError:
                one.close()
                continue
            made.sockets.append(one)

    thread = threading.Thread(target=connect, name="crowd")
    thread.start()
    thread.join()
    return made


def many_clients(deployment: Deployment, rng: random.Random) -> Injected:
    nodes = deployment.whole_nodes
    one_of(rng, nodes)
    clients = crowd(deployment, nodes, CLIENTS_AT_ONCE)

    def proof() -> str:
        bitten(len(clients.sockets) >= CLIENTS_AT_ONCE * 0.9, f"{len(clients.sockets)} were connected")
        return f"{len(clients.sockets)} clients were connected"

    return Injected(f"{CLIENTS_AT_ONCE} clients at once", frozenset(), clients.close, proof)


GROUPS = frozenset(("namespaces", "groups"))

KINDS = (
    FaultKind("L1", "a CPU quota for all brokers", "slow, and nothing lost", quota, (3.0, 10.0), needs=GROUPS),
    FaultKind("L2", "a memory limit until the kernel kills", "nothing lost", out_of_memory, needs=GROUPS),
    FaultKind("L3", "no more descriptors", "clients wait or are refused; nothing lost", out_of_descriptors),
    FaultKind("L4", "5,000 clients at once", "nothing lost", many_clients, (3.0, 8.0)),
)
