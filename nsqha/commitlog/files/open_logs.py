"""Which logs of a node have files open: few, however many partitions there are.

    a log opens files -> opened -> too many -> another log, the one that opened first, closes its files
    that one is used again -> its files are opened again -> opened

Only a log that is durable to its end closes its files: then no write error can be hidden behind a closed descriptor,
and a failed sync, which `File` remembers, has ended the log already. A log that is not durable is asked to be, and goes
to the end of the line. Handles that a sync or a job in another thread uses stay open until it lets go of them.

Logs may open files in any thread; they close them in the owner's thread, where logs are appended to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary, ref

LOOKED_AT = 16  # logs, each time that one opens files: most may be busy


class ClosableLog(Protocol):
    """A log with open files."""

    def close_idle_files(self) -> bool:
        """Close the files until they are used again; False if something of them is not durable."""


class OpenLogs:
    """The logs of one node that have files open."""

    def __init__(self, logs_max: int, in_owner: Callable[[], bool] = lambda: True) -> None:
        """`in_owner`: whether this is the thread that appends to logs and reads them."""
        self.logs_max = logs_max
        self._open: WeakValueDictionary[int, ClosableLog] = WeakValueDictionary()
        self._elsewhere: deque[ref[ClosableLog]] = deque()  # opened files in other threads
        self._in_owner = in_owner

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, log: ClosableLog) -> None:
        """The log has opened a file that was closed."""
        if not self._in_owner():
            self._elsewhere.append(ref(log))  # they are closed when the owner's thread opens the next
            return
        while self._elsewhere:
            if (other := self._elsewhere.popleft()()) is not None:
                self._open[id(other)] = other
        self._open[id(log)] = log
        if len(self._open) > self.logs_max:
            self._close_some(log)

    def _close_some(self, but: ClosableLog) -> None:
        for _ in range(min(LOOKED_AT, len(self._open))):
            key = next(iter(self._open.keys()), None)
            if key is None or len(self._open) <= self.logs_max:
                return
            log = self._open.pop(key, None)
            if log is not None and (log is but or not log.close_idle_files()):
                self._open[key] = log
