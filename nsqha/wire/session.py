"""One client's side of the V2 protocol, without a socket: bytes in, calls of handlers (handler.py) out.

    "  V2"  then commands:   name *(" " word) "\\n"  [ size i32, body ]        big endian

Commands run in order, one completely before the next. Runs are taken whole: consecutive PUBs to one topic, an MPUB's
body and consecutive FINs are each one call, whatever their number; that is where the speed comes from. All others are
run one by one (commands.py), if there is room for that in this turn (`FlowHandler.enter`); after a number of them the
handler may have others take their turn (`FlowHandler.rest`).

After a fatal error, by the session or by a handler (`kill`), nothing is consumed and nothing is called any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsqha import hot
from nsqha.wire import encoder
from nsqha.wire.commands import (
    DETACHED,
    NOT_DONE,
    BadCommand,
    ConsumeCommands,
    FromFork,
    NegotiationCommands,
    PublishCommands,
)
from nsqha.wire.errors import BAD_PROTOCOL
from nsqha.wire.handler import ConsumeHandler, FlowHandler, NegotiationHandler, PublishHandler
from nsqha.wire.limits import ProtocolLimits
from nsqha.wire.unread import UnreadBytes

MAGIC = b"  V2"
LINE_BYTES_MAX = 16 << 10  # the newline included

_FIN_BYTES = 21  # "FIN " + 16 + newline
COMMANDS_AT_ONCE = 100  # one by one: a millisecond
_M = ord("M")
_PUBLISHES = b"PMD"  # PUB, MPUB, DPUB: what follows waits for no stranger


class Session:
    """Decodes one connection. Not re-entrant, except that a handler may call `resume`, `unread.take` or `kill`."""

    __slots__ = (
        "_detached",
        "_ended",
        "_flow",
        "_greeted",
        "_groups",
        "_msg_bytes_max",
        "consuming",
        "publishing",
        "tls_required_now",
        "unread",
    )

    def __init__(
        self,
        limits: ProtocolLimits,
        flow: FlowHandler,
        *,
        publishes: PublishHandler,
        consumes: ConsumeHandler,
        negotiates: NegotiationHandler,
    ) -> None:
        self.tls_required_now = False
        """Refuse all but IDENTIFY; the shell clears it when TLS is on."""
        self.unread = UnreadBytes(len(MAGIC))
        fork = FromFork()
        self.publishing = PublishCommands(limits, publishes, flow, self.unread, fork)
        self.consuming = ConsumeCommands(limits, consumes, fork)
        negotiation = NegotiationCommands(limits, negotiates, self.consuming, self.unread)
        self._groups = (self.publishing, self.consuming, negotiation)
        self._flow = flow
        self._msg_bytes_max = limits.msg_bytes_max
        self._greeted = self._ended = False
        self._detached = False  # an IDENTIFY was handled

    # ---- for the shell

    def receive(self, data: bytes) -> None:
        """Consume what can be consumed."""
        unread = self.unread
        if not unread.busy and not self._flow.blocked:
            if self._consume(data):
                self.resume()
        elif data and not unread.dead:
            unread.busy = True
            unread.add(data)
            self.resume()

    def resume(self) -> None:
        """Go on, as far as what was received allows; after the handler was blocked."""
        unread, flow = self.unread, self._flow
        while unread.have and not unread.dead and not flow.blocked and unread.enough:
            data = unread.take()
            if self._greeted:
                self._consume(data)
            elif data.startswith(MAGIC):
                self._greeted = True
                self._consume(data[len(MAGIC) :])
            else:
                self._end(BAD_PROTOCOL)
        if self._ended and not unread.dead and not flow.blocked:
            text = unread.text_at_eof
            if text is not None:
                self._end(encoder.error(text))
            self.kill()

    def eof(self) -> None:
        """The client sends nothing more: a command that waits for its body fails. Otherwise nothing is called; the
        shell closes when the replies it owes have left."""
        self._ended = True
        self.resume()

    def kill(self) -> None:
        """The connection is ending: ignore what was and will be received."""
        self.unread.kill()
        self.publishing.topics.clear()

    def _end(self, frame: bytes) -> None:
        self.kill()
        self._flow.fatal(frame)

    # ---- commands

    def _consume(self, data: bytes) -> bool:
        """Run the commands in `data`, keep what remains; True if that should be looked at again at once."""
        flow, publishing, unread = self._flow, self.publishing, self.unread
        topics = publishing.topics
        pos, end = 0, len(data)
        left = COMMANDS_AT_ONCE
        entered = False
        while pos < end:
            stop = data.find(b"\n", pos, pos + LINE_BYTES_MAX) + 1
            if not stop:
                if entered:
                    flow.leave()
                return self._unfinished_line(data, pos)
            line = data[pos:stop]
            known = topics.get(line)
            if known is not None:
                after, count, frames = hot.pub_run(data, pos, end, line, self._msg_bytes_max)
                if count:
                    if publishing.checks and not publishing.handler.check_publish("PUB", known[0]):
                        break
                    publishing.handler.publish(known[0], frames, count, "PUB", known[1])
                    pos = after
                    if flow.blocked or unread.dead:
                        break
                    continue
            elif data[pos] == _M and (known := topics.get(line[1:])) is not None and not publishing.mpub_open:
                after = publishing.whole_mpub(*known, data, stop)
                if after == NOT_DONE:
                    break
                if after:
                    pos = after
                    if flow.blocked or unread.dead:
                        break
                    continue
            elif stop - pos == _FIN_BYTES and (acks := self.consuming.acks) is not None and line.startswith(b"FIN "):
                after = hot.fins_end(data, pos, end)
                if after > pos:
                    pos = acks.fin_run(data, pos, after, COMMANDS_AT_ONCE)
                    if pos < after:
                        flow.rest()
                    if flow.blocked or unread.dead:
                        break
                    continue
            if not entered and data[pos] not in _PUBLISHES:
                entered = flow.enter()
                if not entered:
                    break
            after = self._command(line, data, pos, stop)
            if after == DETACHED:
                if entered:
                    flow.leave()
                if self._detached and not flow.blocked:
                    flow.rest()  # each copies what is unread: many IDENTIFYs in one read would stop the loop
                self._detached = True
                return True
            if after == NOT_DONE:
                break
            pos = after
            left -= 1
            if not left:
                left = COMMANDS_AT_ONCE
                flow.rest()
            if flow.blocked or unread.dead:
                break
        if entered:
            flow.leave()
        if pos < end and not unread.dead:
            unread.keep(data, pos)
        return False

    def _unfinished_line(self, data: bytes, pos: int) -> bool:
        if len(data) - pos >= LINE_BYTES_MAX:
            self.kill()
            self._flow.hang_up()
        else:
            self.unread.need = len(data) - pos + 1
            self.unread.keep(data, pos)
        return False

    def _command(self, line: bytes, data: bytes, start: int, pos: int) -> int:
        """Run the command whose line is data[start:pos]; return where the next one begins."""
        words = line[: -2 if line.endswith(b"\r\n") else -1].split(b" ")
        command = words[0]
        try:
            if self.tls_required_now and command != b"IDENTIFY":
                raise BadCommand(b"E_INVALID cannot %b in current state (TLS required)" % command)
            found = _COMMANDS.get(command)
            if found is None:
                raise BadCommand(b"E_INVALID invalid command %b" % command)
            group, run = found
            return run(self._groups[group], words, data, start, pos)
        except BadCommand as bad:
            self._end(encoder.error(bad.text))
            return NOT_DONE


_PUBLISHING, _CONSUMING, _NEGOTIATION = range(3)
# The group of a command, as in `Session._groups`, and what runs it.
_COMMANDS: dict[bytes, tuple[int, Callable[[Any, list[bytes], bytes, int, int], int]]] = {
    b"PUB": (_PUBLISHING, PublishCommands.pub),
    b"MPUB": (_PUBLISHING, PublishCommands.mpub),
    b"DPUB": (_PUBLISHING, PublishCommands.dpub),
    b"SUB": (_CONSUMING, ConsumeCommands.sub),
    b"RDY": (_CONSUMING, ConsumeCommands.rdy),
    b"FIN": (_CONSUMING, ConsumeCommands.fin),
    b"REQ": (_CONSUMING, ConsumeCommands.req),
    b"TOUCH": (_CONSUMING, ConsumeCommands.touch),
    b"CLS": (_CONSUMING, ConsumeCommands.cls),
    b"NOP": (_NEGOTIATION, NegotiationCommands.nop),
    b"IDENTIFY": (_NEGOTIATION, NegotiationCommands.identify),
    b"AUTH": (_NEGOTIATION, NegotiationCommands.auth),
}
