"""A load on a cluster: publishers that use any node, consumers that ask a lookup daemon, operators, probers.

    publishers   each on a connection to a node drawn by lot; one that ends is followed by one to another node
    consumers    ask /lookup where the topic is, connect there, SUB, and come back when their connection ends
    prober       one publish at a time, to nodes other than the victim of a fault: it measures how long nothing is OK'd
    operators    seek, empty and undo

What there is of each says a plan (tests.jepsen.load.plan). Clients know nothing of faults. What they saw is a history
(tests.jepsen.history) with a `window` of 0: a cluster has as many lives as nodes and leaders, and checkers know of them
what samples say.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.jepsen import history
from tests.jepsen.history import AdminEnded, ChannelMade, Died, Drained, Letter, Message
from tests.jepsen.load import dead_letters
from tests.jepsen.load.client import V2, Gone, connect, get_json
from tests.jepsen.load.consumers import Consumer, Subscription
from tests.jepsen.load.dead_letters import FailingMessages, fails
from tests.jepsen.load.operators import Operator, Switcher
from tests.jepsen.load.plan import ChannelPlan, TopicPlan
from tests.jepsen.load.publishers import OUTCOME_SECONDS, PATIENT, PIPELINED, PROBE_SECONDS, Publisher, probe_once
from tests.jepsen.load.recorder import Recorder

RETRY_SECONDS = 0.02
MSG_TIMEOUT_MS = 3000
DRAIN_SECONDS = 60.0
LOOKUP_SECONDS = 0.05
HELD_UP_SECONDS = 0.5  # a publish that takes longer was held up
CONNECT_SECONDS = 20.0
LOOPBACK = "127.0.0.1"
WINDOWS = {"late": (200,), "troubled": (200,)}  # RDY of those who keep messages for long: with less they fall behind

Key = tuple[int, int]


@dataclass(frozen=True)
class Endpoint:
    """Where one node listens."""

    tcp: int
    http: int
    name: str = ""
    grpc: str = ""  # host and port; only operators need it


@dataclass
class Owed:
    """What became of the messages of one topic."""

    ok: set[Key]  # what was OK'd
    got: dict[str, set[Key]]  # what came out, by channel


class ClusterLoad(Recorder):
    """What the clients of one run share."""

    def __init__(
        self,
        seed: int,
        nodes: Sequence[Endpoint],
        lookupds: Sequence[int],
        *,
        topic: str = "orders",
        channels: Sequence[str] = ("steady",),
        publishers: int = 3,
        consumers: int = 2,
        plans: Sequence[TopicPlan] = (),
        any_node: bool = False,
        pace: float = 1.0,
        hosts: Mapping[int, str] = MappingProxyType({}),
        failing: FailingMessages | None = None,
        sync: str = "",
        path: Path | None = None,
    ) -> None:
        """`lookupds`: HTTP ports. `plans`: instead of one topic with these channels, so many publishers, and consumers
        per channel. `any_node`: they SUB anywhere, not where /lookup says. `hosts`: addresses of ports that are not on
        loopback. `failing`: what the consumers of its channel do. `path`: of the history, instead of memory."""
        super().__init__(seed, path)
        self.gen = 1  # of all nodes together
        self.oks: list[float] = []  # when publishes of anybody were OK'd
        self.probes: list[tuple[float, float]] = []  # of the probers: first sent, OK'd
        self.avoid: int | Collection[int] | None = None  # index of the node, or nodes, that probers leave alone
        self.plans: Sequence[TopicPlan] = plans or [simple_plan(topic, channels, publishers, consumers, pace)]
        self._nodes = nodes
        self._lookupds = lookupds
        self._any_node = any_node
        self._hosts = hosts
        self._failing = failing or self._failing_messages()
        self._sync = sync
        self._under_way: dict[int, tuple[str, int, int, int]] = {}  # topic, process, first and count of a publish
        self._owed = {
            plan.name: Owed(set(), {channel.name: set() for channel in plan.channels if plan.owed(channel)})
            for plan in self.plans
        }

    def _failing_messages(self) -> FailingMessages | None:
        """Of the channel in the plans that has such consumers, with a policy."""
        for plan in self.plans:
            if any(channel.habit == "failing" and channel.policy is not None for channel in plan.channels):
                return FailingMessages(lambda: self._nodes[0].grpc, plan.name)
        return None

    # ---- life

    def begin(self) -> None:
        """Let everybody loose. The topics and their channels are there."""
        self.record(history.Run(self._seed, self._sync, 0.0))
        self.record(history.Started(0.0, 1))
        start = self._loop.create_task
        for plan in self.plans:
            for channel in plan.channels:
                self.record(ChannelMade(0.0, 0.0, 0, 0, plan.name, channel.name, "ok", "", plan.ordered))
                self._say_policy(plan, channel)
                for n in range(channel.consumers):
                    rng = self.rng(f"consumer {plan.name} {channel.name} {n}")
                    self._tasks.append(start(self._consume(plan, channel, rng)))
            self._publishing_tasks += map(start, self._publishing(plan))

    def _say_policy(self, plan: TopicPlan, channel: ChannelPlan) -> None:
        """That what may be missing is known: it has been asked for, and is in force."""
        said = dict(channel.said or {})
        if plan.abandoned_after_ms:
            said["abandoned_after_ms"] = plan.abandoned_after_ms
        if said:
            op = self.admin_sent("policy", plan.name, channel.name, json.dumps(said))
            self.record(AdminEnded(self.now(), op, "ok"))

    def _publishing(self, plan: TopicPlan) -> list[Any]:
        """What ends when publishing ends."""
        work = [self._publish(plan, self.rng(f"publisher {plan.name} {n}")) for n in range(plan.publishers)]
        work += [self._publish(plan, self.rng(f"patient {plan.name} {n}"), patient=True) for n in range(plan.patient)]
        if plan.probes:
            work += [
                self._probe(plan, partition if plan.partitions > 1 else -1, self.rng(f"prober {plan.name} {partition}"))
                for partition in range(plan.partitions)
            ]
        for channel in plan.channels:
            if channel.moved or channel.switched:
                rng = self.rng(f"operator {plan.name} {channel.name}")
                address = lambda rng=rng: rng.choice(self._nodes).grpc  # noqa: E731
                kind = Operator if channel.moved else Switcher
                work.append(kind(self, address, plan.name, channel.name, rng).run())
        return work

    async def end(self) -> list[str]:
        """Stop publishing, wait until every channel has had everything that was OK'd; what did not happen in time."""
        self.publishing = False
        self.draining = True
        stuck = []
        done, late = await asyncio.wait(self._publishing_tasks, timeout=OUTCOME_SECONDS + 5)
        for task in done:
            task.result()
        for task in late:
            stuck.append(f"a publisher did not end: {task.get_coro()}")
            task.cancel()
        if await self._until(self._all_delivered, DRAIN_SECONDS):
            moved = any(channel.moved for plan in self.plans for channel in plan.channels)
            long = moved or self._failing is not None
            emptied = await self._until(self._empty, DRAIN_SECONDS if long else 10.0)
            if moved and not emptied:
                stuck.append("a channel that was moved does not get empty")
            await self._until(self._all_delivered, DRAIN_SECONDS)  # of unknown outcome, and died since
            if self._failing is not None:
                stuck += await self._raise_dead(self._failing)
        if not await self._all_delivered():
            owed = {channel: len(missing) for channel, missing in self.missing().items()}
            stuck.append(f"not delivered in time: {owed}; dead letters that were not moved: {len(self._unmoved())}")
        for plan in self.plans:
            self.record(Drained(self.now(), plan.name))
        return stuck + await self.stop_consumers()

    async def _raise_dead(self, failing: FailingMessages) -> list[str]:
        """Judge the dead letters, and have them come again; what is wrong."""
        op = self.admin_sent("requeue", failing.topic, dead_letters.CHANNEL, "all dead letters")

        def tell(letters: list[Letter]) -> None:
            self.record(Died(self.now(), failing.topic, dead_letters.CHANNEL, letters))

        problems = await self._loop.run_in_executor(None, failing.raise_all, tell)
        self.record(AdminEnded(self.now(), op, "ok"))

        async def done() -> bool:
            return failing.all_raised and await self._all_delivered() and await self._empty()

        await self._until(done, DRAIN_SECONDS)
        return problems + failing.end()

    def missing(self) -> dict[str, set[Key]]:
        """What was OK'd and has not come out, by channel. What died without being read, as each of its deliveries was
        lost on the way, comes out of the topic for the dead, or when all dead letters are raised."""
        found = {
            f"{topic}/{channel}": owed.ok - seen
            for topic, owed in self._owed.items()
            for channel, seen in owed.got.items()
        }
        for plan in self.plans:
            for channel in plan.channels:
                if channel.dead_to:
                    found[f"{plan.name}/{channel.name}"] -= self._came(channel.dead_to)
        if self._failing is not None and self._failing.failing:
            found.pop(f"{self._failing.topic}/{dead_letters.CHANNEL}", None)
        return found

    def _came(self, topic: str) -> set[Key]:
        """What has come out of any channel of a topic."""
        return set().union(*self._owed[topic].got.values())

    async def _all_delivered(self) -> bool:
        return not any(self.missing().values()) and not self._unmoved()

    def _unmoved(self) -> set[Key]:
        """Dead letters that have not come out of the topic to which they go."""
        found: set[Key] = set()
        for plan in self.plans:
            for channel in plan.channels:
                if channel.dead_to:
                    died = {key for key in self._owed[plan.name].got[channel.name] if fails(key)}
                    found |= died - self._came(channel.dead_to)
        return found

    async def _empty(self) -> bool:
        """Whether the leaders say that nothing waits: then every FIN has been taken in."""
        for plan in self.plans:
            ports = await self._leaders(plan.name)
            nodes = [node for node in self._nodes if node.tcp in ports]
            found: list[Any] = []
            for node in nodes:
                stats: Any = await self._get(node.http, f"/stats?format=json&include_clients=false&topic={plan.name}")
                found += [channel for topic in stats["topics"] for channel in topic["channels"]]
            if not found or any(c["depth"] + c["in_flight_count"] + c["deferred_count"] for c in found):
                return False
        return True

    async def _until(self, check: Callable[[], object], seconds: float) -> bool:
        deadline = self._loop.time() + seconds
        while self._loop.time() < deadline:
            try:
                if await check():  # type: ignore[misc]
                    return True
            except (OSError, Gone, ValueError):
                pass
            await asyncio.sleep(0.1)
        return False

    # ---- figures

    def gap(self, since: float, until: float) -> float:
        """The longest time in which nobody's publish was OK'd, of what overlaps [since, until)."""
        marks = [since, *sorted(t for t in self.oks if since < t < until), until]
        return max(b - a for a, b in pairwise(marks))

    def worst_probe(self, since: float, until: float) -> float:
        """The longest that one publish to a node that lives took, retries included, of those under way in the span; not
        of those that an earlier fault had held up already."""
        return max((b - a for a, b in self.probes if b > since and since - HELD_UP_SECONDS < a < until), default=0.0)

    # ---- publishers

    async def _connect(self, rng: random.Random, port: int | None = None) -> tuple[int, V2, str] | None:
        """To that port, or any node; None if it does not answer."""
        try:
            port = port or rng.choice(self._nodes).tcp
            connecting = connect(port, host=self._hosts.get(port, LOOPBACK), msg_timeout=MSG_TIMEOUT_MS)
            client = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except (OSError, Gone, TimeoutError):
            await asyncio.sleep(RETRY_SECONDS)
            return None
        self._connections += 1
        return self._connections, client, next((node.name for node in self._nodes if node.tcp == port), "")

    async def _get(self, port: int, path: str) -> object:
        return await get_json(port, path, host=self._hosts.get(port, LOOPBACK))

    async def _publish(self, plan: TopicPlan, rng: random.Random, *, patient: bool = False) -> None:
        while self.publishing:
            connected = await self._connect(rng)
            if connected is not None:
                publisher = Publisher(self, plan.name, rng, PATIENT if patient else plan.habits)
                publisher.use(*connected)
                try:
                    await publisher.run()
                finally:
                    connected[1].close()

    async def _probe(self, plan: TopicPlan, partition: int, rng: random.Random) -> None:
        """One message at a time, tried again until it is OK'd, each attempt a message of its own."""
        process = counter = 0
        client, at = None, -1
        began = self.now()
        while self.publishing:
            if client is None or client.closed.done() or self._avoided(at):
                if client is not None:
                    client.close()
                others = [n for n in range(len(self._nodes)) if not self._avoided(n)]
                if not others:
                    client = None
                    await asyncio.sleep(LOOKUP_SECONDS)
                    continue
                at = rng.choice(others)
                connected = await self._connect(rng, self._nodes[at].tcp)
                client = None if connected is None else connected[1]
                process, counter = self.process(), 0
                continue
            name = self._nodes[at].name
            ok = await probe_once(
                self,
                client,
                plan.name,
                process,
                counter,
                node=name,
                partition=partition,
                give_up=lambda at=at: self._avoided(at),  # type: ignore[misc]
            )
            counter += 1
            if ok:
                self.probes.append((began, self.now()))
                await asyncio.sleep(PROBE_SECONDS if partition < 0 else 10 * PROBE_SECONDS)
                began = self.now()
            else:
                client.close()
        if client is not None:
            client.close()

    def _avoided(self, node: int) -> bool:
        avoid = self.avoid
        return node in avoid if isinstance(avoid, Collection) else node == avoid

    def begin_publish(self, **publish: Any) -> int:
        op = super().begin_publish(**publish)
        self._under_way[op] = publish["topic"], publish["process"], publish["first"], len(publish["bodies"])
        return op

    def end_publish(self, op: int, result: history.Result) -> None:
        super().end_publish(op, result)
        topic, process, first, count = self._under_way.pop(op)
        if result == "ok":
            self.oks.append(self.now())
            self._owed[topic].ok.update((process, first + n) for n in range(count))

    # ---- consumers

    async def _leaders(self, topic: str) -> list[int]:
        """The TCP ports where /lookup says the topic is."""
        for port in self._lookupds:
            try:
                found: Any = await asyncio.wait_for(self._get(port, f"/lookup?topic={topic}"), 2)
            except (OSError, Gone, ValueError, TimeoutError):
                continue
            if found["producers"]:
                return [int(producer["tcp_port"]) for producer in found["producers"]]
        return []

    async def _consume(self, plan: TopicPlan, channel: ChannelPlan, rng: random.Random) -> None:
        """A consumer that always comes back. Each connection has its own, as publishers have: of beats, too, order is
        promised per connection."""
        reads = self._subscription(plan, channel)
        while channel.habit == "absent" and not self.draining:
            await asyncio.sleep(LOOKUP_SECONDS)
        while not self.stopping:
            if self._any_node:
                port: int | None = rng.choice(self._nodes).tcp
            else:
                port = rng.choice(await self._leaders(plan.name) or [None])
            connected = None if port is None else await self._connect(rng, port)
            if connected is None:
                await asyncio.sleep(LOOKUP_SECONDS)
                continue
            try:
                await Consumer(self, reads, rng).run(*connected)
            except Gone:
                await asyncio.sleep(LOOKUP_SECONDS)
            finally:
                connected[1].close()

    def _subscription(self, plan: TopicPlan, channel: ChannelPlan) -> Subscription:
        failing = self._failing if channel.habit == "failing" else None
        got = self._owed[plan.name].got.get(channel.name)

        def seen(messages: list[Message]) -> None:
            if got is not None:
                got.update((message.process, message.counter) for message in messages)

        return Subscription(
            plan.name,
            channel.name,
            channel.habit,
            plan.name if channel.beats else "",
            ordered=plan.ordered,
            msg_timeout_ms=MSG_TIMEOUT_MS,
            windows=WINDOWS.get(channel.habit, (20, 200)),
            failing=failing.received if failing is not None else lambda messages: set(),
            seen=seen,
        )


def simple_plan(topic: str, channels: Sequence[str], publishers: int, consumers: int, pace: float) -> TopicPlan:
    """One topic, of one partition."""
    return TopicPlan(
        topic,
        tuple(
            ChannelPlan(name, "failing" if name == dead_letters.CHANNEL else "steady", consumers, beats=False)
            for name in channels
        ),
        publishers=publishers,
        probes=True,
        habits=PIPELINED.slowed(pace),
    )
