"""One port for gRPC's own server and for the streams between nodes, which the loop serves itself.

gRPC's server takes no connection that somebody else accepted. So this takes them all and looks, without reading, at
what each says first:

    the MARK of `peer_calling`, or TLS that offers STREAM_ALPN  ->  an `AcceptingEnd`, here on the loop
    anything else  ->  gRPC's server, at an address inside this host; bytes pass both ways

Nothing is decided here about who may do what: both check certificates, and both have the same.
What gRPC sees is a connection of this process, so that one is bound to a name that says who came (NAMED).

A connection that says nothing costs its descriptor, and that for LOOK_SECONDS at most. What is passed on costs three;
when the process has come to its last ones (`listen`) it is refused, and streams between nodes go on. Within this host
gRPC's server can be reached without the front door, too, as it could be through it; only a name says little then.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import sys
from contextlib import suppress
from typing import Protocol, cast

import grpc.aio

from nsqha.nsqlog import Logger
from nsqha.server.peers import renewing
from nsqha.server.peers.calls import NAMED
from nsqha.server.peers.http2 import FRAME, PREFACE, SETTING
from nsqha.server.peers.peer_calling import OPENING
from nsqha.server.peers.peer_http2 import Http2End
from nsqha.server.runtime import listen
from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.runtime.tls import STREAM_ALPN, cluster_stream_context

LOOK_SECONDS = 10.0  # until it is clear where a connection belongs
LOOKING_MAX = 64  # for that many at once; whoever says nothing longest goes first
ACCEPTED_MAX = 16  # in one turn of the loop
AGAIN_SECONDS = 0.005  # a first word that is not whole is looked at again, and after twice that, up to
AGAIN_SECONDS_MAX = 0.5
TIRED_SECONDS = 1.0  # after connections could not be accepted
HANDSHAKE_SECONDS = 10.0
HANDSHAKES_MAX = 64  # at once; the one that takes longest goes first
COMPLAINT_SECONDS = 10.0  # between one failed handshake that is told of, and the next

MARK = OPENING[: len(PREFACE) + FRAME.size + SETTING.size]
HELLO = 0x16  # the type of a TLS record with a handshake
RECORD = 5  # bytes of its head, of which the last two are the size of what follows
RECORD_BYTES_MAX = RECORD + (1 << 14)
HAS_NAMES = sys.platform == "linux"
"""Unix sockets without a file. Elsewhere gRPC's server is at a port of the loopback interface."""

logger = Logger("peers")


class Streams(Protocol):
    """Whoever serves streams: a `GrpcPeerServer`."""

    def connection(self, address: str) -> Http2End: ...


async def serve(streams: Streams, server: grpc.aio.Server, wanted: str, files: CertificateFiles | None) -> PeerListener:
    """Open the port at `wanted` (host:port), with gRPC's server behind it. Unavailable, ConfigError."""
    door = PeerListener(streams, files)
    door.open(wanted)
    try:
        inside = f"unix-abstract:nsqha-{secrets.token_hex(8)}" if HAS_NAMES else "127.0.0.1:0"
        door.begin(await renewing.listen(server, inside, files))
    except BaseException:
        await door.close()
        raise
    return door


def is_stream(said: bytes, *, tls: bool) -> bool | None:
    """Whether a connection that said this so far is for a stream; None: it has to say more."""
    if not tls:
        return None if len(said) < len(MARK) and MARK.startswith(said) else said.startswith(MARK)
    if said and said[0] != HELLO:
        return False
    whole = RECORD + int.from_bytes(said[3:RECORD], "big")
    if len(said) < RECORD or len(said) < min(whole, RECORD_BYTES_MAX):
        return None
    # As it stands in the ClientHello. It takes no parser to find what nobody says by chance, and whoever does say it
    # gets a handshake in which nothing else can be agreed on.
    name = STREAM_ALPN.encode()
    return bytes((len(name),)) + name in said[:whole]


class PeerListener:
    """The port: `open` it, `begin` to let people in, `close` it."""

    def __init__(self, streams: Streams, files: CertificateFiles | None) -> None:
        self.address = ""
        self._streams = streams
        self._files = files
        self._context: tuple[int, ssl.SSLContext] | None = None  # of a generation of the files
        self._loop = asyncio.get_running_loop()
        self._inside = ""
        self._socket: socket.socket | None = None
        self._resting: asyncio.TimerHandle | None = None  # after connections could not be accepted
        self._looking: dict[socket.socket, asyncio.TimerHandle] = {}  # that long; the first came first
        self._welcoming: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], None] = {}  # those of them that go on; the first came first
        self._passing: set[_Side] = set()
        self._complaint = 0.0  # not before
        self._untold = 0  # connections since

    def open(self, wanted: str) -> None:
        """Listen at host:port, so that `address` is known. Who comes waits. ConfigError."""
        self._socket = listen.listen(wanted, flag="grpc-address")
        self.address = f"{wanted.rpartition(':')[0]}:{listen.bound_port(self._socket)}"

    def begin(self, inside: str) -> None:
        """gRPC's server listens at `inside`."""
        assert self._socket is not None
        self._inside = inside
        self._loop.add_reader(self._socket, self._accept, self._socket)

    async def close(self) -> None:
        """Take nobody, and end what passes. Streams are their owner's to end."""
        if self._resting is not None:
            self._resting.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for sock in list(self._looking):
            self._give_up(sock)
        for task in self._welcoming:
            task.cancel()
        await asyncio.gather(*self._welcoming, return_exceptions=True)
        for side in list(self._passing):
            side.abort()

    # ---- who comes

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("accept", "a connection could not be accepted: %s", error)
                self._loop.remove_reader(listener)
                self._resting = self._loop.call_later(
                    TIRED_SECONDS, self._loop.add_reader, listener, self._accept, listener
                )
                return
            sock.setblocking(False)
            if len(self._looking) >= LOOKING_MAX:
                self._make_room(next(iter(self._looking)))
            self._looking[sock] = self._loop.call_later(LOOK_SECONDS, self._give_up, sock)
            self._wait_for_more(sock, Backoff(AGAIN_SECONDS, AGAIN_SECONDS_MAX))

    def _wait_for_more(self, sock: socket.socket, again: Backoff) -> None:
        if sock in self._looking:
            self._loop.add_reader(sock, self._look, sock, again)

    def _look(self, sock: socket.socket, again: Backoff) -> None:
        self._loop.remove_reader(sock)
        try:
            said = sock.recv(RECORD_BYTES_MAX, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._wait_for_more(sock, again)
            return
        except OSError:
            said = b""
        if not said:
            self._give_up(sock)
            return
        stream = is_stream(said, tls=self._files is not None)
        if stream is None:
            # It stays readable, so waiting for the socket would be a busy loop.
            self._loop.call_later(again.next_pause(), self._wait_for_more, sock, again)
            return
        self._forget(sock)
        task = self._loop.create_task(self._welcome(sock, stream))
        self._welcoming.add(task)
        task.add_done_callback(lambda task: self._welcomed(task, sock))
        if stream and self._files is not None:
            if len(self._handshakes) >= HANDSHAKES_MAX:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            self._handshakes[task] = None

    def _welcomed(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._welcoming.discard(task)
        self._handshakes.pop(task, None)
        if task.cancelled():
            sock.close()

    def _make_room(self, oldest: socket.socket) -> None:
        """Whoever says nothing longest goes; what it said just now counts."""
        self._look(oldest, Backoff(AGAIN_SECONDS_MAX, AGAIN_SECONDS_MAX))
        if oldest in self._looking:
            self._give_up(oldest)

    def _give_up(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        timer = self._looking.pop(sock, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(sock)

    async def _welcome(self, sock: socket.socket, stream: bool) -> None:
        name = "?"
        try:
            name = listen.address_text(sock.getpeername())
            if stream:
                await self._serve(sock, name)
            elif listen.is_spare(sock.fileno()):
                raise OSError("too few file descriptors are left")
            else:
                await self._pass_on(sock, name)
        except Exception as error:
            sock.close()
            self._complain(name, error)

    def _complain(self, name: str, error: Exception) -> None:
        if self._loop.time() < self._complaint:
            self._untold += 1
            return
        self._complaint = self._loop.time() + COMPLAINT_SECONDS
        what = str(error) or type(error).__name__
        more = f"; {self._untold} more since the last word of it" if self._untold else ""
        self._untold = 0
        logger.warning("connection", "a connection from %s came to nothing: %s%s", name, what, more)

    async def _serve(self, sock: socket.socket, name: str) -> None:
        context = self._tls()
        end = self._streams.connection(name)
        try:
            await self._loop.connect_accepted_socket(
                lambda: end, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS if context else None
            )
        except BaseException:
            end.close("no connection")
            raise

    def _tls(self) -> ssl.SSLContext | None:
        if self._files is None:
            return None
        generation = self._files.generation
        if self._context is None or self._context[0] != generation:
            self._context = (generation, cluster_stream_context(self._files.tls))
        return self._context[1]

    # ---- on to gRPC

    async def _pass_on(self, sock: socket.socket, name: str) -> None:
        within, without = _Side(self._passing), _Side(self._passing)
        within.other, without.other = without, within
        try:
            if HAS_NAMES:
                await self._connect_by_name(sock, name, within)
            else:
                await self._loop.create_connection(lambda: within, *listen.split_host_port(self._inside))
            await self._loop.connect_accepted_socket(lambda: without, sock)
        except BaseException:
            # uvloop tells nobody of the end of what had not begun.
            for side in (within, without):
                side.abort()
                self._passing.discard(side)
            raise

    async def _connect_by_name(self, sock: socket.socket, name: str, within: _Side) -> None:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            with suppress(OSError):  # somebody else has that name: it stays nameless
                inner.bind(f"\0{NAMED}{name} {listen.address_text(sock.getsockname())}")
            await self._loop.sock_connect(inner, "\0" + self._inside.partition(":")[2])
            await self._loop.create_unix_connection(lambda: within, sock=inner)
        except BaseException:
            inner.close()
            raise


class _Side(asyncio.Protocol):
    """One of two connections: what comes here goes out there, no faster than it is taken there.

    With its end both end: HTTP/2 has no use for half a connection, and a stranger could keep one for ever.
    """

    other: _Side

    def __init__(self, everyone: set[_Side]) -> None:
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._early = b""  # what came before the other one was there; gRPC's server says who it is

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._everyone.add(self)
        if self.other._lost:
            self._transport.abort()
        else:
            self._transport.write(self.other._early)

    def data_received(self, data: bytes) -> None:
        if self.other._transport is not None:
            self.other._transport.write(data)
        elif not self.other._lost:
            self._early += data

    def pause_writing(self) -> None:
        if self.other._transport is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other._transport is not None:
            self.other._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost = True
        self._everyone.discard(self)
        if self.other._transport is not None:
            self.other._transport.close()
