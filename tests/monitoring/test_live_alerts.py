"""Four faults in a real cluster, watched by a real Prometheus with the rules of deploy/: each sets off the alerts that
it should, and no other, and they end with it.

A consumer stops; a follower is held back, as what is sent to it passes slowly; the leader's disk fills; the leader is
killed, and comes back with an empty disk. Nodes have small disks in memory: this machine's own may be slow, or full.

Each fault has a Prometheus of its own, that has seen nothing of the others: rules look minutes back, and what is said
of changes of leaders counts those of all the faults that came within ten minutes.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from nsqha.cli.terminal import exits
from tests.integration.cluster import Cluster, Member
from tests.integration.servers import Host, wait_until
from tests.integration.small_disk import SmallDisk
from tests.jepsen.hosts.network import NotPossible
from tests.monitoring.prometheus import Prometheus, shortened
from tests.monitoring.promtool import ROOT
from tests.tcp_relay import Relay

pytestmark = pytest.mark.timeout(300)

TOPIC, CHANNEL = "orders", "billing"
OF_A_SLOW_MACHINE = {"NsqhaLoopStalled", "NsqhaFsyncSlow", "NsqhaLeaseShort"}
"""They say that a host gives its daemons too little: true of one that runs other tests at the same time."""
DISK_MB, LOW_BYTES = 256, 24 << 20
SLOW_BYTES = 120_000  # a second, that a follower gets when it is held back
LITTLE, MUCH = [b"x" * 100], [b"x" * 50_000] * 8
"""Published at once. Much takes a follower that is held back longer than one that is waited for may lag; then nothing
waits for it, and what is on its way to it grows."""

_PROGRAM = """#!{python}
import sys

sys.path.insert(0, {root!r})
from nsqha.server.node.cluster import joining

made = joining.node_info
joining.node_info = lambda *words, **named: made(*words, **named | {{"peer": {peer!r}}})
from nsqha.cli.nsqd import main

main()
"""


class WatchedCluster(Cluster):
    """Each node has a disk of its own, and others reach its peer port through a relay: as behind a port that a host
    forwards, the node is told what to announce."""

    def __init__(self, folder: Path, etcd: object, *, exits: contextlib.ExitStack, **options: object) -> None:
        self.disks: dict[str, SmallDisk] = {}
        self.relays: dict[str, Relay] = {}
        self._exits = exits
        self._disks_in = folder
        super().__init__(folder, etcd, **options)  # type: ignore[arg-type]

    def host(self, name: str) -> Host:
        if not name.startswith("n"):
            return super().host(name)
        mounted = SmallDisk.mounted(self._disks_in / name / "data", megabytes=DISK_MB)
        disk = self.disks[name] = self._exits.enter_context(mounted)
        return disk.host

    def make(self, name: str) -> Member:
        member = super().make(name)
        relay = self.relays[name] = self._exits.enter_context(Relay.to(member.peer_port))
        path = self._disks_in / f"nsqd-{name}"
        path.write_text(_PROGRAM.format(python=sys.executable, root=str(ROOT), peer=relay.endpoint))
        path.chmod(0o755)
        member.command = str(path)
        return member


class Clients:
    """A publisher and a consumer that go on at any broker that there is."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.bodies = LITTLE
        self.consuming = threading.Event()
        self.consuming.set()
        self.finished = 0
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._publishes, self._consumes)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)

    def go_on(self) -> None:
        """Returns when something that is consumed was."""
        enough = self.finished + 5
        wait_until(lambda: self.finished >= enough, "messages are consumed", 60)

    def _at_any_broker(self, use: Callable[[str], None]) -> None:
        while not self._ends.is_set():
            running = [node for node in self._cluster.nodes if node.running]
            with contextlib.suppress(OSError, exits.Exit):
                use(random.choice(running).tcp)
            self._ends.wait(0.1)

    def _publishes(self) -> None:
        def publish(address: str) -> None:
            with contextlib.closing(V2Publisher(address, 40)) as publisher:
                while not self._ends.is_set():
                    publisher.publish(TOPIC, self.bodies)
                    self._ends.wait(0.3)

        self._at_any_broker(publish)

    def _consumes(self) -> None:
        def consume(address: str) -> None:
            if not self.consuming.wait(0.1):
                return
            with contextlib.closing(Subscriber(address, 20, TOPIC, CHANNEL, window=50)) as reader:
                reader.wait_at_most(0.1)
                while self.consuming.is_set() and not self._ends.is_set():
                    if messages := reader.messages():
                        reader.answer(messages, None, None)
                        self.finished += len(messages)

        self._at_any_broker(consume)


class Watch:
    """What Prometheus says, fault by fault."""

    def __init__(self, prometheus: Prometheus) -> None:
        self.prometheus = prometheus

    def firing(self) -> set[str]:
        return set(self.prometheus.firing()) - OF_A_SLOW_MACHINE

    @contextlib.contextmanager
    def only(self, *expected: str) -> Iterator[None]:
        """The block begins a fault, and ends it. Just these come, and all of them, and they end."""
        wait_until(lambda: not self.firing(), "nothing fires before", 60)
        since = self.prometheus.now()
        yield
        wait_until(lambda: not self.firing(), "what fires ends", 90)
        assert self.prometheus.fired(since) - OF_A_SLOW_MACHINE == set(expected)

    def come(self, *expected: str) -> dict[str, list[dict[str, str]]]:
        """All of these fire at the same time."""

        def fire() -> bool:
            return set(expected) <= self.firing()

        try:
            wait_until(fire, "they fire", 60)
        except AssertionError:
            raise AssertionError(f"{expected} do not fire; what does: {self.prometheus.firing()}") from None
        return self.prometheus.firing()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[WatchedCluster]:
    with contextlib.ExitStack() as stack:
        try:
            options = {"exits": stack, "nodes": 3, "lookupds": 2, "flags": (f"--disk-low-bytes={LOW_BYTES}",)}
            cluster = stack.enter_context(WatchedCluster.running(tmp_path / "cluster", **options))
        except NotPossible as error:
            pytest.skip(str(error))
        cluster.create(TOPIC, CHANNEL)
        yield cluster  # type: ignore[misc]


def test_each_fault_sets_off_its_alerts_and_no_other(cluster: WatchedCluster, tmp_path: Path) -> None:
    targets = {
        "nsqha-broker": [node.http for node in cluster.nodes],
        "nsqha-lookupd": [daemon.http for daemon in cluster.lookupds],
    }
    with Clients(cluster) as clients:
        clients.go_on()
        for fault in (a_consumer_stops, a_follower_is_held_back, a_disk_fills, a_leader_is_killed):
            with Prometheus.running(tmp_path / fault.__name__, targets) as prometheus:
                fault(Watch(prometheus), clients, cluster)


def a_consumer_stops(watch: Watch, clients: Clients, _: WatchedCluster) -> None:
    with watch.only("NsqhaChannelWithoutConsumers"):
        clients.consuming.clear()
        (alert,) = watch.come("NsqhaChannelWithoutConsumers")["NsqhaChannelWithoutConsumers"]
        assert (alert["topic"], alert["channel"]) == (TOPIC, CHANNEL)
        clients.consuming.set()
        clients.go_on()


def a_follower_is_held_back(watch: Watch, clients: Clients, cluster: WatchedCluster) -> None:
    leader, follower = cluster.leader(TOPIC), cluster.followers(TOPIC)[0]
    with watch.only("NsqhaFollowerBehind", "NsqhaUnderReplicated"):
        clients.bodies = MUCH
        cluster.relays[follower.name].slow_down(SLOW_BYTES)
        (alert,) = watch.come("NsqhaFollowerBehind", "NsqhaUnderReplicated")["NsqhaFollowerBehind"]
        assert (alert["instance"], alert["follower"]) == (leader.http, follower.name)
        clients.bodies = LITTLE
        cluster.relays[follower.name].release()
        clients.go_on()


def a_disk_fills(watch: Watch, clients: Clients, cluster: WatchedCluster) -> None:
    leader = cluster.leader(TOPIC)
    expected = ("NsqhaDiskRefuses", "NsqhaDiskFillsSoon", "NsqhaRefusesToLead")
    with watch.only(*expected):
        cluster.disks[leader.name].fill(leave=LOW_BYTES // 2)
        found = watch.come(*expected)
        assert found["NsqhaDiskRefuses"][0]["instance"] == leader.http
        assert found["NsqhaRefusesToLead"][0]["node"] == leader.name
        clients.go_on()  # another one leads
        cluster.disks[leader.name].free()


def a_leader_is_killed(watch: Watch, clients: Clients, cluster: WatchedCluster) -> None:
    leader = cluster.leader(TOPIC)
    expected = ("NsqhaDown", "NsqhaNodeAway", "NsqhaUnderReplicated")
    with watch.only(*expected):
        leader.kill()
        (alert,) = watch.come(*expected)["NsqhaDown"]
        assert alert["instance"] == leader.http
        clients.go_on()
        cluster.disks[leader.name].empty()
        leader.start()
        cluster.wait_isr(TOPIC, 3)


def test_only_how_long_a_rule_must_hold_is_shortened() -> None:
    rules = "      - alert: A\n        expr: rate(x[5m]) > 0\n        for: 10m\n        for: 0m\n        for: 30s\n"
    assert shortened(rules) == rules.replace("10m", "5000ms").replace("30s", "3000ms")
