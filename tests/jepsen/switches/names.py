"""Names that a loss of power may take: those that were made, and whose directory was not synced since.

    names = NamesFile(path)      the harness; the process is started with --names-file
    ...                          power is lost, the disk is mounted again
    names.forget()               what POSIX does not promise to be there is gone

ext4 writes the name of a new file with the first fsync of the file, and a rename with the next commit of its journal.
So on ext4 alone nobody notices a directory that is never synced. Here a file system is played that keeps a name only if
it was told to: the process notes each name that it makes before it makes it, and each directory that it has synced.

A rename goes back unless it had replaced something, which nobody has any more. What was removed stays so.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsqha.commitlog.storage import OsDirectory, OsStorage, lowest

MADE, RENAMED, SYNCED = "made", "renamed", "synced"


class NamesFile:
    """What one process said of its names; for whoever starts it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"")

    def forget(self) -> list[str]:
        """Take away the names that were not synced; returns them. The process is dead."""
        open_: defaultdict[str, list[list[str]]] = defaultdict(list)
        for line in self.path.read_text().splitlines():
            what, *paths = json.loads(line)
            folder = os.path.dirname(paths[-1])
            if what == SYNCED:
                open_.pop(paths[0], None)
            else:
                open_[folder].append([what, *paths])
        self.path.write_bytes(b"")
        gone = [each for folder in open_.values() for each in reversed(folder) if _undone(*each)]
        return [paths[-1] for _, *paths in gone]


def _undone(what: str, *paths: str) -> bool:
    """Whether there was something to undo."""
    new = paths[-1]
    if not os.path.lexists(new):
        return False
    if what == RENAMED:
        if os.path.lexists(paths[0]):
            return False
        os.rename(new, paths[0])
    elif os.path.isdir(new):
        shutil.rmtree(new)
    else:
        os.unlink(new)
    return True


def follow(path: Path) -> None:
    """This process writes down its names from now on."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND)

    def note(what: str, *paths: str) -> None:
        os.write(log, json.dumps([what, *map(os.path.abspath, paths)]).encode() + b"\n")

    _around(OsStorage, "open", lambda self, path, **how: _opened(note, path, **how))
    _around(OsStorage, "rename", lambda self, old, new: None if os.path.lexists(new) else note(RENAMED, old, new))
    _around(OsStorage, "make_dirs", lambda self, path: None if os.path.isdir(path) else note(MADE, path))
    _around(OsStorage, "begin_dirs", lambda self, path, levels: _begun(note, path, levels))
    _around(OsDirectory, "sync", lambda self: None, lambda self: note(SYNCED, self._path))


def _opened(note: Callable[..., None], path: str, *, create: bool = False, read_only: bool = False) -> None:
    if create and not os.path.lexists(path):
        note(MADE, path)


def _begun(note: Callable[..., None], path: str, levels: int) -> None:
    for folder in reversed(lowest(path, levels)):
        if not os.path.lexists(folder):
            note(MADE, folder)


def _around(
    owner: type, name: str, before: Callable[..., None], after: Callable[..., None] = lambda *_, **__: None
) -> None:
    """Have these called in front of a method and, unless it fails, behind it, with the same arguments."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(*arguments, **named)
        result = original(*arguments, **named)
        after(*arguments, **named)
        return result

    setattr(owner, name, wrapped)
