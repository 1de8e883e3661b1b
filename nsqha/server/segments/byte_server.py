"""Bytes of the log over HTTP/1.1, in threads of their own: docs/segments.md has the protocol.

    listener --watcher thread--> connections, each with a thread (`ReaderLimits.connections`)
        TLS handshake -> request head -> [turn: parse, look-up on the loop, plan] -> entries, frames -> next request

The loop is asked once per request, for values that do not change any more (`ranges.found`); files are opened and read
in the connection's thread, and a refusal there concerns only its reader.

Threads share the interpreter with the loop. The loop waits behind every thread that wants to run Python, so 64 threads
would stop it although each does little. `Turns` lets one request at a time be parsed, looked up and planned, in the
order in which they came; a thread that waits for a turn, a file or the network does not keep others from running.

Unknown readers: there are at most `ReaderLimits.connections` connections. One more takes the place of the slowest one
that takes less than `slow_bytes_per_second` of what is ready for it, or else of the one that has waited longest for a
request; else it gets 503. A malformed request ends its connection; a peer whose certificate may not
read is refused before its request is parsed, one whose token may not before anything is looked up. The watcher shuts
connections down at their deadline: a head that does not arrive, a reader that takes nothing. Sockets block without a
timeout of their own, so that one rule covers handshakes, heads, TLS and sendfile. A request head has at most
HEAD_BYTES_MAX, requests have no body, and no number in a request decides how much memory is allocated.
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, TypeVar

from nsqha.access.surfaces import SEGMENT_BYTES
from nsqha.nsqlog import Logger
from nsqha.server.authorization.guard import Denied
from nsqha.server.http.stats import SegmentStats
from nsqha.server.peers.api import READER_URI, PeerIdentity
from nsqha.server.runtime import listen
from nsqha.server.runtime.tls import cluster_reader_context, why
from nsqha.server.segments.heads import HEAD_BYTES_MAX, Head
from nsqha.server.segments.ranges import Answer, Ask, LocatedRange, Refusal, chain_at, check_chain, found, planned
from nsqha.server.segments.sending import FileShortened, ReadingPace, Sender, opened, read_once
from nsqha.server.segments.turns import RETRY_AFTER_SECONDS, Turn, Turns, busy

if TYPE_CHECKING:
    from nsqha.server.authorization.guard import Guard
    from nsqha.server.runtime.certificates import CertificateFiles
    from nsqha.server.segments.log_source import LogSource

WATCH_SECONDS = 0.5
PROGRESS_SECONDS = 5  # a blocking send of which the reader takes nothing returns after this time
LOOK_UP_SECONDS = 5.0
SAY_SECONDS = 10.0  # between two log lines about refused readers
STOP_SECONDS = 1.0
ENDING = frozenset({400, 401, 403, 404, 429, 503})  # end the connection: a correct reader gets none of them twice

logger = Logger("segments")

T = TypeVar("T")

LookUp = Callable[[Ask, PeerIdentity], LocatedRange]
Admit = Callable[[PeerIdentity], None]
Allow = Callable[[PeerIdentity, str | None], None]


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """How many readers one node serves, and how long it waits for them."""

    connections: int = 64
    head_seconds: float = 10.0  # for the TLS handshake, and for a request's head from its first byte on
    idle_seconds: float = 30.0  # between two requests
    stalled_seconds: float = 60.0  # a reader that takes nothing
    slow_bytes_per_second: int = 64 << 10  # a reader that takes less over `sending.PACE_SECONDS` may lose its place
    answer_seconds: float = 900.0  # for a whole answer, also if the reader takes a byte from time to time


class LoopQuestions:
    """What threads of connections ask the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, look_up: LookUp, admit: Admit, allow: Allow | None = None
    ) -> None:
        self._loop = loop
        self._look_up = look_up
        self._admit = admit
        self._allow = allow

    def where(self, ask: Ask, peer: PeerIdentity, authorization: str | None = None) -> LocatedRange:
        """`allow`, then `look_up`, on the loop. Refusal."""

        def work() -> LocatedRange:
            if self._allow is not None:
                self._allow(peer, authorization)
            return self._look_up(ask, peer)

        return self._on_loop(work)

    def admitted(self, peer: PeerIdentity) -> None:
        """`admit`, on the loop. Refusal."""
        self._on_loop(lambda: self._admit(peer))

    def _on_loop(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
            return future.result(LOOK_UP_SECONDS)
        except (FutureTimeout, RuntimeError):
            future.cancel()
            raise busy("this node is too busy or is stopping; take another replica") from None


class ReaderContexts:
    """The TLS context for the next handshake."""

    def __init__(self, certificates: CertificateFiles | None) -> None:
        self._certificates = certificates
        self._context: tuple[int, ssl.SSLContext] | None = None  # with the generation of its files
        self._lock = threading.Lock()

    @property
    def tls(self) -> bool:
        return self._certificates is not None

    def newest(self) -> ssl.SSLContext | None:
        """The context for the next handshake, with the newest certificates; None: no TLS."""
        files = self._certificates
        if files is None:
            return None
        with self._lock:
            if self._context is None or self._context[0] != files.generation:
                self._context = (files.generation, cluster_reader_context(files.tls))
            return self._context[1]


class ReaderCounts:
    """What was served and refused; for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._requests: Counter[str] = Counter()
        self._said = float("-inf")

    def stats(self, connections: int) -> SegmentStats:
        with self._lock:
            requests = tuple(sorted(self._requests.items()))
            return SegmentStats(bytes=self._bytes, requests=requests, connections=connections)

    def served(self, n: int) -> None:
        """Count `n` bytes that were sent."""
        with self._lock:
            self._bytes += n

    def answered(self, status: int) -> None:
        """Count one answered request."""
        with self._lock:
            self._requests[str(status)] += 1

    def stranger(self, who: str, why: str) -> None:
        """Log a refused reader, unless another one was logged within SAY_SECONDS."""
        if self._may_log():
            logger.warning("reader_refused", "%s: %s", who, why)

    def replaced(self, who: str, why: str) -> None:
        """Log a slow reader that lost its place, unless another one was logged within SAY_SECONDS."""
        if self._may_log():
            logger.warning("slow_reader_replaced", "%s: %s", who, why)

    def _may_log(self) -> bool:
        now = time.monotonic()
        with self._lock:
            silent = now < self._said + SAY_SECONDS
            self._said = self._said if silent else now
        return not silent


class ByteServer:
    """Owns the listener, the watcher thread and the connections."""

    def __init__(
        self,
        sock: socket.socket,
        look_up: LookUp,
        loop: asyncio.AbstractEventLoop,
        *,
        admit: Admit = lambda peer: None,
        allow: Allow | None = None,
        certificates: CertificateFiles | None = None,
        limits: ReaderLimits | None = None,
    ) -> None:
        """`sock` already listens. `look_up` and `allow` (for each request, with its `Authorization`) and `admit` (for
        each certificate) are called on the loop and may raise Refusal."""
        self.limits = limits or ReaderLimits()
        self.address = listen.bound_address(sock)
        self._listener = sock
        self.turns = Turns()
        self.asks = LoopQuestions(loop, look_up, admit, allow)
        self.counts = ReaderCounts()
        self.contexts = ReaderContexts(certificates)
        self._lock = threading.Lock()
        self._connections: set[ReaderConnection] = set()
        self._parting: list[tuple[float, socket.socket]] = []
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._watcher = threading.Thread(target=self._watch, name="segments", daemon=True)

    @classmethod
    def of(
        cls,
        source: LogSource,
        sock: socket.socket,
        certificates: CertificateFiles | None,
        renewed: Callable[[int], None] = lambda hold: None,
        guard: Guard | None = None,
    ) -> ByteServer:
        """The byte server of a node. `renewed` is called on the loop with the hold of each request that is answered.
        With `guard` a reader may show a token instead of a certificate that may read."""

        def admit(peer: PeerIdentity) -> None:
            if guard is None and not source.may_read(peer):
                raise Refusal(403, f"the certificate of {peer} is not a reader's ({READER_URI}) or an administrator's")

        def allow(peer: PeerIdentity, authorization: str | None) -> None:
            admit(peer)  # again: a connection may live longer than a node's membership
            if guard is None or (authorization is None and peer.verified and source.may_read(peer)):
                return
            try:
                guard.allow(SEGMENT_BYTES, peer.address, authorization)
            except Denied as denied:
                raise Refusal(denied.status, denied.why) from None

        def look_up(ask: Ask, peer: PeerIdentity) -> LocatedRange:
            where = found(source, ask)
            if ask.hold:
                renewed(ask.hold)
            return where

        return cls(sock, look_up, source.loop, admit=admit, allow=allow, certificates=certificates)

    def start(self) -> None:
        """Start to serve."""
        self._watcher.start()
        logger.info("segments_listening", "segments: listening on %s", self.address, address="segments")

    async def close(self) -> None:
        """Close the listener and all connections; a thread may outlive it only while it waits for a disk."""
        self._stopping = True
        self._wake.send(b"x")
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        until = time.monotonic() + STOP_SECONDS
        self._watcher.join(STOP_SECONDS)
        for connection in self._now():
            connection.thread.join(max(0.0, until - time.monotonic()))
        self._wake.close()
        self._woken.close()

    @property
    def figures(self) -> SegmentStats:
        """The counters for /stats; may be read from any thread."""
        return self.counts.stats(len(self._now()))

    def ended(self, connection: ReaderConnection) -> None:
        """Forget a connection whose thread ends."""
        with self._lock:
            self._connections.discard(connection)

    # ---- the watcher

    def _now(self) -> list[ReaderConnection]:
        with self._lock:
            return list(self._connections)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while not self._stopping:
            # Of connections it has to see when their time is over; without one it sleeps until the next comes.
            ready = poll.poll(WATCH_SECONDS * 1000 if self._parting or self._now() else None)
            try:
                if any(fd == self._listener.fileno() for fd, _ in ready) and not self._stopping:
                    self._accept()
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is free: try again later
                self.counts.stranger("a reader", f"cannot be accepted: {listen.reason(error)}")
                poll.unregister(self._listener)
                poll.poll(WATCH_SECONDS * 1000)
                poll.register(self._listener, select.POLLIN)
            now = time.monotonic()
            for connection in self._now():
                if now > connection.deadline:
                    connection.shut()
            self._part(now)
        self._listener.close()
        for connection in self._now():
            connection.shut()
        self._part(float("inf"))

    def _accept(self) -> None:
        try:
            sock, name = self._listener.accept()
        except BlockingIOError:
            return  # the peer has already closed it
        address = listen.address_text(name)
        there = self._now()
        if listen.is_spare(sock.fileno()):
            self._refuse(sock, address, "this node has no file descriptors to spare")
            return
        staying = [connection for connection in there if not connection.ending]
        if len(staying) >= self.limits.connections:
            leaving = replaceable(staying, self.limits.slow_bytes_per_second)
            if leaving is None or len(there) >= 2 * self.limits.connections:
                self._refuse(sock, address, f"{len(there)} readers are connected, and all are being served")
                return
            if leaving.waiting_since is None:
                text = f"took less than {self.limits.slow_bytes_per_second} bytes a second; {address} has its place now"
                self.counts.replaced(leaving.address, text)
            leaving.shut()
        connection = ReaderConnection(self, sock, address)
        with self._lock:
            self._connections.add(connection)
        try:
            connection.thread.start()
        except RuntimeError:
            self.ended(connection)
            sock.close()
            raise

    def _refuse(self, sock: socket.socket, address: str, why: str) -> None:
        """Answer 503 and close later: closing at once could discard the answer before the reader has it."""
        self.counts.stranger(address, why)
        self.counts.answered(503)
        sock.setblocking(False)
        with suppress(OSError):
            if not self.contexts.tls:
                text = f"{why}\n".encode()
                head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_SECONDS}\r\n"
                head += f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
                sock.send(head.encode() + text)
                sock.shutdown(socket.SHUT_WR)
                if len(self._parting) < self.limits.connections:
                    self._parting.append((time.monotonic() + STOP_SECONDS, sock))
                    return
        sock.close()

    def _part(self, now: float) -> None:
        for until, sock in [*self._parting]:
            if now > until:
                with suppress(OSError):
                    sock.recv(HEAD_BYTES_MAX)
                sock.close()
                self._parting.remove((until, sock))


def replaceable(connections: Iterable[ReaderConnection], slow: float) -> ReaderConnection | None:
    """The connection that ends where all places are taken: the slowest one that is served and takes less than `slow`
    bytes a second, or else the one that has waited longest for a request. None: all are being served well."""
    waiting: dict[ReaderConnection, float] = {}
    paces: dict[ReaderConnection, float] = {}
    for connection in connections:
        since, pace = connection.waiting_since, connection.pace
        if since is not None:
            waiting[connection] = since
        elif pace is not None and (taken := pace.bytes_per_second) is not None and taken < slow:
            paces[connection] = taken
    worst = paces or waiting
    return min(worst, key=worst.__getitem__) if worst else None


@dataclass(eq=False)
class ReaderConnection:
    """One reader, and the thread that serves it."""

    server: ByteServer
    sock: socket.socket
    address: str
    deadline: float = field(init=False)  # monotonic; the watcher shuts it down after that
    ends_at: float = field(init=False)  # the deadline of the whole answer
    waiting_since: float | None = field(init=False)  # for a handshake or a request; None: it is being served
    peer: PeerIdentity = field(init=False)
    pace: ReadingPace | None = None  # None: it has asked for nothing yet
    ending: bool = False  # it was shut down, and its thread is about to end
    refused: Refusal | None = None  # the answer to any request, if its certificate may not read
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.peer = PeerIdentity(self.address)
        self.thread = threading.Thread(target=self._run, name=f"segments-{self.address}", daemon=True)
        self._closing = threading.Lock()
        self.waits(self.server.limits.head_seconds)

    def waits(self, seconds: float) -> None:
        """The connection waits for a handshake or a request, at most `seconds`."""
        self.waiting_since = time.monotonic()
        self.deadline = self.waiting_since + seconds

    def answers(self) -> None:
        """A request has arrived and is answered from now on."""
        self.waiting_since = None
        self.ends_at = time.monotonic() + self.server.limits.answer_seconds
        self.progress()

    def progress(self) -> None:
        """The reader has taken something."""
        self.deadline = min(time.monotonic() + self.server.limits.stalled_seconds, self.ends_at)

    def shut(self) -> None:
        """Shut the socket down from another thread, so that this connection's thread wakes up and ends."""
        self.ending = True
        with self._closing, suppress(OSError):
            # Not SSLSocket's: that drops its TLS first, and what its thread writes next would be sent unencrypted.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            with self._serving():
                _Handler(self)
        except (OSError, FileShortened, ValueError) as error:  # ValueError: closed meanwhile
            logger.debug("reader_gone", "%s: %s", self.address, error)
        except Exception as error:
            logger.error("reader_failed", "%s", self.address, error=error)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        try:
            sock = self.sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # A reader that takes nothing for a while may still be alive.
                stalled_ms = int(self.server.limits.stalled_seconds * 1000)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_ms)
            context = self.server.contexts.newest()
            if context is None:
                # So that a sendfile returns, and counts as progress, when the reader has taken only a part.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PROGRESS_SECONDS, 0))
            else:
                self._shake_hands(context)
            yield
        finally:
            with self._closing:
                self.sock.close()
            self.server.ended(self)

    def _shake_hands(self, context: ssl.SSLContext) -> None:
        secured = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        self.sock = secured
        try:
            secured.do_handshake()
        except OSError as error:
            self.server.counts.stranger(self.address, f"TLS handshake failed: {why(error)}")
            raise
        named = (secured.getpeercert() or {}).get("subjectAltName", ())
        of = {kind: [str(entry[1]) for entry in named if entry[0] == kind] for kind in ("DNS", "URI")}
        self.peer = PeerIdentity.of_certificate(self.address, of["DNS"], of["URI"])
        try:
            self.server.asks.admitted(self.peer)
        except Refusal as refusal:
            self.refused = refusal


class _Handler(BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 on one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "nsqha"
    sys_version = ""
    error_message_format = "%(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def __init__(self, connection: ReaderConnection) -> None:
        self._of = connection
        self._server = connection.server
        self._limits = connection.server.limits
        self._first = True
        tls = isinstance(connection.sock, ssl.SSLSocket)
        self._sender = Sender(connection.sock, tls=tls, progress=connection.progress)
        connection.pace = self._sender.pace
        super().__init__(connection.sock, connection.address, connection.server)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._head = Head(self.connection)
        self.rfile = self._head  # type: ignore[assignment]
        self.wfile = self._said = io.BytesIO()  # sent when the turn is over

    def handle_one_request(self) -> None:
        """Read and answer one request; `close_connection` says whether it was the last one."""
        connection = self._of
        self.close_connection = True
        connection.waits(self._limits.head_seconds if self._first else self._limits.idle_seconds)
        self._first = False
        if not self._head.wait():
            return
        connection.waits(self._limits.head_seconds)
        if not self._head.take():
            return
        connection.answers()
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        with ExitStack() as files:
            try:
                with self._server.turns.turn() as turn:
                    ready = self._prepared(turn, files)
            except Refusal as refusal:  # no turn in time
                ready = None
                self._refuse(refusal)
            self._sender.write(self._said.getvalue())
            self._said.seek(0)
            self._said.truncate()
            if ready is not None:
                answer, segment = ready
                self._sender.write(answer.entries)
                self._sender.send(segment, answer.pieces)
                self._server.counts.served(answer.size)

    def _prepared(self, turn: Turn, files: ExitStack) -> tuple[Answer, int] | None:
        """The answer that is sent behind the head, and its segment file; None: a head alone. Refusal: no turn."""
        try:
            return self._parsed(turn, files)
        except Refusal as refusal:
            if not turn.mine:
                raise
            self._refuse(refusal)
            return None

    def _parsed(self, turn: Turn, files: ExitStack) -> tuple[Answer, int] | None:
        """As `_prepared`, but raises each Refusal."""
        if self._of.refused is not None:
            raise self._of.refused
        try:
            self.raw_requestline = self._head.readline()
        except LineTooLong:
            self.send_error(414, "the request line is too long")
            return None
        if not self.parse_request():
            return None
        if self.request_version == "HTTP/0.9" or self.command != "GET":
            self.close_connection = True
            self.send_error(405, "only GET over HTTP/1.1 is served")
            return None
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0") != "0":
            raise Refusal(400, "a request has no body")
        ask = Ask.parse(self.path)
        where = self._server.asks.where(ask, self._of.peer, self.headers.get("Authorization"))
        return self._answer(ask, where, turn, files)

    def _answer(self, ask: Ask, where: LocatedRange, turn: Turn, files: ExitStack) -> tuple[Answer, int]:
        try:
            check_chain(self._chain(ask, where, turn), ask)
            with ExitStack() as soon:
                with turn.paused():
                    commitlog = soon.enter_context(opened(where.pair.commitlog))
                    segment = files.enter_context(opened(where.pair.segment))
                    size = os.fstat(segment).st_size
                answer = planned(where, ask, _reads(commitlog, turn))
        except FileNotFoundError:
            self._server.asks.where(
                ask, self._of.peer, self.headers.get("Authorization")
            )  # raises 404 or 410 if they have just been unlinked
            raise busy("files of this replica are being replaced, or are missing; take another replica") from None
        except OSError as error:
            raise busy(f"the files cannot be read: {listen.reason(error)}; take another replica") from None
        if answer.pieces and sum(answer.pieces[-1]) > size:
            raise Refusal(409, f"the segment of this replica ends before log id {answer.end}; take another replica")
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(answer.size))
        self.send_header("Nsqha-First", str(answer.first))
        self.send_header("Nsqha-End", str(answer.end))
        self.end_headers()
        self._server.counts.answered(200)
        return answer, segment

    def _chain(self, ask: Ask, where: LocatedRange, turn: Turn) -> int:
        if where.at_chain is not None:
            return where.at_chain
        with ExitStack() as files:
            with turn.paused():
                commitlog = files.enter_context(opened(where.at.commitlog))
            return chain_at(where, ask, _reads(commitlog, turn))

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.status in (401, 403):
            self._server.counts.stranger(self._of.address, refusal.why)
        self.close_connection = self.close_connection or refusal.status in ENDING
        self.send_error(refusal.status, refusal.why, headers=dict(refusal.headers))

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        """Answer with one line of text. The base class also calls this, for heads that it cannot parse."""
        text = f"{message or explain or 'refused'}\n".encode("utf-8", "replace")
        if headers is None:
            self.close_connection = True
        self.request_version = self.protocol_version  # after an unreadable head it is 0.9, which has no heads
        self._server.counts.answered(code)
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Type", self.error_content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not logged."""


def _reads(commitlog: int, turn: Turn) -> Callable[[int, int], bytes]:
    """A function that calls `read_once` on this file while other threads may have the turn."""

    def read(n: int, position: int) -> bytes:
        with turn.paused():
            return read_once(commitlog, n, position)

    return read
