"""Faults that stay for ten minutes: the cluster serves while they last, without one change of leader after the other.

These are the scenes that are no cell of the matrix (`fault_matrix`). Each has one partition with three replicas and
`min_isr` 2. The measure: acknowledgements go on wherever most of the in-sync replicas and the metadata store can serve,
at most three epochs a minute, and all is well afterwards.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

import pytest

from nsqha.election.model import PartitionMeta
from nsqha.errors import Unavailable
from tests.sim.cluster import SimCluster
from tests.sim.node import Machine, SimNode
from tests.sim.scenes import healthy, leader

LASTS = 600.0
EPOCHS_A_MINUTE = 3
PAUSE = 2.0  # of each publisher between two messages: ten minutes of more would only take longer
SETTLES = 15.0  # pings and leases end, and a leader that does not serve is noticed


def meta_of(cluster: SimCluster) -> PartitionMeta:
    ((_, meta),) = cluster.metas()
    assert isinstance(meta, PartitionMeta)
    return meta


def lasts(cluster: SimCluster, *, served: bool = True, heal: Callable[[], None] = lambda: None) -> None:
    """The fault of the scene stays: epochs are counted from its beginning, acknowledgements from SETTLES on."""
    before = meta_of(cluster).epoch
    cluster.run_for(SETTLES)
    for minute in range(int(LASTS // 60)):
        epoch, acked = meta_of(cluster).epoch, len(cluster.history.acked)
        cluster.run_for(60.0)
        assert meta_of(cluster).epoch - epoch <= EPOCHS_A_MINUTE, f"in minute {minute}"
        assert not served or len(cluster.history.acked) > acked, f"in minute {minute}"
    assert meta_of(cluster).epoch - before <= EPOCHS_A_MINUTE * (LASTS + SETTLES) / 60
    heal()
    cluster.end_well()


# ---- one link, one direction, one port


def peers_of(cluster: SimCluster, machine: Machine) -> list[Machine]:
    return [node for node in cluster.nodes if node is not machine]


def from_controllers(cluster: SimCluster, machine: Machine) -> None:
    for controller in cluster.controllers:
        cluster.net.partition(controller.name, machine.name)


def from_peers(cluster: SimCluster, machine: Machine) -> None:
    for other in peers_of(cluster, machine):
        cluster.net.partition(other.name, machine.name)


def peer_port(cluster: SimCluster, machine: Machine) -> None:
    cluster.net.close_peer_port(machine.name)


def test_a_controller_that_alone_has_lost_the_leader_leaves_it_alone() -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        before = meta_of(cluster)
        from_controllers(cluster, leader(cluster))
        lasts(cluster)
        assert (meta_of(cluster).epoch, meta_of(cluster).leader) == (before.epoch, before.leader)


def test_a_leader_whose_peer_port_is_closed_hands_over_and_gets_it_back() -> None:
    """It answers calls and commits, but other brokers can not forward publishes to it."""
    with healthy(pause_seconds=PAUSE) as cluster:
        closed, epoch = leader(cluster), meta_of(cluster).epoch
        peer_port(cluster, closed)
        cluster.until(lambda: meta_of(cluster).leader not in (0, closed.uid), 30.0, "another one leads")
        cluster.run_for(LASTS)
        assert meta_of(cluster).epoch == epoch + 1
        cluster.net.heal_all()
        cluster.until(lambda: meta_of(cluster).leader == closed.uid, 60.0, "it is the first replica")
        cluster.end_well()


# ---- nodes that are elected and can not serve


def down(cluster: SimCluster, node: SimNode) -> None:
    cluster.keep_down.add(node.name)
    node.end("killed")


def can_not_lead(node: SimNode) -> None:
    """What a leader begins with fails, until its process ends."""
    assert node.replicas is not None

    def refuse(*_: object) -> None:
        raise Unavailable("no descriptor is left")

    node.replicas._runtime.opener.partition = refuse  # type: ignore[assignment]


def can_lead_again(nodes: Iterable[SimNode]) -> None:
    for node in nodes:
        assert node.replicas is not None
        del node.replicas._runtime.opener.partition


def test_another_replica_leads_where_the_one_that_is_elected_can_not() -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        dead, (heir, _) = leader(cluster), [node for node in cluster.nodes if node is not leader(cluster)]
        can_not_lead(heir)
        down(cluster, dead)
        cluster.until(
            lambda: any(node.up and node.replicas and node.replicas.leading for node in cluster.nodes), 15.0, "-"
        )
        assert leader(cluster) is not heir
        lasts(cluster)


def test_few_epochs_are_spent_while_no_replica_can_lead() -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        dead, *others = sorted(cluster.nodes, key=lambda node: node is not leader(cluster))
        for node in others:
            can_not_lead(node)
        down(cluster, dead)
        lasts(cluster, served=False, heal=lambda: can_lead_again(others))


def test_a_leader_that_never_reached_its_followers_is_replaced() -> None:
    """It restarts while its links to them are cut: they have had no stream from this life, so none can be lost."""
    with healthy(pause_seconds=PAUSE) as cluster:
        cut_off = leader(cluster)
        for controller in cluster.controllers:
            controller.freeze()
        from_peers(cluster, cut_off)
        cut_off.end("killed")
        cut_off.start()
        cluster.until(lambda: cut_off.joined, 10.0, "it is back")
        for controller in cluster.controllers:
            controller.thaw()
        lasts(cluster)


def test_a_replica_outside_of_the_isr_helps_where_the_leader_reaches_none() -> None:
    """The old leader comes back when it has left the ISR, of which one member leads and does not reach the other."""
    with healthy(pause_seconds=PAUSE) as cluster:
        dead, *others = sorted(cluster.nodes, key=lambda node: node is not leader(cluster))
        cluster.net.partition(*[node.name for node in others])
        down(cluster, dead)
        cluster.until(lambda: meta_of(cluster).leader != dead.uid, 5.0, "another one is elected")
        (elected,) = [node for node in others if node.uid == meta_of(cluster).leader]
        assert len(meta_of(cluster).isr) == 2, "else nothing is shown"
        from_peers(cluster, elected)
        cluster.keep_down.clear()
        dead.start()
        lasts(cluster)


# ---- disks

Fault = Callable[[SimNode], None]


def full(node: SimNode) -> None:
    node.storage.stays("pwrite", "create", "allocate", code=errno.ENOSPC)


def below_its_watermark(node: SimNode) -> None:
    node.disk_low(True)


def unwritable(node: SimNode) -> None:
    """Data can not be written, but the journal can: it lies elsewhere on the disk."""
    node.storage.stays("pwrite", path="segment", code=errno.EIO)


def out_of_descriptors(node: SimNode) -> None:
    node.storage.descriptors = 0


def slow(node: SimNode) -> None:
    node.disk_seconds = 5.0


DISKS: list[Fault] = [full, below_its_watermark, unwritable, slow]


@pytest.mark.parametrize("fault", DISKS, ids=lambda fault: fault.__name__)
def test_one_of_two_good_disks_leads_and_gives_back_what_it_got(fault: Fault) -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        bad = leader(cluster)
        fault(bad)
        cluster.run_for(30.0)
        assert leader(cluster) is not bad
        acked = len(cluster.history.acked)
        cluster.run_for(20.0)
        assert len(cluster.history.acked) - acked >= 5
        bad.storage.heal()
        bad.disk_low(False)
        bad.disk_seconds = 0.001
        cluster.until(lambda: leader(cluster) is bad, 120.0, "it is the first replica")
        cluster.end_well()


@pytest.mark.parametrize("fault", [full, below_its_watermark], ids=lambda fault: fault.__name__)
def test_a_leader_stays_where_all_disks_are_bad(fault: Fault) -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        before = meta_of(cluster).epoch
        for node in cluster.nodes:
            fault(node)
        lasts(cluster, served=False)
        assert fault is full or meta_of(cluster).epoch - before <= EPOCHS_A_MINUTE


def test_a_follower_whose_disk_is_low_does_not_get_the_lead_of_another() -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        first, second, third = sorted(cluster.nodes, key=lambda node: meta_of(cluster).replicas.index(node.uid))
        second.disk_low(True)
        first.disk_low(True)
        cluster.run_for(SETTLES)
        assert leader(cluster) is third
        lasts(cluster)


def test_two_slow_disks_do_not_pass_the_lead_to_and_fro() -> None:
    with healthy(pause_seconds=PAUSE) as cluster:
        first, second, _ = sorted(cluster.nodes, key=lambda node: meta_of(cluster).replicas.index(node.uid))
        slow(first)
        slow(second)
        lasts(cluster)


def test_a_leader_without_descriptors_goes_on_and_is_not_poisoned() -> None:
    """It can not begin new files: what it has open grows, or it hands over."""
    with healthy(pause_seconds=PAUSE, segment_bytes=2 << 10) as cluster:
        first = leader(cluster)
        out_of_descriptors(first)

        def heal() -> None:
            first.storage.descriptors = 1 << 20

        lasts(cluster, heal=heal)
        assert first.lives == 1, "it was not poisoned"
