"""TLS in both directions and a login against a real etcd; its password is nowhere to be read."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd.bridge import rpc
from nsqha.election.etcd.client import EtcdClient, EtcdOptions
from nsqha.election.etcd.store import EtcdStore
from nsqha.election.model import NodeInfo, TopicSettings
from nsqha.errors import ConfigError, OutcomeUnknown, Unavailable
from tests.certificates import Certificates
from tests.etcd_server import EtcdServer, eventually
from tests.integration.etcd_rig import guard

PASSWORD = "correct-horse"
TOKEN_TTL_S = 2


def store_on(options: EtcdOptions, trouble: list[str] | None = None) -> EtcdStore:
    lines = [] if trouble is None else trouble
    return EtcdStore(options, "test", SystemClock(), random.Random(), trouble=lines.append)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server, client and newer, each .crt and .key; `outsider` is one of the CA `stranger`."""
    made = Certificates(tmp_path_factory.mktemp("certificates"), "stranger")
    for name in ("server", "client", "newer"):
        made.issue(name, "IP:127.0.0.1", "DNS:localhost")
    made.issue("outsider", "IP:127.0.0.1", ca="stranger")
    return made.folder


@pytest.fixture(scope="module")
def tls_etcd(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[EtcdServer]:
    files = ("--cert-file", "server.crt", "--key-file", "server.key", "--trusted-ca-file", "ca.crt")
    extra = [part if part.startswith("--") else str(certificates / part) for part in files]
    with EtcdServer.running(tmp_path_factory.mktemp("tls"), *extra, "--client-cert-auth", scheme="https") as server:
        yield server


@pytest.mark.parametrize("scheme", ["", "https://"])
def test_tls_with_a_client_certificate(tls_etcd: EtcdServer, certificates: Path, scheme: str) -> None:
    options = EtcdOptions(
        (scheme + tls_etcd.endpoint,),
        ca=str(certificates / "ca.crt"),
        cert=str(certificates / "client.crt"),
        key=str(certificates / "client.key"),
    )
    store = store_on(options)
    session = store.sessions.open(ttl_s=5, lost=lambda: None)
    session.register(NodeInfo(7))
    eventually(lambda: 7 in store.watch.view().nodes)
    store.close()


def test_without_the_right_certificates_there_is_no_connection(tls_etcd: EtcdServer, certificates: Path) -> None:
    cert, key = str(certificates / "client.crt"), str(certificates / "client.key")
    for wrong in (
        EtcdOptions((tls_etcd.endpoint,), ca=str(certificates / "stranger.crt"), cert=cert, key=key),
        EtcdOptions((tls_etcd.endpoint,), ca=str(certificates / "ca.crt")),
        EtcdOptions((tls_etcd.endpoint,)),
    ):
        with pytest.raises(Unavailable):
            store_on(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        store_on(EtcdOptions((tls_etcd.endpoint,), ca=str(certificates / "missing.crt")))


class Replaced:
    """The certificate files of one client."""

    def __init__(self, folder: Path, made: Path) -> None:
        self._folder, self._made = folder, made
        self.use("ca", "client")

    def use(self, ca: str, mine: str) -> None:
        self.write("ca.crt", (self._made / f"{ca}.crt").read_bytes())
        for kind in ("crt", "key"):
            self.write(f"mine.{kind}", (self._made / f"{mine}.{kind}").read_bytes())

    def write(self, file: str, data: bytes) -> None:
        (self._folder / file).write_bytes(data)

    def options(self, endpoint: str) -> EtcdOptions:
        ca, cert, key = (str(self._folder / file) for file in ("ca.crt", "mine.crt", "mine.key"))
        return EtcdOptions((endpoint,), ca, cert, key)


@pytest.fixture
def replaced(tmp_path: Path, certificates: Path) -> Replaced:
    return Replaced(tmp_path, certificates)


@pytest.mark.parametrize("wrong", [("stranger", "client"), ("ca", "outsider")])
def test_certificates_that_were_replaced_are_used_when_a_connection_fails(
    tls_etcd: EtcdServer, replaced: Replaced, wrong: tuple[str, str]
) -> None:
    """As after an old certificate has expired."""
    replaced.use(*wrong)
    client = EtcdClient(replaced.options(tls_etcd.endpoint))
    with pytest.raises(Unavailable):
        client.confirm(b"/test")
    replaced.use("ca", "newer")
    client.confirm(b"/test")
    client.close()


def test_a_store_takes_new_certificates_and_keeps_old_ones_while_they_are_broken(
    tls_etcd: EtcdServer, replaced: Replaced
) -> None:
    trouble: list[str] = []
    store = store_on(replaced.options(tls_etcd.endpoint), trouble)
    topics = iter(range(100))

    def works() -> bool:
        """Calls and the watch."""
        name = f"t{next(topics)}"
        try:
            store.records.create_topic(name, TopicSettings())
        except (Unavailable, OutcomeUnknown):
            return False
        eventually(lambda: name in store.watch.view().topics)
        return True

    assert works()
    replaced.write("mine.key", b"half a key")
    tls_etcd.kill()
    with pytest.raises(Unavailable, match=r"mine\.key for the connection to etcd cannot be used"):
        store.records.topics()
    tls_etcd.start()
    eventually(works)
    replaced.use("ca", "newer")
    tls_etcd.kill()
    tls_etcd.start()
    eventually(works)
    assert store._client._pems is not None and store._client._pems[2] == (replaced._made / "newer.crt").read_bytes()
    store.close()


def test_certificates_that_can_not_be_used_are_refused_at_the_start(replaced: Replaced) -> None:
    replaced.write("mine.key", b"half a key")
    with pytest.raises(ConfigError, match=r"mine\.key for the connection to etcd cannot be used"):
        EtcdClient(replaced.options("127.0.0.1:1"))


# Login, without TLS


@pytest.fixture(scope="module")
def guarded_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Users root (all) and nsqha (/nsqha/ only), both with PASSWORD."""
    extra = ("--auth-token", "simple", "--auth-token-ttl", str(TOKEN_TTL_S))
    with EtcdServer.running(tmp_path_factory.mktemp("guarded"), *extra) as server:
        guard(EtcdOptions((server.endpoint,)), PASSWORD)
        yield server


def test_a_login_is_renewed_when_its_token_has_expired(
    guarded_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call in one store; in the other by the watch, which finds nobody logged in when it begins again. It makes a
    call first, which would do that for it: here that one has nothing to ask."""
    trouble: list[str] = []
    options = EtcdOptions((guarded_etcd.endpoint,), user="nsqha", password=PASSWORD)
    calling, watching = store_on(options, trouble), store_on(options, trouble)
    session = calling.sessions.open(ttl_s=5, lost=lambda: None)
    session.register(NodeInfo(7))
    eventually(lambda: 7 in watching.watch.view().nodes)
    tokens = [store._client._token.text for store in (calling, watching)]
    assert all(tokens)
    threading.Event().wait(2 * TOKEN_TTL_S)  # nothing asks, so etcd forgets the tokens
    monkeypatch.setattr(watching._client, "confirm", lambda key: None)
    watching._thread.reconnect()
    calling.records.create_topic("orders", TopicSettings())
    assert calling._client._token.text != tokens[0]
    eventually(lambda: "orders" in watching.watch.view().topics)
    assert watching._client._token.text != tokens[1]
    for store in (calling, watching):
        eventually(lambda store=store: "orders" in store.watch.view().topics)
        assert PASSWORD not in repr(store._client.options) + "".join(trouble)
        store.close()


def test_a_wrong_password_and_no_password_are_told_apart_from_trouble(guarded_etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="refuses user nsqha") as refused:
        store_on(EtcdOptions((guarded_etcd.endpoint,), user="nsqha", password="wrong-horse"))
    assert "wrong-horse" not in str(refused.value)
    with pytest.raises(ConfigError, match="etcd refuses this user"):
        store_on(EtcdOptions((guarded_etcd.endpoint,)))


def test_keys_outside_of_the_permission_are_refused(guarded_etcd: EtcdServer) -> None:
    client = EtcdClient(EtcdOptions((guarded_etcd.endpoint,), user="nsqha", password=PASSWORD))
    with pytest.raises(ConfigError, match="permission denied"):
        client.change(lambda stubs: stubs.kv.Put, rpc.PutRequest(key=b"/other", value=b""))
    client.close()
