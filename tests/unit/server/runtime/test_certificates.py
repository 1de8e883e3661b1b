"""Certificates that are read again, and peers that go over to them: new connections at once, old streams in peace."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvloop
from grpc import aio

from nsqha.errors import ConfigError, Unavailable
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.peers import calls as peer_grpc
from nsqha.server.peers.listener import PeerListener
from nsqha.server.peers.renewing import RenewingPeers
from nsqha.server.peers.renewing import listen as grpc_listen
from nsqha.server.runtime import listen, measures
from nsqha.server.runtime.certificates import CertificateFiles, ClientCertificate, expiry
from nsqha.server.runtime.measures import certificates_end, expired_certificates
from tests.certificates import Certificates
from tests.unit.server.peer_rig import SERVICES, Acceptor, Recorder


class Rotated:
    """Files of one node, and how they are replaced."""

    def __init__(self, folder: Path, made: Certificates) -> None:
        self._folder = folder
        self._made = made

    def use(self, name: str, *authorities: str) -> None:
        """The certificate `name`; these are trusted."""
        trusted = b"".join(Path(self._made.cert(ca)).read_bytes() for ca in authorities)
        for file, data in {
            "node.crt": Path(self._made.cert(name)).read_bytes(),
            "node.key": Path(self._made.key(name)).read_bytes(),
            "ca.crt": trusted,
        }.items():
            (self._folder / file).write_bytes(data)

    def write(self, file: str, data: bytes) -> None:
        (self._folder / file).write_bytes(data)

    def open(self) -> CertificateFiles:
        return CertificateFiles(*(str(self._folder / file) for file in ("node.crt", "node.key", "ca.crt")))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("made"), "newer")
    made.issue("first", "IP:127.0.0.1", "DNS:first")
    made.issue("second", "IP:127.0.0.1", "DNS:second")
    made.issue("third", "IP:127.0.0.1", "DNS:third", ca="newer")
    return made


@pytest.fixture
def rotated(tmp_path: Path, certificates: Certificates) -> Rotated:
    found = Rotated(tmp_path, certificates)
    found.use("first", "ca")
    return found


def test_files_that_did_not_change_are_not_read(rotated: Rotated, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rotated.open()
    monkeypatch.setattr("nsqha.server.runtime.certificates.load_cluster_tls", lambda *_: pytest.fail("read"))
    assert not files.look() and files.generation == 1


def test_a_certificate_that_expires_in_use_is_said_and_shown(
    rotated: Rotated, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = dict[str, float]()
    monkeypatch.setattr(measures, "certificates_end", ends)
    monkeypatch.setattr("nsqha.server.runtime.certificates.certificates_end", ends)

    def said(now: float) -> list[str]:
        caplog.clear()
        files.look_at_ends(now)
        return [record.getMessage() for record in caplog.records if f"{path} expired at " in record.getMessage()]

    files, path = rotated.open(), next(iter(ends))
    end = ends[path]
    assert said(end - 1) == [] and path not in expired_certificates(end - 1)
    [line] = said(end)
    assert "replace the file" in line and said(end + 5) == []
    assert f"{path} expired at " in expired_certificates(end)
    ends[path] = end + 100  # the files were replaced
    assert path not in expired_certificates(end)
    assert said(end + 99) == [] and len(said(end + 100)) == 1


def test_a_new_set_counts(rotated: Rotated, certificates: Certificates) -> None:
    files = rotated.open()
    rotated.use("second", "ca")
    assert files.look() and files.generation == 2
    assert files.tls.certificate == Path(certificates.cert("second")).read_bytes()
    assert not files.look()


def test_a_set_that_is_half_replaced_waits_and_is_said_once(
    rotated: Rotated, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    files = rotated.open()
    before = files.tls
    rotated.write("node.crt", Path(certificates.cert("second")).read_bytes())  # its key is still the first one's
    assert not files.look()
    assert "stay in use" not in caplog.text, "it may be whole at the next look"
    for _ in range(3):
        assert not files.look() and files.tls is before
    assert caplog.text.count("stay in use") == 1
    rotated.write("node.key", Path(certificates.key("second")).read_bytes())
    assert files.look() and files.generation == 2


def test_what_can_not_be_used_at_the_start_is_refused(rotated: Rotated) -> None:
    rotated.write("ca.crt", b"")
    with pytest.raises(ConfigError, match="--cluster-tls-ca"):
        rotated.open()


class Served(NamedTuple):
    """A node that answers Status and accepts Push, and who has asked for Status."""

    address: str
    peer_address: str
    seen: list[str]
    server: aio.Server
    listener: PeerListener

    async def stop(self) -> None:
        await self.server.stop(None)
        await self.listener.close()


async def served(files: CertificateFiles) -> Served:
    seen: list[str] = []

    async def status(peer: Any, request: Any) -> Any:
        seen.append(peer.name)
        return pb.StatusReply(node_uid=7)

    methods = peer_grpc.GrpcPeerServer(SERVICES, tls=files.tls)
    methods.on_call("Status", status)
    methods.on_stream("Push", Acceptor())
    server = aio.server(options=peer_grpc.server_options())
    methods.add_to(server)
    address = await grpc_listen(server, "127.0.0.1:0", files)
    sock = listen.listen("127.0.0.1:0", flag="peer-address")
    listener = PeerListener(methods, sock, files)
    listener.start()
    return Served(address, listen.bound_address(sock), seen, server, listener)


def test_new_connections_have_the_newest_certificate_and_old_streams_stand(rotated: Rotated) -> None:
    async def main() -> None:
        files = rotated.open()
        node = await served(files)
        address, seen = node.address, node.seen
        peers = RenewingPeers(SERVICES, files)
        old, new = Recorder(), Recorder()
        stream = peers.stream(node.peer_address, "Push", old)
        await peers.call(address, "Status", pb.StatusRequest(), timeout=5)
        rotated.use("second", "ca", "newer")
        files.look()
        await peers.call(address, "Status", pb.StatusRequest(), timeout=5)
        rotated.use("third", "newer")
        files.look()
        await peers.call(address, "Status", pb.StatusRequest(), timeout=5)
        assert seen == ["first", "second", "third"]
        assert not old.closed, "its certificate is trusted no more, but it stands"
        assert len(peers._older) == 1, "connections without a stream are closed, those with one are kept"
        peers.stream(node.peer_address, "Push", new)
        stream.close()
        await old.end()
        assert not peers._older
        await peers.close()
        await node.stop()

    asyncio.run(main())


def test_who_is_trusted_no_more_can_not_connect(rotated: Rotated, tmp_path: Path, certificates: Certificates) -> None:
    async def main() -> None:
        other = Rotated(tmp_path / "other", certificates)
        (tmp_path / "other").mkdir()
        other.use("first", "ca", "newer")
        files = rotated.open()
        node = await served(files)
        address = node.address
        rotated.use("third", "newer")
        files.look()
        peers = RenewingPeers(SERVICES, other.open())
        with pytest.raises(Unavailable, match="no connection"):
            await peers.call(address, "Status", pb.StatusRequest(), timeout=5)
        await peers.close()
        await node.stop()

    asyncio.run(main())


def test_the_commands_of_the_manual_make_a_certificate_that_works(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text()
    section = manual.partition("### Certificates")[2].partition("\n## ")[0]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    assert len(commands) == 4
    for command in commands:
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
    assert CertificateFiles(*(str(tmp_path / file) for file in ("b1.crt", "b1.key", "ca.crt"))).tls.certificate
    shown = subprocess.run(
        ["openssl", "x509", "-in", "b1.crt", "-noout", "-ext", "subjectAltName"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "DNS:broker1" in shown.stdout


# ---- what clients see


class Shown:
    """Files of what one broker shows to clients."""

    def __init__(self, folder: Path, made: Certificates) -> None:
        self.folder = folder
        self._made = made

    def use(self, name: str, *, trusted: str = "ca") -> None:
        """The certificate `name`; clients show one of the authority `trusted`."""
        for file, path in (("c.crt", self._made.cert(name)), ("c.key", self._made.key(name)),
                           ("roots.crt", self._made.cert(trusted))):  # fmt: skip
            (self.folder / file).write_bytes(Path(path).read_bytes())

    def open(self, policy: str = "") -> ClientCertificate:
        return ClientCertificate(
            Options(
                tls_cert=str(self.folder / "c.crt"),
                tls_key=str(self.folder / "c.key"),
                tls_client_auth_policy=policy,
                tls_root_ca_file=str(self.folder / "roots.crt"),
            )
        )


@pytest.fixture
def shown(tmp_path: Path, certificates: Certificates) -> Shown:
    found = Shown(tmp_path, certificates)
    found.use("first")
    return found


def of(certificates: Certificates, name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(certificates.cert(name)).read_text())


async def connect(port: int, mine: tuple[str, str] | None = None, name: str | None = None) -> Any:
    """A client's end; `name`: it says whom it wants."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if mine is not None:
        context.load_cert_chain(*mine)
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)


async def answered(end: Any) -> bytes | None:
    """The certificate of the other side; None if it does not serve us."""
    reader, writer = end
    try:
        writer.write(b"?")
        if await reader.read(1) != b"!":
            return None
    except OSError:
        return None
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return found


async def listening(context: ssl.SSLContext) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(b"!")
        writer.close()

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # refused handshakes are expected here
    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


def test_clients_that_connect_see_the_new_certificate(shown: Shown, certificates: Certificates) -> None:
    async def story() -> None:
        files = shown.open()
        server = await listening(files.context)
        port = server.sockets[0].getsockname()[1]
        before = await connect(port)
        assert await answered(before) == of(certificates, "first")
        shown.use("second")
        assert files.look()
        for name in (None, "second"):
            after = await connect(port, name=name)
            assert await answered(after) == of(certificates, "second")
            after[1].close()
        assert await answered(before) == of(certificates, "first"), "it goes on"
        before[1].close()
        server.close()

    uvloop.run(story())


def test_a_certificate_for_clients_that_can_not_be_used_changes_nothing(
    shown: Shown, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        files = shown.open()
        server = await listening(files.context)
        shown.use("second")
        (shown.folder / "c.key").write_bytes(Path(certificates.key("first")).read_bytes())
        assert not files.look() and not files.look()
        end = await connect(server.sockets[0].getsockname()[1])
        assert await answered(end) == of(certificates, "first")
        end[1].close()
        server.close()

    uvloop.run(story())
    assert "stay in use" in caplog.text and "--tls-cert=" in caplog.text


def test_clients_show_certificates_of_the_authority_that_is_trusted_now(
    shown: Shown, certificates: Certificates
) -> None:
    async def story() -> None:
        files = shown.open("require-verify")
        server = await listening(files.context)
        port = server.sockets[0].getsockname()[1]
        older, newer = ((certificates.cert(name), certificates.key(name)) for name in ("second", "third"))
        for trusted, mine, theirs in (("ca", older, newer), ("newer", newer, older)):
            shown.use("first", trusted=trusted)
            files.look()
            end, refused = await connect(port, mine), await connect(port, theirs)
            assert await answered(end) == of(certificates, "first")
            assert await answered(refused) is None
            end[1].close()
            refused[1].close()
        server.close()

    uvloop.run(story())


def test_the_end_of_a_certificate_is_known_and_that_of_a_key_is_not(certificates: Certificates) -> None:
    end = expiry(certificates.cert("first"))
    assert end is not None and end > 1_700_000_000
    assert expiry(certificates.key("first")) is None
    assert expiry("/does/not/exist") is None


def test_a_renewed_certificate_has_its_own_end(rotated: Rotated, tmp_path: Path) -> None:
    rotated.open()
    path = str(tmp_path / "node.crt")
    assert certificates_end[path] == expiry(path)


@pytest.mark.parametrize("file", ["node.crt", "node.key", "ca.crt"])
def test_a_file_without_an_end_is_not_opened(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    rotated = Rotated(tmp_path, certificates)
    rotated.use("first", "ca")
    files = rotated.open()
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)  # to open it would wait for a writer
    assert not files.look() and not files.look() and "this is no file" in caplog.text
    with pytest.raises(ConfigError, match="this is no file"):
        rotated.open()
    (tmp_path / file).unlink()
    rotated.write(file, b"\n" * (4 << 20) + b"\n")
    assert not files.look() and not files.look() and "it has more than 4,194,304 bytes" in caplog.text
    rotated.use("second", "ca")
    assert files.look() and files.generation == 2
