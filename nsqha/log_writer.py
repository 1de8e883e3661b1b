"""Standard error, written in a way that a slow reader of it never stops the process.

    writer = LogWriter(2, lost=lambda n: f"{n} lines lost\n")
    writer.write("a line\n")             # returns at once, whoever reads
    writer.drain(10.0, stalled=2.0)      # before the process ends

Journald, `docker logs` and `| logger` read from a pipe or a socket, and a write to a full one waits for them; a write
to a file waits for its disk. So what a pipe or a socket takes at once is written at once, and all else waits in a
buffer of BUFFER_BYTES_MAX for a thread of this class. When the buffer is full, lines are dropped until half of it is
free again; one line then says how many. RESERVE_BYTES more are for lines that say why a process ends.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

BUFFER_BYTES_MAX = 1 << 20
RESERVE_BYTES = 1 << 16
PIECE_BYTES = 4096  # of one write: a pipe takes so many bytes whole (PIPE_BUF), also beside other writers
PAUSE_SECONDS = 1.0  # after a write that failed


class LogWriter:
    """Writes lines to a descriptor. Any thread may call."""

    def __init__(self, fd: int, lost: Callable[[int], str], *, bytes_max: int = BUFFER_BYTES_MAX) -> None:
        """`lost` makes the line that says how many lines were lost. OSError: the descriptor is not open."""
        mode = os.fstat(fd).st_mode
        self._fd = fd
        self._lost_line = lost
        self._bytes_max = bytes_max
        self._changed = threading.Condition()  # of all that follows; its lock may be taken again by the same thread
        self._waiting: deque[tuple[bytes, int]] = deque()  # with the number of lines that are lost if this is
        self._size = 0  # of these, and of what the thread writes now
        self._lost = 0  # lines that no line has counted yet
        self._dropping = False
        self._late = False  # a caller waited for the thread in vain
        self._written = 0  # pieces
        self._thread: threading.Thread | None = None
        self._ready: select.poll | None = None  # says what the descriptor takes at once; None: that is not known
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            self._ready = select.poll()
            self._ready.register(fd, select.POLLOUT)

    def write(self, text: str, *, urgent: bool = False) -> None:
        """Write whole lines, now or soon. Returns at once, and raises nothing for what the descriptor does not take.
        `urgent` lines have room where others are dropped."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if not self._size and not self._lost and self._takes(data):
                data = data[self._write_some(data) :]
            if data:
                self._keep(data, urgent=urgent)

    def flush(self) -> None:
        """Nothing to do: what waits is on its way."""

    def settle(self, seconds: float) -> None:
        """Wait until all is written, at most so long; not at all while an earlier call has waited in vain."""
        if not self._size:
            return
        with self._changed:
            self._late = self._late or not self._changed.wait_for(lambda: not self._size, seconds)

    def drain(self, seconds: float, *, stalled: float) -> bool:
        """Wait until all is written; returns whether it was. Gives up after `seconds`, or `stalled` without
        progress."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._size:
                if not self._progress(min(stalled, until - time.monotonic())):
                    return False
        return True

    def _progress(self, seconds: float) -> bool:
        before = self._written
        return self._changed.wait_for(lambda: self._written != before, max(seconds, 0.0))

    def _takes(self, data: bytes) -> bool:
        """True: the descriptor takes it without a wait. A pipe that is ready has room for so much, a socket for
        more."""
        if self._ready is None or len(data) > PIECE_BYTES:
            return False
        return self._ready.poll(0) == [(self._fd, select.POLLOUT)]

    def _write_some(self, data: bytes) -> int:
        """The number of bytes that were written; all of them count where the descriptor is broken."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self._lost += data.count(b"\n")
            return len(data)

    def _keep(self, data: bytes, *, urgent: bool) -> None:
        if self._dropping:
            self._dropping = self._size > self._bytes_max // 2
        if self._has_room(len(data), urgent):
            self._count_lost()
            self._put(data, data.count(b"\n"))
        else:
            self._dropping = True
            self._lost += data.count(b"\n")

    def _has_room(self, size: int, urgent: bool) -> bool:
        if urgent:
            return self._size + size <= self._bytes_max + RESERVE_BYTES
        return not self._dropping and self._size + size <= self._bytes_max

    def _count_lost(self) -> None:
        if self._lost:
            lost, self._lost = self._lost, 0
            self._put(self._lost_line(lost).encode("utf-8", "backslashreplace"), lost)

    def _put(self, data: bytes, lines: int) -> None:
        self._waiting.append((data, lines))
        self._size += len(data)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter ends: late, but not lost
                self._write_all(b"".join(data for data, _ in self._waiting))
                self._waiting.clear()
                self._size = 0
                return
            self._thread = thread
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._late = False
                    self._changed.wait()
                piece, lines = self._next_piece()
            failed = self._write_all(piece)
            with self._changed:
                self._size -= len(piece)
                self._written += 1
                if failed:  # a full disk, or nobody reads any more
                    self._lost += lines + sum(lines for _, lines in self._waiting)
                    self._waiting.clear()
                    self._size = 0
                elif not self._waiting:
                    self._dropping = False
                    self._count_lost()
                self._changed.notify_all()
            if failed:
                time.sleep(PAUSE_SECONDS)

    def _next_piece(self) -> tuple[bytes, int]:
        data, lines = self._waiting.popleft()
        pieces, size = [data], len(data)
        while self._waiting and size + len(self._waiting[0][0]) <= PIECE_BYTES:
            data, more = self._waiting.popleft()
            pieces.append(data)
            size += len(data)
            lines += more
        return b"".join(pieces), lines

    def _write_all(self, data: bytes) -> bool:
        """Write and wait as long as it takes; returns whether the descriptor refused it."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # somebody made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return True
        return False
