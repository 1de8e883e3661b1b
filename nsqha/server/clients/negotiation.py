"""IDENTIFY and AUTH: what client and server agree on, TLS and compression from there on, and who the client is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nsqha.wire import encoder, errors
from nsqha.wire.compression import new_codec

if TYPE_CHECKING:
    from nsqha.server.clients.auth import Permissions
    from nsqha.server.clients.context import ClientContext
    from nsqha.server.clients.flow import CommandFlow
    from nsqha.server.clients.heartbeat import Heartbeat
    from nsqha.server.clients.transport import ClientTransport, Write
    from nsqha.wire.identify import Agreed, AgreedIdentify


class NegotiatingClient(Protocol):
    """The connection, as far as its bytes change their form."""

    def write_by(self, write: Write) -> None:
        """Send everything this way from now on."""

    def compressed(self, rest: bytes) -> None:
        """What comes from now on is compressed, and `rest` of it is here already."""

    def close(self) -> None:
        """Drop the connection once what was written has left."""

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is gone."""


class Negotiation:
    """What one client and the server agreed on: implements `wire.handler.NegotiationHandler`."""

    __slots__ = ("_client", "_context", "_flow", "_heartbeat", "_transport", "agreed", "permissions")

    def __init__(
        self,
        client: NegotiatingClient,
        context: ClientContext,
        flow: CommandFlow,
        transport: ClientTransport,
        permissions: Permissions,
        heartbeat: Heartbeat,
    ) -> None:
        self.agreed: Agreed | None = None  # None: no IDENTIFY yet
        self.permissions = permissions
        self._client = client
        self._context = context
        self._flow = flow
        self._transport = transport
        self._heartbeat = heartbeat

    def identify(self, request: AgreedIdentify) -> None:
        self._flow.after_replies(lambda: self._identify(request))

    def _identify(self, request: AgreedIdentify) -> None:
        agreed = request.agreed
        self.agreed = agreed
        self._heartbeat.set(agreed.heartbeat_interval_ms)
        self._flow.replies.write(request.reply)
        if agreed.tls:
            self._flow.wait_for(self._upgrade_tls(agreed))
        elif agreed.codec:
            self._upgrade_codec(agreed)

    async def _upgrade_tls(self, agreed: Agreed) -> Callable[[], None]:
        client, session, context = self._client, self._flow.session, self._context.tls_context
        assert context is not None
        if not self._transport.connected or session.unread.take():
            return client.close  # bytes in clear behind the IDENTIFY are not part of the TLS session
        write = await self._transport.start_tls(context, self._context.tls_refused)
        if write is None:
            # Of a handshake that failed the transport informs the TLS layer, not the connection.
            return lambda: client.connection_lost(None)
        client.write_by(write)
        session.tls_required_now = False

        def then() -> None:
            self._flow.replies.write(encoder.OK)
            if agreed.codec:
                self._upgrade_codec(agreed)

        return then

    def _upgrade_codec(self, agreed: Agreed) -> None:
        rest = self._flow.session.unread.take()
        self._client.write_by(self._transport.compress(new_codec(agreed.codec, agreed.deflate_level)))
        self._flow.replies.write(encoder.OK)
        self._client.compressed(rest)

    def auth(self, secret: bytes) -> None:
        permissions, flow = self.permissions, self._flow
        if permissions.state is not None:
            flow.refuse(errors.AUTH_ALREADY_SET)
        elif not permissions.needed:
            flow.refuse(errors.AUTH_DISABLED)
        else:
            permissions.secret = secret
            flow.after_replies(lambda: flow.wait_for(self._auth()))

    async def _auth(self) -> Callable[[], None]:
        flow = self._flow
        if not await self.permissions.ask():
            return lambda: flow.refuse(errors.AUTH_FAILED)
        state = self.permissions.state
        assert state is not None
        if not state.authorizations:
            return lambda: flow.refuse(errors.AUTH_NOTHING_ALLOWED)
        return lambda: flow.replies.reply(encoder.response(state.reply_json()))
