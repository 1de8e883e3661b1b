"""The lookup daemon's TCP side: one asyncio protocol per connection around a `lookup_v1.LookupSession`.

A connection that completes no command for SILENCE_S, or for the inactive timeout if that is longer, is closed: nsqd
pings every 15 s, and a producer that is silent for the inactive timeout is hidden anyway. Bytes that make no command do
not count, so sending single bytes does not help. One sweep checks all connections; an idle one costs no timer. The
daemon stops reading from a peer that does not read its replies, and that peer then counts as silent. A peer that sends
many commands at once does not block other connections. The last descriptors of the process are not for connections
(`listen.is_spare`), so HTTP answers however many there are.

With an access file, who may register:

    --register-from-cidr      its address is enough: nsqd of NSQ has nothing to show
    anonymous = ["broker"]    the same for every address
    AUTH with a token         role `broker`
    AUTH with a proof         of the cluster's secret, for the nonce in the answer to IDENTIFY; the secret is not sent

The answer to IDENTIFY says `auth_required`, and has the nonce where the daemon knows a cluster's secret. nsqd ignores
both, and is refused at its first REGISTER. A proof holds for one connection and for what the peer sent with IDENTIFY,
so where it was overheard it registers no other address.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import cast

import msgspec

from lookupd.lookup_v1 import LookupSession, NotAdmitted
from lookupd.registry import Registry
from nsqha import NSQ_VERSION
from nsqha.access.roles import Grant
from nsqha.access.surfaces import LOOKUP_V1
from nsqha.clock import Clock, read
from nsqha.cluster_secret import ClusterSecret, is_lookup_proof, lookup_proved, new_nonce
from nsqha.nsqlog import Logger
from nsqha.options import Network, among
from nsqha.server.authorization.guard import FORBIDDEN, UNAUTHORIZED, Denied, Guard
from nsqha.server.runtime.listen import Acceptor, address_text, too_many_files
from nsqha.server.runtime.rare_warnings import RareWarnings

SILENCE_S = 60.0
SWEEP_S = 5.0
NEED = LOOKUP_V1["REGISTER"]
CLUSTER_SECRET = "cluster secret"
LINGER_S = 1.0
"""How long a refused peer's further bytes are read and dropped, so that it gets the reason and not a reset."""


def identity(*, broadcast_address: str, hostname: str, http_port: int, tcp_port: int) -> bytes:
    """The reply to IDENTIFY."""
    return msgspec.json.encode(
        {
            "broadcast_address": broadcast_address,
            "hostname": hostname,
            "http_port": http_port,
            "tcp_port": tcp_port,
            "version": NSQ_VERSION,
        }
    )


class TcpServer:
    """Accepts on one socket; every connection registers its producers in `registry`."""

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        logger: Logger,
        *,
        silence_s: float,
        admissions: Admissions | None = None,
    ) -> None:
        """`admissions`: who may register; None: everybody."""
        self._admissions = admissions
        self.registry = registry
        self.clock = clock
        self.logger = logger
        self.identity = b""
        self.connections: set[LookupConnection] = set()
        self.refused = RareWarnings(logger, "too_many_files")
        self._silent = RareWarnings(logger, "lookup_silent")
        self._silence_s = max(silence_s, SILENCE_S)
        self._peers = 0
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, sock: socket.socket, identity: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.identity = identity
        self._acceptor = Acceptor(sock, lambda: LookupConnection(self))
        await self._acceptor.start()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in list(self.connections):
            connection.close()

    def judge_again(self) -> None:
        """The access file has changed: whoever may not register any more is dropped."""
        for connection in list(self.connections):
            connection.judge_again()

    def session(self, peer_id: str) -> LookupSession:
        """The session of a new connection."""
        admission = None if self._admissions is None else self._admissions.of(peer_id)
        return LookupSession(self.registry, peer_id, self.identity, self.logger.info, admission)

    def peer_id(self, transport: asyncio.Transport) -> str:
        """The remote address; peers on a unix socket have none, and get a number."""
        name = transport.get_extra_info("peername")
        self._peers += 1
        return address_text(name) if isinstance(name, tuple) else f"unix:{self._peers}"

    def _sweep(self) -> None:
        now = self.clock.monotonic()
        for connection in list(self.connections):
            limit = self._silence_s if connection.session.identified else SILENCE_S
            if now - connection.heard > limit:
                self._silent.warning("CLIENT(%s): silent for %.0f s, closing", connection.peer_id, limit)
                connection.close()
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class LookupConnection(asyncio.Protocol):
    """Bytes between a socket and its session."""

    def __init__(self, server: TcpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self.peer_id = ""
        self.heard = server.clock.monotonic()
        self.session: LookupSession
        self._refused = False
        self._ended = False  # the peer sends no more
        self._stuffed = False  # it does not read its replies
        self._resting = False  # others have their turn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self._server
        opened = cast(asyncio.Transport, transport)  # uvloop's is one only by its methods
        self.peer_id = server.peer_id(opened)
        self.session = server.session(self.peer_id)
        if too_many_files(opened):
            server.refused.warning("CLIENT(%s): refused, as no file descriptors are left to spare", self.peer_id)
            opened.abort()
            return
        self._transport = opened
        server.connections.add(self)
        server.logger.info("lookup_client", "TCP: new client(%s)", self.peer_id, client=self.peer_id)

    def data_received(self, data: bytes) -> None:
        if not self._refused and self._transport is not None:
            self._run(self._transport, data)

    def _go_on(self) -> None:
        """Process bytes that were received before, unless the peer has to read its replies first."""
        self._resting = False
        if not self._refused and not self._stuffed and self._transport is not None:
            self._transport.resume_reading()
            self._run(self._transport, b"")

    def _run(self, transport: asyncio.Transport, data: bytes) -> None:
        now = read(self._server.clock)
        if replies := self.session.receive(data, now):
            self.heard = now.mono
            transport.write(replies)
        if self.session.closed:
            self._refuse(transport)
        elif self.session.more:
            transport.pause_reading()
            if not self._resting:
                self._resting = True
                asyncio.get_running_loop().call_soon(self._go_on)
        elif self._ended:
            self._end(transport)

    def judge_again(self) -> None:
        """The access file has changed."""
        if self._transport is not None and not self._refused and (error := self.session.judge_again()):
            self._transport.write(error)
            self._refuse(self._transport)

    def eof_received(self) -> bool:
        self._ended = True
        if self._transport is not None and not self._refused and not self.session.more:
            self._end(self._transport)
        return self.session.more

    def _end(self, transport: asyncio.Transport) -> None:
        if reply := self.session.eof():
            transport.write(reply)
        transport.close()

    def pause_writing(self) -> None:
        self._stuffed = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stuffed = False
        if not self._resting:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.session.leave()
        if self not in self._server.connections:
            return  # refused
        self._server.connections.discard(self)
        self._server.logger.info("lookup_client_gone", "CLIENT(%s): closing", self.peer_id, client=self.peer_id)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _refuse(self, transport: asyncio.Transport) -> None:
        # Closing with unread bytes in the kernel would reset the connection, and the peer would lose the reason.
        self._refused = True
        transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.close)


# ---- who may register


class Admissions:
    """The rules of one daemon."""

    def __init__(
        self,
        guard: Guard,
        networks: Iterable[Network],
        secret: ClusterSecret | None,
    ) -> None:
        """`networks`: from where a peer may register without AUTH."""
        self.guard = guard
        self.networks = tuple(networks)
        self.secret = secret

    def of(self, address: str) -> PeerAdmission:
        """The admission of the peer at `host:port`."""
        return PeerAdmission(self, address)


class PeerAdmission:
    """One connection: implements `lookup_v1.Admission`."""

    def __init__(self, rules: Admissions, address: str) -> None:
        self._rules = rules
        self._address = address
        self._near = among(address.rpartition(":")[0], rules.networks)
        self._nonce = b""
        self._token: bytes | None = None  # it was admitted by
        self._proved = False

    @property
    def open(self) -> bool:
        return self._near or self._rules.guard.table.anonymous.may(NEED)

    def greeting(self, identity: bytes) -> bytes:
        said: dict[str, object] = {**msgspec.json.decode(identity), "auth_required": True}
        if self._rules.secret is not None:
            self._nonce = new_nonce()
            said["nonce"] = self._nonce.hex()
        return msgspec.json.encode(said)

    def admit(self, secret: bytes, digest: bytes) -> bytes:
        guard = self._rules.guard
        try:
            if is_lookup_proof(secret):
                who = self._prove(secret, digest)
            else:
                grant = guard.token(secret, self._address).grant
                guard.check(NEED, grant, self._address)
                self._token, who = secret, grant.who
        except Denied as denied:
            code = "E_UNAUTHORIZED" if denied.status == FORBIDDEN else "E_AUTH_FAILED"
            raise NotAdmitted(f"{code} AUTH failed") from None
        return msgspec.json.encode({"identity": who, "identity_url": "", "permission_count": 1})

    def _prove(self, secret: bytes, digest: bytes) -> str:
        known, nonce = self._rules.secret, self._nonce
        self._nonce = b""  # one try
        if known is None or not nonce or not lookup_proved(known, secret, nonce, digest):
            why = "its cluster secret is not that of this daemon: compare the files of --cluster-secret-file"
            raise self._rules.guard.denied(UNAUTHORIZED, self._address, why)
        self._proved = True
        return CLUSTER_SECRET

    def still(self) -> bool:
        if self._proved or self.open:
            return True
        grant = None if self._token is None else self._granted(self._token)
        return grant is not None and grant.may(NEED)

    def _granted(self, token: bytes) -> Grant | None:
        guard = self._rules.guard
        found = guard.table.find(token)
        return None if found is None or found.expired(guard.file.seconds) else found.grant
