"""The calling end of a stream with TLS: its certificates, and what only a server that is not ours does."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from nsqha.errors import ConfigError
from nsqha.server.peers import client_stream, http2, http2_stream, keepalive
from nsqha.server.peers.api import methods_of
from nsqha.server.peers.client_stream import ClientStream
from nsqha.server.peers.http2 import INITIAL_WINDOW_SIZE, SETTINGS, WINDOW_UPDATE, frame
from nsqha.server.peers.renewing import RenewingPeers
from nsqha.server.runtime import tls
from nsqha.server.runtime.certificates import CertificateFiles
from tests.certificates import Certificates
from tests.unit.server.peer_rig import SERVICES, Acceptor, GrpcWorld, Recorder, World, push, reply

METHOD = methods_of(SERVICES)["Push"]
WINDOW = 1 << 30
SETTINGS_AND_ROOM = frame(SETTINGS, 0, 0, struct.pack(">HL", INITIAL_WINDOW_SIZE, WINDOW)) + frame(
    WINDOW_UPDATE, 0, 0, struct.pack(">L", WINDOW)
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.issue("node", "IP:127.0.0.1", "DNS:localhost", "DNS:node", "URI:nsqha:node/00000000000000ab")
    return made


@pytest.fixture(scope="module")
def node(certificates: Certificates) -> tls.ClusterTls:
    return tls.load_cluster_tls(certificates.cert("node"), certificates.key("node"), certificates.cert("ca"))


@pytest.mark.parametrize("comment", ["# Größe\n".encode(), "# Größe\n".encode("latin-1"), b"\xff\n"])
def test_a_ca_file_may_have_comments_in_any_encoding(
    certificates: Certificates, node: tls.ClusterTls, tmp_path: Path, comment: bytes
) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(comment + node.ca)
    found = tls.load_cluster_tls(certificates.cert("node"), certificates.key("node"), str(file))

    async def scenario(world: World) -> None:
        acceptor = Acceptor(lambda stream: Recorder(lambda _: stream.send(reply(1))))
        world.server.on_stream("Push", acceptor)
        handler = Recorder()
        world.peers.stream(world.peer_address, "Push", handler).send(push(1))
        await handler.until(lambda: handler.messages or handler.closed)
        assert handler.numbers == [1]

    GrpcWorld(files=SimpleNamespace(tls=found, generation=1), caller_tls=found).run(scenario)


def test_certificates_that_a_connection_can_not_use_are_refused_where_they_are_read(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when files are replaced between two looks at them: at the first stream it would be too late."""
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"" if path.suffix == ".key" else read(path))
    with pytest.raises(ConfigError, match="--cluster-tls-key"):
        tls.load_cluster_tls(certificates.cert("node"), certificates.key("node"), certificates.cert("ca"))


def test_streams_have_the_certificates_that_are_newest(certificates: Certificates, tmp_path: Path) -> None:
    certificates.issue("renewed", "IP:127.0.0.1", "URI:nsqha:node/00000000000000cd")

    def use(name: str, comment: bytes = b"") -> None:
        for kind, made in (("crt", certificates.cert(name)), ("key", certificates.key(name))):
            (tmp_path / f"node.{kind}").write_bytes(Path(made).read_bytes())
        (tmp_path / "ca.crt").write_bytes(comment + Path(certificates.cert("ca")).read_bytes())

    use("node")
    files = CertificateFiles(*(str(tmp_path / name) for name in ("node.crt", "node.key", "ca.crt")))

    async def scenario(world: World) -> None:
        acceptor = Acceptor()
        world.server.on_stream("Push", acceptor)
        peers = RenewingPeers(SERVICES, files)
        seen = []
        for number in range(2):
            peers.stream(world.peer_address, "Push", Recorder()).send(push(1))
            accepted = await acceptor.next(number)
            assert accepted.stream is not None
            seen.append(accepted.stream.peer.node_uid)
            use("renewed", "# erneuert für alle\n".encode())
            files.look()
        await peers.close()
        assert seen == [0xAB, 0xCD]

    GrpcWorld(files=files).run(scenario)


# ---- servers that are not ours


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(20):
            await main()
        await asyncio.sleep(0.05)
        assert not complaints
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


def server_context(certificates: Certificates, *protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert("node"), certificates.key("node"))
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@pytest.mark.parametrize("protocols", [(), ("http/1.1",), ("h2",)])
def test_who_does_not_agree_to_http2_is_told_nothing(
    certificates: Certificates, node: tls.ClusterTls, protocols: tuple[str, ...]
) -> None:
    async def main() -> None:
        accepted: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(SETTINGS_AND_ROOM)
            accepted.put_nowait(reader)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=server_context(certificates, *protocols))
        handler = Recorder()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stream = ClientStream(address, METHOD, handler, tls.cluster_client_context(node)).stream
        stream.send(push(1))
        if "h2" in protocols:
            reader = await accepted.get()
            assert (await reader.readexactly(len(http2.PREFACE))) == http2.PREFACE
            stream.close()
        else:
            assert "HTTP/2" in await handler.end()
            await asyncio.sleep(0.05)
            while not accepted.empty():
                with suppress(ConnectionError):
                    assert await accepted.get_nowait().read() == b""
        await stream.messages.over
        server.close()

    run(main)


@pytest.mark.parametrize("how", ["left alone", "closed"])
def test_a_handshake_that_stalls(node: tls.ClusterTls, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(client_stream, "CONNECT_SECONDS", 0.3 if how == "left alone" else 60.0)  # over in 20 s

    async def main() -> None:
        accepted: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
        server = await asyncio.start_server(lambda reader, _: accepted.put_nowait(reader), "127.0.0.1", 0)
        handler = Recorder()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stream = ClientStream(address, METHOD, handler, tls.cluster_client_context(node)).stream
        reader = await accepted.get()
        assert (await reader.readexactly(1)) == b"\x16", "it began"
        if how == "closed":
            stream.close("enough")
        assert (await handler.end()) == ("enough" if how == "closed" else "no connection within 0.3 s")
        with suppress(ConnectionError):
            await reader.read()
        server.close()

    run(main)


def test_closing_does_not_wait_for_who_reads_nothing(
    certificates: Certificates, node: tls.ClusterTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepalive, "PING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(http2_stream, "PING_TIMEOUT_SECONDS", 0.2)

    async def main() -> None:
        accepted: asyncio.Queue[Any] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(SETTINGS_AND_ROOM)
            accepted.put_nowait((reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=server_context(certificates, "h2"))
        handler = Recorder()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stream = ClientStream(address, METHOD, handler, tls.cluster_client_context(node)).stream
        reader, writer = await accepted.get()
        await asyncio.sleep(0.1)
        for number in range(20):
            stream.send(push(number, size=1 << 20))
        await asyncio.sleep(0.1)
        assert stream.pending
        stream.close("enough")
        assert await handler.end() == "enough"
        await asyncio.sleep(0.3)
        writer.transport.resume_reading()
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        server.close()

    run(main)


def test_a_large_message_fills_its_records(certificates: Certificates, node: tls.ClusterTls) -> None:
    """A frame's head in a record of its own would double their number."""
    size = 1 << 20
    raw, plain = bytearray(), bytearray()

    async def main() -> None:
        done = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            end = server_context(certificates, "h2").wrap_bio(incoming, outgoing, server_side=True)
            greeted = False
            while data := await reader.read(1 << 16):
                raw.extend(data)
                incoming.write(data)
                try:
                    if not greeted:
                        end.do_handshake()
                        end.write(SETTINGS_AND_ROOM)
                        greeted = True
                    while found := end.read(1 << 16):
                        plain.extend(found)
                except ssl.SSLWantReadError:
                    pass
                writer.write(outgoing.read())
                if len(plain) > size:
                    done.set()
                    break
            writer.transport.abort()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        handler = Recorder()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stream = ClientStream(address, METHOD, handler, tls.cluster_client_context(node)).stream
        while not stream.keepalive.heard:
            await asyncio.sleep(0.01)
        stream.send(push(1, size=size))
        await done.wait()
        await stream.messages.over
        server.close()

    run(main)
    records, at = 0, 0
    while at < len(raw):
        records += 1
        at += 5 + int.from_bytes(raw[at + 3 : at + 5], "big")
    assert records < size // 16384 + 20
