"""The heads of HTTP requests, read whole before anybody looks at them: a slow reader keeps nothing but its thread."""

from __future__ import annotations

import io
import re
import socket
from http.client import LineTooLong

HEAD_BYTES_MAX = 8 << 10

_ENDS = re.compile(rb"\n\r?\n")
_FOLLOWS = re.compile(rb"HTTP/[0-9.]+\r?\n\Z")  # the end of a request line that has a head behind it


class Head:
    """What a reader sends: the head of one request at a time, HEAD_BYTES_MAX each."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = b""  # that nobody has read yet
        self._lines = io.BytesIO()
        self._whole = False

    def wait(self) -> bool:
        """Until something comes; False: nothing will."""
        if not self._data:
            self._data = self._sock.recv(HEAD_BYTES_MAX)
        return bool(self._data)

    def take(self) -> bool:
        """Until the head is there, as much of it as may be; False: it will not be."""
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
        """How long the head is; 0: more of it has to come."""
        data = self._data[:HEAD_BYTES_MAX]
        line = data.find(b"\n") + 1
        if line and not _FOLLOWS.search(data[:line]):
            return line  # no request, or one of HTTP/0.9
        found = _ENDS.search(data)
        return found.end() if found else 0

    def readline(self, limit: int = -1) -> bytes:
        """LineTooLong: the head is."""
        line = self._lines.readline()
        if not self._whole and not line.endswith(b"\n"):
            raise LineTooLong("request head")
        return line

    def close(self) -> None:
        """The socket is its owner's."""
