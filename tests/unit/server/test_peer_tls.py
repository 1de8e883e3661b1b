"""The calling end of a stream with TLS: its certificates, and what only a server that is not ours does."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqha.errors import ConfigError
from nsqha.server import tls
from tests.certificates import Certificates
from tests.unit.server.peer_rig import Acceptor, GrpcWorld, Recorder, World, push, reply


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
        world.peers.stream(world.address, "Push", handler).send(push(1))
        await handler.until(lambda: handler.messages or handler.closed)
        assert handler.numbers == [1]

    class Files:
        tls = found
        generation = 1

    GrpcWorld(files=Files(), caller_tls=found).run(scenario)


def test_certificates_that_a_connection_can_not_use_are_refused_where_they_are_read(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when files are replaced between two looks at them: at the first stream it would be too late."""
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"" if path.suffix == ".key" else read(path))
    with pytest.raises(ConfigError, match="--cluster-tls-key"):
        tls.load_cluster_tls(certificates.cert("node"), certificates.key("node"), certificates.cert("ca"))
