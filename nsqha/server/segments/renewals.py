"""Holds are renewed by reading: whoever serves bytes says so here, and every leader that has the hold puts its end off.

    byte server --read(hold id)--> this node's partitions --+
                                   the other nodes ---------+--> a HOLD event, where less than half of RENEW_MS is left

A reader asks for many ranges a second; a hold is looked at once in LOOK_SECONDS. What other nodes can not be told is
told again at the next look: a hold lasts 15 minutes, so a fault of minutes loses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nsqha.errors import NotFound, NsqhaError
from nsqha.nsqlog import Log
from nsqha.server import holding

if TYPE_CHECKING:
    from nsqha.server.broker import Broker
    from nsqha.server.partition import Partition

RENEW_MS = 15 * 60 * 1000  # from now; with more than half of it left nothing is written
LOOK_SECONDS = 30.0  # between two looks at one hold
REMEMBERED_MAX = 1024  # holds whose last look is known

log = Log("segments")


class HoldRenewals:
    """Renews and releases holds in what this node leads, and asks the others."""

    def __init__(self, broker: Broker, ask_others: Callable[[int], Awaitable[object]]) -> None:
        """`ask_others(hold)` has every other node renew it; what fails there is not told."""
        self._broker = broker
        self._ask_others = ask_others
        self._looked: dict[int, float] = {}  # hold -> when

    def read(self, hold: int) -> None:
        """A reader names this hold."""
        now = self._broker.loop.time()
        if now - self._looked.get(hold, -LOOK_SECONDS) < LOOK_SECONDS or not self._known(hold):
            return
        self._looked.pop(hold, None)
        self._looked[hold] = now
        if len(self._looked) > REMEMBERED_MAX:
            del self._looked[next(iter(self._looked))]
        self._broker.spawn(self._renew(hold))

    async def _renew(self, hold: int) -> None:
        try:
            await asyncio.gather(self.renew_here(hold), self._ask_others(hold))
        except NsqhaError as error:
            log.warning("hold_not_renewed", "hold %016x: %s; tried again with the next read", hold, error)

    async def renew_here(self, hold: int) -> tuple[int, int]:
        """In how many partitions led here it is, and the earliest of its ends (ns; 0: in none)."""
        outcomes = await asyncio.gather(*[self._put_off(partition, hold) for partition in self._held(hold)])
        ends = [until_ns for until_ns in outcomes if until_ns]
        return len(ends), min(ends, default=0)

    async def _put_off(self, partition: Partition, hold: int) -> int:
        try:
            return (await holding.renew(partition, hold, RENEW_MS)).until_ns
        except NotFound:
            return 0
        except NsqhaError as error:
            log.warning("hold_not_renewed", "%s, hold %016x: %s", partition.log.directory, hold, error)
            return 0

    async def release_here(self, hold: int) -> int:
        """In how many partitions led here it was. Unavailable, OutcomeUnknown: perhaps not in all of them any more."""
        outcomes = await asyncio.gather(*[holding.release(partition, hold) for partition in self._held(hold)])
        return sum(outcomes)

    def _known(self, hold: int) -> bool:
        """Whether a log here has it, led or followed: any name may come from a reader, and the others are not asked for
        those that are made up."""
        cluster = self._broker.cluster
        followed = [] if cluster is None else [f.state for f in cluster.replicas.followers.values()]
        return bool(self._held(hold)) or any(state and state.holds.get(hold) is not None for state in followed)

    def _held(self, hold: int) -> list[Partition]:
        led = [partition for topic in self._broker.topics.values() for partition in topic.led]
        return [p for p in led if p.cursors.state.holds.get(hold) is not None]
