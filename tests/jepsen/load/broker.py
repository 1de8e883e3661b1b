"""The load of a crash run: publishers, consumers of several habits, a pauser, and topics that come and go.

    orders   3 publishers over TCP (pipelined PUB, MPUB, DPUB) and one over HTTP; channels
               steady      finishes everything, late and in bursts
               slow        requeues (at once, shortly, for longer than memory holds), touches, lets messages time out
               held        paused and unpaused all the time
               tap#ephemeral
    beat     what consumers publish on their own connections, so that it is known how far their FINs were read
    fresh-n  made by a publish, given channels, emptied, deleted; half of the names are used twice

Clients know nothing of kills: they see connections end and try again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.jepsen import history
from tests.jepsen.history import Deleted, Drained, Paused
from tests.jepsen.load.client import V2, Gone, connect, get_json, http
from tests.jepsen.load.consumers import Consumer, Subscription
from tests.jepsen.load.publishers import Habits, Publisher
from tests.jepsen.load.recorder import Recorder

RETRY_SECONDS = 0.02
MSG_TIMEOUT_MS = 1000
DRAIN_SECONDS = 60.0
HABITS = Habits(
    commands=(12, 3, 1),
    bursts=(1, 2, 5, 20),
    mpub_most=14,
    pause=(0.005, 0.06),
    quiet=0.02,
    leaves=0.0,
    outstanding_most=80,
)


class Load(Recorder):
    """What the clients of one run share."""

    def __init__(
        self,
        seed: int,
        tcp_port: int,
        http_port: int,
        *,
        publishers: int = 3,
        path: Path | None = None,
        sync: str = "",
        window: float = 1.0,
    ) -> None:
        """`path`: of the history, instead of memory. `window`: see history.Run."""
        super().__init__(seed, path)
        self.gen = 1
        self.oks: list[float] = []  # when publishes of anybody were OK'd
        self.avoid: int | Collection[int] | None = None  # nobody probes
        self.tcp_port = tcp_port
        self.http_port = http_port
        self.stuck: list[str] = []  # topics that did not become empty in time, and publishers that did not end
        self._run = history.Run(seed, sync, window)
        self._publishers = publishers
        self._have_channels: set[str] = set()  # topics

    # ---- life of the load

    def begin(self) -> None:
        """Make the durable channels of `orders` and `beat`, then let everybody loose."""
        self.record(self._run)
        self.record(history.Started(0.0, self.gen))
        self._tasks.append(self._loop.create_task(self._loose()))

    async def _loose(self) -> None:
        for topic, channel in (("orders", "steady"), ("orders", "slow"), ("orders", "held"), ("beat", "watch")):
            await self.make_channel(topic, channel)
        habits = [
            ("orders", "steady", "late"),
            ("orders", "steady", "prompt"),
            ("orders", "slow", "troubled"),
            ("orders", "slow", "troubled"),
            ("orders", "held", "late"),
            ("orders", "tap#ephemeral", "prompt"),
            ("beat", "watch", "prompt"),
        ]
        for n, (topic, channel, habit) in enumerate(habits):
            self._tasks.append(self._loop.create_task(self._consume(topic, channel, habit, f"consumer {n}")))
        work = [TcpPublisher(self, "orders", f"publisher {n}").run() for n in range(self._publishers)]
        work += [self._http_publisher(), self._pauser(), self._topics()]
        self._publishing_tasks = [self._loop.create_task(coroutine) for coroutine in work]

    async def end(self) -> list[str]:
        """Stop publishing, finish everything; what did not end: topics that the broker does not report as empty in
        time, clients, and what went wrong in them."""
        self.publishing = False
        self.draining = True
        done, late = await asyncio.wait(self._publishing_tasks, timeout=DRAIN_SECONDS)
        for task in done:
            task.result()
        self.stuck += [str(task.get_coro()) for task in late]
        for task in late:
            task.cancel()
        for topic in ("orders", "beat"):
            if await self.wait_empty(topic, DRAIN_SECONDS):
                self.record(Drained(self.now(), topic))
            else:
                self.stuck.append(topic)
        return self.stuck + await self.stop_consumers()

    def end_publish(self, op: int, result: history.Result) -> None:
        super().end_publish(op, result)
        if result == "ok":
            self.oks.append(self.now())

    def worst_probe(self, since: float, until: float) -> float:
        return 0.0

    async def wait_empty(self, topic: str, seconds: float) -> bool:
        """Until the broker says that no durable channel of the topic has anything; False if it takes too long."""
        deadline = self._loop.time() + seconds
        while self._loop.time() < deadline:
            try:
                if all(left == 0 for left in (await self._left(topic)).values()):
                    return True
            except (OSError, Gone):
                pass
            await asyncio.sleep(0.05)
        return False

    async def _left(self, topic: str) -> dict[str, int]:
        stats: Any = await get_json(self.http_port, f"/stats?format=json&include_clients=false&topic={topic}")
        if not stats["topics"]:
            raise Gone(f"no topic {topic}")
        return {
            channel["channel_name"]: channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]
            for found in stats["topics"]
            for channel in found["channels"]
            if not channel["channel_name"].endswith("#ephemeral")
        }

    # ---- what several clients do

    def channel_made(self, *made: Any) -> None:
        super().channel_made(*made)
        _, _, _, topic, _, result, *_ = made
        if result == "ok":
            self._have_channels.add(topic)

    async def _consume(self, topic: str, channel: str, habit: str, name: str) -> None:
        """A consumer that always comes back."""
        rng = self.rng(name)
        reads = Subscription(
            topic, channel, habit, "beat", msg_timeout_ms=MSG_TIMEOUT_MS, windows=(50, 300), leaves=0.02
        )
        consumer = Consumer(self, reads, rng)
        while not self.stopping:
            conn, client = await self.connect(msg_timeout=MSG_TIMEOUT_MS)
            try:
                await consumer.run(conn, client)
            except Gone:
                pass
            finally:
                client.close()

    async def connect(self, **identify: Any) -> tuple[int, V2]:
        """A connection with its number, as soon as the broker takes one."""
        while True:
            try:
                client = await connect(self.tcp_port, **identify)
                self._connections += 1
                return self._connections, client
            except (OSError, Gone):
                await asyncio.sleep(RETRY_SECONDS)

    async def make_channel(self, topic: str, channel: str) -> None:
        """Create a channel over HTTP, however often it takes. The topic is made as well."""
        while True:
            t0, gen = self.now(), self.gen
            try:
                await http(self.http_port, f"/topic/create?topic={topic}")
                path = f"/channel/create?topic={topic}&channel={channel}"
                request = asyncio.ensure_future(http(self.http_port, path))
                self.hook("channel creation")
                status = await request
                self.channel_made(t0, gen, 0, topic, channel, "ok" if status == 200 else "info")
                if status == 200:
                    return
            except (OSError, Gone):
                self.channel_made(t0, gen, 0, topic, channel, "info")
            await asyncio.sleep(RETRY_SECONDS)

    # ---- the single ones

    async def _http_publisher(self) -> None:
        rng, process, counter = self.rng("http"), self.process(), 0
        while self.publishing:
            count = rng.choice((1, 1, 5))
            bodies = [history.body(process, counter + n, b"x" * rng.randrange(100)) for n in range(count)]
            command = "PUB" if count == 1 else "MPUB"
            op = self.begin_publish(
                conn=0, process=process, topic="orders", command=command, first=counter, bodies=bodies
            )
            counter += count
            try:
                status = await http(self.http_port, f"/{command.lower()}?topic=orders", b"\n".join(bodies))
                self.end_publish(op, "ok" if status == 200 else "info")
            except (OSError, Gone):
                self.end_publish(op, "info")
            await asyncio.sleep(rng.uniform(0.01, 0.2))

    async def _pauser(self) -> None:
        rng = self.rng("pauser")
        paused = False
        while self.publishing:
            paused = not paused
            await self._pause(paused)
            await asyncio.sleep(rng.uniform(0.2, 2.0))
        await self._pause(False)

    async def _pause(self, paused: bool) -> None:
        """Pause or unpause `held`, however often it takes."""
        while True:
            t0 = self.now()
            if not paused:  # from now on it may deliver
                self.record(Paused(t0, t0, "orders", "held", False, "info"))
            try:
                verb = "pause" if paused else "unpause"
                request = asyncio.ensure_future(http(self.http_port, f"/channel/{verb}?topic=orders&channel=held"))
                self.hook("pause")
                status = await request
                if status == 200:
                    self.record(Paused(t0, self.now(), "orders", "held", paused, "ok"))
                    return
            except (OSError, Gone):
                pass
            await asyncio.sleep(RETRY_SECONDS)

    async def _topics(self) -> None:
        """Topics from their first publish to their deletion, one after the other."""
        rng, n = self.rng("topics"), 0
        while self.publishing:
            for _ in range(rng.choice((1, 2))):
                await self._topic(f"fresh-{n}", rng)
            n += 1

    async def _topic(self, name: str, rng: random.Random) -> None:
        publisher = TcpPublisher(self, name, f"{name} {rng.random()}")
        await publisher.publish_until_ok("topic creation")
        by_http = rng.random() < 0.5
        if by_http:
            await self.make_channel(name, "first")
        consumers = [self._loop.create_task(self._consume(name, "first", "late", f"{name} first"))]
        try:
            await publisher.publish_until_ok("")
            if rng.random() < 0.5:
                while not by_http and not self._made(name):
                    await asyncio.sleep(RETRY_SECONDS)
                await self.make_channel(name, "second")
                second = self._consume(name, "second", "prompt", f"{name} second")
                consumers.append(self._loop.create_task(second))
                await publisher.publish_until_ok("")
            while not self._made(name):
                await asyncio.sleep(RETRY_SECONDS)
            if await self.wait_empty(name, DRAIN_SECONDS):
                self.record(Drained(self.now(), name))
            else:
                self.stuck.append(name)
        finally:
            for task in consumers:
                task.cancel()
            await asyncio.gather(*consumers, return_exceptions=True)
        await publisher.publish_until_ok("")  # goes with the topic, and must not come out in its next life
        await self._delete(name)

    def _made(self, topic: str) -> bool:
        """Whether anybody has been told that the topic's first channel exists, in this life of the topic."""
        return topic in self._have_channels

    async def _delete(self, topic: str) -> None:
        while True:
            t0 = self.now()
            try:
                request = asyncio.ensure_future(http(self.http_port, f"/topic/delete?topic={topic}"))
                self.hook("topic deletion")
                status = await request
                if status in (200, 404):
                    self.record(Deleted(t0, self.now(), topic, "ok"))
                    self._have_channels.discard(topic)
                    return
            except (OSError, Gone):
                self.record(Deleted(t0, self.now(), topic, "info"))
                self._have_channels.discard(topic)
            await asyncio.sleep(RETRY_SECONDS)


class TcpPublisher:
    """One process that publishes over TCP, as long as it may."""

    def __init__(self, load: Load, topic: str, name: str) -> None:
        self._load = load
        self._rng = load.rng(name)
        self._publisher = Publisher(load, topic, self._rng, HABITS)

    async def run(self) -> None:
        while self._load.publishing:
            conn, client = await self._load.connect()
            self._publisher.use(conn, client)
            try:
                await self._publisher.run()
            finally:
                client.close()

    async def publish_until_ok(self, moment: str) -> None:
        """Bursts until one command was OK'd; `moment` is told as soon as the first is on its way."""
        while True:
            conn, client = await self._load.connect()
            self._publisher.use(conn, client)
            try:
                futures = self._publisher.burst(self._rng.choice((1, 3, 10)))
                if moment:
                    self._load.hook(moment)
                await asyncio.wait(futures, timeout=20)
                if any(future.done() and future.exception() is None for future in futures):
                    await asyncio.sleep(0)  # outcomes are recorded by callbacks
                    return
            except Gone:
                pass
            finally:
                client.close()
