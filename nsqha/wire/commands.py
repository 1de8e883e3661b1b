"""The commands of a session, group by group: what each checks, and which call of a handler it becomes.

Each group owns the state that its commands share. A command is run with its words and with data[start:pos], its line;
it returns where the next one begins, or NOT_DONE: keep it, and run it again from its first byte.

What is checked, in which order, with which words and whether it ends the connection is nsqd's (docs/nsq-compat.md).
Sizes are checked before a byte of what they announce is kept. State is checked before parameters.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nsqha import hot
from nsqha.wire import errors, identify
from nsqha.wire.handler import AckHandler, ConsumeHandler, FlowHandler, NegotiationHandler, PublishHandler
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.mpub import MpubReader
from nsqha.wire.unread import UnreadBytes
from nsqha.wire.words import as_int64, name, quote, uint64

# Shown in /stats as numbers.
INIT = 0
SUBSCRIBED = 3
CLOSING = 4

NOT_DONE = -1  # instead of a position: keep the command and what follows
DETACHED = -2  # instead of a position: what follows has been kept already
_TOPICS_MAX = 64  # publish lines remembered as valid
_I32 = struct.Struct(">i")
_PART_GROWS = hot.HEADER - 4  # bytes by which a frame is longer than the part of an MPUB that it was


class BadCommand(Exception):
    """A command that ends the connection; the argument is the text of the error frame."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self.text = text


class _Sized(NamedTuple):
    """How a command words what can be wrong with its body."""

    no_size: bytes
    not_positive: bytes
    too_big: bytes
    cut: bytes


def _message(command: bytes) -> _Sized:
    return _Sized(
        b"E_BAD_MESSAGE %b failed to read message body size" % command,
        b"E_BAD_MESSAGE %b invalid message body size " % command,
        b"E_BAD_MESSAGE %b message too big " % command,
        b"E_BAD_MESSAGE %b failed to read message body" % command,
    )


def _body(command: bytes) -> _Sized:
    return _Sized(
        b"E_BAD_BODY %b failed to read body size" % command,
        b"E_BAD_BODY %b invalid body size " % command,
        b"E_BAD_BODY %b body too big " % command,
        b"E_BAD_BODY %b failed to read body" % command,
    )


_PUB, _DPUB = _message(b"PUB"), _message(b"DPUB")
_MPUB, _IDENTIFY, _AUTH = _body(b"MPUB"), _body(b"IDENTIFY"), _body(b"AUTH")


def _body_end(unread: UnreadBytes, texts: _Sized, size_max: int, data: bytes, start: int, pos: int) -> int:
    """Where the body ends whose size is at `pos`; NOT_DONE, and `unread` knows what is missing."""
    missing = pos + 4 - len(data)
    if missing > 0:
        unread.eof_error = texts.no_size
    else:
        size: int = _I32.unpack_from(data, pos)[0]
        if size <= 0:
            raise BadCommand(texts.not_positive + b"%d" % size)
        if size > size_max:
            raise BadCommand(texts.too_big + b"%d > %d" % (size, size_max))
        missing += size
        if missing <= 0:
            return pos + 4 + size
        unread.eof_error = texts.cut
    unread.need = len(data) - start + missing
    return NOT_DONE


class FromFork:
    """Whether the client of a session is one of the Youzan fork, as its IDENTIFY says."""

    __slots__ = ("no_partition",)

    def __init__(self) -> None:
        self.no_partition = errors.BAD_PARTITION
        """The code of the error for a partition that a topic does not have."""

    @property
    def known(self) -> bool:
        return self.no_partition is errors.NO_TOPIC

    def identified(self, agreed: identify.Agreed) -> None:
        if agreed.of_fork:
            self.no_partition = errors.NO_TOPIC

    def partition(
        self, handler: PublishHandler | ConsumeHandler, words: list[bytes], first: int, topic: str
    ) -> int | None:
        """The partition that words[first] names, as commands of the fork's clients do; None if it names none, which -1
        does there too, or if partitions are not named here: nsqd ignores further words."""
        if len(words) <= first or not (word := words[first]) or word == b"-1":
            return None
        named = handler.named_partitions(topic)
        partitions = named or self.known  # a client of the fork means it, also where there is only one
        if not partitions:
            return None
        number = int(word) if word.isdigit() and len(word) < 5 else partitions
        if number >= partitions:
            text = b"%b %b topic partition %b is not valid: %b has the partitions 0 to %d"
            raise BadCommand(text % (self.no_partition, words[0], quote(word), topic.encode(), partitions - 1))
        return number if named else None


def _wrong_state(command: bytes) -> BadCommand:
    return BadCommand(b"E_INVALID cannot %b in current state" % command)


class PublishCommands:
    """PUB, MPUB and DPUB of one session."""

    __slots__ = (
        "_flow",
        "_limits",
        "_mpub_partition",
        "_msg_bytes_max",
        "_unread",
        "checks",
        "fork",
        "handler",
        "mpub_open",
        "topics",
    )

    def __init__(
        self,
        limits: ProtocolLimits,
        handler: PublishHandler,
        flow: FlowHandler,
        unread: UnreadBytes,
        fork: FromFork,
    ) -> None:
        self.fork = fork
        self.checks = True
        """Ask the handler before each publish; the shell clears it where every client may publish."""
        self.topics: dict[bytes, tuple[str, int | None]] = {}  # valid "PUB topic [partition]\n" lines
        self.mpub_open = False  # the MPUB at the front has passed its checks and made its topic
        self._mpub_partition: int | None = None  # that it names
        self._limits = limits
        self._msg_bytes_max = limits.msg_bytes_max
        self.handler = handler
        self._flow = flow
        self._unread = unread

    def may(self, command: str, topic: str) -> bool:
        """Whether the client may publish. If not, the handler has refused it, or is blocked until it knows."""
        return not self.checks or self.handler.check_publish(command, topic)

    def _know(self, line: bytes, topic: str, partition: int | None) -> None:
        """From now on such a "PUB topic [partition]\\n" line is not looked at again; the shell does when the topic
        has changed. A line with a word that was ignored is looked at: it may name a partition later."""
        if partition is not None or line.count(b" ") == 1:
            if len(self.topics) == _TOPICS_MAX:
                self.topics.clear()
            self.topics[line] = topic, partition

    def pub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        """The first PUB to a topic, or one that is incomplete or wrong; the session takes all others in runs."""
        if len(words) < 2:
            raise BadCommand(b"E_INVALID PUB insufficient number of parameters")
        topic = name(words[1])
        if topic is None:
            raise BadCommand(b"E_BAD_TOPIC PUB topic name %b is not valid" % quote(words[1]))
        partition = self.fork.partition(self.handler, words, 2, topic)
        self._know(data[start:pos], topic, partition)
        end = _body_end(self._unread, _PUB, self._msg_bytes_max, data, start, pos)
        if end == NOT_DONE or not self.may("PUB", topic):
            return NOT_DONE
        self.handler.publish(topic, hot.frame(data[pos + 4 : end]), 1, "PUB", partition)
        return end

    def dpub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if len(words) < 3:
            raise BadCommand(b"E_INVALID DPUB insufficient number of parameters")
        topic = name(words[1])
        if topic is None:
            raise BadCommand(b"E_BAD_TOPIC DPUB topic name %b is not valid" % quote(words[1]))
        delay_ms = uint64(words[2])
        if delay_ms is None:
            raise BadCommand(b"E_INVALID DPUB could not parse timeout %b" % words[2])
        delay_ms_max = self._limits.req_timeout_ms_max
        if delay_ms > delay_ms_max:
            raise BadCommand(b"E_INVALID DPUB timeout %d out of range 0-%d" % (delay_ms, delay_ms_max))
        partition = self.fork.partition(self.handler, words, 3, topic)
        end = _body_end(self._unread, _DPUB, self._msg_bytes_max, data, start, pos)
        if end == NOT_DONE or not self.may("DPUB", topic):
            return NOT_DONE
        self.handler.publish_deferred(topic, hot.frame(data[pos + 4 : end]), delay_ms, partition)
        return end

    def mpub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        """Checks and topic come before the body and must not be repeated when its rest has come: `mpub_open`."""
        begun = self.mpub_open
        if not begun:
            if len(words) < 2:
                raise BadCommand(b"E_INVALID MPUB insufficient number of parameters")
            topic = name(words[1])
            if topic is None:
                # nsqd says the code twice.
                raise BadCommand(b"E_BAD_TOPIC E_BAD_TOPIC MPUB topic name %b is not valid" % quote(words[1]))
            self._mpub_partition = self.fork.partition(self.handler, words, 2, topic)
            self._know(data[start + 1 : pos], topic, self._mpub_partition)
            if not self.may("MPUB", topic) or not self._open_mpub(topic):
                return NOT_DONE
        unread = self._unread
        reader = unread.reader
        batch = None
        if reader is None:
            body_bytes_max = self._limits.body_bytes_max
            end = _body_end(unread, _MPUB, body_bytes_max, data, start, pos)
            if len(data) - pos < 4:
                return NOT_DONE
            if end != NOT_DONE:
                # The parts say where the body ends (mpub.py), so they are looked for beyond `end`, too.
                end = min(len(data), pos + 4 + body_bytes_max)
                batch = hot.mpub_body(data, pos + 4, end, self._msg_bytes_max)
            if batch is None:
                reader = MpubReader(msg_bytes_max=self._msg_bytes_max, body_bytes_max=body_bytes_max)
                reader.feed(data[pos + 4 :])
        if reader is not None:
            if not reader.done:
                unread.reader = reader
                return NOT_DONE
            unread.reader = unread.eof_error = None
            unread.need = 0
            if reader.error is not None:
                raise BadCommand(reader.error)
            batch = hot.mpub_body(data, pos + 4, pos + 4 + reader.size, self._msg_bytes_max)
        assert batch is not None, "the body was found to be whole"
        count, frames = batch
        if begun and not self.may("MPUB", words[1].decode()):
            return NOT_DONE  # the body has taken its time, and the right is gone
        self.mpub_open = False
        self.handler.publish(words[1].decode(), frames, count, "MPUB", self._mpub_partition)
        # A frame is 34 bytes more than its message, a part of the body 4: so much has been taken.
        return pos + 8 + len(frames) - _PART_GROWS * count

    def _open_mpub(self, topic: str) -> bool:
        """Make the topic; False if that takes a while."""
        self.mpub_open = True
        self.handler.ensure_topic(topic)
        return not (self._flow.blocked or self._unread.dead)

    def whole_mpub(self, topic: str, partition: int | None, data: bytes, pos: int) -> int:
        """The ordinary MPUB: to a known topic, nothing wrong, all of it there. Where it ends; 0 for `mpub`'s cases."""
        body = pos + 4
        if len(data) < body:
            return 0
        size: int = _I32.unpack_from(data, pos)[0]
        end = body + size
        if not 0 < size <= self._limits.body_bytes_max or end > len(data):
            return 0
        batch = hot.mpub_body(data, body, end, self._msg_bytes_max)
        if batch is None or 4 + len(batch[1]) - _PART_GROWS * batch[0] != size:
            return 0
        handler = self.handler
        if self.checks and not handler.check_publish("MPUB", topic):
            return NOT_DONE
        self.mpub_open, self._mpub_partition = True, partition
        handler.ensure_topic(topic)
        if self._flow.blocked or self._unread.dead:
            return NOT_DONE
        self.mpub_open = False
        handler.publish(topic, batch[1], batch[0], "MPUB", partition)
        return end


class ConsumeCommands:
    """SUB, RDY, FIN, REQ, TOUCH and CLS of one session."""

    __slots__ = ("_handler", "_limits", "acks", "fork", "heartbeats", "state")

    def __init__(self, limits: ProtocolLimits, handler: ConsumeHandler, fork: FromFork) -> None:
        self.fork = fork
        self.state = INIT
        self.heartbeats = limits.heartbeat_interval_default_ms > 0  # whether the client gets any; as IDENTIFY says
        self.acks: AckHandler | None = None  # set by the handler of SUB
        self._limits = limits
        self._handler = handler

    def sub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state != INIT:
            raise _wrong_state(b"SUB")
        if not self.heartbeats:
            raise BadCommand(b"E_INVALID cannot SUB with heartbeats disabled")
        if len(words) < 3:
            raise BadCommand(b"E_INVALID SUB insufficient number of parameters")
        topic, channel = name(words[1]), name(words[2])
        if topic is None:
            raise BadCommand(b"E_BAD_TOPIC SUB topic name %b is not valid" % quote(words[1]))
        if channel is None:
            raise BadCommand(b"E_BAD_CHANNEL SUB channel name %b is not valid" % quote(words[2]))
        partition = self.fork.partition(self._handler, words, 3, topic)
        self.state = SUBSCRIBED
        self._handler.subscribe(topic, channel, partition)
        return pos

    def rdy(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state == CLOSING:
            return pos  # whatever it says
        if self.state != SUBSCRIBED:
            raise _wrong_state(b"RDY")
        count = uint64(words[1]) if len(words) > 1 else 1
        if count is None:
            raise BadCommand(b"E_INVALID RDY could not parse count %b" % words[1])
        if count > self._limits.rdy_count_max:
            text = b"E_INVALID RDY count %d out of range 0-%d"
            raise BadCommand(text % (as_int64(count), self._limits.rdy_count_max))
        self._handler.ready(count)
        return pos

    def fin(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        """A FIN with other words, or none, behind its message id; the session takes all others in runs."""
        line = b"FIN %b\n" % self._message_id(words, 2)
        assert self.acks is not None
        self.acks.fin_run(line, 0, len(line), 1)
        return pos

    def req(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        message_id = self._message_id(words, 3)
        delay_ms = uint64(words[2])
        if delay_ms is None:
            raise BadCommand(b"E_INVALID REQ could not parse timeout %b" % words[2])
        assert self.acks is not None
        self.acks.req(message_id, min(delay_ms, self._limits.req_timeout_ms_max))
        return pos

    def touch(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        message_id = self._message_id(words, 2)
        assert self.acks is not None
        self.acks.touch(message_id)
        return pos

    def _message_id(self, words: list[bytes], words_min: int) -> bytes:
        """The message id of FIN, REQ or TOUCH."""
        if self.state == INIT:
            raise _wrong_state(words[0])
        if len(words) < words_min:
            raise BadCommand(b"E_INVALID %b insufficient number of params" % words[0])
        if len(words[1]) != 16:
            raise BadCommand(b"E_INVALID invalid message ID")
        return words[1]

    def cls(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state != SUBSCRIBED:
            raise _wrong_state(b"CLS")
        self.state = CLOSING
        self._handler.cls()
        return pos


class NegotiationCommands:
    """IDENTIFY, AUTH and NOP of one session."""

    __slots__ = ("_agreed", "_codec_on", "_consuming", "_handler", "_limits", "_tls_on", "_unread")

    def __init__(
        self, limits: ProtocolLimits, handler: NegotiationHandler, consuming: ConsumeCommands, unread: UnreadBytes
    ) -> None:
        self._limits = limits
        self._handler = handler
        self._consuming = consuming
        self._unread = unread
        self._agreed: identify.Agreed | None = None  # no IDENTIFY yet
        self._tls_on = self._codec_on = False

    def identify(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self._consuming.state != INIT:
            raise _wrong_state(b"IDENTIFY")
        size_max = min(self._limits.body_bytes_max, identify.BODY_BYTES_MAX)
        end = _body_end(self._unread, _IDENTIFY, size_max, data, start, pos)
        if end == NOT_DONE:
            return NOT_DONE
        before = self._agreed or identify.initial(self._limits)
        request = identify.negotiate(data[pos + 4 : end], self._limits, before)
        if isinstance(request, bytes):
            raise BadCommand(request)
        agreed = request.agreed
        if (agreed.tls and (self._tls_on or self._codec_on)) or (agreed.codec and self._codec_on):
            raise BadCommand(b"E_IDENTIFY_FAILED IDENTIFY failed connection is upgraded already")
        self._agreed = agreed
        self._consuming.fork.identified(agreed)
        self._tls_on |= agreed.tls
        self._codec_on |= bool(agreed.codec)
        self._consuming.heartbeats = agreed.heartbeat_interval_ms > 0
        # Kept before the call, so that `take` can be used inside it.
        self._unread.keep(data, end)
        self._handler.identify(request)
        return DETACHED

    def auth(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self._consuming.state != INIT:
            raise _wrong_state(b"AUTH")
        if len(words) != 1:
            raise BadCommand(b"E_INVALID AUTH invalid number of parameters")
        size_max = min(self._limits.body_bytes_max, identify.BODY_BYTES_MAX)  # whoever sends it is not known yet
        end = _body_end(self._unread, _AUTH, size_max, data, start, pos)
        if end == NOT_DONE:
            return NOT_DONE
        self._handler.auth(data[pos + 4 : end])
        return end

    def nop(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        return pos
