"""The registrar against a lookup daemon that remembers what it is told."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from nsqha.cluster_secret import ClusterSecret, lookup_proof
from nsqha.errors import ConfigError
from nsqha.server.node import registrar as module
from nsqha.server.node.registrar import Credentials, LookupdLost, ProducerIdentity, Registrar, read_token

IDENTITY = ProducerIdentity("node.example", "host", 4150, 4151, "z", "r")


class FakeLookupd:
    """Answers V1 commands with OK; `silent` swallows them, `refuse` is answered instead of OK."""

    def __init__(self, info: bytes | None = None) -> None:
        self.info = info
        self.heard: list[str] = []
        self.identities: list[dict[str, object]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.shown: list[bytes] = []
        self.wrong: set[bytes] = set()
        self.left = 0
        self.silent = False
        self.refuse = b""
        self._changed = asyncio.Event()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            assert await reader.readexactly(4) == b"  V1"
            while line := await reader.readline():
                if line == b"IDENTIFY\n":
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    self.identities.append(json.loads(await reader.readexactly(size)))
                    self._reply(writer, self.info or b'{"broadcast_address":"127.0.0.1","http_port":1}')
                    continue
                if line == b"AUTH\n":
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    shown = await reader.readexactly(size)
                    self.shown.append(shown)
                    self._changed.set()
                    self._reply(writer, b"E_AUTH_FAILED AUTH failed" if shown in self.wrong else b"{}")
                    continue
                self.heard.append(line.decode().rstrip("\n"))
                self._changed.set()
                if self.refuse:
                    self._reply(writer, self.refuse)
                elif not self.silent:
                    self._reply(writer, b"OK")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.left += 1
            self._changed.set()
            writer.close()

    def _reply(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(len(body).to_bytes(4, "big") + body)

    async def until_heard(self, *lines: str) -> None:
        """Wait until exactly these commands have come, in any order; then forget them."""
        async with asyncio.timeout(5):
            while sorted(self.heard) != sorted(lines):
                self._changed.clear()
                await self._changed.wait()
        self.heard.clear()

    async def until_left(self, connections: int) -> None:
        """Wait until so many connections have ended."""
        async with asyncio.timeout(5):
            while self.left < connections:
                self._changed.clear()
                await self._changed.wait()

    async def until_shown(self, times: int) -> None:
        """Wait until so many AUTHs have come."""
        async with asyncio.timeout(5):
            while len(self.shown) < times:
                self._changed.clear()
                await self._changed.wait()

    def drop(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers.clear()

    def stop(self) -> None:
        self.server.close()
        self.drop()


def run(
    conversation: Callable[[Registrar, FakeLookupd, str], Awaitable[None]],
    registrations: Callable[[], Mapping[str, Sequence[str]]] = dict,
    info: bytes | None = None,
    trusted: bool = True,
    token_file: str = "",
    secret: ClusterSecret | None = None,
    **limits: Any,
) -> None:
    """`trusted`: the registrar's options name the daemon."""

    async def main() -> None:
        lookupd = FakeLookupd(info)
        address = await lookupd.start()
        named = (address,) if trusted else ("127.0.0.1:1",)
        credentials = Credentials(token_file, named, secret)
        registrar = Registrar(
            IDENTITY, registrations, answer_bytes_max=1000, request_seconds=1.0, credentials=credentials, **limits
        )
        try:
            await conversation(registrar, lookupd, address)
        finally:
            await registrar.close()
            lookupd.stop()

    asyncio.run(main())


def test_it_says_who_it_is_and_registers_everything() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address, address])
        await lookupd.until_heard("REGISTER t c1", "REGISTER t c2#ephemeral", "REGISTER alone")
        assert lookupd.identities == [
            {
                "version": "1.3.0",
                "broadcast_address": "node.example",
                "hostname": "host",
                "tcp_port": 4150,
                "http_port": 4151,
                "topology_zone": "z",
                "topology_region": "r",
            }
        ]
        assert registrar.connected == {address: True}

    run(conversation, lambda: {"t": ["c1", "c2#ephemeral"], "alone": []})


@pytest.mark.parametrize(
    ("tcp_port", "http_port", "flag"),
    [(-1, -1, "--tcp-address"), (-1, 4151, "--tcp-address"), (4150, 0, "--http-address")],
)
def test_a_node_without_a_port_registers_nowhere_and_says_so_once(
    tcp_port: int, http_port: int, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        identity = replace(IDENTITY, tcp_port=tcp_port, http_port=http_port)
        registrar = Registrar(identity, lambda: {"t": []}, answer_bytes_max=1000)
        registrar.set_peers([])
        assert not caplog.records
        for _ in range(2):
            registrar.set_peers(["127.0.0.1:1", "127.0.0.1:2"])
        assert registrar.connected == {} and not registrar.may_know
        assert await registrar.known_channels("t", patient=True) == []
        registrar.changed("t", ["c"])
        await registrar.close()

    caplog.set_level("INFO")
    asyncio.run(main())
    (record,) = caplog.records
    assert f"not registered with lookup daemons, as {flag} has no port" in record.getMessage()


def test_changes_are_told_as_they_happen() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        registrar.changed("t", [])
        registrar.changed("t", ["c"])
        await lookupd.until_heard("REGISTER t", "REGISTER t c")
        registrar.changed("t", [])
        registrar.changed("t", None)
        await lookupd.until_heard("UNREGISTER t c", "UNREGISTER t")

    run(conversation, lambda: {"a": []})


def test_the_number_of_partitions_is_told_if_all_are_here() -> None:
    counts = {"a": 4, "b": 1, "c": 0}

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a x", "REGISTER a  4", "REGISTER b", "REGISTER c")
        for topic, count in (("a", 6), ("b", 1), ("c", 1), ("d", 2)):
            counts[topic] = count
            registrar.changed(topic, ["x"] if topic == "a" else [])
        await lookupd.until_heard("REGISTER a  6", "REGISTER d  2")

    run(conversation, lambda: {"a": ["x"], "b": [], "c": []}, partitions=lambda topic: counts.get(topic, 0))


def test_of_some_channels_only_what_is_new_is_told() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a old", "REGISTER a stays")
        registrar.channels_changed("a", {"old": False, "new": True, "stays": True, "unknown": False})
        registrar.channels_changed("a", {"old": False, "new": True})
        await lookupd.until_heard("UNREGISTER a old", "REGISTER a new")
        registrar.changed("a", ["new", "stays"])
        registrar.changed("a", None)
        await lookupd.until_heard("UNREGISTER a new", "UNREGISTER a stays", "UNREGISTER a")
        assert lookupd.heard == []

    run(conversation, lambda: {"a": ["old", "stays"]})


def test_only_what_is_new_is_told() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a old")
        registrar.changed("a", ["old"])  # that was told when the connection was made
        registrar.changed("a", ["new"])
        registrar.changed("a", ["new"])
        registrar.changed("b", None)
        await lookupd.until_heard("REGISTER a new", "UNREGISTER a old")
        registrar.changed("a", None)
        await lookupd.until_heard("UNREGISTER a new", "UNREGISTER a")
        assert lookupd.heard == []

    run(conversation, lambda: {"a": ["old"]})


def test_a_lost_connection_is_made_anew_with_everything_there_is_then() -> None:
    topics: dict[str, list[str]] = {"a": []}

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        lookupd.drop()
        topics["b"] = ["c"]
        await lookupd.until_heard("REGISTER a", "REGISTER b c")
        assert len(lookupd.identities) == 2

    run(conversation, lambda: topics)


@pytest.mark.parametrize("answer", [b"E_INVALID no", b"", b"what"])
def test_an_answer_other_than_ok_ends_the_connection(answer: bytes) -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        lookupd.refuse = answer or b"x"
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        lookupd.refuse = b""
        await lookupd.until_heard("REGISTER a")

    run(conversation, lambda: {"a": []})


def test_a_daemon_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        lookupd.silent = True
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        await lookupd.until_heard("REGISTER a")

    run(conversation, lambda: {"a": []})


def test_pings_keep_the_registration_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_SECONDS", 0.02)

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("PING")
        await lookupd.until_heard("PING")
        assert len(lookupd.identities) == 1

    run(conversation)


@pytest.mark.parametrize("info", [b"E_BAD_BODY IDENTIFY missing fields", b"nope", b"{" * 2000])
def test_a_refused_identify_is_tried_again(info: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01, 0.01))

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        async with asyncio.timeout(5):
            while len(lookupd.identities) < 2:
                await asyncio.sleep(0.005)
        assert registrar.connected == {address: False}
        lookupd.info = None
        await lookupd.until_heard("REGISTER a")

    run(conversation, lambda: {"a": []}, info)


def test_the_list_of_daemons_can_change() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        other = FakeLookupd()
        other_address = await other.start()
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        registrar.set_peers([other_address, "not an address", "127.0.0.1:1"])
        await other.until_heard("REGISTER a")
        registrar.changed("t", [])
        await other.until_heard("REGISTER t")
        await lookupd.until_left(1)
        assert lookupd.heard == []
        assert registrar.connected == {other_address: True, "not an address": False, "127.0.0.1:1": False}
        registrar.set_peers([])
        assert registrar.connected == {}
        other.stop()

    run(conversation, lambda: {"a": []})


def test_leaving_closes_the_connection() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        await registrar.close()
        await lookupd.until_left(1)

    run(conversation, lambda: {"a": []})


# ---- channels that others made


async def http_server(replies: dict[str, tuple[str, bytes]]) -> tuple[asyncio.Server, int, list[str]]:
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1]
        asked.append(target)
        status, body = replies.get(target, ("404 Not Found", b"{}"))
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1], asked


@pytest.mark.parametrize(
    ("status", "body", "known"),
    [
        ("200 OK", b'{"channels":["b","a","gone#ephemeral","not valid"]}', ["a", "b"]),
        ("200 OK", b'{"channels":null}', []),
        ("200 OK", b'{"Channels":["a",null,"caf\xe9"],"x":"\xff"}', ["a"]),
        ("200 OK", b"nope", []),
        ("500 Oops", b'{"channels":["a"]}', []),
    ],
)
def test_known_channels_are_asked_of_the_daemon_behind_the_connection(
    status: str, body: bytes, known: list[str]
) -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        server, port, asked = await http_server({"/channels?topic=t": (status, body)})
        lookupd.info = b'{"Broadcast_Address":"127.0.0.1","http_port":%d,"hostname":"caf\xe9","version":null}' % port
        assert await registrar.known_channels("t") == []
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        assert await registrar.known_channels("t") == known
        assert asked == ["/channels?topic=t"]
        server.close()

    run(conversation, lambda: {"a": []})


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(registrar: Registrar, lookupd: FakeLookupd, address: str, serve: Serve) -> AsyncIterator[None]:
    """The daemon's HTTP side is `serve`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    lookupd.info = b'{"broadcast_address":"127.0.0.1","http_port":%d}' % server.sockets[0].getsockname()[1]
    registrar.set_peers([address])
    await lookupd.until_heard("REGISTER a")
    try:
        yield
    finally:
        server.close()


def tokens_in(head: bytes) -> list[str]:
    return [line for line in head.decode().split("\r\n") if line.startswith("Authorization")]


def test_a_daemon_with_an_access_file_is_shown_the_token(tmp_path: Path) -> None:
    path, shown = tmp_path / "token", []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.extend(tokens_in(await reader.readuntil(b"\r\n\r\n")))
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\nConnection: close\r\n\r\n{"channels":["c"]}')
        writer.close()

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        async with serving(registrar, lookupd, address, serve):
            assert await registrar.known_channels("t") == [], "no file: a line in the log, and no channel"
            for text in ("first\n", "second"):
                path.write_text(text)
                path.chmod(0o600)
                assert await registrar.known_channels("t") == ["c"]

    run(conversation, lambda: {"a": []}, token_file=str(path))
    assert shown == ["Authorization: Bearer first", "Authorization: Bearer second"]


def test_a_daemon_that_wants_a_token_is_said_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        async with serving(registrar, lookupd, address, serve):
            assert await registrar.known_channels("t") == []

    run(conversation, lambda: {"a": []})
    assert "status 401: it wants a token, role broker: give --lookupd-token-file" in caplog.text


@pytest.mark.parametrize("trusted", [True, False])
def test_only_a_daemon_that_the_options_name_is_shown_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trusted: bool
) -> None:
    """Whoever may name lookup daemons while the node runs could collect its token otherwise."""
    path, shown = tmp_path / "token", []
    path.write_text("secret")
    path.chmod(0o600)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.extend(tokens_in(await reader.readuntil(b"\r\n\r\n")))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        async with serving(registrar, lookupd, address, serve):
            assert await registrar.known_channels("t") == []

    run(conversation, lambda: {"a": []}, token_file=str(path), trusted=trusted)
    assert shown == (["Authorization: Bearer secret"] if trusted else [])
    assert ("only daemons that --lookupd-tcp-address names" in caplog.text) is not trusted


def test_a_token_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xef\xbb\xbfsecret\n")
    path.chmod(0o600)
    assert read_token(str(path)) == "secret"


@pytest.mark.parametrize(("text", "why"), [("", "in one line"), ("a\nb", "in one line"), ("x" * 4097, "more than")])
def test_a_file_without_one_token_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"--lookupd-token-file={path}: .*{why}"):
        read_token(str(path))


def test_the_token_does_not_follow_a_redirect(tmp_path: Path) -> None:
    path, shown = tmp_path / "token", []
    path.write_text("secret")
    path.chmod(0o600)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.extend(tokens_in(await reader.readuntil(b"\r\n\r\n")))
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        async with serving(registrar, lookupd, address, serve):
            assert await registrar.known_channels("t") == []

    run(conversation, lambda: {"a": []}, token_file=str(path))
    assert shown == ["Authorization: Bearer secret"]


def test_a_topic_begins_with_no_more_channels_than_it_may_have(caplog: pytest.LogCaptureFixture) -> None:
    """20,000 names that a lookup daemon knows kept the first PUB waiting for half a minute."""
    body = json.dumps({"channels": [f"c{n:05}" for n in range(20_000)]}).encode()

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        server, port, _ = await http_server({"/channels?topic=t": ("200 OK", body)})
        lookupd.info = b'{"broadcast_address":"127.0.0.1","http_port":%d}' % port
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        assert await registrar.known_channels("t") == [f"c{n:05}" for n in range(3)]
        assert "begins with the first 3 of 20000 channels" in caplog.text
        server.close()

    run(conversation, lambda: {"a": []}, channels_max=3)


def test_an_answer_that_comes_in_pieces_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channels of a topic may be more than one packet: the first of them is no JSON, and would count as none."""
    names = [f"channel-{n:03}" for n in range(500)]
    body = json.dumps({"channels": names}).encode()
    arrived = asyncio.Event()
    feed = aiohttp.StreamReader.feed_data

    def feed_data(reader: aiohttp.StreamReader, *args: Any) -> None:
        feed(reader, *args)
        arrived.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body[:1000])
        await arrived.wait()
        writer.write(body[1000:])
        writer.close()

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        lookupd.info = b'{"broadcast_address":"127.0.0.1","http_port":%d}' % server.sockets[0].getsockname()[1]
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed_data)
        assert await registrar.known_channels("t") == names
        server.close()

    run(conversation, lambda: {"a": []})


def test_a_daemon_that_answers_without_end_knows_no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHANNELS_BYTES_MAX", 100)
    body = b'{"channels":["a"],"more":"' + 200 * b"x" + b'"}'

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        server, port, _ = await http_server({"/channels?topic=t": ("200 OK", body)})
        lookupd.info = b'{"broadcast_address":"127.0.0.1","http_port":%d}' % port
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        assert await registrar.known_channels("t") == []
        server.close()

    run(conversation, lambda: {"a": []})


def test_who_is_patient_waits_for_the_first_try_of_each_daemon() -> None:
    """A topic that is made, or found unasked, within the first moments of a node."""

    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        server, port, _ = await http_server({"/channels?topic=t": ("200 OK", b'{"channels":["c"]}')})
        lookupd.info = b'{"broadcast_address":"127.0.0.1","http_port":%d}' % port
        assert not registrar.may_know
        registrar.set_peers([address, "127.0.0.1:1"])
        assert registrar.may_know
        assert await registrar.known_channels("t") == []
        assert await registrar.known_channels("t", patient=True) == ["c"]
        registrar.set_peers(["127.0.0.1:1"])
        assert not registrar.may_know, "it was tried, and is not there"
        server.close()

    run(conversation, lambda: {"a": []})


def test_a_daemon_that_is_removed_before_it_was_reached_is_not_waited_for() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        asking = asyncio.ensure_future(registrar.known_channels("t", patient=True))
        await asyncio.sleep(0)
        registrar.set_peers([])
        assert await asyncio.wait_for(asking, 5) == []

    run(conversation)


def test_a_daemon_that_is_gone_knows_no_channels() -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER a")
        assert await registrar.known_channels("t#ephemeral") == []

    run(conversation, lambda: {"a": []})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (asyncio.IncompleteReadError(b"", 4), "it closed the connection"),
        (TimeoutError(), "no answer within 1 s"),
        (TimeoutError(110, "Connect call failed"), "Connection timed out"),
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (LookupdLost("E_INVALID no"), "E_INVALID no"),
        (LookupdLost(""), "no usable answer"),
        (
            aiohttp.ClientConnectorError(
                SimpleNamespace(host="h", port=1, ssl=None),  # type: ignore[arg-type]
                ConnectionRefusedError(111, "Connect call failed"),
            ),
            "Connection refused",
        ),
    ],
)
def test_the_log_says_what_happened_without_pythons_words(error: Exception, words: str) -> None:
    assert module._why(error, 1.0) == words


# ---- daemons with an access file

NONCE = bytes(range(32))
ASKS = b'{"broadcast_address":"127.0.0.1","http_port":1,"auth_required":true}'
KNOWS_SECRET = ASKS[:-1] + b',"nonce":"%s"}' % NONCE.hex().encode()
SECRET = ClusterSecret(b"s" * 32)
PROOF = lookup_proof(SECRET, NONCE, hashlib.sha256(IDENTITY.json()).digest())


def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("the token\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("info", "secret", "shown"),
    [
        (None, SECRET, []),  # nsqlookupd of NSQ, or a daemon without an access file
        (ASKS, None, [b"the token"]),
        (ASKS, SECRET, [b"the token"]),
        (KNOWS_SECRET, None, [b"the token"]),
        (KNOWS_SECRET, SECRET, [PROOF]),
    ],
)
def test_a_daemon_that_asks_for_auth_gets_a_proof_or_the_token_first(
    tmp_path: Path, info: bytes | None, secret: ClusterSecret | None, shown: list[bytes]
) -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER t")
        assert lookupd.shown == shown

    run(conversation, lambda: {"t": []}, info=info, token_file=token_file(tmp_path), secret=secret)


def test_where_the_proof_is_refused_the_token_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        lookupd.wrong.add(PROOF)
        registrar.set_peers([address])
        await lookupd.until_heard("REGISTER t")
        assert lookupd.shown == [PROOF, b"the token"]

    run(conversation, lambda: {"t": []}, info=KNOWS_SECRET, token_file=token_file(tmp_path), secret=SECRET)
    assert "compare the files of --cluster-secret-file" in caplog.text


@pytest.mark.parametrize(
    ("with_file", "trusted", "why"),
    [
        (False, True, "role broker: give --lookupd-token-file"),
        (True, False, "only daemons that --lookupd-tcp-address names are shown the token"),
    ],
)
def test_without_a_token_for_the_daemon_nothing_is_shown_or_registered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_file: bool, trusted: bool, why: str
) -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        registrar.set_peers([address])
        await lookupd.until_left(1)
        assert not lookupd.shown and not lookupd.heard and registrar.connected == {address: False}

    run(
        conversation,
        lambda: {"t": []},
        info=ASKS,
        token_file=token_file(tmp_path) if with_file else "",
        trusted=trusted,
    )
    assert why in caplog.text


def test_a_refused_token_is_logged_with_its_flag_and_role(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(registrar: Registrar, lookupd: FakeLookupd, address: str) -> None:
        lookupd.wrong.add(b"the token")
        registrar.set_peers([address])
        await lookupd.until_left(1)
        assert not lookupd.heard

    run(conversation, lambda: {"t": []}, info=ASKS, token_file=token_file(tmp_path))
    assert "--lookupd-token-file has to name a token of its access file, role broker" in caplog.text
