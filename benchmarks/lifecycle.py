"""The rows that are not about the message path: starting, restarting, doing nothing, and holding a million messages."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Literal

from nsqha.cli.brokers.admin import Admin

from . import client, disk
from .figures import Figures, Spread
from .loadgen import Engine
from .place import CHANNEL, TOPIC, Place, WrongResult, checked, each_once, fill, payload, set_policy, wait_quiet
from .procstat import watching_memory
from .servers import Server

STARTS = 3
HOUR_MS = 3_600_000
PAGE, PAGES = 1000, 50  # of a list of dead letters
HELD_S = 60.0  # most that handing out or deferring a million messages may take; also nsqd's message timeout


@dataclass(frozen=True)
class Idle:
    """Memory and CPU of a server that nobody uses, and how long it takes from exec to ready on an empty folder."""

    def __call__(self, place: Place) -> Figures:
        server = place.server
        ready = [server.ready_s, *(self._started_again(server) for _ in range(STARTS - 1))]
        time.sleep(2.0)
        begun, cpu = time.perf_counter(), server.tree.cpu_ns()
        time.sleep(place.scale.idle_s)
        cpu_ms = (server.tree.cpu_ns() - cpu) / 1e6
        memory = server.tree.memory()
        return {
            "ready_s": Spread.of(ready).median,
            "idle_cpu_ms_per_s": cpu_ms / (time.perf_counter() - begun),
            "rss_bytes": float(memory.rss_bytes),
            "anonymous_bytes": float(memory.anonymous_bytes),
        }

    def _started_again(self, server: Server) -> float:
        server.stop()
        server.empty()
        server.start()
        return server.ready_s


@dataclass(frozen=True)
class Restart:
    """A log of `restart_bytes` in 1 KB messages: from exec to ready and to the first message, after a crash and after
    a clean stop."""

    def __call__(self, place: Place) -> Figures:
        server = place.server
        client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL).close()
        stored = fill(place, payload(1000), place.scale.restart_bytes // 1000)
        wait_quiet(server)
        size = disk.bytes_below(server.data)
        server.kill()
        crash = self._up_again(server)
        crash_depth = depth(server)
        stop_s = server.stop()
        clean = self._up_again(server)
        if server.subject.ours and (crash_depth, depth(server)) != (stored, stored):
            raise WrongResult(f"{stored} messages stored, {crash_depth} after a crash, {depth(server)} after a stop")
        return {
            "log_bytes": float(size),
            "crash_ready_s": crash[0],
            "crash_first_message_s": crash[1],
            "stop_s": stop_s,
            "clean_ready_s": clean[0],
            "clean_first_message_s": clean[1],
            "rss_bytes": float(server.tree.memory().rss_bytes),
        }

    def _up_again(self, server: Server) -> tuple[float, float]:
        begun = time.perf_counter()
        server.start()
        sock = client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL)
        try:
            sock.sendall(b"RDY 1\n")
            message_id = client.read_frame(sock, client.MESSAGE)[10:26]
            first_s = time.perf_counter() - begun
            sock.sendall(b"RDY 0\nREQ " + message_id + b" 0\n")
            time.sleep(0.1)  # let the requeue arrive before the connection ends
        finally:
            sock.close()
        return server.ready_s, first_s


@dataclass(frozen=True)
class Held:
    """How anonymous memory grows with messages that were delivered and not answered, or deferred by an hour."""

    how: Literal["in flight", "deferred"]

    def __call__(self, place: Place) -> Figures:
        server, count = place.server, place.scale.held
        client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL).close()
        body = payload(100)
        stored = fill(place, body, count)
        if stored < count:
            raise WrongResult(f"only {stored} of {count} messages were stored in time")
        wait_quiet(server)
        before = server.tree.memory()
        cpu = server.tree.cpu_ns()
        engine = Engine()
        try:
            for _ in range(4):
                sock = client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL)
                if self.how == "in flight":
                    engine.add_consumer(sock, holds=True)
                else:
                    engine.add_consumer(sock, req_every=1, req_delay_ms=HOUR_MS)
            engine.expect(body)
            with watching_memory(server.tree) as readings:
                engine.ready(-(-count // 4) if self.how == "in flight" else 2500)
                seconds = engine.run(HELD_S, received=count)
                engine.run(3.0)
            checked(engine)
            if engine.received < count:
                raise WrongResult(f"only {engine.received} of {count} messages were handed out in {HELD_S:.0f} s")
            each_once(engine, server)
            cpu_us = (server.tree.cpu_ns() - cpu) / 1e3
        finally:
            engine.close()
        return {
            "held": float(engine.received),
            "rate_per_s": engine.received / seconds,
            "cpu_us": cpu_us / engine.received,
            "anonymous_before_bytes": float(before.anonymous_bytes),
            "anonymous_growth_bytes": float(readings[-1].anonymous_bytes - before.anonymous_bytes),
            "anonymous_peak_growth_bytes": float(
                max(reading.anonymous_bytes for reading in readings) - before.anonymous_bytes
            ),
            "rss_bytes": float(readings[-1].rss_bytes),
        }


@dataclass(frozen=True)
class DeadLetters:
    """How anonymous memory grows with dead letters beside as many others, and what a page of them takes to list."""

    count: int = 100_000

    def __call__(self, place: Place) -> Figures:
        server = place.server
        client.subscribe(client.open_connection(server.tcp), TOPIC, CHANNEL).close()
        set_policy(server, '{"max_attempts": 1, "dead_max": 1000000}')
        body = payload(100)
        self._die(place, body, self.count)  # what so many deaths at once need for a moment, which is used again
        before = server.tree.memory()
        self._die(place, body, self.count)
        growth = server.tree.memory().anonymous_bytes - before.anonymous_bytes
        with Admin(server.grpc, 60) as admin:
            request = {"topic": TOPIC, "channel": CHANNEL, "state": admin.messages.MESSAGE_STATE_DEAD, "limit": PAGE}
            cpu, seconds, after = server.tree.cpu_ns(), [], []
            for _ in range(PAGES):
                begun = time.perf_counter()
                (answer,) = admin.call("ListMessages", after=after, **request).partitions
                seconds.append(time.perf_counter() - begun)
                if len(answer.messages) != PAGE:
                    raise WrongResult(f"{len(answer.messages)} dead letters in a page of {PAGE}")
                after = [answer.next]
        return {
            "held": float(self.count),
            "anonymous_growth_bytes": float(growth),
            "page_ms": Spread.of(seconds).median * 1e3,
            "page_cpu_ms": (server.tree.cpu_ns() - cpu) / 1e6 / PAGES,
            "rss_bytes": float(server.tree.memory().rss_bytes),
        }

    def _die(self, place: Place, body: bytes, count: int) -> None:
        stored = fill(place, body, count)
        engine = Engine()
        try:
            for _ in range(4):
                sock = client.subscribe(client.open_connection(place.server.tcp), TOPIC, CHANNEL)
                engine.add_consumer(sock, req_every=1)
            engine.expect(body)
            engine.ready(2500)
            engine.run(HELD_S, received=stored)
            engine.run(2.0)
            checked(engine)
        finally:
            engine.close()
        wait_quiet(place.server, at_most_s=10.0)


def depth(server: Server) -> int:
    """What /stats says the benchmark's channel still has to deliver, in flight and deferred included."""
    stats = json.loads(server.get(f"/stats?format=json&topic={TOPIC}&channel={CHANNEL}"))
    return sum(
        channel["depth"] + channel["in_flight_count"] + channel["deferred_count"]
        for topic in stats["topics"] or []
        for channel in topic["channels"] or []
    )
