"""A whole cluster in one thread, by a seed: nodes, controllers, metadata store, clients, and what is watched.

    cluster = SimCluster(Plan.draw(seed))
    cluster.start(); cluster.publish_for(20.0, faults); cluster.heal(); cluster.check_end()

`Plan` is everything that the seed decides before anything runs; `run_seed` is one life of a cluster from start to the
final comparison. The first violation ends it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nsqha.cursor.checkpoint import digest
from nsqha.election.model import TopicSettings
from nsqha.election.planner import PlanLimits
from nsqha.election.rounds import Limits
from nsqha.election.store import Change, MemoryStore
from nsqha.errors import NsqhaError
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2, routing_pb2
from tests.sim.clients import History, Publisher, Reader
from tests.sim.invariants import ErrorLog, Oracle, Violation
from tests.sim.loop import START, NodeLoop, Scheduler
from tests.sim.metadata import SimMetadata
from tests.sim.net import Network
from tests.sim.node import DATA, SimController, SimNode
from tests.sim.storage import Crashed

SERVICES = (
    replication_pb2.DESCRIPTOR.services_by_name["Replication"],
    routing_pb2.DESCRIPTOR.services_by_name["Routing"],
)
CHANNEL = "ch"
START_SECONDS = 15.0  # until a healthy cluster has its topics
CONVERGE_SECONDS = 60.0  # after everything is healed, until all replicas are in sync and everything is delivered
QUIET_SECONDS = 2.0


class ObservedStore(MemoryStore):
    """Tells what is about to change."""

    observer: Callable[[Any, Change], None] = lambda state, change: None  # type: ignore[assignment]

    def _save(self, change: Change) -> None:
        self.observer(self._state, change)


@dataclass
class Plan:
    """What the seed decides."""

    seed: int
    nodes: int = 3
    controllers: int = 1
    topics: int = 1
    partitions: int = 1
    sync: str = "always"
    segment_bytes: int = 1 << 20
    body_bytes: int = 200
    publishers: int = 3
    pause_seconds: float = 0.05
    seconds: float = 15.0
    faults: dict[str, float] = field(default_factory=dict)  # kind -> how often a second

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Any cluster, any subset of faults at any rate."""
        rng = random.Random(f"plan {seed}")
        plan = cls(
            seed,
            nodes=rng.choice((3, 3, 3, 3, 4, 5)),
            controllers=rng.choice((1, 1, 2)),
            topics=rng.choice((1, 1, 2)),
            partitions=rng.choice((1, 1, 2)),
            sync=rng.choice(("always", "always", "always", "interval")),
            segment_bytes=rng.choice((2 << 10, 8 << 10, 32 << 10, 1 << 20)),
            body_bytes=rng.choice((20, 200, 2000)),
            publishers=rng.choice((2, 3, 4)),
            pause_seconds=rng.choice((0.05, 0.1, 0.2)),
            seconds=rng.uniform(4.0, 14.0),
        )
        plan.faults = draw_faults(rng, plan)
        return plan


def draw_faults(rng: random.Random, plan: Plan) -> dict[str, float]:
    """Swarm testing: each run has its own few kinds of misfortune, each at its own rate."""
    kinds = {
        "kill": 0.5,
        "kill_leader": 0.5,
        "power_loss": 0.4,
        "power_loss_all": 0.08,
        "die_writing": 0.3,
        "stop_node": 0.2,
        "freeze": 0.4,
        "freeze_leader": 0.3,
        "partition": 0.4,
        "partition_one_way": 0.4,
        "isolate": 0.3,
        "cut": 0.5,
        "slow_link": 0.3,
        "slow_disk": 0.3,
        "disk_full": 0.2,
        "disk_error": 0.08,
        "metadata_trouble": 0.3,
        "metadata_unreachable": 0.3,
        "controller_kill": 0.15,
        "controller_freeze": 0.15,
        "wipe": 0.1,
        "clock": 0.1,
    }
    if plan.sync != "always":
        # What OK means there does not survive the machine.
        for kind in ("power_loss", "power_loss_all", "die_writing", "disk_error", "wipe"):
            del kinds[kind]
    share = rng.choice((0.15, 0.3, 0.5))
    return {kind: rate * rng.choice((0.3, 1.0, 2.0)) for kind, rate in kinds.items() if rng.random() < share}


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
        store = ObservedStore(self.new_rng())
        self.net = Network(self.world, self.new_rng(), SERVICES, loop_of=self._loop_of)
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
        self.machines = {machine.name: machine for machine in (*self.nodes, *self.controllers)}
        self.oracle = Oracle(self)
        store.observer = self.oracle.recorded
        self.publishers: list[Publisher] = []
        self.readers: list[Reader] = []
        self.topics = [f"t{n}" for n in range(plan.topics)]
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
            scrub_bytes_per_second=0,
            topic_partitions=plan.partitions,
            tail_cache_bytes=64 << 10,
        )

    def _limits(self) -> Limits:
        """A disk that was replaced never comes back under its name, so its replicas are soon made elsewhere."""
        away = 10.0 if "wipe" in self.plan.faults else 600.0
        return Limits(plan=PlanLimits(settle_s=2.0, replace_after_s=away, emergency_after_s=away))

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
        for topic in self.topics:
            self._make(topic, TopicSettings(partitions=plan.partitions))
        for topic in self.topics:
            self.until(lambda t=topic: self._serves(t), START_SECONDS, f"{topic} has its leaders and its channel")  # type: ignore[misc]

    def _make(self, topic: str, settings: TopicSettings) -> None:
        node = self.rng.choice(self.nodes)

        async def make() -> None:
            assert node.broker is not None
            while True:
                try:
                    await node.broker.topics.create_topic(topic, settings)
                    await node.broker.topics.create_channel(topic, CHANNEL)
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
        """Every partition has a leader that has the channel."""
        found = self.metadata.store.topic(topic)
        assert found is not None
        led = {
            key[1]: leadership
            for node in self.nodes
            if node.replicas is not None
            for key, leadership in node.replicas.leading.items()
            if leadership.topic == topic
        }
        return len(led) == len(found.record.partitions) and all(
            CHANNEL in leadership.partition.cursors.channels and len(leadership.meta.isr) >= leadership.meta.min_isr
            for leadership in led.values()
        )

    def clients(self) -> None:
        """From here on messages are published and consumed."""
        plan = self.plan
        for n in range(plan.publishers):
            self.publishers.append(
                Publisher(
                    f"p{n}",
                    self.topics[n % len(self.topics)],
                    self.scheduler,
                    self.world,
                    self.nodes,
                    self.new_rng(),
                    self.history,
                    pause_seconds=plan.pause_seconds,
                    body_bytes_max=plan.body_bytes,
                )
            )
        for topic in self.topics:
            for number in range(plan.partitions):
                self.readers.append(
                    Reader(
                        topic,
                        number,
                        CHANNEL,
                        self.world,
                        self.nodes,
                        self.new_rng(),
                        self.history,
                        on_delivery=self.oracle.delivered,
                    )
                )

    def heal(self) -> None:
        """No more misfortune: everybody comes up and reaches everybody."""
        self.note("healed")
        self.keep_down.clear()
        self.net.heal_all()
        self.metadata.heal()
        for machine in self.machines.values():
            machine.thaw()
            machine.disk_seconds = machine.metadata_seconds = 0.001
            if isinstance(machine, SimNode):
                machine.storage.heal()
                machine.storage._crash_at = None
            if not machine.up:
                machine.start()

    def converge(self) -> None:
        """All replicas in sync, everything acknowledged is delivered."""
        for reader in self.readers:
            reader.diligent = True
        self.until(self._in_sync, CONVERGE_SECONDS, "all replicas are in sync")
        acked = len(self.history.acked)
        self.run_for(1.5)
        if self.publishers and len(self.history.acked) == acked:
            raise Violation(f"at {self.time:.4f}: nothing is acknowledged any more: {self.state()}")
        for publisher in self.publishers:
            publisher.stopped = True
        self.run_for(0.5)
        self.until(self._drained, CONVERGE_SECONDS, "everything is delivered")
        self.run_for(QUIET_SECONDS)
        self.until(self._level, CONVERGE_SECONDS, "all replicas have applied the same")

    def metas(self) -> list[tuple[tuple[int, int], Any]]:
        topics = self.metadata.store.topics().values()
        return [((t.record.uid, n), meta) for t in topics for n, meta in t.record.partitions.items()]

    def _in_sync(self) -> bool:
        for key, meta in self.metas():
            leaders = [n for n in self.nodes if n.joined and n.replicas is not None and key in n.replicas.leading]
            if len(leaders) != 1 or leaders[0].uid != meta.leader or set(meta.isr) != set(meta.replicas):
                return False
            leadership = leaders[0].replicas.leading[key]  # type: ignore[union-attr]
            if leadership.epoch != meta.epoch or not leadership.partition.serving:
                return False
        return all(node.joined for node in self.nodes)

    def _drained(self) -> bool:
        return not any(self.history.missing(topic, CHANNEL) for topic in self.topics)

    def _holders(self, key: tuple[int, int]) -> list[tuple[SimNode, Any, Any, int]]:
        """(node, log, state, committed) of every replica."""
        found = []
        for node in self.nodes:
            replicas = node.replicas
            if replicas is None:
                continue
            if (leadership := replicas.leading.get(key)) is not None:
                partition = leadership.partition
                found.append((node, partition.log, partition.cursors.state, leadership.committed))
            elif (follower := replicas.followers.get(key)) is not None:
                found.append((node, follower.log, follower.state, follower.committed))
        return found

    def _level(self) -> bool:
        for key, meta in self.metas():
            holders = self._holders(key)
            if len(holders) != len(meta.replicas) or any(state is None for _, _, state, _ in holders):
                return False
            if len({(log.end.log_id, state.applied.log_id, committed) for _, log, state, committed in holders}) != 1:
                return False
            if any(committed != log.end.log_id for _, log, _, committed in holders):
                return False
        return True

    # ---- the end

    def check_end(self) -> None:
        """Everything that was acknowledged is everywhere, and all replicas are equal."""
        stored: dict[str, set[bytes]] = {topic: set() for topic in self.topics}
        for topic in self.metadata.store.topics().values():
            for number in topic.record.partitions:
                key = (topic.record.uid, number)
                self._check_equal(f"{topic.record.name}/{number}", self._holders(key))
        for body in self.history.failed:
            for topic_name in stored:
                if self.history.delivered.get((topic_name, CHANNEL), {}).get(body):
                    raise Violation(f"{body[:40]!r} was refused ({self.history.failed[body]}) and is delivered")
        for (topic_name, _), came in self.history.delivered.items():
            for body in came:
                if self.history.attempts.get(body) != topic_name:
                    raise Violation(f"{body[:40]!r} was delivered and never sent")

    def _check_equal(self, name: str, holders: list[tuple[SimNode, Any, Any, int]]) -> None:
        digests = {node.name: digest(state).hex() for node, _, state, _ in holders}
        if len(set(digests.values())) != 1:
            raise Violation(f"{name}: channel states differ: {digests}")
        first = max(log.start.log_id for _, log, _, _ in holders)
        end = holders[0][1].end.log_id
        for log_id in range(first, end):
            copies = set()
            for _, log, _, _ in holders:
                entry = log.entry(log_id)
                copies.add((entry.encode(), bytes(log.read(entry))))
            if len(copies) != 1:
                raise Violation(f"{name}: batch {log_id} differs between replicas")

    def state(self) -> str:
        """In one line per partition, for people."""
        lines = []
        for key, meta in self.metas():
            lines.append(
                f"\n  {key[0]:016x}/{key[1]}: epoch {meta.epoch} leader {self._name(meta.leader)} "
                f"isr {sorted(map(self._name, meta.isr))} of {sorted(map(self._name, meta.replicas))}, "
                f"min {meta.min_isr}, successor {meta.successor}"
            )
            for node, log, state, committed in self._holders(key):
                assert node.replicas is not None
                role = "leads" if key in node.replicas.leading else "follows"
                follower = node.replicas.followers.get(key)
                extra = "" if follower is None else f" behind={follower.behind} stopped={follower.stopped}"
                applied = None if state is None else state.applied.log_id
                uid = meta.isr.get(node.uid, 0)
                lines.append(
                    f"\n    {node.name} {role} promise {node.replicas._promise(key)} [{log.start.log_id}, "
                    f"{log.end.log_id}) durable {log.local_durable} committed {committed} applied {applied}"
                    f"{extra} log_uid in ISR {uid:016x} up={node.up} joined={node.joined} frozen={node.frozen}"
                )
        lines += [f"\n  missing in {t}: {[b[:20] for b in self.history.missing(t, CHANNEL)[:5]]}" for t in self.topics]
        lines += [f"\n  {n.name} up={n.up} joined={n.joined} {n.refused}" for n in self.nodes if not n.joined]
        return "".join(lines)

    def _name(self, uid: int) -> str:
        return next((node.name for node in self.nodes if node.uid == uid), f"{uid:016x}")

    # ---- around it

    def __enter__(self) -> SimCluster:
        logger = logging.getLogger("nsqha")
        self._level_before = logger.level
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
