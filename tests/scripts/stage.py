"""Three nodes of the simulation with one partition, where nothing happens by itself.

Each process is the product's, on the virtual loop, network, storage and metadata of `tests.sim`; no chance is left in
them. What takes time elsewhere waits here until it is let go:

- messages between a leader and a follower, in both directions (`tests.sim.net`); that a stream ended does not wait;
- changes of the partition's record that nodes ask for (`tests.sim.metadata.HeldChanges`), and the news of changes;
- disk rounds, with sync=always.

All else takes no time, and time passes only by `pass_time`. Until a controller is started the script says which node
is elected, and `elect` writes what a controller would that hears from this node alone (`nsqha.election.elect`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from nsqha import hot
from nsqha.election.elect import Ballot, Elected, ReplicaReport, choose
from nsqha.election.model import PartitionMeta, TopicSettings
from nsqha.errors import NsqhaError
from nsqha.ids import PartitionKey
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.partition.publishes import PUSHED_FLUSH_BYTES
from nsqha.server.peers.api import Method
from nsqha.server.replica.leading.sender import COMMITTED_SECONDS
from tests.scripts.happenings import Happenings
from tests.sim.cluster import SimCluster
from tests.sim.loop import NodeLoop
from tests.sim.metadata import HeldChanges
from tests.sim.node import SimNode
from tests.sim.plan import Plan
from tests.sim.wire import Way

TOPIC = "t"
NAMES = "abcde"
SEGMENT_BYTES = 64 << 20  # no scene fills one
CONTROLLER_SECONDS = 3.0  # a new controller waits until the cluster has settled
RECONNECT_SECONDS = 3.0  # a leader finds a node that is there again within


class NoChance(random.Random):
    """Always the first choice, and the least number: a power cut takes everything that was not synced."""

    def random(self) -> float:
        return 0.0

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0 if stop is None else start


class Stage:
    """The cluster of one scene."""

    def __init__(self, names: list[str], *, isr: list[str], min_isr: int, sync: str) -> None:
        """Of the replicas `names` those in `isr` are in sync; the first one is elected, and does not know it yet."""
        assert names == list(NAMES[: len(names)]) and isr[0] == names[0], f"nodes are {NAMES}, and {names[0]} leads"
        plan = Plan(seed=0, nodes=len(names), controllers=1, topics=0, sync=sync, segment_bytes=SEGMENT_BYTES)
        self.cluster = cluster = SimCluster(plan)
        self.nodes = dict(zip(names, cluster.nodes, strict=True))
        self.happened = Happenings(cluster, self.nodes)
        self.changes = HeldChanges(self.happened.asked)
        self._sync_always = sync == "always"
        self._published = 0
        self._without_chance()
        with ExitStack() as beginning:
            cluster.__enter__()
            beginning.callback(self.close)
            self.happened.listen()
            for name in names:
                self.start(name)
            self.key = self.happened.key = self._make_partition(min_isr)
            self._hold()
            self._elect_first([self.nodes[name] for name in isr])
            beginning.pop_all()

    def close(self) -> None:
        """The scene is over."""
        self.happened.close()
        self.cluster.__exit__()

    # ---- the beginning

    def start(self, name: str) -> None:
        node = self.nodes[name]
        node.start()
        if self._sync_always:
            node.loop.held_jobs["fdatasync"] = []
        self.settle()

    def _without_chance(self) -> None:
        cluster = self.cluster
        cluster.scheduler.rng = NoChance(0)
        cluster.net.latency, cluster.net.kept = (0.0, 0.0), lambda sent: sent
        cluster.metadata.trouble.hint_seconds = cluster.metadata.trouble.call_seconds = 0.0
        for machine in cluster.machines.values():
            machine.rng = NoChance(machine.name)
            machine.disk_seconds = machine.metadata_seconds = 0.0
        for node in self.nodes.values():
            node.on_end = lambda node, why: None

    def _make_partition(self, min_isr: int) -> PartitionKey:
        store, uids = self.cluster.metadata.store, tuple(node.uid for node in self.nodes.values())
        settings = TopicSettings(replicas=len(uids), min_isr=min_isr)
        partition = PartitionMeta(epoch=0, replicas=uids, min_isr=min_isr)
        made = store.records.create_topic(TOPIC, settings, partitions={0: partition})
        self.settle()
        return made.record.uid, 0

    def _hold(self) -> None:
        self.cluster.net.holds = self._holds
        self.cluster.metadata.holds_hint = lambda loop, name: name.startswith("topics/") and loop in self._node_loops()
        self.cluster.metadata.held = self.changes

    def _elect_first(self, members: list[SimNode]) -> None:
        first, isr = members[0], {node.uid: self._log_uid(node) for node in members}
        self.put(replace(self.meta, leader=first.uid, epoch=1, registration=self._registration(first), isr=isr))
        self.happened.begin()

    def _node_loops(self) -> list[NodeLoop]:
        return [node.loop for node in self.nodes.values()]

    def begin(self) -> None:
        """The one that is elected leads, and its first batch is committed by all members."""
        name = self.happened.names([self.meta.leader])
        members = self.happened.names(self.meta.isr).split()
        self.read(name)
        self.settle()
        for other in members:
            if other != name:
                self.open(name, other)
        self.run()
        if self._sync_always:
            for member in members:
                self.sync(member)
            self.run()
        self.pass_time(COMMITTED_SECONDS)
        self.run()
        self.happened.take()

    # ---- what is there

    @property
    def meta(self) -> PartitionMeta:
        topic = self.cluster.metadata.store.records.topic(TOPIC)
        assert topic is not None
        return topic.record.partitions[0]

    def put(self, meta: PartitionMeta) -> None:
        self.cluster.metadata.store.records.replace_partition(TOPIC, self.key[0], 0, meta)

    def _registration(self, node: SimNode) -> int:
        return self.cluster.metadata.store.records.nodes()[node.uid].registration

    def _log_uid(self, node: SimNode) -> int:
        assert node.replicas is not None
        leading, following = node.replicas.leading.get(self.key), node.replicas.followers.get(self.key)
        found = leading or following
        assert found is not None
        return found.log_uid

    # ---- time

    def settle(self) -> None:
        """Everything happens that takes no time."""
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> None:
        scheduler = self.cluster.scheduler
        scheduler.run_until(scheduler.now + seconds)
        self.happened.look_at_all()

    # ---- metadata

    def start_controller(self) -> None:
        """From now on a controller elects; what it asks of the store waits as well."""
        self.cluster.controllers[0].start()
        self.pass_time(CONTROLLER_SECONDS)

    def elect(self, name: str, *, keep: bool) -> None:
        """The record names another leader; without `keep` the one before counts as dead."""
        node, meta = self.nodes[name], self.meta
        log = node.replicas.table.log_of(self.key) if node.replicas is not None else None
        assert log is not None
        report = ReplicaReport(
            self._registration(node), self._log_uid(node), log.entry_before(log.end.log_id).epoch, log.end.log_id
        )
        ballot = Ballot(
            meta,
            "always" if self._sync_always else "interval",
            reports={node.uid: report},
            failed=frozenset(meta.isr) - {node.uid},
            nodes=self.cluster.metadata.store.records.nodes(),
            since=0.0,
            now=0.0,
            dead=frozenset() if keep else frozenset({meta.leader}),
        )
        chosen = choose(ballot)
        assert isinstance(chosen, Elected), f"{name} is not electable: {chosen}"
        self.put(chosen.meta)

    def succeed(self, name: str) -> None:
        """An operator asks the leader to hand over to another member."""
        self.put(replace(self.meta, successor=self.nodes[name].uid))

    def read(self, name: str) -> None:
        """A node hears that the record may have changed, and reads it."""
        for handle in self.cluster.metadata.handles:
            if handle.loop is self.nodes[name].loop:
                handle.tell(f"topics/{TOPIC}")

    # ---- messages

    def _holds(self, method: Method, message: Message) -> bool:
        """All but greetings."""
        if isinstance(message, pb.PushMessage):
            return bool(message.opens or message.appends or message.committed)
        return isinstance(message, pb.PushReply) and bool(message.opened or message.acks or message.refused)

    def _ways(self, leader: str, follower: str, *, back: bool) -> Iterator[Way]:
        a, b = self.nodes[leader].name, self.nodes[follower].name
        for wire in self.cluster.net.streams(a, b):
            way = (wire.server_end if back else wire.client_end).outgoing
            if way.held is not None:
                yield way

    def next_message(self, leader: str, follower: str, *, back: bool) -> Message | None:
        """What waits first: to the follower, or `back`."""
        way = next(self._ways(leader, follower, back=back), None)
        return None if way is None else way.held

    def let_go(self, leader: str, follower: str, *, back: bool, instead: Message | None = None) -> None:
        """One message arrives."""
        way = next(self._ways(leader, follower, back=back), None)
        assert way is not None, "no message is under way"
        message = way.held
        if back:
            self.happened.answered(follower, message)
        way.let_go(instead=instead)
        self.settle()

    def open(self, leader: str, follower: str) -> None:
        """The leader asks where the follower is, as soon as there is a stream, and hears it."""
        deadline = self.cluster.time + RECONNECT_SECONDS
        while not self._opening(leader, follower):
            assert self.cluster.time < deadline, f"{leader} opens no stream to {follower}"
            self.pass_time(0.01)
        while self._opening(leader, follower):
            pass

    def _opening(self, leader: str, follower: str) -> bool:
        """One message of an opening arrives, if there is one."""
        message: Any = self.next_message(leader, follower, back=False)
        if message is not None and message.opens:
            self.let_go(leader, follower, back=False)
            return True
        reply: Any = self.next_message(leader, follower, back=True)
        if reply is not None and (reply.opened or reply.refused):
            self.let_go(leader, follower, back=True)
            return True
        return False

    def run(self) -> None:
        """All messages arrive that are under way, and what is sent because of them; no stream is opened."""
        pairs = [(a, b) for a in self.nodes for b in self.nodes if a != b]
        while any(self._all_of(a, b) for a, b in pairs):
            pass

    def _all_of(self, leader: str, follower: str) -> bool:
        some = False
        for back in (False, True):
            while (message := self.next_message(leader, follower, back=back)) is not None and not _opens(message):
                self.let_go(leader, follower, back=back)
                some = True
        return some

    def cut(self, a: str, b: str) -> None:
        """All streams between the two end, and what is under way on them is lost."""
        one, other = self.nodes[a].name, self.nodes[b].name
        for wire in (*self.cluster.net.streams(one, other), *self.cluster.net.streams(other, one)):
            for end in wire.ends:
                end.incoming.lose_all()
        self.cluster.net.cut(one, other)

    # ---- clients and disks

    def write(self, name: str) -> None:
        """A client publishes a message at this node: one so large that it does not wait for others."""
        node, loop = self.nodes[name], self.nodes[name].loop
        self._published += 1
        body = f"m{self._published}"
        loop.call_soon(lambda: loop.create_task(self._publish(node, loop, body)))
        self.settle()

    async def _publish(self, node: SimNode, loop: NodeLoop, body: str) -> None:
        assert node.broker is not None
        try:
            await node.broker.publishing.publish(TOPIC, hot.frame(body.encode().ljust(PUSHED_FLUSH_BYTES)))
        except NsqhaError as error:
            told = f"{body} {type(error).__name__}: {error}"
        else:
            told = f"{body} OK"
        if not loop.dead:
            self.happened.say(f"{self.happened.name(node)} answers {self.happened.named(told)}")

    def sync(self, name: str) -> None:
        """The disk round that runs ends."""
        loop = self.nodes[name].loop
        assert loop.held_jobs["fdatasync"], f"no disk round of {name} is under way"
        loop.let_go("fdatasync")
        self.settle()

    def end(self, name: str, *, power: bool = False) -> None:
        """kill -9, or a power cut."""
        self.nodes[name].end("power cut" if power else "killed", power=power)


def _opens(message: Any) -> bool:
    return bool(message.opens if isinstance(message, pb.PushMessage) else message.opened)
