"""What every load has: a clock, numbers for who does what, and a history of acts and outcomes.

An act is recorded before it is sent and its outcome when it arrives. Faults and samples come from other threads.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.jepsen import history
from tests.jepsen.history import (
    AdminSent,
    Answered,
    ChannelMade,
    FaultBegun,
    FaultEnded,
    Healed,
    History,
    Message,
    Outcome,
    Publish,
    Received,
    SeekSent,
)
from tests.jepsen.load.client import V2, Broken


class Recorder:
    """One run on one loop; loads derive from it."""

    def __init__(self, seed: int, path: Path | None = None) -> None:
        """`path`: where the history is kept, instead of in memory."""
        self.history = History(path)
        self.record = self.history.record
        self.gen = 0  # the life of the broker
        self.publishing = True
        self.draining = False  # consumers finish everything
        self.stopping = False
        self.hook: Callable[[str], None] = lambda moment: None  # told when something delicate has just been sent
        self._seed = seed
        self._broken = Broken()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._broken)
        self._began = time.monotonic()
        self._ops = itertools.count(1)  # several threads draw from it
        self._connections = 0
        self._processes = 0
        self._publishing_tasks: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def now(self) -> float:
        """Seconds since the run began, for any thread."""
        return round(time.monotonic() - self._began, 4)

    def rng(self, name: str) -> random.Random:
        """Chances of one client, the same for the same seed whatever the others draw."""
        return random.Random(f"{self._seed} {name}")

    def process(self) -> int:
        """A number for somebody whose publishes are in order."""
        self._processes += 1
        return self._processes

    # ---- publishes

    def begin_publish(
        self,
        *,
        conn: int,
        process: int,
        topic: str,
        command: str,
        first: int,
        bodies: list[bytes],
        delay: float = 0.0,
        node: str = "",
        partition: int = -1,
        probe: bool = False,
    ) -> int:
        """About to be sent; the number by which `end_publish` knows it. `delay`: seconds, of a DPUB."""
        op = next(self._ops)
        crcs = [zlib.crc32(body) for body in bodies]
        fields = (self.now(), op, self.gen, conn, process, topic, command, first, crcs, delay)
        self.record(Publish(*fields, node, partition, probe))
        return op

    def end_publish(self, op: int, result: history.Result) -> None:
        """What became of it."""
        self.record(Outcome(self.now(), op, result))

    # ---- messages

    def channel_made(
        self,
        t0: float,
        gen: int,
        conn: int,
        topic: str,
        channel: str,
        result: history.Result,
        node: str = "",
        ordered: bool = False,
        timeout: float = 0.0,
    ) -> None:
        """A SUB, or a create by other means (`conn` 0), was answered, or will not be."""
        self.record(ChannelMade(t0, self.now(), gen, conn, topic, channel, result, node, ordered, timeout))

    def received(self, conn: int, messages: list[tuple[int, int, str, bytes]]) -> list[Message]:
        """Messages came out on a connection; as they were recorded."""
        rows = []
        for timestamp, attempts, message_id, body in messages:
            process, counter = history.parse(body)
            rows.append(Message(process, counter, zlib.crc32(body), message_id, attempts, timestamp))
        self.record(Received(self.now(), conn, rows))
        return rows

    def answer(self, client: V2, event: Answered, argument: bytes = b"") -> None:
        """Send a FIN, REQ or TOUCH for each id of the event, unless the connection has ended."""
        if client.closed.done():
            return
        self.record(event)
        command = event.command.encode()
        client.send(b"".join(b"%s %s%s\n" % (command, message_id.encode(), argument) for message_id in event.ids))

    def fin(self, conn: int, client: V2, ids: list[str]) -> None:
        if ids:
            self.answer(client, Answered(self.now(), conn, "FIN", ids, 0))

    # ---- what operators do

    def seek_sent(
        self, topic: str, channel: str, to: str, *, value: int = 0, skew_ns: int = 0, partition: int = -1
    ) -> int:
        op = next(self._ops)
        self.record(SeekSent(self.now(), op, topic, channel, to, value, skew_ns, partition))
        return op

    def admin_sent(self, verb: str, topic: str = "", channel: str = "", what: str = "") -> int:
        op = next(self._ops)
        self.record(AdminSent(self.now(), op, verb, topic, channel, what))
        return op

    # ---- faults, by whoever breaks things; in any thread

    def fault_begun(self, fault: str, what: str, victims: Iterable[str] = ()) -> int:
        """A fault was injected; the number by which `fault_ended` knows it."""
        op = next(self._ops)
        self.record(FaultBegun(self.now(), op, fault, what, sorted(victims)))
        return op

    def fault_ended(self, op: int, proof: str, *, bit: bool = True) -> None:
        """It was healed; `proof` says what shows that it bit, or why it did not."""
        self.record(FaultEnded(self.now(), op, "ok" if bit else "fail", proof))

    def healed(self, settle: float) -> None:
        """Nothing is broken any more, for good, and everything must be well within `settle` seconds."""
        self.record(Healed(self.now(), settle))

    # ---- the end

    async def stop_consumers(self) -> list[str]:
        """Nobody comes back any more; what went wrong in callbacks."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return self._broken.errors


def result_of(reply: asyncio.Future[bytes]) -> history.Result:
    """What a publish's reply, or the end of its connection, says of it."""
    if reply.cancelled():
        return "info"
    if (error := reply.exception()) is not None:
        return result_by(error)
    assert reply.result() == b"OK", reply.result()
    return "ok"


def result_by(error: BaseException) -> history.Result:
    """What an error says of a publish: only "not stored" is certain."""
    return "fail" if "not stored" in str(error) else "info"
