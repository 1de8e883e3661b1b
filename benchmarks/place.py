"""Where a workload runs: one fresh server, how much is asked of it, and the meter that is held against it."""

from __future__ import annotations

import os
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import client
from .figures import Figures
from .loadgen import Engine
from .procstat import machine_time
from .servers import NotForThisSubject, Server

TOPIC = "bench"
CHANNEL = "bench"
DRAIN_S = 60.0  # longest wait for what is under way, however steadily it comes
FRAME_HEAD = 34  # bytes a message adds to its body on the wire and in our log


class WrongResult(Exception):
    """The server was fast and wrong: something was lost, repeated, altered or refused."""


@dataclass(frozen=True)
class Scale:
    """How long and how much. Every bound of a cell is here."""

    rounds: int
    warmup_s: float
    seconds: float  # of a measured window
    bytes_max: int  # published in one window; keeps a fast broker from filling the disk
    backlog: int  # messages of 100 bytes waiting for a consumer
    backlog_s: float  # longest fill, and longest consume
    latency_s: float
    idle_s: float
    restart_bytes: int
    held: int  # messages in flight or deferred in the memory rows
    verified: int  # messages of the verification pass
    patience_s: float = 10.0  # a message that is owed and silence this long: it is lost


FULL = Scale(
    rounds=3,
    warmup_s=0.5,
    seconds=2.5,
    bytes_max=1 << 30,
    backlog=2_000_000,
    backlog_s=5.0,
    latency_s=5.0,
    idle_s=5.0,
    restart_bytes=1_000_000_000,
    held=1_000_000,
    verified=20_000,
)
QUICK = Scale(
    rounds=1,
    warmup_s=0.2,
    seconds=0.8,
    bytes_max=1 << 28,
    backlog=500_000,
    backlog_s=1.5,
    latency_s=1.5,
    idle_s=1.5,
    restart_bytes=100_000_000,
    held=200_000,
    verified=5_000,
)


@dataclass(frozen=True)
class Place:
    """One cell's surroundings."""

    server: Server
    scale: Scale
    workspace: Path


class Measure(Protocol):
    """What a workload does to a server, and what it read off."""

    def __call__(self, place: Place) -> Figures: ...


class Meter:
    """Readings taken at creation, after the measured window, and when the server has become quiet.

    The rate belongs to the window. CPU and bytes written include what the server still does afterwards (syncs,
    cursor progress), or work would be free if it is done late.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._written = server.tree.written_bytes()
        self._machine = machine_time()
        self._own = time.process_time()
        self._client = time.thread_time()
        self._wall = time.perf_counter()
        self._cpu_ns = server.tree.cpu_ns()

    def window(self) -> None:
        """The load has stopped."""
        cpu_s = (self._server.tree.cpu_ns() - self._cpu_ns) / 1e9
        wall_s = time.perf_counter() - self._wall
        machine = machine_time() - self._machine
        others_s = machine.busy_s - cpu_s - (time.process_time() - self._own)
        self._window: Figures = {
            "client_share": (time.thread_time() - self._client) / wall_s,
            "server_share": cpu_s / wall_s,
            "others_share": max(0.0, others_s) / wall_s,
            "steal_share": machine.steal_s / wall_s,
        }

    def figures(self, *, messages: int, window_messages: int, window_s: float) -> Figures:
        """`messages` is all since creation, `window_messages` what fell into the window."""
        if not messages or not window_s:
            raise WrongResult("no message came through")
        wait_quiet(self._server)
        tree = self._server.tree
        return {
            "rate_per_s": window_messages / window_s,
            "cpu_us": (tree.cpu_ns() - self._cpu_ns) / 1e3 / messages,
            "written_bytes": (tree.written_bytes() - self._written) / messages,
            "rss_bytes": float(tree.memory().rss_bytes),
            **self._window,
        }


def wait_quiet(server: Server, *, at_most_s: float = 3.0) -> None:
    """Until the server uses less than 5 % of a core over a fifth of a second."""
    give_up = time.perf_counter() + at_most_s
    before = server.tree.cpu_ns()
    while time.perf_counter() < give_up:
        time.sleep(0.2)
        now = server.tree.cpu_ns()
        if now - before < 10_000_000:
            return
        before = now


def payload(size: int) -> bytes:
    """A body without long runs of one byte, the same every time."""
    return bytes((n * 167 + 13) % 251 for n in range(size))


def repeated(unit: bytes, *, at_least_bytes: int = 1 << 18, at_least: int = 1) -> bytes:
    """A publisher's buffer: enough units that a send call is worth its while."""
    return unit * max(at_least, -(-at_least_bytes // len(unit)))


def fill(place: Place, body: bytes, messages: int, *, topic: str = TOPIC) -> int:
    """Publish about `messages` as fast as the server takes them, bounded in time; how many were stored."""
    batch = max(1, min(200, 200_000 // len(body)))
    unit = client.mpub(topic, [body] * batch)
    engine = Engine()
    try:
        for _ in range(4):
            sock = client.open_connection(place.server.tcp)
            engine.add_publisher(sock, repeated(unit), len(unit), window=4, unit_messages=batch)
        engine.publish(-(-messages // batch))
        engine.run(4 * place.scale.backlog_s, acked=-(-messages // batch) * batch)
        drain(engine, place.scale)
        return engine.acked
    finally:
        engine.close()


def drain(engine: Engine, scale: Scale) -> None:
    """Stop publishing and wait for every answer."""
    engine.stop()
    run_until(engine, scale, acked=engine.acked + engine.outstanding)
    if engine.outstanding:
        raise WrongResult(f"{engine.outstanding} published messages were never answered")


def run_until(engine: Engine, scale: Scale, *, acked: int = -1, received: int = -1) -> float:
    """Run until these totals are reached, or nothing has come for `patience_s`. Seconds taken."""
    spent = 0.0
    while spent < DRAIN_S:
        before = engine.acked, engine.received
        spent += engine.run(scale.patience_s, acked=acked, received=received)
        if (engine.acked >= acked and engine.received >= received) or (engine.acked, engine.received) == before:
            break
    return spent


def checked(engine: Engine, *, redelivered: int = 0) -> None:
    """Every body was right, nothing was refused, and only what was requeued came twice."""
    for count, what in (
        (engine.corrupt, "bodies differ from what was published"),
        (engine.refused, "answers (FIN, REQ) were refused"),
        (max(0, engine.redelivered - redelivered), "messages were delivered again without a reason"),
    ):
        if count:
            raise WrongResult(f"{count} {what}")


def set_policy(server: Server, policy: str) -> None:
    """Ask this of the channel, in JSON."""
    if not server.subject.ours:
        raise NotForThisSubject("only our broker has policies")
    url = f"http://{server.http[0]}:{server.http[1]}/channel/policy?topic={TOPIC}&channel={CHANNEL}"
    urllib.request.urlopen(url, policy.encode(), timeout=60).close()


def each_once(engine: Engine, server: Server, *, copies: int = 1) -> None:
    """Our ids are dense in a partition, so a message lost and another repeated can not hide behind an equal count."""
    if server.subject.ours and not engine.ids_dense(copies):
        raise WrongResult("the ids delivered are not one gapless row")


def cores_for(pinned: bool) -> tuple[set[int] | None, set[int] | None]:
    """(server's cores, client's cores) when the two are to be kept apart."""
    cores = sorted(os.sched_getaffinity(0))
    if not pinned or len(cores) < 2:
        return None, None
    return {cores[0]}, set(cores[1:])
