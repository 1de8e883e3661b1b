"""Publishers over plain V2 TCP: pipelined bursts of PUB, MPUB and DPUB, or one command at a time, and probers.

What one connection publishes keeps its order, so a publisher has a process number of its own, and in a cluster a new
one for every connection. An outcome that is not known stays unknown: nobody tries a message again, the next one is new.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.jepsen import history
from tests.jepsen.load.client import V2, Gone, dpub, mpub, pub
from tests.jepsen.load.recorder import Recorder, result_of

OUTCOME_SECONDS = 45.0  # beyond what a broker may take to say "outcome unknown"
BIG = 60_000  # bytes of a large body, so that a kill may fall into the middle of a write
PROBE_SECONDS = 0.003  # between an OK and the next probe
GIVE_UP_SECONDS = 0.05  # after which a prober looks whether its node is a victim by now


@dataclass(frozen=True)
class Habits:
    """How a publisher publishes."""

    commands: tuple[int, int, int] = (8, 2, 0)  # shares of PUB, MPUB, DPUB
    delays_ms: tuple[int, ...] = (0, 30, 400, 1500)  # of a DPUB
    bursts: tuple[int, ...] = (1, 2, 5, 10)  # commands in one write
    mpub_most: int = 11  # messages
    pause: tuple[float, float] = (0.005, 0.04)  # seconds between bursts
    quiet: float = 0.0  # chance of a pause so long that progress has to go to the log by itself
    leaves: float = 0.002  # chance, after a burst, to go on elsewhere
    outstanding_most: int = 60  # publishes without outcome
    padding_most: int = 150  # bytes
    pipelined: bool = True  # else each command waits for the answer to the last

    def slowed(self, factor: float) -> Habits:
        low, high = self.pause
        return Habits(**{**vars(self), "pause": (low * factor, high * factor)})

    @property
    def messages_a_second(self) -> float:
        """What one such publisher publishes when nothing holds it up."""
        shares = self.commands
        messages = (shares[0] + shares[1] * (2 + self.mpub_most) / 2 + shares[2]) / sum(shares)
        return messages * sum(self.bursts) / len(self.bursts) / (sum(self.pause) / 2)


PIPELINED = Habits()
PATIENT = Habits(bursts=(1,), pipelined=False, pause=(0.002, 0.02))


class Publisher:
    """One process. It publishes on one connection at a time."""

    def __init__(self, load: Recorder, topic: str, rng: random.Random, habits: Habits = PIPELINED) -> None:
        self._load = load
        self._topic = topic
        self._rng = rng
        self._habits = habits
        self._process = load.process()
        self._counter = 0
        self._conn = 0
        self._node = ""
        self._client: V2 | None = None
        self._open: set[asyncio.Future[bytes]] = set()

    def use(self, conn: int, client: V2, node: str = "") -> None:
        """From now on publish there."""
        self._conn, self._client, self._node = conn, client, node

    async def run(self) -> None:
        """Publish until that is over, or the connection is, or by lot."""
        load, rng, habits = self._load, self._rng, self._habits
        most = habits.outstanding_most if habits.pipelined else 0
        try:
            while load.publishing:
                self.burst(rng.choice(habits.bursts))
                if len(self._open) > most:
                    done, _ = await asyncio.wait(
                        self._open, timeout=OUTCOME_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not done:
                        return  # whoever is at the other end has gone, and nobody says so
                long = rng.random() < habits.quiet
                await asyncio.sleep(rng.uniform(0.3, 1.5) if long else rng.uniform(*habits.pause))
                if rng.random() < habits.leaves:
                    break
            if self._open:
                await asyncio.wait(self._open, timeout=OUTCOME_SECONDS)
        except Gone:
            pass

    def burst(self, commands: int) -> list[asyncio.Future[bytes]]:
        """So many commands in one write. Gone if there is no connection any more."""
        load, client = self._load, self._client
        assert client is not None
        if client.closed.done():
            raise Gone("")
        data, ops = [], []
        for _ in range(commands):
            op, command = self._command()
            ops.append(op)
            data.append(command)
        try:
            futures = client.ask(b"".join(data), len(ops))
        except Gone:
            for op in ops:  # never sent, but that is all that may be said without looking inside the client
                load.end_publish(op, "info")
            raise
        for op, future in zip(ops, futures, strict=True):
            self._open.add(future)
            future.add_done_callback(lambda reply, op=op: self._ended(op, reply))  # type: ignore[misc]
        return futures

    def _command(self) -> tuple[int, bytes]:
        """The next one, recorded."""
        rng, habits, topic = self._rng, self._habits, self._topic
        command = rng.choices(("PUB", "MPUB", "DPUB"), habits.commands)[0]
        count = rng.randint(2, habits.mpub_most) if command == "MPUB" else 1
        bodies = [self._body(n) for n in range(count)]
        delay_ms = rng.choice(habits.delays_ms) if command == "DPUB" else 0
        op = self._load.begin_publish(
            conn=self._conn,
            process=self._process,
            topic=topic,
            command=command,
            first=self._counter,
            bodies=bodies,
            delay=delay_ms / 1000,
            node=self._node,
        )
        self._counter += count
        if command == "PUB":
            return op, pub(topic, bodies[0])
        return op, mpub(topic, bodies) if command == "MPUB" else dpub(topic, delay_ms, bodies[0])

    def _ended(self, op: int, reply: asyncio.Future[bytes]) -> None:
        self._open.discard(reply)
        self._load.end_publish(op, result_of(reply))

    def _body(self, n: int) -> bytes:
        rng = self._rng
        padding = BIG if rng.random() < 0.002 else rng.randrange(self._habits.padding_most)
        return history.body(self._process, self._counter + n, rng.randbytes(8) + b"." * padding)


async def probe_once(
    load: Recorder,
    client: V2,
    topic: str,
    process: int,
    counter: int,
    *,
    node: str,
    partition: int,
    give_up: Callable[[], bool],
) -> bool:
    """One message, and what becomes of it; whether that is OK. `give_up`: its node is a victim by now, and how long
    the others take is what is measured."""
    body = history.body(process, counter, b"probe")
    op = load.begin_publish(
        conn=0,
        process=process,
        topic=topic,
        command="PUB",
        first=counter,
        bodies=[body],
        node=node,
        partition=partition,
        probe=True,
    )
    try:
        (reply,) = client.ask(pub(topic, body, partition))
    except Gone:
        load.end_publish(op, "info")
        return False
    deadline = load.now() + OUTCOME_SECONDS
    while not reply.done() and load.now() < deadline and not give_up():
        await asyncio.wait({reply}, timeout=GIVE_UP_SECONDS)
    result = result_of(reply) if reply.done() else "info"
    load.end_publish(op, result)
    return result == "ok"
