"""What an operator sees of one node's life: restarts, lost metadata, retention, a disk that fills, a wrong folder."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import struct
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.servers import Daemon, Lookupd, Node, wait_until


class Client:
    """A V2 connection, synchronous and small."""

    def __init__(self, node: Node) -> None:
        self.socket = socket.create_connection(("127.0.0.1", node.tcp_port), 10)
        self.file = self.socket.makefile("rb")
        self.socket.sendall(b"  V2")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def frame(self) -> tuple[int, bytes]:
        """The next frame that is no heartbeat: type and data."""
        while True:
            size, kind = struct.unpack(">ii", self.file.read(8))
            data = self.file.read(size - 4)
            if data != b"_heartbeat_":
                return kind, data

    def ok(self) -> None:
        assert self.frame() == (0, b"OK")

    def subscribe(self, topic: str, channel: str, rdy: int) -> None:
        self.send(f"SUB {topic} {channel}\n".encode())
        self.ok()
        self.send(f"RDY {rdy}\n".encode())

    def message(self) -> tuple[int, bytes, bytes]:
        """attempts, id, body of the next message."""
        kind, data = self.frame()
        assert kind == 2, data
        return int.from_bytes(data[8:10], "big"), data[10:26], data[26:]

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def pub(topic: str, body: bytes) -> bytes:
    return f"PUB {topic}\n".encode() + struct.pack(">I", len(body)) + body


def mpub(topic: str, bodies: list[bytes]) -> bytes:
    parts = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    return f"MPUB {topic}\n".encode() + struct.pack(">II", len(parts) + 4, len(bodies)) + parts


def test_acknowledged_survives_kill_9_and_finished_does_not_come_back(tmp_path: Path) -> None:
    with Node(tmp_path, sync="always") as node:
        client = Client(node)
        client.subscribe("orders", "billing", 1)
        for n in range(5):
            client.send(pub("orders", b"message %d" % n))
        seen: list[bytes] = []
        oks = 0
        while len(seen) < 2 or oks < 5:
            kind, data = client.frame()
            if kind == 0:
                oks += 1
            else:
                seen.append(data[26:])
                client.send(b"FIN " + data[10:26] + b"\n")
        # Finished progress is in the log 50 ms later without data.
        stats = "/stats?format=json&include_nsqha=true"
        cursor = lambda: node.json(stats)["nsqha"]["topics"][0]["channels"][0]["cursors"][0]  # noqa: E731
        wait_until(
            lambda: (now := cursor())["floor"] == len(seen) and not now["uncommitted_progress"], "progress is committed"
        )
        node.kill()
        client.close()
        node.start()
        client = Client(node)
        client.subscribe("orders", "billing", 10)
        rest = [client.message()[2] for _ in range(5 - len(seen))]
        assert sorted(seen + rest) == [b"message %d" % n for n in range(5)]
        client.close()


def test_metadata_is_rebuilt_from_the_logs(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        for n in range(3):
            node.request("/pub?topic=orders", b"m%d" % n)
        node.request("/channel/create?topic=orders&channel=billing", b"")
        node.request("/channel/create?topic=orders&channel=audit", b"")
        node.request("/channel/pause?topic=orders&channel=audit", b"")
        client = Client(node)
        client.subscribe("orders", "billing", 1)
        _, first_id, _ = client.message()
        client.close()
        node.stop()
        (node.data / "metadata").unlink()
        node.start()
        billing, audit = node.channel("orders", "billing"), node.channel("orders", "audit")
        assert billing is not None and audit is not None
        assert billing["depth"] == 3 and audit["paused"]
        # The same salt: a message keeps its id.
        client = Client(node)
        client.subscribe("orders", "billing", 10)
        assert first_id in [client.message()[1] for _ in range(3)]
        client.close()
        node.request("/pub?topic=orders", b"again")
        node.stop()
        node.start()  # and it stays so
        assert node.channel("orders", "audit") is not None


def test_files_go_when_retention_allows_it_and_not_before_they_are_read(tmp_path: Path) -> None:
    flags = ["--segment-bytes=100000", "--retention=1s", "--retention-bytes=150000"]
    with Node(tmp_path, sync="interval", flags=flags) as node:
        node.request("/topic/create?topic=t", b"")
        node.request("/channel/create?topic=t&channel=c", b"")
        folder = next((node.data / "topics").iterdir()) / "0"
        client = Client(node)
        for _ in range(10):
            client.send(mpub("t", [b"x" * 1000] * 100))
            client.ok()
        segments = len(list(folder.glob("*")))
        assert segments >= 16, "ten batches of 100 KB make ten pairs"
        reader = Client(node)
        reader.subscribe("t", "c", 500)
        ids = [reader.message()[1] for _ in range(500)]
        assert len(list(folder.glob("*"))) >= segments, "nothing goes while it is unread"
        reader.send(b"".join(b"FIN " + i + b"\n" for i in ids))
        wait_until(lambda: len(list(folder.glob("*"))) <= segments - 8, "the files of the first half are unlinked")
        rest = [reader.message() for _ in range(500)]
        assert {attempts for attempts, _, _ in rest} == {1}
        node.kill()
        node.start()
        again = Client(node)
        again.subscribe("t", "c", 500)
        assert len({again.message()[1] for _ in range(500)}) == 500
        for connection in (client, reader, again):
            connection.close()


def test_a_disk_below_its_watermark_refuses_publishes_while_consumers_go_on(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        for n in range(3):
            node.request("/pub?topic=t", b"%d" % n)
        node.request("/channel/create?topic=t&channel=c", b"")
        node.stop()
        free = shutil.disk_usage(node.data).free
        node.flags.append(f"--disk-low-bytes={free * 2}")
        node.start()
        client = Client(node)
        client.send(pub("t", b"refused"))
        kind, data = client.frame()
        assert kind == 1 and data.startswith(b"E_PUB_FAILED PUB failed disk low: ")
        client.close()
        with pytest.raises(urllib.error.HTTPError) as refused:
            node.request("/pub?topic=t", b"refused")
        assert refused.value.code == 503
        client = Client(node)
        client.subscribe("t", "c", 10)
        ids = [client.message()[1] for _ in range(3)]
        client.send(b"".join(b"FIN " + message_id + b"\n" for message_id in ids))  # at once: their progress is one
        wait_until(lambda: (node.channel("t", "c") or {})["depth"] == 0, "FINs pass")
        client.close()
        node.kill()
        node.start()
        assert (node.channel("t", "c") or {})["depth"] in (0, 3)


def test_a_folder_in_use_and_a_port_in_use_are_refused_in_one_line(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        second = Node(tmp_path / "second", flags=[])
        second.flags = [f"--data-path={node.data}"]
        second.spawn()
        assert second._process is not None
        assert second._process.wait(20) == 1
        second._process = None
        assert "is in use by another process" in second.log()
        third = Node(tmp_path / "third")
        third.tcp_port = node.tcp_port
        third.spawn()
        assert third._process is not None
        assert third._process.wait(20) == 1
        third._process = None
        assert f"--tcp-address={node.tcp}" in third.log()


def test_a_topic_with_partitions_is_served_whole_and_each_publisher_keeps_its_order(tmp_path: Path) -> None:
    with Node(tmp_path, sync="interval", flags=["--topic-partitions=3"]) as node:
        publishers = [Client(node) for _ in range(6)]
        for n in range(20):
            for p, publisher in enumerate(publishers):
                publisher.send(pub("t", b"%d %d" % (p, n)))
                publisher.ok()
        consumer = Client(node)
        consumer.subscribe("t", "c", 7)
        seen: dict[int, list[int]] = {}
        for _ in range(120):
            _, message_id, body = consumer.message()
            publisher_number, n = map(int, body.split())
            seen.setdefault(publisher_number, []).append(n)
            consumer.send(b"FIN " + message_id + b"\n")
        assert seen == {p: list(range(20)) for p in range(6)}
        wait_until(lambda: (node.channel("t", "c") or {})["in_flight_count"] == 0, "all is finished")
        for client in (*publishers, consumer):
            client.close()


@pytest.fixture
def all_descriptors() -> Iterator[None]:
    """As many as this process may have, and a daemon that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("all_descriptors")
def test_two_thousand_idle_connections_do_not_keep_a_publisher_from_its_oks(tmp_path: Path) -> None:
    with Node(tmp_path, sync="interval") as node:
        idle = []
        for n in range(2000):
            connection = socket.create_connection(("127.0.0.1", node.tcp_port), 30)
            if n % 2:
                connection.sendall(b"  V2")  # the others never say a word
            idle.append(connection)
        publisher = Client(node)
        for n in range(500):
            publisher.send(pub("t", b"%d" % n))
            publisher.ok()
        shown = node.json("/stats?format=json&include_nsqha=true")["nsqha"]
        assert shown["connections"] == 2001
        publisher.close()
        for connection in idle:
            connection.close()
        wait_until(lambda: node.json("/stats?format=json&include_nsqha=true")["nsqha"]["connections"] == 0, "all gone")


@pytest.mark.usefixtures("all_descriptors")
@pytest.mark.parametrize("daemon", [Node, Lookupd])
def test_a_thousand_connections_at_once_are_taken_by_the_kernel(tmp_path: Path, daemon: type[Daemon]) -> None:
    """With the backlog that event loops have of themselves, 100, the others are tried again after a second or more."""
    with daemon(tmp_path) as stopped, ExitStack() as closing:
        os.kill(stopped.pid, signal.SIGSTOP)
        closing.callback(os.kill, stopped.pid, signal.SIGCONT)
        for port in (stopped.tcp_port, stopped.http_port):
            for _ in range(1000):
                closing.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.9))


def test_garbage_is_answered_and_never_ends_the_process(tmp_path: Path) -> None:
    rng = random.Random(7)
    commands = (b"PUB t\n", b"MPUB t\n", b"SUB t c\n", b"IDENTIFY\n", b"FIN ", b"REQ ", b"\xff\x06\0\0sNaPpY")
    with Node(tmp_path, sync="interval") as node:
        for n in range(300):
            with socket.create_connection(("127.0.0.1", node.tcp_port), 30) as connection:
                if n % 3:
                    connection.sendall(b"  V2")
                connection.sendall(rng.choice(commands) + rng.randbytes(rng.randrange(400)))
        with socket.create_connection(("127.0.0.1", node.http_port), 30) as connection:
            connection.sendall(rng.randbytes(300) + b"\r\n\r\n")
        client = Client(node)
        client.send(pub("t2", b"still here"))
        client.ok()
        client.close()
        assert "Traceback" not in node.log()
