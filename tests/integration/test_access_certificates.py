"""Certificates that give roles, in real handshakes over HTTPS and gRPC."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from nsqha.access.surfaces import GRPC, NODES
from tests.certificates import Certificates
from tests.integration.servers import Node, free_port, wait_until
from tests.integration.test_access_roles import TOKENS, called, write_access

pytestmark = pytest.mark.timeout(120)

HOLDERS = {
    "viewer": ("URI:nsqha:viewer",),
    "operator": ("URI:nsqha:operator",),
    "admin": ("URI:nsqha:administrator",),
    "segments": ("URI:nsqha:reader",),
    "nobody": ("DNS:nobody",),
    "misspelt": ("URI:nsqha:admin", "URI:nsqha:viewer/"),
}
"""Name of a certificate -> what is in its subjectAltName."""
ROUTES = {
    "GET /stats": {"viewer", "operator", "admin"},
    "POST /topic/create?topic=t": {"operator", "admin"},
    "GET /config/log_level": {"admin"},
    "POST /pub?topic=t": set(),
}
"""A route -> who may use it."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"), "other")
    made.issue("server", "IP:127.0.0.1", "DNS:localhost")
    for name, names in HOLDERS.items():
        made.issue(name, *names)
    made.issue("forged", "URI:nsqha:administrator", ca="other")
    return made


def broker(folder: Path, files: Certificates, policy: str) -> Node:
    flags = [
        f"--access-file={write_access(folder / 'access.toml')}",
        f"--https-address=127.0.0.1:{free_port()}",
        f"--grpc-address=127.0.0.1:{free_port()}",
        *(f"--tls-{flag}={path}" for flag, path in (("cert", files.cert("server")), ("key", files.key("server")))),
        f"--tls-root-ca-file={files.cert('ca')}",
        f"--tls-client-auth-policy={policy}",
        f"--cluster-tls-cert={files.cert('server')}",
        f"--cluster-tls-key={files.key('server')}",
        f"--cluster-tls-ca={files.cert('ca')}",
    ]
    return Node(folder / "node", flags=flags)


def flag(node: Node, name: str) -> str:
    return next(text.partition("=")[2] for text in node.flags if text.startswith(f"--{name}="))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, files: Certificates) -> Iterator[Node]:
    with broker(tmp_path_factory.mktemp("node"), files, "require-verify") as node:
        wait_until(lambda: "gRPC: listening" in node.log(), "gRPC listens")
        yield node


def https(node: Node, files: Certificates, name: str, holder: str, token: str = "") -> int:
    context = ssl.create_default_context(cafile=files.cert("ca"))
    if holder:
        context.load_cert_chain(files.cert(holder), files.key(holder))
    method, _, target = name.partition(" ")
    connection = http.client.HTTPSConnection(flag(node, "https-address"), timeout=20, context=context)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, target, b"x" if "/pub" in target else None, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_each_certificate_has_its_role_over_https(node: Node, files: Certificates) -> None:
    wrong = []
    for name, allowed in ROUTES.items():
        for holder in HOLDERS:
            status = https(node, files, name, holder)
            roleless = holder in ("nobody", "misspelt")
            if status != (200 if holder in allowed else 401 if roleless else 403):
                wrong.append((name, holder, status))
    assert not wrong
    for holder in ("", "forged"):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            https(node, files, "GET /stats", holder)


def test_a_token_decides_alone_beside_a_certificate(node: Node, files: Certificates) -> None:
    assert https(node, files, "POST /pub?topic=t", "admin", TOKENS["publisher"]) == 200
    assert https(node, files, "GET /config/log_level", "admin", TOKENS["viewer"]) == 403
    assert https(node, files, "GET /stats", "admin", "wrong") == 401


def test_the_audit_names_the_certificate(node: Node, files: Certificates) -> None:
    assert https(node, files, "POST /topic/create?topic=named", "operator") == 200
    (line,) = [line for line in node.log().splitlines() if "topic=named" in line and "AUDIT" in line]
    assert "AUDIT: certificate operator (" in line and ") https POST /topic/create topic=named: done" in line


@pytest.mark.parametrize("policy", ["require", ""])
def test_a_certificate_that_nobody_verified_has_no_role(tmp_path: Path, files: Certificates, policy: str) -> None:
    """With `require` any certificate is taken, as by nsqd; whoever makes his own is not what he writes in it."""
    with broker(tmp_path, files, policy) as node:
        for holder in ("forged", "admin"):
            assert https(node, files, "GET /config/log_level", holder) == 401
        assert https(node, files, "GET /config/log_level", "forged", TOKENS["admin"]) == 200


def channel(node: Node, files: Certificates, holder: str) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        *(Path(path).read_bytes() for path in (files.cert("ca"), files.key(holder), files.cert(holder)))
    )
    return grpc.secure_channel(flag(node, "grpc-address"), credentials)


def test_each_certificate_has_its_role_over_grpc(node: Node, files: Certificates) -> None:
    wrong = []
    denied = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    for holder in HOLDERS:
        with channel(node, files, holder) as secure:
            for method, need in GRPC.items():
                if need == NODES or "reflection" in method:
                    continue
                code = called(secure, method, "")
                allowed = need.open or holder in _holders(method)
                wrong += [] if (code not in denied) is allowed else [(method, holder, code)]
    assert not wrong
    with channel(node, files, "forged") as secure:
        assert called(secure, "nsqha.v1.Admin/ListTopics", "") is grpc.StatusCode.UNAVAILABLE, "the handshake fails"


def _holders(method: str) -> set[str]:
    """Whose certificate may call this."""
    need = GRPC[method]
    by_role = {"viewer": "viewer", "operator": "operator", "admin": "admin", "reader": "", "segments": "segments"}
    found = {by_role.get(role.value, "") for role in need.roles} - {""}
    implied = {"viewer": {"operator", "admin"}, "operator": {"admin"}, "segments": {"admin"}}
    for name in tuple(found):
        found |= implied.get(name, set())
    return found | ({"admin"} if any(role.value == "reader" for role in need.roles) else set())
