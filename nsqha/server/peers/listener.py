"""The peer port: connections for streams between nodes, which the loop of the process serves itself.

    accept -> TLS handshake, if there is TLS -> a `ServerStream`, which reads HTTP/2 and serves one stream of gRPC

Any gRPC client may connect. Who it is decides the certificate that it shows in the handshake, and what it may ask is
decided where the stream is accepted (`nsqha.server.peers.identity`). A connection that has not named a method yet, its
handshake included, counts against a bound (`nsqha.server.peers.calls`): when a newer one takes its place, it ends here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import nullcontext
from typing import Protocol

from nsqha.errors import Unavailable
from nsqha.nsqlog import Logger
from nsqha.server.peers.http2_stream import Http2Stream
from nsqha.server.runtime import listen
from nsqha.server.runtime.budget import SharedTurns
from nsqha.server.runtime.certificates import CertificateFiles
from nsqha.server.runtime.rare_warnings import RareWarnings
from nsqha.server.runtime.tasks import TaskGroup
from nsqha.server.runtime.tls import Handshake, cluster_stream_context, why

ACCEPTED_MAX = 16  # connections in one turn of the loop
CONNECTION_SECONDS = 0.0003  # what one takes of the loop until it is read
ACCEPT_PAUSE_SECONDS = 1.0  # after connections could not be accepted
HANDSHAKE_SECONDS = 10.0

logger = Logger("peers")


class Streams(Protocol):
    """The owner of the streams: a `GrpcPeerServer`."""

    def connection(self, address: str) -> Http2Stream: ...


class PeerListener:
    """The listening socket of the peer port, and connections whose handshake is under way."""

    def __init__(
        self,
        streams: Streams,
        sock: socket.socket,
        files: CertificateFiles | None,
        turns: SharedTurns | None = None,
    ) -> None:
        """`sock` is bound and listens already; clients wait until `start`. `turns`: shared with other ports."""
        self._streams = streams
        self._socket = sock
        self._files = files
        self._context: tuple[int, ssl.SSLContext] | None = None  # of a generation of the files
        self._loop = asyncio.get_running_loop()
        self._turns = turns or SharedTurns(self._loop)
        self._pause: asyncio.TimerHandle | None = None  # after connections could not be accepted
        self._connecting = TaskGroup(self._loop)
        self._failed = RareWarnings(logger, "connection")

    def start(self) -> None:
        """Accept connections."""
        self._loop.add_reader(self._socket, self._accept)
        logger.info("listening", "peers: listening on %s", listen.bound_address(self._socket), address="peers")

    async def close(self) -> None:
        """Accept no more, and end handshakes. Streams are ended by their owner."""
        if self._pause is not None:
            self._pause.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        await self._connecting.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                sock, name = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("accept", "a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(
                    ACCEPT_PAUSE_SECONDS, self._loop.add_reader, self._socket, self._accept
                )
                return
            if listen.is_spare(sock.fileno()):
                sock.close()
                self._complain(listen.address_text(name), Unavailable("this node has no file descriptors to spare"))
                continue
            sock.setblocking(False)
            # Nodes that come back wait for nobody, as they give up after a second; others have less of this turn.
            self._turns.charge(CONNECTION_SECONDS)
            task = self._connecting.spawn(self._connect(sock))
            task.add_done_callback(lambda task, sock=sock: self._connected(task, sock))  # type: ignore[misc]

    def _connected(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        if task.cancelled():
            sock.close()

    async def _connect(self, sock: socket.socket) -> None:
        address, handshake = "?", None
        try:
            address = listen.address_text(sock.getpeername())
            context, handshake = self._tls(), Handshake(address, sock)
            stream = self._streams.connection(address)
            task = asyncio.current_task()
            assert task is not None
            # Another one takes its place; ignored after the end.
            stream.messages.over.add_done_callback(lambda _: task.cancel())
            try:
                with handshake if context else nullcontext():
                    await self._loop.connect_accepted_socket(
                        lambda: stream, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS if context else None
                    )
            except BaseException:
                stream.close("no connection")
                raise
        except Exception as error:
            sock.close()
            self._complain(address, error if handshake is None else handshake.error or error)

    def _complain(self, address: str, error: Exception) -> None:
        self._failed.warning(
            "a connection from %s failed: %s", address, why(error) if isinstance(error, OSError) else error
        )

    def _tls(self) -> ssl.SSLContext | None:
        """The context for the newest certificates; None: there is no TLS."""
        if self._files is None:
            return None
        generation = self._files.generation
        if self._context is None or self._context[0] != generation:
            self._context = (generation, cluster_stream_context(self._files.tls))
        return self._context[1]
