"""Streams and calls between nodes over gRPC (HTTP/2), on the loop of the process.

What grpc.aio leaves open is decided here:

- Streams are gRPC on the wire, and both their ends are ours (`nsqha.server.peers.http2_stream`); calls are grpc.aio's.
- A call is first given a connection and only then sent. What fails before is `Unavailable`; afterwards it is
  `OutcomeUnknown`, unless the other side itself said what happened: it names our error in a trailer (`nsqha-error`), so
  that gRPC's own UNAVAILABLE is never taken for an answer.
- A dead address is refused at once, never waited for (`wait_for_ready` is off); it is tried again 0.1 to 1 s later, for
  calls by gRPC and for streams by `nsqha.server.peers.dialling`. A host that went silent is noticed by pings after
  KEEPALIVE_SECONDS + PING_TIMEOUT_SECONDS; that is the backstop of deadlines, acks and leases, which notice earlier.
- A connection for calls is closed when it had none for IDLE_MS, as a port has a bounded number of them, which strangers
  could fill. What became of a call that meets that end may be unknown, so a node closes such a connection first
  (UNUSED_SECONDS). Other clients connect again with their next call; what was not seen is sent again by gRPC.
- Each `GrpcPeers` has connections of its own, and each stream has one: catch-up and forwarding use other ones than live
  replication does.
- With TLS both ports want a certificate of the cluster's CA, and the methods here want one that names a node
  (`nsqha.server.runtime.tls`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from nsqha import grpc_channels

# isort: split
import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import aio

from nsqha.cluster_secret import (
    CHALLENGE_PATH,
    NUMBER_KEY,
    PROOF_KEY,
    SESSION_KEY,
    STALE_KEY,
    CallSessions,
    ClusterSecret,
    read_secret,
)
from nsqha.errors import NsqhaError, OutcomeUnknown, Unavailable
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.pb.v1 import replication_pb2, routing_pb2
from nsqha.server.peers.api import (
    ERROR_TRAILER,
    KEEPALIVE_SECONDS,
    MESSAGE_BYTES_MAX,
    PERMISSION_DENIED,
    PING_TIMEOUT_SECONDS,
    UNAUTHENTICATED,
    UNIMPLEMENTED,
    Accept,
    Answer,
    CallRefused,
    Message,
    Method,
    PeerIdentity,
    PeerStream,
    StreamHandler,
    error_of,
    kind_and_text,
    methods_of,
    one_line,
    status_of,
)
from nsqha.server.peers.client_stream import ClientStream
from nsqha.server.peers.dialling import Failures
from nsqha.server.peers.http2_stream import Http2Stream
from nsqha.server.peers.server_stream import ServerStream
from nsqha.server.peers.stream import too_large
from nsqha.server.runtime import listen
from nsqha.server.runtime.budget import SharedTurns
from nsqha.server.runtime.rare_warnings import RareWarnings
from nsqha.server.runtime.tasks import TaskGroup
from nsqha.server.runtime.tls import ClusterTls, cluster_client_context, cluster_tls

UNUSED_SECONDS = 10.0  # that a channel for calls is kept for: nodes ask each other every 5 s; well below IDLE_MS
UNNAMED_MAX = 64  # connections for streams that have named no method; the one that waits longest goes first
SILENT_MAX = 256  # streams that have named a method and said nothing yet; the one that waits longest goes first
SILENT_OF_ADDRESS_MAX = 64  # of these, from one host
HANDSHAKE_SECONDS = 10  # until a connection for calls has said that it speaks HTTP/2
IDLE_MS = 20_000  # without a call, until a connection for calls is closed: its place is for others
STOPPING = "this node is stopping"
SERVICES = (
    replication_pb2.DESCRIPTOR.services_by_name["Replication"],
    routing_pb2.DESCRIPTOR.services_by_name["Routing"],
)
"""What nodes serve each other."""

logger = Logger("peers")

_PINGS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),  # without it the line above does nothing
    ("grpc.http2.max_pings_without_data", 0),
)
_CONNECTING = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also how long a connection may take to come about
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # else two GrpcPeers would share connections
    # gRPC's transparent retries stay on: a call that meets the end of an idle connection is sent again if the server
    # says that it has not seen it. Others would need a service config, which is not looked for: nothing is done twice.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),  # an http_proxy of the environment is not for traffic between nodes
)
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def server_options(message_bytes: int = 0) -> list[tuple[str, int]]:
    """Options of a grpc.aio server that other nodes call; `message_bytes`: less than they may send."""
    return [
        ("grpc.so_reuseport", 0),
        *_sizes(message_bytes or MESSAGE_BYTES_MAX),
        *_PINGS,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ("grpc.max_allowed_incoming_connections", listen.connections_max()),
        ("grpc.max_connection_idle_ms", IDLE_MS),
    ]


def channel_credentials(tls: ClusterTls) -> grpc.ChannelCredentials:
    """For connections to a port with TLS; the server's certificate must name the address that is dialled."""
    return grpc_channels.credentials(ca=tls.ca, key=tls.key, certificate=tls.certificate)


def client_options() -> list[tuple[str, int]]:
    """Options of a connection to such a server."""
    return [*_sizes(MESSAGE_BYTES_MAX), *_PINGS, *_CONNECTING]


def _sizes(message_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_send_message_length", message_bytes), ("grpc.max_receive_message_length", message_bytes)]


# ---- the side that calls


class CallChannel:
    """The channel for calls to one address. It connects when it is first used, and again when that is lost."""

    def __init__(self, channel: aio.Channel) -> None:
        self.grpc = channel
        self.users = 0  # calls
        self.left_at = 0.0  # by the last of them
        self._callables: dict[str, Any] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a call is made."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self.left_at = asyncio.get_running_loop().time()

    def method(self, method: Method) -> Any:
        found = self._callables.get(method.name)
        if found is None:
            found = self._callables[method.name] = self.grpc.unary_unary(method.path)
        return found


def take_unused(channels: dict[str, CallChannel]) -> list[aio.Channel]:
    """Take out those whose connection the other side may be about to close; nodes come back at other addresses, too."""
    now = asyncio.get_running_loop().time()
    unused = [at for at, each in channels.items() if not each.users and now - each.left_at >= UNUSED_SECONDS]
    return [channels.pop(address).grpc for address in unused]


async def connected(channel: aio.Channel, deadline: float) -> bool:
    """Whether there is a connection before `deadline` (of the loop's clock) and before it is refused."""
    loop = asyncio.get_running_loop()
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        try:
            await asyncio.wait_for(channel.wait_for_state_change(state), deadline - loop.time())
        except (TimeoutError, aio.UsageError):
            return False
    return True


class GrpcPeers:
    """The other nodes, over connections of its own. Made and used on one loop."""

    def __init__(
        self,
        services: Iterable[ServiceDescriptor],
        *,
        tls: ClusterTls | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        self._methods = methods_of(services)
        self._secret = secret
        self._credentials = channel_credentials(tls) if tls else None
        self._context = cluster_client_context(tls) if tls else None
        self._options = client_options()
        self._channels: dict[str, CallChannel] = {}
        self._streams: set[Http2Stream] = set()
        self._failures = Failures()  # of their connections
        self._ending = TaskGroup()  # connections that are being closed
        self._closed = False

    def stream(self, address: str, method: str, handler: StreamHandler) -> PeerStream:
        chosen = self._method(method, streaming=True)
        self._check_open()
        stream = ClientStream(address, chosen, handler, self._context, self._failures, self._secret).stream
        self._streams.add(stream)
        stream.messages.over.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    async def call(self, address: str, method: str, request: Message, *, timeout: float) -> Message:
        chosen = self._method(method, streaming=False)
        data = chosen.encoded(request, chosen.request)
        if why := too_large(len(data)):
            raise ValueError(f"{method} to {address}: {why}")
        channel = self._channel_to(address)
        with channel.in_use():
            answer = await self._answer(channel, chosen, data, f"{method} to {address}", timeout)
        try:
            return chosen.reply.FromString(answer)
        except DecodeError:
            raise OutcomeUnknown(f"{method} to {address}: the answer is not a {chosen.reply.__name__}") from None

    async def _answer(self, channel: CallChannel, method: Method, data: bytes, what: str, timeout: float) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        if not await connected(channel.grpc, deadline):
            raise Unavailable(f"{what}: no connection; nothing was sent")
        call = channel.method(method)(data, timeout=max(deadline - loop.time(), 0.001), wait_for_ready=False)
        try:
            answer: bytes = await call
        except aio.AioRpcError as error:
            raise error_of_rpc(error, what) from None
        except asyncio.CancelledError:
            if self._closed and not _cancelling():
                raise OutcomeUnknown(f"{what}: this node stopped before the answer came") from None
            raise
        return answer

    async def close(self) -> None:
        self._closed = True
        streams = list(self._streams)
        for stream in streams:
            stream.close()
        await asyncio.gather(*(stream.messages.over for stream in streams), return_exceptions=True)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.grpc.close()
        await self._ending.wait()

    def _method(self, name: str, *, streaming: bool) -> Method:
        method = self._methods[name]
        if method.streaming != streaming:
            raise TypeError(f"{method.path} is {'a stream' if method.streaming else 'a call'}")
        return method

    def _channel_to(self, address: str) -> CallChannel:
        self._check_open()
        for unused in take_unused(self._channels):
            self._ending.spawn(unused.close())
        channel = self._channels.get(address)
        if channel is None:
            made = grpc_channels.aio_channel(address, self._options, self._credentials, self._secret)
            channel = self._channels[address] = CallChannel(made)
        return channel

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(STOPPING)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def error_of_rpc(error: aio.AioRpcError, what: str) -> Exception:
    """Ours, if the other side says so; else what gRPC's own status may mean once a request was sent."""
    text = f"{what}: {one_line(error.details() or '') or error.code().name}"
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_TRAILER:
            return error_of(value if isinstance(value, str) else value.decode("ascii", "replace"), text)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return CallRefused(f"{what}: it does not serve this method", UNIMPLEMENTED)
    return OutcomeUnknown(text)


# ---- the side that is called


class GrpcPeerServer:
    """Methods of this node: calls for a grpc.aio server that its owner runs, streams for its `PeerListener`."""

    def __init__(
        self,
        services: Iterable[ServiceDescriptor],
        *,
        tls: ClusterTls | None = None,
        secret: ClusterSecret | None = None,
        turns: SharedTurns | None = None,
    ) -> None:
        """With a secret streams are for clients that prove it; calls are checked by the server's `SecretGate`. `turns`:
        shared with other ports."""
        services = tuple(services)
        self._secret = secret
        self._services = {service.full_name: methods_of((service,)) for service in services}
        self._methods = methods_of(services)
        self._paths = {method.path: method for method in self._methods.values()}
        self._identities = tls is not None
        self._accepts: dict[str, Accept] = {}
        self._answers: dict[str, Answer] = {}
        self._streams: set[Http2Stream] = set()
        self._unnamed: dict[Http2Stream, None] = {}  # those that have named no method yet; the first came first
        self._silent: dict[Http2Stream, str] = {}  # those that have, and have not greeted -> host; the first came first
        self._strangers = turns  # of those that have not greeted
        self._refused = RareWarnings(logger, "peer_refused")
        self._never_began = RareWarnings(logger, "peer_stream_silent")
        self._closed = False

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names, for reflection and health."""
        return tuple(self._services)

    def on_stream(self, method: str, accept: Accept) -> None:
        assert self._methods[method].streaming, f"{method} is a call"
        self._accepts[method] = accept

    def on_call(self, method: str, answer: Answer) -> None:
        assert not self._methods[method].streaming, f"{method} is a stream"
        self._answers[method] = answer

    def add_to(self, server: aio.Server) -> None:
        """Add all methods, streams only to say where they are served; before the server starts."""
        for name, methods in self._services.items():
            handlers = {method.name: self._rpc(method) for method in methods.values()}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    def connection(self, address: str) -> Http2Stream:
        """The protocol of a connection from `address`, which is for one stream."""

        def greeted() -> None:
            self._silent.pop(stream, None)

        if self._strangers is None:
            self._strangers = SharedTurns(asyncio.get_running_loop())
        made = ServerStream(
            address,
            self._serve,
            tls=self._identities,
            secret=self._secret,
            greeted=greeted,
            strangers=self._strangers,
        )
        stream = made.stream
        self._streams.add(stream)
        if len(self._unnamed) >= UNNAMED_MAX:
            oldest = next(iter(self._unnamed))
            del self._unnamed[oldest]
            oldest.close("too many connections that name no method")
        self._unnamed[stream] = None
        stream.messages.over.add_done_callback(lambda _: self._gone(stream))
        if self._closed:
            stream.close(STOPPING)
        return stream

    def _gone(self, stream: Http2Stream) -> None:
        self._streams.discard(stream)
        self._unnamed.pop(stream, None)
        if self._silent.pop(stream, None) is not None and not self._closed:
            self._never_began.warning("a stream from %s ended before it began: no greeting came", stream.peer)

    def _await_greeting(self, stream: Http2Stream) -> None:
        """If too many others are silent as well, the one that waits longest makes room."""
        host = stream.peer.address.rpartition(":")[0]
        same = [other for other, of in self._silent.items() if of == host]
        if len(same) >= SILENT_OF_ADDRESS_MAX:
            same[0].close("too many streams from this host that say nothing")
        elif len(self._silent) >= SILENT_MAX:
            next(iter(self._silent)).close("too many streams that say nothing")
        self._silent[stream] = host

    def close(self) -> None:
        """End all streams and refuse new calls; the server itself is its owner's."""
        self._closed = True
        for stream in list(self._streams):
            stream.close(STOPPING)

    def _serve(self, served: ServerStream, path: str) -> StreamHandler:
        stream = served.stream
        self._unnamed.pop(stream, None)
        method = self._paths.get(path)
        if method is None or not method.streaming:
            why = f"{path} is no stream between nodes; everything else is served at --grpc-address"
            raise CallRefused(why, UNIMPLEMENTED)
        address = stream.peer.address
        served.speak(method, self._checked(served.identity, method) if self._identities else stream.peer)
        try:
            handler: StreamHandler = self._registered(self._accepts, method)(stream)
        except Exception as error:
            self._log_bug(error, method, address)
            raise
        if not stream.ended:
            self._await_greeting(stream)
        return handler

    def _rpc(self, method: Method) -> Any:
        if method.streaming:
            return grpc.stream_stream_rpc_method_handler(_served_elsewhere(method))
        return grpc.unary_unary_rpc_method_handler(self._call_rpc(method))

    def _call_rpc(self, method: Method) -> Callable[[bytes, Any], Any]:
        async def rpc(data: bytes, context: Any) -> bytes:
            address = address_of(context)
            try:
                peer = PeerIdentity(address)
                if self._identities:
                    peer = self._checked(identity_of(context.auth_context(), address), method)
                answer = self._registered(self._answers, method)
                reply = await answer(peer, _parsed(data, method))
                encoded = method.encoded(reply, method.reply)
                if why := too_large(len(encoded)):
                    raise OutcomeUnknown(why)
            except Exception as error:
                self._log_bug(error, method, address)
                kind, why = kind_and_text(error)
                await context.abort(_CODES[status_of(error)], why, trailing_metadata=((ERROR_TRAILER, kind),))
                raise
            return encoded

        return rpc

    def _registered(self, table: dict[str, Any], method: Method) -> Any:
        if self._closed:
            raise Unavailable(STOPPING)
        if method.name not in table:
            raise Unavailable(f"{method.name} is not served yet")
        return table[method.name]

    def _checked(self, identity: PeerIdentity, method: Method) -> PeerIdentity:
        if identity.node_uid or identity.names:
            return identity
        self._refused.warning("%s from %s: its certificate names no node", method.name, identity.address)
        raise CallRefused(f"{method.name} is for nodes only, and this certificate names none", PERMISSION_DENIED)

    @staticmethod
    def _log_bug(error: Exception, method: Method, address: str) -> None:
        if not isinstance(error, (NsqhaError, ValueError)):
            logger.error("peer_call_failed", "%s for %s failed", method.name, address, error=error)


def peer_server(options: Options, turns: SharedTurns | None = None) -> GrpcPeerServer:
    """Where other nodes call this one."""
    secret = read_secret(options.cluster_secret_file)
    return GrpcPeerServer(SERVICES, tls=cluster_tls(options), secret=secret, turns=turns)


class SecretGate(aio.ServerInterceptor):  # type: ignore[misc]  # untyped
    """Ends calls with UNAUTHENTICATED unless they prove the cluster's secret. Health is open to every client."""

    def __init__(self, secret: ClusterSecret, judged: Collection[str] = ()) -> None:
        """`judged`: services that another gate looks at after this one, where a call without any proof may pass."""
        self._judged = tuple(f"/{service}/" for service in judged)
        self._sessions = CallSessions(secret)
        self._refused = RareWarnings(logger, "secret_refused")

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        method: str = details.method
        if method == CHALLENGE_PATH:
            return grpc.unary_unary_rpc_method_handler(self._challenge)
        if method.startswith("/grpc.health.v1.Health/"):
            return await continuation(details)
        metadata = metadata_of(details)
        if method.startswith(self._judged) and not has_proof(metadata):
            return await continuation(details)
        why, stale = self._sessions.refused(method, metadata)
        if not why:
            return await continuation(details)

        async def refuse(_request: bytes, context: Any) -> bytes:
            if not stale:
                self._refused.warning("%s from %s: %s", method, address_of(context), why)
            trailers = ((ERROR_TRAILER, Unavailable.__name__), *(((STALE_KEY, "1"),) if stale else ()))
            await context.abort(_CODES[UNAUTHENTICATED], why, trailing_metadata=trailers)
            return b""

        return grpc.unary_unary_rpc_method_handler(refuse)

    async def _challenge(self, nonce: bytes, context: Any) -> bytes:
        answer = self._sessions.challenge(nonce)
        if not answer:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(nonce)} bytes that are no nonce")
        return answer


def gates(secret: ClusterSecret | None, judged: Collection[str] = ()) -> list[aio.ServerInterceptor]:
    """What checks the calls of a server first."""
    return [] if secret is None else [SecretGate(secret, judged)]


def metadata_of(details: Any) -> dict[str, str]:
    """What a call carries as text."""
    return {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}


def has_proof(metadata: Mapping[str, str]) -> bool:
    """Whether a call carries any part of a proof of the secret. One that `SecretGate` passed on carries a right one."""
    return any(key in metadata for key in (SESSION_KEY, NUMBER_KEY, PROOF_KEY))


def identity_of(properties: dict[str, list[bytes]], address: str) -> PeerIdentity:
    """From gRPC's view of a verified certificate; not `verified` without one."""
    if properties.get("transport_security_type") != [b"ssl"]:
        return PeerIdentity(address)
    names, uris = (
        [value.decode("ascii", "replace") for value in properties.get(key, ())] for key in ("peer_dns", "peer_uri")
    )
    return PeerIdentity.of_certificate(address, names, uris)


def _served_elsewhere(method: Method) -> Callable[[Any, Any], Any]:
    async def rpc(_requests: Any, context: Any) -> None:
        why = f"{method.path} is served at the port of --peer-address, which the node's registration names"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

    return rpc


def _parsed(data: bytes, method: Method) -> Message:
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise ValueError(f"{len(data)} bytes that are not a {method.request.__name__}") from None


def address_of(context: Any) -> str:
    """The address of the other side of a call."""
    return unquote(context.peer()).partition(":")[2]  # behind ipv4, ipv6 or unix
