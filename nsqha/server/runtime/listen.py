"""Listening sockets with nsqd's syntax of addresses, and the text of a peer's address.

`host:port` or, without a colon, the path of a unix socket. A wildcard (`:4150`, `0.0.0.0:4150`) takes IPv4 and IPv6,
as nsqd's does; the log then says `[::]:4150`. Peers that came over IPv4 are shown as IPv4.

Accepted sockets inherit from the listener: keep-alive probes every 15 s, and TCP_USER_TIMEOUT, so that a peer that
vanished or stopped reading costs its memory for half a minute and not for hours.

uvloop accepts one connection in a turn of the loop. After a failover turns are long, and a thousand clients that come
back at once would wait for a thousand of them: `Acceptor` takes those that wait behind one that was accepted. That is
for bursts; strangers that connect again and again get the one of each turn.

The last descriptors of the process are kept from clients: without any, files of the log could not be opened, and the
log could be neither read nor appended to. Half of them HTTP may have, where nodes are administrated. A connection has
to be accepted to be refused, and holds its descriptor for some turns of the loop: a listener refuses two in a turn at
most.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from nsqha.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    import ssl

    from nsqha.options import Options
    from nsqha.server.runtime.budget import SharedTurns

BACKLOG = 1 << 15
"""Connections that the kernel completes before they are accepted; it takes no more than net.core.somaxconn (4,096).
Those over it are answered only after a second, when the client tries again, and thousands of clients come at once after
a restart. An event loop listens once more, with 100 unless it is given this."""
ACCEPTED_A_TURN = 16  # connections, of one listener, beside the loop's own
ACCEPTED_AT_ONCE = 2_048  # of these, if none came before
ACCEPTED_A_SECOND = 128  # in the long run
ACCEPT_PAUSE_SECONDS = 1.0  # after one could not be accepted
ACCEPTED_SECONDS = 0.0001  # that one takes of the loop until it is read
SPARE_FILES = 256  # descriptors; at most a quarter of what there are
KEEPALIVE_S = 15
UNACKNOWLEDGED_MS = 30_000
_WILDCARDS = ("", "0.0.0.0", "::")
_ADVICE = {
    errno.EADDRINUSE: "; stop the process that listens there (`ss -ltnp` shows it), or choose another address",
    errno.EACCES: "; ports below 1024 and folders of others need privileges: choose another address",
    errno.EADDRNOTAVAIL: "; no interface of this host has that address: choose one of its own, or none for all",
    errno.ENOENT: "; the folder of a unix socket has to exist",
}


class Acceptor:
    """Gives each connection of a listening socket, which now belongs to it, to a protocol that `connection` makes."""

    def __init__(
        self,
        sock: socket.socket,
        connection: Callable[[], asyncio.Protocol],
        *,
        turns: SharedTurns | None = None,
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float | None = None,
    ) -> None:
        """`turns`: what connections do in them comes before those that wait to be accepted. `handshake_seconds`: only
        with `tls`, a context that `tls.tells_peers`."""
        import asyncio  # here, as sockets listen before it is imported

        from nsqha.nsqlog import Logger
        from nsqha.server.runtime.rare_warnings import RefusalLog
        from nsqha.server.runtime.tasks import TaskGroup

        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._connection = connection
        self._turns = turns
        self._tls: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": handshake_seconds}
        self._refused = RefusalLog(Logger("tls").warning, "tls_refused")
        self._pause: asyncio.TimerHandle | None = None  # after TLS connections could not be accepted
        self._connecting = TaskGroup(self._loop, failed=self._lost)
        self._server: asyncio.Server | None = None
        self._scheduled = False
        self._left, self._counted = float(ACCEPTED_AT_ONCE), self._loop.time()  # of the burst, and when that was

    async def start(self) -> None:
        """Accept connections."""
        if self._tls["ssl"] is None:
            self._server = await self._loop.create_server(self._first, sock=self._socket, backlog=BACKLOG)
        else:  # the loop would not say which handshakes fail
            self._socket.setblocking(False)
            self._watch()

    def close(self) -> None:
        """Accept no more. Connections are closed by their owner."""
        if self._server is not None:
            self._server.close()
            self._server = None
        elif self._socket.fileno() >= 0:
            if self._pause is not None:
                self._pause.cancel()
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _watch(self) -> None:
        self._loop.add_reader(self._socket, self._tls_first)

    def _tls_first(self) -> None:
        """A TLS connection waits: accept it, as the loop does without TLS."""
        try:
            sock, name = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch)
            return
        self._schedule_others()
        self._begin(sock, name)

    def _first(self) -> asyncio.Protocol:
        """The loop has accepted a connection."""
        self._schedule_others()
        return self._connection()

    def _schedule_others(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._accept_others)

    def _begin(self, sock: socket.socket, name: object) -> None:
        sock.setblocking(False)
        self._connecting.spawn(self._connect(sock, name))

    async def _connect(self, sock: socket.socket, name: object) -> None:
        handshake: AbstractContextManager[object] = nullcontext()
        if self._tls["ssl"] is not None:
            from nsqha.server.runtime.tls import Handshake

            handshake = Handshake(address_text(name), sock, self._refused)
        with handshake:
            await self._loop.connect_accepted_socket(self._connection, sock, **self._tls)

    def _accept_others(self) -> None:
        self._scheduled = False
        now = self._loop.time()
        self._left = min(ACCEPTED_AT_ONCE, self._left + (now - self._counted) * ACCEPTED_A_SECOND)
        self._counted = now
        for _ in range(min(ACCEPTED_A_TURN, int(self._left))):
            if self._turns is not None and not self._turns.room:
                self._scheduled = True
                self._turns.wait(self._accept_others)
                return
            try:
                sock, name = self._socket.accept()
            except OSError:
                return  # nobody waits, or the port was closed; for other reasons the loop's own call fails, and tells
            self._left -= 1
            if self._turns is not None:
                self._turns.charge(ACCEPTED_SECONDS)
            self._begin(sock, name)
            if is_spare(sock.fileno()):
                return  # refused in a later turn; more of them at once would take what is kept for HTTP, too

    def _lost(self, error: BaseException) -> None:
        """A client that is gone is no news, and one whose TLS was refused has its line; all else is a bug."""
        if not isinstance(error, OSError):
            self._loop.call_exception_handler({"message": "a connection could not be begun", "exception": error})


def listen(address: str, *, flag: str) -> socket.socket:
    """Returns a bound, listening, non-blocking socket. ConfigError, with the name of `flag`, if that fails."""
    try:
        return _tcp(*split_host_port(address)) if is_tcp(address) else _unix(address)
    except (OSError, ValueError) as error:
        advice = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        raise ConfigError(f"--{flag}={address}: cannot listen: {reason(error)}{advice}") from error


def listen_all(options: Options) -> dict[str, socket.socket]:
    """The listening sockets of a node, by name: all but gRPC's, whose library listens itself. ConfigError: none is left
    open.

    The kernel completes connections from here on, and keeps what clients send until somebody reads it. So this comes
    first in a start: who connects meanwhile waits and is not refused."""
    wanted = {"tcp": options.tcp_address, "http": options.http_address, "segments": options.segments_address}
    if options.segments_address and not is_tcp(options.segments_address):
        raise ConfigError(f"--segments-address={options.segments_address}: it is not host:port")
    if options.tls_cert and options.https_address:
        wanted["https"] = options.https_address
    if options.metrics_address:
        wanted["metrics"] = options.metrics_address
    if options.etcd_endpoints:
        wanted["peer"] = peer_address(options)
        if not is_tcp(wanted["peer"]):
            raise ConfigError(f"--peer-address={wanted['peer']}: it is not host:port")
    sockets: dict[str, socket.socket] = {}
    try:
        for name, address in wanted.items():
            if address:
                sockets[name] = listen(address, flag=f"{name}-address")
        # Bound later; where gRPC itself does that it complains on stderr in words of its own.
        check_free(options.grpc_address, flag="grpc-address")
    except ConfigError:
        for sock in sockets.values():
            sock.close()
        raise
    return sockets


def peer_address(options: Options) -> str:
    """Where other nodes open streams: as the flag says, or the port after gRPC's."""
    return options.peer_address or next_port(options.grpc_address, flag="peer-address")


def check_free(address: str, *, flag: str) -> None:
    """Check that another process could listen there now. ConfigError as `listen`, and for an address without a colon;
    an address with one that is not host:port passes."""
    if not is_tcp(address):
        raise ConfigError(f'--{flag}={address}: "{address}" is not host:port')
    with suppress(ValueError):
        split_host_port(address)
        listen(address, flag=flag).close()


def is_tcp(address: str) -> bool:
    return ":" in address


def split_host_port(address: str) -> tuple[str, int]:
    """Parse `host:port`, `[v6]:port` or `:port`. ValueError if it is none of them."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'"{address}" is not host:port')
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f'"{address}": write an IPv6 address as [address]:port')
    return host, int(port)


def next_port(address: str, *, flag: str) -> str:
    """The same host with the next port, or any port (0) where `address` has that. ConfigError tells to give `flag`."""
    try:
        _, port = split_host_port(address)
        if port == 65535:
            raise ValueError(f'"{address}" has the last port')
    except ValueError as error:
        raise ConfigError(f"--{flag} is needed, as host:port: it has no default, because {error}") from None
    return f"{address.rpartition(':')[0]}:{port + 1 if port else 0}"


def bound_address(sock: socket.socket) -> str:
    """Where the socket listens, for log lines: `127.0.0.1:4150`, `[::]:4150` or a path."""
    return address_text(sock.getsockname())


def bound_port(sock: socket.socket) -> int:
    """The port, or -1 for a unix socket (as /info shows it)."""
    return -1 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])


def address_text(name: object) -> str:
    """Format a peer's address: `1.2.3.4:5`, `[::1]:5`, or the path of a unix socket (`@` for a peer without name)."""
    if not isinstance(name, tuple):
        return str(name) if name else "@"
    host, port = str(name[0]), name[1]
    if host.startswith("::ffff:") and "." in host:
        host = host[7:]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one: it is often 1024, fewer than the connections of a node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # macOS reports a hard limit that it then refuses; the soft one stays


def too_many_files(transport: asyncio.BaseTransport, *, administration: bool = False) -> bool:
    """Whether an accepted socket took one of the spare descriptors: the system always assigns the lowest free one."""
    sock = transport.get_extra_info("socket")
    return sock is not None and is_spare(sock.fileno(), administration=administration)


def connections_max() -> int:
    """For a server that accepts by itself and knows of no spare descriptors: a quarter of what there are."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (1 << 31) - 1 if limit == resource.RLIM_INFINITY else min(max(limit // 4, 1), (1 << 31) - 1)


def open_logs_max() -> int:
    """How many logs may have files open: two descriptors each, and up to ten while consumers read old messages."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (1 << 31) - 1 if limit == resource.RLIM_INFINITY else max(limit // 16, 8)


def is_spare(descriptor: int, *, administration: bool = False) -> bool:
    """Whether a connection may not have this descriptor. `administration`: half of what others leave it may have, so
    that a node whose clients have taken the rest can still be asked what is wrong."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    spare = min(SPARE_FILES, limit // 4)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - (spare // 2 if administration else spare)


def reason(error: Exception) -> str:
    """The system's text for a socket's error, without Python's additions."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    if not isinstance(error, OSError):
        return str(error)
    # Not strerror: asyncio and socket.create_server write there what they were doing. With several addresses asyncio
    # joins all their errors into one text: the first is enough.
    number = error.errno or int((re.search(r"\[Errno (\d+)\]", str(error)) or [0, 0])[1])
    return os.strerror(number) if number else str(error)


def _tcp(host: str, port: int) -> socket.socket:
    if host in _WILDCARDS and socket.has_dualstack_ipv6():
        try:
            return _prepared(socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
            # IPv6 is compiled in but switched off on this host
    family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return _prepared(socket.create_server((host, port), family=family))


def _prepared(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, option):  # macOS lacks some of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
                os.unlink(path)  # left behind by a killed process
        except FileNotFoundError:
            pass
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(path) == 0
