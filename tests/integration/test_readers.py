"""Holds and reader channels of a real node: what commands show of them, and that they outlive a kill."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nsqha.cli.terminal import exits
from nsqha.pb.v1 import segments_pb2, segments_pb2_grpc
from tests.integration.devnode import DevNode

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("readers"), "--sync=interval")
    yield node
    assert node.stop() == 0


def segments(node: DevNode, rpc: str, **fields: Any) -> Any:
    with grpc.insecure_channel(node.grpc) as channel:
        stub: Any = segments_pb2_grpc.SegmentsStub(channel)
        return getattr(stub, rpc)(getattr(segments_pb2, f"{rpc}Request")(**fields), timeout=20)


def http(node: DevNode, path: str) -> tuple[int, Any]:
    """A POST: status and JSON."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{node.http}{path}", method="POST")) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def subscribe(address: str, topic: str, channel: str) -> bytes:
    """The frame that a V2 client gets for its SUB."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(b"  V2" + f"SUB {topic} {channel}\n".encode())
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
        return connection.recv(size, socket.MSG_WAITALL)[4:]


def test_a_readers_channel_is_made_shown_and_kept_from_consumers(node: DevNode) -> None:
    node.publish("r1", "one", "two", "three")
    made = node.json("channel", "create", "r1", "spark", "--reader")
    assert made["reader"] and made["depth"] == 3
    assert subscribe(node.tcp, "r1", "spark") == (
        b"E_SUB_FAILED SUB failed channel spark of topic r1 is a reader's: it is moved by nsqha spark, not by consumers"
    )
    status, told = http(node, "/channel/create?topic=r1&channel=spark")
    assert status == 409 and told["message"] == "CONFLICT"
    again = node.run("channel", "create", "r1", "spark")
    assert again.returncode == exits.CONFLICT

    segments(node, "CommitReader", topic="r1", channel="spark", offsets={0: 1})
    assert node.json("channel", "show", "r1", "spark")["depth"] == 2
    shown = node.ok("channel", "show", "r1", "spark")
    assert "2 messages behind, the oldest" in shown and "a reader's" in shown
    assert http(node, "/channel/empty?topic=r1&channel=spark") == (200, None)
    assert "not behind" in node.ok("channel", "show", "r1", "spark")


def test_the_first_channel_of_consumers_gets_the_backlog_that_a_reader_has_read(node: DevNode) -> None:
    node.publish("r4", "one", "two", "three")
    segments(node, "CommitReader", topic="r4", channel="archive", offsets={0: 3})
    assert node.json("channel", "show", "r4", "archive")["depth"] == 0
    assert [node.json("channel", "create", "r4", name)["depth"] for name in ("billing", "later")] == [3, 0]


def test_a_channel_of_consumers_is_not_one_of_readers(node: DevNode) -> None:
    node.create("r2", "billing")
    with pytest.raises(grpc.RpcError) as refused:
        segments(node, "CommitReader", topic="r2", channel="billing", offsets={0: 0})
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "is one for consumers" in refused.value.details()
    assert node.run("channel", "create", "r2", "billing", "--reader").returncode == exits.CONFLICT


def test_a_hold_is_shown_counted_and_released(node: DevNode) -> None:
    node.publish("r3", "one")
    hold = segments(node, "Snapshot", topics=["r3"], hold_ms=600_000).hold_id
    [partition] = node.json("topic", "show", "r3")["partitions"]
    assert partition["holds"][0]["id"] == hold and 0 < partition["holds"][0]["left_ms"] <= 600_000
    shown = node.ok("topic", "show", "r3")
    assert "HELD BY" in shown and hold in shown
    with urllib.request.urlopen(f"http://{node.http}/metrics") as answer:
        assert b'nsqha_segment_holds{partition="0",topic="r3"} 1.0' in answer.read()
    assert node.run("topic", "release", "r3", "0" * 16).returncode == exits.NOT_FOUND
    assert node.run("topic", "release", "r3", "xyz").returncode == exits.USAGE
    assert node.json("topic", "release", "r3", hold) == {"topic": "r3", "hold": hold, "partitions": 1}
    assert "HELD BY" not in node.ok("topic", "show", "r3")


def test_holds_and_reader_channels_outlive_a_kill(tmp_path: Path) -> None:
    """With sync=always: what was answered is on the disk."""
    node = DevNode(tmp_path)
    node.publish("t", "one", "two")
    hold = segments(node, "Snapshot", topics=["t"], hold_ms=600_000).hold_id
    segments(node, "CommitReader", topic="t", channel="spark", offsets={0: 1}, back=True)
    node.process.kill()
    node.process.wait()
    node = DevNode(tmp_path)
    [partition] = node.json("topic", "show", "t")["partitions"]
    assert [held["id"] for held in partition["holds"]] == [hold]
    channel = node.json("channel", "show", "t", "spark")
    assert channel["reader"] and channel["depth"] == 1
    assert node.json("channel", "create", "t", "billing")["depth"] == 2, "the topic's first channel of consumers"
    assert node.stop() == 0
