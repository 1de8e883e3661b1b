"""The pure-Python twin of `_syncing.pyx`, and the description of what both do: disk rounds on threads of their own.

    SyncThreads.start(files) -> the threads sync them -> the event is readable -> take: an errno for each

A round that is waited for costs its disk time and what it takes to go to the threads and back. The compiled threads
know no Python: the interpreter's lock is handed to none of them and back, and the loop wakes once for a whole round.

Invariants: after a sync that failed, every later one of that file fails, with the same errno; one sync of a file at a
time. A descriptor is closed when no sync uses it any more. The files of a round live until `take`, or `close`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

__all__ = ["SyncThreads", "SyncedFile"]

SYNC_THREADS_MAX = 16


class SyncedFile:
    """An open descriptor, and whether its syncs have failed."""

    __slots__ = ("_busy", "_closed", "_failed", "_fd", "_fields", "_syncing", "call")

    def __init__(self, fd: int, names: bool = False) -> None:
        """The descriptor is this object's own from now on. `names`: it is a directory's, for which the threads call
        fsync: fdatasync may leave its names to a later commit of the file system."""
        self._fd = fd
        self.call = os.fsync if names else os.fdatasync
        self._busy = self._closed = False
        self._failed = 0
        self._syncing = threading.Lock()  # the kernel reports a failure to one caller, and success to another
        self._fields = threading.Lock()

    def sync(self, fdatasync: Callable[[int], object]) -> int:
        """0, or the errno of the first sync that failed. A file that is closed cannot be synced: EBADF."""
        with self._syncing:
            with self._fields:
                if not self._failed and self._closed:
                    self._failed = errno.EBADF
                if self._failed:
                    return self._failed
                self._busy = True
            failed = errno.EIO
            try:
                fdatasync(self._fd)
                failed = 0
            except OSError as error:
                failed = error.errno or errno.EIO
            finally:
                with self._fields:
                    self._busy, self._failed = False, failed
                    if self._closed:
                        os.close(self._fd)
            return failed

    def close(self) -> None:
        """Close it, at the end of the sync that is under way; harmless when repeated."""
        with self._fields:
            if not self._closed:
                self._closed = True
                if not self._busy:
                    os.close(self._fd)

    def __del__(self) -> None:
        self.close()


class SyncThreads:
    """Syncs the files of one round at a time."""

    def __init__(self, count: int) -> None:
        if not 0 < count <= SYNC_THREADS_MAX:
            raise ValueError(f"{count} threads")
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._lock = threading.Lock()
        self._round: list[SyncedFile] | None = None
        self._failed: list[int] = []
        self._begun = self._ended = 0  # files of the round
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"fdatasync-{n}") for n in range(count)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable when the round has ended."""
        return self._event

    def start(self, files: Sequence[SyncedFile]) -> None:
        """Sync these. ValueError if a round is under way, or there are none."""
        if self._closed or self._round is not None or not files:
            raise ValueError("closed" if self._closed else "no files" if not files else "a round is under way")
        self._round = list(files)
        self._failed = [0] * len(files)
        self._begun = self._ended = 0
        for _ in files:
            self._go.put(True)

    def _run(self) -> None:
        while self._go.get():
            with self._lock:
                place, files = self._begun, self._round
                self._begun += 1
            assert files is not None
            failed = files[place].sync(files[place].call)
            with self._lock:
                self._failed[place] = failed
                self._ended += 1
                last = self._ended == len(self._failed)
            if last:
                os.eventfd_write(self._event, 1)

    def take(self) -> list[int] | None:
        """The outcome for each file of the round, in their order: 0 or an errno. None: it has not ended."""
        if self._round is None:
            return None
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return None
        self._round = None
        return self._failed

    def close(self) -> None:
        """Wait for the round that is under way, and end the threads; the event is closed."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._go.put(False)
        for thread in self._threads:
            thread.join()
        os.close(self._event)
        self._event = -1
        self._round = None
