"""Publishing from one task: over one socket at a time, in order, with several commands in flight.

    publish -> [waiting .. sent .. answered] -> OK: the first one is stored and dropped
                    ^                |
                    +----------------+  the connection is lost, or the first one is refused for now:
                                        all without an OK are sent again, in order, to the next broker

What is known of a command without an OK when its connection ends:

    its answer says "not stored"               not stored
    it was not sent as a whole                 not stored: a broker takes a command whole or not at all
    its answer is another temporary error      perhaps stored, so sending it again may make duplicates
    it was sent and has no answer              perhaps stored, also after one that was answered "not stored"

Invariants: an OK belongs to the first command that has none. No command is dropped: it gets an OK, or `publish` or
`flush` raises. What is kept to be sent again is bounded in bytes and commands. A broker that has not answered for
ANSWER_SECONDS is left, also if the task takes longer than that from one command to the next; and a timeout is raised
only after every broker was tried while `publish` or `flush` waited. If every address closes without an answer to
IDENTIFY, and none ever was a broker, an error says so after FOREIGN_SECONDS.

The protocol is NSQ V2: a command is answered by one frame, [size u32 = 4 + data][type u32: 0 answer, 1 error][data].
Every error ends the connection. Only the standard library is used, so that a worker needs nothing else.
"""

from __future__ import annotations

import json
import random
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

IN_FLIGHT_COMMANDS_MAX = 256  # where topics change from row to row, commands are small and round trips expensive
IN_FLIGHT_BATCHES_MAX = 8  # of full size: enough for the broker to sync one batch while it receives the next
ANSWER_SECONDS = 45.0  # more than a broker's --publish-outcome-wait, so that the broker itself answers "unknown"
CONNECT_SECONDS = 5.0
FOREIGN_SECONDS = 5.0  # for a broker behind a proxy to start; a wrong port is wrong for ever
GRACE_SECONDS = 1.0  # to receive an answer that was due while the task did something else
BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS = 0.05, 2.0
FRAME_BYTES_MAX = 64 << 10  # of an answer
RECEIVE_BYTES = 64 << 10
_FRAME_ANSWER, _FRAME_ERROR = 0, 1
_FRAME_HEAD = struct.Struct(">II")
_SIZE = struct.Struct(">I")

HINTS = {
    "E_BAD_MESSAGE": "the broker's --max-msg-size limits values; set option maxMessageBytes to that number",
    "E_BAD_BODY": "the broker's --max-body-size limits an MPUB; make option batchBytes smaller",
    "E_INVALID DPUB timeout": "the broker's --max-req-timeout limits defer_ms",
    "E_AUTH_FIRST": "the broker requires AUTH: set nsqha.authSecretFile, or NSQHA_AUTH_SECRET where the executors run",
    "E_AUTH_FAILED": "the secret is wrong, or the broker's auth server does not answer",
    "E_AUTH_DISABLED": "the broker does not use AUTH: remove the secret",
    "E_UNAUTHORIZED": "the secret does not allow publishing to this topic",
}
"""What to change when a broker refuses permanently."""


class PublishRefused(Exception):
    """A broker refuses this permanently; the message is one line with its answer and what to change."""


class PublishFailed(Exception):
    """No broker stored the next command in time; the message is one line that says how much is published."""


class LinkLost(Exception):
    """A connection was lost or closed: the outcome of commands that were sent and have no OK is unknown."""


class Closed(LinkLost):
    """The other side closed the connection."""


class NotIdentified(LinkLost):
    """The other side closed the connection without an answer to IDENTIFY: it may not be a broker."""


class NotTaken(LinkLost):
    """The broker's answer to the first command without an OK. `not_stored`: it is certainly not stored."""

    def __init__(self, why: str, *, not_stored: bool) -> None:
        super().__init__(why)
        self.not_stored = not_stored


class Command(NamedTuple):
    """The bytes of one PUB, MPUB or DPUB, and its number of messages."""

    wire: bytes
    messages: int


@dataclass(frozen=True)
class LinkSecurity:
    """TLS and AUTH of a connection. Paths are on the machine where the task runs."""

    tls: bool = False
    root_ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure_skip_verify: bool = False
    auth_secret: bytes = field(default=b"", repr=False)


PLAIN = LinkSecurity()


@dataclass
class PublishTally:
    """The messages that a publisher has published so far."""

    published: int = 0
    possible_duplicates: int = 0  # sent again although the first sending may have been stored


class TaskPublisher:
    """Publishes commands in order, to one broker at a time.

    `timeout_s` bounds how long the first command without an OK may wait for it, once every broker was tried. `first` is
    the index of the broker to begin with.
    """

    def __init__(
        self,
        brokers: Sequence[str],
        *,
        first: int = 0,
        timeout_s: float = 120.0,
        in_flight_bytes_max: int = IN_FLIGHT_BATCHES_MAX << 20,
        security: LinkSecurity = PLAIN,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.tally = PublishTally()
        self._brokers = list(brokers)
        self._next_broker = first
        self._timeout_s = timeout_s
        self._security = security
        self._now = now
        self._sleep = sleep
        self._link: BrokerLink | None = None
        self._window = CommandWindow(in_flight_bytes_max)
        self._waiting_since = 0.0
        self._owed_since = 0.0  # no answer has arrived over this link since then; meaningless if nothing is sent
        self._failures = 0  # in a row
        self._spared = False  # one loss since the last OK was not counted as a failure
        self._foreign: int | None = 0  # addresses in a row that closed before IDENTIFY; None: a broker answered

    def publish(self, command: Command) -> None:
        """Send a command, and wait until there is room for another one. PublishRefused, PublishFailed."""
        window = self._window
        if not window.commands:
            self._waiting_since = self._now()
        window.add(command)
        self._go_on(lambda: not window.full)

    def flush(self) -> None:
        """Wait until everything is stored. PublishRefused, PublishFailed."""
        commands = self._window.commands
        if commands:  # a task without rows needs no connection, and has no time for one
            self._go_on(lambda: not commands)

    def close(self) -> None:
        """Close the connection; what has no OK may still be stored later."""
        if self._link is not None:
            self._link.close()
            self._link = None

    @property
    def _left_s(self) -> float:
        return self._waiting_since + self._timeout_s - self._now()

    def _go_on(self, done: Callable[[], bool]) -> None:
        """Receive answers, send, and reconnect: once, and then until `done`."""
        away = True
        while True:
            try:
                self._hear()
                away = False
                link = self._connected()
                self._send(link)
                if done():
                    return
                self._settle(link.answers(self._wait_s(ANSWER_SECONDS)))
                if done():
                    return
            except LinkLost as lost:
                self._lost(self._reason(lost), away)

    def _hear(self) -> None:
        """Process the answers that have arrived. LinkLost: none for too long, while the task did something else."""
        if self._link is None or not self._window.sent:
            return
        self._settle(self._link.answers(0))
        if not self._window.sent or (silent_s := self._now() - self._owed_since) < ANSWER_SECONDS:
            return
        # This machine itself may have been suspended: an answer on its way gets a moment to arrive.
        if not self._link.readable(GRACE_SECONDS):
            raise LinkLost(f"{self._address}: no answer for {silent_s:.1f} s")
        self._settle(self._link.answers(0))

    def _wait_s(self, most: float) -> float:
        """How long to wait for this broker: the time left, or a fair share while not every broker has failed yet."""
        least = 0.001
        if self._failures < len(self._brokers):
            least = min(self._timeout_s, max(self._timeout_s / len(self._brokers), CONNECT_SECONDS))
        return min(most, max(least, self._left_s))

    def _connected(self) -> BrokerLink:
        if self._link is not None and not self._window.sent and self._link.ended:
            # It was closed while nothing was in flight: no command needs to be sent twice.
            self.close()
        if self._link is None:
            address = self._brokers[self._next_broker % len(self._brokers)]
            self._link = BrokerLink(address, self._wait_s(CONNECT_SECONDS), self._security)
            self._foreign = None
        return self._link

    def _send(self, link: BrokerLink) -> None:
        window = self._window
        while window.sent < len(window.commands):
            link.send(window.commands[window.sent].wire, self._wait_s(ANSWER_SECONDS))
            if not window.sent:
                self._owed_since = self._now()
            window.sent += 1
            # A refusal is noticed here at once, and not when the window is full: less is sent in vain after it.
            self._settle(link.answers(0))

    def _settle(self, answers: Sequence[tuple[int, bytes]]) -> None:
        """Drop the commands that have an OK. LinkLost: the rest may be sent again. PublishRefused."""
        for kind, data in answers:
            if kind == _FRAME_ERROR:
                raise _verdict(self._address, data)
            if not self._window.sent:
                raise LinkLost(f"{self._address}: an answer without a command: {_shown(data)}")
            command = self._window.settled()
            self._failures, self._spared = 0, False
            self._waiting_since = self._owed_since = self._now()
            self.tally.published += command.messages

    @property
    def _address(self) -> str:
        return self._link.address if self._link is not None else "no broker"

    def _reason(self, lost: LinkLost) -> LinkLost:
        """Why the connection is lost: the broker's own answer, which may have arrived although the link failed."""
        try:
            while self._link is not None and (answers := self._link.answers(0)):
                self._settle(answers)
        except NotTaken as said:
            return said
        except LinkLost:
            pass
        return lost

    def _lost(self, lost: LinkLost, away: bool) -> None:
        """Count what may be stored twice, pause, and go to the next broker. PublishFailed: no time is left, and every
        broker has failed since the last OK.

        `away`: it was lost before this call, perhaps long ago; the first such loss does not count as a failure."""
        certain = 1 if isinstance(lost, NotTaken) and lost.not_stored else 0
        perhaps = self._window.lost(certain)
        if self._foreign is not None:
            self._foreign = self._foreign + 1 if isinstance(lost, NotIdentified) else 0
            if self._foreign >= len(self._brokers) and self._now() - self._waiting_since >= FOREIGN_SECONDS:
                raise PublishRefused(f"no address in option nsqd belongs to a broker: {lost}")
        self.close()
        self._window.sent = 0
        self._next_broker += 1
        pause = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1)
        if away and not self._spared:
            self._spared = True
        else:
            self._failures += 1
        if self._left_s <= pause and self._failures >= len(self._brokers):
            more = self._window.doubtful
            others = f"up to {more} more may be" if more else "no others are"
            raise PublishFailed(
                f"nothing was stored for {self._timeout_s:g} s (option timeoutMs): {lost}; this task has published "
                f"{self.tally.published} messages, and {others} stored"
            ) from None
        self.tally.possible_duplicates += perhaps
        self._sleep(pause)


class CommandWindow:
    """Commands without an OK, in order; the first `sent` of them went over the present link."""

    def __init__(self, bytes_max: int) -> None:
        self.commands: deque[Command] = deque()
        self.sent = 0
        self._bytes = 0
        self._bytes_max = bytes_max
        self._perhaps_stored: deque[bool] = deque()  # for each of them: an earlier link ended before its answer

    @property
    def full(self) -> bool:
        return len(self.commands) >= IN_FLIGHT_COMMANDS_MAX or self._bytes >= self._bytes_max

    def add(self, command: Command) -> None:
        self.commands.append(command)
        self._perhaps_stored.append(False)
        self._bytes += len(command.wire)

    def settled(self) -> Command:
        """The first one has its OK."""
        command = self.commands.popleft()
        self._perhaps_stored.popleft()
        self._bytes -= len(command.wire)
        self.sent -= 1
        return command

    def lost(self, certain: int) -> int:
        """The link is lost. Messages that were sent over it and may be stored; not those of the first `certain`."""
        for at in range(certain, self.sent):
            self._perhaps_stored[at] = True
        return sum(command.messages for command in islice(self.commands, certain, max(certain, self.sent)))

    @property
    def doubtful(self) -> int:
        """Messages without an OK that may be stored."""
        doubtful = zip(self.commands, self._perhaps_stored, strict=True)
        return sum(command.messages for command, perhaps_stored in doubtful if perhaps_stored)


class BrokerLink:
    """A connection after IDENTIFY. Every method may raise LinkLost, the constructor also PublishRefused."""

    def __init__(self, address: str, timeout_s: float, security: LinkSecurity = PLAIN) -> None:
        self.address = address
        self._data = bytearray()
        host, port = split_address(address)
        try:
            self._socket: socket.socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise LinkLost(f"{address}: no connection: {_words(error)}") from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._identify(host, timeout_s, security)
        except BaseException:
            self.close()
            raise

    def _identify(self, host: str, timeout_s: float, security: LinkSecurity) -> None:
        identity = {
            "client_id": "pyspark-nsqha",
            "hostname": socket.gethostname(),
            "user_agent": "pyspark-nsqha",
            # Off: a task that waits for its next row would not answer heartbeats.
            "heartbeat_interval": -1,
            "feature_negotiation": True,
            "tls_v1": security.tls,
        }
        body = json.dumps(identity).encode()
        try:
            agreed = _features(self._ask(b"  V2IDENTIFY\n" + _SIZE.pack(len(body)) + body, timeout_s))
        except Closed:
            raise NotIdentified(
                f"{self.address} closed the connection before it answered IDENTIFY: it does not speak NSQ's protocol, "
                f"or is stopping; option nsqd takes --tcp-address of brokers"
            ) from None
        if security.tls:
            if not agreed.get("tls_v1"):
                raise PublishRefused(f"{self.address} has no TLS: remove the nsqha.tls options")
            self._socket = self._wrapped(host, timeout_s, security)
            self._ask(b"", timeout_s)
        if security.auth_secret:
            self._ask(b"AUTH\n" + _SIZE.pack(len(security.auth_secret)) + security.auth_secret, timeout_s)

    def _wrapped(self, host: str, timeout_s: float, security: LinkSecurity) -> ssl.SSLSocket:
        self._socket.settimeout(timeout_s)
        try:
            return _context(security).wrap_socket(self._socket, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise PublishRefused(
                f"{self.address}: its certificate is not trusted: {error.verify_message}; name its authority with "
                f"option nsqha.tls.ca"
            ) from None
        except ssl.SSLError as error:
            raise self._tls_failed(error) from None
        except OSError as error:
            raise LinkLost(f"{self.address}: no TLS: {_words(error)}") from None

    def _tls_failed(self, error: ssl.SSLError) -> Exception:
        """PublishRefused if the broker sent an alert: with TLS 1.3 it arrives after the handshake. Else LinkLost."""
        if "ALERT" not in (error.reason or ""):
            return LinkLost(f"{self.address}: TLS: {_words(error)}")
        return PublishRefused(
            f"{self.address}: the broker ended TLS: {_words(error)}; options nsqha.tls.cert and nsqha.tls.key name the "
            f"certificate that it was sent"
        )

    def _ask(self, command: bytes, timeout_s: float) -> bytes:
        """Send a command and read its answer; an error raises PublishRefused."""
        if command:
            self.send(command, timeout_s)
        kind, data = self.answers(timeout_s)[0]
        if kind == _FRAME_ERROR:
            raise PublishRefused(f"{self.address}: {_with_hint(data)}")
        return data

    def send(self, wire: bytes, timeout_s: float) -> None:
        """Send a command as a whole. LinkLost: it was not sent as a whole, so it is not stored."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(wire)
        except OSError as error:
            raise Closed(f"{self.address}: {_words(error)}") from None

    @property
    def ended(self) -> bool:
        """Whether the broker has closed it, as far as is known without waiting."""
        try:
            return bool(self.answers(0))  # an answer without a command: the connection cannot be used further
        except LinkLost:
            return True

    def answers(self, wait_s: float) -> list[tuple[int, bytes]]:
        """The whole frames that have arrived; with a wait at least one, else LinkLost."""
        deadline = time.monotonic() + wait_s
        while not (frames := self._frames()):
            if not self.readable(max(0.0, deadline - time.monotonic())):
                if not wait_s:
                    return []
                raise LinkLost(f"{self.address}: no answer within {wait_s:.1f} s")
            self._receive()
        return frames

    def readable(self, wait_s: float) -> bool:
        """Whether bytes, or the end of the connection, have arrived or arrive within the time."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def _receive(self) -> None:
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except ssl.SSLError as error:
            raise self._tls_failed(error) from None
        except OSError as error:
            raise Closed(f"{self.address}: {_words(error)}") from None
        if not received:
            raise Closed(f"{self.address}: the broker closed the connection")
        self._data += received

    def _frames(self) -> list[tuple[int, bytes]]:
        data, at, frames = self._data, 0, []
        while len(data) - at >= 8:
            size, kind = _FRAME_HEAD.unpack_from(data, at)
            if not 4 <= size <= FRAME_BYTES_MAX or kind not in (_FRAME_ANSWER, _FRAME_ERROR):
                raise PublishRefused(f"{self.address} does not speak the NSQ protocol: option nsqd takes its TCP port")
            if len(data) - at < 4 + size:
                break
            frames.append((kind, bytes(data[at + 8 : at + 4 + size])))
            at += 4 + size
        del data[:at]
        return [frame for frame in frames if frame != (_FRAME_ANSWER, b"_heartbeat_")]

    def close(self) -> None:
        self._socket.close()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`. ValueError with one line."""
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _verdict(address: str, data: bytes) -> Exception:
    """The exception for an error frame: NotTaken if a retry may help, else PublishRefused."""
    text = _shown(data)
    code, _, _ = text.partition(" ")
    if code in ("E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED"):
        # nsqd itself says neither "not stored" nor "outcome unknown"; a prefix of its MPUB may be stored.
        return NotTaken(f"{address}: {text}", not_stored=f"{code[2:-7]} failed not stored" in text)
    return PublishRefused(f"{address}: {_with_hint(data)}")


def _with_hint(data: bytes) -> str:
    text = _shown(data)
    if "TLS required" in text:
        return f"{text} (the broker requires TLS: set option nsqha.tls to true)"
    return text + next((f" ({hint})" for start, hint in HINTS.items() if text.startswith(start)), "")


def _shown(data: bytes) -> str:
    return " ".join(data[:400].decode("utf-8", "replace").split())


def _features(answer: bytes) -> dict[str, object]:
    """A broker's answer to IDENTIFY; one that negotiates nothing answers OK."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _context(security: LinkSecurity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if security.root_ca_file:
            context.load_verify_locations(cafile=security.root_ca_file)
        else:
            context.load_default_certs()
    except OSError as error:
        raise PublishRefused(f"option nsqha.tls.ca: {security.root_ca_file}: {_words(error)}") from None
    if security.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if security.cert_file:
        try:
            # An encrypted key must not ask at a terminal that a worker does not have.
            context.load_cert_chain(security.cert_file, security.key_file, password=lambda: "")
        except OSError as error:
            files = f"{security.cert_file}, {security.key_file}"
            raise PublishRefused(f"options nsqha.tls.cert and nsqha.tls.key: {files}: {_words(error)}") from None
    return context


def _words(error: OSError) -> str:
    """The text of an error, without OpenSSL's source positions."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLError):
        return (error.reason or "the broker ended the handshake").replace("_", " ").lower()
    return error.strerror or "the broker closed the connection"
