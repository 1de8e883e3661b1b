"""Publishes of one partition that are not written yet, and whether a flush waits for more of them.

Linger decides whether a flush waits for the publishers that were answered just now. Publishers that wait for their
OKs fall into two groups: one waits for the batch under way, the other for that one's end, so each batch has half of
what it could; and where a commit takes no time, those who were answered first are back while the others are still
being answered. Who was answered usually publishes again at once; the next batch is therefore given a few turns of the
loop until as much waits as was answered or waiting at the commit: about as many bytes or, where bodies differ, as many
runs and most of the bytes.

Publishers that do not come back cost that once: each time most was not there in the end, twice as many commits pass
before it is tried again. So it is with the last ones: each time only they were missing, twice as many commits go with
most. All this is counted in turns: a turn looks at every socket once and takes some microseconds. Where strangers keep
the loop busy it takes milliseconds, and nobody is back sooner for that: after LINGER_SECONDS a flush waits no more, and
each time it waited so long twice as many commits pass, whoever was back in the end.

Invariants: bytes count in the node's budget from when they wait until they are committed or refused; a publisher that
can not be answered keeps no other one from its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nsqha import hot
from nsqha.hot import NOT_STORED, Reply, Waiter
from nsqha.nsqlog import Logger
from nsqha.server.partition.context import LedLog, PartitionLifecycle, PartitionRuntime
from nsqha.server.partition.memory import EphemeralLog

BATCH_BYTES = 512 << 10  # merging stops here
FLUSH_BYTES = 64 << 10  # while a batch is outstanding, the next one waits for its commit or for this much
PUSHED_FLUSH_BYTES = 256 << 10
TURNS = 32
LINGER_SECONDS = 0.002  # many times 32 turns of a loop that has little to do; loop time has milliseconds
SKIPPED_MAX = 64
ALL_BYTES = 31 / 32  # of what is expected: bodies differ
MOST_BYTES = 3 / 4

logger = Logger("partition")


class WaitingPublishes:
    """Publishes of one partition that no batch has yet."""

    def __init__(
        self,
        runtime: PartitionRuntime,
        led: LedLog,
        life: PartitionLifecycle,
        schedule: Callable[[], None],
        memory: EphemeralLog | None,
    ) -> None:
        """`schedule`: something waits. `memory`: what bounds an #ephemeral topic."""
        self.queue = hot.PublishQueue(runtime.budget, schedule, BATCH_BYTES)
        self.linger = Linger(runtime.loop.time)
        self.flush_bytes = FLUSH_BYTES
        self.budget = runtime.budget
        self.message_count = 0  # of all that were answered with OK, or will be; dropped ones included, as in nsqd
        self.message_bytes = 0
        self.inherited_count = _waiting(led)  # when this node began to lead
        self._time = runtime.loop.time
        self._led = led
        self._life = life
        self.memory = memory

    @property
    def open_queue(self) -> hot.PublishQueue | None:
        """For publishers that put whole runs there themselves; None: only `publish` knows what the topic keeps."""
        return self.queue if self.memory is None else None

    def publish(self, frames: bytes, reply: Reply, delay_ms: int | None = None, *, waited: float = 0.0) -> None:
        """Store a run of blank frames as one unit; `reply` hears of the outcome.

        `delay_ms`: every channel gets the messages so long after the flush. `waited`: seconds since its client sent it,
        if it comes from another node.
        """
        if self._life.closed:
            reply.failed(f"{NOT_STORED}{self._life.why}")
            return
        if self.memory is not None:
            frames = self._fitting(frames, self.memory)
            if not frames:
                reply.stored()
                return
        self.queue.add(frames, reply, self._time() - waited, delay_ms)

    def _fitting(self, frames: bytes, memory: EphemeralLog) -> bytes:
        """What of a publish an #ephemeral topic keeps: nsqd drops the rest and says OK."""
        state = self._led.cursors.state
        _, count = hot.walk(frames, 0, len(frames), len(frames))
        room = count
        if memory.full(self.queue.bytes_waiting):
            room = 0
        elif not state.moving:
            waiting = sum(hot.walk(run, 0, len(run), len(run))[1] for run in self.queue.runs)
            room = max(memory.messages_max - (self._led.log.end.offset + waiting - state.pump), 0)
        if count <= room:
            return frames
        memory.dropped(count - room)
        self.message_count += count - room
        end, _ = hot.walk(frames, 0, len(frames), room)
        return frames[:end]

    def refuse(self, waiters: Iterable[Waiter], size: int, why: str) -> None:
        """Answer publishes that are not stored, or whose outcome is unknown: `why` says which."""
        self.budget.give(size)
        for reply, _ in waiters:
            try:
                reply.failed(why)
            except Exception as error:
                reply_failed(error)

    def expire(self, seconds_max: float) -> None:
        """Refuse what has waited for longer than `seconds_max`."""
        expired = self.queue.take_since(self._time() - seconds_max)
        if expired.waiters:
            why = self._led.leader.waits_for or "the log could not be written in time"
            self.refuse(expired.waiters, expired.size, f"{NOT_STORED}{why}")

    def refuse_all(self, why: str) -> None:
        waiting = self.queue.take_all()
        self.refuse(waiting.waiters, waiting.size, f"{NOT_STORED}{why}")


def reply_failed(error: Exception) -> None:
    logger.error("reply_failed", "a publisher could not be answered", error=error)


class _Patience:
    """Each failure in a row doubles how many commits pass before the next try."""

    __slots__ = ("_skip", "_skipped")

    def __init__(self) -> None:
        self._skip = 0  # commits that pass before the next try
        self._skipped = 0  # how many passed the last time

    def tries(self) -> bool:
        if self._skip:
            self._skip -= 1
            return False
        return True

    def succeeded(self) -> None:
        self._skipped = 0

    def failed(self) -> None:
        self._skipped = self._skip = min(2 * self._skipped or 1, SKIPPED_MAX)


class Linger:
    """Decides whether flushes of one partition wait.

    `committed` is called at each commit that leaves nothing outstanding, `waits` at each flush after it.
    """

    __slots__ = ("_bytes", "_end", "_first", "_for_last", "_last", "_long", "_runs", "_time", "_turns", "lone")

    def __init__(self, time: Callable[[], float]) -> None:
        """`time`: of the loop, the same during a turn."""
        self._bytes = 0  # expected
        self._runs = 0
        self._turns = 0  # left
        self._end = 0.0  # from then on no flush waits
        self._time = time
        self._first = _Patience()
        self._last = _Patience()
        self._long = _Patience()  # with turns that take long
        self._for_last = False  # waits for the last ones too
        self.lone = False  # one publisher alone was answered, and nothing was written since

    def committed(self, runs: int, size: int, bytes_max: int) -> None:
        """`runs` runs, of `size` bytes in all, were answered just now or wait; no more than `bytes_max` ever will."""
        self.lone = runs == 1
        tries = self._first.tries()
        if self._long.tries() and tries:
            self._runs = runs
            self._bytes = min(size, bytes_max)
            self._turns = TURNS
            self._end = self._time() + LINGER_SECONDS
            self._for_last = self._last.tries()

    def stop(self) -> None:
        """The next flush waits for no publisher."""
        self._turns = 0

    def waits(self, runs: int, size: int) -> bool:
        """Whether to look again in the next turn, with so much waiting now."""
        if not self._turns:
            return False
        waited = self._turns < TURNS
        most = size >= MOST_BYTES * self._bytes
        all_there = size >= ALL_BYTES * self._bytes or (most and runs >= self._runs)
        if not all_there and (self._for_last or not most):
            self._turns -= 1
            if self._turns and self._time() < self._end:
                return True
        if waited:
            if self._time() < self._end:
                self._long.succeeded()
            else:
                self._long.failed()
        self._turns = 0
        if not most:
            self._first.failed()
            return False
        self._first.succeeded()
        if self._for_last:
            if all_there:
                self._last.succeeded()
            else:
                self._last.failed()
        return False


def _waiting(led: LedLog) -> int:
    """Messages that consumers of a channel, or of the first one that is made, may still have to do with."""
    state = led.cursors.state
    floors = [channel.floor for channel in state.channels.values() if not channel.reader]
    return led.log.end.offset - min([state.pump, *floors])
