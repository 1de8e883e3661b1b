"""A whole cluster in one thread, by a seed: nodes, controllers, metadata store, clients, and what is watched.

    cluster = SimCluster(Plan.draw(seed))
    with cluster:
        cluster.start(); cluster.clients(); Misfortune(cluster, rng); cluster.run_for(plan.seconds)
        cluster.end_well()

`Plan` is everything that the seed decides before anything runs; `run_seed` is one life of a cluster from start to the
final comparison (`comparison`). The first violation ends it.

Not simulated: V2 connections and HTTP (a consumer is given its `Consumer`), the LMDB cache of channel states (a node
always begins with its log), etcd itself, and disks that return wrong bytes only sometimes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

from nsqha.election.controller.planner import PlanLimits
from nsqha.election.controller.rounds import ControllerLimits
from nsqha.election.memory import Change, MemoryStore, StoreState
from nsqha.election.model import TopicSettings
from nsqha.errors import NsqhaError
from nsqha.options import Options
from nsqha.pb.v1 import admin_pb2, replication_pb2, routing_pb2
from nsqha.server.peers.api import Method
from tests.sim.batch_readers import BatchReaders
from tests.sim.clients import History, Publisher, Reader
from tests.sim.comparison import Comparison
from tests.sim.invariants import ErrorLog, Oracle, Violation
from tests.sim.ledger import DEAD_TOPIC, LATE_SECONDS
from tests.sim.loop import START, NodeLoop, Scheduler
from tests.sim.losses import Losses
from tests.sim.metadata import SimMetadata
from tests.sim.net import Network
from tests.sim.node import DATA, SimController, SimNode
from tests.sim.operators import Operators
from tests.sim.plan import Plan
from tests.sim.policies import fates, passed_too_early
from tests.sim.storage import Crashed

SERVICES = (
    replication_pb2.DESCRIPTOR.services_by_name["Replication"],
    routing_pb2.DESCRIPTOR.services_by_name["Routing"],
)
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
CHANNEL = "ch"
CHANNELS = (CHANNEL, "ch2")
DOOMED = "doomed"  # the topic that may be deleted
EPHEMERAL = "e#ephemeral"
START_SECONDS = 15.0  # until a healthy cluster has its topics
CONVERGE_SECONDS = 60.0  # after everything is healed, until all replicas are in sync and everything is delivered
QUIET_SECONDS = 2.0
STALL_SECONDS = 2.5  # a leader waits 2 s for a member that has fallen silent, as its own pings may take longer
HANG_SECONDS = 11.4  # what a disk began while it hung ends so late
RESCUE_SECONDS = 12.0  # without a leader, until an operator comes
SCRUB_SECONDS = 3
REQUEUE_SECONDS = 0.5


class SimCluster:
    """One cluster and its clients."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(f"life {plan.seed}")
        self.scheduler = Scheduler(self.new_rng())
        self.scheduler.on_turn = self._turned
        self.scheduler.on_error = self._raised
        self.world: NodeLoop = self.scheduler.loop("world")
        self.metadata = SimMetadata(self.scheduler, self.new_rng())
        store = MemoryStore(self.new_rng(), save=lambda state, change: self.on_record(state, change))
        self.net = Network(self.world, self.new_rng(), SERVICES, loop_of=self._loop_of)
        for call in ("Seek", "UndoSeek", "SkipDamage", "ListMessages", "ChangeMessages"):
            self.net.methods[call] = Method(ADMIN, ADMIN.methods_by_name[call])
        self.metadata.use(store)
        self.history = History()
        self.errors: list[Any] = []
        self.events: list[str] = []
        self.counts: dict[str, int] = {}
        self.sync_always = plan.sync == "always"
        self.nodes = [
            SimNode(f"n{n}", self.net, self.metadata, self.new_rng(), self._options()) for n in range(plan.nodes)
        ]
        self.controllers = [
            SimController(f"c{n}", self.net, self.metadata, self.new_rng(), self._limits())
            for n in range(plan.controllers)
        ]
        machines: list[SimNode | SimController] = [*self.nodes, *self.controllers]
        self.machines = {machine.name: machine for machine in machines}
        self.oracle = Oracle(self)
        self.on_record: Callable[[StoreState, Change], None] = self.oracle.recorded  # before a change is visible
        self.publishers: list[Publisher] = []
        self.readers: list[Reader] = []
        self.topics = [f"t{n}" for n in range(plan.topics)]
        self.channels = CHANNELS[: plan.channels]
        self.doomed = DOOMED if "delete_topic" in plan.operations else None
        self.operators: Operators | None = None
        self.batch_readers: BatchReaders | None = None
        self.comparison = Comparison(self)
        self.flips: list[tuple[SimNode, str, int, int]] = []  # node, path, byte, what it was
        self._leaderless: dict[tuple[int, int], float] = {}  # until when it may be
        self.lost: set[tuple[tuple[int, int], int]] = set()  # (partition, log id): damaged on every node
        self.losses = Losses(self)
        for node in self.nodes:
            node.on_end = self._ended
        self._log = ErrorLog(self)
        self.keep_down: set[str] = set()

    def new_rng(self) -> random.Random:
        """One more source of chance, so that one part's use of it changes no other's."""
        return random.Random(self.rng.getrandbits(64))

    def _options(self) -> Options:
        plan = self.plan
        return Options(
            data_path=DATA,
            disk_low_bytes=0,
            sync=plan.sync,
            segment_bytes=plan.segment_bytes,
            scrub_bytes_per_second=1 << 20 if "bit_flip" in plan.faults else 0,
            scrub_interval_ns=SCRUB_SECONDS * 10**9,
            retention_ns=round(plan.retention_seconds * 1e9),
            topic_partitions=plan.partitions,
            tail_cache_bytes=64 << 10,
        )

    def _limits(self) -> ControllerLimits:
        """A disk that was replaced never comes back under its name, so its replicas are soon made elsewhere."""
        away = 10.0 if "wipe" in self.plan.faults else 600.0
        return ControllerLimits(plan=PlanLimits(settle_s=2.0, replace_after_s=away, emergency_after_s=away))

    def _loop_of(self, address: str) -> NodeLoop:
        return self.machines[address].loop

    @property
    def time(self) -> float:
        """Since the beginning."""
        return self.scheduler.now - START

    def note(self, text: str) -> None:
        """For whoever reads the story of a failed seed."""
        self.events.append(f"{self.time:9.4f} {text}")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # ---- what happens in it

    def _turned(self, loop: NodeLoop) -> None:
        machine = self.machines.get(loop.name)
        if isinstance(machine, SimNode) and machine.loop is loop:
            self.oracle.look(machine)
            if self.batch_readers is not None:
                self.batch_readers.look(machine)
        if self.oracle.violations:
            raise Violation(self.oracle.violations[0])

    def _raised(self, loop: NodeLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if loop.dead or isinstance(error, Crashed):
            return
        if isinstance(error, Violation):
            raise error
        if isinstance(error, NsqhaError) and "never retrieved" in str(context.get("message")):
            return
        self.errors.append(error)
        self.oracle.broken(f"{loop.name}: {context.get('message')}: {type(error).__name__}: {error}")

    def _ended(self, node: SimNode, why: str) -> None:
        self.note(f"{node.name} ended: {why}")
        self.count(why.partition(":")[0])
        self.world.call_later(self.rng.uniform(0.1, 3.0), self._restart, node)

    def _restart(self, node: SimNode) -> None:
        if not node.up and node.name not in self.keep_down:
            self.note(f"{node.name} starts")
            node.start()

    def run_for(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        self.scheduler.run_until(self.scheduler.now + seconds, stop)
        if self.oracle.violations:
            raise Violation(self.oracle.violations[0])

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Liveness."""
        deadline = self.scheduler.now + seconds
        while not condition():
            if self.scheduler.now >= deadline:
                raise Violation(f"at {self.time:.4f}: not within {seconds:.0f} s: {what}: {self.state()}")
            self.run_for(0.1)

    # ---- one life

    def start(self) -> None:
        """Everything is up, and the topics with their channel are there."""
        for machine in self.machines.values():
            machine.start()
        self.until(lambda: all(node.joined for node in self.nodes), START_SECONDS, "all nodes join")
        plan = self.plan
        names = [*self.topics, self.doomed] if self.doomed else self.topics
        for topic in names:
            self._make(topic, TopicSettings(partitions=plan.partitions, ordered=plan.ordered))
        for topic in names:
            self.until(lambda t=topic: self._serves(t), START_SECONDS, f"{topic} has its leaders and its channels")  # type: ignore[misc]

    def _make(self, topic: str, settings: TopicSettings) -> None:
        node = self.rng.choice(self.nodes)

        async def make() -> None:
            assert node.broker is not None
            while True:
                try:
                    await node.broker.topics.create_topic(topic, settings)
                    for channel in self.channels_of(topic):
                        await node.broker.channels.create(topic, channel)
                except NsqhaError as error:
                    self.note(f"{topic} is not made yet: {error}")
                    await asyncio.sleep(0.1)
                else:
                    return

        task: list[asyncio.Task[None]] = []
        node.loop.call_soon(lambda: task.append(node.loop.create_task(make())))
        self.until(lambda: bool(task) and task[0].done(), START_SECONDS, f"{topic} is made")
        task[0].result()

    def _serves(self, topic: str) -> bool:
        """Every partition has a leader that has the channels."""
        found = self.metadata.store.records.topic(topic)
        assert found is not None
        led = {
            key[1]: leadership
            for node in self.nodes
            if node.replicas is not None
            for key, leadership in node.replicas.leading.items()
            if leadership.topic == topic
        }
        return len(led) == len(found.record.partitions) and all(
            set(self.channels_of(topic)) <= set(leadership.partition.cursors.channels)
            and len(leadership.meta.isr) >= leadership.meta.min_isr
            for leadership in led.values()
        )

    def clients(self) -> None:
        """From here on messages are published and consumed, and operators do what they do."""
        plan = self.plan
        for n in range(plan.publishers):
            self._publisher(f"p{n}", self.topics[n % len(self.topics)], plan.pause_seconds)
        for topic in self.topics:
            for channel in self.channels:
                for number in range(plan.partitions):
                    self._reader(topic, number, channel)
                if plan.relayed:
                    self._reader(topic, None, channel)
            if plan.ephemeral:
                self._reader(topic, None, EPHEMERAL)
        if self.doomed:
            self._publisher("px", self.doomed, 4 * plan.pause_seconds)
            self._reader(self.doomed, 0, CHANNEL)
        self.operators = Operators(self, self.new_rng())
        if plan.batch_readers:
            self.batch_readers = BatchReaders(self, self.new_rng())

    def grown(self, topic: str, number: int) -> None:
        """A topic has one more partition: somebody reads it."""
        for channel in self.channels_of(topic):
            self.world.call_soon(self._reader, topic, number, channel)

    def _publisher(self, name: str, topic: str, pause_seconds: float) -> None:
        self.publishers.append(
            Publisher(
                name,
                topic,
                self.scheduler,
                self.world,
                self.nodes,
                self.new_rng(),
                self.history,
                pause_seconds=pause_seconds,
                body_bytes_max=self.plan.body_bytes,
                delay_seconds=self.plan.delay_seconds,
                lasting=self.plan.stubborn,
            )
        )

    def _reader(self, topic: str, number: int | None, channel: str) -> None:
        self.readers.append(
            Reader(
                topic,
                number,
                channel,
                self.world,
                self.nodes,
                self.new_rng(),
                self.history,
                delay_seconds=max(self.plan.delay_seconds, REQUEUE_SECONDS),
                fails="set_policy" in self.plan.operations,
                stubborn=self.plan.stubborn,
                on_delivery=self.oracle.delivered,
            )
        )

    def set_clock(self, machine: SimNode | SimController, offset_seconds: float) -> None:
        """The wall clock of a machine is off by so much from now on; 0: it is right again."""
        machine.skew_ns = round(offset_seconds * 1e9)
        self.note(f"the clock of {machine.name} is {offset_seconds:+.1f} s off")

    def heal(self) -> None:
        """No more misfortune: everybody comes up and reaches everybody."""
        self.comparison.states()
        self.note("healed")
        self.keep_down.clear()
        self.net.heal_all()
        self.metadata.heal()
        for machine in self.machines.values():
            machine.thaw()
            machine.skew_ns = 0  # a node whose clock is off stays out of the ISR for good
            machine.disk_seconds = machine.metadata_seconds = 0.001
            if isinstance(machine, SimNode):
                machine.storage.heal()
                machine.disk_low(False)
                machine.storage._crash_at = None
            if not machine.up:
                machine.start()
        self.losses.healed()

    def converge(self) -> None:
        """All replicas in sync, everything acknowledged is delivered."""
        for reader in self.readers:
            reader.diligent = True
        comparison, operators = self.comparison, self.operators
        self.until(lambda: self._rescued() and comparison.in_sync(), CONVERGE_SECONDS, "all replicas are in sync")
        acked = len(self.history.acked)
        for publisher in self.publishers:
            publisher.hurry()
        self.run_for(1.5)
        if self.publishers:
            hangs = HANG_SECONDS if "disk_hang" in self.plan.faults else 0.0
            self.until(lambda: len(self.history.acked) > acked, STALL_SECONDS + hangs, "publishes are acknowledged")
        for publisher in self.publishers:
            publisher.stopped = True
        self.run_for(0.5)
        if operators is not None and self.plan.operations:
            self.run_for(LATE_SECONDS)
            operators.finish(lambda condition, what: self.until(condition, CONVERGE_SECONDS, what))
            operators.last_policies(lambda condition, what: self.until(condition, CONVERGE_SECONDS, what))
        self.oracle.ledger.settle(self.scheduler.now)
        self.until(comparison.drained, CONVERGE_SECONDS, "everything is delivered")
        if operators is not None:
            operators.read_again(lambda condition, what: self.until(condition, CONVERGE_SECONDS, what))
            self.until(comparison.drained, CONVERGE_SECONDS, "everything is delivered once more")
        self.run_for(QUIET_SECONDS)
        self._settled()
        for problem in chain(fates(self), passed_too_early(self)) if "set_policy" in self.plan.operations else ():
            raise Violation(problem)
        if self.lost:  # what was given up, and what was mended, is what the files say
            for node in self.nodes:
                node.end("restarted once more")
            self.until(lambda: self._rescued() and comparison.in_sync(), CONVERGE_SECONDS, "all are in sync again")
            self._seen(comparison.lost, "all have the same of what was lost")
            self.run_for(QUIET_SECONDS)
            self._settled()

    def _settled(self) -> None:
        comparison = self.comparison
        self.until(lambda: comparison.in_sync() and comparison.level(), CONVERGE_SECONDS, "all have applied the same")
        self._seen(comparison.damage, "damage is mended")
        self._seen(comparison.remains, "what is not wanted is gone")
        comparison.states()

    def _seen(self, look: Callable[[], Iterator[str]], what: str) -> None:
        """Wait until there is nothing more to see."""
        try:
            self.until(lambda: next(look(), None) is None, CONVERGE_SECONDS, what)
        except Violation as violation:
            raise Violation(f"{violation}\n  {list(look())[:5]}") from None

    def _rescued(self) -> bool:
        """An operator looks at partitions that nobody leads for long: every member died with damage, more than once; or
        some with damage, and the others with their host before a sync; or all of them with their hosts, which is an
        operator's decision where sync=interval is the nodes' default and not the topic's
        (`election.controller.rounds.Part`). Where only a journal can rot: a partition of which no member can vouch for
        everything."""
        operators, hosts_die = self.operators, self.plan.sync != "always"
        looks = self.plan.damage_anywhere or hosts_die or bool(self.lost)
        for name, key, meta in self.named_metas() if operators is not None else ():
            led = any(node.replicas is not None and key in node.replicas.leading for node in self.nodes)
            if led or not (looks or operators.in_doubt(key, meta)):  # type: ignore[union-attr]
                self._leaderless.pop(key, None)
            elif self.time >= self._leaderless.setdefault(key, self.time + RESCUE_SECONDS):
                self._leaderless[key] = self.time + RESCUE_SECONDS
                operators.elect_best(name, key)  # type: ignore[union-attr]
        return True

    def named_metas(self) -> list[tuple[str, tuple[int, int], Any]]:
        topics = self.metadata.store.records.topics().values()
        return [(t.record.name, (t.record.uid, n), meta) for t in topics for n, meta in t.record.partitions.items()]

    def metas(self) -> list[tuple[tuple[int, int], Any]]:
        return [(key, meta) for _, key, meta in self.named_metas()]

    def channels_of(self, topic: str) -> tuple[str, ...]:
        """Those whose deliveries are checked."""
        if topic == DEAD_TOPIC:
            return ()
        return (CHANNEL,) if topic == self.doomed else self.channels

    def check_end(self) -> None:
        """Everything that was acknowledged is everywhere, and all replicas are equal."""
        self.comparison.check()

    def end_well(self) -> None:
        """No more misfortune; then everything that was acknowledged is everywhere."""
        self.heal()
        self.converge()
        self.check_end()

    def state(self) -> str:
        """For people."""
        return self.comparison.state()

    def name_of(self, key: tuple[int, int]) -> str:
        return next((f"{name}/{key[1]}" for name, other, _ in self.named_metas() if other == key), f"{key}")

    def nodes_of(self, uids: Collection[int]) -> list[SimNode]:
        return [node for node in self.nodes if node.uid in uids]

    def name(self, uid: int) -> str:
        return next((node.name for node in self.nodes if node.uid == uid), f"{uid:016x}")

    # ---- around it

    def __enter__(self) -> SimCluster:
        logger = logging.getLogger("nsqha")
        self._level_before = logger.level
        self._propagate_before = logger.propagate
        logger.propagate = False  # who keeps records keeps alive what they speak of, and weak references tell
        logger.addHandler(self._log)
        logger.setLevel(min(logging.ERROR, logger.level or logging.ERROR))
        return self

    def __exit__(self, *exc: object) -> None:
        logger = logging.getLogger("nsqha")
        logger.removeHandler(self._log)
        logger.setLevel(logging.CRITICAL + 1)  # what tasks say when they are closed
        for machine in self.machines.values():
            for loop in (*machine.past, machine.loop):
                loop.bury()
        logger.setLevel(self._level_before)
        logger.propagate = self._propagate_before
