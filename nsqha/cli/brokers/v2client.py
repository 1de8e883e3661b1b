"""A small NSQ V2 client on a blocking socket for `pub`, `sub` and `tail`; it works with any nsqd.

    Publisher   PUB and DPUB, many unanswered at once; answers come in order
    Subscriber  SUB; runs of messages as they arrive; FIN or REQ for a run at a time

Frames from the server: [size u32 = 4 + data][frame type u32][data]; a message's data is
[timestamp ns i64][attempts u16][id 16][body]. The size of a frame is checked before it is buffered.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from nsqha import __version__
from nsqha.cli.brokers.discovery import host_and_port, unreachable
from nsqha.cli.brokers.v2security import PLAIN, Security, words
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import show_count

RESPONSE, ERROR, MESSAGE = 0, 1, 2
FRAME_BYTES_MAX = 256 << 20
RECEIVE_BYTES = 256 << 10
_HEAD = struct.Struct(">II")
_MESSAGE = struct.Struct(">qH16s")
_SIZE = struct.Struct(">I")
IS_IT_NSQD = "; is that the TCP port of nsqd?"
HINTS = {
    b"E_INVALID DPUB timeout": "nsqd's --max-req-timeout bounds delays",
    b"E_BAD_MESSAGE PUB message too big": "nsqd's --max-msg-size bounds messages",
    b"E_BAD_MESSAGE DPUB message too big": "nsqd's --max-msg-size bounds messages",
    b"E_AUTH_FAILED": "the token or --auth-secret is not right, or the auth server does not answer",
    b"E_AUTH_FIRST": "the broker requires AUTH: give --token-file, or --auth-secret-file for its auth server",
    b"E_AUTH_DISABLED": "the broker does not use AUTH: leave out --auth-secret",
    b"E_UNAUTHORIZED": "the token or --auth-secret does not allow it",
}
"""Hints that are added to errors of the server."""


class Message(NamedTuple):
    timestamp_ns: int
    attempts: int
    id: bytes
    body: bytes


class RefusedByServer(exits.Exit):
    """The server answered with an error frame."""

    def __init__(self, data: bytes) -> None:
        hint = next((f" ({hint})" for start, hint in HINTS.items() if data.startswith(start)), "")
        if b"TLS required" in data:
            hint = " (the broker requires TLS: give --tls, and --tls-root-ca-file if its authority is your own)"
        denied = data.startswith((b"E_AUTH", b"E_UNAUTHORIZED"))
        super().__init__(exits.NOT_ALLOWED if denied else exits.FAILED, data.decode("utf-8", "replace") + hint)


def _agreed(answer: bytes) -> dict[str, Any]:
    """Parse a server's answer to IDENTIFY; one that negotiates nothing answers OK."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class V2Connection:
    """A socket that has identified itself, with TLS and AUTH as `security` says."""

    def __init__(
        self, address: str, timeout_s: float, *, heartbeat_ms: int = 30_000, security: Security = PLAIN
    ) -> None:
        self._address = address
        self._data = bytearray()
        self._spoke = False
        host, port = host_and_port(address, "--nsqd-tcp-address")
        try:
            self._socket: socket.socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise unreachable(address, error, "--nsqd-tcp-address or NSQHA_TCP_ADDRESS") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        identity = {
            "client_id": "nsqha",
            "hostname": socket.gethostname(),
            "user_agent": f"nsqha-cli/{__version__}",
            "heartbeat_interval": heartbeat_ms,
            "feature_negotiation": True,
            "tls_v1": security.tls,
        }
        try:
            self._identify(identity, security, host)
        except BaseException:
            self.close()
            raise

    def _identify(self, identity: dict[str, object], security: Security, host: str) -> None:
        body = json.dumps(identity).encode()
        agreed = _agreed(self.ask(b"  V2IDENTIFY\n" + _SIZE.pack(len(body)) + body))
        if security.tls:
            if not agreed.get("tls_v1"):
                raise exits.Exit(exits.NOT_ALLOWED, f"{self._address} has no TLS; leave out the --tls flags")
            self._socket = security.wrap(self._socket, host, self._address)
            self.expect_ok()
        secret = security.auth_secret or (security.token if agreed.get("auth_required") else b"")
        if secret:
            self.ask(b"AUTH\n" + _SIZE.pack(len(secret)) + secret)

    def ask(self, command: bytes) -> bytes:
        """Send a command and return its answer. Raises RefusedByServer."""
        self.send(command)
        frames = self.frames()
        if not frames:
            raise exits.Exit(exits.UNREACHABLE, f"{self._address} did not answer in time")
        kind, data = frames[0]
        if kind == ERROR:
            raise RefusedByServer(data)
        return data

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._gone(error) from None

    def frames(self) -> list[tuple[int, bytes]]:
        """Return the frames that arrived, empty if none came in time. Heartbeats are answered and left out."""
        found: list[tuple[int, bytes]] = []
        while not found:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                return []
            except OSError as error:
                raise self._gone(error) from None
            if not received:
                raise self._gone(None)
            self._data += received
            beats = 0
            for frame in self._take():
                if frame == (RESPONSE, b"_heartbeat_"):
                    beats += 1
                else:
                    found.append(frame)
            if beats:
                self.send(b"NOP\n" * beats)
        return found

    def _take(self) -> list[tuple[int, bytes]]:
        """Take whole frames out of the receive buffer."""
        data, at, frames = self._data, 0, []
        while len(data) - at >= 8:
            size, kind = _HEAD.unpack_from(data, at)
            if not 4 <= size <= FRAME_BYTES_MAX or kind > MESSAGE:
                what = f"{self._address} does not speak the NSQ protocol{'' if self._spoke else IS_IT_NSQD}"
                raise exits.Exit(exits.FAILED, what)
            if len(data) - at < 4 + size:
                break
            frames.append((kind, bytes(data[at + 8 : at + 4 + size])))
            at += 4 + size
            self._spoke = True
        del data[:at]
        return frames

    def expect_ok(self, n: int = 1) -> int:
        """Read `n` answers and return how many were OK. Raises RefusedByServer with the first that is not."""
        ok = 0
        while ok < n:
            frames = self.frames()
            if not frames:
                raise exits.Exit(exits.UNREACHABLE, f"{self._address} did not answer in time")
            for kind, data in frames:
                if kind == ERROR:
                    raise RefusedByServer(data)
                ok += 1
        return ok

    def wait_at_most(self, seconds: float | None) -> None:
        """Set how long `frames` waits; None: without a limit."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def buffered(self) -> bool:
        """Whether TLS has bytes that a wait for the socket would not notice."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def close(self) -> None:
        self._socket.close()

    def _gone(self, error: OSError | None) -> exits.Exit:
        closed = f"the broker closed the connection{'' if self._spoke else IS_IT_NSQD}"
        why = "timed out" if isinstance(error, TimeoutError) else closed
        if isinstance(error, ssl.SSLError):
            why = words(error)  # under TLS 1.3 the broker looks at our certificate after the handshake
        return exits.Exit(exits.UNREACHABLE, f"{self._address}: {why}")


class V2Publisher(V2Connection):
    """Publishes runs of messages; `published` counts messages that were answered with OK."""

    def __init__(self, address: str, timeout_s: float, *, security: Security = PLAIN) -> None:
        # No heartbeats: a publisher that waits for its next line would not answer them.
        super().__init__(address, timeout_s, heartbeat_ms=-1, security=security)
        self.published = 0

    def publish(self, topic: str, bodies: Sequence[bytes], delay_ms: int = 0) -> None:
        """Publish all of them. If one is refused, `published` says how many before it were stored."""
        command = f"DPUB {topic} {delay_ms}\n" if delay_ms else f"PUB {topic}\n"
        head = command.encode()
        lost: exits.Exit | None = None
        try:
            self.send(b"".join(part for body in bodies for part in (head, _SIZE.pack(len(body)), body)))
        except exits.Exit as error:
            # Refused in the middle of a body: the reason may have arrived before the connection ended.
            lost = error
        waiting = len(bodies)
        while waiting:
            try:
                frames = self.frames()
            except exits.Exit as error:
                why = lost or error
                if why.status != exits.UNREACHABLE:
                    raise why from None
                raise exits.Exit(why.status, f"{why}: {show_count(waiting)} may or may not have been stored") from None
            if not frames:
                text = f"{self._address} did not answer in time: {show_count(waiting)} may or may not have been stored"
                raise exits.Exit(exits.UNREACHABLE, text)
            for kind, data in frames:
                if kind == ERROR:
                    raise RefusedByServer(data)
                waiting -= 1
                self.published += 1


class Subscriber(V2Connection):
    """A consumer. At most `window` messages are in flight, and never more than are still wanted."""

    def __init__(
        self, address: str, timeout_s: float, topic: str, channel: str, *, window: int, security: Security = PLAIN
    ) -> None:
        super().__init__(address, timeout_s, security=security)
        self.send(f"SUB {topic} {channel}\n".encode())
        self.expect_ok()
        self._window = window
        self.send(b"RDY %d\n" % window)

    def messages(self) -> list[Message]:
        """Return the messages that arrived; empty if none came in time."""
        return [message for kind, data in self.frames() if (message := self._message(kind, data)) is not None]

    def _message(self, kind: int, data: bytes) -> Message | None:
        if kind == ERROR:
            # A FIN came too late: another consumer has the message, and this run continues.
            if data.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED")):
                return None
            raise RefusedByServer(data)
        if kind != MESSAGE or len(data) < _MESSAGE.size:
            return None
        timestamp_ns, attempts, message_id = _MESSAGE.unpack_from(data)
        return Message(timestamp_ns, attempts, message_id, data[_MESSAGE.size :])

    def answer(self, messages: Sequence[Message], requeue_ms: int | None, wanted: int | None) -> None:
        """Finish these (or requeue them with a delay). `wanted` more messages are wanted; None: no limit."""
        parts: list[bytes] = []
        if wanted is not None and wanted < self._window:
            # Before the answers: each of them would make room for a message that is not wanted.
            self._window = wanted
            parts.append(b"RDY %d\n" % wanted)
        for message in messages:
            parts.append(b"FIN %s\n" % message.id if requeue_ms is None else b"REQ %s %d\n" % (message.id, requeue_ms))
        self.send(b"".join(parts))

    def leave(self) -> None:
        """Wait until the server has processed the last answers, then close. Messages in flight are requeued."""
        self.send(b"CLS\n")
        while frames := self.frames():
            if (RESPONSE, b"CLOSE_WAIT") in frames:
                break
        self.close()
