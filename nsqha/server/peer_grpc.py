"""Streams and calls between nodes over gRPC (HTTP/2), on the loop of the process.

What grpc.aio leaves open is decided here:

- Messages are serialised in `send` and parsed before `on_message`; gRPC sees bytes. At the end that accepted a stream
  one task writes and one reads, so order is kept and one message per direction is in gRPC's hands besides what flow
  control lets pass. The end that opened it is `nsqha.server.peer_http2`.
- A call is first given a connection and only then sent. What fails before is `Unavailable`; afterwards it is
  `OutcomeUnknown`, unless the other side itself said what happened: it names our error in a trailer (`nsqha-error`), so
  that gRPC's own UNAVAILABLE is never taken for an answer.
- A dead address is refused at once, never waited for (`wait_for_ready` is off); it is tried again 0.1 to 1 s later, for
  calls by gRPC and for streams by `nsqha.server.dialling`. A host that went silent is noticed by pings after
  KEEPALIVE_SECONDS + PING_TIMEOUT_SECONDS; that is the backstop of deadlines, acks and leases, which notice earlier.
- Each `GrpcPeers` has connections of its own, and each stream has one: catch-up and forwarding use other ones than live
  replication does.
- With TLS the whole port wants a certificate of the cluster's CA, and the methods here want one that names a node
  (`nsqha.server.tls`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import nsqha.grpc_env  # noqa: F401

# isort: split
import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import aio

from nsqha.errors import NsqhaError, OutcomeUnknown, Unavailable
from nsqha.nsqlog import Log
from nsqha.server.dialling import Failures
from nsqha.server.peer_http2 import Http2Stream
from nsqha.server.peer_stream import StreamEnd, too_large
from nsqha.server.peers import (
    ADMINISTRATOR_URI,
    KEEPALIVE_SECONDS,
    MESSAGE_BYTES_MAX,
    PING_TIMEOUT_SECONDS,
    URI_PREFIX,
    Accept,
    Answer,
    Message,
    Method,
    PeerIdentity,
    PeerStream,
    StreamHandler,
    error_of,
    kind_and_text,
    methods_of,
    one_line,
)
from nsqha.server.tls import ClusterTls, cluster_client_context

UNUSED_SECONDS = 600.0  # that a connection is kept for
ERROR_TRAILER = "nsqha-error"

log = Log("peers")

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
    ("grpc.enable_retries", 0),  # nothing is sent twice
    ("grpc.enable_http_proxy", 0),  # an http_proxy of the environment is not for traffic between nodes
)
_STATUS = {
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "Conflict": grpc.StatusCode.ALREADY_EXISTS,
    "Unavailable": grpc.StatusCode.UNAVAILABLE,
    "OutcomeUnknown": grpc.StatusCode.UNKNOWN,
    "LogCorrupt": grpc.StatusCode.DATA_LOSS,
    "ValueError": grpc.StatusCode.INVALID_ARGUMENT,
}
_GONE = "the other side ended the stream, or is gone"


def server_options(message_bytes: int = 0) -> list[tuple[str, int]]:
    """Options of a grpc.aio server that other nodes stream to; `message_bytes`: less than they may send."""
    return [
        ("grpc.so_reuseport", 0),
        *_sizes(message_bytes or MESSAGE_BYTES_MAX),
        *_PINGS,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_credentials(tls: ClusterTls) -> grpc.ChannelCredentials:
    """For connections to a port with TLS; the server's certificate must name the address that is dialled."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def client_options() -> list[tuple[str, int]]:
    """Options of a connection to such a server."""
    return [*_sizes(MESSAGE_BYTES_MAX), *_PINGS, *_CONNECTING]


def _sizes(message_bytes: int) -> list[tuple[str, int]]:
    return [("grpc.max_send_message_length", message_bytes), ("grpc.max_receive_message_length", message_bytes)]


# ---- streams


class _ServerStream(StreamEnd):
    """The end that accepted it. It lives inside its RPC: a writer task, a reader task."""

    def __init__(self, peer: PeerIdentity, method: Method, context: Any) -> None:
        super().__init__(peer, method, method.reply, method.request)
        self._context = context
        self._room: asyncio.Future[None] | None = None  # the writer waits for something to write
        self._over: asyncio.Future[tuple[str, str]] = self._loop.create_future()

    def send(self, message: Message) -> None:
        if not self.ended:
            self._put(message)
            if self._room is not None:
                self._wake(self._room)

    def pull(self, give: Callable[[], Message | None]) -> None:
        if not self.ended:
            self._give = give
            if self._room is not None:
                self._wake(self._room)

    def _wake(self, room: asyncio.Future[None]) -> None:
        self._room = None
        room.set_result(None)

    def _put(self, message: Message) -> None:
        data = self._encoded(message)
        if data is not None:
            self._queue.append(data)

    async def serve(self, handler: StreamHandler) -> tuple[str, str]:
        """Until the stream ends; the kind and text to tell the other side, if it is still there."""
        self._handler = handler
        tasks = (self._loop.create_task(self._reading()), self._loop.create_task(self._writing()))
        try:
            return await self._over
        finally:
            for task in tasks:
                task.cancel()
            self._end("Unavailable", _GONE)

    async def _writing(self) -> None:
        """Write what is queued or given, until the stream ends; a write that fails is the reader's to explain."""
        queue = self._queue
        try:
            while not self.ended:
                if queue:
                    await self._context.write(queue[0])
                    if queue:  # else the stream ended meanwhile
                        queue.popleft()
                elif (give := self._give) is not None:
                    self._give = None
                    if (message := give()) is not None and not self.ended:
                        self._put(message)
                else:
                    self._room = self._loop.create_future()
                    await self._room
        except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError):
            return
        except Exception as error:
            self._failed(error, "writing")

    async def _reading(self) -> None:
        """Hand over messages until the other side ends."""
        try:
            while not self.ended:
                data = await self._context.read()
                if data is aio.EOF or self.ended:
                    break
                self._arrived(data)
                del data
        except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError):
            pass
        except Exception as error:
            self._failed(error, "reading")
        self._end("Unavailable", _GONE)

    def _tear_down(self, kind: str, why: str) -> None:
        if not self._over.done():
            self._over.set_result((kind, why))


# ---- the side that calls


class _Link:
    """The connection for calls to one address, made when it is first used and again when it is lost."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.users = 0  # calls
        self.left_at = 0.0  # by the last of them
        self._callables: dict[str, Any] = {}

    def method(self, method: Method) -> Any:
        found = self._callables.get(method.name)
        if found is None:
            found = self._callables[method.name] = self.channel.unary_unary(method.path)
        return found


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

    def __init__(self, services: Iterable[ServiceDescriptor], *, tls: ClusterTls | None = None) -> None:
        self._methods = methods_of(services)
        self._credentials = channel_credentials(tls) if tls else None
        self._context = cluster_client_context(tls) if tls else None
        self._options = client_options()
        self._links: dict[str, _Link] = {}
        self._streams: set[Http2Stream] = set()
        self._failures = Failures()  # of their connections
        self._ending: set[asyncio.Task[None]] = set()  # connections that are closed
        self._closed = False

    def stream(self, address: str, method: str, handler: StreamHandler) -> PeerStream:
        chosen = self._method(method, streaming=True)
        self._check_open()
        stream = Http2Stream(address, chosen, handler, self._context, self._failures)
        self._streams.add(stream)
        stream.over.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    async def call(self, address: str, method: str, request: Message, *, timeout: float) -> Message:
        chosen = self._method(method, streaming=False)
        data = chosen.encoded(request, chosen.request)
        if why := too_large(len(data)):
            raise ValueError(f"{method} to {address}: {why}")
        link = self._link(address)
        link.users += 1
        try:
            answer = await self._answer(link, chosen, data, f"{method} to {address}", timeout)
        finally:
            self._left(link)
        try:
            return chosen.reply.FromString(answer)
        except DecodeError:
            raise OutcomeUnknown(f"{method} to {address}: the answer is not a {chosen.reply.__name__}") from None

    async def _answer(self, link: _Link, method: Method, data: bytes, what: str, timeout: float) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        if not await connected(link.channel, deadline):
            raise Unavailable(f"{what}: no connection; nothing was sent")
        call = link.method(method)(data, timeout=max(deadline - loop.time(), 0.001), wait_for_ready=False)
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
        await asyncio.gather(*(stream.over for stream in streams), return_exceptions=True)
        links, self._links = self._links, {}
        for link in links.values():
            await link.channel.close()
        await asyncio.gather(*self._ending)

    def _method(self, name: str, *, streaming: bool) -> Method:
        method = self._methods[name]
        if method.streaming != streaming:
            raise TypeError(f"{method.path} is {'a stream' if method.streaming else 'a call'}")
        return method

    def _link(self, address: str) -> _Link:
        self._check_open()
        link = self._links.get(address)
        if link is None:
            self._close_unused()
            if self._credentials is None:
                channel = aio.insecure_channel(address, options=self._options)
            else:
                channel = aio.secure_channel(address, self._credentials, options=self._options)
            link = self._links[address] = _Link(channel)
        return link

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this node is stopping")

    def _left(self, link: _Link) -> None:
        link.users -= 1
        link.left_at = asyncio.get_running_loop().time()

    def _close_unused(self) -> None:
        """Nodes come back at other addresses: there are only ever more of those that were."""
        loop = asyncio.get_running_loop()
        for address, link in list(self._links.items()):
            if not link.users and loop.time() - link.left_at >= UNUSED_SECONDS:
                del self._links[address]
                task = loop.create_task(link.channel.close())
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)


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
        return Unavailable(f"{what}: it does not serve this method")
    return OutcomeUnknown(text)


# ---- the side that is called


class GrpcPeerServer:
    """Methods of this node, for a grpc.aio server that somebody else runs."""

    def __init__(self, services: Iterable[ServiceDescriptor], *, tls: ClusterTls | None = None) -> None:
        services = tuple(services)
        self._services = {service.full_name: methods_of((service,)) for service in services}
        self._methods = methods_of(services)
        self._identities = tls is not None
        self._accepts: dict[str, Accept] = {}
        self._answers: dict[str, Answer] = {}
        self._streams: set[_ServerStream] = set()
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
        """Add all methods; before the server starts."""
        for name, methods in self._services.items():
            handlers = {
                method.name: (
                    grpc.stream_stream_rpc_method_handler(self._stream_rpc(method))
                    if method.streaming
                    else grpc.unary_unary_rpc_method_handler(self._call_rpc(method))
                )
                for method in methods.values()
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    def close(self) -> None:
        """End all streams and refuse new calls; the server itself is its owner's."""
        self._closed = True
        for stream in list(self._streams):
            stream.close("this node is stopping")

    def _stream_rpc(self, method: Method) -> Callable[[Any, Any], Any]:
        async def rpc(_: Any, context: Any) -> None:
            peer = await self._identity(context, method)
            stream = _ServerStream(peer, method, context)
            try:
                handler = self._registered(self._accepts, method)(stream)
            except Exception as error:
                await _abort(context, *self._refusal(error, method, context))
                return
            self._streams.add(stream)
            try:
                kind, why = await stream.serve(handler)
            finally:
                self._streams.discard(stream)
            await _abort(context, kind, why)

        return rpc

    def _call_rpc(self, method: Method) -> Callable[[bytes, Any], Any]:
        async def rpc(data: bytes, context: Any) -> bytes:
            peer = await self._identity(context, method)
            try:
                answer = self._registered(self._answers, method)
                reply = await answer(peer, _parsed(data, method))
                encoded = method.encoded(reply, method.reply)
                if why := too_large(len(encoded)):
                    raise OutcomeUnknown(why)
            except Exception as error:
                await _abort(context, *self._refusal(error, method, context))
                raise
            return encoded

        return rpc

    def _registered(self, table: dict[str, Any], method: Method) -> Any:
        if self._closed:
            raise Unavailable("this node is stopping")
        if method.name not in table:
            raise Unavailable(f"{method.name} is not served yet")
        return table[method.name]

    async def _identity(self, context: Any, method: Method) -> PeerIdentity:
        address = _address(context)
        if not self._identities:
            return PeerIdentity(address)
        identity = identity_of(context.auth_context(), address)
        if not (identity.node_uid or identity.names):
            log.warning("peer_refused", "%s from %s: its certificate names no node", method.name, address)
            why = f"{method.name} is for nodes only, and this certificate names none"
            await _abort(context, Unavailable.__name__, why, grpc.StatusCode.PERMISSION_DENIED)
        return identity

    @staticmethod
    def _refusal(error: Exception, method: Method, context: Any) -> tuple[str, str]:
        if not isinstance(error, (NsqhaError, ValueError)):
            log.error("peer_call_failed", "%s for %s failed", method.name, _address(context), error=error)
        return kind_and_text(error)


def identity_of(properties: dict[str, list[bytes]], address: str) -> PeerIdentity:
    """From gRPC's view of a verified certificate; not `verified` without one."""
    if properties.get("transport_security_type") != [b"ssl"]:
        return PeerIdentity(address)
    names = tuple(name.decode("ascii", "replace") for name in properties.get("peer_dns", ()))
    uris = [uri.decode("ascii", "replace") for uri in properties.get("peer_uri", ())]
    uid = 0
    for uri in uris:
        digits = uri.removeprefix(URI_PREFIX)
        if len(digits) == 16 and uri.startswith(URI_PREFIX) and set(digits) <= set("0123456789abcdef"):
            uid = int(digits, 16)
    return PeerIdentity(address, uid, names, verified=True, administrator=ADMINISTRATOR_URI in uris)


def _parsed(data: bytes, method: Method) -> Message:
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise ValueError(f"{len(data)} bytes that are not a {method.request.__name__}") from None


def _address(context: Any) -> str:
    """`ipv4:10.0.0.7:51022` as an address."""
    peer: str = context.peer()
    return peer.removeprefix("ipv4:").removeprefix("ipv6:").replace("%5B", "[").replace("%5D", "]")


async def _abort(context: Any, kind: str, why: str, code: grpc.StatusCode | None = None) -> None:
    """End the RPC; it raises, always."""
    code = code or _STATUS.get(kind, grpc.StatusCode.INTERNAL)
    await context.abort(code, why, trailing_metadata=((ERROR_TRAILER, kind),))
