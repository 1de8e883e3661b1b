"""What publishers rely on of a partition and of the view of who leads: the real ones and those of tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha import hot
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, Versioned
from nsqha.election.session import View
from nsqha.server.node.cluster.leaders import ClusterLeaders
from nsqha.server.partition.partition import Partition
from nsqha.server.routing.leaders import LeaderAt, Leaders
from nsqha.server.runtime.budget import PublishBudget
from tests.fakes.loop import VirtualLoop
from tests.fakes.partitions import CLUSTER, TOPIC_UID, FakeLeaders, FakePartition, bodies, topic
from tests.fakes.peers import FakePeers
from tests.unit.server.shell_rig import Outcome, PartitionRig


class Published:
    """A partition, what stores its publishes, and what it has stored."""

    def __init__(self, partition: Any, budget: PublishBudget, store: Callable[[], None], stored: Any) -> None:
        self.partition = partition
        self.budget = budget
        self.store = store
        self._stored = stored

    @property
    def stored(self) -> list[bytes]:
        found: list[bytes] = self._stored()
        return found

    def publish(self, *bodies_: bytes, **how: Any) -> Outcome:
        outcome = Outcome()
        self.partition.publish(b"".join(map(hot.frame, bodies_)), outcome, **how)
        return outcome


def real() -> Published:
    rig = PartitionRig()

    def stored() -> list[bytes]:
        return [bytes(rig.log.message(offset)[34:]) for offset in range(rig.log.end.offset)]

    return Published(rig.partition, rig.budget, rig.disk.sync, stored)


def fake() -> Published:
    loop = VirtualLoop()
    budget = PublishBudget(loop, 1 << 20)
    partition = FakePartition(loop, budget)
    return Published(partition, budget, partition.store, lambda: partition.log)


@pytest.fixture(params=[real, fake])
def published(request: pytest.FixtureRequest) -> Published:
    found: Published = request.param()
    return found


def described(method: Any) -> Any:
    parameters = inspect.signature(method).parameters.values()
    return inspect.iscoroutinefunction(method), [(p.name, p.kind, p.default) for p in parameters]


def test_the_fake_partition_is_called_as_the_real_one() -> None:
    fake_one, real_one = fake().partition, real().partition
    for name in ("publish", "abandon"):
        assert described(getattr(fake_one, name)) == described(getattr(real_one, name)), name
    assert isinstance(inspect.getattr_static(Partition, "closed"), property)
    for name in ("closed", "number", "life", "queue"):
        assert type(getattr(fake_one, name)) is type(getattr(real_one, name)), name


def test_a_publish_is_answered_when_it_is_stored_and_not_before(published: Published) -> None:
    outcome = published.publish(b"one", b"two")
    assert outcome.answers == [] and published.budget.used > 0
    published.store()
    assert outcome.answers == ["OK"] and published.stored == [b"one", b"two"] and published.budget.used == 0


def test_publishes_are_stored_in_their_order(published: Published) -> None:
    outcomes = [published.publish(b"%d" % n, delay_ms=None, waited=float(5 - n)) for n in range(5)]
    published.store()
    later = published.publish(b"later")
    published.store()
    assert [outcome.answers for outcome in [*outcomes, later]] == [["OK"]] * 6
    assert published.stored == [b"0", b"1", b"2", b"3", b"4", b"later"]


def test_what_a_publisher_puts_into_the_queue_itself_is_stored_in_its_place(published: Published) -> None:
    first = published.publish(b"first")
    own = Outcome()
    published.partition.queue.add(hot.frame(b"own"), own, 0.0, None)
    last = published.publish(b"last")
    published.store()
    assert first.answers == own.answers == last.answers == ["OK"]
    assert published.stored == [b"first", b"own", b"last"]


def test_an_abandoned_partition_refuses_what_waits_and_what_comes(published: Published) -> None:
    waiting = published.publish(b"waiting")
    assert not published.partition.closed and not published.partition.queue.closed
    published.partition.abandon("another leader was elected")
    late = published.publish(b"late")
    assert waiting.answers == late.answers == ["not stored: another leader was elected"]
    assert published.partition.closed and published.partition.queue.closed
    assert published.budget.used == 0 and published.stored == []


def test_the_fake_says_for_each_publish_what_becomes_of_it() -> None:
    published = fake()
    partition = published.partition
    outcomes = [published.publish(b"%d" % n, delay_ms=n or None, waited=0.5 * n) for n in range(3)]
    partition.waiting.pop(1).stored()
    partition.refuse("not stored: the disk is full")
    full = "not stored: the disk is full"
    assert [outcome.answers for outcome in outcomes] == [[full], ["OK"], [full]]
    assert partition.log == [b"1"] and partition.bodies == [b"0", b"1", b"2"] and published.budget.used == 0
    assert partition.delays == [None, 1, 2] and partition.waited == [0.0, 0.5, 1.0]
    partition.at_once = True
    assert published.publish(b"3").answers == ["OK"]
    assert bodies(hot.frame(b"a") + hot.frame(b"")) == [b"a", b""]


def test_a_topic_of_tests_is_the_real_one() -> None:
    partition = fake().partition
    made = topic(None, partition)
    assert made.leads(0) is partition and made.leads(1) is None and made.record.uid == TOPIC_UID
    assert topic(TopicRecord("t#ephemeral", 7, 3)).ephemeral and not made.ephemeral


# ---- who leads


class RealLeaders:
    """`ClusterLeaders` over records that the test makes."""

    def __init__(self, node: int) -> None:
        self.view = View(1)
        store: Any = SimpleNamespace(view=lambda: self.view)
        loop = VirtualLoop()
        self.leaders = ClusterLeaders(
            store, node=node, cluster_id=CLUSTER, peers=FakePeers(loop), cut_off=lambda: False, spawn=loop.create_task
        )

    def appoint(self, number: int, node: int, epoch: int) -> None:
        old = self.view.topics.get("t")
        metas = dict(old.record.partitions) if old else {}
        metas[number] = PartitionMeta(leader=node, epoch=epoch)
        nodes = {
            **self.view.nodes,
            node: NodeInfo(node, broadcast_address=f"n{node}", grpc_address=f"n{node}", peer_address=f"n{node}"),
        }
        topics = {"t": Versioned(TopicRecord("t", TOPIC_UID, 3, partitions=metas), epoch)}
        self.view = View(epoch, topics, {}, nodes)
        self.leaders.changed("t")

    def register(self, node: int, registration: int) -> None:
        nodes = {**self.view.nodes, node: replace(self.view.nodes[node], registration=registration)}
        self.view = View(self.view.revision, self.view.topics, {}, nodes)

    def die(self, node: int) -> None:
        nodes = {uid: info for uid, info in self.view.nodes.items() if uid != node}
        self.view = View(self.view.revision, self.view.topics, {}, nodes)


class PlayedLeaders:
    """`FakeLeaders` as a test uses it."""

    def __init__(self, node: int) -> None:
        self.leaders = FakeLeaders(node)

    def appoint(self, number: int, node: int, epoch: int) -> None:
        self.leaders.appoint("t", number, node, epoch)

    def register(self, node: int, registration: int) -> None:
        self.leaders.registrations[node] = registration

    def die(self, node: int) -> None:
        self.leaders.dead.add(node)


@pytest.fixture(params=[RealLeaders, PlayedLeaders])
def known(request: pytest.FixtureRequest) -> Any:
    return request.param(1)


def test_the_fake_leaders_have_the_methods_of_the_real_ones() -> None:
    names = [name for name, found in vars(Leaders).items() if inspect.isfunction(found) and not name.startswith("_")]
    assert len(names) >= 7
    for name in names:
        for kind in (ClusterLeaders, FakeLeaders):
            assert described(getattr(kind, name)) == described(getattr(Leaders, name)), (kind, name)


def test_nothing_is_known_of_a_topic_without_a_record(known: Any) -> None:
    assert known.leaders.partitions("t") == 0
    assert known.leaders.leader("t", 0) is None and known.leaders.recorded("t", 0) is None
    assert not known.leaders.not_led("t", 0)
    assert (known.leaders.node, known.leaders.cluster_id) == (1, CLUSTER)


def test_the_last_record_says_who_leads(known: Any) -> None:
    known.appoint(0, 2, 1)
    known.appoint(1, 3, 4)
    known.appoint(0, 3, 5)
    assert known.leaders.leader("t", 0) == known.leaders.recorded("t", 0) == LeaderAt(3, "n3", "n3", 5, TOPIC_UID)
    assert known.leaders.leader("t", 1) == LeaderAt(3, "n3", "n3", 4, TOPIC_UID)
    assert known.leaders.leader("t", 2) is None and known.leaders.partitions("t") == 2
    assert known.leaders.name_of(3) == "n3"


def test_a_node_without_a_lease_leads_nothing(known: Any) -> None:
    known.appoint(0, 2, 1)
    assert known.leaders.alive(2)
    known.die(2)
    assert not known.leaders.alive(2)
    assert known.leaders.leader("t", 0) is None and known.leaders.recorded("t", 0) is None


def test_each_life_of_a_node_has_a_registration(known: Any) -> None:
    known.appoint(0, 2, 1)
    known.register(2, 7)
    assert known.leaders.registration(2) == 7
    known.register(2, 9)
    assert known.leaders.registration(2) == 9
    known.die(2)
    assert known.leaders.registration(2) == 0


def test_changes_are_heard_of_until_the_watch_ends(known: Any) -> None:
    heard: list[str] = []
    other: list[str] = []
    end = known.leaders.when_changed(heard.append)
    known.leaders.when_changed(other.append)
    known.appoint(0, 2, 1)
    end()
    known.appoint(0, 3, 2)
    assert heard == ["t"] and other == ["t", "t"]
