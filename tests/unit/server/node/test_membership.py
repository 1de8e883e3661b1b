"""A node that follows the records of its cluster goes on doing so, whatever one of them did to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.clock import ManualClock
from nsqha.election.model import NodeInfo, PartitionMeta, Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.election.session import View
from nsqha.errors import LimitReached, Unavailable
from nsqha.server.node.cluster.membership import Membership
from nsqha.server.node.cluster.placement import ClusterPlacement
from nsqha.server.node.cluster.records import DROP_AGAIN_SECONDS
from nsqha.server.node.cluster.registration import REJOIN_SECONDS
from nsqha.server.routing.leaders import LeaderAt
from tests.fakes.peers import FakePeers
from tests.unit.server.replica_rig import pause, run


def cluster(store: Any = None) -> Membership:
    """What a test does not need of the store and the node is not there; `store.watch.view` may be set later."""
    return Membership(
        cast(Any, store or SimpleNamespace(watch=SimpleNamespace())),
        loop=asyncio.get_running_loop(),
        clock=ManualClock(),
        folder=cast(Any, None),
        node=1,
        cluster_id=9,
        peers=cast(Any, FakePeers(asyncio.get_running_loop())),
        routing_peers=cast(Any, FakePeers(asyncio.get_running_loop())),
        ttl_s=5.0,
    )


def placement(made: Membership, partitions_max: int = 0) -> ClusterPlacement:
    options = SimpleNamespace(max_node_partitions=partitions_max)
    nothing = cast(
        Any, SimpleNamespace(options=options, rng=None, metadata=SimpleNamespace(records=None), changes=None)
    )
    return ClusterPlacement(nothing, nothing, made, ManualClock())


def test_a_record_that_can_not_be_dealt_with_is_tried_again_and_others_are_looked_at() -> None:
    async def scenario() -> None:
        made = cluster()
        looked: list[set[str]] = []
        errors: list[Exception] = [OSError("a folder that can not be removed"), Unavailable("not now")]

        def look_at(names: set[str]) -> None:
            looked.append(set(names))
            if errors:
                raise errors.pop(0)

        made.news.look_at = look_at  # type: ignore[method-assign]
        task = asyncio.ensure_future(made.news.follow())
        made.news.named("topics/a")
        await pause(REJOIN_SECONDS * 2.5)
        assert looked == [{"topics/a"}] * 3
        made.news.named("topics/b")
        await pause()
        assert looked[-1] == {"topics/b"} and not task.done()

    run(scenario)


def test_who_can_not_be_told_of_a_change_keeps_it_from_nobody_else() -> None:
    async def scenario() -> None:
        made, told = cluster(), []

        def broken(name: str) -> None:
            raise RuntimeError("a bug")

        made.leaders.when_changed(broken)
        made.leaders.when_changed(told.append)
        made.leaders.changed("t")
        assert told == ["t"]

    run(scenario)


class Dropping:
    """Topics of a node on which what is left of `stays` can not be removed."""

    def __init__(self, stays: int, error: Exception) -> None:
        self.stays = stays
        self.error = error
        self.slowly = 0.0
        self.tried: list[int] = []
        self.adopted: list[str] = []

    async def dropped(self, tombstone: Tombstone) -> None:
        self.tried.append(tombstone.uid)
        await asyncio.sleep(self.slowly)
        if tombstone.uid == self.stays:
            raise self.error

    def adopt(self, topic: Versioned[TopicRecord]) -> None:
        self.adopted.append(topic.record.name)

    def __iter__(self) -> Iterator[str]:
        return iter(())


@pytest.mark.parametrize("error", [OSError(1, "Operation not permitted"), Unavailable("etcd is away")])
def test_what_can_not_be_removed_of_a_deleted_topic_keeps_nobody_from_a_role(error: Exception) -> None:
    async def scenario() -> None:
        made = cluster()
        tombstones = {uid: Tombstone(f"old{uid}", uid, 1, (1,)) for uid in (5, 6)}
        view = View(9, {"t": Versioned(TopicRecord("t", 7, 1), 8)}, tombstones)
        cast(Any, made.store).watch.view = lambda: view
        settled: list[str] = []

        async def recover(topic: Versioned[TopicRecord]) -> None:
            settled.append(topic.record.name)

        def settle(topic: Versioned[TopicRecord]) -> None:
            settled.append(topic.record.name)

        made.replicas = cast(Any, SimpleNamespace(begin_to_settle=settle, recover=recover, nodes_changed=lambda: None))
        made.topics = cast(Any, topics := Dropping(5, error))
        await made.recover()
        assert settled == ["t"] and topics.tried == [5, 6]
        task = asyncio.ensure_future(made.news.follow())
        made.news.named("")
        await pause()
        assert settled == ["t", "t"] and topics.tried == [5, 6] * 2
        await pause(DROP_AGAIN_SECONDS)
        assert topics.tried == [5, 6] * 2 + [5] and settled == ["t", "t"]
        topics.slowly = 60.0
        made.news.named("")
        await pause()
        assert settled == ["t"] * 3, "a role waits for files that go"
        made.news.named("")
        await pause(DROP_AGAIN_SECONDS)
        assert topics.tried == [5, 6] * 2 + [5] + [5, 6], "one removal of a topic at a time"
        task.cancel()

    run(scenario)


def test_a_record_that_this_node_is_about_to_have_written_is_left_to_who_writes_it() -> None:
    async def scenario() -> None:
        made = cluster()
        settled: list[str] = []

        def settle(topic: Any) -> None:
            settled.append(topic.record.name)

        made.topics = cast(Any, SimpleNamespace(adopt=lambda topic: None))
        made.replicas = cast(Any, SimpleNamespace(begin_to_settle=settle, nodes_changed=lambda: None))
        topics = {name: Versioned(TopicRecord(name, 5, 3), 1) for name in "tu"}
        cast(Any, made.store).watch.view = lambda: View(topics=topics)
        task = asyncio.ensure_future(made.news.follow())
        with made.news.being_made("t"):
            made.news.named("topics/t")
            made.news.named("topics/u")
            await pause()
            assert settled == ["u"]
        await pause()
        assert settled == ["u", "t"], "it may be a later record that was named"
        with made.news.being_made("t"):
            await pause()
        await pause()
        assert settled == ["u", "t"]
        task.cancel()

    run(scenario)


def test_roles_are_taken_while_a_change_waits_for_a_node_that_is_gone() -> None:
    async def scenario() -> None:
        made = cluster()
        settled: list[str] = []
        gone: list[str] = []

        def settle(topic: Any) -> None:
            settled.append(topic.record.name)

        class Topics(dict[str, Any]):
            def adopt(self, topic: Any) -> None:
                pass

            async def vanished(self, topic: Any) -> None:
                gone.append(topic)
                await asyncio.Event().wait()

        made.topics = cast(Any, Topics({"e#ephemeral": "the topic", "f#ephemeral": "another"}))
        made.replicas = cast(Any, SimpleNamespace(begin_to_settle=settle, nodes_changed=lambda: None))
        view = View(topics={"t": Versioned(TopicRecord("t", 5, 3), 1)})
        cast(Any, made.store).watch.view = lambda: view
        task = asyncio.ensure_future(made.news.follow())
        for names in (("topics/e#ephemeral", "topics/t"), ("",)):
            for name in names:
                made.news.named(name)
            await pause()
        assert settled == ["t", "t"] and gone == ["the topic", "the topic", "another"]
        task.cancel()

    run(scenario)


def test_a_node_that_lost_its_lease_joins_again_though_an_attempt_fails_in_any_way() -> None:
    async def scenario() -> None:
        made = cluster()
        errors: list[Exception] = [RuntimeError("of a library"), Unavailable("etcd is away")]
        tries: list[int] = []

        async def register() -> None:
            tries.append(1)
            if errors:
                raise errors.pop(0)

        made.registration.register = register  # type: ignore[method-assign]
        await made.registration.rejoin()
        assert len(tries) == 3 and made.news._news.is_set()

    run(scenario)


class FlakyStore:
    """Sessions that can not register at first, and say that they are lost whenever the test wants."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.lost: list[Any] = []
        self.closed = 0
        self.watch = self.sessions = self

    def view(self) -> View:
        return View(topics={"t": Versioned(TopicRecord("t", 5, 3), 1)})

    def open(self, *, ttl_s: float, lost: Any) -> Any:
        self.lost.append(lost)
        return self

    def register(self, info: NodeInfo) -> NodeInfo:
        if self.failures:
            self.failures -= 1
            raise Unavailable("etcd is away")
        return replace(info, registration=len(self.lost))

    def fresh(self, now: float) -> bool:
        return True

    def update(self, info: NodeInfo) -> NodeInfo:
        return info

    def close(self) -> None:
        self.closed += 1


def test_of_two_things_that_a_node_says_of_itself_at_once_none_is_lost() -> None:
    """Its disk, its clock and its certificates are looked at apart from each other."""

    async def scenario() -> None:
        made = cluster(FlakyStore(failures=0))
        made.registration.run = lambda call: asyncio.sleep(0, call())  # type: ignore[assignment, method-assign, return-value]
        made.replicas = cast(Any, SimpleNamespace(registered=lambda registration: None, registration=0))
        made.registration.info = NodeInfo(1, name="n")
        await made.registration.register()
        registration = made.registration
        await asyncio.gather(registration.update(declines="its clock"), registration.update(trouble="a.pem expired"))
        assert registration.info is not None
        assert (registration.info.declines, registration.info.trouble) == ("its clock", "a.pem expired")

    run(scenario)


def test_a_session_that_was_given_up_takes_no_lease_with_it() -> None:
    async def scenario() -> None:
        made = cluster(store := FlakyStore(failures=1))
        told: list[str] = []
        made.leaders.when_changed(told.append)
        made.registration.run = lambda call: asyncio.sleep(0, call())  # type: ignore[assignment, method-assign, return-value]
        made.replicas = cast(Any, SimpleNamespace(registered=lambda registration: None, registration=0))
        made.registration.info = NodeInfo(1, name="n")
        with pytest.raises(Unavailable):
            await made.registration.register()
        assert store.closed == 1 and not made.registration.has_lease
        await made.registration.register()
        assert made.registration.has_lease
        store.lost[0]()
        await pause()
        assert made.registration.has_lease and len(store.lost) == 2 and not told
        store.lost[1]()
        await pause()
        assert told == ["t"], "whoever waits for a leader may ask other nodes now"
        assert len(store.lost) == 3 and made.registration.has_lease  # joined again

    run(scenario)


@pytest.mark.parametrize("fails", [True, False])
def test_a_lease_that_ends_while_its_node_registers_has_it_join_once_more(fails: bool) -> None:
    async def scenario() -> None:
        class Slow(FlakyStore):
            """Its first lease is over before the node is registered, or the moment it is."""

            def register(self, info: NodeInfo) -> NodeInfo:
                if len(self.lost) == 1:
                    self.lost[0]()
                return super().register(info)

        made = cluster(store := Slow(failures=int(fails)))
        made.registration.run = lambda call: asyncio.sleep(0.1, call())  # type: ignore[assignment, method-assign, return-value]
        made.replicas = cast(Any, SimpleNamespace(registered=lambda registration: None, registration=0))
        made.registration.info = NodeInfo(1, name="n")
        await made.registration.rejoin()
        await pause(10 * REJOIN_SECONDS)
        assert len(store.lost) == 2 and store.closed == 1 and made.registration.has_lease
        store.lost[1]()
        await pause(10 * REJOIN_SECONDS)
        assert len(store.lost) == 3 and made.registration.has_lease, "the session that counts is known by its end"

    run(scenario)


@pytest.mark.parametrize(
    ("revision", "uid", "over"), [(8, 0, False), (9, 0, True), (9, 7, False), (9, 6, True), (20, 7, False)]
)
def test_a_topic_is_over_where_the_watch_is_behind_its_record_and_does_not_have_it(
    revision: int, uid: int, over: bool
) -> None:
    async def scenario() -> None:
        made = cluster()
        topics = {"t": Versioned(TopicRecord("t", uid, 3), 5)} if uid else {}
        cast(Any, made.store).watch.view = lambda: View(revision, topics)
        assert placement(made).has_seen_end_of(Versioned(TopicRecord("t", 7, 3), 9)) is over

    run(scenario)


def test_only_a_partition_made_below_its_floor_has_acknowledged_nothing() -> None:
    async def scenario() -> None:
        made = cluster()
        nodes = {n: NodeInfo(n, host=f"h{n}") for n in (1, 2, 3)}
        cast(Any, made.store).watch.view = lambda: SimpleNamespace(nodes=nodes, topics={})
        made.replicas = cast(Any, SimpleNamespace(registration=4))
        made.registration.info = nodes[1]
        three = placement(made).placed(TopicSettings(partitions=2), {0: 77})
        assert three[0].isr == {1: 77} and three[0].nothing_acked
        assert not three[1].nothing_acked, "led by whom the controller elects: no log is named before it exists"
        assert not placement(made).placed(TopicSettings(min_isr=1), {0: 77})[0].nothing_acked

    run(scenario)


def test_a_node_that_has_not_joined_leads_nothing_new() -> None:
    async def scenario() -> None:
        made = cluster()
        nodes = {n: NodeInfo(n, host=f"h{n}", joining="" if n != 1 else "no connection") for n in (1, 2, 3)}
        view = SimpleNamespace(nodes=nodes, topics={})
        cast(Any, made.store).watch.view = lambda: view
        made.replicas = cast(Any, SimpleNamespace(registration=4))
        made.registration.info = nodes[1]
        (meta,) = placement(made).placed(TopicSettings(), {0: 77}).values()
        assert meta.leader == 0 and set(meta.replicas) == {2, 3} and not meta.isr
        with pytest.raises(Unavailable, match="joining"):
            placement(made).placed(TopicSettings(), {0: 77}, alone=True)
        view.nodes = {1: nodes[1]}
        with pytest.raises(Unavailable, match="no node can take replicas now; this one is joining: no connection"):
            placement(made).placed(TopicSettings(), {0: 77})
        view.nodes = nodes
        made.registration.info = NodeInfo(1, host="h1")
        (meta,) = placement(made).placed(TopicSettings(), {0: 77}).values()
        assert meta.leader == 1, "its own record counts before the watch has brought it"

    run(scenario)


def test_no_node_of_a_cluster_gets_more_partitions_than_it_may_have() -> None:
    async def scenario() -> None:
        made = cluster()
        nodes = {n: NodeInfo(n, host=f"h{n}") for n in (1, 2)}
        record = TopicRecord("t", 7, 3, partitions={0: PartitionMeta(replicas=(1, 2)), 1: PartitionMeta(replicas=(2,))})
        view = SimpleNamespace(nodes=nodes, topics={"t": Versioned(record, 5)})
        cast(Any, made.store).watch.view = lambda: view
        made.replicas = cast(Any, SimpleNamespace(registration=4))
        made.registration.info = nodes[1]
        assert len(placement(made, 3).placed(TopicSettings(partitions=1), {0: 77})) == 1
        refusal = "node 0000000000000002 has 2 partitions and would have 4, more than the 3 that --max-node-partitions"
        with pytest.raises(LimitReached, match=refusal):
            placement(made, 3).placed(TopicSettings(partitions=2), {0: 77})
        assert len(placement(made, 3).placed(TopicSettings(partitions=1, replicas=1), {0: 77}, alone=True)) == 1

    run(scenario)


def test_hints_say_where_to_send_and_not_who_leads_by_the_record() -> None:
    async def scenario() -> None:
        made = cluster()
        nodes = {n: NodeInfo(n, grpc_address=f"n{n}:4152", peer_address=f"n{n}:4153") for n in (1, 2)}

        def view_of(epoch: int) -> View:
            record = TopicRecord("t", 5, 3, partitions={0: PartitionMeta(leader=2, epoch=epoch)})
            return View(topics={"t": Versioned(record, 1)}, nodes=nodes)

        view = view_of(4)
        cast(Any, made.store).watch.view = lambda: view
        by_record = LeaderAt(2, "n2:4152", "n2:4153", 4, 5)
        assert made.leaders.leader("t", 0) == made.leaders.recorded("t", 0) == by_record
        hint = LeaderAt(3, "n3:4152", "n3:4153", 5, 5)
        made.registration._session = cast(Any, SimpleNamespace(fresh=lambda now: True))
        assert not made.leaders.not_led("t", 0, by=2, hint=hint), "with a lease nobody is asked"
        assert (made.leaders.leader("t", 0), made.leaders.recorded("t", 0)) == (hint, by_record)
        assert made.leaders.alive(3) and not made.leaders.alive(4)
        assert not made.leaders.not_led("other", 0) and made.leaders.leader("other", 0) is None
        view = view_of(5)
        assert made.leaders.leader("t", 0) == LeaderAt(2, "n2:4152", "n2:4153", 5, 5), "the record has caught up"
        made.news.look_at({"nothing"})
        assert not made.leaders.alive(3)

    run(scenario)
