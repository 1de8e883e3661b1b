"""Places at which a process kills itself: around each sync, rename and write of a file, change in etcd, and promise.

    before-sync:3                     in front of the third fdatasync
    after-rename@journal:1            behind the first rename to a path that contains "journal"
    half-write@.segment:20            in the middle of the twentieth write to a segment: its first half is in the file

The names are <when>-<operation>, with one of OPERATIONS. A kill is SIGKILL: nothing is flushed, closed or answered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from nsqha.commitlog import storage
from nsqha.commitlog.journal import JournalFile
from nsqha.election.etcd.client import EtcdClient

SECTOR = 512
Operation = tuple[type, str]

OPERATIONS: dict[str, Operation] = {
    "write": (storage.OsFile, "pwrite"),
    "sync": (storage.OsFile, "sync"),
    "allocate": (storage.OsFile, "allocate"),
    "truncate": (storage.OsFile, "truncate"),
    "sync-dir": (storage.OsDirectory, "sync"),
    "rename": (storage.OsStorage, "rename"),
    "remove": (storage.OsStorage, "remove"),
    "cas": (EtcdClient, "change"),
    "promise": (JournalFile, "write"),
}
WHEN = ("before", "after", "half")


@dataclass(frozen=True)
class Failpoint:
    """One of them, and at which of its visits it kills."""

    when: str
    operation: str
    path: str  # only operations on paths that contain this
    visit: int

    @classmethod
    def parsed(cls, text: str) -> Failpoint:
        """ValueError says what is wrong."""
        name, _, visit = text.rpartition(":")
        name, _, path = name.partition("@")
        when, _, operation = name.partition("-")
        if when not in WHEN or operation not in OPERATIONS or not visit.isdigit() or int(visit) < 1:
            raise ValueError(f"{text} is no <{'|'.join(WHEN)}>-<{'|'.join(OPERATIONS)}>[@path]:<visit from 1 on>")
        if when == "half" and operation != "write":
            raise ValueError(f"{text}: only a write has a half")
        return cls(when, operation, path, int(visit))

    def __str__(self) -> str:
        return f"{self.when}-{self.operation}{'@' if self.path else ''}{self.path}:{self.visit}"

    def arm(self) -> None:
        """From now on this process ends there."""
        owner, name = OPERATIONS[self.operation]
        setattr(owner, name, self._around(getattr(owner, name)))
        if self.operation == "sync":
            storage.OsFile.synced = lambda self: None  # type: ignore[method-assign]  # disk rounds call `sync` too

    def _around(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        visits, lock = 0, threading.Lock()

        def visited(*arguments: Any, **named: Any) -> Any:
            nonlocal visits
            if self.path not in _path_of(arguments):
                return operation(*arguments, **named)
            with lock:
                visits += 1
                due = visits == self.visit
            if due and self.when == "half":
                file, data, position = arguments
                operation(file, bytes(data)[: len(data) // 2 // SECTOR * SECTOR], position)
            if due and self.when != "after":
                self._end()
            result = operation(*arguments, **named)
            if due:
                self._end()
            return result

        return visited

    def _end(self) -> NoReturn:
        os.write(2, f"failpoint {self} is reached\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives on")


def _path_of(arguments: tuple[Any, ...]) -> str:
    """Of the file or directory, or what a rename makes; of other operations nothing is known."""
    owner, *others = arguments
    if isinstance(owner, storage.OsStorage):
        return str(others[-1])
    return str(getattr(owner, "path", getattr(owner, "_path", "")))
