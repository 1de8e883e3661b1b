"""The lookup protocol V1 as nsqd speaks it, without a socket: bytes in, bytes out.

    peer    -> "  V1"                                          once
    peer    -> line "\\n"                                       words separated by single blanks, the line trimmed
    peer    -> "IDENTIFY\\n" [size i32][JSON]
    daemon  -> [size i32][text]                                no frame type; OK, JSON, or an error
    peer    -> "AUTH\\n" [size i32][secret]                     as in V2, where the answer to IDENTIFY has auth_required

Commands: IDENTIFY (once, before any registration), AUTH, REGISTER topic [channel], UNREGISTER topic [channel], PING. A
broker of ours that has all partitions of a topic says how many: `REGISTER topic  4`, an empty channel and the number,
which nsqlookupd ignores. Replies leave in command order. Every error is fatal: it is sent, then the connection closes.

A daemon with an access file admits a peer by its address or by AUTH (`Admission`). Until then the peer is in no list:
consumers connect to what is listed, and show their tokens there. The file may change: `judge_again`.

A size or a line is checked against its limit before any part of it is buffered; the buffer never holds more than one
incomplete line or body.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable
from typing import Protocol

import msgspec

from lookupd.registry import Peer, PeerInfo, Registry
from nsqha.access.tokens import TOKEN_BYTES_MAX
from nsqha.clock import Now
from nsqha.ids import PARTITIONS_MAX, valid_name
from nsqha.texts import gojson

MAGIC = b"  V1"
LINE_BYTES_MAX = 4096
"""nsqd's longest line is UNREGISTER with two names of 64."""
IDENTIFY_BYTES_MAX = 64 * 1024
FIELD_CHARACTERS_MAX = 255
"""Of a text in IDENTIFY, as of a host name: answers show it once for each name that the peer registers."""
AUTH_BYTES_MAX = TOKEN_BYTES_MAX
STEPS_AT_ONCE = 100
"""Commands in one turn, some milliseconds of work. Then other connections have their turn."""

_SIZE = struct.Struct(">i")


class _IdentifyBody(msgspec.Struct):
    """The body of IDENTIFY."""

    version: str = ""
    hostname: str = ""
    broadcast_address: str = ""
    tcp_port: int = 0
    http_port: int = 0
    topology_zone: str = ""
    topology_region: str = ""


class _Fatal(Exception):
    """The reply after which the connection closes."""


class NotAdmitted(Exception):
    """The text of the error that the peer is sent; why is for the log of this daemon."""


class Admission(Protocol):
    """Decides whether one peer may register. Nothing is awaited."""

    @property
    def open(self) -> bool:
        """True while the peer needs no AUTH: its address may register, or every caller may."""

    def greeting(self, identity: bytes) -> bytes:
        """The answer to IDENTIFY of a peer that needs AUTH."""

    def admit(self, secret: bytes, digest: bytes) -> bytes:
        """The answer to AUTH. `digest`: the SHA-256 of what the peer sent with IDENTIFY. NotAdmitted."""

    def still(self) -> bool:
        """False: what the peer was admitted by is worth nothing any more."""


class _Expect(enum.Enum):
    MAGIC = enum.auto()
    LINE = enum.auto()
    SIZE = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()


Say = Callable[[str, str], None]
"""Receives log events: a stable event name, and a line for people."""


class LookupSession:
    """One connection of one nsqd.

    `identity` is the reply to IDENTIFY, which describes this daemon. `say` gets the log events. `admission`: who may
    register; None: everybody.
    """

    def __init__(
        self, registry: Registry, peer_id: str, identity: bytes, say: Say, admission: Admission | None = None
    ) -> None:
        self._admission = admission
        self._registry = registry
        self._peer_id = peer_id
        self._identity = identity
        self._say = say
        self._buffer = bytearray()
        self._expect = _Expect.MAGIC
        self._body_size = 0
        self._body_of = ""  # the command whose body is read
        self._introduced: tuple[PeerInfo, bytes] | None = None  # by IDENTIFY, the digest of whose body is this
        self._peer: Peer | None = None  # once it is admitted
        self.more = False
        """Some received bytes are not processed yet: call `receive` again."""

    @property
    def closed(self) -> bool:
        """Nothing more is read; the connection is to be closed once the replies are out."""
        return self._expect is _Expect.NOTHING

    @property
    def identified(self) -> bool:
        """True while it is listed as a producer, or as a node without topics."""
        return self._peer is not None

    def judge_again(self) -> bytes:
        """The access file has changed. Returns the error for a peer that may not register any more, which then is in
        no list and closed; empty for any other."""
        if self.closed or self._peer is None or self._admission is None or self._admission.still():
            return b""
        self._say("lookup_refused", f"CLIENT({self._peer_id}): it may not register any more by the access file")
        self.leave()
        return _reply(b"E_AUTH_FAILED AUTH failed")

    def receive(self, data: bytes, now: Now) -> bytes:
        """Process what the peer sent; returns the replies."""
        self._buffer += data
        replies = bytearray()
        try:
            self.more = all(self._step(replies, now) for _ in range(STEPS_AT_ONCE))
        except _Fatal as error:
            text = str(error)
            self._say("lookup_refused", f"CLIENT({self._peer_id}): {text}")
            replies += _reply(text.encode("utf-8", "surrogateescape"))
            self._stop()
        return bytes(replies)

    def eof(self) -> bytes:
        """Process the peer's end of stream; a body that is cut off is an error like any other."""
        cut_off = self._expect in (_Expect.SIZE, _Expect.BODY)
        what = "body size" if self._expect is _Expect.SIZE else "body"
        self._stop()
        return _reply(f"E_BAD_BODY {self._body_of} failed to read {what}".encode()) if cut_off else b""

    def leave(self) -> None:
        """Process the end of the connection."""
        self._stop()
        if self._peer is not None:
            self._registry.leave(self._peer)
            self._peer = None

    def _stop(self) -> None:
        self.more = False
        self._expect = _Expect.NOTHING
        self._buffer.clear()

    def _step(self, replies: bytearray, now: Now) -> bool:
        """Process one piece of input, if it is complete."""
        match self._expect:
            case _Expect.LINE:
                line = self._take_line()
                if line is None:
                    return False
                if reply := self._command(line, now):
                    replies += _reply(reply)
            case _Expect.MAGIC:
                if len(self._buffer) < len(MAGIC):
                    return False
                if self._take(len(MAGIC)) != MAGIC:
                    raise _Fatal("E_BAD_PROTOCOL")
                self._expect = _Expect.LINE
            case _Expect.SIZE:
                if len(self._buffer) < _SIZE.size:
                    return False
                self._body_size = _checked_size(self._body_of, _SIZE.unpack(self._take(_SIZE.size))[0])
                self._expect = _Expect.BODY
            case _Expect.BODY:
                if len(self._buffer) < self._body_size:
                    return False
                body = self._take(self._body_size)
                replies += _reply(self._identify(body, now) if self._body_of == "IDENTIFY" else self._auth(body, now))
                self._expect = _Expect.LINE
            case _Expect.NOTHING:
                self._buffer.clear()
                return False
        return True

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _take_line(self) -> str | None:
        end = self._buffer.find(b"\n", 0, LINE_BYTES_MAX)
        if end < 0:
            if len(self._buffer) >= LINE_BYTES_MAX:
                raise _Fatal(f"E_INVALID line is longer than {LINE_BYTES_MAX} bytes")
            return None
        return self._take(end + 1).decode("utf-8", "surrogateescape").strip()

    # ---- commands

    def _command(self, line: str, now: Now) -> bytes | None:
        name, *params = line.split(" ")
        match name:
            case "PING":
                return self._ping(now)
            case "REGISTER":
                return self._register(params)
            case "UNREGISTER":
                return self._unregister(params)
            case "IDENTIFY":
                if self._introduced is not None:
                    raise _Fatal("E_INVALID cannot IDENTIFY again")
                self._body_of, self._expect = name, _Expect.SIZE
                return None
            case "AUTH":
                if self._admission is None:
                    raise _Fatal("E_AUTH_DISABLED AUTH disabled")
                if self._introduced is None:
                    raise _Fatal("E_INVALID client must IDENTIFY")
                self._body_of, self._expect = name, _Expect.SIZE
                return None
        raise _Fatal(f"E_INVALID invalid command {name}")

    def _ping(self, now: Now) -> bytes:
        if self._peer is not None:
            self._peer.heard = now
        return b"OK"

    def _register(self, params: list[str]) -> bytes:
        peer, topic, channel = self._named("REGISTER", params)
        word = params[2] if len(params) > 2 and not channel else ""
        partitions = int(word) if word.isascii() and word.isdecimal() and len(word) < 5 else 0
        if not self._registry.register(peer, topic, channel, min(partitions, PARTITIONS_MAX)):
            raise _Fatal("E_INVALID REGISTER too many topics and channels are registered")
        self._say("lookup_register", f"DB: client({self._peer_id}) REGISTER topic:{topic} channel:{channel}")
        return b"OK"

    def _unregister(self, params: list[str]) -> bytes:
        peer, topic, channel = self._named("UNREGISTER", params)
        self._registry.unregister(peer, topic, channel)
        self._say("lookup_unregister", f"DB: client({self._peer_id}) UNREGISTER topic:{topic} channel:{channel}")
        return b"OK"

    def _named(self, command: str, params: list[str]) -> tuple[Peer, str, str]:
        if self._introduced is None:
            raise _Fatal("E_INVALID client must IDENTIFY")
        if self._peer is None:
            raise _Fatal(f"E_AUTH_FIRST AUTH required before {command}")
        if not params:
            raise _Fatal(f"E_INVALID {command} insufficient number of params")
        topic, channel = params[0], params[1] if len(params) > 1 else ""
        if not valid_name(topic):
            raise _Fatal(f"E_BAD_TOPIC {command} topic name '{topic}' is not valid")
        if channel and not valid_name(channel):
            raise _Fatal(f"E_BAD_CHANNEL {command} channel name '{channel}' is not valid")
        return self._peer, topic, channel

    def _identify(self, body: bytes, now: Now) -> bytes:
        try:
            said = gojson.decode(body, _IdentifyBody)
        except ValueError:
            raise _Fatal("E_BAD_BODY IDENTIFY failed to decode JSON body") from None
        if not (said.broadcast_address and said.tcp_port and said.http_port and said.version):
            raise _Fatal("E_BAD_BODY IDENTIFY missing fields")
        info = PeerInfo(
            hostname=said.hostname,
            broadcast_address=said.broadcast_address,
            tcp_port=said.tcp_port,
            http_port=said.http_port,
            version=said.version,
            topology_zone=said.topology_zone,
            topology_region=said.topology_region,
        )
        for name in ("broadcast_address", "hostname", "version", "topology_zone", "topology_region"):
            if len(getattr(info, name)) > FIELD_CHARACTERS_MAX:
                raise _Fatal(f"E_BAD_BODY IDENTIFY {name} is longer than {FIELD_CHARACTERS_MAX} characters")
        self._introduced = info, hashlib.sha256(body).digest()
        ports = f"TCP:{info.tcp_port} HTTP:{info.http_port} Version:{info.version}"
        self._say("lookup_identify", f"CLIENT({self._peer_id}): IDENTIFY Address:{info.broadcast_address} {ports}")
        if self._admission is None or self._admission.open:
            self._peer = self._registry.join(self._peer_id, info, now)
            return self._identity
        return self._admission.greeting(self._identity)

    def _auth(self, secret: bytes, now: Now) -> bytes:
        assert self._admission is not None and self._introduced is not None
        info, digest = self._introduced
        try:
            answer = self._admission.admit(secret, digest)
        except NotAdmitted as error:
            raise _Fatal(str(error)) from None
        if self._peer is None:
            self._peer = self._registry.join(self._peer_id, info, now)
        return answer


def _checked_size(command: str, size: int) -> int:
    most = IDENTIFY_BYTES_MAX if command == "IDENTIFY" else AUTH_BYTES_MAX
    if size > most:
        raise _Fatal(f"E_BAD_BODY {command} body too big {size} > {most}")
    if size < 0:
        raise _Fatal(f"E_BAD_BODY {command} invalid body size {size}")
    return size


def _reply(text: bytes) -> bytes:
    return _SIZE.pack(len(text)) + text
