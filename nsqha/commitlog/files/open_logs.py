"""Which logs of a node have files open: few, however many partitions there are.

    a log opens files -> opened -> too many -> another log, the one that opened first, closes its files
    that one is used again -> its files are opened again -> opened
    it is not durable -> asked to be, goes to the end of the line -> the disk has it -> durable -> closes its files

Only a log that is durable to its end closes its files: then no write error can be hidden behind a closed descriptor,
and a failed sync, which `File` remembers, has ended the log already. Handles that a sync or a job in another thread
uses stay open until it lets go of them.

So logs that are written faster than a slow disk syncs them would take all descriptors. When `FULL` times as many as
there should be are open, who would append to one whose files are closed waits until others are durable (`wait`).

Logs may open files in any thread; they close them in the owner's thread, where logs are appended to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary, ref

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Inode

LOOKED_AT = 16  # logs, each time that one opens files: most may be busy
FULL = 2  # times `logs_max`: a new log has five descriptors until it is durable, three of them of directories


class WrittenFiles(Protocol):
    """The files of a log."""

    def written(self) -> Mapping[str, Inode]:
        """The open files of the newest pair, by path; none if they are closed or not on a disk."""


class ClosableLog(Protocol):
    """A log with open files."""

    def close_idle_files(self) -> bool:
        """Close the files until they are used again; False if something of them is not durable."""

    @property
    def files(self) -> WrittenFiles:
        """Its files."""


class OpenLogs:
    """The logs of one node that have files open."""

    def __init__(self, logs_max: int, in_owner: Callable[[], bool] = lambda: True) -> None:
        """`in_owner`: whether this is the thread that appends to logs and reads them."""
        self.logs_max = logs_max
        self._open: WeakValueDictionary[int, ClosableLog] = WeakValueDictionary()
        self._elsewhere: deque[ref[ClosableLog]] = deque()  # opened files in other threads
        self._in_owner = in_owner
        self._waiting: list[Callable[[], object]] = []
        self._turn: list[int] = []  # logs that `some` has not named in this round

    def some(self, count: int) -> list[ClosableLog]:
        """The next logs, at most `count`, each in its turn."""
        if not self._turn:
            self._turn = list(self._open.keys())
        taken, self._turn = self._turn[:count], self._turn[count:]
        return [log for key in taken if (log := self._open.get(key)) is not None]

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

    @property
    def full(self) -> bool:
        """Whether a log whose files are closed should not be written to."""
        return len(self._open) >= self.logs_max * FULL

    def wait(self, go_on: Callable[[], object]) -> None:
        """Call once when it may not be full any more; who goes on looks again."""
        self._waiting.append(go_on)
        self._close_some(None)

    def durable(self, log: ClosableLog) -> None:
        """The log was asked to be durable, and some of it has become so."""
        if len(self._open) > self.logs_max:
            log.close_idle_files()

    def closed(self, log: ClosableLog) -> None:
        """The log has let go of its files."""
        self._open.pop(id(log), None)
        self._go_on()

    def _go_on(self) -> None:
        # All of them: one that has ended meanwhile would take the turn of another.
        if self._waiting and not self.full:
            waiting, self._waiting = self._waiting, []
            for go_on in waiting:
                go_on()

    def _close_some(self, but: ClosableLog | None) -> None:
        for _ in range(min(LOOKED_AT, len(self._open))):
            key = next(iter(self._open.keys()), None)
            if key is None or len(self._open) <= self.logs_max:
                return
            log = self._open.pop(key, None)
            if log is not None and (log is but or not log.close_idle_files()):
                self._open[key] = log


class LogShare:
    """What one log has of this."""

    __slots__ = ("_log", "_open_logs", "closes", "shut")

    def __init__(self, open_logs: OpenLogs, log: ClosableLog) -> None:
        self.shut = False  # its files are closed
        self.closes = False  # they are to be closed when it is durable
        self._open_logs = open_logs
        self._log = log

    def opened(self) -> None:
        """It has opened a file that was closed; in any thread."""
        self.shut = False
        self._open_logs.opened(self._log)

    def released(self) -> None:
        """It has let go of its files."""
        self.shut = True
        self._open_logs.closed(self._log)

    def synced(self) -> None:
        """More of it is durable."""
        if self.closes:
            self.closes = False
            self._open_logs.durable(self._log)

    def lacking(self, go_on: Callable[[], object]) -> bool:
        """Whether nothing should be appended now, as its files are closed and too many other logs are not durable yet;
        `go_on` is called once, when that may be over."""
        if not (self.shut and self._open_logs.full):
            return False
        self._open_logs.wait(go_on)
        return True
