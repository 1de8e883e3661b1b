"""Reads the heads of HTTP requests as a whole before they are parsed: a slow reader occupies only its thread."""

from __future__ import annotations

import io
import re
import socket
from http.client import LineTooLong

HEAD_BYTES_MAX = 8 << 10

_ENDS = re.compile(rb"\n\r?\n")
_FOLLOWS = re.compile(rb"HTTP/[0-9.]+\r?\n\Z")  # the end of a request line that has a head behind it


class Head:
    """Reads what a reader sends: one request head at a time, at most HEAD_BYTES_MAX each."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = b""  # received, and not read yet
        self._lines = io.BytesIO()
        self._whole = False

    def wait(self) -> bool:
        """Wait until there are bytes; False: the peer has closed its side."""
        if not self._data:
            self._data = self._sock.recv(HEAD_BYTES_MAX)
        return bool(self._data)

    def take(self) -> bool:
        """Wait until the head is complete, or HEAD_BYTES_MAX long; False: the peer has closed its side before."""
        while not (end := self._end()) and len(self._data) < HEAD_BYTES_MAX:
            more = self._sock.recv(HEAD_BYTES_MAX)
            if not more:
                return False
            self._data += more
        self._whole = bool(end)
        end = end or HEAD_BYTES_MAX
        self._lines, self._data = io.BytesIO(self._data[:end]), self._data[end:]
        return True

    def _end(self) -> int:
        """The length of the head; 0: it is not complete."""
        data = self._data[:HEAD_BYTES_MAX]
        line = data.find(b"\n") + 1
        if line and not _FOLLOWS.search(data[:line]):
            return line  # not a request, or one of HTTP/0.9
        found = _ENDS.search(data)
        return found.end() if found else 0

    def readline(self, limit: int = -1) -> bytes:
        """The next line of the head. LineTooLong: the head has more than HEAD_BYTES_MAX."""
        line = self._lines.readline()
        if not self._whole and not line.endswith(b"\n"):
            raise LineTooLong("request head")
        return line

    def close(self) -> None:
        """Does nothing: the owner of the socket closes it."""
