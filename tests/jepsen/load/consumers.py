"""Consumers over plain V2 TCP, which answer by their habit.

    prompt     finishes at once                       late      finishes within 0.3 s, the last first
    steady     mostly at once; requeues one of a hundred, by 50 ms
    troubled   requeues (at once, shortly, for longer than memory holds), touches, lets messages time out
    ordered    finishes at once; requeues some at once, lets a few time out
    failing    what the policy of its channel is about (tests.jepsen.load.dead_letters)
    refusing   the same messages, always: they die, and are moved to another topic
    sleepy     finishes at once, and takes nothing for seven of eleven seconds
    absent     comes when all others go

A consumer that sends beats publishes on its own connection: when a beat is OK'd, every FIN before it has been read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.jepsen import history
from tests.jepsen.history import Answered, Message, Refused
from tests.jepsen.load.client import V2, Gone, pub
from tests.jepsen.load.dead_letters import fails
from tests.jepsen.load.recorder import Recorder, result_of

BEAT_SECONDS = 0.25
LONG_REQ_MS = 5500  # beyond what the broker keeps in memory
SUB_SECONDS = 20.0
AWAKE_SECONDS, CYCLE_SECONDS = 4.0, 11.0  # of a sleepy one


@dataclass(frozen=True)
class Subscription:
    """What a consumer reads, and how."""

    topic: str
    channel: str
    habit: str
    beat_topic: str = ""  # where its beats go; empty: it sends none
    ordered: bool = False  # by the topic's settings
    msg_timeout_ms: int = 0
    windows: tuple[int, ...] = (20, 200)  # RDY, one of these
    leaves: float = 0.0  # chance, at each beat, to leave with messages in flight
    failing: Callable[[list[Message]], set[str]] = lambda messages: set()  # which ids are to be answered by REQ
    seen: Callable[[list[Message]], None] = lambda messages: None


class Consumer:
    """One consumer, on one connection at a time."""

    def __init__(self, load: Recorder, reads: Subscription, rng: random.Random) -> None:
        self._load = load
        self._reads = reads
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._beats = load.process()
        self._beat = 0
        self._asleep = False

    async def run(self, conn: int, client: V2, node: str = "") -> None:
        """Until the connection ends, or by lot. Gone if there is none."""
        load, reads, rng = self._load, self._reads, self._rng
        await self._subscribe(conn, client, node)
        window = rng.choice(reads.windows)
        client.send(b"RDY %d\n" % window)
        while not client.closed.done():
            await asyncio.wait({client.closed}, timeout=BEAT_SECONDS)
            self._doze(client, window)
            if not reads.beat_topic or load.draining:  # what comes last is not to be followed by more
                client.send(b"NOP\n")  # a host that lost power ends no connection: only who sends hears of it
                continue
            self._send_beat(conn, client, node)
            if rng.random() < reads.leaves and load.publishing:
                return

    def _doze(self, client: V2, window: int) -> None:
        load = self._load
        asleep = self._reads.habit == "sleepy" and not load.draining and load.now() % CYCLE_SECONDS > AWAKE_SECONDS
        if asleep != self._asleep and not client.closed.done():
            self._asleep = asleep
            client.send(b"RDY %d\n" % (0 if asleep else window))

    async def _subscribe(self, conn: int, client: V2, node: str) -> None:
        load, reads = self._load, self._reads
        t0, gen = load.now(), load.gen
        result: history.Result = "info"
        try:
            (reply,) = client.ask(f"SUB {reads.topic} {reads.channel}\n".encode())
            load.hook("channel creation")
            async with asyncio.timeout(SUB_SECONDS):  # `wait_for` loses a cancellation that comes with the reply
                await reply
            result = "ok"
        except TimeoutError:
            raise Gone("no answer to SUB") from None
        finally:
            load.channel_made(
                t0, gen, conn, reads.topic, reads.channel, result, node, reads.ordered, reads.msg_timeout_ms / 1000
            )
        client.on_messages = lambda messages: self._received(conn, client, messages)
        client.on_refused = lambda command, message_id: load.record(Refused(load.now(), conn, command, message_id))

    def _send_beat(self, conn: int, client: V2, node: str) -> None:
        load, topic = self._load, self._reads.beat_topic
        body = history.body(self._beats, self._beat, b"")
        op = load.begin_publish(
            conn=conn,
            process=self._beats,
            topic=topic,
            command="PUB",
            first=self._beat,
            bodies=[body],
            node=node,
        )
        self._beat += 1
        try:
            (reply,) = client.ask(pub(topic, body))
        except Gone:
            load.end_publish(op, "info")
            raise
        reply.add_done_callback(lambda reply: load.end_publish(op, result_of(reply)))

    # ---- messages

    def _received(self, conn: int, client: V2, messages: list[tuple[int, int, str, bytes]]) -> None:
        load, reads, rng = self._load, self._reads, self._rng
        rows = load.received(conn, messages)
        reads.seen(rows)
        ids = [row.id for row in rows]
        habit = "prompt" if load.draining and reads.habit not in ("failing", "refusing") else reads.habit
        if habit in ("prompt", "sleepy", "absent"):
            load.fin(conn, client, ids)
        elif habit == "late":
            self._loop.call_later(rng.uniform(0, 0.3), load.fin, conn, client, ids[::-1])
        elif habit == "failing":
            failing = reads.failing(rows)
            self._requeue(conn, client, [each for each in ids if each in failing], 0)
            load.fin(conn, client, [each for each in ids if each not in failing])
        elif habit == "refusing":
            refused = [row.id for row in rows if fails((row.process, row.counter))]
            self._requeue(conn, client, refused, 0)
            load.fin(conn, client, [each for each in ids if each not in refused])
        elif habit == "steady":
            self._steady(conn, client, ids)
        elif habit == "ordered":
            self._one_by_one(conn, client, ids)
        else:
            self._trouble(conn, client, ids)

    def _requeue(self, conn: int, client: V2, ids: list[str], delay_ms: int) -> None:
        if ids:
            event = Answered(self._load.now(), conn, "REQ", ids, delay_ms / 1000)
            self._load.answer(client, event, b" %d" % delay_ms)

    def _steady(self, conn: int, client: V2, ids: list[str]) -> None:
        rng, load = self._rng, self._load
        again = [each for each in ids if rng.random() < 0.01]
        self._requeue(conn, client, again, 50)
        done = [each for each in ids if each not in again]
        if rng.random() < 0.7:
            load.fin(conn, client, done)
        else:
            self._loop.call_later(rng.uniform(0, 0.2), load.fin, conn, client, done[::-1])

    def _one_by_one(self, conn: int, client: V2, ids: list[str]) -> None:
        for message_id in ids:
            x = self._rng.random()
            if x < 0.985:
                self._load.fin(conn, client, [message_id])
            elif x < 0.998:
                self._requeue(conn, client, [message_id], 0)
            # else: times out

    def _trouble(self, conn: int, client: V2, ids: list[str]) -> None:
        rng, load = self._rng, self._load
        finish: list[str] = []
        for message_id in ids:
            x = rng.random()
            if x < 0.90:
                finish.append(message_id)
            elif x < 0.97:
                delay_ms = rng.choices((0, 50, 300, 1500, LONG_REQ_MS), (40, 20, 20, 15, 5))[0]
                self._requeue(conn, client, [message_id], delay_ms)
            elif x < 0.985:
                load.answer(client, Answered(load.now(), conn, "TOUCH", [message_id], 0))
                self._loop.call_later(rng.uniform(0, 1.3), load.fin, conn, client, [message_id])  # some too late
            # else: times out
        self._loop.call_later(rng.uniform(0, 0.2), load.fin, conn, client, finish)
