"""Operators of a simulated cluster: seek, undo, pause, empty, move, decommission, settings, delete; and what damage
asks of them.

What is asked for goes to any node and on to the leaders, as over gRPC; `Ledger` hears what was asked and what was
answered. Kinds of operations come at the rates that the seed drew, until `stop`; then `finish` takes back what would
keep messages from their consumers, and, where anything was sought, reads all channels once more from their beginning.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from lookupd.changes import MetadataChanges
from nsqha.admin import messages, replay, skipping
from nsqha.admin.fan_out import FanOut
from nsqha.election.elect import ReplicaReport
from nsqha.election.placement import PartitionName
from nsqha.election.policy import FIELDS
from nsqha.election.unclean import elect_unclean
from nsqha.errors import NsqhaError
from nsqha.pb.v1 import admin_pb2, replication_pb2
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.replica.replica_reports import reports_in
from tests.sim.ledger import LATE_SECONDS, Operation, Pause, RecordChange
from tests.sim.loop import WALL_NS
from tests.sim.policies import TO_DEAD_TOPIC, PolicyOperators, dead_to_move, drawn

if TYPE_CHECKING:
    from nsqha.election.model import PartitionMeta
    from nsqha.server.node.broker import Broker
    from nsqha.server.routing.leaders import LeaderAt
    from tests.sim.cluster import SimCluster
    from tests.sim.node import SimNode
    from tests.sim.peers import SimPeers, SimPeerServer

PATIENCE_SECONDS = 12.0  # of whoever asks
RETRY_SECONDS = 0.3


class AdminPort:
    """Seek and UndoSeek of one process: what `nsqha.admin.service` makes of them, over the simulated network."""

    def __init__(self, broker: Broker, peers: SimPeers) -> None:
        self._broker = broker
        self._peers = peers
        self._fan_out = FanOut(None if broker.cluster is None else broker.cluster.leaders, self)

    def register(self, server: SimPeerServer) -> None:
        async def seek(peer: PeerIdentity, request: Any) -> Any:
            return await self.seek(request)

        async def undo(peer: PeerIdentity, request: Any) -> Any:
            return await self.undo(request)

        async def skip(peer: PeerIdentity, request: Any) -> Any:
            return await self.skip(request)

        server.on_call("Seek", seek)
        server.on_call("UndoSeek", undo)

        async def list_messages(peer: PeerIdentity, request: Any) -> Any:
            return await self.list_messages(request)

        async def change_messages(peer: PeerIdentity, request: Any) -> Any:
            return await self.change_messages(request)

        server.on_call("SkipDamage", skip)
        server.on_call("ListMessages", list_messages)
        server.on_call("ChangeMessages", change_messages)

    async def seek(self, request: Any) -> Any:
        return await replay.seek(self._broker, request, self._fan_out)

    async def undo(self, request: Any) -> Any:
        return await replay.undo(self._broker, request, self._fan_out)

    async def skip(self, request: Any) -> Any:
        return await skipping.skip_damage(self._broker, request, self._fan_out)

    async def list_messages(self, request: Any) -> Any:
        return await messages.list_messages(self._broker, request, self._fan_out)

    async def change_messages(self, request: Any) -> Any:
        return await messages.change_messages(self._broker, request, self._fan_out)

    # ---- Others

    async def call(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        return await self._peers.call(address, rpc, request, timeout=seconds)

    def stream(self, address: str, rpc: str, request: Any, *, seconds: float) -> Any:
        raise NotImplementedError("peeking is not simulated")


class Operators:
    """All administration of one run."""

    def __init__(self, cluster: SimCluster, rng: random.Random) -> None:
        self.cluster = cluster
        self._rng = rng
        self._over = False
        self._ledger = cluster.oracle.ledger
        self._changes = MetadataChanges(cluster.metadata.store.records, cluster.metadata.store.intents, rng)
        self._policies = PolicyOperators(self, cluster, rng)
        for kind, rate in sorted(cluster.plan.operations.items()):
            self._next(kind, rate)

    def stop(self) -> None:
        """Nothing more is asked for."""
        self._over = True

    def _next(self, kind: str, rate: float) -> None:
        self.cluster.world.call_later(self._rng.expovariate(rate), self._act, kind, rate)

    def _act(self, kind: str, rate: float) -> None:
        if self._over:
            return
        self._next(kind, rate)
        act: Callable[[], str | None] = getattr(self, kind)
        what = act()
        if what is not None:
            self.cluster.count(kind)
            self.cluster.note(f"{kind} {what}")

    # ---- whom to ask, about what

    def _node(self) -> SimNode | None:
        able = [node for node in self.cluster.nodes if node.joined and not node.frozen]
        return self._rng.choice(able) if able else None

    def _topic(self) -> str:
        return self._rng.choice(self.cluster.topics)

    def _numbers(self, topic: str) -> range:
        """Of its partitions, and of one that may be added before the node is asked."""
        found, grows = self.cluster.metadata.store.records.topic(topic), "settings" in self.cluster.plan.operations
        return range(0 if found is None else len(found.record.partitions) + grows)

    def _channel(self) -> str:
        return self._rng.choice(self.cluster.channels)

    def ask(
        self,
        node: SimNode,
        what: str,
        asking: Callable[[], Awaitable[Any]],
        answered: Callable[[Any], None],
        failed: Callable[[NsqhaError], None] = lambda error: None,
    ) -> None:
        """Have the node do it; nobody hears of it if its process ends first."""
        loop, cluster = node.loop, self.cluster

        async def ask() -> None:
            try:
                answer = await asking()
            except (NsqhaError, ValueError) as error:
                cluster.note(f"{what}: {type(error).__name__}: {error}")
                cluster.count("operations refused")
                failed(error)  # type: ignore[arg-type]
            else:
                cluster.count("operations done")
                answered(answer)

        def begin() -> None:
            loop.create_task(ask())

        loop.call_soon(begin)

    # ---- seek

    def seek_start(self) -> str | None:
        return self._seek(start=True)

    def seek_end(self) -> str | None:
        return self._seek(end=True)

    def seek_offset(self) -> str | None:
        ends = [len(messages) for messages in self._ledger.messages.values()]
        return self._seek(offset=self._rng.randint(0, max([1, *ends])))

    def seek_time(self) -> str | None:
        """Back by some seconds, or to a moment that has not come."""
        seconds = self.cluster.time - self._rng.uniform(-1.0, 8.0)
        return self._seek(timestamp_ns=WALL_NS + round(seconds * 1e9), clock_skew_ns=0)

    def _seek(self, **target: Any) -> str | None:
        node, topic, channel = self._node(), self._topic(), self._channel()
        if node is None:
            return None
        request = admin_pb2.SeekRequest(topic=topic, channel=channel, target=admin_pb2.SeekTarget(**target))
        drops = 0.0 if "start" in target else float(target.get("offset", float("inf")))
        return self._move(node, "seek", topic, channel, lambda port: port.seek(request), drops, f"{target}")

    def undo_seek(self) -> str | None:
        node, topic, channel = self._node(), self._topic(), self._channel()
        if node is None:
            return None
        request = admin_pb2.UndoSeekRequest(topic=topic, channel=channel)
        return self._move(node, "undo", topic, channel, lambda port: port.undo(request), float("inf"), "")

    def _move(
        self,
        node: SimNode,
        kind: str,
        topic: str,
        channel: str,
        ask: Callable[[AdminPort], Awaitable[Any]],
        drops_below: float,
        how: str,
    ) -> str:
        port, now = node.admin, self.cluster.world.time
        assert port is not None
        operations = self.operations(kind, topic, channel, drops_below)

        def answered(reply: Any) -> None:
            for answer in reply.partitions:
                operation = operations[answer.partition]
                if answer.error:
                    continue  # nothing was done, or it is not known
                operation.ended = now()
                if kind == "seek":
                    operation.again_from = answer.to_offset
                    operation.drops_below = answer.to_offset
                elif answer.to_offset < answer.from_offset:
                    operation.again_from = answer.to_offset
                    operation.finished_excused = True
            self.cluster.note(f"{kind} of {topic}:{channel} answered: {_told(reply)}")

        self.ask(node, kind, lambda: ask(port), answered)
        return f"{topic}:{channel} at {node.name} {how}"

    def operations(
        self,
        kind: str,
        topic: str,
        channel: str,
        drops_below: float = float("inf"),
        bodies: frozenset[bytes] | None = None,
    ) -> Mapping[int, Operation]:
        now = self.cluster.world.time()
        made = {
            number: Operation(kind, topic, channel, number, now, drops_below=drops_below, bodies=bodies)
            for number in self._numbers(topic)
        }
        self._ledger.operations += made.values()
        return made

    # ---- empty

    def empty_channel(self) -> str | None:
        node, topic, channel = self._node(), self._topic(), self._channel()
        if node is None:
            return None
        broker = node.broker
        assert broker is not None
        return self._empty(node, "empty", topic, channel, lambda: broker.channels.empty(topic, channel))

    def empty_topic(self) -> str | None:
        node, topic = self._node(), self._topic()
        if node is None:
            return None
        broker = node.broker
        assert broker is not None
        return self._empty(node, "empty", topic, "", lambda: broker.channels.empty_topic(topic))

    def _empty(self, node: SimNode, kind: str, topic: str, channel: str, asking: Callable[[], Awaitable[None]]) -> str:
        operations = self.operations(kind, topic, channel)

        def answered(_: Any) -> None:
            for operation in operations.values():
                operation.ended = self.cluster.world.time()

        self.ask(node, kind, asking, answered)
        return f"{topic}:{channel} at {node.name}"

    # ---- pause

    def pause_channel(self) -> str | None:
        return self._pause(self._topic(), self._channel())

    def pause_topic(self) -> str | None:
        return self._pause(self._topic(), "")

    def _pause(self, topic: str, channel: str) -> str | None:
        """And unpause after a while."""
        node = self._node()
        if node is None:
            return None
        self.pause(node, topic, channel, True)
        self.cluster.world.call_later(self._rng.choice((0.5, 2.0, 4.0)), self._unpause, topic, channel)
        return f"{topic}:{channel} at {node.name}"

    def _unpause(self, topic: str, channel: str) -> None:
        node = self._node()
        if node is not None and not self._over:
            self.cluster.note(f"unpause {topic}:{channel} at {node.name}")
            self.pause(node, topic, channel, False)

    def pause(
        self,
        node: SimNode,
        topic: str,
        channel: str,
        paused: bool,
        done: Callable[[bool], None] = lambda done: None,
    ) -> None:
        """Ask the node for it; `done` hears whether it was."""
        now, broker = self.cluster.world.time, node.broker
        assert broker is not None
        pause = Pause(topic, channel, now(), self.epochs_known(node, topic), paused=paused)
        self._ledger.pauses.append(pause)

        async def asking() -> None:
            if channel:
                await broker.channels.pause(topic, channel, paused)
            else:
                await broker.channels.pause_topic(topic, paused)

        def answered(_: Any) -> None:
            pause.over = now()
            self.binding(pause, node)
            self.cluster.note(f"{'pause' if paused else 'unpause'} {topic}:{channel} done")
            done(True)

        def failed(error: NsqhaError) -> None:
            pause.over = now() + LATE_SECONDS
            done(False)

        self.ask(node, f"pause {paused}", asking, answered, failed)

    def binding(self, change: RecordChange, node: SimNode) -> None:
        """It was answered: which leaders go by it."""
        change.answered = self.cluster.world.time()
        known = self.epochs_known(node, change.topic)
        change.known = {number: epoch for number, epoch in change.known.items() if known.get(number) == epoch}
        metas = self.cluster.named_metas()
        change.current = {key[1]: meta.epoch for name, key, meta in metas if name == change.topic}

    def epochs_known(self, node: SimNode, topic: str) -> dict[int, int]:
        """The epochs that the node knows of a topic's partitions, of leaders that are there: a record may name one
        whose process has ended, and what that has written before is committed by the next one."""
        assert node.cluster is not None
        leaders = {n: node.cluster.leaders.leader(topic, n) for n in self._numbers(topic)}
        return {n: leader.epoch for n, leader in leaders.items() if leader is not None and self._leads(leader, n)}

    def _leads(self, leader: LeaderAt, number: int) -> bool:
        key = (leader.topic_uid, number)
        metas = dict(self.cluster.metas())
        for process in self.cluster.nodes_of({leader.node}):
            if process.up and process.replicas is not None:
                led = process.replicas.leading.get(key)
                named = (leader.epoch, process.replicas.registration)
                if led is not None and led.epoch == leader.epoch:
                    return True
                return key in metas and (metas[key].epoch, metas[key].registration) == named
        return False

    # ---- policies, single messages

    def set_policy(self) -> str | None:
        node = self._node()
        if node is None:
            return None
        return self._policies.change(node, self._topic(), self._channel(), drawn(self._rng))

    def change_messages(self) -> str | None:
        node = self._node()
        if node is None:
            return None
        act = self._rng.choice((self._policies.act_on_some, self._policies.act_on_dead))
        return act(node, self._topic(), self._channel())

    # ---- replicas

    def move(self) -> str | None:
        """Other replicas for a partition, or the same ones in another order: the first is to lead."""
        metas = self.cluster.named_metas()
        uids = [node.uid for node in self.cluster.nodes if node.joined]
        name, key, meta = self._rng.choice(metas)
        if self.cluster.metadata.is_away:
            return None
        if len(uids) < len(meta.replicas) or not meta.replicas:
            return None
        wanted = tuple(self._rng.sample(uids, len(meta.replicas)))
        self._changes.move({PartitionName(name, *key): wanted})
        return f"{name}/{key[1]} to {[self.cluster.name(uid) for uid in wanted]}"

    def decommission(self) -> str | None:
        """Take a node's replicas away for a while, if there are others for them."""
        node = self._node()
        if node is None or len(self.cluster.nodes) <= 3 or self.cluster.metadata.is_away:
            return None
        uid = node.uid
        self._changes.decommission(uid)
        self.cluster.world.call_later(self._rng.choice((1.0, 5.0)), self._changes.recommission, uid)
        return node.name

    def settings(self) -> str | None:
        """A partition more, another number of replicas, another floor."""
        node, topic = self._node(), self._topic()
        if node is None or node.broker is None:
            return None
        topics, grown = node.broker.topics, self.cluster.plan.partitions + 1
        choices: tuple[dict[str, int | None], ...] = (
            {"partitions": grown},
            {"replicas": 2, "min_isr": None},
            {"replicas": 3, "min_isr": None},
            {"replicas": None, "min_isr": 1},
            {"replicas": 3, "min_isr": 3},
        )
        changes = self._rng.choice(choices)
        self.ask(node, "settings", lambda: topics.change_settings(topic, changes), lambda _: None)
        return f"of {topic} at {node.name}: {changes}"

    # ---- damage

    def skip(self, topic: str) -> None:
        """`nsqha log skip`: what nobody has is given up, and channels go on behind it."""
        node = self._node()
        if node is not None and (port := node.admin) is not None:
            request = admin_pb2.SkipDamageRequest(topic=topic)
            told = lambda reply: self.cluster.note(f"skipped: {reply}".replace("\n", " "))  # noqa: E731
            self.ask(node, "skip", lambda: port.skip(request), told)

    def in_doubt(self, key: tuple[int, int], meta: PartitionMeta) -> bool:
        """Whether no member of the ISR can vouch for all that was acknowledged: who has the log that the record names
        had its end cut, and one with more, whose journal rotted, has a log of another name."""
        members = [node for node in self.cluster.nodes if node.joined and node.uid in meta.isr]
        found = {node.uid: report for node in members if (report := _report(node, key)) is not None}
        named = [report for uid, report in found.items() if report.log_uid == meta.isr[uid]]
        if len(found) < len(meta.isr) or not named or not all(report.cut for report in named):
            return False
        return max(report.reach for report in found.values()) > max(report.reach for report in named)

    def elect_best(self, name: str, key: tuple[int, int]) -> None:
        """The one that has most: everything that was ever committed is in it, or damaged there and whole elsewhere."""
        found = [(node, report) for node in self.cluster.nodes if node.joined and (report := _report(node, key))]
        if found:
            node, _ = max(found, key=lambda pair: (pair[1].reach, not pair[1].corrupt))
            self.elect_unclean(name, key, node)

    def elect_unclean(self, name: str, key: tuple[int, int], wanted: SimNode) -> str:
        """`nsqha cluster elect --unclean --node`; why not, or empty."""
        store, reports = self.cluster.metadata.store, {}
        for node in self.cluster.nodes:
            if node.joined and (report := _report(node, key)) is not None:
                reports[node.uid] = report
        found = store.records.topic(name)
        assert found is not None
        chosen = elect_unclean(found.record.partitions[key[1]], reports, store.records.nodes(), wanted.uid)
        if isinstance(chosen, str):
            return chosen
        self.cluster.oracle.operators_elections.add((key, chosen.meta.epoch))
        registered = {chosen.meta.leader: chosen.meta.registration}
        store.records.replace_partition(name, key[0], key[1], chosen.meta, registered=registered)
        self.cluster.count("unclean elections")
        self.cluster.note(f"unclean election of {wanted.name} for {name}/{key[1]}, epoch {chosen.meta.epoch}")
        return ""

    # ---- topics

    def delete_topic(self) -> str | None:
        """The topic that is there to be deleted; publishers and consumers make it again."""
        node = self._node()
        if node is None or self.cluster.doomed is None:
            return None
        topic, broker = self.cluster.doomed, node.broker
        assert broker is not None
        self.ask(node, "delete", lambda: broker.topics.delete_topic(topic), lambda _: None)
        return f"{topic} at {node.name}"

    # ---- the end

    def finish(self, keep_trying: Callable[[Callable[[], bool], str], None]) -> None:
        """All is well again: nothing is paused, no node is left out; then every message comes once more.

        `keep_trying(condition, what)` lets time pass until the condition holds."""
        cluster = self.cluster
        for node in cluster.nodes:
            self._changes.recommission(node.uid)
        for topic in cluster.topics:
            for channel in ("", *cluster.channels):
                if any(pause.topic == topic and pause.channel == channel for pause in self._ledger.pauses):
                    self._until_done(
                        lambda node, done, t=topic, c=channel: self.pause(node, t, c, False, done),  # type: ignore[misc]
                        keep_trying,
                        f"{topic}:{channel} goes on",
                    )

    def last_policies(self, keep_trying: Callable[[Callable[[], bool], str], None]) -> None:
        """Nothing is passed over any more, and dead letters are kept, or moved."""
        if "set_policy" not in self.cluster.plan.operations:
            return
        for topic in self.cluster.topics:
            for channel in self.cluster.channels:
                fields: dict[str, Any] = dict.fromkeys(FIELDS)
                fields["max_attempts"] = 3
                fields["dead_letter"] = self._rng.choice((None, TO_DEAD_TOPIC))

                def ask(
                    node: SimNode,
                    done: Callable[[bool], None],
                    topic: str = topic,
                    channel: str = channel,
                    fields: dict[str, Any] = fields,
                ) -> None:
                    self._policies.change(node, topic, channel, fields, done)

                self._until_done(ask, keep_trying, f"{topic}:{channel} follows its last policy")
        keep_trying(lambda: dead_to_move(self.cluster) == 0, "dead letters are moved")

    def read_again(self, keep_trying: Callable[[Callable[[], bool], str], None]) -> None:
        """Every channel from the start of the log."""
        cluster = self.cluster
        if not any("seek" in kind for kind in cluster.plan.operations):
            return
        for topic in cluster.topics:
            for channel in cluster.channels:
                request = admin_pb2.SeekRequest(topic=topic, channel=channel, target=admin_pb2.SeekTarget(start=True))

                def ask(node: SimNode, done: Callable[[bool], None], request: Any = request) -> None:
                    port = node.admin
                    assert port is not None
                    operations = self.operations("seek", request.topic, request.channel, 0)

                    def answered(reply: Any) -> None:
                        for answer in reply.partitions:
                            if not answer.error:
                                operations[answer.partition].ended = cluster.world.time()
                                operations[answer.partition].again_from = answer.to_offset
                        done(not any(answer.error for answer in reply.partitions))

                    self.ask(node, "seek", lambda: port.seek(request), answered, lambda error: done(False))

                self._until_done(ask, keep_trying, f"{topic}:{channel} goes back to its start")

    def _until_done(
        self,
        ask: Callable[[SimNode, Callable[[bool], None]], None],
        keep_trying: Callable[[Callable[[], bool], str], None],
        what: str,
    ) -> None:
        world = self.cluster.world
        ask_at, finished = world.time(), False

        def told(done: bool) -> None:
            nonlocal ask_at, finished
            ask_at, finished = world.time() + RETRY_SECONDS, finished or done

        def condition() -> bool:
            nonlocal ask_at
            if not finished and world.time() >= ask_at and (node := self._node()) is not None:
                ask_at = world.time() + PATIENCE_SECONDS
                ask(node, told)
            return finished

        keep_trying(condition, what)


def _report(node: SimNode, key: tuple[int, int]) -> ReplicaReport | None:
    """What the node's Status says of a partition; it waits for nothing."""
    assert node.replicas is not None and node.cluster is not None
    request = replication_pb2.StatusRequest(cluster_id=node.cluster.cluster_id)
    request.keys.add(topic_uid=key[0], partition=key[1])
    asking = node.replicas.answers.status(PeerIdentity("operator"), request)
    try:
        asking.send(None)
    except StopIteration as answered:
        reply = answered.value
    return reports_in(reply).get(key)


def _told(reply: Any) -> str:
    return ", ".join(
        f"{answer.partition}: {answer.error or f'{answer.from_offset} -> {answer.to_offset}'}"
        for answer in reply.partitions
    )
