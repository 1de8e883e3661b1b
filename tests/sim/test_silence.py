"""A leader that breaks no connection and says nothing: frozen, cut off, slow, or heard by some.

Each scene has one partition with three replicas and `min_isr` 2. The lease of a node lasts three seconds: that the
leader is still registered when another one leads shows that its silence was the news.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.cluster import SimCluster
from tests.sim.fault_matrix import stopping
from tests.sim.node import Machine, SimNode
from tests.sim.scenes import SELDOM, healthy, leader
from tests.sim.test_lasting_faults import lasts, meta_of

LEASE = 3.0
QUICKLY = 2.0


def followers(cluster: SimCluster) -> tuple[SimNode, SimNode]:
    leads = leader(cluster)
    first, second = [node for node in cluster.nodes if node is not leads]
    return first, second


def registered(cluster: SimCluster, node: SimNode) -> bool:
    return node.uid in cluster.metadata.store.records.nodes()


def cut_off(cluster: SimCluster, node: SimNode) -> None:
    """Its host has lost its network."""
    for name in cluster.machines:
        if name != node.name:
            cluster.net.partition(name, node.name)
    cluster.metadata.reach(node.name, False)


def replaced_before_its_lease_ends(cluster: SimCluster, node: SimNode) -> None:
    epoch, acked = meta_of(cluster).epoch, len(cluster.history.acked)
    others = [other for other in cluster.nodes if other is not node]
    cluster.until(
        lambda: any(other.replicas is not None and other.replicas.leading for other in others), QUICKLY, "another leads"
    )
    assert registered(cluster, node), "its lease did this"
    acked = len(cluster.history.acked)
    cluster.until(lambda: len(cluster.history.acked) > acked, 1.0, "a publish is acknowledged")
    assert meta_of(cluster).epoch == epoch + 1


def stays(cluster: SimCluster, node: SimNode, epoch: int) -> None:
    assert (meta_of(cluster).epoch, meta_of(cluster).leader) == (epoch, node.uid)


# ---- nobody hears it


def test_a_frozen_leader_is_replaced_before_its_lease_ends() -> None:
    with healthy() as cluster:
        frozen = leader(cluster)
        frozen.freeze()
        replaced_before_its_lease_ends(cluster, frozen)
        frozen.thaw()
        cluster.end_well()


def test_a_leader_without_publishes_is_replaced_as_well() -> None:
    """Nothing is under way on any stream."""
    with healthy(pause_seconds=1e6) as cluster:
        frozen = leader(cluster)
        cluster.run_for(5.0)
        epoch = meta_of(cluster).epoch
        frozen.freeze()
        cluster.until(lambda: meta_of(cluster).epoch > epoch, QUICKLY, "another one leads")
        assert registered(cluster, frozen)
        frozen.thaw()


def test_a_leader_whose_host_is_cut_off_is_replaced_before_its_lease_ends() -> None:
    with healthy() as cluster:
        gone = leader(cluster)
        cut_off(cluster, gone)
        replaced_before_its_lease_ends(cluster, gone)
        cluster.end_well()


def test_a_leader_of_which_nothing_leaves_is_replaced_before_its_lease_ends() -> None:
    with healthy() as cluster:
        mute = leader(cluster)
        for name in cluster.machines:
            if name != mute.name:
                cluster.net.partition(mute.name, name, both=False)
        replaced_before_its_lease_ends(cluster, mute)
        cluster.end_well()


def test_the_controller_may_be_frozen_with_it() -> None:
    """Then the lease of the controller is what it takes."""
    with healthy(controllers=2) as cluster:
        frozen, epoch = leader(cluster), meta_of(cluster).epoch
        (active,) = [each for each in cluster.controllers if each.machine() is not None]
        active.freeze()
        frozen.freeze()
        cluster.until(lambda: meta_of(cluster).epoch > epoch, LEASE + 5.0, "another one leads")
        active.thaw()
        frozen.thaw()
        cluster.end_well()


# ---- it is slow, or heard by enough


def test_a_leader_that_is_slow_goes_on() -> None:
    with healthy() as cluster:
        slow, epoch = leader(cluster), meta_of(cluster).epoch
        end = stopping(stopped=0.8, running=0.4)(cluster, slow)
        cluster.run_for(60.0)
        stays(cluster, slow, epoch)
        end()
        cluster.end_well()


def test_a_leader_that_one_follower_hears_goes_on() -> None:
    """The controller and the other follower do not, nor is it heard by their pings: only what it sends would arrive."""
    with healthy() as cluster:
        half_heard, epoch = leader(cluster), meta_of(cluster).epoch
        deaf, _ = followers(cluster)
        for controller in cluster.controllers:
            cluster.net.partition(controller.name, half_heard.name)
        cluster.net.partition(half_heard.name, deaf.name)
        cluster.run_for(6.0)
        stays(cluster, half_heard, epoch)
        cluster.end_well()


def test_a_leader_whose_follower_hears_half_of_it_goes_on() -> None:
    """What this one sends does not arrive: pings are not answered, but batches come."""
    with healthy(pause_seconds=2.0) as cluster:
        heard, epoch = leader(cluster), meta_of(cluster).epoch
        follower, _ = followers(cluster)
        cluster.net.partition(follower.name, heard.name, both=False)
        lasts(cluster)
        assert meta_of(cluster).epoch == epoch


def test_a_controller_that_alone_is_deaf_elects_nobody() -> None:
    with healthy(pause_seconds=2.0) as cluster:
        heard, epoch = leader(cluster), meta_of(cluster).epoch
        for controller in cluster.controllers:
            cluster.net.partition(heard.name, controller.name, both=False)
        lasts(cluster)
        stays(cluster, heard, epoch)


def test_a_leader_that_answers_no_ping_of_a_follower_for_a_while_goes_on() -> None:
    """Its links to both are cut; the controller hears it."""
    with healthy() as cluster:
        heard, epoch = leader(cluster), meta_of(cluster).epoch
        for follower in followers(cluster):
            cluster.net.partition(heard.name, follower.name)
        cluster.run_for(2.5)
        stays(cluster, heard, epoch)
        cluster.end_well()


# ---- the witnesses do not run themselves


def everybody_stops(cluster: SimCluster, seconds: float, *, last: Machine, later: float) -> None:
    """The whole machine stands; afterwards this process is the last to run."""
    machines = [*cluster.nodes, *cluster.controllers]
    for machine in machines:
        machine.freeze()
    cluster.run_for(seconds)
    for machine in machines:
        if machine is not last:
            machine.thaw()
    cluster.run_for(later)
    last.thaw()


@pytest.mark.parametrize("pause_seconds", [0.1, 1e6], ids=["busy", "idle"])
def test_a_pause_of_the_whole_machine_is_no_silence(pause_seconds: float) -> None:
    """Though the leader runs again a moment later than those who listen to it."""
    with healthy(pause_seconds=pause_seconds) as cluster:
        late, epoch = leader(cluster), meta_of(cluster).epoch
        for n in range(20):
            everybody_stops(cluster, 2.0, last=late, later=0.5)
            cluster.run_for(1.5 + n * 0.03)  # at other moments between two pings
        stays(cluster, late, epoch)
        cluster.end_well()


def test_witnesses_that_are_late_at_each_look_count_nothing() -> None:
    """Nobody can say then whether the leader is frozen, until its lease ends."""
    with healthy() as cluster:
        frozen, epoch = leader(cluster), meta_of(cluster).epoch
        ends = [
            stopping(stopped=0.4, running=0.03)(cluster, machine)
            for machine in (*followers(cluster), *cluster.controllers)
        ]
        frozen.freeze()
        cluster.run_for(1.9)
        frozen.thaw()
        cluster.run_for(1.0)
        stays(cluster, frozen, epoch)
        for end in ends:
            end()
        cluster.end_well()


# ---- it comes back each time


def test_a_leader_that_stops_again_and_again_changes_few_leaders() -> None:
    """For longer than a silence takes, and for less than its lease."""
    with healthy(pause_seconds=1.0) as cluster:
        flapping, epoch = leader(cluster), meta_of(cluster).epoch
        end: Callable[[], None] = stopping(stopped=1.4, running=8.6)(cluster, flapping)
        lasts(cluster, heal=end)
        assert epoch < meta_of(cluster).epoch <= epoch + 9 + 1, "ever more rarely, and once more when all is well"


# ---- a host that loses its power ends no stream


def back_before_pings_tell(cluster: SimCluster, node: SimNode) -> None:
    """It loses its power and is back at once; it can register when its old lease is over."""
    node.end("power loss", power=True)
    node.start()
    cluster.until(lambda: node.joined, LEASE + 1.0, "it is registered")


@pytest.mark.parametrize("seed", range(4))  # pings tell 4 to 8 s later
def test_a_member_that_nothing_commits_without_is_pushed_to_once_it_registers(seed: int) -> None:
    with healthy(seed=seed, operations={"settings": SELDOM}) as cluster:
        follower, _ = followers(cluster)
        topics = leader(cluster).broker.topics  # type: ignore[union-attr]
        leader(cluster).loop.create_task(topics.change_settings("t0", {"min_isr": 3}))
        cluster.until(lambda: meta_of(cluster).min_isr == 3, 2.0, "nothing commits without all")
        back_before_pings_tell(cluster, follower)
        assert len(meta_of(cluster).isr) == 3
        acked = len(cluster.history.acked)
        cluster.until(lambda: len(cluster.history.acked) > acked, 1.0, "publishes are acknowledged")
        cluster.end_well()
