"""Follows an MPUB's body as it arrives, so that a bad size is refused before the bytes it announces.

    [count i32] count x ( [size i32] [message] )        big endian

nsqd reads as many messages as `count` says from the stream: the body size that the command announced is checked
against its bound and then has no meaning. So the body ends where its last message ends. Here the sum is bounded by
the same number, since all of it is held until the last message is there.

Each size is looked at once, when its read comes; nothing is kept but where the next one lies.
"""

from __future__ import annotations

import struct

from nsqha import hot

_I32 = struct.Struct(">i")


class MpubReader:
    """`done` once the body is complete (`size` bytes long) or refused (`error`)."""

    __slots__ = ("_body_bytes_max", "_count", "_cut", "_index", "_msg_bytes_max", "_next", "_seen", "done", "error")

    def __init__(self, *, msg_bytes_max: int, body_bytes_max: int) -> None:
        self.done = False
        self.error: bytes | None = None
        self._msg_bytes_max = msg_bytes_max
        self._body_bytes_max = body_bytes_max
        self._count = 0  # messages; 0 until it has been read
        self._index = 0  # of the message whose size is next
        self._next = 0  # where in the body the next number lies
        self._seen = 0  # how much of the body has been fed
        self._cut = b""  # the beginning of a number that was cut in two

    @property
    def size(self) -> int:
        """Length of a complete body."""
        return self._next

    @property
    def eof_error(self) -> bytes:
        """What to say if nothing more comes."""
        if not self._count:
            return b"E_BAD_BODY MPUB failed to read message count"
        if self._index < self._count and self._seen >= self._next:
            return b"E_BAD_MESSAGE MPUB failed to read message(%d) body size" % self._index
        return b"E_BAD_MESSAGE MPUB failed to read message body"

    def feed(self, piece: bytes) -> None:
        """Look at the next bytes of the body."""
        first = self._seen - len(self._cut)
        self._seen += len(piece)
        if self._cut:
            piece = self._cut + piece
        pos, end = self._next - first, len(piece)
        if not self._count and end - pos >= 4:
            pos = self._read_count(piece, pos)
        index, count, msg_bytes_max = self._index, self._count, self._msg_bytes_max
        if pos < end:
            # A body's messages look like commands without a line; the frames are of no use before the last one.
            after, taken, _ = hot.pub_run(piece, pos, end, b"", msg_bytes_max)
            if taken <= count - index:
                pos, index = after, index + taken
        # What is left is the message that was cut, or is refused; all, if what follows the last looks like another.
        number_at = _I32.unpack_from
        while index < count and end - pos >= 4:
            (size,) = number_at(piece, pos)
            if not 0 < size <= msg_bytes_max:
                return self._refuse_message(index, size)
            pos += 4 + size
            index += 1
        self._index = index
        self._next = first + pos
        self._cut = piece[pos:] if (index < count or not count) else b""
        if self._next > self._body_bytes_max:
            self._refuse(b"E_BAD_BODY MPUB body too big %d > %d" % (self._next, self._body_bytes_max))
        elif count and index == count and self._next <= self._seen:
            self.done = True
        return None

    def _read_count(self, piece: bytes, pos: int) -> int:
        (count,) = _I32.unpack_from(piece, pos)
        if 0 < count <= (self._body_bytes_max - 4) // 5:  # a size and at least one byte each
            self._count = count
        else:
            self._refuse(b"E_BAD_BODY MPUB invalid message count %d" % count)
        return pos + 4

    def _refuse_message(self, index: int, size: int) -> None:
        if size <= 0:
            self._refuse(b"E_BAD_MESSAGE MPUB invalid message(%d) body size %d" % (index, size))
        else:
            self._refuse(b"E_BAD_MESSAGE MPUB message too big %d > %d" % (size, self._msg_bytes_max))

    def _refuse(self, text: bytes) -> None:
        if self.error is None:
            self.error = text
        self.done = True
