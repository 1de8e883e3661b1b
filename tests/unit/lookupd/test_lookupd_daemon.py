"""The daemon in this process: what it answers over HTTP, and how its connections end."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from lookupd import tcp
from lookupd.daemon import Lookupd
from lookupd.lookup_v1 import STEPS_AT_ONCE
from lookupd.registry import Registry
from nsqha.clock import ManualClock
from nsqha.errors import ConfigError
from nsqha.nsqlog import Logger
from nsqha.options import SECOND, LookupdOptions

BODY = {"version": "1.3.0", "hostname": "h", "broadcast_address": "a", "tcp_port": 4150, "http_port": 4151}


class Nsqd:
    """A stand-in for nsqd's side of the lookup protocol."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def connect(self) -> Nsqd:
        host, _, port = self.address.rpartition(":")
        if host:
            self.reader, self.writer = await asyncio.open_connection(host, int(port))
        else:
            self.reader, self.writer = await asyncio.open_unix_connection(self.address)
        self.writer.write(b"  V1")
        return self

    async def ask(self, line: bytes, body: bytes | None = None) -> bytes:
        self.writer.write(line + b"\n" + (b"" if body is None else struct.pack(">i", len(body)) + body))
        return await self.reply()

    async def reply(self) -> bytes:
        (size,) = struct.unpack(">i", await self.reader.readexactly(4))
        return await self.reader.readexactly(size)

    async def identify(self, **changes: object) -> dict[str, object]:
        answer: dict[str, object] = json.loads(await self.ask(b"IDENTIFY", json.dumps(BODY | changes).encode()))
        return answer

    async def closed(self) -> bool:
        return await asyncio.wait_for(self.reader.read(), 20) == b""


async def http(address: str, method: str, target: str) -> tuple[int, object]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else body


class World:
    def __init__(self, daemon: Lookupd, clock: ManualClock) -> None:
        self.daemon = daemon
        self.clock = clock

    async def nsqd(self) -> Nsqd:
        return await Nsqd(self.daemon.tcp_address).connect()

    async def get(self, target: str) -> object:
        return (await http(self.daemon.http_address, "GET", target))[1]

    async def post(self, target: str) -> tuple[int, object]:
        return await http(self.daemon.http_address, "POST", target)

    async def until(self, target: str, wanted: object) -> None:
        """A disconnect is seen by the daemon a moment after we made it."""
        async with asyncio.timeout(20):
            while await self.get(target) != wanted:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(**changes: object) -> AsyncIterator[World]:
    options = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "broadcast_address": "me"} | changes
    clock = ManualClock()
    daemon = Lookupd(LookupdOptions(**options), clock=clock)  # type: ignore[arg-type]
    await daemon.start()
    try:
        yield World(daemon, clock)
    finally:
        await daemon.stop()


def run(story: Callable[[World], Awaitable[None]], **changes: object) -> None:
    async def main() -> None:
        async with running(**changes) as world:
            await asyncio.wait_for(story(world), 60)

    uvloop.run(main())


def test_a_producer_from_hello_to_goodbye() -> None:
    async def story(world: World) -> None:
        nsqd = await world.nsqd()
        me = await nsqd.identify(topology_zone="z")
        assert list(me) == ["broadcast_address", "hostname", "http_port", "tcp_port", "version"]
        assert me["broadcast_address"] == "me"
        assert world.daemon.tcp_address == f"127.0.0.1:{me['tcp_port']}"
        assert await nsqd.ask(b"REGISTER t c") == b"OK"
        port = nsqd.writer.get_extra_info("sockname")[1]
        producer = BODY | {"remote_address": f"127.0.0.1:{port}", "topology_zone": "z", "topology_region": ""}
        assert await world.get("/lookup?topic=t") == {"channels": ["c"], "producers": [producer]}
        nodes = {"producers": [producer | {"tombstones": [False], "topics": ["t"]}]}
        assert await world.get("/nodes") == nodes
        nsqd.writer.close()
        await world.until("/nodes", {"producers": []})
        assert await world.get("/lookup?topic=t") == {"channels": ["c"], "producers": []}

    run(story)


def test_the_partitions_of_a_node_without_a_cluster_are_shown_to_clients_of_the_fork() -> None:
    async def story(world: World) -> None:
        nsqd = await world.nsqd()
        await nsqd.identify()
        await nsqd.ask(b"REGISTER t  3")
        plain = await world.get("/lookup?topic=t")
        assert isinstance(plain, dict) and list(plain) == ["channels", "producers"]
        (producer,) = plain["producers"]
        whole = await world.get("/lookup?topic=t&access=w&metainfo=true")
        assert isinstance(whole, dict)
        assert whole["producers"] == [producer]
        assert whole["partitions"] == {"0": producer, "1": producer, "2": producer}
        assert whole["meta"]["partition_num"] == 3
        for number, shown in ((2, [producer]), (3, [])):
            one = await world.get(f"/lookup?topic=t&partition={number}")
            assert isinstance(one, dict)
            assert one["producers"] == shown and one["partitions"] == {str(number): producer for producer in shown}

    run(story)


def test_tombstones_and_silence_follow_the_clock_and_the_flags() -> None:
    async def story(world: World) -> None:
        nsqd = await world.nsqd()
        await nsqd.identify()
        await nsqd.ask(b"REGISTER t")

        async def shown() -> int:
            answer = await world.get("/lookup?topic=t")
            assert isinstance(answer, dict)
            return len(answer["producers"])

        assert await world.post("/topic/tombstone?topic=t&node=a:4151") == (200, b"")
        assert await shown() == 0
        world.clock.advance(6)
        assert await shown() == 1
        world.clock.advance(5)
        assert await shown() == 0
        assert await world.get("/nodes") == {"producers": []}
        await nsqd.ask(b"PING")
        assert await shown() == 1

    run(story, tombstone_lifetime_ns=5 * SECOND, inactive_producer_timeout_ns=10 * SECOND)


def test_debug_shows_every_registration() -> None:
    async def story(world: World) -> None:
        nsqd = await world.nsqd()
        await nsqd.identify()
        await nsqd.ask(b"REGISTER t c")
        await world.post("/topic/tombstone?topic=t&node=a:4151")
        answer = await world.get("/debug")
        assert isinstance(answer, dict)
        assert sorted(answer) == ["channel:t:c", "client::", "topic:t:"]
        facts = answer["topic:t:"][0]
        assert (facts["tombstoned"], facts["tombstoned_at"], facts["last_update"]) == (True, *[world.clock.wall] * 2)
        assert answer["client::"][0]["tombstoned_at"] == 0

    run(story)


def test_names_are_made_and_deleted_over_http() -> None:
    async def story(world: World) -> None:
        assert await world.post("/channel/create?topic=t&channel=c") == (200, b"")
        assert await world.post("/topic/create?topic=u") == (200, b"")
        assert await world.get("/topics") == {"topics": ["t", "u"]}
        assert await world.post("/channel/delete?topic=t&channel=c") == (200, b"")
        assert await world.post("/channel/delete?topic=t&channel=c") == (404, {"message": "CHANNEL_NOT_FOUND"})
        assert await world.post("/topic/delete?topic=t") == (200, b"")
        assert await world.post("/topic/delete?topic=t") == (200, b"")
        assert await world.get("/lookup?topic=t") == {"message": "TOPIC_NOT_FOUND"}
        assert await world.get("/channels?topic=t") == {"channels": []}

    run(story)


def test_what_narrows_a_change_that_cannot_be_narrowed_is_refused() -> None:
    async def story(world: World) -> None:
        assert await world.post("/channel/create?topic=t&channel=c") == (200, b"")
        for target, code in (
            ("/topic/delete?topic=t&partition=0", "TOPIC_PARTITION"),
            ("/channel/delete?topic=t&channel=c&partition=77", "TOPIC_PARTITION"),
            ("/topic/delete?topic=t&channel=c", "CHANNEL"),
            ("/channel/delete?topic=t&channel=c&node=n1", "NODE"),
            ("/topic/tombstone?topic=t&node=n1&channel=c", "CHANNEL"),
        ):
            status, body = await world.post(target)
            assert (status, body["message"]) == (400, f"INVALID_ARG_{code}"), target
        assert await world.get("/channels?topic=t") == {"channels": ["c"]}
        assert await world.post("/topic/delete?topic=t&partition=**") == (200, b"")

    run(story)


def test_a_refused_peer_gets_the_reason_even_if_it_sends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LINGER_S", 0.05)

    async def story(world: World) -> None:
        nsqd = await world.nsqd()
        assert await nsqd.ask(b"NOPE\n" + b"x" * 100_000) == b"E_INVALID invalid command NOPE"
        assert await nsqd.closed()

    run(story)


def test_an_end_inside_identify_is_answered() -> None:
    async def story(world: World) -> None:
        nsqd = await world.nsqd()
        nsqd.writer.write(b"IDENTIFY\n\x00\x00\x00\x05{")
        nsqd.writer.write_eof()
        assert await nsqd.reply() == b"E_BAD_BODY IDENTIFY failed to read body"
        assert await nsqd.closed()

    run(story)


def test_silent_and_dribbling_peers_are_dropped_but_a_pinging_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SWEEP_S", 0.02)

    async def story(world: World) -> None:
        silent, dribbling, pinging = [await world.nsqd() for _ in range(3)]
        known = await world.nsqd()
        await known.identify()
        for _ in range(7):
            world.clock.advance(10)
            dribbling.writer.write(b"x")
            assert await pinging.ask(b"PING") == b"OK"
        assert await silent.closed()
        assert await dribbling.closed()
        assert await pinging.ask(b"PING") == b"OK"
        assert await known.ask(b"PING") == b"OK"  # it has until the inactive timeout
        world.clock.advance(301)
        assert await known.closed()

    run(story)


def test_a_peer_that_does_not_read_is_not_read_either() -> None:
    class Transport:
        """What asyncio would do is not at stake, only what it is told."""

        told: list[str] = []

        def get_extra_info(self, name: str) -> object:
            return ("1.2.3.4", 5) if name == "peername" else None

        def pause_reading(self) -> None:
            self.told.append("pause")

        def resume_reading(self) -> None:
            self.told.append("resume")

    async def story(world: World) -> None:
        connection = tcp.LookupConnection(world.daemon._tcp)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        connection.pause_writing()
        connection.resume_writing()
        assert Transport.told == ["pause", "resume"]
        connection.connection_lost(None)
        connection.pause_writing()  # asyncio may still say so
        assert Transport.told == ["pause", "resume"]

    run(story)


def test_peers_on_a_unix_socket_are_told_apart(tmp_path: object) -> None:
    async def story(world: World) -> None:
        for name in ("a", "b"):
            nsqd = await world.nsqd()
            await nsqd.identify(broadcast_address=name)
            await nsqd.ask(b"REGISTER t")
            setattr(world, name, nsqd)
        answer = await world.get("/lookup?topic=t")
        assert isinstance(answer, dict)
        assert [producer["broadcast_address"] for producer in answer["producers"]] == ["a", "b"]

    run(story, tcp_address=f"{tmp_path}/s")


def test_an_address_in_use_frees_the_other_one() -> None:
    async def main() -> None:
        async with running() as world:
            taken = world.daemon.http_address
            second = Lookupd(LookupdOptions(tcp_address="127.0.0.1:0", http_address=taken))
            with pytest.raises(ConfigError, match="--http-address"):
                await second.start()

    uvloop.run(main())


def test_the_listener_for_monitors_has_metrics_and_health_alone() -> None:
    async def story(world: World) -> None:
        metrics, main = world.daemon.metrics_address, world.daemon.http_address
        assert (await http(main, "GET", "/topics"))[0] == 200
        for path in ("/ping", "/healthz", "/readyz"):
            assert await http(metrics, "GET", path) == (200, b"OK")
        status, body = await http(metrics, "GET", "/metrics")
        assert status == 200 and isinstance(body, bytes)
        assert b'nsqha_http_requests_total{code="200",route="/topics"} 1.0' in body, "those of the other listeners"
        for method, path in (("GET", "/nodes"), ("GET", "/lookup?topic=t"), ("POST", "/topic/create?topic=t")):
            assert (await http(metrics, method, path))[0] == 404
        assert await world.get("/topics") == {"topics": []}

    run(story, metrics_address="127.0.0.1:0")


async def refused(options: LookupdOptions) -> tuple[str, object]:
    """Why it does not start, and what keeps its sockets from being closed only because nobody has them any more."""
    daemon = Lookupd(options)
    with pytest.raises(ConfigError) as caught:
        await daemon.start()
    return str(caught.value), (daemon, caught)


def free_addresses() -> dict[str, str]:
    with socket.socket() as tcp, socket.socket() as http:
        for sock in (tcp, http):
            sock.bind(("127.0.0.1", 0))
        return {f"{name}_address": "{}:{}".format(*s.getsockname()) for name, s in (("tcp", tcp), ("http", http))}


def test_a_certificate_that_can_not_be_used_frees_the_addresses(tmp_path: Path) -> None:
    async def main() -> None:
        addresses, missing = free_addresses(), str(tmp_path / "none.crt")
        tls = {"https_address": "127.0.0.1:0", "tls_cert": missing, "tls_key": missing}
        why, _kept = await refused(LookupdOptions(**addresses, **tls))  # type: ignore[arg-type]
        assert why.startswith(f"--tls-cert={missing} ") and "No such file" in why
        async with running(**addresses) as world:
            assert world.daemon.tcp_address == addresses["tcp_address"]

    uvloop.run(main())


def test_an_address_in_use_frees_those_before_it() -> None:
    async def main() -> None:
        addresses = free_addresses()
        async with running() as world:
            taken = world.daemon.http_address
            why, _kept = await refused(LookupdOptions(**addresses, metrics_address=taken))  # type: ignore[arg-type]
            assert why.startswith(f"--metrics-address={taken}")
        async with running(**addresses) as world:
            assert world.daemon.http_address == addresses["http_address"]

    uvloop.run(main())


def test_stopping_closes_every_connection() -> None:
    async def main() -> None:
        async with running() as world:
            nsqd = await world.nsqd()
            await nsqd.identify()
        assert await nsqd.closed()

    uvloop.run(main())


class SlowPeer:
    """A socket of the daemon's whose peer reads when the test says so."""

    def __init__(self) -> None:
        self.written = b""
        self.reading = True
        self.closed = False

    def get_extra_info(self, name: str) -> object:
        return ("1.2.3.4", 5) if name == "peername" else None

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    abort = close


OK = struct.pack(">i", 2) + b"OK"


def a_connection(clock: ManualClock) -> tuple[tcp.LookupConnection, SlowPeer]:
    server = tcp.TcpServer(Registry(inactive_timeout_s=300, tombstone_lifetime_s=45), clock, Logger("t"), silence_s=60)
    connection, peer = tcp.LookupConnection(server), SlowPeer()
    connection.connection_made(peer)  # type: ignore[arg-type]
    return connection, peer


def test_a_peer_that_sends_many_commands_leaves_others_their_turn() -> None:
    """Its commands would hold the loop for seconds, and with it the lease of the cluster's controller."""

    async def main() -> None:
        connection, peer = a_connection(ManualClock())
        count = 3 * STEPS_AT_ONCE
        connection.data_received(b"  V1" + b"PING\n" * count)
        assert len(peer.written) < len(OK) * count and not peer.reading
        connection.pause_writing()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(peer.written) < len(OK) * count, "commands of a peer that does not read are carried out"
        connection.resume_writing()
        while not peer.reading:
            await asyncio.sleep(0)
        assert peer.written == OK * count

    asyncio.run(main())


def test_what_came_before_the_end_of_the_stream_is_carried_out() -> None:
    async def main() -> None:
        connection, peer = a_connection(ManualClock())
        count = 3 * STEPS_AT_ONCE
        connection.data_received(b"  V1" + b"PING\n" * count + b"IDENTIFY\n")
        assert connection.eof_received(), "closed although answers are owed"
        while not peer.closed:
            await asyncio.sleep(0)
        assert peer.written[: len(OK) * count] == OK * count
        assert b"failed to read body size" in peer.written

    asyncio.run(main())
