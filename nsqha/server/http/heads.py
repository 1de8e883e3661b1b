"""Heads of HTTP requests as Go takes them, made into what aiohttp's parser takes, which is strict.

    lines that end in LF alone            all lines of the head, and no Transfer-Encoding; they get CRLF
    Content-Length more than once         with the same number; one of them is left
    heads up to HEAD_BYTES_MAX            above SMALL_BYTES, or FIELDS_MAX, only fields that the server uses are
                                          left: a caller who is not known holds little more memory by it
    a Transfer-Encoding but `chunked`     501
    a head beyond HEAD_BYTES_MAX          431

Lines that end in CR LF and lines that end in LF are not mixed in a head, and no line is continued in the next one: a
proxy may see other fields there than the parser. Only a head whose body ends where its Content-Length says is followed
by another head here. Behind a chunked body, or an Upgrade, all bytes are handed on as they are: where such a body ends
the parser alone knows, and two opinions about it are how requests are smuggled.
"""

from __future__ import annotations

import re

HEAD_BYTES_MAX = (1 << 20) + 4096
"""Go's http.DefaultMaxHeaderBytes, and the buffer that it reads ahead."""
SMALL_BYTES = 16 << 10
"""Of a head that is kept whole, and of the request line and each field of a larger one."""
FIELDS_MAX = 100
"""Of a head that is kept whole: the parser takes 128."""
KEPT_BYTES_MAX = 4 * SMALL_BYTES
"""Of what is left of a larger head."""
LINES_MAX = 500
"""Of a head that is not kept whole; each takes two microseconds."""
USED = frozenset(
    (
        b"accept", b"authorization", b"connection", b"content-encoding", b"content-length", b"expect", b"host",
        b"origin", b"sec-fetch-site", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
"""The fields that aiohttp, this server or a handler reads. All others of a large head are left out."""

BAD, NO_SUCH_CODING, TOO_LARGE = 400, 501, 431

_ENDLESS = 1 << 62
"""Bytes of a body whose end the parser alone knows."""
_BEGINNING = re.compile(rb"[A-Z-]{0,20}(?:\Z| (?![^\n]*\n)| [^ \n]+ HTTP/1\.[01]\r?\n)")
"""What has come of a head may begin a request: clients of other protocols do not wait for their lines to end."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})[ \t]*(?=\r\n)", re.IGNORECASE)
_CODING = re.compile(rb"\r\ntransfer-encoding:[ \t]*([^\r]*?)[ \t]*(?=\r\n)")


class RequestHeads:
    """What one connection sends, between the socket and the parser."""

    __slots__ = ("_body", "_head", "_large", "_refused")

    def __init__(self) -> None:
        self._body = 0  # bytes of the body that have not come
        self._head = b""  # what has come of a small head
        self._large: _LargeHead | None = None  # one that is coming
        self._refused = False

    def read(self, data: bytes) -> tuple[bytes, int]:
        """What the parser gets of this; and the status with which the connection ends behind that, 0: it goes on."""
        if self._refused:
            return b"", 0
        if self._body >= len(data):
            self._body -= len(data)
            return data, 0
        ready: list[bytes] = []
        try:
            while data:
                if self._body:
                    body, data = data[: self._body], data[self._body :]
                    self._body -= len(body)
                    ready.append(body)
                else:
                    head, data = self._next(data)
                    ready.append(head)
        except _HeadRefused as refused:
            self._refused = True
            self._head, self._large = b"", None
            return b"".join(ready), refused.status
        return b"".join(ready) if len(ready) != 1 else ready[0], 0

    def _next(self, data: bytes) -> tuple[bytes, bytes]:
        """A head, if it is complete, and what follows it."""
        if self._large is not None:
            end = self._large.read(data)
            if not end:
                return b"", b""
            head, self._large = self._large.left, None
            return self._judged(head), data[end:]
        before = len(self._head)
        if not before:
            data = data.lstrip(b"\r\n")  # as the parser does
        else:
            data = self._head + data
        at = max(before - 3, 0)
        crlf, lf = data.find(b"\n\r\n", at, SMALL_BYTES), data.find(b"\n\n", at, SMALL_BYTES)
        if crlf < 0 and lf < 0:
            if len(data) >= SMALL_BYTES:
                self._head, self._large = b"", _LargeHead()
                return b"", data
            if not _BEGINNING.match(data):
                raise _HeadRefused(BAD)
            self._head = data
            return b"", b""
        self._head = b""
        end = lf + 2 if crlf < 0 or 0 <= lf < crlf else crlf + 3
        if data.count(b"\n", 0, end) > FIELDS_MAX:
            self._large = _LargeHead()
            return b"", data
        return self._judged(data[:end]), data[end:]

    def _judged(self, head: bytes) -> bytes:
        """The head for the parser. Sets where it ends."""
        bare = _ends_bare(head.count(b"\n"), head.count(b"\r"), head.count(b"\r\n"))
        if bare:
            head = head.replace(b"\n", b"\r\n")
        lower = head.lower()
        if b"\r\ntransfer-encoding:" in lower:
            codings = _CODING.findall(lower)
            if bare:
                raise _HeadRefused(BAD)
            if codings != [b"chunked"]:
                raise _HeadRefused(NO_SUCH_CODING)
            self._body = _ENDLESS
        elif b"\r\nupgrade:" in lower or lower.startswith(b"connect "):
            self._body = _ENDLESS
        elif announced := lower.count(b"\r\ncontent-length:"):
            lengths = _LENGTH.findall(lower)
            if len(lengths) != announced or len(set(lengths)) != 1:
                raise _HeadRefused(BAD)
            if announced > 1:
                first = _LENGTH.search(lower)
                assert first is not None
                head = head[: first.end()] + _LENGTH.sub(b"", head[first.end() :])
            self._body = int(lengths[0])
        return head


class _LargeHead:
    """What is left of a head that is not kept whole, line by line."""

    __slots__ = ("_bytes", "_kept", "_kept_bytes", "_line", "_lines", "_pairs", "_return", "_returns")

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._line = b""  # the beginning of one that has not ended
        self._bytes = self._lines = self._returns = self._pairs = 0  # of all of it
        self._return = False  # what has come ends in CR

    @property
    def left(self) -> bytes:
        return b"".join(self._kept)

    def read(self, data: bytes) -> int:
        """Where in `data` the head ends; 0: later."""
        at, ended = 0, False
        while not ended and (end := data.find(b"\n", at) + 1) > 0:
            line, self._line = self._line + data[at:end], b""
            at = end
            self._lines += 1
            if self._lines > LINES_MAX:
                raise _HeadRefused(TOO_LARGE)
            ended = self._take(line)
        if not ended:
            self._line = (self._line + data[at:])[: SMALL_BYTES + 1]  # one more: it is cut off
            at = len(data)
        self._pairs += data.count(b"\r\n", 0, at) + (self._return and data.startswith(b"\n"))
        self._returns += data.count(b"\r", 0, at)
        self._return = data.endswith(b"\r")
        self._bytes += at
        if self._bytes > HEAD_BYTES_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            raise _HeadRefused(TOO_LARGE)
        if ended:
            _ends_bare(self._lines, self._returns, self._pairs)
        return at if ended else 0

    def _take(self, line: bytes) -> bool:
        """Keep a line if it is used; True: it was the last one."""
        ended = line in (b"\n", b"\r\n")
        used = ended or not self._kept  # the request line
        if not used:
            name = _NAME.match(line)
            if name is None:
                raise _HeadRefused(BAD)
            used = name[0][:-1].lower() in USED
        if used:
            if len(line) > SMALL_BYTES:
                raise _HeadRefused(TOO_LARGE if self._kept else BAD)
            self._kept.append(line)
            self._kept_bytes += len(line)
        return ended


def _ends_bare(lines: int, returns: int, pairs: int) -> bool:
    """True if all lines end in LF alone, False if all end in CR LF."""
    if returns and not lines == returns == pairs:
        raise _HeadRefused(BAD)
    return not returns


class _HeadRefused(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
