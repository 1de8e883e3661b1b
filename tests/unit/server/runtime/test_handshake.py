"""A TLS peer that is refused gets the alert that says why, and the log has one line for it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from nsqha.options import Options
from nsqha.server.clients.transport import ClientTransport
from nsqha.server.peers.listener import PeerListener
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.runtime.listen import Acceptor, bound_port, listen
from nsqha.server.runtime.rare_warnings import RefusalLog
from nsqha.server.runtime.tls import Handshake, server_context, why
from tests.certificates import Certificates

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"), "other")
    made.issue("node", "IP:127.0.0.1")
    made.issue("client", "DNS:client")
    made.issue("stranger", "DNS:stranger", ca="other")
    return made


def verifying(certificates: Certificates) -> ssl.SSLContext:
    context = server_context(
        Options(
            tls_cert=certificates.cert("node"),
            tls_key=certificates.key("node"),
            tls_root_ca_file=certificates.cert("ca"),
            tls_client_auth_policy="require-verify",
        )
    )
    assert context is not None
    return context


def of_client(certificates: Certificates, name: str, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificates.cert("ca"))
    context.maximum_version = version
    if name:
        context.load_cert_chain(certificates.cert(name), certificates.key(name))
    return context


def asks(port: int, context: ssl.SSLContext, *, upgrades: bool = False) -> str:
    """Connect, send a line and read one: that, or the alert that came. `upgrades`: the server does so when asked."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            if upgrades:
                sock.sendall(b"IDENTIFY\n")
                assert sock.recv(100) == b"OK"
            secured = context.wrap_socket(sock, server_hostname="127.0.0.1")
            secured.sendall(b"hello\n")
            return secured.recv(100).decode()
    except ssl.SSLError as error:
        return str(error.reason)


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


Story = Callable[[int], Awaitable[None]]
Serves = Callable[[socket.socket], Awaitable[Callable[[], Awaitable[None]]]]


def run(loop: Callable[[], asyncio.AbstractEventLoop], serves: Serves, story: Story) -> None:
    """Serve at a port, tell the story of it, close."""

    async def main() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        sock = listen("127.0.0.1:0", flag="https-address")
        port = bound_port(sock)
        close = await serves(sock)
        async with asyncio.timeout(50):
            await story(port)
        await close()
        assert not complaints

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def accepting(context: ssl.SSLContext, seconds: float = 30.0) -> Serves:
    async def serves(sock: socket.socket) -> Callable[[], Awaitable[None]]:
        acceptor = Acceptor(sock, Echo, tls=context, handshake_seconds=seconds)
        await acceptor.start()

        async def close() -> None:
            acceptor.close()

        return close

    return serves


ALERTS = {
    ssl.TLSVersion.TLSv1_2: {"": "SSLV3_ALERT_HANDSHAKE_FAILURE", "stranger": "TLSV1_ALERT_UNKNOWN_CA"},
    ssl.TLSVersion.TLSv1_3: {"": "TLSV13_ALERT_CERTIFICATE_REQUIRED", "stranger": "TLSV1_ALERT_UNKNOWN_CA"},
}


@pytest.mark.parametrize("version", ALERTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_without_the_right_certificate_is_told_and_logged_once(
    certificates: Certificates,
    loop: Callable[[], asyncio.AbstractEventLoop],
    version: ssl.TLSVersion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(port: int) -> None:
        for name, expected in ALERTS[version].items():
            for _ in range(3):
                assert await asyncio.to_thread(asks, port, of_client(certificates, name, version)) == expected
        assert await asyncio.to_thread(asks, port, of_client(certificates, "client", version)) == "hello\n"

    with caplog.at_level("INFO", logger="nsqha"):
        run(loop, accepting(verifying(certificates)), story)
    (line,) = [record.getMessage() for record in caplog.records]
    address, _, text = line.partition(": ")
    assert address.startswith("127.0.0.1:")
    assert text == "TLS handshake failed: peer did not return a certificate"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "TLS handshake failed: http request"),
        (b"", "TLS handshake failed: the peer did not complete the handshake in time"),
        (None, None),
    ],
    ids=["HTTP", "silence", "a probe that only connects"],
)
def test_what_is_no_handshake_is_logged_unless_the_peer_only_leaves(
    certificates: Certificates,
    loop: Callable[[], asyncio.AbstractEventLoop],
    sent: bytes | None,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if sent is None:
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.1)
        else:
            writer.write(sent)
            await reader.read()
            writer.close()

    with caplog.at_level("INFO", logger="nsqha"):
        run(loop, accepting(verifying(certificates), 0.5 if sent == b"" else 1000.0), story)
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert lines == ([] if reason is None else [reason])


@pytest.mark.parametrize("loop", LOOPS)
def test_many_clients_at_once_are_served(
    certificates: Certificates, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    context = of_client(certificates, "client", ssl.TLSVersion.TLSv1_3)

    async def story(port: int) -> None:
        answers = [asyncio.to_thread(asks, port, context) for _ in range(40)]
        assert await asyncio.gather(*answers) == ["hello\n"] * 40

    run(loop, accepting(verifying(certificates)), story)


def test_a_v2_client_is_told_in_its_upgrade(certificates: Certificates) -> None:
    lines: list[str] = []
    refused = RefusalLog(lambda event, text, *args: lines.append(f"{event} {text % args}"), "tls_refused")
    context = verifying(certificates)

    class Upgrades(Echo):
        def data_received(self, data: bytes) -> None:
            self.transport.write(b"OK")
            loop = asyncio.get_running_loop()
            of_client = ClientTransport(loop)
            of_client.carry_over(self.transport)
            tasks.append(loop.create_task(of_client.start_tls(context, refused)))

    tasks: list[asyncio.Task[Any]] = []

    async def serves(sock: socket.socket) -> Callable[[], Awaitable[None]]:
        acceptor = Acceptor(sock, Upgrades)
        await acceptor.start()

        async def close() -> None:
            acceptor.close()
            assert await asyncio.gather(*tasks) == [None]

        return close

    async def story(port: int) -> None:
        found = await asyncio.to_thread(asks, port, of_client(certificates, "", ssl.TLSVersion.TLSv1_3), upgrades=True)
        assert found == "TLSV13_ALERT_CERTIFICATE_REQUIRED"

    run(uvloop.new_event_loop, serves, story)
    (line,) = lines
    assert line.startswith("tls_refused 127.0.0.1:")
    assert line.endswith("TLS handshake failed: peer did not return a certificate")


def test_a_node_without_the_right_certificate_is_told(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    files = CertificateFiles(certificates.cert("node"), certificates.key("node"), certificates.cert("ca"))

    class Streams:
        def connection(self, address: str) -> Any:
            class Stream(Echo):
                class messages:
                    over = asyncio.get_running_loop().create_future()

                def close(self, why: str) -> None: ...

            return Stream()

    async def serves(sock: socket.socket) -> Callable[[], Awaitable[None]]:
        listener = PeerListener(Streams(), sock, files)
        listener.start()
        return listener.close

    async def story(port: int) -> None:
        found = await asyncio.to_thread(asks, port, of_client(certificates, "", ssl.TLSVersion.TLSv1_3))
        assert found == "TLSV13_ALERT_CERTIFICATE_REQUIRED"

    with caplog.at_level("WARNING", logger="nsqha"):
        run(uvloop.new_event_loop, serves, story)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("failed: peer did not return a certificate")


def test_a_reason_is_in_openssls_words(tmp_path: Path) -> None:
    unknown = ssl.SSLCertVerificationError()
    unknown.verify_message = "self-signed certificate"
    assert why(unknown) == "certificate verify failed: self-signed certificate"
    assert why(ConnectionResetError(104, "Connection reset by peer")) == "[Errno 104] Connection reset by peer"
    assert why(ConnectionResetError()) == "ConnectionResetError"


def test_an_error_that_is_no_refusal_passes() -> None:
    async def main() -> None:
        with pytest.raises(ConnectionResetError), socket.socket() as sock, Handshake("127.0.0.1:1", sock):
            raise ConnectionResetError

    asyncio.run(main())
