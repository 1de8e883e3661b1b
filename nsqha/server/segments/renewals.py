"""Makes, renews and releases the holds of the partitions that this node leads. Reads renew them.

    byte server --read(hold id)--> this node's partitions --+
                                   the other nodes ---------+--> a HOLD event, where less than LEFT_MS is left

A reader sends many requests a second; a hold is checked once in LOOK_SECONDS. A request to another node that fails is
sent again at the next check. After any check LEFT_MS are left, so a fault of 15 minutes loses no hold that reads use.

A partition that commits nothing delays the others by HOLD_SECONDS at most (`Unfinished`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

from nsqha.errors import NotFound, NsqhaError
from nsqha.nsqlog import Logger
from nsqha.server.partition import holding
from nsqha.server.runtime.tasks import Unfinished

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition
    from nsqha.server.segments.log_source import LogSource

LEFT_MS = 16 * 60 * 1000  # after a check; with this much left nothing is written
RENEW_MS = 2 * LEFT_MS  # from now: `holding.renew` writes where less than half of it is left
LOOK_SECONDS = 30.0  # between two checks of one hold
LIST_SECONDS = 1.0  # between two listings of the holds in this node's logs
REMEMBERED_MAX = 1024  # holds whose last check is remembered
GUESSES_MAX = 64  # per LOOK_SECONDS: ids that are sent to other nodes although they may be made up
HOLD_SECONDS = 5.0  # for one partition to commit

logger = Logger("segments")

T = TypeVar("T")


class HoldRenewals:
    """Makes, renews and releases holds in what this node leads, and has reads renew them everywhere."""

    def __init__(self, source: LogSource, ask_others: Callable[[int], Awaitable[object]]) -> None:
        """`ask_others(hold)` has every other node renew it; errors of other nodes are not reported."""
        self._source = source
        self._ask_others = ask_others
        self._looked: dict[int, float] = {}  # hold -> time of its last check
        self._listed: frozenset[int] = frozenset()  # the holds in the logs here, led or followed
        self._blind = False  # there are logs here whose holds are not known
        self._listed_at = float("-inf")
        self._guesses = (float("-inf"), 0)  # since when, how many
        self._under_way = Unfinished[tuple["Partition", int]]()

    def read(self, hold: int) -> None:
        """A reader's request names this hold: renew it, if it is known and was not checked just now."""
        now = self._source.loop.time()
        if now - self._looked.get(hold, -LOOK_SECONDS) < LOOK_SECONDS or not self._known(hold, now):
            return
        self._looked.pop(hold, None)
        self._looked[hold] = now
        if len(self._looked) > REMEMBERED_MAX:
            del self._looked[next(iter(self._looked))]
        self._source.spawn(self._renew(hold))

    async def make(self, partition: Partition, hold: int, offset: int, hold_ms: int) -> None:
        """As `holding.hold`; OutcomeUnknown or Unavailable also if that takes too long."""
        await self._do(partition, hold, lambda: holding.hold(partition, hold, offset, hold_ms))

    async def _renew(self, hold: int) -> None:
        try:
            await asyncio.gather(self.renew_here(hold), self._ask_others(hold))
        except NsqhaError as error:
            logger.warning("hold_not_renewed", "hold %016x: %s; tried again with the next read", hold, error)

    async def renew_here(self, hold: int) -> tuple[int, int]:
        """Renew it; returns the number of partitions led here that have it, and its earliest end (ns; 0: in none)."""
        outcomes = await asyncio.gather(*[self._put_off(partition, hold) for partition in self._held(hold)])
        ends = [until_ns for until_ns in outcomes if until_ns]
        return len(ends), min(ends, default=0)

    async def _put_off(self, partition: Partition, hold: int) -> int:
        try:
            return (await self._do(partition, hold, lambda: holding.renew(partition, hold, RENEW_MS))).until_ns
        except NotFound:
            return 0
        except NsqhaError as error:
            logger.warning("hold_not_renewed", "%s, hold %016x: %s", partition.log.directory, hold, error)
            return 0

    async def release_here(self, hold: int) -> int:
        """Release the hold; returns the number of partitions led here that had it or were about to.

        Unavailable or OutcomeUnknown: it may be released in some of them."""
        under_way = self._under_way.keys()
        partitions = dict.fromkeys([*self._held(hold), *(partition for partition, id_ in under_way if id_ == hold)])
        work = [self._do(p, hold, lambda p=p: holding.release(p, hold)) for p in partitions]  # type: ignore[misc]
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return sum(outcome is True for outcome in outcomes)

    async def _do(self, partition: Partition, hold: int, work: Callable[[], Coroutine[object, object, T]]) -> T:
        waits_for = lambda: partition.leader.waits_for or "its leader commits nothing"  # noqa: E731
        return await self._under_way.do((partition, hold), work, HOLD_SECONDS, waits_for)

    def _known(self, hold: int, now: float) -> bool:
        """Whether a log here, led or followed, has it: a reader may send any id, and made-up ones are not sent to the
        other nodes. While the state of a followed log has not arrived, up to GUESSES_MAX unknown ids pass."""
        if now - self._listed_at >= LIST_SECONDS:
            self._listed_at = now
            self._list()
        if hold in self._listed:
            return True
        if now - self._guesses[0] >= LOOK_SECONDS:
            self._guesses = (now, 0)
        if not self._blind or self._guesses[1] >= GUESSES_MAX:
            return False
        self._guesses = (self._guesses[0], self._guesses[1] + 1)
        return True

    def _list(self) -> None:
        """List the holds in the logs here; not for each read, as the cost grows with the number of partitions."""
        followed = list(self._source.followed())
        led = [partition.cursors.state for partition in self._source.led()]
        states = [state for state in (*led, *followed) if state is not None]
        self._listed = frozenset().union(*(state.holds.ids() for state in states))
        self._blind = len(states) < len(led) + len(followed)

    def _held(self, hold: int) -> list[Partition]:
        return [p for p in self._source.led() if p.cursors.state.holds.get(hold) is not None]
