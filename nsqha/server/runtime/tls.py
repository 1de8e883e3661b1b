"""TLS from nsqd's flags, and nsqd's names for what was negotiated.

Certificates of test suites and of old installations (signed with SHA-1, keys of 1024 bits, TLS 1.0) work: with the
default --tls-min-version=tls1.0 the security level of OpenSSL is lowered, as without that neither the version nor such
a certificate is possible. From tls1.2 on OpenSSL's own security level stays, unless it refuses the operator's
certificate.

--tls-client-auth-policy=require asks for a certificate but does not verify it (require-verify does). Python's ssl
always verifies what it asks for, so the verification callback of the context is replaced below it, through ctypes;
where that is not possible the start fails with a ConfigError instead of checking less or more than configured.

Between nodes (--cluster-tls-cert, -key, -ca; all or none) TLS is stricter: with them the gRPC port, administration
included, and the peer port speak TLS 1.2 or later only and require a certificate of that CA from every peer. A node's
certificate carries in its subjectAltName

- the addresses that other nodes dial (DNS or IP): the connecting side checks them;
- the node's identity: `URI:nsqha:node/<node uid, 16 hex digits>`, or, where uids are not known before the first start,
  the DNS name that its metadata record has as broadcast address. If there is a URI, only the URI counts.

The certificate of a lookup daemon has its DNS name; the daemon may query, but acts for no node. That of an
administrator has `URI:nsqha:administrator`, and cannot append or promise an epoch. That of a reader
(`URI:nsqha:reader`) may read segments, which administrators and nodes may too, and nothing else. Any other certificate
of this CA, such as one with an IP address only, is refused everything. The CA is for this cluster only.
`nsqha.server.peers.api.PeerIdentity` compares identities, `nsqha.server.peers.identity` says what each may do,
`nsqha.server.runtime.certificates` notices files that are replaced.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import ssl
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from nsqha.errors import ConfigError
from nsqha.options import TLS_VERSIONS, VERIFIED, Options
from nsqha.server.runtime.rare_warnings import RefusalLog

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:DHE+AESGCM:ECDHE+AES:DHE+AES:AES:!aNULL:!eNULL:!MD5"
_WEAK = ("TOO_WEAK", "TOO_SMALL")
_VERIFY_PEER_OR_FAIL = 0x01 | 0x02  # SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT

_VerifyCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


_accept_any = _VerifyCallback(lambda _verified, _store: 1)


class ListenerTlsFlags(Protocol):
    """The options of the TCP and HTTPS listeners; `Options` and `LookupdOptions` have them."""

    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_min_version(self) -> str: ...
    @property
    def tls_client_auth_policy(self) -> str: ...
    @property
    def tls_root_ca_file(self) -> str: ...


def server_context(options: ListenerTlsFlags) -> ssl.SSLContext | None:
    """The context of the TCP and HTTPS listeners; None without a certificate. ConfigError names the unusable flag."""
    if not options.tls_cert:
        return None
    context = tells_peers(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    if TLS_VERSIONS[options.tls_min_version] < ssl.TLSVersion.TLSv1_2:
        _lower_security(context)
    _set_lowest_version(context, options)
    try:
        _load_certificate(context, options)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert={options.tls_cert} --tls-key={options.tls_key}: {_reason(error)}") from error
    if options.tls_client_auth_policy:
        if options.tls_root_ca_file:
            _load_roots(context, options.tls_root_ca_file)
        if options.tls_client_auth_policy == VERIFIED:
            context.verify_mode = ssl.CERT_REQUIRED
        else:
            _require_any_certificate(context)
    return context


def client_context(options: ListenerTlsFlags) -> ssl.SSLContext | None:
    """The context for https to an auth server; None means the system's certificates and defaults."""
    if not options.tls_root_ca_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _set_lowest_version(context, options)
    _load_roots(context, options.tls_root_ca_file)
    return context


def _set_lowest_version(context: ssl.SSLContext, options: ListenerTlsFlags) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of TLS 1.0; it is nsqd's default and the operator's choice
        context.minimum_version = ssl.TLSVersion(TLS_VERSIONS[options.tls_min_version])


def _lower_security(context: ssl.SSLContext) -> None:
    context.set_ciphers(f"{_CIPHERS}:@SECLEVEL=0")


def _load_certificate(context: ssl.SSLContext, options: ListenerTlsFlags) -> None:
    def no_password() -> str:
        return _encrypted("--tls-key", options.tls_key)

    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password=no_password)
    except ssl.SSLError as error:
        if not any(word in (error.reason or "") for word in _WEAK):
            raise
        _lower_security(context)
        context.load_cert_chain(options.tls_cert, options.tls_key, password=no_password)


def _load_roots(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-root-ca-file={path}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    if "PEM lib" in str(error):
        return "no certificate or no key in PEM format"
    return error.strerror or getattr(error, "reason", None) or str(error)


def _require_any_certificate(context: ssl.SSLContext) -> None:
    try:
        import _ssl

        library = ctypes.CDLL(_ssl.__file__)
        set_verify = library.SSL_CTX_set_verify
    except (ImportError, AttributeError, OSError, TypeError) as error:
        raise ConfigError(
            "--tls-client-auth-policy=require is not possible with this Python's ssl module; use require-verify"
        ) from error
    set_verify.argtypes = [ctypes.c_void_p, ctypes.c_int, _VerifyCallback]
    set_verify.restype = None
    # The first field of an SSLContext object is its SSL_CTX pointer.
    pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    set_verify(pointer, _VERIFY_PEER_OR_FAIL, _accept_any)
    if context.verify_mode != ssl.CERT_REQUIRED:
        raise ConfigError("--tls-client-auth-policy=require had no effect on this Python's ssl module")


# ---- between nodes

HTTP2_ALPN = "h2"


@dataclass(frozen=True, slots=True, repr=False)
class ClusterTls:
    """The PEM texts that gRPC takes. They are not shown in a repr: one is a private key."""

    certificate: bytes
    key: bytes
    ca: bytes


def cluster_tls(options: Options) -> ClusterTls | None:
    """The broker's files for TLS between nodes; None without the flags, ConfigError if they cannot be used."""
    if not options.cluster_tls_cert:
        return None
    return load_cluster_tls(options.cluster_tls_cert, options.cluster_tls_key, options.cluster_tls_ca)


def load_cluster_tls(cert: str, key: str, ca: str) -> ClusterTls:
    """Read the files. ConfigError names what does not work together; gRPC would only say "handshake failed"."""
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in contexts:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--cluster-tls-ca={ca}: {_reason(error)}") from None
        try:
            context.load_cert_chain(cert, key, password=lambda: _encrypted("--cluster-tls-key", key))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--cluster-tls-cert={cert} --cluster-tls-key={key}: {_reason(error)}") from None
    try:
        _shake_hands(*contexts)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or _reason(error)
        raise ConfigError(
            f"--cluster-tls-cert={cert} does not work with --cluster-tls-ca={ca}: {why} (a node is server and client)"
        ) from None
    found = ClusterTls(*(Path(path).read_bytes() for path in (cert, key, ca)))
    try:
        cluster_client_context(found)
    except (OSError, ValueError, ConfigError) as error:  # they were replaced meanwhile
        why = _reason(error) if isinstance(error, OSError) else error
        raise ConfigError(f"--cluster-tls-cert={cert} --cluster-tls-key={key} --cluster-tls-ca={ca}: {why}") from None
    return found


def cluster_client_context(tls: ClusterTls) -> ssl.SSLContext:
    """The context for streams to another node; its certificate must contain the address that is dialled."""
    context = _cluster_context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)
    context.set_alpn_protocols([HTTP2_ALPN])
    return context


def cluster_stream_context(tls: ClusterTls) -> ssl.SSLContext:
    """The context for streams from other nodes: they need a certificate of the cluster's CA."""
    context = _cluster_context(tells_peers(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)), tls)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([HTTP2_ALPN])
    return context


def cluster_reader_context(tls: ClusterTls) -> ssl.SSLContext:
    """The context for readers of segments over HTTPS: they need a certificate of the cluster's CA, too."""
    context = _cluster_context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    return context


def _cluster_context(context: ssl.SSLContext, tls: ClusterTls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with ExitStack() as files:
        cert, key, ca = (files.enter_context(_file(content)) for content in (tls.certificate, tls.key, tls.ca))
        context.load_verify_locations(cafile=ca)
        context.load_cert_chain(cert, key, password=lambda: _encrypted("--cluster-tls-key", "(as read)"))
    return context


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """The path of a file with `content`, as OpenSSL loads certificates from files only: in memory, else temporary."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("nsqha"), "wb", buffering=0) as file:
            file.write(content)
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        import tempfile

        with tempfile.NamedTemporaryFile(prefix="nsqha-", buffering=0) as file:
            file.write(content)
            yield file.name


def _encrypted(flag: str, path: str) -> str:
    # An encrypted key would make OpenSSL ask on the terminal; refuse instead.
    raise ConfigError(f"{flag}={path}: the key is encrypted; use a key file without a password")


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Connect the node to itself in memory. SSLError if either side refuses the other's certificate."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    waiting = set(ends)
    while waiting:
        for end in tuple(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.discard(end)


# ---- handshakes
#
# A peer that is refused gets the alert that says why, and so does the log.
#
#     with Handshake(address, sock, refused):
#         await loop.start_tls(..)            # or connect_accepted_socket, with a context that `tells_peers`
#
# OpenSSL makes an alert when a handshake fails. The event loops close the connection without sending it: the peer sees
# an end of file, and takes it for a network that is broken. So `_AlertFirst` lets the loop send it before the handshake
# ends. The peer answers by closing; one that does not is closed when it sends more, or after ALERT_SECONDS.
#
# Neither loop gives its caller the `ssl.SSLObject` of a handshake. Both begin it in a callback that they schedule while
# they are called, so one that is scheduled just before says which `Handshake` it is. (A context variable does not do:
# uvloop's start_tls begins it in the context of the connection.)


ALERT_SECONDS = 1.0


class Handshake:
    """The handshake that the next call of the loop begins."""

    def __init__(self, address: str, sock: socket.socket, refused: RefusalLog | None = None) -> None:
        """`sock`: of the connection. `refused` gets a handshake that fails; it is not a refusal if the peer only closes
        the connection."""
        self.error: ssl.SSLError | None = None
        self._sock = sock
        self._end: asyncio.TimerHandle | None = None
        self._address = address
        self._refused = refused

    def __enter__(self) -> Handshake:
        asyncio.get_running_loop().call_soon(self._begins)
        return self

    def _begins(self) -> None:
        global _next
        _next = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is not None:
            self._end.cancel()
        if self.error is None and isinstance(error, (ConnectionAbortedError, TimeoutError)):
            self._log("the peer did not complete the handshake in time")

    def failed(self, error: ssl.SSLError) -> None:
        self.error = error
        self._log(why(error))
        self._end = asyncio.get_running_loop().call_later(ALERT_SECONDS, self._read_no_more)

    def _read_no_more(self) -> None:
        """The peer had its alert, if it wants one. The loop sees an end of file, and ends the handshake."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._sock.fileno())) as sock:
            sock.shutdown(socket.SHUT_RD)

    def _log(self, text: str) -> None:
        if self._refused is not None:
            self._refused.refused(self._address, "%s: TLS handshake failed: %s", self._address, text)


_next: Handshake | None = None  # that of the handshake which the next callback begins


def _take_next() -> Handshake | None:
    global _next
    taken, _next = _next, None
    return taken


def tells_peers(context: ssl.SSLContext) -> ssl.SSLContext:
    """The context, with handshakes that send their alert."""
    context.sslobject_class = _AlertFirst
    return context


def why(error: OSError) -> str:
    """The reason of a handshake that failed, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error) or type(error).__name__


class _AlertFirst(ssl.SSLObject):
    """A handshake that asks for more from the peer when it has failed, once, so that the loop sends the alert."""

    _begun = False
    _handshake: Handshake | None = None
    _error: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._begun:
            self._begun, self._handshake = True, _take_next()
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._error, handshake = error, self._handshake
            if handshake is not None:
                handshake.failed(error)
            raise ssl.SSLWantReadError from None
        self._handshake = None


# ---- what was negotiated


@dataclass(frozen=True, slots=True)
class TlsInfo:
    """What was negotiated, as /stats shows it."""

    cipher_suite: str = ""
    version: str = ""
    negotiated_protocol: str = ""
    negotiated_protocol_is_mutual: bool = False


NO_TLS = TlsInfo()

_VERSIONS = {"TLSv1": "TLS1.0", "TLSv1.1": "TLS1.1", "TLSv1.2": "TLS1.2", "TLSv1.3": "TLS1.3"}
_KEY_EXCHANGES = (("ECDHE-ECDSA", "ECDHE_ECDSA"), ("ECDHE-RSA", "ECDHE_RSA"), ("DHE-RSA", "DHE_RSA"))


def describe(tls: ssl.SSLObject | ssl.SSLSocket | None) -> TlsInfo:
    """What the handshake negotiated; NO_TLS for a connection without TLS."""
    if tls is None:
        return NO_TLS
    cipher = tls.cipher()
    version = tls.version() or ""
    # Go's server always says mutual; the field is obsolete.
    return TlsInfo(
        cipher_suite(cipher[0]) if cipher else "",
        _VERSIONS.get(version, version),
        tls.selected_alpn_protocol() or "",
        True,
    )


def cipher_suite(openssl: str) -> str:
    """The IANA name of a suite: ECDHE-RSA-AES128-GCM-SHA256 -> TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256."""
    if openssl.startswith("TLS_"):
        return openssl
    exchange, rest = "RSA", openssl
    for name, standard in _KEY_EXCHANGES:
        if openssl.startswith(name + "-"):
            exchange, rest = standard, openssl[len(name) + 1 :]
    parts = rest.replace("AES128", "AES-128").replace("AES256", "AES-256").split("-")
    if "AES" in parts and not {"GCM", "CCM", "CCM8", "CBC"} & set(parts):
        parts.insert(2, "CBC")
    if parts[-1] == "POLY1305":
        parts.append("SHA256")
    return f"TLS_{exchange}_WITH_{'_'.join(parts)}"


def common_name(tls: ssl.SSLObject | ssl.SSLSocket | None) -> str:
    """The common name in the client's certificate, for the auth server; empty without one."""
    certificate: Any = tls.getpeercert() if tls is not None else None
    subject = certificate.get("subject", ()) if certificate else ()
    return next((value for names in subject for name, value in names if name == "commonName"), "")
