"""The deliveries of one partition, by channel: pumped together, and watched by one alarm.

    a commit         -> pump               every channel may have something new
    a window opened  -> wake -> [the end of the tick] -> those that were woken, all at one moment
    a read failed    -> wake_later -> wake
    the alarm rings  -> the partition, for its events -> due
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.clock import Now
from nsqha.server.partition.alarm import Alarm

if TYPE_CHECKING:
    from nsqha.server.partition.delivery import Delivery
    from nsqha.server.partition.partition import Partition


READ_RETRY_SECONDS = 1.0  # after files of the log could not be opened
CLOCK_SET_SECONDS = 1.0  # so far apart from each other the two clocks come only if one is set, or the host slept


class Deliveries(dict[str, "Delivery"]):
    """By channel name; opened and closed by `Topic`."""

    def __init__(self, partition: Partition, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        """`ring`: a deadline is over, of a channel or of an event."""
        super().__init__()
        self._partition = partition
        self._loop = loop
        self._woken: list[Delivery] = []
        self._alarm = Alarm(loop, ring)
        self._wall_ahead = 0.0  # of the monotonic clock

    def pump(self, now: Now) -> None:
        """Hand out what windows and backlogs allow, to every channel."""
        for delivery in list(self.values()):
            delivery.pump(now)
        self.arm(now.mono)

    def wake(self, delivery: Delivery) -> None:
        """Pump this one at the end of the tick."""
        if not self._woken:
            self._loop.call_soon(self._pump_woken)
        self._woken.append(delivery)

    def wake_later(self, delivery: Delivery) -> None:
        """Pump it in a while, whatever happens until then."""
        delivery.delayed = True
        self._loop.call_later(READ_RETRY_SECONDS, self._wake_delayed, delivery)

    def _wake_delayed(self, delivery: Delivery) -> None:
        delivery.delayed = False
        delivery.wake()

    def _pump_woken(self) -> None:
        woken, self._woken = self._woken, []
        for delivery in woken:
            delivery.woken = False
        if self._partition.closed:
            return
        now = self._partition.now()
        for delivery in woken:
            delivery.pump(now)
        self.arm(now.mono)

    def due(self, now: Now) -> None:
        """Time out what is overdue and hand out what has become due; `arm` is the caller's."""
        for delivery in list(self.values()):
            delivery.due(now)

    def watch_clock(self, now: Now) -> None:
        """Called about once a second: what is due by the wall clock may be so although no timer says it."""
        ahead = now.wall_ns / 1e9 - now.mono
        if abs(ahead - self._wall_ahead) > CLOCK_SET_SECONDS:
            self._wall_ahead = ahead
            self.due(now)
            self.arm(now.mono)

    def arm(self, now: float) -> None:
        """Make sure that the loop comes back for the earliest deadline of any channel, and for overdue events."""
        partition = self._partition
        deadline = None if partition.held_up else partition.cursors.event_deadline()
        for delivery in self.values():
            mine = delivery.channel.next_deadline()
            if mine is not None and (deadline is None or mine < deadline):
                deadline = mine
        if deadline is not None:
            self._alarm.set(deadline, now)

    def cancel(self) -> None:
        """No more alarms."""
        self._alarm.cancel()
