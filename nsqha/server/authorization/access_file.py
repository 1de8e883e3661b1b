"""The access file on disk. A change of it counts within two seconds; one that can not be used changes nothing.

The file is looked at every LOOK_SECONDS. A version counts once two looks in a row have found it: an editor or a copy
may be half way through, and half a file is often a valid one that lacks tokens. One that can not be used is logged
(`access_unusable`), and the last good one stays. At the start there is none, so the daemon refuses to start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from nsqha.access.tokens import FILE_BYTES_MAX, AccessTable, parse
from nsqha.clock import Clock
from nsqha.errors import ConfigError
from nsqha.nsqlog import Logger
from nsqha.private_file import read_private

FLAG = "--access-file"
LOOK_SECONDS = 0.5

logger = Logger("access")

_Stamp = tuple[int, int, int, int]


class AccessFile:
    """The newest usable version of one file. Used on the loop; only `look` reads, in a thread."""

    def __init__(self, path: str, clock: Clock) -> None:
        """ConfigError if it can not be used."""
        self.path = path
        self.generation = 1  # rises with each version, and when a token has expired
        self.on_change: list[Callable[[], None]] = []
        self._clock = clock
        self._stamp = _stamp(path)
        self._seen: _Stamp | None = None  # another version, seen once
        self._said: _Stamp | None = None
        self._expired: set[str] = set()
        self.table = read_table(self.path)
        self._say_expired()

    @property
    def seconds(self) -> float:
        """Now, since 1970."""
        return self._clock.wall_ns() / 1e9

    async def watch(self) -> None:
        """Look again and again; the task is cancelled when the process ends."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            found = await asyncio.to_thread(self.look)
            if found is not None:
                self.take(found)
            elif self._say_expired():
                self._changed()

    def look(self) -> AccessTable | None:
        """The new version, if there is one that can be used. Raises nothing."""
        stamp = _stamp(self.path)
        if stamp in (self._stamp, self._said):
            self._seen = None
            return None
        if stamp != self._seen:
            self._seen = stamp
            return None
        try:
            found = read_table(self.path)
        except ConfigError as error:
            self._said = stamp
            text = "the previous version of the access file stays in use: %s"
            logger.error("access_unusable", text, error, path=self.path)
            return None
        if _stamp(self.path) != stamp:
            return None  # written while it was read
        self._stamp, self._seen, self._said = stamp, None, None
        return found

    def take(self, table: AccessTable) -> None:
        """This version counts from now on."""
        self.table = table
        text = "%s was read again: %d tokens"
        logger.info("access_renewed", text, self.path, len(table.tokens), path=self.path, tokens=len(table.tokens))
        self._say_expired()
        self._changed()

    def _changed(self) -> None:
        self.generation += 1
        for heed in self.on_change:
            heed()

    def _say_expired(self) -> bool:
        """Log tokens whose time is over, each once; returns whether there was one."""
        expired = {token.name for token in self.table.expired(self.seconds)}
        fresh = sorted(expired - self._expired)
        self._expired = expired
        for name in fresh:
            text = "%s: the token %s has expired and is refused; `nsqha access token %s` makes another, or remove it"
            logger.warning("access_token_expired", text, self.path, name, name, path=self.path, token=name)
        return bool(fresh)


def read_table(path: str) -> AccessTable:
    """What the file says. ConfigError if a daemon can not use it."""
    text = read_private(FLAG, path, FILE_BYTES_MAX)
    try:
        table = parse(text)
    except ConfigError as error:
        raise ConfigError(f"{FLAG}={path}: {error}") from None
    if not table.tokens and not table.anonymous.roles:
        raise ConfigError(
            f"{FLAG}={path}: it has no tokens, and nothing for callers without one, so nobody could do anything: "
            "`nsqha access token NAME --role admin` makes a token"
        )
    return table


def _stamp(path: str) -> _Stamp:
    """A value that differs when the file was written, replaced, or given other permissions."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
