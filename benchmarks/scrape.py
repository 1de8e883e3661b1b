"""What a scrape of /metrics costs, and what it costs the others: `python -m benchmarks.scrape`.

Three nodes: one with a topic and a channel, one whose series are just below their bound, and one that leads far more,
so that they are merged. Of each, the size of an answer, its series and the CPU time of the broker for it; and how long
publishes of a client that sends 1,000 a second wait for their OK, without scrapes and with one each second, in rounds
that take turns. `python -m benchmarks.scrape 5 /path/to/nsqd` measures another build, in 5 rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import client, servers
from .build import build
from .figures import percentile
from .procstat import load_average

NODES = (("a topic", 0), ("just below the bound", 15), ("far above it", 60))
PARTITIONS, CHANNELS = 16, 2  # of a topic, unless there is only one
SCRAPES = 10
PER_SECOND = 1000
SECONDS, WARMUP_S = 8.0, 1.0
ROUNDS = 5
# On this machine it would run in front of the client that is measured; a scraper has a host of its own.
_SCRAPER = """
import os, sys, time, urllib.request
os.nice(19)
while True:
    time.sleep(1.0)
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={"Accept": sys.argv[2]}), timeout=30).read()
"""
ACCEPT = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"  # as Prometheus asks


def main(words: Sequence[str]) -> int:
    build()
    servers.compile_modules()
    rounds = int(words[0]) if words else ROUNDS
    command = words[1] if len(words) > 1 else None
    for name, topics in NODES:
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--topic-partitions={PARTITIONS if topics else 1}"]
            subject = servers.our_broker("compiled", command)
            with servers.fresh_server(subject, Path(folder), sync="none", flags=flags) as server:
                _fill(server, topics)
                _show(name, server, rounds)
    return 0


def _fill(server: servers.Server, topics: int) -> None:
    for topic in ("bench", *(f"topic-{n}" for n in range(topics))):
        _post(server, f"/topic/create?topic={topic}")
        for channel in range(CHANNELS if topics else 1):
            _post(server, f"/channel/create?topic={topic}&channel=channel-{channel}")
        _post(server, f"/pub?topic={topic}", b"x")


def _show(name: str, server: servers.Server, rounds: int) -> None:
    text = _scraped(server).decode()
    tree, cpu = server.tree, []
    for _ in range(SCRAPES):
        time.sleep(0.2)
        before, began = tree.cpu_ns(), time.monotonic()
        _scraped(server)
        cpu.append((tree.cpu_ns() - before) / 1e6)
        assert time.monotonic() - began < 30
    series = sum(not line.startswith("#") for line in text.splitlines())
    print(f"{name}: {series:,} series, {len(text) / 1e3:,.0f} KB, {statistics.median(cpu):.1f} ms CPU", flush=True)
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for scraped in (False, True):
            found[scraped].append(_published(server, scraped=scraped))
    for scraped, values in found.items():
        p50, p99, p999 = (statistics.median(column) for column in zip(*values, strict=True))
        each = ", ".join(f"{p99:.2f}" for _, p99, _ in values)
        what = "a scrape each second" if scraped else "no scrape"
        print(f"  {what:22} OK after p50 {p50:.2f} ms, p99 {p99:.2f} ({each}), p99.9 {p999:.2f}", flush=True)
    print(f"  load average {load_average():.1f}", flush=True)


def _published(server: servers.Server, *, scraped: bool) -> tuple[float, float, float]:
    """p50, p99 and p99.9 in ms."""
    from .loadgen import Engine

    body = bytes(100)
    unit = client.pub("bench", body)
    engine = Engine()
    try:
        engine.add_paced(
            client.open_connection(server.tcp), unit, stamp_at=len(unit) - len(body), per_second=PER_SECOND
        )
        engine.pace(record_after=WARMUP_S, record_for=SECONDS)
        with _scraping(server) if scraped else _nothing():
            engine.run(WARMUP_S + SECONDS)
        ordered = sorted(engine.ack_ns())
    finally:
        engine.close()
    p50, p99, p999 = (percentile(ordered, share) / 1e6 for share in (0.5, 0.99, 0.999))
    return p50, p99, p999


@contextmanager
def _scraping(server: servers.Server) -> Iterator[None]:
    """By a process of its own: in this one it would hold up the load generator."""
    host, port = server.http
    scraper = subprocess.Popen([sys.executable, "-c", _SCRAPER, f"http://{host}:{port}/metrics", ACCEPT])
    try:
        yield
        if scraper.poll() is not None:
            raise RuntimeError("the scraper ended")
    finally:
        scraper.kill()
        scraper.wait()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _scraped(server: servers.Server) -> bytes:
    host, port = server.http
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers={"Accept": ACCEPT})
    with urllib.request.urlopen(request, timeout=30) as answer:
        data: bytes = answer.read()
        return data


def _post(server: servers.Server, path: str, body: bytes = b"") -> None:
    host, port = server.http
    with urllib.request.urlopen(f"http://{host}:{port}{path}", data=body, timeout=30) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
