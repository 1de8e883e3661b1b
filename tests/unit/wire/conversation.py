"""A handler that writes down what a session asks of it, for all tests of the wire."""

from __future__ import annotations

from nsqha import hot
from nsqha.wire.encoder import error
from nsqha.wire.identify import AgreedIdentify
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.session import MAGIC, Session

Call = tuple[object, ...]


def i32(number: int) -> bytes:
    return number.to_bytes(4, "big", signed=True)


def sized(body: bytes) -> bytes:
    return i32(len(body)) + body


def mpub_body(*bodies: bytes) -> bytes:
    return i32(len(bodies)) + b"".join(map(sized, bodies))


def bodies_of(frames: bytes) -> list[bytes]:
    """The message bodies in a run of blank frames; every frame is checked on the way."""
    bodies, pos = [], 0
    while pos < len(frames):
        size = int.from_bytes(frames[pos : pos + 4], "big")
        body = frames[pos + hot.HEADER : pos + 4 + size]
        assert frames[pos : pos + 4 + size] == hot.frame(body)
        bodies.append(body)
        pos += 4 + size
    return bodies


class Recorder:
    """Every call as a tuple. Runs are written as single messages and single FINs, so that a transcript does not
    depend on how the bytes were cut."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.session: Session | None = None
        self.blocked = False
        self.entered = 0  # commands are run one by one
        self.block_on: set[str] = set()  # names of calls after which the handler is blocked
        self.refuse_publish = False
        self.partitions = 10  # of the topic `several`

    def _call(self, name: str, *arguments: object) -> None:
        self._run(name, [(name, *arguments)])

    def _run(self, name: str, run: list[Call]) -> None:
        assert not self.blocked, "called while blocked"
        self.calls += run
        if name in self.block_on:
            self.blocked = True

    def enter(self) -> bool:
        assert not self.blocked, "called while blocked"
        self.entered += 1
        return True

    def leave(self) -> None:
        self.entered -= 1
        assert self.entered >= 0

    def rest(self) -> None:
        """When depends on the cuts."""
        assert not self.blocked, "called while blocked"
        if "rest" in self.block_on:
            self.blocked = True

    def fatal(self, data: bytes) -> None:
        assert data[:8] == i32(len(data) - 4) + i32(1)
        self._call("fatal", data[8:])

    def hang_up(self) -> None:
        self._call("hang_up")

    def check_publish(self, command: str, topic: str) -> bool:
        if "check_publish" in self.block_on:
            self.blocked = True
            return False
        if self.refuse_publish:
            self.fatal(error(b"E_UNAUTHORIZED"))
            assert self.session is not None
            self.session.kill()
            return False
        assert self.session is not None
        if command != "PUB" and not self.session.publishing.mpub_open:  # how often depends on the cuts
            self._call("check", command, topic)
        return True

    def named_partitions(self, topic: str) -> int:
        return self.partitions if topic == "several" else 0

    def ensure_topic(self, topic: str) -> None:
        self._call("ensure_topic", topic)

    def publish(self, topic: str, frames: bytes, count: int, command: str, partition: int | None) -> None:
        if partition is not None:
            topic = f"{topic}/{partition}"
        bodies = bodies_of(frames)
        assert len(bodies) == count > 0
        if command == "PUB":
            self._run("pub", [("pub", topic, body) for body in bodies])
        else:
            self._call("mpub", topic, bodies)

    def publish_deferred(self, topic: str, frame: bytes, delay_ms: int, partition: int | None) -> None:
        if partition is not None:
            topic = f"{topic}/{partition}"
        (body,) = bodies_of(frame)
        self._call("dpub", topic, body, delay_ms)

    def subscribe(self, topic: str, channel: str, partition: int | None) -> None:
        if partition is not None:
            topic = f"{topic}/{partition}"
        assert self.session is not None
        self.session.consuming.acks = self
        self._call("sub", topic, channel)

    def ready(self, count: int) -> None:
        self._call("rdy", count)

    def fin_run(self, data: bytes, pos: int, end: int, singly: int) -> int:
        assert end > pos and (end - pos) % 21 == 0
        lines = [data[at : at + 21] for at in range(pos, end, 21)]
        assert all(line.startswith(b"FIN ") and line.endswith(b"\n") for line in lines)
        self._run("fin", [("fin", line[4:20]) for line in lines])
        return end

    def req(self, message_id: bytes, delay_ms: int) -> None:
        self._call("req", message_id, delay_ms)

    def touch(self, message_id: bytes) -> None:
        self._call("touch", message_id)

    def cls(self) -> None:
        self._call("cls")

    def identify(self, request: AgreedIdentify) -> None:
        self._call("identify", request)

    def auth(self, secret: bytes) -> None:
        self._call("auth", secret)


def session_of(handler: Recorder, limits: ProtocolLimits | None = None) -> Session:
    """A session whose every call is one of `handler`; nothing was received yet."""
    limits = limits or ProtocolLimits()
    session = Session(limits, handler, publishes=handler, consumes=handler, negotiates=handler)
    handler.session = session
    return session


def start(limits: ProtocolLimits | None = None) -> tuple[Session, Recorder]:
    """A session that has seen the magic."""
    handler = Recorder()
    session = session_of(handler, limits)
    session.receive(MAGIC)
    return session, handler


def calls(*data: bytes, limits: ProtocolLimits | None = None, eof: bool = False) -> list[Call]:
    """What a session makes of these reads."""
    session, handler = start(limits)
    for piece in data:
        session.receive(piece)
    if eof:
        session.eof()
    return handler.calls
