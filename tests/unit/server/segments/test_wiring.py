"""The byte server as a part of a node: its flag, what it announces, which logs it finds."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.nsqd import open_grpc
from nsqha.errors import ConfigError
from nsqha.options import Options
from nsqha.server.node.cluster.joining import node_info, unreachable_addresses
from nsqha.server.node.start import Node
from tests.certificates import Certificates

LOOPBACK = "127.0.0.1"


def options(path: Path, **more: Any) -> Options:
    wanted = {f"{name}_address": f"{LOOPBACK}:0" for name in ("tcp", "http", "grpc", "segments")} | more
    return Options(data_path=str(path / "data"), broadcast_address=LOOPBACK, **wanted)


def serving(wanted: Options, test: Callable[[Node], Awaitable[None]]) -> None:
    async def main() -> None:
        node = Node(wanted, open_grpc)
        await node.start()
        try:
            await test(node)
        finally:
            await node.stop()

    asyncio.run(main())


def asked(address: str, uid: int, query: str = "first=1&end=2&at=1&chain=0000000000000000") -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", f"/segments/{uid:016x}/0?{query}")
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def test_a_node_serves_the_topics_that_it_leads(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        broker = node.broker
        assert node.addresses.segments == broker.endpoints.segments_address
        topics = [await broker.topics.ensure_topic(name) for name in ("orders", "passing#ephemeral")]
        log = topics[0].led[0].log
        last = log.last
        assert last is not None
        query = f"first=1&end={last.log_id + 1}&at={last.log_id}&chain={last.chain:016x}"
        status, _ = await asyncio.to_thread(asked, broker.endpoints.segments_address, topics[0].record.uid, query)
        assert status == 200
        status, why = await asyncio.to_thread(asked, broker.endpoints.segments_address, topics[1].record.uid)
        assert (status, why) == (404, "passing#ephemeral is #ephemeral: it has no files\n")
        status, why = await asyncio.to_thread(asked, broker.endpoints.segments_address, 7)
        assert (status, why) == (404, "this node has no replica of partition 0 of topic 0000000000000007\n")
        assert dict(broker.snapshot().node.segments.requests) == {"200": 1, "404": 2}

    serving(options(tmp_path), test)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("segments")]


def test_without_an_address_nothing_is_served(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        assert node.addresses.segments == "" and node.broker.endpoints.segments is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("segments")]

    serving(options(tmp_path, segments_address=""), test)


def test_an_address_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--segments-address=somewhere: it is not host:port"):
        asyncio.run(Node(options(tmp_path, segments_address="somewhere"), open_grpc).start())
    with socket.create_server((LOOPBACK, 0)) as taken:
        address = f"{LOOPBACK}:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--segments-address={address}: cannot listen: Address already in use"):
            asyncio.run(Node(options(tmp_path, segments_address=address), open_grpc).start())


def test_with_cluster_certificates_it_speaks_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("node", f"IP:{LOOPBACK}")
    files = {"cert": certificates.cert("node"), "key": certificates.key("node"), "ca": certificates.cert("ca")}

    async def test(node: Node) -> None:
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            await asyncio.to_thread(asked, node.broker.endpoints.segments_address, 7)
        assert node.broker.snapshot().node.segments.requests == ()

    serving(options(tmp_path, **{f"cluster_tls_{name}": path for name, path in files.items()}), test)


def test_others_are_told_an_address_that_they_can_dial() -> None:
    def told(segments: str) -> str:
        wanted = Options(broadcast_address="broker1")
        return node_info(
            wanted, 1, "", tcp=1, http=2, grpc="127.0.0.1:3", peer="127.0.0.1:4", segments=segments
        ).segments_address

    assert told("0.0.0.0:4154") == told("[::]:4154") == "broker1:4154"
    assert told("10.0.0.7:4154") == "10.0.0.7:4154"
    assert told("") == ""


@pytest.mark.parametrize(
    ("broadcast", "grpc", "said"),
    [
        ("broker1", "127.0.0.1:4152", ["--grpc-address=127.0.0.1:4152"]),
        ("10.0.0.7", "[::1]:4152", ["--grpc-address=[::1]:4152"]),
        ("broker1", "0.0.0.0:4152", []),
        ("127.0.0.1", "127.0.0.1:4152", []),
        ("localhost", "127.0.0.1:4152", []),
    ],
)
def test_an_address_that_only_this_host_reaches_is_no_address_for_others(
    broadcast: str, grpc: str, said: list[str]
) -> None:
    options = Options(broadcast_address=broadcast)
    info = node_info(options, 1, "boot", tcp=1, http=2, grpc=grpc, peer="0.0.0.0:4153", segments="")
    assert unreachable_addresses(info) == said
