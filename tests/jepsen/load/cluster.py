"""A load on a cluster, and its judgement: publishers that use any node, consumers that ask a lookup daemon.

    publishers   each on a connection to a node drawn by lot: pipelined PUB and MPUB, a process number per connection
                 (order is promised per connection); a connection that ends is followed by one to another node
    consumers    ask /lookup where the topic is, connect there, SUB; finish at once or late, requeue some, and come back
                 when their connection ends
    prober       one publish at a time, to nodes other than the victim of a fault: it measures how long nothing is OK'd

Clients know nothing of faults. What they saw is a history (tests.jepsen.history) with a `window` of 0: a cluster has as
many lives as nodes and leaders, and checkers know of them what samples say.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import uvloop

from tests.jepsen import history
from tests.jepsen.checkers.judgement import Report, judge
from tests.jepsen.history import Answered, ChannelMade, Drained, Refused
from tests.jepsen.load import dead_letters
from tests.jepsen.load.client import V2, Gone, connect, get_json, mpub, pub
from tests.jepsen.load.dead_letters import FailingMessages
from tests.jepsen.load.recorder import Recorder, result_by, result_of

RETRY_SECONDS = 0.02
OUTSTANDING_MAX = 60  # publishes without outcome per connection
OUTCOME_SECONDS = 45.0  # beyond what a broker may take to say "outcome unknown"
MSG_TIMEOUT_MS = 3000
DRAIN_SECONDS = 60.0
LOOKUP_SECONDS = 0.05
CONNECT_SECONDS = 20.0
LOOPBACK = "127.0.0.1"
BIG = 60_000


@dataclass(frozen=True)
class Endpoint:
    """Where one node listens."""

    tcp: int
    http: int


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
        any_node: bool = False,
        pace: float = 1.0,
        hosts: Mapping[int, str] = MappingProxyType({}),
        failing: FailingMessages | None = None,
    ) -> None:
        """`lookupds`: HTTP ports. `consumers`: per channel. `any_node`: they SUB anywhere, not where /lookup says.
        `hosts`: addresses of ports that are not on loopback. `failing`: what the consumers of its channel do."""
        super().__init__(seed)
        self.gen = 1  # of all nodes together
        self.topic = topic
        self.oks: list[float] = []  # when publishes of anybody were OK'd
        self.probes: list[tuple[float, float]] = []  # of the prober: first sent, OK'd
        self.avoid: int | None = None  # index of the node that the prober leaves alone
        self.pace = pace
        self._nodes = nodes
        self._lookupds = lookupds
        self._channels = channels
        self._publishers = publishers
        self._consumers = consumers
        self._any_node = any_node
        self._hosts = hosts
        self._failing = failing
        self._sent: dict[int, tuple[int, int, int]] = {}  # process, first and count of publishes under way
        self._owed: set[tuple[int, int]] = set()  # what was OK'd
        self._got: dict[str, set[tuple[int, int]]] = {channel: set() for channel in channels}

    # ---- life

    def begin(self) -> None:
        """Let everybody loose. The topic and its channels are there."""
        self.record(history.Run(self._seed, "", 0.0))
        self.record(history.Started(0.0, 1))
        for channel in self._channels:
            self.record(ChannelMade(0.0, 0.0, 0, 0, self.topic, channel, "ok"))
            for n in range(self._consumers):
                consumer = self._consume(channel, self.rng(f"consumer {channel} {n}"))
                self._tasks.append(self._loop.create_task(consumer))
        work = [self._publish(self.rng(f"publisher {n}")) for n in range(self._publishers)]
        work.append(self._probe(self.rng("prober")))
        self._publishing_tasks = [self._loop.create_task(each) for each in work]

    async def end(self) -> list[str]:
        """Stop publishing, wait until every channel has had everything that was OK'd; what did not happen in time."""
        self.publishing = False
        stuck = []
        done, late = await asyncio.wait(self._publishing_tasks, timeout=OUTCOME_SECONDS)
        for task in done:
            task.result()
        for task in late:
            stuck.append(f"a publisher did not end: {task.get_coro()}")
            task.cancel()
        if await self._until(self._all_delivered, DRAIN_SECONDS):
            await self._until(self._empty, 10.0 if self._failing is None else DRAIN_SECONDS)
            if self._failing is not None:
                stuck += await self._raise_dead(self._failing)
        else:
            owed = {channel: len(missing) for channel, missing in self.missing().items()}
            stuck.append(f"not delivered in time: {owed}")
        self.record(Drained(self.now(), self.topic))
        return stuck + await self.stop_consumers()

    async def _raise_dead(self, failing: FailingMessages) -> list[str]:
        """Judge the dead letters, and have them come again; what is wrong."""
        problems = await self._loop.run_in_executor(None, failing.raise_all)

        async def done() -> bool:
            return failing.all_raised and await self._empty()

        await self._until(done, DRAIN_SECONDS)
        return problems + failing.end()

    def missing(self) -> dict[str, set[tuple[int, int]]]:
        """What was OK'd and has not come out, by channel."""
        return {channel: self._owed - seen for channel, seen in self._got.items()}

    async def _all_delivered(self) -> bool:
        return not any(self.missing().values())

    async def _empty(self) -> bool:
        """Whether the leader says that nothing waits: then every FIN has been taken in."""
        port = await self._leader()
        node = next((node for node in self._nodes if node.tcp == port), None)
        if node is None:
            return False
        stats = await self._get(node.http, f"/stats?format=json&include_clients=false&topic={self.topic}")
        assert isinstance(stats, dict)
        found = [channel for topic in stats["topics"] for channel in topic["channels"]]
        return bool(found) and not any(c["depth"] + c["in_flight_count"] + c["deferred_count"] for c in found)

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
        """The longest that one publish to a node that lives took, retries included, of those under way in the span."""
        return max((b - a for a, b in self.probes if b > since and a < until), default=0.0)

    # ---- publishers

    async def _connect(self, rng: random.Random, port: int | None = None) -> tuple[int, V2] | None:
        """To that port, or any node; None if it does not answer."""
        try:
            port = port or rng.choice(self._nodes).tcp
            connecting = connect(port, host=self._hosts.get(port, LOOPBACK), msg_timeout=MSG_TIMEOUT_MS)
            client = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except (OSError, Gone, TimeoutError):
            await asyncio.sleep(RETRY_SECONDS)
            return None
        self._connections += 1
        return self._connections, client

    async def _get(self, port: int, path: str) -> object:
        return await get_json(port, path, host=self._hosts.get(port, LOOPBACK))

    async def _publish(self, rng: random.Random) -> None:
        while self.publishing:
            connected = await self._connect(rng)
            if connected is not None:
                conn, client = connected
                try:
                    await Publisher(self, self.process(), conn, client, rng).run()
                finally:
                    client.close()

    async def _probe(self, rng: random.Random) -> None:
        """One message at a time, tried again until it is OK'd, each attempt a message of its own."""
        process = counter = 0
        client, at = None, -1
        began = self.now()
        while self.publishing:
            if client is None or client.closed.done() or at == self.avoid:
                if client is not None:
                    client.close()
                at = rng.choice([n for n in range(len(self._nodes)) if n != self.avoid])
                connected = await self._connect(rng, self._nodes[at].tcp)
                client = None if connected is None else connected[1]
                process, counter = self.process(), 0
                continue
            body = history.body(process, counter, b"probe")
            op = self.begin_publish(
                conn=0, process=process, topic=self.topic, command="PUB", first=counter, bodies=[body]
            )
            counter += 1
            try:
                (reply,) = client.ask(pub(self.topic, body))
                assert await asyncio.wait_for(reply, OUTCOME_SECONDS) == b"OK"
                result: history.Result = "ok"
            except (Gone, TimeoutError) as error:
                result = result_by(error)
            self.end_publish(op, result)
            if result == "ok":
                self.probes.append((began, self.now()))
                await asyncio.sleep(0.003)
                began = self.now()
            else:
                client.close()
        if client is not None:
            client.close()

    def begin_publish(self, **publish: Any) -> int:
        op = super().begin_publish(**publish)
        self._sent[op] = publish["process"], publish["first"], len(publish["bodies"])
        return op

    def end_publish(self, op: int, result: history.Result) -> None:
        super().end_publish(op, result)
        process, first, count = self._sent.pop(op)
        if result == "ok":
            self.oks.append(self.now())
            self._owed.update((process, first + n) for n in range(count))

    # ---- consumers

    async def _leader(self) -> int | None:
        """The TCP port where /lookup says the topic is."""
        for port in self._lookupds:
            try:
                found = await asyncio.wait_for(self._get(port, f"/lookup?topic={self.topic}"), 2)
            except (OSError, Gone, ValueError, TimeoutError):
                continue
            assert isinstance(found, dict)
            if found["producers"]:
                return int(found["producers"][0]["tcp_port"])
        return None

    async def _consume(self, channel: str, rng: random.Random) -> None:
        while not self.stopping:
            port = rng.choice(self._nodes).tcp if self._any_node else await self._leader()
            connected = None if port is None else await self._connect(rng, port)
            if connected is None:
                await asyncio.sleep(LOOKUP_SECONDS)
                continue
            conn, client = connected
            try:
                await self._subscribed(channel, conn, client, rng)
            except (Gone, TimeoutError):
                await asyncio.sleep(LOOKUP_SECONDS)
            finally:
                client.close()

    async def _subscribed(self, channel: str, conn: int, client: V2, rng: random.Random) -> None:
        t0 = self.now()
        (reply,) = client.ask(f"SUB {self.topic} {channel}\n".encode())
        await asyncio.wait_for(reply, 20)
        self.record(ChannelMade(t0, self.now(), conn, conn, self.topic, channel, "ok"))
        client.on_messages = lambda messages: self._received(channel, conn, client, rng, messages)
        client.on_refused = lambda command, message_id: self.record(Refused(self.now(), conn, command, message_id))
        client.send(b"RDY %d\n" % rng.choice((20, 200)))
        await client.closed

    def _received(
        self, channel: str, conn: int, client: V2, rng: random.Random, messages: list[tuple[int, int, str, bytes]]
    ) -> None:
        ids = self.received(conn, messages)
        self._got[channel].update(history.parse(body) for _, _, _, body in messages)
        if self._failing is not None and channel == dead_letters.CHANNEL:
            failing = self._failing.received(messages)
            again, delay_ms = [message_id for message_id in ids if message_id in failing], 0
        else:
            again, delay_ms = [message_id for message_id in ids if self.publishing and rng.random() < 0.01], 50
        if again:
            self.answer(client, Answered(self.now(), conn, "REQ", again, delay_ms / 1000), b" %d" % delay_ms)
        done = [message_id for message_id in ids if message_id not in again]
        if not self.publishing or rng.random() < 0.7:
            self.fin(conn, client, done)
        else:
            self._loop.call_later(rng.uniform(0, 0.2), self.fin, conn, client, done[::-1])


class Background:
    """A load in a thread of its own, so that whoever breaks the cluster may block; `finish` has its judgement."""

    def __init__(self, make: Callable[[], ClusterLoad], enter: Callable[[], None] = lambda: None) -> None:
        """`make` is called on the load's loop; `enter` before there is one, in its thread."""
        self.load: ClusterLoad
        self.stuck: list[str] = []
        self._make = make
        self._enter = enter
        self._error: BaseException | None = None
        self._task: asyncio.Task[object] | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> ClusterLoad:
        self._thread.start()
        assert self._begun.wait(10), "the load did not begin"
        return self.load

    def _run(self) -> None:
        try:
            self._enter()
            uvloop.run(self._main())
        except BaseException as error:
            self._error = error

    async def _main(self) -> None:
        self.load = self._make()
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._enough = asyncio.Event()
        self.load.begin()
        self._begun.set()
        await self._enough.wait()
        self.stuck = await self.load.end()

    def finish(self) -> Report:
        """End the load; what it saw, judged."""
        self._loop.call_soon_threadsafe(self._enough.set)
        self._thread.join(OUTCOME_SECONDS + DRAIN_SECONDS + 30)
        assert not self._thread.is_alive(), "the load does not end"
        if self._error is not None:
            raise self._error
        return judge(self.load.history)

    def close(self) -> None:
        """End it in any case, unjudged if it has not been finished: no client of a failed test knocks at later ones."""
        with contextlib.suppress(RuntimeError):  # it has ended
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


class Publisher:
    """One connection's publishes."""

    def __init__(self, load: ClusterLoad, process: int, conn: int, client: V2, rng: random.Random) -> None:
        self._load = load
        self._process = process
        self._conn = conn
        self._client = client
        self._rng = rng
        self._counter = 0
        self._open: set[asyncio.Future[bytes]] = set()

    async def run(self) -> None:
        load, rng = self._load, self._rng
        try:
            while load.publishing:
                self._burst(rng.choice((1, 2, 5, 10)))
                if len(self._open) > OUTSTANDING_MAX:
                    await asyncio.wait(self._open, timeout=OUTCOME_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(rng.uniform(0.005, 0.04) * load.pace)
                if rng.random() < 0.002:
                    break  # goes to another node
            if self._open:
                await asyncio.wait(self._open, timeout=OUTCOME_SECONDS)
        except Gone:
            pass

    def _burst(self, commands: int) -> None:
        load, rng = self._load, self._rng
        if self._client.closed.done():
            raise Gone("")
        data, ops = [], []
        for _ in range(commands):
            command = "MPUB" if rng.random() < 0.2 else "PUB"
            bodies = [self._body(n) for n in range(rng.randrange(2, 12) if command == "MPUB" else 1)]
            ops.append(
                load.begin_publish(
                    conn=self._conn,
                    process=self._process,
                    topic=load.topic,
                    command=command,
                    first=self._counter,
                    bodies=bodies,
                )
            )
            self._counter += len(bodies)
            data.append(pub(load.topic, bodies[0]) if command == "PUB" else mpub(load.topic, bodies))
        for op, future in zip(ops, self._client.ask(b"".join(data), len(ops)), strict=True):
            self._open.add(future)
            future.add_done_callback(lambda reply, op=op: self._ended(op, reply))  # type: ignore[misc]

    def _ended(self, op: int, reply: asyncio.Future[bytes]) -> None:
        self._open.discard(reply)
        self._load.end_publish(op, result_of(reply))

    def _body(self, n: int) -> bytes:
        rng = self._rng
        padding = BIG if rng.random() < 0.002 else rng.randrange(150)
        return history.body(self._process, self._counter + n, rng.randbytes(8) + b"." * padding)
