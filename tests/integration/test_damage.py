"""A bit flips in a segment on disk: nothing damaged is delivered, publishing goes on, an operator decides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.servers import Node, free_port, wait_until
from tests.integration.test_node import Client, mpub


def test_a_channel_stops_before_damage_and_goes_on_when_told(tmp_path: Path) -> None:
    grpc = f"127.0.0.1:{free_port()}"
    with Node(tmp_path, flags=[f"--grpc-address={grpc}"]) as node:
        client = Client(node)
        for batch in range(3):
            client.send(mpub("t", [b"%d-%d" % (batch, n) for n in range(10)]))
            client.ok()
        node.request("/channel/create?topic=t&channel=c", b"")
        client.close()
        node.stop()
        segment = next((node.data / "topics").glob("t-*/0/*.segment"))
        data = bytearray(segment.read_bytes())
        data[data.index(b"1-4")] ^= 1
        segment.write_bytes(data)
        node.start()
        verify = [sys.executable, "-m", "nsqha", "log", "verify", str(node.data), "--json"]
        verified = subprocess.run(verify, capture_output=True, timeout=60)
        assert verified.returncode == 1
        assert [(p["first_offset"], p["end_offset"]) for p in json.loads(verified.stdout)["problems"]] == [(10, 20)]

        client = Client(node)
        client.subscribe("t", "c", 100)
        assert [client.message()[2] for _ in range(10)] == [b"0-%d" % n for n in range(10)]
        node.request("/pub?topic=t", b"goes on")
        stats = "/stats?format=json&include_nsqha=true"
        cursor = lambda: node.json(stats)["nsqha"]["topics"][0]["channels"][0]["cursors"][0]  # noqa: E731
        wait_until(lambda: "cannot be read" in cursor()["stuck"], "the channel says why it stopped")

        skip = [sys.executable, "-m", "nsqha", "log", "skip", "t", "--yes", "--json", "--grpc-address", grpc]
        done = subprocess.run(skip, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["skipped"] == [
            {"channel": "c", "partition": 0, "first_offset": 10, "end_offset": 20, "messages_lost": 10}
        ]
        rest = [client.message()[2] for _ in range(11)]
        assert rest == [*(b"2-%d" % n for n in range(10)), b"goes on"]
        client.close()


def test_entries_that_rot_are_written_anew_where_there_is_no_other_replica(tmp_path: Path) -> None:
    with Node(tmp_path, flags=["--max-bytes-per-file=2000"]) as node:
        node.request("/topic/create?topic=t", b"")
        node.request("/channel/create?topic=t&channel=c", b"")
        for n in range(40):
            node.request("/pub?topic=t", b"%d" % n * 50)
        node.stop()
        first, *others = sorted((node.data / "topics").glob("t-*/0/*.commitlog"))
        assert len(others) > 1, "recovery does not look at it"
        content = bytearray(first.read_bytes())
        content[-240:-80] = b"\1" * 160
        first.write_bytes(content)
        node.start()
        client = Client(node)
        client.subscribe("t", "c", 100)
        assert [client.message()[2] for _ in range(40)] == [b"%d" % n * 50 for n in range(40)]
        client.close()
        verify = [sys.executable, "-m", "nsqha", "log", "verify", str(node.data)]
        assert subprocess.run(verify, capture_output=True, timeout=60).returncode == 0
