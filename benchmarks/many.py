"""The rows about many partitions: `python -m benchmarks --many 300` (or 1000), three nodes with three replicas of each.

    created      from the first POST /topic/create to the answer of the last one, `CREATORS` at a time, through one node
    idle         CPU of each broker per second, with every partition led, followed twice and not used
    first PUB    to a topic that does not exist, at a broker that is alone on an empty folder; and ("looked up") at one
                 with two lookup daemons, which it asks for the topic's channels
    storm        `STORM` clients connect at once and IDENTIFY: until the last one is answered, or gone; median of
                 `STORMS`, ours and those given by --peer in turn
    failover     kill -9 of the node that leads most: from there until each partition that it led takes a publish, sent
                 through another node. It led all, as all were created there; and once more, "evenly led", a third, as
                 producers at all nodes or `nsqha cluster balance` leave it
    start        of that node with all its logs, and of a broker that is alone on an empty folder: until both ports take
                 connections ("listen"), until V2 clients are served ("tcp"), and until HTTP is as well
    memory       resident, of the broker that has most, with every partition led and followed

A failover ends for a partition with the OK to a publish that was sent after the kill, through a node that lives. All
partitions have a connection of their own for this, so the figures are those of partitions, not of one queue.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from . import client, disk, servers
from .figures import Spread
from .outages import outages
from .procstat import ProcessTree

CREATORS = 16
IDLE_S = 10.0
SETTLE_S = 5.0
FIRST_PUBS = 50
LOOKUP_DAEMONS = 2
STORM = 3000
STORMS = 3
STORM_S = 60.0
SPARE_FILES = 100
STARTS = 5


def run(count: int, workspace: Path, peers: Sequence[servers.Subject] = ()) -> dict[str, float]:
    """All rows; name -> figure. The names end with the unit. Storms are those of peers, too."""
    servers.compile_modules()
    disk.set_apart(workspace)
    figures = {**_alone(workspace / "alone"), **_looked_up(workspace / "looked_up")}
    figures |= _storms([servers.our_broker("compiled"), *peers], workspace)
    with servers.fresh_server(servers.our_cluster(3), workspace, sync="interval") as server:
        nodes = described(workspace / "cell" / "log")
        trees = [ProcessTree([node["pid"]]) for node in nodes]
        figures["idle_without_topics_cpu_ms_per_s"] = _idle(trees)
        cpu = [tree.cpu_ns() for tree in trees]
        figures["created_s"] = asyncio.run(_create([nodes[0]["http"]], count))
        figures["created_cpu_s"] = sum(tree.cpu_ns() - before for tree, before in zip(trees, cpu, strict=True)) / 1e9
        time.sleep(SETTLE_S)
        figures["idle_cpu_ms_per_s"] = _idle(trees)
        figures["resident_mb"] = max(tree.memory().rss_bytes for tree in trees) / 1e6
        led, victim = _most_led(nodes, workspace)
        figures |= _failover(nodes, victim, led, "failover")
        time.sleep(1.0)
        again = _started_again(nodes[victim], workspace / "again")
        figures["start_with_topics_tcp_s"], figures["start_with_topics_s"] = again
        assert server.alive()
    return {**figures, **_evenly_led(count, workspace)}


def _evenly_led(count: int, workspace: Path) -> dict[str, float]:
    """The failover of as many topics, of which each node leads a third."""
    with servers.fresh_server(servers.our_cluster(3), workspace, sync="interval") as server:
        nodes = described(workspace / "cell" / "log")
        asyncio.run(_create([node["http"] for node in nodes], count))
        time.sleep(SETTLE_S)
        led, victim = _most_led(nodes, workspace)
        figures = _failover(nodes, victim, led, "failover_evenly_led")
        assert server.alive()
    return figures


def _alone(folder: Path) -> dict[str, float]:
    """Start of a broker on an empty folder, and the first publishes to new topics there."""
    listened, served, starts, pubs = [], [], [], []
    arguments = _broker(folder)
    for turn in range(STARTS):
        data = folder / str(turn)
        data.mkdir(parents=True)
        words = [word.replace(f"--data-path={folder}", f"--data-path={data}") for word in arguments]
        with _process(words, folder / f"{turn}.log") as (times, tcp):
            served.append(times[0])
            starts.append(times[1])
            if turn == STARTS - 1:
                time.sleep(1.0)
                pubs = _first_pubs(tcp)
        listened.append(_until_listening(words, folder / f"{turn}.log"))
    return {
        "start_empty_listen_s": Spread.of(listened).median,
        "start_empty_tcp_s": Spread.of(served).median,
        "start_empty_s": Spread.of(starts).median,
        "first_pub_p50_ms": Spread.of(pubs).median,
        "first_pub_max_ms": max(pubs),
    }


def _broker(folder: Path, *flags: str) -> list[str]:
    """The command of a broker of ours."""
    ours = servers.our_broker("compiled")
    return ours.arguments(data=folder, tcp="127.0.0.1:0", http="127.0.0.1:0", sync="interval", flags=flags)


def _looked_up(folder: Path) -> dict[str, float]:
    """First publishes to new topics at a broker that has lookup daemons."""
    (data := folder / "data").mkdir(parents=True)
    lookupd = [str(Path(sys.executable).parent / "nsqlookupd"), "--broadcast-address=127.0.0.1"]
    lookupd += [f"--{name}-address=127.0.0.1:0" for name in ("tcp", "http")]
    with ExitStack() as running:
        flags = []
        for number in range(LOOKUP_DAEMONS):
            _, (host, port) = running.enter_context(_process(lookupd, folder / f"lookupd{number}.log"))
            flags.append(f"--lookupd-tcp-address={host}:{port}")
        _, tcp = running.enter_context(_process(_broker(data, *flags), folder / "log"))
        time.sleep(1.0)
        pubs = _first_pubs(tcp)
    return {"first_pub_looked_up_p50_ms": Spread.of(pubs).median, "first_pub_looked_up_max_ms": max(pubs)}


def _storms(subjects: Sequence[servers.Subject], workspace: Path) -> dict[str, float]:
    """Storms of connections at a fresh server of each subject in turn; what was not answered is counted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < STORM + SPARE_FILES:
        raise servers.CannotStart(f"{STORM} connections take more than the {hard} open files that `ulimit -Hn` allows")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: dict[str, list[tuple[float, int]]] = {subject.name: [] for subject in subjects}
    try:
        for _ in range(STORMS):
            for subject in subjects:
                with servers.fresh_server(subject, workspace, sync="interval") as server:
                    found[subject.name].append(_storm(server.tcp))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    figures: dict[str, float] = {}
    for number, (name, storms) in enumerate(found.items()):
        row = f"storm_{name.replace(' ', '_')}" if number else "storm"
        figures[f"{row}_s"] = Spread.of([seconds for seconds, _ in storms]).median
        figures[f"{row}_not_answered"] = float(max(failed for _, failed in storms))
    return figures


def _storm(tcp: client.Address) -> tuple[float, int]:
    """The seconds until the last of `STORM` clients is answered, or gone, and how many were not answered."""
    said = b"  V2IDENTIFY\n" + struct.pack(">I", 2) + b"{}"
    waiting: dict[int, socket.socket] = {}
    failed, begun = 0, time.perf_counter()
    with ExitStack() as opened, select.epoll() as events:
        for _ in range(STORM):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(tcp)
            waiting[sock.fileno()] = sock
            events.register(sock, select.EPOLLOUT)
        while waiting and time.perf_counter() - begun < STORM_S:
            for number, event in events.poll(1.0):
                sock = waiting[number]
                try:
                    if event & select.EPOLLOUT:
                        sock.sendall(said)
                        events.modify(number, select.EPOLLIN)
                        continue
                    failed += sock.recv(100)[8:] != b"OK"
                except OSError:
                    failed += 1
                events.unregister(number)
                del waiting[number]
        return time.perf_counter() - begun, failed + len(waiting)


def _first_pubs(tcp: client.Address) -> list[float]:
    sock, took = client.open_connection(tcp), []
    for number in range(FIRST_PUBS):
        begun = time.perf_counter()
        sock.sendall(client.pub(f"first{number}", b"x"))
        client.read_frame(sock, client.RESPONSE)
        took.append(1000 * (time.perf_counter() - begun))
        time.sleep(0.02)
    sock.close()
    return took


@contextmanager
def _process(arguments: Sequence[str], log: Path) -> Iterator[tuple[tuple[float, float], client.Address]]:
    """A broker; (seconds until TCP, and until TCP and HTTP are served), its TCP address. It is ended."""
    begun = time.perf_counter()
    served = 0.0
    with log.open("wb") as out:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        while not {"TCP", "HTTP"} <= (found := servers.parse_listening(log.read_text(errors="replace"))).keys():
            if not served and "TCP" in found:
                served = time.perf_counter() - begun
            if process.poll() is not None or time.perf_counter() - begun > servers.START_TIMEOUT_S:
                raise servers.CannotStart(f"{arguments[0]}:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(servers.POLL_S)
        seconds = time.perf_counter() - begun
        yield (served or seconds, seconds), found["TCP"]
    finally:
        process.terminate()
        try:
            process.wait(servers.STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_listening(arguments: Sequence[str], log: Path) -> float:
    """Seconds until a broker takes connections at both ports."""
    with socket.socket() as tcp, socket.socket() as http:
        for sock in (tcp, http):
            sock.bind(("127.0.0.1", 0))
        ports = {"tcp": tcp.getsockname(), "http": http.getsockname()}
    words = [*arguments, *(f"--{name}-address={host}:{port}" for name, (host, port) in ports.items())]
    begun = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        for address in ports.values():
            while True:
                with suppress(OSError), socket.create_connection(address, timeout=1.0):
                    break
                if process.poll() is not None or time.perf_counter() - begun > servers.START_TIMEOUT_S:
                    raise servers.CannotStart(log.read_text(errors="replace")[-2000:])
                time.sleep(servers.POLL_S)
        return time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait(servers.STOP_TIMEOUT_S)


def _started_again(node: dict[str, Any], log: Path) -> tuple[float, float]:
    with _process(node["start"], log) as (times, _):
        return times


def described(log: Path) -> list[dict[str, Any]]:
    line = next(line for line in log.read_text().splitlines() if line.startswith("{"))
    nodes: list[dict[str, Any]] = json.loads(line)["nodes"]
    return nodes


def _idle(trees: Sequence[ProcessTree]) -> float:
    """CPU milliseconds per second of the broker that takes most."""
    before, begun = [tree.cpu_ns() for tree in trees], time.perf_counter()
    time.sleep(IDLE_S)
    seconds = time.perf_counter() - begun
    return max(tree.cpu_ns() - cpu for tree, cpu in zip(trees, before, strict=True)) / 1e6 / seconds


async def _create(urls: Sequence[str], count: int) -> float:
    """Create all topics, at these brokers in turn; the seconds until the last is answered."""
    numbers, addresses = iter(range(count)), [host_of(url) for url in urls]

    def create(number: int) -> None:
        connection = http.client.HTTPConnection(*addresses[number % len(addresses)], timeout=60)
        try:
            connection.request("POST", f"/topic/create?topic=many{number}")
            answer = connection.getresponse()
            if answer.status != 200:
                raise servers.CannotStart(f"/topic/create: {answer.status} {answer.read()!r}")
        finally:
            connection.close()

    async def creator() -> None:
        for number in numbers:
            await asyncio.to_thread(create, number)

    begun = time.perf_counter()
    await asyncio.gather(*[creator() for _ in range(CREATORS)])
    return time.perf_counter() - begun


def _led_by(log: Path) -> list[str]:
    """The topics that a node began to lead, by its own log: leaders do not change while nothing fails."""
    return sorted(set(re.findall(r"\b(many\d+)/0: leading in epoch", log.read_text(errors="replace"))))


def _most_led(nodes: Sequence[dict[str, Any]], workspace: Path) -> tuple[list[str], int]:
    """The topics of the node that leads most, and its number."""
    led = [_led_by(workspace / "cell" / "data" / f"node-{number + 1}.log") for number in range(len(nodes))]
    most = max(range(len(nodes)), key=lambda number: len(led[number]))
    return led[most], most


def _failover(nodes: Sequence[dict[str, Any]], victim: int, topics: Sequence[str], row: str) -> dict[str, float]:
    """Kill a node: for how long clients of another one could not publish to these topics."""
    try:
        tcp = host_of(nodes[victim - 1]["tcp"])
        ended = sorted(outages(tcp, topics, lambda: os.kill(nodes[victim]["pid"], signal.SIGKILL)))
        figures = {"partitions": float(len(ended)), "p50_s": ended[len(ended) // 2], "last_s": ended[-1]}
        return {f"{row}_{name}": figure for name, figure in figures.items()}
    except client.Refused as refusal:
        raise servers.CannotStart(f"a topic takes no publish: {refusal}") from refusal


def host_of(address: str) -> client.Address:
    host, port = address.removeprefix("http://").rsplit(":", 1)
    return socket.gethostbyname(host), int(port)
