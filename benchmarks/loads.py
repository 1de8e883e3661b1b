"""The loads of the message path: publishing, consuming a backlog, both at once, and latency at a fixed rate.

Each is a frozen dataclass: its fields are what the rows of the table differ in. All connections of a load are driven
by one engine in this thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from socket import socket

from . import client, disk
from .client import QUIET, UNBUFFERED
from .figures import Figures, latencies
from .loadgen import Engine
from .place import (
    CHANNEL,
    FRAME_HEAD,
    TOPIC,
    Meter,
    Place,
    Scale,
    WrongResult,
    checked,
    drain,
    each_once,
    fill,
    payload,
    repeated,
    run_until,
    set_policy,
    wait_quiet,
)


@dataclass(frozen=True)
class Publish:
    """`connections` publishers with `window` unanswered commands each; `batch` > 1 makes the command an MPUB."""

    connections: int
    window: int
    body_bytes: int = 100
    batch: int = 1
    topics: int = 1
    tls: bool = False
    times_disk: bool = False  # measure the disk round beside it

    def __call__(self, place: Place) -> Figures:
        before = disk.probe(place.workspace) if self.times_disk else None
        engine = Engine()
        try:
            for number in range(self.connections):
                sock = client.open_connection(place.server.tcp, tls=self.tls)
                self._add(engine, sock, number)
            figures = self._measure(engine, place)
        finally:
            engine.close()
        if before:
            after = disk.probe(place.workspace)
            figures["disk_round_us"] = (before.round_s + after.round_s) / 2 * 1e6
            figures["disk_single_us"] = (before.single_s + after.single_s) / 2 * 1e6
        return figures

    def _add(self, engine: Engine, sock: socket, number: int) -> None:
        body = payload(self.body_bytes)
        # Names of equal length make units of equal length. Each connection starts at another topic.
        names = [f"{TOPIC}-{n:03}" for n in range(self.topics)] if self.topics > 1 else [TOPIC]
        start = number * len(names) // self.connections
        names = names[start:] + names[:start]
        commands = [_command(name, body, self.batch) for name in names]
        units = repeated(b"".join(commands), at_least=-(-self.window // len(names)))
        engine.add_publisher(sock, units, len(commands[0]), window=self.window, unit_messages=self.batch)

    def _measure(self, engine: Engine, place: Place) -> Figures:
        scale = place.scale
        count_max = scale.bytes_max // (self.body_bytes + FRAME_HEAD)
        created_s = self._create_topics(engine, scale) if self.topics > 1 else 0.0
        engine.publish()
        engine.run(scale.warmup_s, acked=engine.acked + count_max // 10)
        acked = engine.acked
        meter = Meter(place.server)
        seconds = engine.run(scale.seconds, acked=acked + count_max)
        in_window = engine.acked - acked
        meter.window()
        drain(engine, scale)
        figures = meter.figures(messages=engine.acked - acked, window_messages=in_window, window_s=seconds)
        return {**figures, "topics_created_s": created_s} if self.topics > 1 else figures

    def _create_topics(self, engine: Engine, scale: Scale) -> float:
        """Publish once to each topic, so that the window measures publishing; how long that took."""
        units = self.topics * self.connections
        engine.publish(units)
        spent = run_until(engine, scale, acked=units * self.batch)
        if engine.outstanding:
            raise WrongResult(f"{engine.outstanding} first messages of {self.topics} topics were never answered")
        return spent


@dataclass(frozen=True)
class Consume:
    """A backlog read and acknowledged by `connections` consumers with a window of `rdy` messages each.

    `fins_per_send` is how many FINs one system call carries: 0 for all that one read produced, 1 as the usual Go
    client does. Every `req_every`-th message is requeued once. `cold`: the backlog is in no cache when it starts.
    `policy`: what is asked of the channel, in JSON.
    """

    connections: int
    rdy: int
    fins_per_send: int = 0
    req_every: int = 0
    cold: bool = False
    tls: bool = False
    policy: str = ""

    def __call__(self, place: Place) -> Figures:
        server, scale = place.server, place.scale
        body = payload(100)
        # The channel is there before the messages are, as in production; nsqd would else move them once more.
        client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL).close()
        if self.policy:
            set_policy(server, self.policy)
        stored = fill(place, body, scale.backlog)
        wait_quiet(server)
        resident = self._chill(place) if self.cold else 0.0
        engine = Engine()
        try:
            for _ in range(self.connections):
                sock = client.open_connection(server.tcp, tls=self.tls)
                client.subscribe(sock, TOPIC, CHANNEL)
                engine.add_consumer(sock, fins_per_send=self.fins_per_send, req_every=self.req_every)
            engine.expect(body)
            figures = self._measure(engine, place, stored)
        finally:
            engine.close()
        return {**figures, "resident_share": resident} if self.cold else figures

    def _measure(self, engine: Engine, place: Place, stored: int) -> Figures:
        meter = Meter(place.server)
        engine.ready(self.rdy)
        seconds = engine.run(place.scale.backlog_s, finished=stored)
        meter.window()
        finished = engine.finished
        checked(engine, redelivered=engine.requeued)
        if finished == stored:
            # All is finished; whatever comes now is a message too many.
            engine.run(0.2)
        if engine.received > stored + engine.requeued:
            raise WrongResult(f"{engine.received} deliveries of {stored} messages, {engine.requeued} requeued")
        if finished == stored:
            each_once(engine, place.server)
        return {
            **meter.figures(messages=finished, window_messages=finished, window_s=seconds),
            "backlog": float(stored),
            "requeued": float(engine.requeued),
        }

    def _chill(self, place: Place) -> float:
        """Restart the server and drop its files from the page cache; the share of pages that stayed."""
        place.server.stop()
        disk.make_cold(place.server.data)
        place.server.start()
        wait_quiet(place.server)
        return disk.make_cold(place.server.data)


@dataclass(frozen=True)
class EndToEnd:
    """Publishers and consumers at the same time, until every channel has received everything.

    The rate is messages published / time until the last of them was delivered.
    """

    publishers: int
    window: int
    consumers: int  # per channel
    rdy: int
    batch: int = 1
    channels: int = 1

    def __call__(self, place: Place) -> Figures:
        body = payload(100)
        unit = _command(TOPIC, body, self.batch)
        engine = Engine()
        try:
            for channel in range(self.channels):
                for _ in range(self.consumers):
                    sock = client.open_connection(place.server.tcp)
                    engine.add_consumer(client.subscribe(sock, TOPIC, f"{CHANNEL}-{channel}"))
            for _ in range(self.publishers):
                sock = client.open_connection(place.server.tcp)
                units = repeated(unit, at_least=self.window)
                engine.add_publisher(sock, units, len(unit), window=self.window, unit_messages=self.batch)
            engine.expect(body)
            engine.ready(self.rdy)
            scale = place.scale
            self._burst(engine, scale, scale.warmup_s, scale.bytes_max // 10)
            before = engine.acked
            meter = Meter(place.server)
            seconds = self._burst(engine, scale, scale.seconds, scale.bytes_max)
            meter.window()
            checked(engine)
            each_once(engine, place.server, copies=self.channels)
            messages = engine.acked - before
            return meter.figures(messages=messages, window_messages=messages, window_s=seconds)
        finally:
            engine.close()

    def _burst(self, engine: Engine, scale: Scale, seconds: float, bytes_max: int) -> float:
        engine.publish()
        spent = engine.run(seconds, acked=engine.acked + bytes_max // (100 + FRAME_HEAD))
        engine.stop()
        due = engine.acked + engine.outstanding
        spent += run_until(engine, scale, acked=due, received=due * self.channels)
        if engine.outstanding or engine.received != due * self.channels:
            raise WrongResult(f"{engine.received} deliveries of {due} messages to {self.channels} channels")
        return spent


@dataclass(frozen=True)
class Latency:
    """One publisher at a fixed rate and one consumer; both latencies count from the intended send time."""

    per_second: int
    defaults: bool = False  # a client that sets nothing in IDENTIFY, else one that asks for no output buffering

    def __call__(self, place: Place) -> Figures:
        body = payload(100)
        unit = client.pub(TOPIC, body)
        settings = {} if self.defaults else UNBUFFERED
        engine = Engine()
        try:
            sock = client.open_connection(place.server.tcp, settings)
            engine.add_consumer(client.subscribe(sock, TOPIC, CHANNEL))
            publisher = client.open_connection(place.server.tcp, {} if self.defaults else QUIET)
            engine.add_paced(publisher, unit, stamp_at=len(unit) - len(body), per_second=self.per_second)
            engine.expect(body, stamped=True)
            engine.ready(200)
            return self._measure(engine, place)
        finally:
            engine.close()

    def _measure(self, engine: Engine, place: Place) -> Figures:
        scale = place.scale
        engine.pace(record_after=scale.warmup_s, record_for=scale.latency_s)
        engine.run(scale.warmup_s)
        before = engine.received
        meter = Meter(place.server)
        seconds = engine.run(scale.latency_s)
        in_window = engine.received - before
        meter.window()
        engine.stop()
        run_until(engine, scale, acked=engine.paced, received=engine.paced)
        if engine.acked != engine.paced or engine.received != engine.paced:
            raise WrongResult(f"{engine.paced} published, {engine.acked} answered, {engine.received} delivered")
        checked(engine)
        each_once(engine, place.server)
        return {
            **meter.figures(messages=engine.received - before, window_messages=in_window, window_s=seconds),
            **latencies("ack", engine.ack_ns()),
            **latencies("delivery", engine.delivery_ns()),
            **latencies("late", engine.late_ns()),
        }


def _command(topic: str, body: bytes, batch: int) -> bytes:
    return client.mpub(topic, [body] * batch) if batch > 1 else client.pub(topic, body)
