"""E1-E7: the metadata store is killed, stands still, is replaced, slow, forgets; and two controllers overlap.

    E1  kill -9 of etcd's leader             E5  few writes a second on the disk of etcd's leader
    E2  kill -9 of two of three members      E6  brokers are cut off from etcd, and what they miss is compacted away
    E3  SIGSTOP of etcd's leader             E7  SIGSTOP of the controller, until another one took over
    E4  a member loses its disk: it is removed, and added again with an empty one
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nsqha.election.etcd.binary import find_etcd
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient
from nsqha.election.model import TopicSettings
from tests.etcd_server import EtcdServer
from tests.integration.cluster import freeze, thaw
from tests.integration.servers import wait_until
from tests.jepsen.deployment import Deployment, NotNow, one_of
from tests.jepsen.faults import network
from tests.jepsen.faults.fault import FaultKind, Injected, bitten
from tests.jepsen.faults.network import NAMESPACES
from tests.jepsen.faults.processes import cpu_seconds
from tests.jepsen.hosts.groups import Group

MAJORITY = 2
WAIT_SECONDS = 40.0
MISSED = "missed"  # a topic that nobody hears of
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


# ---- E4


def replaced(deployment: Deployment, rng: random.Random) -> Injected:
    """As etcd's manual has it. The others are a majority meanwhile."""
    if len(deployment.whole_etcds) < len(deployment.etcd_members):
        raise NotNow("the others are no majority")
    member = one_of(rng, deployment.etcd_members)
    others = ",".join(other.endpoint for other in deployment.etcd_members if other is not member)
    peer = f"http://{member.ip}:{member.peer_port}"
    member.kill()
    for each in (member.folder / "data").iterdir():
        shutil.rmtree(each)
    before = id_of(others, peer)
    etcdctl(others, "member", "remove", before)
    etcdctl(others, "member", "add", member.name, f"--peer-urls={peer}")
    member.extra = ("--initial-cluster-state", "existing")

    def heal() -> None:
        member.spawn()
        member.wait()

    def proof() -> str:
        after = id_of(others, peer)
        bitten(after != before, f"its id is still {after}")
        return f"member {before} is {after} now"

    return Injected(f"etcd {member.name} loses its disk", names([member]), heal, proof)


def etcdctl(endpoints: str, *words: str) -> str:
    """Tried again while etcd looks for a leader."""
    command = [str(Path(find_etcd()).with_name("etcdctl")), f"--endpoints={endpoints}", *words]
    said: list[str] = []

    def done() -> bool:
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"})
        said.append(ended.stdout if ended.returncode == 0 else ended.stderr)
        return ended.returncode == 0

    try:
        wait_until(done, " ".join(words), WAIT_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}: {said[-1]}") from None
    return said[-1]


def id_of(endpoints: str, peer: str) -> str:
    """The id of the member with this peer URL."""
    lines = etcdctl(endpoints, "member", "list").splitlines()
    return next(line.split(",")[0] for line in lines if peer in line)


# ---- E5


def slow_disk(deployment: Deployment, rng: random.Random) -> Injected:
    """So few writes a second that each change of a record waits for its turn."""
    (member,) = etcd_leader(deployment, rng)
    process, disk = member._process, deployment.disks[member.name]
    assert process is not None
    writes, group = rng.choice((2, 5, 10)), Group(f"slow-{member.name}-{time.monotonic_ns()}", controllers=("blkio",))
    group.add(process.pid)
    group.slow(disk.device, writes)
    began, before = time.monotonic(), group.writes(disk.device)
    done: list[float] = []

    def heal() -> None:
        done.extend((group.writes(disk.device) - before, time.monotonic() - began))
        group.slow(disk.device, None)
        group.close()

    def proof() -> str:
        wrote, seconds = done
        bitten(wrote > 0, "it wrote nothing")
        bitten(wrote <= (seconds + 1) * writes + 1, f"{wrote:.0f} writes in {seconds:.1f} s")
        return f"{wrote:.0f} writes in {seconds:.1f} s"

    return Injected(f"{writes} writes a second on etcd {member.name}, its leader", names([member]), heal, proof)


# ---- E6


def compacted(deployment: Deployment, rng: random.Random) -> Injected:
    """What was changed while they were cut off is nowhere any more when they are back: they have to read it all."""
    ours = [daemon.directory.name for daemon in deployment.daemons]
    if deployment.broken:
        raise NotNow("somebody is broken")
    cut = network.cut_in(deployment, network.both_ways(ours, [etcd.name for etcd in deployment.etcd_members]))
    records = deployment.store.records
    records.create_topic(MISSED, TopicSettings(replicas=1))
    records.delete_topic(MISSED)
    revision = records.revision
    with contextlib.closing(EtcdClient(deployment.access)) as client:
        client.change(lambda stubs: stubs.kv.Compact, rpc.CompactionRequest(revision=revision))

    def proof() -> str:
        return f"{network.lost(cut)}; compacted at revision {revision}"

    return Injected("all daemons lose etcd, and what they miss", frozenset(ours), cut.heal, proof)


# ---- E7


def overlapping(deployment: Deployment, rng: random.Random) -> Injected:
    """The old controller wakes up and knows nothing of the new one."""
    old = deployment.controller_now()
    if len(deployment.whole_lookupds) < len(deployment.lookupds):
        raise NotNow("nobody could take over")
    freeze(old)
    others = [daemon for daemon in deployment.lookupds if daemon is not old]
    before = cpu_seconds(old.pid)

    def active() -> bool:
        with contextlib.suppress(OSError, ValueError):
            return any(daemon.json("/controller")["here"] for daemon in others)
        return False

    try:
        wait_until(active, "another controller", WAIT_SECONDS)
    except AssertionError:
        thaw(old)
        raise
    used: list[float] = []

    def heal() -> None:
        used.append(cpu_seconds(old.pid) - before)
        thaw(old)

    def proof() -> str:
        bitten(not used[0], f"{used[0]} s of CPU were used while it stood still")
        return "another one had taken over when it woke up"

    name = old.directory.name
    return Injected(f"{name} is controller, and then another one", frozenset([name]), heal, proof)


SLOW = frozenset(("namespaces", "disks", "groups"))

KINDS = (
    FaultKind("E1", "kill -9 of etcd's leader", "publishes go on", killed(etcd_leader), weight=2),
    FaultKind("E2", "kill -9 of two of three etcd members", "publishes go on", killed(two_members), (3.0, 20.0)),
    FaultKind("E3", "SIGSTOP of etcd's leader", "publishes go on", stopped, (2.0, 10.0)),
    FaultKind("E4", "an etcd member loses its disk", "publishes go on", replaced),
    FaultKind("E5", "etcd's leader has a slow disk", "publishes go on", slow_disk, (3.0, 12.0), needs=SLOW),
    FaultKind(
        "E6", "etcd compacts while all are away", "all is read again", compacted, needs=NAMESPACES, alone=True
    ),
    FaultKind("E7", "two controllers overlap", "the old one is refused", overlapping, (0.5, 5.0)),
)
