"""One client's side of the V2 protocol, without a socket: bytes in, calls of a `Handler` (handler.py) out.

    "  V2"  then commands:   name *(" " word) "\\n"  [ size i32, body ]        big endian

Commands run in order, one completely before the next. Runs are taken whole: consecutive PUBs to one topic, an MPUB's
body and consecutive FINs are each one call, whatever their number; that is where the speed comes from. All others are
run one by one; after so many of them the handler may have others take their turn (`Handler.rest`).

What is checked, in which order, with which words and whether it ends the connection is nsqd's (docs/nsq-compat.md).
Sizes are checked before a byte of what they announce is kept. State is checked before parameters.

A command that is not complete yet is kept from its first byte and run again from there when enough has come: there
is no half-executed state (MPUB alone has one, see `_mpub`). Kept bytes are joined once, when `_need` of them are there,
so a body that arrives in many reads costs one copy. Kept are at most: a line, or the line and body of one command,
and what was received while the handler was blocked; who blocks must stop reading from the socket.

After a fatal error, by the session or by the handler (`kill`), nothing is consumed and nothing is called any more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from nsqha import hot
from nsqha.wire import encoder, identify
from nsqha.wire.errors import BAD_PROTOCOL
from nsqha.wire.handler import Handler
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.mpub import MpubReader
from nsqha.wire.words import as_int64, name, quote, uint64

MAGIC = b"  V2"
LINE_BYTES_MAX = 16 << 10  # the newline included

# Shown in /stats as numbers.
INIT = 0
SUBSCRIBED = 3
CLOSING = 4

_FIN_BYTES = 21  # "FIN " + 16 + newline
_TOPICS_MAX = 64  # publish lines remembered as valid
_COMMANDS_AT_ONCE = 500  # one by one: some milliseconds
_NOT_DONE = -1  # instead of a position: keep the command and what follows
_DETACHED = -2  # instead of a position: what follows has been kept already
_I32 = struct.Struct(">i")
_M = ord("M")
_PART_GROWS = hot.HEADER - 4  # bytes by which a frame is longer than the part of an MPUB that it was


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


class Session:
    """Decodes one connection. Not re-entrant, except that a handler may call `resume`, `take_unread` or `kill`."""

    __slots__ = (
        "_agreed",
        "_codec_on",
        "_dead",
        "_ended",
        "_eof_error",
        "_greeted",
        "_handler",
        "_have",
        "_kept",
        "_limits",
        "_mpub_open",
        "_mpub_reader",
        "_msg_bytes_max",
        "_need",
        "_tls_on",
        "_topics",
        "busy",
        "checks_publish",
        "state",
        "tls_required_now",
    )

    def __init__(self, limits: ProtocolLimits, handler: Handler) -> None:
        self.state = INIT
        self.busy = True
        """What is received next is not the beginning of a command, or not to be run."""
        self.tls_required_now = False
        """Refuse all but IDENTIFY; the shell clears it when TLS is on."""
        self.checks_publish = True
        """Ask the handler before each publish; the shell clears it where everybody may publish."""
        self._limits = limits
        self._handler = handler
        self._msg_bytes_max = limits.msg_bytes_max
        self._agreed = identify.initial(limits)
        self._tls_on = self._codec_on = False
        self._topics: dict[bytes, str] = {}  # valid "PUB topic\n" lines
        self._mpub_open = False  # the MPUB at the front has passed its checks and made its topic
        self._mpub_reader: MpubReader | None = None
        self._kept: list[bytes] = []  # received and not consumed
        self._have = 0  # bytes in `_kept`
        self._need = len(MAGIC)  # bytes from the front before anything can be done
        self._eof_error: bytes | None = None  # what to say if they never come
        self._greeted = self._ended = self._dead = False

    # ---- for the shell

    def receive(self, data: bytes) -> None:
        """Consume what can be consumed."""
        if not self.busy and not self._handler.blocked:
            if self._consume(data):
                self._go_on()
        elif data and not self._dead:
            self.busy = True
            self._kept.append(data)
            self._have += len(data)
            if self._mpub_reader is not None:
                self._mpub_reader.feed(data)
            self._go_on()

    def resume(self) -> None:
        """Go on after the handler was blocked."""
        self._go_on()

    def eof(self) -> None:
        """The client sends nothing more: a command that waits for its body fails. Otherwise nothing is called; the
        shell closes when the replies it owes have left."""
        self._ended = True
        self._go_on()

    def kill(self) -> None:
        """The connection is ending: ignore what was and will be received."""
        self._dead = self.busy = True
        self._kept.clear()
        self._have = 0
        self._topics.clear()
        self._mpub_reader = None

    @property
    def unread_bytes(self) -> int:
        """Received and not consumed: of a command whose rest has not come, or behind one that the handler waits for."""
        return self._have

    def take_unread(self) -> bytes:
        """Received and not consumed, and from now on the caller's."""
        return self._take()

    # ---- bytes that wait

    def _go_on(self) -> None:
        handler = self._handler
        while self._have and not self._dead and not handler.blocked and self._enough():
            data = self._take()
            if self._greeted:
                self._consume(data)
            elif data.startswith(MAGIC):
                self._greeted = True
                self.busy = False
                self._consume(data[len(MAGIC) :])
            else:
                self._end(BAD_PROTOCOL)
        if self._ended and not self._dead and not handler.blocked:
            reader = self._mpub_reader
            text = self._eof_error if reader is None else reader.eof_error
            if text is not None:
                self._end(encoder.error(text))
            self.kill()

    def _enough(self) -> bool:
        reader = self._mpub_reader
        return self._have >= self._need if reader is None else reader.done

    def _take(self) -> bytes:
        data = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        self._kept.clear()
        self._have = self._need = 0
        self._eof_error = None
        self.busy = self._dead or not self._greeted
        return data

    def _keep(self, data: bytes, pos: int) -> None:
        if pos < len(data):
            self._kept.append(data[pos:] if pos else data)
            self._have = len(data) - pos
            self.busy = True

    def _end(self, frame: bytes) -> None:
        self.kill()
        self._handler.fatal(frame)

    # ---- commands

    def _consume(self, data: bytes) -> bool:
        """Run the commands in `data`, keep what remains; True if that should be looked at again at once."""
        handler, topics = self._handler, self._topics
        pos, end = 0, len(data)
        left = _COMMANDS_AT_ONCE
        while pos < end:
            stop = data.find(b"\n", pos, pos + LINE_BYTES_MAX) + 1
            if not stop:
                return self._unfinished_line(data, pos)
            line = data[pos:stop]
            topic = topics.get(line)
            if topic is not None:
                after, count, frames = hot.pub_run(data, pos, end, line, self._msg_bytes_max)
                if count:
                    if self.checks_publish and not self._may_publish("PUB", topic):
                        break
                    handler.publish(topic, frames, count, "PUB")
                    pos = after
                    if handler.blocked or self._dead:
                        break
                    continue
            elif data[pos] == _M and (topic := topics.get(line[1:])) is not None and not self._mpub_open:
                after = self._whole_mpub(topic, data, stop)
                if after == _NOT_DONE:
                    break
                if after:
                    pos = after
                    if handler.blocked or self._dead:
                        break
                    continue
            elif stop - pos == _FIN_BYTES and self.state != INIT and line.startswith(b"FIN "):
                after = hot.fins_end(data, pos, end)
                if after > pos:
                    handler.fin_run(data, pos, after)
                    pos = after
                    if handler.blocked or self._dead:
                        break
                    continue
            after = self._command(line, data, pos, stop)
            if after == _DETACHED:
                return True
            if after == _NOT_DONE:
                break
            pos = after
            left -= 1
            if not left:
                left = _COMMANDS_AT_ONCE
                handler.rest()
            if handler.blocked or self._dead:
                break
        if pos < end and not self._dead:
            self._keep(data, pos)
        return False

    def _unfinished_line(self, data: bytes, pos: int) -> bool:
        if len(data) - pos >= LINE_BYTES_MAX:
            self.kill()
            self._handler.hang_up()
        else:
            self._need = len(data) - pos + 1
            self._keep(data, pos)
        return False

    def _command(self, line: bytes, data: bytes, start: int, pos: int) -> int:
        """Run the command whose line is data[start:pos]; return where the next one begins."""
        words = line[: -2 if line.endswith(b"\r\n") else -1].split(b" ")
        command = words[0]
        if self.tls_required_now and command != b"IDENTIFY":
            return self._fatal(b"E_INVALID cannot %b in current state (TLS required)" % command)
        run = _COMMANDS.get(command)
        if run is None:
            return self._fatal(b"E_INVALID invalid command %b" % command)
        return run(self, words, data, start, pos)

    def _fatal(self, text: bytes) -> int:
        self._end(encoder.error(text))
        return _NOT_DONE

    def _wrong_state(self, command: bytes) -> int:
        return self._fatal(b"E_INVALID cannot %b in current state" % command)

    def _may_publish(self, command: str, topic: str) -> bool:
        if not self.checks_publish or self._handler.check_publish(command, topic):
            return True
        if not self._handler.blocked:
            self.kill()  # the handler has said why
        return False

    def _sized(self, texts: _Sized, size_max: int, data: bytes, start: int, pos: int) -> int:
        """Where the body ends whose size is at `pos`, or _NOT_DONE."""
        missing = pos + 4 - len(data)
        if missing > 0:
            self._eof_error = texts.no_size
        else:
            size: int = _I32.unpack_from(data, pos)[0]
            if size <= 0:
                return self._fatal(texts.not_positive + b"%d" % size)
            if size > size_max:
                return self._fatal(texts.too_big + b"%d > %d" % (size, size_max))
            missing += size
            if missing <= 0:
                return pos + 4 + size
            self._eof_error = texts.cut
        self._need = len(data) - start + missing
        return _NOT_DONE

    def _nop(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        return pos

    # ---- publishing

    def _topic(self, line: bytes, word: bytes) -> str | None:
        """The topic that `word` of a "PUB topic\\n" line names, or None; from now on such lines are known."""
        topic = self._topics.get(line)
        if topic is None:
            topic = name(word)
            if topic is not None:
                if len(self._topics) == _TOPICS_MAX:
                    self._topics.clear()
                self._topics[line] = topic
        return topic

    def _pub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        """The first PUB to a topic, or one that is incomplete or wrong; all others never get here."""
        if len(words) < 2:
            return self._fatal(b"E_INVALID PUB insufficient number of parameters")
        topic = self._topic(data[start:pos], words[1])
        if topic is None:
            return self._fatal(b"E_BAD_TOPIC PUB topic name %b is not valid" % quote(words[1]))
        end = self._sized(_PUB, self._msg_bytes_max, data, start, pos)
        if end == _NOT_DONE or not self._may_publish("PUB", topic):
            return _NOT_DONE
        self._handler.publish(topic, hot.frame(data[pos + 4 : end]), 1, "PUB")
        return end

    def _dpub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if len(words) < 3:
            return self._fatal(b"E_INVALID DPUB insufficient number of parameters")
        topic = name(words[1])
        if topic is None:
            return self._fatal(b"E_BAD_TOPIC DPUB topic name %b is not valid" % quote(words[1]))
        delay_ms = uint64(words[2])
        if delay_ms is None:
            return self._fatal(b"E_INVALID DPUB could not parse timeout %b" % words[2])
        delay_ms_max = self._limits.req_timeout_ms_max
        if delay_ms > delay_ms_max:
            return self._fatal(b"E_INVALID DPUB timeout %d out of range 0-%d" % (delay_ms, delay_ms_max))
        end = self._sized(_DPUB, self._msg_bytes_max, data, start, pos)
        if end == _NOT_DONE or not self._may_publish("DPUB", topic):
            return _NOT_DONE
        self._handler.publish_deferred(topic, hot.frame(data[pos + 4 : end]), delay_ms)
        return end

    def _mpub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        """Checks and topic come before the body and must not be repeated when its rest has come: `_mpub_open`."""
        if not self._mpub_open:
            if len(words) < 2:
                return self._fatal(b"E_INVALID MPUB insufficient number of parameters")
            topic = self._topic(data[start + 1 : pos], words[1])
            if topic is None:
                # nsqd says the code twice.
                return self._fatal(b"E_BAD_TOPIC E_BAD_TOPIC MPUB topic name %b is not valid" % quote(words[1]))
            if not self._may_publish("MPUB", topic):
                return _NOT_DONE
            self._mpub_open = True
            self._handler.ensure_topic(topic)
            if self._handler.blocked or self._dead:
                return _NOT_DONE
        reader = self._mpub_reader
        batch = None
        if reader is None:
            body_bytes_max = self._limits.body_bytes_max
            end = self._sized(_MPUB, body_bytes_max, data, start, pos)
            if self._dead or len(data) - pos < 4:
                return _NOT_DONE
            if end != _NOT_DONE:
                # The parts say where the body ends (mpub.py), so they are looked for beyond `end`, too.
                end = min(len(data), pos + 4 + body_bytes_max)
                batch = hot.mpub_body(data, pos + 4, end, self._msg_bytes_max)
            if batch is None:
                reader = MpubReader(msg_bytes_max=self._msg_bytes_max, body_bytes_max=body_bytes_max)
                reader.feed(data[pos + 4 :])
        if reader is not None:
            if not reader.done:
                self._mpub_reader = reader
                return _NOT_DONE
            self._mpub_reader = self._eof_error = None
            self._need = 0
            if reader.error is not None:
                return self._fatal(reader.error)
            batch = hot.mpub_body(data, pos + 4, pos + 4 + reader.size, self._msg_bytes_max)
        assert batch is not None, "the body was found to be whole"
        count, frames = batch
        self._mpub_open = False
        self._handler.publish(words[1].decode(), frames, count, "MPUB")
        # A frame is 34 bytes more than its message, a part of the body 4: so much has been taken.
        return pos + 8 + len(frames) - _PART_GROWS * count

    def _whole_mpub(self, topic: str, data: bytes, pos: int) -> int:
        """The ordinary MPUB: to a known topic, nothing wrong, all of it there. Where it ends; 0 for `_mpub`'s cases."""
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
        handler = self._handler
        if self.checks_publish and not self._may_publish("MPUB", topic):
            return _NOT_DONE
        self._mpub_open = True
        handler.ensure_topic(topic)
        if handler.blocked or self._dead:
            return _NOT_DONE
        self._mpub_open = False
        handler.publish(topic, batch[1], batch[0], "MPUB")
        return end

    # ---- consuming

    def _sub(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state != INIT:
            return self._wrong_state(b"SUB")
        if not self._agreed.heartbeat_interval_ms:
            return self._fatal(b"E_INVALID cannot SUB with heartbeats disabled")
        if len(words) < 3:
            return self._fatal(b"E_INVALID SUB insufficient number of parameters")
        topic, channel = name(words[1]), name(words[2])
        if topic is None:
            return self._fatal(b"E_BAD_TOPIC SUB topic name %b is not valid" % quote(words[1]))
        if channel is None:
            return self._fatal(b"E_BAD_CHANNEL SUB channel name %b is not valid" % quote(words[2]))
        self.state = SUBSCRIBED
        self._handler.subscribe(topic, channel)
        return pos

    def _rdy(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state == CLOSING:
            return pos  # whatever it says
        if self.state != SUBSCRIBED:
            return self._wrong_state(b"RDY")
        count = uint64(words[1]) if len(words) > 1 else 1
        if count is None:
            return self._fatal(b"E_INVALID RDY could not parse count %b" % words[1])
        if count > self._limits.rdy_count_max:
            return self._fatal(
                b"E_INVALID RDY count %d out of range 0-%d" % (as_int64(count), self._limits.rdy_count_max)
            )
        self._handler.ready(count)
        return pos

    def _fin(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        message_id = self._settled(words, 2)
        if message_id is None:
            return _NOT_DONE
        line = b"FIN %b\n" % message_id  # without the words that made it irregular
        self._handler.fin_run(line, 0, len(line))
        return pos

    def _req(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        message_id = self._settled(words, 3)
        if message_id is None:
            return _NOT_DONE
        delay_ms = uint64(words[2])
        if delay_ms is None:
            return self._fatal(b"E_INVALID REQ could not parse timeout %b" % words[2])
        self._handler.req(message_id, min(delay_ms, self._limits.req_timeout_ms_max))
        return pos

    def _touch(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        message_id = self._settled(words, 2)
        if message_id is None:
            return _NOT_DONE
        self._handler.touch(message_id)
        return pos

    def _settled(self, words: list[bytes], words_min: int) -> bytes | None:
        """The message id of FIN, REQ or TOUCH."""
        if self.state == INIT:
            self._wrong_state(words[0])
        elif len(words) < words_min:
            self._fatal(b"E_INVALID %b insufficient number of params" % words[0])
        elif len(words[1]) != 16:
            self._fatal(b"E_INVALID invalid message ID")
        else:
            return words[1]
        return None

    def _cls(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state != SUBSCRIBED:
            return self._wrong_state(b"CLS")
        self.state = CLOSING
        self._handler.cls()
        return pos

    # ---- who and how

    def _identify(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state != INIT:
            return self._wrong_state(b"IDENTIFY")
        size_max = min(self._limits.body_bytes_max, identify.BODY_BYTES_MAX)
        end = self._sized(_IDENTIFY, size_max, data, start, pos)
        if end == _NOT_DONE:
            return _NOT_DONE
        request = identify.negotiate(data[pos + 4 : end], self._limits, self._agreed)
        if isinstance(request, bytes):
            return self._fatal(request)
        agreed = request.agreed
        if (agreed.tls and (self._tls_on or self._codec_on)) or (agreed.codec and self._codec_on):
            return self._fatal(b"E_IDENTIFY_FAILED IDENTIFY failed connection is upgraded already")
        self._agreed = agreed
        self._tls_on |= agreed.tls
        self._codec_on |= bool(agreed.codec)
        # Kept before the call, so that `take_unread` can be used inside it.
        self._keep(data, end)
        self._handler.identify(request)
        return _DETACHED

    def _auth(self, words: list[bytes], data: bytes, start: int, pos: int) -> int:
        if self.state != INIT:
            return self._wrong_state(b"AUTH")
        if len(words) != 1:
            return self._fatal(b"E_INVALID AUTH invalid number of parameters")
        end = self._sized(_AUTH, self._limits.body_bytes_max, data, start, pos)
        if end == _NOT_DONE:
            return _NOT_DONE
        self._handler.auth(data[pos + 4 : end])
        return end


_COMMANDS: dict[bytes, Callable[[Session, list[bytes], bytes, int, int], int]] = {
    b"PUB": Session._pub,
    b"MPUB": Session._mpub,
    b"DPUB": Session._dpub,
    b"SUB": Session._sub,
    b"RDY": Session._rdy,
    b"FIN": Session._fin,
    b"REQ": Session._req,
    b"TOUCH": Session._touch,
    b"CLS": Session._cls,
    b"NOP": Session._nop,
    b"IDENTIFY": Session._identify,
    b"AUTH": Session._auth,
}
