"""`pub`, `sub` and `tail` at a broker that wants TLS, a certificate and AUTH; what they say where that does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from nsqha.cli.terminal import exits
from tests.certificates import Certificates
from tests.integration.servers import BIN, Node

SECRET = "open sesame"


class Permissions(BaseHTTPRequestHandler):
    """An auth server that knows one secret; it may do everything with topic `orders`."""

    def do_GET(self) -> None:
        (secret,) = parse_qs(urlsplit(self.path).query).get("secret", [""])
        all_of = {"topic": "orders", "channels": [".*"], "permissions": ["publish", "subscribe"]}
        allowed = [all_of] if secret == SECRET else []
        body = json.dumps({"ttl": 60, "identity": "joe", "authorizations": allowed}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    found = Certificates(tmp_path_factory.mktemp("certificates"))
    found.issue("broker", "IP:127.0.0.1")
    found.issue("joe")
    return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Node]:
    server = HTTPServer(("127.0.0.1", 0), Permissions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [
        f"--tls-cert={certificates.cert('broker')}",
        f"--tls-key={certificates.key('broker')}",
        f"--tls-root-ca-file={certificates.cert('ca')}",
        "--tls-client-auth-policy=require-verify",
        "--tls-required=true",
        "--https-address=127.0.0.1:0",
        f"--auth-http-address=127.0.0.1:{server.server_address[1]}",
    ]
    with Node(tmp_path_factory.mktemp("broker"), sync="none", flags=flags) as node:
        assert isinstance(node, Node)
        yield node
    server.shutdown()
    server.server_close()


def run(node: Node, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "nsqha"), *words, "--nsqd-tcp-address", node.tcp, "--timeout", "20s"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=100)


@pytest.fixture
def mine(certificates: Certificates) -> list[str]:
    files = {"root-ca-file": certificates.cert("ca"), "cert": certificates.cert("joe"), "key": certificates.key("joe")}
    return [word for name, path in files.items() for word in (f"--tls-{name}", path)]


def test_publish_and_consume_with_a_certificate_and_a_secret(broker: Node, mine: list[str], tmp_path: Path) -> None:
    done = run(broker, "pub", "orders", "first", "second", *mine, "--auth-secret", SECRET)
    assert done.returncode == exits.OK, done.stderr
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    done = run(broker, "sub", "orders", "billing", "-n", "2", *mine, "--auth-secret-file", str(secret))
    assert (done.returncode, done.stdout) == (exits.OK, "first\nsecond\n"), done.stderr
    flags = mine[2:]  # the authority comes from the environment
    done = run(
        broker, "tail", "orders", "--idle", "200ms", *flags, NSQHA_TLS_ROOT_CA_FILE=mine[1], NSQHA_AUTH_SECRET=SECRET
    )
    assert (done.returncode, done.stdout) == (exits.OK, ""), done.stderr


def test_what_does_not_fit_is_named_with_what_to_do(broker: Node, mine: list[str]) -> None:
    def failed(status: int, *flags: str) -> str:
        done = run(broker, "pub", "orders", "x", *flags)
        assert done.returncode == status, (flags, done.stderr)
        assert SECRET not in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
        return done.stderr

    assert "requires TLS: give --tls" in failed(exits.FAILED)
    assert "is not trusted" in failed(exits.NOT_ALLOWED, "--tls") and "--tls-root-ca-file" in failed(5, "--tls")
    without_certificate = failed(exits.UNREACHABLE, *mine[:2], "--auth-secret", SECRET)
    assert "certificate" in without_certificate or "closed the connection" in without_certificate
    assert "or --auth-secret-file for" in failed(exits.NOT_ALLOWED, *mine)
    assert "--auth-secret" in failed(exits.NOT_ALLOWED, *mine, "--auth-secret", "wrong")
    assert "go together" in failed(exits.USAGE, "--tls-cert", "x")
    assert "--tls-root-ca-file: /none" in failed(exits.USAGE, "--tls-root-ca-file", "/none")
    assert "not both" in failed(exits.USAGE, *mine, "--auth-secret", SECRET, "--auth-secret-file", "/none")
    other_topic = run(broker, "pub", "mail", "x", *mine, "--auth-secret", SECRET)
    assert other_topic.returncode == exits.NOT_ALLOWED and "E_UNAUTHORIZED" in other_topic.stderr


def test_a_broker_without_tls_is_said_to_have_none(tmp_path: Path) -> None:
    with Node(tmp_path, sync="none") as node:
        assert isinstance(node, Node)
        done = run(node, "pub", "orders", "x", "--tls")
        assert done.returncode == exits.NOT_ALLOWED and "has no TLS" in done.stderr, done.stderr
        done = run(node, "pub", "orders", "x", "--auth-secret", SECRET)
        assert done.returncode == exits.NOT_ALLOWED and "leave out --auth-secret" in done.stderr, done.stderr
