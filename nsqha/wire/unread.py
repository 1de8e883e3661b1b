"""Bytes that a session received and has not consumed: the command whose rest has not come, and what waits behind it.

A command that is not complete yet is kept from its first byte and run again from there when enough has come: there is
no half-executed state (MPUB alone has one, see commands.py). Kept bytes are joined once, when `need` of them are there,
so a body that arrives in many reads costs one copy. Kept are at most: a line, or the line and body of one command, and
what was received while the handler was blocked; a handler that blocks must stop reading from the socket.
"""

from __future__ import annotations

from nsqha.wire.mpub import MpubReader


class UnreadBytes:
    """The unread bytes of one session."""

    __slots__ = ("_pieces", "busy", "dead", "eof_error", "have", "need", "reader")

    def __init__(self, need: int) -> None:
        self.busy = True
        """What is received next is not the beginning of a command, or not to be run."""
        self.dead = False
        """The connection is ending: what was and will be received is ignored."""
        self.have = 0  # bytes
        self.need = need  # bytes from the front before anything can be done
        self.eof_error: bytes | None = None  # what to say if they never come
        self.reader: MpubReader | None = None  # of the MPUB at the front: it says when its body is complete
        self._pieces: list[bytes] = []

    def add(self, data: bytes) -> None:
        """Keep what was received while `busy`."""
        self._pieces.append(data)
        self.have += len(data)
        if self.reader is not None:
            self.reader.feed(data)

    def keep(self, data: bytes, pos: int) -> None:
        """Keep what follows `pos`; nothing else is kept."""
        if pos < len(data):
            self._pieces.append(data[pos:] if pos else data)
            self.have = len(data) - pos
            self.busy = True

    @property
    def enough(self) -> bool:
        """Whether the command at the front can be run."""
        return self.have >= self.need if self.reader is None else self.reader.done

    def take(self) -> bytes:
        """All of it, joined; it is the caller's from now on."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.have = self.need = 0
        self.eof_error = None
        self.busy = self.dead
        return data

    @property
    def text_at_eof(self) -> bytes | None:
        """What to say if nothing more comes; None: nothing is missing."""
        return self.eof_error if self.reader is None else self.reader.eof_error

    def kill(self) -> None:
        self.dead = self.busy = True
        self._pieces.clear()
        self.have = 0
        self.reader = None
