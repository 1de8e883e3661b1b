"""The access file on disk. A change of it counts within two seconds; one that can not be used changes nothing.

The file is looked at every LOOK_SECONDS. A version counts once two looks in a row have found it: an editor or a copy
may be half way through, and half a file is often a valid one that lacks tokens. One that can not be used is logged
(`access_unusable`), and the last good one stays. At the start there is none, so the daemon refuses to start.

It is read in a thread that is given up after GIVE_UP_SECONDS, and that the end of the process does not wait for. A text
that takes so long is not known (`nsqha.toml_text` bounds it first), a network file system that hangs is.
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
from nsqha.server.runtime.tasks import in_thread

FLAG = "--access-file"
LOOK_SECONDS = 0.5
GIVE_UP_SECONDS = 20.0
GIVEN_UP_MAX = 4  # threads that are still at it: then the file is not looked at

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
        self._looks = Looks(path, _stamp(path))
        self._given_up: list[Looks] = []
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
            if sum(not looks.ended for looks in self._given_up) >= GIVEN_UP_MAX:
                continue
            looks = self._looks
            try:
                async with asyncio.timeout(GIVE_UP_SECONDS):
                    found = await in_thread(looks.look)
            except TimeoutError:
                self._give_up(looks)
                continue
            if found is not None:
                self.take(found)
            elif self._say_expired():
                self._changed()

    def look(self) -> AccessTable | None:
        """The new version, if there is one that can be used. Raises nothing."""
        return self._looks.look()

    def _give_up(self, looks: Looks) -> None:
        """The thread of a look goes on, and what it finds does not count; later versions are read by others."""
        text = "the previous version of the access file stays in use: reading the new one took more than %g s"
        logger.error("access_unusable", text, GIVE_UP_SECONDS, path=self.path)
        self._given_up = [each for each in self._given_up if not each.ended] + [looks]
        self._looks = looks.after()

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


class Looks:
    """Which versions of the file were seen. One thread at a time calls `look`; once it is given up, no other thread
    uses this any more."""

    def __init__(self, path: str, stamp: _Stamp, said: _Stamp | None = None) -> None:
        """`stamp`: of the version that is in use; `said`: of one that cannot be used."""
        self.ended = True
        self._path = path
        self._stamp = stamp
        self._seen: _Stamp | None = None  # another version, seen once
        self._said = said

    def look(self) -> AccessTable | None:
        """The new version, if there is one that can be used. Raises nothing."""
        self.ended = False
        try:
            return self._look()
        except Exception as error:
            # A bug, or a text that nobody has thought of: without this, no later version would ever be read.
            self._unusable(error)
            return None
        finally:
            self.ended = True

    def after(self) -> Looks:
        """The next looks, after one of these was given up: the version that it reads cannot be used."""
        return Looks(self._path, self._stamp, self._seen)

    def _look(self) -> AccessTable | None:
        stamp = _stamp(self._path)
        if stamp in (self._stamp, self._said):
            self._seen = None
            return None
        if stamp != self._seen:
            self._seen = stamp
            return None
        try:
            found = read_table(self._path)
        except ConfigError as error:
            self._unusable(error)
            return None
        if _stamp(self._path) != stamp:
            return None  # written while it was read
        self._stamp, self._seen, self._said = stamp, None, None
        return found

    def _unusable(self, error: Exception) -> None:
        self._said = self._seen
        text = "the previous version of the access file stays in use: %s"
        logger.error("access_unusable", text, error, path=self._path)


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
