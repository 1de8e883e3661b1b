"""Bytes over HTTPS: who may read, and what others are told."""

from __future__ import annotations

import dataclasses
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.election.model import NodeInfo
from nsqha.election.session import View
from nsqha.options import Options
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.identity import may_read
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.segments.byte_server import ReaderLimits
from nsqha.server.segments.ranges import Ask, Refusal
from pyspark_nsqha.model import ReadFailed
from pyspark_nsqha.options import Tls
from pyspark_nsqha.reading import fetch
from tests.certificates import Certificates
from tests.unit.server.segments.byte_rig import ByteServerRig, running
from tests.unit.spark.stored import Stored, joined

NODE = 0xAB
VIEW = View(nodes={NODE: NodeInfo(NODE, broadcast_address="n1")})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"), "elsewhere")
    made.issue("node", "IP:127.0.0.1", f"URI:nsqha:node/{NODE:016x}")
    made.issue("reader", "URI:nsqha:reader")
    made.issue("administrator", "URI:nsqha:administrator")
    made.issue("stranger", "IP:127.0.0.1")
    made.issue("other-node", f"URI:nsqha:node/{NODE + 1:016x}")
    made.issue("foreign", "URI:nsqha:reader", ca="elsewhere")
    made.issue("imposter", "URI:nsqha:readers", "DNS:nsqha:reader")
    return made


def admit(peer: PeerIdentity) -> None:
    if not may_read(VIEW, peer):
        raise Refusal(403, f"the certificate of {peer} is not a reader's")


def only_readers(ask: Ask, peer: PeerIdentity) -> None:
    admit(peer)


@pytest.fixture
def log(tmp_path: Path) -> Stored:
    log = Stored(tmp_path)
    log.write(20)
    return log


def files_of(made: Certificates, name: str = "node") -> CertificateFiles:
    options = dataclasses.replace(
        Options(), cluster_tls_cert=made.cert(name), cluster_tls_key=made.key(name), cluster_tls_ca=made.cert("ca")
    )
    files = CertificateFiles.of(options)
    assert files is not None
    return files


@pytest.fixture
def rig(log: Stored, certificates: Certificates) -> Iterator[ByteServerRig]:
    with running(log, certificates=files_of(certificates), check=only_readers) as rig:
        yield rig


def context_of(made: Certificates, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=made.cert("ca"))
    if name:
        context.load_cert_chain(made.cert(name), made.key(name))
    return context


@pytest.mark.parametrize("name", ["reader", "administrator", "node"])
def test_readers_administrators_and_nodes_may_read(rig: ByteServerRig, certificates: Certificates, name: str) -> None:
    tls = Tls(certificates.cert(name), certificates.key(name), certificates.cert("ca"))
    assert joined(fetch.runs(rig.stored.split(rig.address), tls=tls, retries=0)) == rig.stored.content()


@pytest.mark.parametrize("name", ["stranger", "other-node", "imposter"])
def test_others_of_this_authority_are_told_that_they_may_not(
    rig: ByteServerRig, certificates: Certificates, name: str
) -> None:
    with rig.connect(context_of(certificates, name)) as reader:
        response = reader.get(rig.target(1, 2))
        assert response.status == 403 and "is not a reader's" in response.text
        assert reader.ended()


@pytest.mark.parametrize("head", ["GET /nothing HTTP/1.1", "POST / HTTP/1.1", "no request at all"])
def test_strangers_are_told_so_whatever_they_ask(log: Stored, certificates: Certificates, head: str) -> None:
    """Before anything of it is parsed."""
    with (
        running(log, certificates=files_of(certificates), admit=admit) as rig,
        rig.connect(context_of(certificates, "stranger")) as reader,
    ):
        reader.send(f"{head}\r\n\r\n".encode())
        assert reader.response().status == 403
        assert reader.ended()
        assert rig.asked == []


@pytest.mark.parametrize("name", ["foreign", ""])
def test_without_a_certificate_of_this_authority_nothing_is_asked(
    rig: ByteServerRig, certificates: Certificates, name: str
) -> None:
    with (
        pytest.raises((ssl.SSLError, ConnectionError, IndexError)),
        rig.connect(context_of(certificates, name)) as reader,
    ):
        reader.get(rig.target(1, 2))
    assert rig.asked == []


def test_a_reader_without_tls_is_told_what_it_needs(rig: ByteServerRig) -> None:
    with pytest.raises(ReadFailed, match=rf"{rig.address}: .*"):
        joined(fetch.runs(rig.stored.split(rig.address), retries=0))
    assert rig.asked == []


def test_a_handshake_that_does_not_come_ends_after_its_time(log: Stored, certificates: Certificates) -> None:
    limits = ReaderLimits(head_seconds=0.2)
    with running(log, certificates=files_of(certificates), limits=limits) as rig, rig.connect() as reader:
        assert reader.ended()


def test_a_renewed_certificate_counts_for_the_next_connection(
    log: Stored, certificates: Certificates, tmp_path: Path
) -> None:
    for suffix in "crt", "key":
        shutil.copy(certificates.folder / f"node.{suffix}", tmp_path / f"node.{suffix}")
    shutil.copy(certificates.cert("ca"), tmp_path / "ca.crt")
    mine = Certificates.__new__(Certificates)
    mine.folder = tmp_path
    files = files_of(mine)
    with running(log, certificates=files) as rig:

        def shown() -> bytes:
            with rig.connect(context_of(certificates, "reader")) as reader:
                assert isinstance(reader.sock, ssl.SSLSocket)
                return reader.sock.getpeercert(binary_form=True) or b""

        before = shown()
        certificates.issue("node2", "IP:127.0.0.1", f"URI:nsqha:node/{NODE:016x}")
        for suffix in "crt", "key":
            shutil.copy(certificates.folder / f"node2.{suffix}", tmp_path / f"node.{suffix}")
        assert files.look()
        assert shown() != before


def test_a_connection_too_many_is_not_answered_in_clear(log: Stored, certificates: Certificates) -> None:
    limits = ReaderLimits(connections=0)
    with running(log, certificates=files_of(certificates), limits=limits) as rig, rig.connect() as reader:
        assert reader.sock.recv(100) == b""


def test_a_node_that_is_alone_lets_readers_and_administrators_read() -> None:
    def named(*uris: str) -> PeerIdentity:
        return PeerIdentity.of_certificate("", [], uris)

    assert may_read(None, named("nsqha:reader")) and may_read(None, named("nsqha:administrator"))
    assert may_read(None, PeerIdentity("without TLS"))
    assert not may_read(None, named()) and not may_read(None, named(f"nsqha:node/{NODE:016x}"))
