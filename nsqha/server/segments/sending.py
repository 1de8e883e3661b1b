"""Sends one answer to a reader: parts of a file through a socket, without a change of the page cache.

    cached, no TLS      sendfile: the bytes never enter the process
    cached, TLS         read into a buffer, encrypted, sent
    not cached          the same, read around the page cache (O_DIRECT): half the CPU of reading through it and
                        dropping the pages again

What shall not stay cached cannot be sent by sendfile: a page stays cached while a socket refers to it, until the reader
has taken it. Nothing is read ahead or beyond the answer: the next time it would look as if others had cached it.

Sockets block. The owner of the connection ends a send without progress by shutting the socket down (`Progress`).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from nsqha.commitlog.readonce import PAGE_BYTES, cached_pages

SENDFILE_BYTES = 1 << 20  # at a time: the GIL is taken once for each
BUFFER_BYTES = 512 << 10  # of each connection that needs one; read at a time
TLS_BYTES = 64 << 10  # passed to TLS at a time: a reader has to take this many before its stall deadline

PACE_SECONDS = 10.0

Progress = Callable[[], None]

_RUNS = re.compile(rb"\x00+|\x01+")


class FileShortened(Exception):
    """The file became shorter: the log was truncated. The answer that was begun cannot be completed."""


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file to read, without read-ahead. OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead by the kernel
        yield fd
    finally:
        os.close(fd)


def read_once(fd: int, n: int, position: int) -> bytes:
    """Read bytes of an `opened` file, fewer only at its end, without a change of the page cache."""
    parts = []
    with _Direct(fd) as direct:
        for cached, first, end in _runs(fd, position, min(position + n, os.fstat(fd).st_size)):
            if cached:
                parts.append(os.pread(fd, end - first, first))
                continue
            skip = first % PAGE_BYTES
            size = end - first + skip
            with mmap.mmap(-1, size + -size % PAGE_BYTES) as memory, memoryview(memory) as view:
                parts.append(bytes(view[skip : min(direct.read(view, first - skip), size)]))
    return b"".join(parts)


class ReadingPace:
    """How much one reader takes of what is ready for it, over the last PACE_SECONDS to 2 * PACE_SECONDS of sending.

    Time in which nothing is ready (a slow disk, no request) does not count. Another thread may call `bytes_per_second`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # when something became ready
        self._last = (0, 0.0)  # bytes and seconds
        self._before = (0, 0.0)  # the same, of the last time that these were PACE_SECONDS

    def ready(self) -> None:
        """Something is sent now."""
        if self._since is None:
            self._since = self._clock()

    def took(self, n: int) -> None:
        """The reader has taken so much of it."""
        assert self._since is not None
        size, seconds = self._last
        self._last = last = (size + n, seconds + self._clock() - self._since)
        self._since = None
        if last[1] >= PACE_SECONDS:
            self._before, self._last = last, (0, 0.0)

    @property
    def bytes_per_second(self) -> float | None:
        """None: it is too early to say."""
        since, (size, seconds), (before, seconds_before) = self._since, self._last, self._before
        seconds += seconds_before + (0.0 if since is None else self._clock() - since)
        return None if seconds < PACE_SECONDS else (size + before) / seconds


class Sender:
    """Sends parts of files to one connection."""

    def __init__(self, sock: socket.socket, *, tls: bool, progress: Progress) -> None:
        """`progress` is called whenever the reader has taken something."""
        self._sock = sock
        self._tls = tls
        self._progress = progress
        self.pace = ReadingPace()
        self._buffer: memoryview | None = None

    def send(self, fd: int, pieces: tuple[tuple[int, int], ...]) -> None:
        """Send pieces (address, bytes) of an `opened` file, in order. OSError: the reader is gone; FileShortened."""
        with _Direct(fd) as direct:
            for position, size in pieces:
                for cached, first, end in _runs(fd, position, position + size):
                    if not cached:
                        self._copy(direct.read, first, end)
                    elif self._tls:
                        self._copy(lambda buffer, at: os.preadv(fd, [buffer], at), first, end)
                    else:
                        self._sendfile(fd, first, end)

    def _sendfile(self, fd: int, position: int, end: int) -> None:
        out = self._sock.fileno()
        while position < end:
            self.pace.ready()
            try:
                n = os.sendfile(out, fd, position, min(SENDFILE_BYTES, end - position))
            except BlockingIOError:
                continue  # nothing was taken within SO_SNDTIMEO: the owner of the connection decides
            if not n:
                raise FileShortened
            position += n
            self.pace.took(n)
            self._progress()

    def _copy(self, read: Callable[[memoryview, int], int], position: int, end: int) -> None:
        if self._buffer is None:
            self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # page-aligned
        while position < end:
            skip = position % PAGE_BYTES
            size = min(BUFFER_BYTES, end - position + skip)
            n = read(self._buffer[: size + -size % PAGE_BYTES], position - skip) - skip
            if n <= 0:
                raise FileShortened
            n = min(n, end - position)
            self._write(self._buffer[skip : skip + n])
            position += n

    def write(self, data: bytes) -> None:
        """Send all of `data`. OSError."""
        self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        size = TLS_BYTES if self._tls else SENDFILE_BYTES
        while data:
            self.pace.ready()
            try:
                n = self._sock.send(data[:size])
            except BlockingIOError:
                continue
            data = data[n:]
            self.pace.took(n)
            self._progress()


class _Direct:
    """Reads around the page cache; if the file system cannot, through it, and drops what was read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._direct: int | None = None
        self._tried = False

    def __enter__(self) -> _Direct:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def read(self, buffer: memoryview, position: int) -> int:
        """Read into the buffer, which has whole pages, from the start of a page; returns the number of bytes."""
        if not self._tried:
            self._tried = True
            with suppress(OSError):
                self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT)
        if self._direct is not None:
            try:
                return os.preadv(self._direct, [buffer], position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.close(self._direct)
                self._direct = None
        try:
            return os.preadv(self._fd, [buffer], position)
        finally:
            os.posix_fadvise(self._fd, position, len(buffer), os.POSIX_FADV_DONTNEED)


def _runs(fd: int, position: int, end: int) -> Iterator[tuple[bool, int, int]]:
    """Yield (whether it is cached, first, end) for the parts of a piece, as found before any of it is read."""
    if position >= end:
        return
    first = position - position % PAGE_BYTES
    for run in _RUNS.finditer(cached_pages(fd, first, end - first)):
        start, stop = first + run.start() * PAGE_BYTES, first + run.end() * PAGE_BYTES
        yield run[0][0] == 1, max(start, position), min(stop, end)
