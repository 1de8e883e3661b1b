"""Channels of gRPC's client, with or without TLS and the cluster's secret; no other module creates channels.

A thread that waits for an answer sleeps until it comes. gRPC has it look up ten times a second, so that handlers of
signals run, which they do in Python 3 however long it waits; of an idle broker that was an eighth of its CPU.

With a secret the first call begins a session (`nsqha.cluster_secret`), and each carries a proof. A server that has
forgotten the session has carried nothing out: on a loop, where channels live long, a call is made once more.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import nsqha.grpc_env  # noqa: F401

# isort: split
import grpc
from grpc import _common, aio

from nsqha.cluster_secret import CHALLENGE_PATH, NOT_ASKED, STALE_KEY, CallProofs, ClusterSecret, new_nonce
from nsqha.errors import ConfigError, Unavailable

ChannelOptions = Sequence[tuple[str, int]]

CHALLENGE_SECONDS = 5.0
LOOK_SECONDS = 1.0  # of a thread that waits in gRPC
LISTEN_SECONDS = 0.5  # for what a server says first
NO_ROOM = "takes no more connections: it has as many as it may, or is stopping; idle ones end within seconds, try again"

# gRPC has no option for it. Where another version does not know the name, threads look as often as gRPC has them look.
_common.MAXIMUM_WAIT_TIMEOUT = LOOK_SECONDS


def credentials(*, ca: bytes | None, key: bytes | None, certificate: bytes | None) -> grpc.ChannelCredentials:
    """Credentials for a server with TLS, whose certificate must name the dialled address. PEM texts; no `ca`: gRPC's
    own ones; no `key` and `certificate`: no client certificate."""
    return grpc.ssl_channel_credentials(ca, key, certificate)


def channel(
    address: str,
    options: ChannelOptions,
    tls: grpc.ChannelCredentials | None,
    secret: ClusterSecret | None = None,
    token: str = "",
) -> grpc.Channel:
    """For threads; `tls` None: in clear. It connects when it is first used. With a secret a call raises Unavailable if
    the server and we do not share it. `token`: of the access file there."""
    if tls is None:
        made = grpc.insecure_channel(address, options=options)
    else:
        made = grpc.secure_channel(address, tls, options=options)
    if token:
        made = grpc.intercept_channel(made, _ShowingToken(token))
    return made if secret is None else grpc.intercept_channel(made, _Proving(made, address, secret))


def aio_channel(
    address: str, options: ChannelOptions, tls: grpc.ChannelCredentials | None, secret: ClusterSecret | None = None
) -> aio.Channel:
    """The same for a loop."""
    session = None if secret is None else _LoopSession(address, secret)
    interceptors: list[Any] = [] if session is None else [_ProvingCall(session), _ProvingAnswers(session)]
    if tls is None:
        made = aio.insecure_channel(address, options=options, interceptors=interceptors)
    else:
        made = aio.secure_channel(address, tls, options=options, interceptors=interceptors)
    if session is not None:
        session.ask = made.unary_unary(CHALLENGE_PATH)
    return made


def has_room(address: str) -> bool:
    """Whether a server keeps a connection that says nothing. One that has as many as it may closes a new one at once,
    and gRPC's error is the same as that of a server that wants TLS and hears none; that one waits."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), LISTEN_SECONDS) as connection:
            return bool(connection.recv(1))
    except TimeoutError:
        return True
    except (OSError, ValueError):
        return False


def _not_shared(address: str, error: Exception) -> Unavailable:
    """Why no session has begun. Nothing was carried out."""
    if isinstance(error, grpc.RpcError):
        code, text = error.code(), error.details()
        why = NOT_ASKED if code is grpc.StatusCode.UNIMPLEMENTED else text or code.name
    else:
        why = str(error)
    return Unavailable(f"{address}: {why}")


def _is_stale(code: Any, trailers: Any) -> bool:
    return code is grpc.StatusCode.UNAUTHENTICATED and any(key == STALE_KEY for key, _ in trailers or ())


def _with(details: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
    """The same call with more metadata."""
    return details._replace(metadata=aio.Metadata(*(details.metadata or ()), *metadata))


# ---- for threads


class _Details(grpc.ClientCallDetails):  # type: ignore[misc]  # untyped
    """A call as an interceptor hands it on."""

    def __init__(self, details: Any, metadata: Iterable[tuple[str, str]]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = [*(details.metadata or ()), *metadata]
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _ShowingToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]  # untyped
    """Adds a token to the calls of one channel."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(_Details(details, self._metadata), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(_Details(details, self._metadata), request)


class _Proving(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]  # untyped
    """Adds proofs to the calls of one channel."""

    def __init__(self, made: grpc.Channel, address: str, secret: ClusterSecret) -> None:
        self._ask = made.unary_unary(CHALLENGE_PATH)
        self._address = address
        self._secret = secret
        self._proofs: CallProofs | None = None
        self._lock = threading.Lock()

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(_Details(details, self._session(details).metadata(details.method)), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(_Details(details, self._session(details).metadata(details.method)), request)

    def _session(self, details: Any) -> CallProofs:
        with self._lock:
            if self._proofs is None:
                nonce = new_nonce()
                try:
                    answer = self._ask(nonce, timeout=details.timeout or CHALLENGE_SECONDS)
                    self._proofs = CallProofs(self._secret, nonce, answer)
                except (grpc.RpcError, ConfigError) as error:
                    raise _not_shared(self._address, error) from None
            return self._proofs


# ---- for a loop


class _LoopSession:
    """The session of one channel; whoever calls first begins it for all."""

    ask: Any  # the call that begins a session, of the channel that this is for

    def __init__(self, address: str, secret: ClusterSecret) -> None:
        self._address = address
        self._secret = secret
        self._proofs: CallProofs | None = None
        self._lock = asyncio.Lock()

    async def proofs(self, timeout: float | None, after: CallProofs | None = None) -> CallProofs:
        async with self._lock:
            if self._proofs is None or self._proofs is after:
                nonce = new_nonce()
                try:
                    answer = await self.ask(nonce, timeout=timeout or CHALLENGE_SECONDS)
                    self._proofs = CallProofs(self._secret, nonce, answer)
                except (aio.AioRpcError, ConfigError) as error:
                    raise _not_shared(self._address, error) from None
            return self._proofs


def _is_challenge(details: Any) -> bool:
    method = details.method
    return (method.decode() if isinstance(method, bytes) else method) == CHALLENGE_PATH


def _proved(details: Any, proofs: CallProofs) -> Any:
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    return _with(details, proofs.metadata(method))


class _ProvingCall(aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]  # untyped
    """Adds proofs to calls with one answer."""

    def __init__(self, session: _LoopSession) -> None:
        self._session = session

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        if _is_challenge(details):
            return await continuation(details, request)
        proofs = await self._session.proofs(details.timeout)
        call = await continuation(_proved(details, proofs), request)
        if _is_stale(await call.code(), await call.trailing_metadata()):
            proofs = await self._session.proofs(details.timeout, after=proofs)
            call = await continuation(_proved(details, proofs), request)
        return call


class _ProvingAnswers(aio.UnaryStreamClientInterceptor):  # type: ignore[misc]  # untyped
    """The same for calls with several answers."""

    def __init__(self, session: _LoopSession) -> None:
        self._session = session

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        proofs = await self._session.proofs(details.timeout)
        return await continuation(_proved(details, proofs), request)
