"""What a hundred thousand dead letters cost who does not look at them: `python -m benchmarks.dead [--kills 8]`.

memory      anonymous memory of a broker that was started again on a log in which all is finished, and on the same
            log with as many dead letters besides
failover    kill -9 of the leader of three nodes: from the kill to the OK to a publish that was sent after it,
            through another node; of two clusters in turn, which differ in the dead letters
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.etcd_server import EtcdServer
from tests.integration.cluster import Cluster
from tests.integration.servers import Node, wait_until

from . import client
from .build import build
from .figures import Spread
from .procstat import ProcessTree

COUNT = 100_000
BATCH = 200
RDY = 2500
BODY = b"x" * 100
TOPIC, CHANNEL = "orders", "steady"
POLICY = {"max_attempts": 1, "dead_max": 1_000_000}
RETRY_S = 0.01
SETTLE_S = 2.0
FAILOVER_S = 30.0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dead", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=8, help="of each of the two clusters")
    options = parser.parse_args(words)
    build()
    with tempfile.TemporaryDirectory(prefix="nsqha-dead-") as folder:
        finished, dead = memory(Path(folder) / "memory")
        print(f"memory    {finished / 1e6:.1f} MB with none, {dead / 1e6:.1f} MB with {COUNT:,}", flush=True)
        for name, gaps in failover(Path(folder), options.kills).items():
            p50, worst = Spread.of(gaps).median * 1e3, max(gaps) * 1e3
            print(f"failover  {name:10} p50 {p50:.0f} ms of {len(gaps)}, worst {worst:.0f}", flush=True)
    return 0


def memory(folder: Path) -> tuple[int, int]:
    """Anonymous bytes after a start: all finished, and with the dead letters."""
    with Node(folder, sync="interval") as node:
        subscribe(node).close()
        settle(node, COUNT, dying=False)
        finished = _started_again(node)
        set_policy(node)
        settle(node, COUNT, dying=True)
        return finished, _started_again(node)


def _started_again(node: Node) -> int:
    node.restart()
    time.sleep(SETTLE_S)
    return ProcessTree([node.pid]).memory().anonymous_bytes


def failover(folder: Path, kills: int) -> dict[str, list[float]]:
    """Seconds without an OK, by what the channel had."""
    gaps: dict[str, list[float]] = {"none": [], f"{COUNT:,}": []}
    with contextlib.ExitStack() as stack:
        clusters = {
            name: stack.enter_context(_cluster(folder / f"cluster{n}", dying=n > 0)) for n, name in enumerate(gaps)
        }
        for _ in range(kills):
            for name, cluster in clusters.items():
                gaps[name].append(_failed_over(cluster))
    return gaps


@contextlib.contextmanager
def _cluster(folder: Path, *, dying: bool) -> Iterator[Cluster]:
    (folder / "etcd").mkdir(parents=True)
    with (
        EtcdServer.running(folder / "etcd") as etcd,
        Cluster(folder, etcd, nodes=3, sync="interval").started() as cluster,
    ):
        cluster.create(TOPIC, CHANNEL)
        leader = cluster.leader(TOPIC)
        if dying:
            set_policy(leader)
        settle(leader, COUNT, dying=dying)
        yield cluster


def _failed_over(cluster: Cluster) -> float:
    """Kill the leader; the seconds until another node has a publish OK'd. Afterwards all is as before."""
    meta = cluster.wait_isr(TOPIC, 3, seconds=60)
    leader = cluster.member(meta.leader)
    assert leader is not None
    time.sleep(SETTLE_S)
    address = next((node.host.ip, node.tcp_port) for node in cluster.nodes if node is not leader)
    begun = time.monotonic()
    leader.kill()
    while not _published(address):
        assert time.monotonic() - begun < FAILOVER_S, "no publish is OK'd"
        time.sleep(RETRY_S)
    gap = time.monotonic() - begun
    leader.spawn()
    cluster.wait_listening([leader])
    cluster.wait_registered(3)
    return gap


def _published(address: client.Address) -> bool:
    try:
        sock = client.connect(address, timeout_s=FAILOVER_S)
        try:
            sock.sendall(client.pub(TOPIC, BODY))
            return client.read_frame(sock, client.RESPONSE) == b"OK"
        finally:
            sock.close()
    except (OSError, client.Refused):
        return False


def subscribe(node: Node) -> socket.socket:
    return client.subscribe(client.open_connection((node.host.ip, node.tcp_port)), TOPIC, CHANNEL)


def set_policy(node: Node) -> None:
    url = f"http://{node.http}/channel/policy?topic={TOPIC}&channel={CHANNEL}"
    urllib.request.urlopen(url, json.dumps(POLICY).encode(), timeout=60).close()


def settle(node: Node, count: int, *, dying: bool) -> None:
    """Publish as many, and have a consumer finish them all, or fail with each of them once."""
    from .loadgen import Engine

    address = (node.host.ip, node.tcp_port)
    engine = Engine()
    unit = client.mpub(TOPIC, [BODY] * BATCH)
    engine.add_publisher(client.open_connection(address), unit, len(unit), window=4, unit_messages=BATCH)
    consumer = client.subscribe(client.open_connection(address), TOPIC, CHANNEL)
    engine.add_consumer(consumer, req_every=1) if dying else engine.add_consumer(consumer)
    engine.expect(BODY)
    engine.ready(RDY)
    engine.publish(count // BATCH)
    engine.run(60.0, acked=count, received=count)
    assert engine.acked == count and engine.received >= count, (engine.acked, engine.received)
    engine.run(1.0)
    engine.close()
    wait_until(lambda: _left(node) == 0, "all are finished or dead", 60)


def _left(node: Node) -> int:
    found = node.channel(TOPIC, CHANNEL)
    return -1 if found is None else found["depth"] + found["in_flight_count"] + found["deferred_count"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
