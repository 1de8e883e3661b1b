"""TLS contexts from flags: what is accepted, what is refused, what is reported."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from nsqha.errors import ConfigError
from nsqha.options import Options
from nsqha.server.runtime import tls

# The client of these tests speaks old versions on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")

Make = Callable[..., tuple[str, str]]


def options(certificate: tuple[str, str], **fields: Any) -> Options:
    return Options(tls_cert=certificate[0], tls_key=certificate[1], **fields)


def meet(
    context: ssl.SSLContext, certificate: tuple[str, str] | None = None, **client: Any
) -> tuple[tls.TlsInfo, str] | None:
    """What the server sees of a client; None if it refuses it."""
    seen = []

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = writer.get_extra_info("ssl_object")
        seen.append((tls.describe(session), tls.common_name(session)))
        writer.write(b"x")
        writer.close()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # refused handshakes are expected here
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        mine = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        mine.check_hostname = False
        mine.verify_mode = ssl.CERT_NONE
        mine.set_ciphers("DEFAULT:@SECLEVEL=0")
        mine.minimum_version = ssl.TLSVersion.TLSv1
        mine.maximum_version = client.get("maximum_version", ssl.TLSVersion.TLSv1_3)
        if certificate is not None:
            mine.load_cert_chain(*certificate)
        try:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=mine)
            await reader.read(1)
            writer.close()
        except OSError:
            pass
        server.close()

    asyncio.run(run())
    return seen[0] if seen else None


def test_without_a_certificate_there_is_no_context() -> None:
    assert tls.server_context(Options()) is None
    assert tls.client_context(Options()) is None


def test_a_session_is_described_in_go_s_words(certificate: tuple[str, str]) -> None:
    context = tls.server_context(options(certificate))
    assert context is not None
    newest = meet(context)
    assert newest is not None
    assert newest[0].version == "TLS1.3"
    assert newest[0].cipher_suite.startswith("TLS_AES_")
    assert newest[1] == ""
    old = meet(context, maximum_version=ssl.TLSVersion.TLSv1_2)
    assert old is not None
    assert old[0].version == "TLS1.2"
    assert old[0].cipher_suite.startswith("TLS_ECDHE_RSA_WITH_AES_")
    assert tls.describe(None) == tls.NO_TLS
    assert tls.common_name(None) == ""


@pytest.mark.parametrize(
    ("openssl", "standard"),
    [
        ("TLS_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"),
        ("ECDHE-RSA-AES128-GCM-SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
        ("ECDHE-ECDSA-AES256-SHA384", "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA384"),
        ("ECDHE-RSA-AES128-SHA", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"),
        ("ECDHE-RSA-CHACHA20-POLY1305", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"),
        ("AES128-SHA", "TLS_RSA_WITH_AES_128_CBC_SHA"),
        ("AES256-GCM-SHA384", "TLS_RSA_WITH_AES_256_GCM_SHA384"),
    ],
)
def test_names_of_cipher_suites(openssl: str, standard: str) -> None:
    assert tls.cipher_suite(openssl) == standard


def test_the_lowest_version_is_a_flag(certificate: tuple[str, str]) -> None:
    default = tls.server_context(options(certificate))
    modern = tls.server_context(options(certificate, tls_min_version="tls1.2"))
    assert default is not None
    assert modern is not None
    found = meet(default, maximum_version=ssl.TLSVersion.TLSv1)
    assert found is not None
    assert found[0].version == "TLS1.0"
    assert meet(modern, maximum_version=ssl.TLSVersion.TLSv1_1) is None
    assert meet(modern, maximum_version=ssl.TLSVersion.TLSv1_2) is not None


@pytest.mark.parametrize("version", ["tls1.0", "tls1.2", "tls1.3"])
def test_weak_old_certificates_load(make_certificate: Make, version: str) -> None:
    old = make_certificate("old", "-newkey", "rsa:1024", "-sha1")
    context = tls.server_context(options(old, tls_min_version=version))
    assert context is not None
    assert meet(context) is not None


def test_require_takes_any_certificate_but_not_none(certificate: tuple[str, str], make_certificate: Make) -> None:
    context = tls.server_context(options(certificate, tls_client_auth_policy="require"))
    assert context is not None
    assert meet(context) is None
    found = meet(context, make_certificate("joe"))
    assert found is not None
    assert found[1] == "joe"


def test_require_verify_takes_certificates_of_the_authority_only(
    certificate: tuple[str, str], make_certificate: Make
) -> None:
    joe, eve = make_certificate("joe"), make_certificate("eve")
    context = tls.server_context(options(certificate, tls_client_auth_policy="require-verify", tls_root_ca_file=joe[0]))
    assert context is not None
    assert meet(context) is None
    assert meet(context, eve) is None
    found = meet(context, joe)
    assert found is not None
    assert found[1] == "joe"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tls_cert": "/nowhere.crt"}, "--tls-cert=/nowhere.crt"),
        ({"tls_key": "/nowhere.key"}, "--tls-key=/nowhere.key"),
        ({"tls_client_auth_policy": "require-verify", "tls_root_ca_file": "/nowhere.ca"}, "--tls-root-ca-file"),
    ],
)
def test_a_file_that_does_not_work_is_named(certificate: tuple[str, str], fields: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tls.server_context(Options(**({"tls_cert": certificate[0], "tls_key": certificate[1]} | fields)))


def test_a_file_that_is_no_certificate_is_named(certificate: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^--tls-cert=\S* --tls-key=\S*: no certificate or no key in PEM format$"):
        tls.server_context(Options(tls_cert=__file__, tls_key=certificate[1]))
    with pytest.raises(ConfigError, match="--tls-root-ca-file"):
        tls.client_context(Options(tls_root_ca_file=__file__))


def test_an_encrypted_key_does_not_ask_on_the_terminal(make_certificate: Make) -> None:
    cert, key = make_certificate("locked")
    from subprocess import run

    run(["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", key, "-out", key + ".locked"], check=True)
    with pytest.raises(ConfigError, match="encrypted"):
        tls.server_context(Options(tls_cert=cert, tls_key=key + ".locked"))
