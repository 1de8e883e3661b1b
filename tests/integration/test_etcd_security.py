"""TLS in both directions and a login against a real etcd; its password is nowhere to be read."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd import EtcdStore
from nsqha.election.etcd_bridge import rpc
from nsqha.election.etcd_client import EtcdClient, EtcdOptions
from nsqha.election.model import NodeInfo, TopicSettings
from nsqha.errors import ConfigError, Unavailable
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
    """ca, server and client, each .crt and .key; stranger.crt is a CA that signed nothing."""
    made = Certificates(tmp_path_factory.mktemp("certificates"), "stranger")
    for name in ("server", "client"):
        made.issue(name, "IP:127.0.0.1", "DNS:localhost")
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
    session = store.open_session(ttl_s=5, lost=lambda: None)
    session.register(NodeInfo(7))
    eventually(lambda: 7 in store.view().nodes)
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
    with pytest.raises(ConfigError, match="can not be read"):
        store_on(EtcdOptions((tls_etcd.endpoint,), ca=str(certificates / "missing.crt")))


# Login, without TLS


@pytest.fixture(scope="module")
def guarded_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Users root (all) and nsqha (/nsqha/ only), both with PASSWORD."""
    extra = ("--auth-token", "simple", "--auth-token-ttl", str(TOKEN_TTL_S))
    with EtcdServer.running(tmp_path_factory.mktemp("guarded"), *extra) as server:
        guard(EtcdOptions((server.endpoint,)), PASSWORD)
        yield server


def test_a_login_is_renewed_when_its_token_has_expired(guarded_etcd: EtcdServer) -> None:
    trouble: list[str] = []
    store = store_on(EtcdOptions((guarded_etcd.endpoint,), user="nsqha", password=PASSWORD), trouble)
    session = store.open_session(ttl_s=5, lost=lambda: None)
    session.register(NodeInfo(7))
    token = store._client._token
    assert token
    threading.Event().wait(2 * TOKEN_TTL_S)  # nothing asks, so etcd forgets the token
    store.create_topic("orders", TopicSettings())
    assert store._client._token != token
    threading.Event().wait(2 * TOKEN_TTL_S)
    store._watch.reconnect()
    store.create_topic("later", TopicSettings())
    eventually(lambda: {"orders", "later"} <= store.view().topics.keys())
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
