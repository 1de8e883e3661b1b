"""How nodes talk to each other, without saying over what.

A `PeerStream` is one ordered, bidirectional stream of protobuf messages. It ends as a whole: both directions at once,
for each end exactly once, with a reason. What was under way when it ended may or may not have arrived; nothing is sent
twice and nothing overtakes. A call is one question and one answer, with a deadline.

    peers.stream("10.0.0.7:4153", "Push", handler).send(PushMessage(...))
    reply = await peers.call("10.0.0.7:4152", "Status", StatusRequest(...), timeout=0.1)

Memory: a handler is given one message at a time and the next is read after it returned, so a slow handler slows the
sender. The owner of an end bounds what it sends by `pending`, or lets itself be asked for messages (`pull`): then one
is made when it can leave, from all there is by then.

Who speaks: with cluster TLS, `PeerIdentity` is read from the verified certificate of the side that connected; a hello
that claims to be another node must be refused (`PeerIdentity.may_be`). Without TLS every claim is believed.

`nsqha.server.peers.calls` is the implementation; tests/sim/net.py is another over a simulated network.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nsqha.errors import (
    AppendFailed,
    ConfigError,
    Conflict,
    LimitReached,
    LogCorrupt,
    NotFound,
    NsqhaError,
    OutcomeUnknown,
    Poisoned,
    StorageError,
    Unavailable,
    WrongKind,
)

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

Message = Any
"""A protobuf message; the generated classes have no common type that is of use here."""

URI_PREFIX = "nsqha:node/"
"""Before the node uid, 16 lowercase hex digits, in a certificate's subjectAltName."""
ADMINISTRATOR_URI = "nsqha:administrator"
"""In the subjectAltName of an administrator's certificate."""
READER_URI = "nsqha:reader"
"""In the subjectAltName of a certificate that may read segments and do nothing else."""

MESSAGE_BYTES_MAX = (1 << 31) - 1
"""The most bytes of one message between nodes: gRPC's own limit, whatever a node lets its clients send.

A batch goes whole. One that its followers did not take would end the stream of every partition of the pair, and its own
partition would never commit again; so the flags bound what is written (`nsqha.options`), never what is copied.
"""

KEEPALIVE_SECONDS = 5
"""Seconds of silence on a connection, after which a ping is sent, and"""
PING_TIMEOUT_SECONDS = 3
"""how long its answer may take: the backstop of deadlines, acks and leases, which notice a silent host earlier."""

_WHY_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The other side. What is not `verified` (there is no TLS) is only an address."""

    address: str = ""
    node_uid: int = 0  # from the certificate; 0: it does not say, or there is no TLS
    names: tuple[str, ...] = ()  # DNS names of the certificate
    verified: bool = False  # it has a certificate of the cluster's CA
    administrator: bool = False  # as the certificate says
    reader: bool = False  # the same
    uris: tuple[str, ...] = ()  # of the certificate

    @classmethod
    def of_certificate(cls, address: str, names: Iterable[str], uris: Iterable[str]) -> PeerIdentity:
        """The holder of a certificate of the cluster's CA, by the names and URIs of its subjectAltName."""
        uid, administrator, reader = 0, False, False
        uris = tuple(uris)
        for uri in uris:
            digits = uri.removeprefix(URI_PREFIX)
            if len(digits) == 16 and uri.startswith(URI_PREFIX) and set(digits) <= set("0123456789abcdef"):
                uid = int(digits, 16)
            administrator = administrator or uri == ADMINISTRATOR_URI
            reader = reader or uri == READER_URI
        return cls(address, uid, tuple(names), True, administrator, reader, uris)

    @property
    def name(self) -> str:
        """The certificate's first DNS name, or empty."""
        return self.names[0] if self.names else ""

    def may_be(self, node_uid: int, name: str = "") -> bool:
        """Whether this side may speak for the node `node_uid`, whose metadata record says that it is called `name`.

        A certificate that carries a node uid speaks for that node only, one without speaks for the nodes that it names.
        """
        if not self.verified:
            return True
        return node_uid == self.node_uid if self.node_uid else name != "" and name in self.names

    def __str__(self) -> str:
        who = f"node {self.node_uid:016x}" if self.node_uid else self.name
        return f"{who} at {self.address}" if who else self.address or "a peer"


class StreamHandler(Protocol):
    """The owner of an end of a stream. Called on the loop, never from within `send`, `close` or `stream`."""

    def on_message(self, message: Message) -> None:
        """The next message. An exception ends the stream; it is logged here, and the other side gets one line of it."""

    def on_closed(self, why: str) -> None:
        """The stream has ended. Once, also after close(); no message comes after it.

        `why` is for people: what the other side said gets lost when a message is just being written.
        """


class PeerStream(Protocol):
    """One end of a stream."""

    @property
    def peer(self) -> PeerIdentity:
        """The other side."""

    @property
    def pending(self) -> int:
        """Messages that were sent and not yet handed to the network; 0 after the end."""

    @property
    def heard(self) -> float:
        """When anything came from the other side last, also a part of a message; loop time, 0: nothing yet."""

    def ping(self) -> None:
        """Have the other side's loop answer, which moves `heard`. Not before a message came; ignored after the end."""

    def send(self, message: Message) -> None:
        """Queue it, as it is now. Never blocks; ignored after the end. TypeError if the method sends another type."""

    def pull(self, give: Callable[[], Message | None]) -> None:
        """Ask `give` for a message once nothing is pending, and send it; None: there is none any more.

        It is asked on the loop, never from within, and once, however often this was called before. An exception ends
        the stream. Ignored after the end.
        """

    def close(self, why: str = "") -> None:
        """End both directions; what is pending is dropped. The other side learns `why` if it opened the stream."""


class Peers(Protocol):
    """The other nodes, as one that calls them."""

    def stream(self, address: str, method: str, handler: StreamHandler) -> PeerStream:
        """Open a stream ("Push", "Live", ...) at a peer port. If that fails, `handler` learns that it has ended."""

    async def call(self, address: str, method: str, request: Message, *, timeout: float) -> Message:
        """The answer within `timeout` seconds of the node with this gRPC port.

        Unavailable: it was not carried out, or refused by the transport of the other side. OutcomeUnknown: perhaps it
        was. Other errors of `nsqha.errors`, and ValueError, are the other side's answer.
        """

    async def close(self) -> None:
        """End all streams and calls."""


Accept = Callable[[PeerStream], StreamHandler]
Answer = Callable[[PeerIdentity, Any], Awaitable[Message]]


class PeerServer(Protocol):
    """This node, as others call it. What is registered later than it is called is refused as unavailable until then."""

    def on_stream(self, method: str, accept: Accept) -> None:
        """`accept` says who handles a new stream, or raises an error of `nsqha.errors` to refuse it."""

    def on_call(self, method: str, answer: Answer) -> None:
        """`answer` replies or raises. It may be cancelled at any await once the caller has gone."""


# ---- methods


class Method:
    """One method of a service: its path and types."""

    __slots__ = ("name", "path", "reply", "request", "streaming")

    def __init__(self, service: ServiceDescriptor, method: MethodDescriptor) -> None:
        if method.client_streaming != method.server_streaming:
            raise TypeError(f"{service.full_name}.{method.name}: only calls and streams in both directions are served")
        from google.protobuf.message_factory import GetMessageClass  # a node that is alone starts without

        self.name: str = method.name
        self.path = f"/{service.full_name}/{method.name}"
        self.request: type[Any] = GetMessageClass(method.input_type)
        self.reply: type[Any] = GetMessageClass(method.output_type)
        self.streaming: bool = method.client_streaming

    def encoded(self, message: Message, expected: type[Any]) -> bytes:
        """Its bytes; TypeError if it is another type than this method's `request` or `reply`."""
        if type(message) is not expected:
            raise TypeError(f"{self.name}: {type(message).__name__} is not {expected.__name__}")
        data: bytes = message.SerializeToString()
        return data


def methods_of(services: Iterable[ServiceDescriptor]) -> dict[str, Method]:
    """By their names alone; TypeError if two are the same."""
    found: dict[str, Method] = {}
    for service in services:
        for descriptor in service.methods:
            method = Method(service, descriptor)
            if method.name in found:
                raise TypeError(f"{method.path} and {found[method.name].path}: method names must differ")
            found[method.name] = method
    return found


# ---- errors on their way to another node

ERROR_TRAILER = "nsqha-error"
"""Names our error, so that gRPC's own statuses are never taken for an answer."""

STATUS = {
    "Unavailable": 14, "NotFound": 5, "Conflict": 6, "LimitReached": 8, "OutcomeUnknown": 2, "LogCorrupt": 15,
    "ValueError": 3, "WrongKind": 9,
}  # fmt: skip
"""gRPC's number for our errors, for those who know it only."""

PERMISSION_DENIED, UNIMPLEMENTED, INTERNAL, UNAUTHENTICATED = 7, 12, 13, 16


class CallRefused(Unavailable):
    """What this node's port says itself, with a status of gRPC's that no error of ours has."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


def status_of(error: Exception) -> int:
    """gRPC's status for an error of ours, or for a bug."""
    return error.status if isinstance(error, CallRefused) else STATUS.get(kind_and_text(error)[0], INTERNAL)


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        AppendFailed,
        ConfigError,
        Conflict,
        LimitReached,
        LogCorrupt,
        NotFound,
        OutcomeUnknown,
        Poisoned,
        StorageError,
        Unavailable,
        ValueError,
        WrongKind,
    )
}


def kind_and_text(error: Exception) -> tuple[str, str]:
    """What the other side learns of an error. What is none of our errors is a bug here, and its outcome is unknown."""
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS and _KINDS[kind.__name__] is kind:
            return kind.__name__, one_line(str(error) or kind.__name__)
    if isinstance(error, NsqhaError):
        return OutcomeUnknown.__name__, one_line(f"{type(error).__name__}: {error}")
    return OutcomeUnknown.__name__, one_line(f"internal error: {type(error).__name__}: {error}")


def error_of(kind: str, text: str) -> Exception:
    """The error that the other side names. An unknown kind comes from a newer node: perhaps it was carried out."""
    return _KINDS.get(kind, OutcomeUnknown)(text)


def one_line(text: str) -> str:
    """`text` as it fits a status line."""
    joined = " ".join(text.split())
    return joined if len(joined) <= _WHY_CHARACTERS else joined[: _WHY_CHARACTERS - 3] + "..."
