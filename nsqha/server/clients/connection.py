"""One client's socket: bytes in to the wire session, replies out in command order, messages as they come.

The session is synchronous. Where a command needs something slow (a topic's first publish, SUB to a new channel, TLS,
an auth server), the connection sets `blocked`; the session keeps the unread bytes until `_unblock`, and reading from
the socket pauses meanwhile, so a client can not make us hold more than one read's worth. The same holds for a client
that sends commands and does not read the answers: beyond `UNREAD_REPLIES_BYTES_MAX` it is not read either.

What a client may do is kept in `permissions`, what it says of messages in flight goes to `consumer_acks`; here is when
they are asked.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from nsqha import hot
from nsqha.errors import NsqhaError
from nsqha.hot import NOT_STORED
from nsqha.nsqlog import Logger
from nsqha.options import TlsRequired
from nsqha.server.clients.heartbeat import Heartbeat
from nsqha.server.clients.permissions import Permissions
from nsqha.server.partition.consumer_acks import ConsumerAcks
from nsqha.server.partition.delivery import Consumer
from nsqha.server.runtime.listen import address_text, too_many_files
from nsqha.wire import encoder, errors
from nsqha.wire.compression import Codec, new_codec
from nsqha.wire.session import CLOSING, Session

if TYPE_CHECKING:
    from nsqha.clock import Clock, Now
    from nsqha.options import Options
    from nsqha.server.clients.auth import AuthClient
    from nsqha.server.clients.publish import Publishing
    from nsqha.server.clients.subscribe import Subscriptions
    from nsqha.server.partition.partition import Partition
    from nsqha.server.routing.publisher import PartitionPublisher
    from nsqha.server.runtime.budget import PublishBudget
    from nsqha.server.runtime.measures import Measures
    from nsqha.server.topics.topics import Topics
    from nsqha.wire.identify import Agreed, AgreedIdentify
    from nsqha.wire.limits import ProtocolLimits

TLS_SECONDS_MAX = 5.0
WRITE_BUFFER_HIGH = 1 << 20  # a consumer that reads slower gets no more messages until three quarters of it are gone
UNREAD_REPLIES_BYTES_MAX = 2 << 20  # with so much written and not read by the client, its commands wait
CLOSE_SECONDS_MAX = 30.0  # a closed connection has so long to take what was written

logger = Logger("connection")


def _nowhere(data: Any) -> None:
    """Where replies to a client go that is not there any more."""


class Connections(Protocol):
    """All clients of a node, for one of them."""

    @property
    def exiting(self) -> bool:
        """Whether the node stops."""

    def next_connection_number(self) -> int: ...

    def connection_opened(self, connection: Connection) -> None: ...

    def connection_closed(self, connection: Connection) -> None: ...


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What connections work with."""

    options: Options
    limits: ProtocolLimits
    loop: asyncio.AbstractEventLoop
    clock: Clock
    now: Callable[[], Now]
    auth: AuthClient | None
    tls_context: ssl.SSLContext | None
    budget: PublishBudget
    measures: Measures
    topics: Topics
    publishing: Publishing
    subscriptions: Subscriptions
    connections: Connections


class Connection(asyncio.Protocol):
    """A V2 client: implements `wire.session.Handler`."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context
        self.blocked = False
        self.writable = True
        self.closed = False
        self.number = context.connections.next_connection_number()
        self.remote_address = ""
        self.connected_at = 0
        self.agreed: Agreed | None = None
        self.consumer: Consumer | None = None
        self.pub_counts: dict[str, int] = {}
        self.tls: ssl.SSLObject | None = None
        self.permissions = Permissions(context.auth, context.clock)
        self.session = Session(context.limits, self)
        self.session.tls_required_now = context.options.tls_required != TlsRequired.NO
        self.session.checks_publish = self.permissions.needed
        self.send_messages: Callable[[Any], None] = _nowhere  # to the socket, by way of the codec
        self._connections = context.connections
        self._budget = context.budget
        self._transport: asyncio.Transport | None = None
        self._replies = hot.Replies(self, _nowhere)
        self._acks: ConsumerAcks | None = None  # of `consumer`
        self._when_answered: Callable[[], None] | None = None
        self._targets: dict[str, tuple[Partition | PartitionPublisher, hot.Publisher | None]] = {}
        self._publisher: hot.Publisher | None = None  # for where this client published last
        self._codec: Codec | None = None
        self._heartbeat = Heartbeat(context.loop, self)
        self._closing: asyncio.TimerHandle | None = None  # how long it may take
        self._stuffed = False  # blocked because the client does not read its replies
        self._loop = context.loop
        self._eof = False
        self._task: asyncio.Task[None] | None = None

    # ---- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        if not self.remote_address and too_many_files(transport):
            logger.warning("too_many_files", "client(%s): refused", address_text(transport.get_extra_info("peername")))
            self.closed = True
            transport.abort()
            return
        self._transport = transport
        self._write_by(transport.write)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        if self.closed or not self.remote_address:
            peer = transport.get_extra_info("peername")
            self.remote_address = address_text(peer)
            self.connected_at = self.context.clock.wall_ns() // 1_000_000_000
            self._heartbeat.heard_at = self._loop.time()
            self._heartbeat.set(self.context.limits.heartbeat_interval_default_ms)
            self._connections.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        publisher = self._publisher
        if publisher is not None and not self.session.busy and not self.blocked and publisher.take(data):
            self._heartbeat.heard_at = publisher.taken_at
        elif self._codec is None:
            self._receive(data)
        else:
            self._decompress(data)

    def _receive(self, data: bytes) -> None:
        session = self.session
        before = session.unread_bytes
        session.receive(data)
        if data and (not before or session.unread_bytes < before + len(data)):
            # A command ended or began. More of one that began earlier is no sign of life: who sends a byte now and
            # then would keep us holding the rest of it.
            self._heartbeat.heard_at = self._loop.time()

    def _decompress(self, data: bytes) -> None:
        """Feed the session piece by piece: a few bytes may decompress to many."""
        codec = self._codec
        assert codec is not None
        try:
            self._receive(codec.decompress(data))
        except ValueError:
            self.session.kill()
            self.hang_up()
        else:
            if codec.pending:
                self.rest()

    def rest(self) -> None:
        """Go on in the next turn of the loop: a read may hold as many commands as take a while, and a few compressed
        bytes far more."""
        if not self.blocked and not self.closed:
            self._block()
            self._loop.call_soon(self._unblock)

    def eof_received(self) -> bool:
        self._eof = True
        self._replies.on_empty = self._all_answered
        if self._codec is None or not self._codec.pending:  # else when that has been run
            self.session.eof()
        return bool(self._replies) or self.blocked  # answers are still owed; closed when they have left

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.closed and self._transport is None:
            return
        self.closed = True
        self.writable = False
        self._transport = None
        self._write_by(_nowhere)
        self._replies.clear()
        self._heartbeat.cancel()
        if self._closing is not None:
            self._closing.cancel()
        if self._task is not None:
            self._task.cancel()
        self._connections.connection_closed(self)

    def pause_writing(self) -> None:
        self.writable = False
        self._replies.behind = True

    def resume_writing(self) -> None:
        self.writable = not self.closed
        self._replies.behind = False
        if self._stuffed:
            self._stuffed = False
            self._unblock()
        consumer = self.consumer
        if consumer is not None:
            if consumer.remote is not None:
                consumer.remote.resumed()
            consumer.wake()

    def _write_by(self, write: Callable[[Any], None]) -> None:
        """From now on, what leaves goes this way."""
        self.send_messages = self._replies.write = write

    def _send_compressed(self, data: Any) -> None:
        assert self._codec is not None and self._transport is not None
        for chunk in self._codec.chunks(data):
            self._transport.write(chunk)

    def heed_unread(self) -> None:
        """A reply was written, and the client is behind with reading: too far behind, and its commands wait."""
        if not self.blocked and not self.closed and self.unread_bytes > UNREAD_REPLIES_BYTES_MAX:
            self._stuffed = True
            self._block()

    def read_no_more(self) -> None:
        """The node stops: run no further command; what was run is still answered."""
        self.session.kill()
        if self._transport is not None:
            self._transport.pause_reading()

    def close(self) -> None:
        """Drop the connection once what was written has left; nothing more is read or written."""
        transport = self._transport
        if transport is not None and not self.closed:
            self.closed = True
            self.writable = False
            self.session.kill()
            self._heartbeat.cancel()
            self._closing = self._loop.call_later(CLOSE_SECONDS_MAX, transport.abort)
            transport.close()

    def beat(self) -> None:
        self.send_messages(encoder.HEARTBEAT)

    @property
    def unread_bytes(self) -> int:
        """Written, and not taken by the client."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # ---- replies

    def reply(self, data: bytes) -> None:
        """A frame that leaves after the replies of all earlier commands."""
        self._replies.reply(data)

    def fatal(self, data: bytes) -> None:
        """An error frame in its turn, then the end."""
        self._replies.fatal(data)

    def hang_up(self) -> None:
        """The end in its turn, without a frame: what nsqd does on a line, or compressed bytes, that it can not read."""
        if self._replies:
            self._replies.fatal(b"")
        else:
            self.close()

    def publish_failed(self, command: str, why: str) -> bytes:
        """Count it; the frame that says so."""
        self.context.measures.publish_errors[f"E_{command}_FAILED"] += 1
        return errors.publish_failed(command, why)

    def _all_answered(self) -> None:
        if self._when_answered is not None:
            then, self._when_answered = self._when_answered, None
            self._unblock(then)
        elif self._eof and not self.blocked:  # else there may be more that it has sent
            self.close()

    def _after_replies(self, then: Callable[[], None]) -> None:
        """Do `then` when every earlier command has been answered; the session waits."""
        if not self._replies:
            then()
        else:
            self._block()
            self._when_answered = then
            self._replies.on_empty = self._all_answered

    # ---- waiting

    def _block(self) -> None:
        if not self.blocked:
            self.blocked = True
            if self._transport is not None:
                self._transport.pause_reading()

    def _unblock(self, then: Callable[[], None] | None = None) -> None:
        self.blocked = False
        if self.closed:
            return
        self._heartbeat.heard_at = self._loop.time()
        if then is not None:
            then()
        if self.blocked or self.closed:
            return
        if self._transport is not None and not self._eof and not self._connections.exiting:
            self._transport.resume_reading()
        self.session.resume()
        if self._codec is not None and self._codec.pending and not self.blocked:
            self._decompress(b"")
        if self._eof and not self.blocked:
            self.session.eof()
            if not self._replies:
                self.close()

    def _wait_for(self, work: Coroutine[Any, Any, Callable[[], None] | None]) -> None:
        """Block the session until `work` ends; it returns what to do then."""
        self._block()

        async def run() -> None:
            then: Callable[[], None] | None
            try:
                then = await work
            except Exception as error:
                # What a client may cause is refused by `work`; this is ours, and nobody would ever unblock the client.
                logger.error("command_failed", "client(%s): a command failed", self.remote_address, error=error)
                then = self.close
            self._task = None
            self._unblock(then)

        self._task = self._loop.create_task(run())

    # ---- publishing

    def publish(self, topic: str, frames: bytes, count: int, command: str, delay_ms: int | None = None) -> None:
        known = self._targets.get(topic)
        if known is None or known[0].closed:
            known = self._target(topic, partial(self.publish, topic, frames, count, command, delay_ms), command)
            if known is None:
                return
        target, self._publisher = known
        slot = self._replies.publish(command, count)
        self.pub_counts[topic] = self.pub_counts.get(topic, 0) + count
        target.publish(frames, slot, delay_ms)
        if self._budget.full:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        if not self.blocked:
            self._block()
            self._budget.when_room(self._unblock)

    def publish_deferred(self, topic: str, frame: bytes, delay_ms: int) -> None:
        self.publish(topic, frame, 1, "DPUB", delay_ms)

    def _target(
        self, topic: str, again: Callable[[], None], command: str
    ) -> tuple[Partition | PartitionPublisher, hot.Publisher | None] | None:
        """Where this connection publishes to; None while the topic is being created or if it can not be."""
        refusal = self.context.publishing.refusal()
        if refusal is not None:
            self.fatal(errors.publish_failed(command, refusal))
            self.session.kill()
            return None
        target = self.context.publishing.target_for(topic, self.number)
        if target is not None:
            if self._budget.full:
                # Who has published before is not read then. A stall must not cost memory for each who connects anew.
                self._wait_for(self._room(again, command))
                return None
            known = self._targets[topic] = target, self._publisher_to(topic, target)
            return known

        async def create() -> Callable[[], None]:
            try:
                await self.context.topics.topic_for_client(topic)
            except NsqhaError as error:
                why = str(error)
                return lambda: self._refuse(errors.publish_failed(command, why))
            return again

        self._wait_for(create())
        return None

    def _publisher_to(self, topic: str, target: Partition | PartitionPublisher) -> hot.Publisher | None:
        """What takes the PUBs of a client that has passed every check, and sends nothing else."""
        queue = target.queue
        if queue is None or self._codec is not None or self.session.checks_publish:
            return None
        line = b"PUB %b\n" % topic.encode()
        size_max = self.context.limits.msg_bytes_max
        counts, time = self.pub_counts, self._loop.time
        return hot.Publisher(line, topic, size_max, queue, self._replies, counts, time, self._wait_for_room)

    async def _room(self, then: Callable[[], None], command: str) -> Callable[[], None]:
        try:
            await self._budget.wait(self.context.options.publish_wait_ns / 1e9)
        except NsqhaError as error:
            why = f"{NOT_STORED}{error}"
            return lambda: self._refuse(errors.publish_failed(command, why))
        return then

    def _refuse(self, frame: bytes) -> None:
        self.fatal(frame)
        self.session.kill()

    def forget_targets(self) -> None:
        """A topic came, went or changed its partitions."""
        self._targets.clear()
        self._publisher = None

    def ensure_topic(self, topic: str) -> None:
        if topic in self._targets or topic in self.context.topics:
            return

        async def create() -> None:
            try:
                await self.context.topics.topic_for_client(topic)
            except NsqhaError:
                pass  # the publish that follows reports it

        self._wait_for(create())

    # ---- authorization

    def check_publish(self, command: str, topic: str) -> bool:
        permissions = self.permissions
        if not permissions.needed:
            return True
        if permissions.expired:
            self._wait_for(self._authorize_again())
            return False
        refusal = permissions.denial(command, topic)
        if refusal is not None:
            self.fatal(encoder.error(refusal))
            return False
        return True

    async def _authorize_again(self) -> Callable[[], None] | None:
        return None if await self._ask() else lambda: self._refuse(errors.AUTH_FAILED)

    async def _ask(self) -> bool:
        return await self.permissions.ask(self.remote_address, self.tls)

    def auth(self, secret: bytes) -> None:
        if self.permissions.state is not None:
            self._refuse(errors.AUTH_ALREADY_SET)
        elif not self.permissions.needed:
            self._refuse(errors.AUTH_DISABLED)
        else:
            self.permissions.secret = secret
            self._after_replies(lambda: self._wait_for(self._auth()))

    async def _auth(self) -> Callable[[], None]:
        if not await self._ask():
            return lambda: self._refuse(errors.AUTH_FAILED)
        state = self.permissions.state
        assert state is not None
        if not state.authorizations:
            return lambda: self._refuse(errors.AUTH_NOTHING_ALLOWED)
        return lambda: self.reply(encoder.response(state.reply_json()))

    # ---- consuming

    def subscribe(self, topic: str, channel: str) -> None:
        self._after_replies(lambda: self._wait_for(self._subscribe(topic, channel)))

    async def _subscribe(self, topic: str, channel: str) -> Callable[[], None] | None:
        permissions = self.permissions
        if permissions.needed:
            if permissions.expired and not await self._ask():
                return lambda: self._refuse(errors.AUTH_FAILED)
            refusal = permissions.denial("SUB", topic, channel)
            if refusal is not None:
                frame = encoder.error(refusal)
                return lambda: self._refuse(frame)
        agreed = self.agreed
        timeout_ms = agreed.msg_timeout_ms if agreed else self.context.limits.msg_timeout_default_ms
        consumer = Consumer(
            self,
            topic=topic,
            channel=channel,
            msg_timeout=timeout_ms / 1000,
            sample_rate=agreed.sample_rate if agreed else 0,
        )
        try:
            await self.context.subscriptions.subscribe(consumer)
        except NsqhaError as error:
            why = str(error)
            return lambda: self._refuse(errors.sub_failed(why))
        if self.closed:
            self.context.subscriptions.unsubscribe(consumer)
            return None
        self.consumer = consumer
        self._acks = ConsumerAcks(consumer, self.reply, self.context.now)
        return lambda: self.reply(encoder.OK)

    def ready(self, count: int) -> None:
        consumer = self.consumer
        if consumer is not None and self.session.state != CLOSING:
            consumer.ready(count)

    def fin_run(self, data: bytes, pos: int, end: int) -> None:
        assert self._acks is not None
        self._acks.fin_run(data, pos, end)

    def req(self, message_id: bytes, delay_ms: int) -> None:
        assert self._acks is not None
        self._acks.req(message_id, delay_ms)

    def touch(self, message_id: bytes) -> None:
        assert self._acks is not None
        self._acks.touch(message_id)

    def cls(self) -> None:
        if self.consumer is not None:
            self.consumer.ready(0)
        self.reply(encoder.CLOSE_WAIT)

    # ---- negotiation

    def identify(self, request: AgreedIdentify) -> None:
        self._after_replies(lambda: self._identify(request))

    def _identify(self, request: AgreedIdentify) -> None:
        agreed = request.agreed
        self.agreed = agreed
        self._heartbeat.set(agreed.heartbeat_interval_ms)
        self.send_messages(request.reply)
        if agreed.tls:
            self._wait_for(self._upgrade_tls(agreed))
        elif agreed.codec:
            self._upgrade_codec(agreed)

    async def _upgrade_tls(self, agreed: Agreed) -> Callable[[], None]:
        transport, context = self._transport, self.context.tls_context
        assert context is not None
        if transport is None or self.session.take_unread():
            return self.close  # bytes in clear behind the IDENTIFY are not part of the TLS session
        transport.pause_reading()
        try:
            upgraded = await self._loop.start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=TLS_SECONDS_MAX
            )
        except (OSError, ssl.SSLError, ConnectionError):
            transport.abort()
            # Of a handshake that failed the transport tells the TLS layer, not us.
            return lambda: self.connection_lost(None)
        assert upgraded is not None
        self._transport = upgraded
        self._write_by(upgraded.write)
        upgraded.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        self.tls = upgraded.get_extra_info("ssl_object")
        self.session.tls_required_now = False

        def then() -> None:
            self.send_messages(encoder.OK)
            if agreed.codec:
                self._upgrade_codec(agreed)

        return then

    def _upgrade_codec(self, agreed: Agreed) -> None:
        rest = self.session.take_unread()
        self.forget_targets()  # what comes now has to be decompressed first
        self._codec = new_codec(agreed.codec, agreed.deflate_level)
        self._write_by(self._send_compressed)
        self.send_messages(encoder.OK)
        if rest:
            self._decompress(rest)
