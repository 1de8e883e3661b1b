"""Batches of one partition that are written and not committed yet, in log order, and who waits for each.

    written -> OutstandingBatches -> committed: events applied, publishers answered
                                  -> overdue or abandoned: the outcome is unknown

A publisher that can not be answered keeps no other one from its answer. Invariant: a waiter is answered exactly once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from nsqha import hot
from nsqha.clock import Now
from nsqha.commitlog.entry import Entry
from nsqha.cursor.committed.state import Effect, EpochStarted, lists_only
from nsqha.cursor.partition import Forgotten
from nsqha.errors import Unavailable
from nsqha.hot import OUTCOME_UNKNOWN, Reply, Waiter
from nsqha.server.partition.context import LedLog, PartitionLifecycle
from nsqha.server.partition.publishes import WaitingPublishes, reply_failed
from nsqha.server.runtime.measures import Measures

Future = asyncio.Future[None]


class Outstanding:
    """A written batch that is not committed yet, and who waits for it."""

    __slots__ = ("data", "done", "entry", "size", "waiters", "written_at")

    def __init__(
        self,
        entry: Entry,
        data: bytearray,
        waiters: list[Waiter],
        done: list[Future],
        written_at: float,
        size: int,
    ) -> None:
        self.entry = entry
        self.data = data
        self.waiters = waiters
        self.done = done  # end when its events are applied
        self.written_at = written_at
        self.size = size  # what it has of the budget

    def committed(self) -> None:
        """Answer every waiter."""
        hot.tell_stored(self.waiters, reply_failed)
        if self.done:
            settle(self.done)


def settle(futures: Iterable[Future], why: str | None = None) -> None:
    """End those that have not been given up. `why`: what they wait for will not come."""
    for future in futures:
        if future.done():
            continue
        if why is None:
            future.set_result(None)
        else:
            future.set_exception(Unavailable(why))


class OutstandingBatches:
    """The written batches of one partition that are not committed yet."""

    def __init__(
        self,
        led: LedLog,
        life: PartitionLifecycle,
        publishes: WaitingPublishes,
        measures: Measures,
        schedule: Callable[[], None],
    ) -> None:
        """`schedule`: channel events may be written now."""
        self.batches: deque[Outstanding] = deque()
        self.bytes = 0  # of publishes in them
        self.waited_end = 0  # log id: no caller and no publisher waits for the batches from here on, only progress
        self.on_effects: Callable[[Sequence[Effect | Forgotten]], None] = lambda effects: None
        self._led = led
        self._life = life
        self._publishes = publishes
        self._measures = measures
        self._schedule = schedule

    @property
    def waited_for(self) -> bool:
        """Whether there are batches that a disk round was requested for."""
        return bool(self.batches) and self.batches[0].entry.log_id < self.waited_end

    @property
    def patient(self) -> bool:
        """Whether the last batch waits for a patient disk round."""
        return bool(self.batches) and self.batches[-1].entry.log_id >= self.waited_end

    def commit(self, now: Now) -> bool:
        """Apply and answer what the commit point has passed. False: that was changes of the channel list alone, or
        floors, so that no channel has anything new to hand out but those that `on_effects` has woken."""
        committed = self._led.leader.committed
        lists = others = 0
        outstanding, publishes, cursors = self.batches, self._publishes, self._led.cursors
        pump = cursors.state.pump
        answered, runs, size = False, publishes.queue.count, publishes.queue.bytes_waiting
        while outstanding and outstanding[0].entry.log_id < committed:
            batch = outstanding[0]
            entry = batch.entry
            effects = cursors.apply(entry, batch.data, now)
            if lists_only(entry, effects) or cursors.floors_only(entry, effects):
                lists += 1
            else:
                others += 1
            if effects:
                if not self._life.serving:
                    self._start_serving(effects)
                self.on_effects(effects)
            # Only now: had that failed, `abandon` would answer these.
            outstanding.popleft()
            publishes.budget.give(batch.size)
            self.bytes -= batch.size
            if batch.waiters:
                answered = True
                runs += len(batch.waiters)
                size += batch.size
            if entry.count:
                self._measures.publish_seconds.observe(now.mono - batch.written_at)
                self._measures.batch_messages.observe(entry.count)
            batch.committed()
        if answered and not self.waited_for:
            publishes.linger.committed(runs, size, publishes.flush_bytes)
        return not lists or others > 0 or cursors.state.pump != pump

    def commit_lone(self, entry: Entry, data: bytearray, reply: Reply, now: Now) -> None:
        """`commit` of a batch that was committed by its write, with nothing before it: one publish, and progress."""
        led = self._led
        try:
            assert led.leader.committed == led.log.end.log_id, f"{entry} was written alone, and is not committed"
            effects = led.cursors.apply(entry, data, now)
            if effects:
                self.on_effects(effects)
        except Exception:
            self.keep_lone(entry, data, reply, now)
            raise
        self._measures.publish_seconds.observe(0.0)
        self._measures.batch_messages.observe(entry.count)
        try:
            reply.stored()
        except Exception as error:
            reply_failed(error)

    def keep_lone(self, entry: Entry, data: bytearray, reply: Reply, now: Now) -> None:
        """It is written, and something failed before it was committed: `abandon` answers it."""
        self.batches.append(Outstanding(entry, data, [(reply, now.mono)], [], now.mono, 0))

    def _start_serving(self, effects: Sequence[Effect | Forgotten]) -> None:
        """The epoch start may be among what was applied: from then on channel events are written."""
        led = self._led
        if any(isinstance(e, EpochStarted) and e.epoch == led.leader.epoch for e in effects):
            self._life.serving = True
            led.cursors.start_at(led.log.start.offset, led.log.start.position)
            if led.cursors.urgent:
                self._schedule()  # what was queued too early

    def settle_behind(self, futures: list[Future]) -> None:
        """There is nothing more to write for these: they end with what is written, the last batch included."""
        if self.batches:
            self.batches[-1].done += futures
        else:
            settle(futures)

    def answer_overdue(self, written_before: float) -> None:
        """Answer publishes whose outcome is not known after so long; their batches stay outstanding."""
        for batch in self.batches:
            if batch.waiters and batch.written_at < written_before:
                waiters, batch.waiters = batch.waiters, []
                why = self._led.leader.waits_for or "not confirmed in time"
                self._publishes.refuse(waiters, 0, f"{OUTCOME_UNKNOWN}{why}")

    def abandon(self, why: str) -> list[Future]:
        """Answer all publishers that the outcome is unknown; who waits for the events of these batches."""
        abandoned = list(self.batches)
        self.batches.clear()
        self.bytes = 0
        for batch in abandoned:
            self._publishes.refuse(batch.waiters, batch.size, f"{OUTCOME_UNKNOWN}{why}")
        return [future for batch in abandoned for future in batch.done]
