"""The HTTPS and metrics listeners of the real lookup daemon: roles, audit, and a certificate that is replaced."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nsqha.access.roles import Role
from nsqha.access.tokens import entry
from tests.certificates import Certificates
from tests.integration.servers import CannotStart, Lookupd, free_port, wait_until

TOKENS = {Role.VIEWER: "token-of-a-viewer", Role.OPERATOR: "token-of-an-operator"}


@dataclass
class LookupdOverTls:
    lookupd: Lookupd
    made: Certificates
    shown: Path  # the folder with what the daemon shows
    https: str
    metrics: str

    def show(self, name: str, *, key: str = "") -> None:
        """Replace the files as docs/operate.md says: written beside, renamed, key first."""
        for source, target in ((self.made.key(key or name), "c.key"), (self.made.cert(name), "c.crt")):
            shutil.copy(source, self.shown / "new")
            (self.shown / "new").rename(self.shown / target)

    def ask(self, target: str, role: Role | None = None, *, method: str = "GET") -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=self.made.cert("ca"))
        return _ask(http.client.HTTPSConnection(self.https, timeout=20, context=context), method, target, role)

    def monitor(self, target: str, role: Role | None = None) -> tuple[int, bytes]:
        return _ask(http.client.HTTPConnection(self.metrics, timeout=20), "GET", target, role)

    def certificate(self) -> str:
        """What a client that connects now is shown."""
        host, _, port = self.https.rpartition(":")
        return ssl.get_server_certificate((host, int(port)), timeout=20)

    def pem(self, name: str) -> str:
        der = ssl.PEM_cert_to_DER_cert(Path(self.made.cert(name)).read_text())
        return ssl.DER_cert_to_PEM_cert(der)


def _ask(connection: http.client.HTTPConnection, method: str, target: str, role: Role | None) -> tuple[int, bytes]:
    try:
        connection.request(method, target, headers={"Authorization": f"Bearer {TOKENS[role]}"} if role else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LookupdOverTls]:
    made, shown, access = Certificates(tmp_path), tmp_path / "shown", tmp_path / "access.toml"
    shown.mkdir()
    for name in ("first", "second"):
        made.issue(name, "IP:127.0.0.1")
    access.write_text("".join(entry(role.value, TOKENS[role], [role]) for role in TOKENS))
    access.chmod(0o600)
    https, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = [f"--https-address={https}", f"--tls-cert={shown / 'c.crt'}", f"--tls-key={shown / 'c.key'}",
             f"--metrics-address={metrics}", f"--access-file={access}", "--log-format=json"]  # fmt: skip
    found = LookupdOverTls(Lookupd(tmp_path / "lookupd", flags), made, shown, https, metrics)
    found.show("first")
    found.lookupd.spawn()
    try:
        wait_until(lambda: '"address":"metrics"' in found.lookupd.log(), "it listens", 60)
        yield found
    finally:
        status = found.lookupd.stop()
    assert status == 0


def test_https_has_the_routes_the_roles_and_the_audit_of_http(rig: LookupdOverTls) -> None:
    assert rig.ask("/ping") == (200, b"OK")
    assert rig.ask("/topics")[0] == 401
    assert rig.ask("/topic/create?topic=t", Role.VIEWER, method="POST")[0] == 403
    assert rig.ask("/topic/create?topic=t", Role.OPERATOR, method="POST")[0] == 200
    assert json.loads(rig.ask("/topics", Role.VIEWER)[1]) == {"topics": ["t"]}
    records = [json.loads(line) for line in rig.lookupd.log().splitlines() if '"admin_action"' in line]
    told = [(r["surface"], r["who"], r["method"], r["target"], r["outcome"]) for r in records]
    action = "POST /topic/create", "topic=t"
    assert told == [
        ("lookupd https", "viewer", *action, "refused: FORBIDDEN"),
        ("lookupd https", "operator", *action, "done"),
    ]


@pytest.mark.filterwarnings("ignore:.*TLSv1.* is deprecated:DeprecationWarning")
def test_https_is_tls_1_2_or_later(rig: LookupdOverTls) -> None:
    context = ssl.create_default_context(cafile=rig.made.cert("ca"))
    context.set_ciphers("ALL:@SECLEVEL=0")  # the client would speak 1.1
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2
    assert _ask(http.client.HTTPSConnection(rig.https, timeout=20, context=context), "GET", "/ping", None)[0] == 200
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _ask(http.client.HTTPSConnection(rig.https, timeout=20, context=context), "GET", "/ping", None)


def test_the_listener_for_monitors_has_its_roles(rig: LookupdOverTls) -> None:
    assert rig.monitor("/healthz") == (200, b"OK")
    assert rig.monitor("/metrics")[0] == 401
    status, body = rig.monitor("/metrics", Role.VIEWER)
    assert status == 200
    assert f'nsqha_certificate_expiry_timestamp_seconds{{path="{rig.shown}/c.crt"}}'.encode() in body
    assert rig.monitor("/nodes", Role.VIEWER)[0] == 404


def test_a_replaced_certificate_is_shown_and_an_unusable_one_is_not_taken(rig: LookupdOverTls) -> None:
    assert rig.certificate() == rig.pem("first")
    rig.show("second")
    wait_until(lambda: rig.certificate() == rig.pem("second"), "the new certificate is shown")
    rig.show("first", key="second")
    wait_until(lambda: "certificates_unusable" in rig.lookupd.log(), "the log says that key and certificate differ")
    assert rig.certificate() == rig.pem("second")
    assert rig.ask("/ping") == (200, b"OK")


def test_a_certificate_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    flags = ["--https-address=127.0.0.1:0", f"--tls-cert={tmp_path}/no.crt", f"--tls-key={tmp_path}/no.key"]
    with pytest.raises(CannotStart, match=r"failed to start nsqlookupd - --tls-cert=.*: No such file or directory"):
        Lookupd(tmp_path / "lookupd", flags).start()
