"""One client's socket: bytes in to the wire session, replies out in command order, messages as they come.

    socket -> Connection -> Session -> ClientPublisher | ClientConsuming | Negotiation -> hot.Replies -> socket
                               runs a command only when CommandFlow is not blocked

The session is synchronous; where a command has to wait, the flow is blocked and the socket is not read. The same holds
for a client that sends commands and does not read the answers: beyond `UNREAD_REPLIES_BYTES_MAX` it is not read either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from nsqha import hot
from nsqha.nsqlog import Logger
from nsqha.options import TlsRequired
from nsqha.server.clients.auth import Permissions
from nsqha.server.clients.client_publisher import ClientPublisher
from nsqha.server.clients.consuming import ClientConsuming
from nsqha.server.clients.flow import CommandFlow
from nsqha.server.clients.heartbeat import Heartbeat
from nsqha.server.clients.negotiation import Negotiation
from nsqha.server.clients.transport import ClientTransport
from nsqha.server.clients.unfinished import SMALL_BYTES
from nsqha.server.runtime.listen import address_text, too_many_files
from nsqha.server.runtime.rare_warnings import RareWarnings
from nsqha.wire import encoder, errors
from nsqha.wire.session import Session

if TYPE_CHECKING:
    from nsqha.server.clients.context import ClientContext
    from nsqha.server.partition.delivery import Consumer

LARGE_READ_BYTES = 128 << 10  # more than half of what the loop reads at once
UNREAD_REPLIES_BYTES_MAX = 2 << 20  # with so much written and not read by the client, its commands wait

logger = Logger("connection")


def _nowhere(data: Any) -> None:
    """Where replies to a client go that is not there any more."""


class Connections:
    """The connections of one node."""

    def __init__(self, exiting: Callable[[], bool], unsubscribe: Callable[[Consumer], None]) -> None:
        """`exiting`: whether the node stops."""
        self.total = 0  # since the start
        self.exiting = exiting
        self.refused = RareWarnings(logger, "too_many_files")
        self._unsubscribe = unsubscribe
        self._open: dict[Connection, None] = {}  # in the order in which they came
        self._numbers = 0

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def next_number(self) -> int:
        """A number that no connection or publish of this node has had."""
        self._numbers += 1
        return self._numbers

    def opened(self, connection: Connection) -> None:
        self._open[connection] = None
        self.total += 1
        if self.exiting():
            connection.close()

    def closed(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        if connection.consuming.consumer is not None:
            self._unsubscribe(connection.consuming.consumer)

    def forget_targets(self) -> None:
        """Connections have to ask again where to publish."""
        for connection in self._open:
            connection.publisher.forget_targets()

    def judge_again(self) -> None:
        """The access file has changed: whoever may not do any more what it does is dropped."""
        for connection in self:
            connection.judge_again()

    def stop_reading(self) -> None:
        """The node stops: run no further command; what was run is still answered."""
        for connection in self:
            connection.read_no_more()

    def close(self) -> None:
        """Drop all connections once what was written has left."""
        for connection in self:
            connection.close()


class Connection(asyncio.Protocol):
    """A V2 client."""

    def __init__(self, context: ClientContext, connections: Connections) -> None:
        self.context = context
        self.writable = True
        self.closed = False
        self.connected_at = 0
        self.send_messages: Callable[[Any], None] = _nowhere  # to the socket, by way of the codec
        self.transport = ClientTransport(context.loop)
        self._connections = connections
        self._stuffed = False  # blocked because the client does not read its replies
        self._heartbeat = Heartbeat(context.loop, self)
        self._replies = hot.Replies(self, _nowhere)
        self._flow = flow = CommandFlow(
            self, self.transport, self._replies, context.loop, context.reading, context.turns
        )
        permissions = Permissions(context.auth, context.clock, self.transport, context.tokens)
        self.publisher = ClientPublisher(connections.next_number(), context, flow, self.transport, permissions)
        self.negotiation = Negotiation(self, context, flow, self.transport, permissions, self._heartbeat)
        self.consuming = ClientConsuming(self, context, flow, permissions, self.negotiation)
        self.session = flow.session = Session(
            context.limits, flow, publishes=self.publisher, consumes=self.consuming, negotiates=self.negotiation
        )
        self.session.tls_required_now = context.options.tls_required != TlsRequired.NO
        self.session.publishing.checks = permissions.needed

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        first = not self.transport.remote_address
        if first and too_many_files(transport):
            self._connections.refused.warning("client(%s): refused", address_text(transport.get_extra_info("peername")))
            self.closed = True
            transport.write(errors.TOO_MANY_FILES)
            transport.close()
            self._come_apart()
            return
        self.write_by(self.transport.carry_over(transport))
        if self.closed or first:
            self.connected_at = self.context.clock.wall_ns() // 1_000_000_000
            self._heartbeat.heard_at = self.context.loop.time()
            self._heartbeat.set(self.context.limits.heartbeat_interval_default_ms)
            self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        quick = self.publisher.quick
        if quick is not None and not self.session.unread.busy and not self._flow.blocked and quick.take(data):
            self._heartbeat.heard_at = quick.taken_at
        elif self.transport.codec is None:
            self._receive(data)
        else:
            self._decompress(data)
        if len(data) > LARGE_READ_BYTES:
            self._flow.rest()  # else the loop would read on, up to 32 times, before it reads other clients

    def _receive(self, data: bytes) -> None:
        session = self.session
        before = session.unread.have
        session.receive(data)
        have = session.unread.have
        if have > SMALL_BYTES or before > SMALL_BYTES:
            self._flow.unfinished.heed()
        if data and (not before or have < before + len(data)):
            # A command ended or began. More of one that began earlier is no sign of life: a client that sends a byte
            # now and then would keep us holding the rest of it.
            self._heartbeat.heard_at = self.context.loop.time()

    def _decompress(self, data: bytes) -> None:
        """Feed the session piece by piece: a few bytes may decompress to many. What that takes counts, and does not
        wait: there may be publishes in it."""
        codec, flow = self.transport.codec, self._flow
        assert codec is not None
        flow.enter_anyway()
        try:
            plain = codec.decompress(data)
        except ValueError:
            self.session.kill()
            flow.hang_up()
            return
        finally:
            flow.leave()
        self._receive(plain)
        if codec.pending:
            flow.rest()

    def compressed(self, rest: bytes) -> None:
        """What comes from now on is compressed, and `rest` of it is here already."""
        self.publisher.forget_targets()  # what comes now has to be decompressed first
        if rest:
            self._decompress(rest)

    def go_on(self) -> None:
        """The flow was blocked: run what was received meanwhile, and read on."""
        flow = self._flow
        self._heartbeat.heard_at = self.context.loop.time()
        if not flow.eof and not self._connections.exiting():
            self.transport.resume_reading()
        self.session.resume()
        self._flow.unfinished.heed()
        codec = self.transport.codec
        if codec is not None and codec.pending and not flow.blocked:
            self._decompress(b"")
        if flow.eof and not flow.blocked:
            self.session.eof()
            if not self._replies:
                self.close()

    def eof_received(self) -> bool:
        return self._flow.end_of_input()  # closed when the answers that are owed have left

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.closed and not self.transport.connected:
            return
        self.closed = True
        self.writable = False
        self.transport.lost()
        self.write_by(_nowhere)
        self._replies.clear()
        self.session.kill()  # now: what is kept of a command may be large
        self._heartbeat.cancel()
        waited = self._flow.cancel()
        self._connections.closed(self)
        if not waited and self.consuming.consumer is None:  # a consumer is known to others as well
            self._come_apart()

    def _come_apart(self) -> None:
        """Nobody asks anything of this connection any more. Its parts know each other, and would be left to the garbage
        collector: where many clients come and go, that takes a fifth of all CPU that they cost."""
        self._flow.come_apart()
        self.publisher.forget_targets()
        del self.publisher, self.negotiation, self.consuming, self.session
        del self._flow, self._replies, self._heartbeat

    def read_no_more(self) -> None:
        """The node stops: run no further command; what was run is still answered."""
        self.session.kill()
        self.transport.pause_reading()

    def close(self) -> None:
        """Drop the connection once what was written has left; nothing more is read or written."""
        if self.transport.connected and not self.closed:
            self.closed = True
            self.writable = False
            self.session.kill()
            self._flow.unfinished.release()
            self._heartbeat.cancel()
            self.transport.close()

    def judge_again(self) -> None:
        """The access file has changed."""
        self.publisher.forget_targets()  # the next publish is checked again
        permissions, consumer = self.negotiation.permissions, self.consuming.consumer
        if self.closed:
            return
        if not permissions.judge_again():
            self._flow.refuse(errors.AUTH_FAILED)
        elif consumer is not None:
            denial = permissions.denial("SUB", consumer.topic, consumer.channel)
            if denial is not None:
                self._flow.refuse(encoder.error(denial))

    # ---- what leaves

    def write_by(self, write: Callable[[Any], None]) -> None:
        """Send everything this way from now on."""
        self.send_messages = self._replies.write = write

    def pause_writing(self) -> None:
        self.writable = False
        self._replies.behind = True

    def resume_writing(self) -> None:
        self.writable = not self.closed
        self._replies.behind = False
        if self._stuffed:
            self._stuffed = False
            self._flow.unblock()
        consumer = self.consuming.consumer
        if consumer is not None:
            consumer.remote.resumed()
            consumer.wake()

    def heed_unread(self) -> None:
        """A reply was written, and the client is behind with reading: too far behind, and its commands wait."""
        if not self.blocked and not self.closed and self.unread_bytes > UNREAD_REPLIES_BYTES_MAX:
            self._stuffed = True
            self._flow.block()

    @property
    def blocked(self) -> bool:
        """Whether its next command waits."""
        return self._flow.blocked

    @property
    def unread_bytes(self) -> int:
        """Bytes that were written and that the client has not taken."""
        return self.transport.unread_bytes

    def beat(self) -> None:
        self.send_messages(encoder.HEARTBEAT)

    def reply(self, data: bytes) -> None:
        """A frame that leaves after the replies of all earlier commands."""
        self._replies.reply(data)

    def publish_failed(self, command: str, why: str) -> bytes:
        """Count it; the frame that says so."""
        self.context.measures.publish_errors[f"E_{command}_FAILED"] += 1
        return errors.publish_failed(command, why)
