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
from collections.abc import Callable
from typing import Any

from tests.jepsen import history
from tests.jepsen.history import Answered, ChannelMade, Deleted, Drained, Paused, Refused
from tests.jepsen.load.client import V2, Gone, connect, dpub, get_json, http, mpub, pub
from tests.jepsen.load.recorder import Recorder, result_of

RETRY_SECONDS = 0.02
BEAT_SECONDS = 0.25
OUTSTANDING_MAX = 80  # publishes without outcome per connection
LONG_REQ_MS = 5500  # beyond what the broker keeps in memory
MSG_TIMEOUT_MS = 1000
DRAIN_SECONDS = 60.0
BIG = 60_000  # bytes of a large body, so that a kill may fall into the middle of a write


class Load(Recorder):
    """What the clients of one run share."""

    def __init__(self, seed: int, tcp_port: int, http_port: int, *, publishers: int = 3) -> None:
        super().__init__(seed)
        self.tcp_port = tcp_port
        self.http_port = http_port
        self.draining = False
        self.stuck: list[str] = []  # topics that did not become empty in time, and publishers that did not end
        self.hook: Callable[[str], None] = lambda moment: None  # told when something delicate has just been sent
        self._publishers = publishers
        self._have_channels: set[str] = set()  # topics

    # ---- life of the load

    async def begin(self) -> None:
        """Make the durable channels of `orders` and `beat`, then let everybody loose."""
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
            self._tasks.append(self._loop.create_task(Consumer(self, topic, channel, habit, f"consumer {n}").run()))
        work = [TcpPublisher(self, "orders", f"publisher {n}").run() for n in range(self._publishers)]
        work += [self._http_publisher(), self._pauser(), self._topics()]
        self._publishing_tasks = [self._loop.create_task(coroutine) for coroutine in work]

    async def drain(self) -> list[str]:
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

    def channel_made(self, t0: float, gen: int, conn: int, topic: str, channel: str, result: history.Result) -> None:
        """A SUB, or an HTTP create (`conn` 0), was answered, or will not be."""
        self.record(ChannelMade(t0, self.now(), gen, conn, topic, channel, result))
        if result == "ok":
            self._have_channels.add(topic)

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
        consumers = [self._loop.create_task(Consumer(self, name, "first", "late", f"{name} first").run())]
        try:
            await publisher.publish_until_ok("")
            if rng.random() < 0.5:
                while not by_http and not self._made(name):
                    await asyncio.sleep(RETRY_SECONDS)
                await self.make_channel(name, "second")
                second = Consumer(self, name, "second", "prompt", f"{name} second")
                consumers.append(self._loop.create_task(second.run()))
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
    """One process that publishes over TCP: bursts of pipelined commands, unique messages."""

    def __init__(self, load: Load, topic: str, name: str) -> None:
        self._load = load
        self._topic = topic
        self._rng = load.rng(name)
        self._process = load.process()
        self._counter = 0
        self._conn = 0
        self._client: V2 | None = None
        self._open: set[asyncio.Future[bytes]] = set()

    async def run(self) -> None:
        load, rng = self._load, self._rng
        while load.publishing:
            self._conn, self._client = await load.connect()
            try:
                while load.publishing:
                    self._burst(rng.choice((1, 2, 5, 20)))
                    if len(self._open) > OUTSTANDING_MAX:
                        await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
                    # Now and then everybody is quiet: then progress has to go to the log by itself.
                    await asyncio.sleep(rng.uniform(0.3, 1.5) if rng.random() < 0.02 else rng.uniform(0.005, 0.06))
                if self._open:  # type: ignore[unreachable]  # publishing ends meanwhile
                    await asyncio.wait(self._open, timeout=20)
            except Gone:
                pass
            finally:
                self._client.close()

    async def publish_until_ok(self, moment: str) -> None:
        """Bursts until one command was OK'd; `moment` is told as soon as the first is on its way."""
        load = self._load
        while True:
            self._conn, self._client = await load.connect()
            try:
                futures = self._burst(self._rng.choice((1, 3, 10)))
                if moment:
                    load.hook(moment)
                await asyncio.wait(futures, timeout=20)
                if any(future.done() and future.exception() is None for future in futures):
                    await asyncio.sleep(0)  # outcomes are recorded by callbacks
                    return
            except Gone:
                pass
            finally:
                self._client.close()

    def _burst(self, commands: int) -> list[asyncio.Future[bytes]]:
        load, rng, client = self._load, self._rng, self._client
        assert client is not None
        data, ops = [], []
        for _ in range(commands):
            command = rng.choices(("PUB", "MPUB", "DPUB"), (12, 3, 1))[0]
            count = rng.randrange(2, 15) if command == "MPUB" else 1
            bodies = [self._body(n) for n in range(count)]
            delay_ms = rng.choice((0, 30, 400, 1500)) if command == "DPUB" else 0
            ops.append(
                load.begin_publish(
                    conn=self._conn,
                    process=self._process,
                    topic=self._topic,
                    command=command,
                    first=self._counter,
                    bodies=bodies,
                    delay=delay_ms / 1000,
                )
            )
            self._counter += count
            if command == "PUB":
                data.append(pub(self._topic, bodies[0]))
            elif command == "MPUB":
                data.append(mpub(self._topic, bodies))
            else:
                data.append(dpub(self._topic, delay_ms, bodies[0]))
        try:
            futures = client.ask(b"".join(data), len(ops))
        except Gone:
            for op in ops:  # never sent, but "info" is all that may be said without looking inside the client
                load.end_publish(op, "info")
            raise
        for op, future in zip(ops, futures, strict=True):
            self._open.add(future)
            future.add_done_callback(lambda reply, op=op: self._ended(op, reply))  # type: ignore[misc]
        return futures

    def _ended(self, op: int, reply: asyncio.Future[bytes]) -> None:
        self._open.discard(reply)
        self._load.end_publish(op, result_of(reply))

    def _body(self, n: int) -> bytes:
        rng = self._rng
        padding = BIG if rng.random() < 0.004 else rng.randrange(150)
        return history.body(self._process, self._counter + n, rng.randbytes(8) + b"." * padding)


class Consumer:
    """One consumer that always comes back. Habits: prompt, late (bursts of FINs), troubled (REQ, TOUCH, time-outs)."""

    def __init__(self, load: Load, topic: str, channel: str, habit: str, name: str) -> None:
        self._load = load
        self._topic = topic
        self._channel = channel
        self._habit = habit
        self._rng = load.rng(name)
        self._loop = asyncio.get_running_loop()
        self._beats = load.process()
        self._beat = 0
        self._conn = 0
        self._client: V2 | None = None

    async def run(self) -> None:
        load, rng = self._load, self._rng
        while not load.stopping:
            self._conn, self._client = conn, client = await load.connect(msg_timeout=MSG_TIMEOUT_MS)
            try:
                if not await self._subscribe(conn, client):
                    continue
                client.send(b"RDY %d\n" % rng.choice((50, 300)))
                while not client.closed.done():
                    await asyncio.wait({client.closed}, timeout=BEAT_SECONDS)
                    self._send_beat(conn, client)
                    if rng.random() < 0.02 and not load.draining:
                        break  # leaves with messages in flight
            except Gone:
                pass
            finally:
                client.close()

    async def _subscribe(self, conn: int, client: V2) -> bool:
        load = self._load
        t0, gen = load.now(), load.gen
        try:
            (reply,) = client.ask(f"SUB {self._topic} {self._channel}\n".encode())
            load.hook("channel creation")
            await reply
        except (Gone, asyncio.CancelledError) as error:
            load.channel_made(t0, gen, conn, self._topic, self._channel, "info")
            if isinstance(error, asyncio.CancelledError):
                raise
            return False
        load.channel_made(t0, gen, conn, self._topic, self._channel, "ok")
        client.on_messages = lambda messages: self._received(conn, client, messages)
        client.on_refused = lambda command, message_id: load.record(Refused(load.now(), conn, command, message_id))
        return True

    def _send_beat(self, conn: int, client: V2) -> None:
        """A publish among the FINs: when it is OK'd, every FIN before it has been read."""
        load = self._load
        body = history.body(self._beats, self._beat, b"")
        op = load.begin_publish(
            conn=conn, process=self._beats, topic="beat", command="PUB", first=self._beat, bodies=[body]
        )
        self._beat += 1
        try:
            (reply,) = client.ask(pub("beat", body))
        except Gone:
            load.end_publish(op, "info")
            raise
        reply.add_done_callback(lambda reply: load.end_publish(op, result_of(reply)))

    # ---- messages

    def _received(self, conn: int, client: V2, messages: list[tuple[int, int, str, bytes]]) -> None:
        load = self._load
        ids = load.received(conn, messages)
        if load.draining or self._habit == "prompt":
            load.fin(conn, client, ids)
        elif self._habit == "late":
            self._loop.call_later(self._rng.uniform(0, 0.3), load.fin, conn, client, ids[::-1])
        else:
            self._trouble(conn, client, ids)

    def _trouble(self, conn: int, client: V2, ids: list[str]) -> None:
        rng, load = self._rng, self._load
        finish: list[str] = []
        for message_id in ids:
            x = rng.random()
            if x < 0.90:
                finish.append(message_id)
            elif x < 0.97:
                delay_ms = rng.choices((0, 50, 300, 1500, LONG_REQ_MS), (40, 20, 20, 15, 5))[0]
                event = Answered(load.now(), conn, "REQ", [message_id], delay_ms / 1000)
                load.answer(client, event, b" %d" % delay_ms)
            elif x < 0.985:
                load.answer(client, Answered(load.now(), conn, "TOUCH", [message_id], 0))
                self._loop.call_later(rng.uniform(0, 1.3), load.fin, conn, client, [message_id])  # some too late
            # else: times out
        self._loop.call_later(rng.uniform(0, 0.2), load.fin, conn, client, finish)
