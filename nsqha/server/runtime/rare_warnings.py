"""Lines that others may cause as often as they like: one line in a while, which says how many there were.

RareWarnings    of one kind, whoever causes them
RefusalLog      of one kind, for each address that causes them
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from nsqha.nsqlog import Logger

PAUSE_SECONDS = 10.0  # between two lines of the same kind
ADDRESSES_MAX = 1_000  # that are counted each for itself; the rest is counted together
OTHERS = "other addresses"
SHOWN_MAX = 200
"""Characters of what a peer sent that a line shows: nothing that a peer sends decides how long a line is."""


def shown(text: str) -> str:
    """The beginning of what a peer sent, for a line."""
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def host_of(address: str) -> str:
    """The host of `host:port`; a peer of a unix socket, which has no port, is one with all others there."""
    return address.rpartition(":")[0].strip("[]") or address


class RareWarnings:
    """The warnings of one kind of one owner."""

    def __init__(self, logger: Logger, event: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._logger = logger
        self._event = event
        self._silent_until = float("-inf")
        self._unlogged = 0  # since the last line

    def warning(self, text: str, *args: object) -> None:
        """Log this one, or only count it."""
        now = self._now()
        if now < self._silent_until:
            self._unlogged += 1
            return
        self._silent_until = now + PAUSE_SECONDS
        more = f"; {self._unlogged} more since the last of these lines" if self._unlogged else ""
        self._unlogged = 0
        self._logger.warning(self._event, text + "%s", *args, more)


class RefusalLog:
    """Refusals of one kind, by address: the first has a line, those of the next PAUSE_SECONDS one together. For one
    event loop."""

    def __init__(
        self,
        say: Callable[..., None],
        event: str,
        *,
        now: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """`say`: of a Logger, `info` or `warning`. `call_later`: that of the running loop, if it is not given."""
        self._say = say
        self._event = event
        self._now = now
        self._call_later = call_later
        self._counts: dict[str, _Count] = {}  # those that end first are first
        self._timed = False

    def refused(self, address: str, text: str, *args: object) -> None:
        """Log this one, or only count it. `address` is `host:port`."""
        host = host_of(address)
        count = self._counts.get(host)
        if count is None and len(self._counts) >= ADDRESSES_MAX:
            host = OTHERS
            count = self._counts.get(host)
        if count is not None:
            count.more, count.last = count.more + 1, (text, args)
            return
        self._begin(host)
        self._say(self._event, text, *args)

    def _begin(self, host: str) -> None:
        self._counts[host] = _Count(self._now() + PAUSE_SECONDS)
        self._time(PAUSE_SECONDS)

    def _time(self, seconds: float) -> None:
        if not self._timed:
            self._timed = True
            (self._call_later or asyncio.get_running_loop().call_later)(seconds, self._sum_up)

    def _sum_up(self) -> None:
        self._timed = False
        now = self._now()
        for host, count in [*self._counts.items()]:
            if count.until > now:
                self._time(count.until - now)
                break
            del self._counts[host]
            if count.more:
                text, args = count.last
                seconds = int(PAUSE_SECONDS)
                self._say(self._event, f"%s: %d more in %d s, the last: {text}", host, count.more, seconds, *args)
                self._begin(host)


@dataclass(slots=True)
class _Count:
    until: float
    more: int = 0
    last: tuple[str, tuple[object, ...]] = ("", ())
