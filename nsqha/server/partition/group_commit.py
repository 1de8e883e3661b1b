"""Group commit of one partition: what goes into the next batch, and when it is written.

    WaitingPublishes, PendingEvents -> flush -> PartitionLog.append -> {disk round || push} -> OutstandingBatches

Adaptive: publishes gather until nothing is outstanding and the publishers answered just now are back
(`publishes.Linger`), or until `FLUSH_BYTES` wait; with followers `PUSHED_FLUSH_BYTES`, as each batch costs each of them
a message and an ack. They leave at the end of a tick. Merging stops at `BATCH_BYTES`; an MPUB is never split.

Publishers that never wait for an OK fill the queue faster than it is written. One iteration of the event loop writes
`LOOP_BYTES`, and no more than `OUTSTANDING_BYTES` wait for the disk and the followers: the rest stays in the queue,
where each source has its share of the next batch (`hot.PublishQueue`).

A leader that hands over writes one thing still: the progress of its channels, which the next leader would miss.
A disk that refuses is tried again after a pause; what it refused of the publishes is answered at once.

Progress of channels that no caller waits for goes into the log without a disk round of its own: a round comes for the
next batch that is waited for, or a patient one. Meanwhile it keeps no publish waiting.

Invariants: batches are appended in the order in which they are committed; no append while a job has the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from nsqha import hot
from nsqha.clock import Now, read
from nsqha.commitlog.entry import Entry
from nsqha.cursor.events import ProgressEvent
from nsqha.cursor.partition import PartitionCursors
from nsqha.errors import AppendFailed
from nsqha.frames import HAS_ATTRIBUTES, HAS_EVENTS
from nsqha.hot import NOT_STORED, OUTCOME_UNKNOWN, Reply, Taken
from nsqha.server.partition.context import LedLog, PartitionLifecycle, PartitionRuntime
from nsqha.server.partition.file_jobs import FileJobs
from nsqha.server.partition.log_sync import LogSync
from nsqha.server.partition.memory import EphemeralLog
from nsqha.server.partition.outstanding import Future, Outstanding, OutstandingBatches, settle
from nsqha.server.partition.publishes import FLUSH_BYTES, PUSHED_FLUSH_BYTES, WaitingPublishes

LOOP_BYTES = 1 << 20  # of publishes written in one iteration of the event loop
OUTSTANDING_BYTES = 4 << 20  # of publishes that are written and not committed; with more the queue waits for a commit
RETRY_SECONDS = 1.0  # after an append that failed: channel events are tried again


class Events(NamedTuple):
    """What goes in front of a batch, and who waits for it."""

    frames: bytes
    flags: int
    done: list[Future]


NO_EVENTS = Events(b"", 0, [])


class PendingEvents:
    """The channel events of one partition that are not in its log yet.

        take -> Events -> written
                       | not_written: the disk refused
                       | wait_on: the outcome is unknown, only the waiters are kept

    What a disk refuses is kept and goes first, without any other: what it says has been counted as said, nothing sends
    it again, and with what becomes due meanwhile it would grow for as long as the disk is full.
    """

    __slots__ = ("_flags", "_refused", "_waiters", "_wanted")

    def __init__(self) -> None:
        self._refused = b""
        self._flags = 0
        self._waiters: list[Future] = []
        self._wanted = False

    @property
    def refused(self) -> bool:
        """Whether there are some that a disk refused, or that were put first."""
        return bool(self._refused)

    @property
    def urgent(self) -> bool:
        """Whether they are not to wait for publishes."""
        return bool(self._waiters or self._wanted or self._refused)

    def wait(self, future: Future) -> None:
        """It ends when what is due now is committed and applied."""
        self._waiters.append(future)

    def want(self) -> None:
        """All that are due are to be written soon; no caller waits."""
        self._wanted = True

    def forced(self) -> bool:
        """Whether all that are due go with the next batch, asked once for it."""
        wanted, self._wanted = self._wanted, False
        return wanted or bool(self._waiters)

    def first(self, frames: bytes, flags: int) -> None:
        """These go before all others."""
        self._refused, self._flags = frames, flags

    def take(self, cursors: PartitionCursors | None, now: Now, force: bool) -> Events:
        """Those of the next batch: refused ones, or what is due at `cursors`; None: they may say nothing yet."""
        if self._refused:
            return Events(self._refused, self._flags, [])
        frames, flags = cursors.take_events(now, force) if cursors is not None else (b"", 0)
        done, self._waiters = self._waiters, []
        return Events(frames, flags, done)

    def written(self) -> None:
        """They are in the log: nothing is kept any more."""
        self._refused, self._flags = b"", 0

    def not_written(self, events: Events) -> None:
        """The disk refused: they are tried again."""
        self._refused, self._flags = events.frames, events.flags
        self.wait_on(events.done)

    def wait_on(self, done: list[Future]) -> None:
        """These still wait, and first."""
        self._waiters = done + self._waiters

    def give_up(self) -> list[Future]:
        """Nothing is written any more; who waits."""
        waiters, self._waiters = self._waiters, []
        return waiters


class GroupCommit:
    """Writes the batches of one partition."""

    def __init__(
        self,
        runtime: PartitionRuntime,
        led: LedLog,
        life: PartitionLifecycle,
        files: FileJobs,
        *,
        sync: str,
        memory: EphemeralLog | None,
        commit: Callable[[Now], None],
        resume: Callable[[], None],
        stop: Callable[[Exception], None],
    ) -> None:
        """`commit`: the commit point moved. `resume`: a disk that refused may be tried again. `stop`: an invariant is
        broken."""
        self.publishes = WaitingPublishes(runtime, led, life, self._publish_came, memory)
        self.publishes.queue.write_lone = self.write_lone if memory is None else None
        self.events = PendingEvents()
        self.outstanding = OutstandingBatches(led, life, self.publishes, runtime.measures, self.schedule)
        self.sync = LogSync(
            runtime,
            led,
            life,
            sync,
            commit=commit,
            flush=self.flush_publishes,
            waited_end=lambda: self.outstanding.waited_end,
        )
        self.on_appended: Callable[[], None] | None = None  # a batch is in the log: push it
        self.on_committed: Callable[[], None] | None = None  # the commit point moved
        self.retry: asyncio.TimerHandle | None = None  # a disk refused, and is tried again then
        self._progress_unwritten = False  # a leader hands over, and has not written its last progress
        self._runtime = runtime
        self._led = led
        self._life = life
        self._files = files
        self._commit = commit
        self._resume = resume
        self._stop = stop

    def set_followers(self, appended: Callable[[], None] | None, committed: Callable[[], None] | None) -> None:
        """Call these for each batch and each move of the commit point; None: nothing is pushed."""
        self.on_appended, self.on_committed = appended, committed
        self.publishes.flush_bytes = FLUSH_BYTES if appended is None else PUSHED_FLUSH_BYTES

    # ---- when

    def schedule(self) -> None:
        """Write at the end of this tick, and wait for no publisher."""
        self.publishes.linger.stop()
        if not self.publishes.queue.scheduled:
            self.publishes.queue.scheduled = True
            self._runtime.loop.call_soon(self._end_of_tick)

    def flush_events(self) -> None:
        """Write in this turn, at the end of a tick, and wait for no publisher."""
        self.publishes.linger.stop()
        self._flush()

    def write_progress(self, now: Now) -> None:
        """Messages were finished, and no batch takes that along: write it, if that costs no other replica anything and
        the node has not done so just now. Else it rides with the next batch, or goes when it is overdue."""
        if now.mono < self._runtime.progress_pace.next_at or self.on_appended is not None:
            return  # most calls, of which there is one for each tick with FINs
        cursors, life = self._led.cursors, self._life
        if not cursors.due_alone:
            return
        if self.publishes.queue.bytes_waiting or self.events.urgent or cursors.urgent or self.retry is not None:
            return
        if not life.serving or life.closed or life.handing_over or not self._files.ready():
            return
        self._runtime.progress_pace.next_at = now.mono + cursors.limits.progress_alone_s
        try:
            self.write(force_events=True, take_publishes=False, patient=True)
        except Exception as error:
            self._stop(error)

    def _publish_came(self) -> None:
        """The queue is not empty any more. Who was alone in the last batch is not worth gathering for."""
        publishes = self.publishes
        if publishes.linger.lone and self.on_appended is not None and not self.outstanding.batches:
            publishes.queue.scheduled = False
            self._flush()
        else:
            self._runtime.loop.call_soon(self._end_of_tick)

    def _end_of_tick(self) -> None:
        self.publishes.queue.scheduled = False
        self._flush()

    def flush_publishes(self) -> None:
        """A batch was committed or synced: write the publishes that waited for that."""
        if self.publishes.queue.bytes_waiting:
            self._flush()

    def _flush(self) -> None:
        publishes, life, events = self.publishes, self._life, self.events
        queue, batches = publishes.queue, self.outstanding
        written = 0
        try:
            while True:
                outstanding = batches.waited_for
                # Who waits for an OK passes here in two or three turns: as few calls as can be.
                if queue.bytes_waiting and not outstanding and publishes.linger.waits(queue.count, queue.bytes_waiting):
                    if not queue.scheduled:
                        queue.scheduled = True
                        self._runtime.loop.call_soon(self._end_of_tick)
                    return
                urgent = events.urgent or (life.serving and self._led.cursors.urgent)  # before, nothing takes them
                if life.closed or life.handing_over or not (queue.bytes_waiting or urgent):
                    return
                if not urgent and outstanding and queue.bytes_waiting < publishes.flush_bytes:
                    return
                if not urgent and batches.bytes >= OUTSTANDING_BYTES:
                    return
                if not self._files.ready():
                    return
                if written >= LOOP_BYTES:
                    if not queue.scheduled:
                        queue.scheduled = True
                        self._runtime.loop.call_soon(self._end_of_tick)
                    return
                waiting = queue.bytes_waiting
                if not self.write(force_events=events.forced()):
                    return
                written += waiting - queue.bytes_waiting
        except Exception as error:
            self._stop(error)

    # ---- what

    def write(self, *, force_events: bool = False, take_publishes: bool = True, patient: bool = False) -> bool:
        """Write one batch. False if the disk refused. `patient`: only progress is due, which no caller waits for."""
        led, publishes = self._led, self.publishes
        publishes.linger.lone = False
        now = read(self._runtime.clock)
        patient = patient and not self.events.urgent
        events = self.events.take(led.cursors if self._life.serving else None, now, force_events)
        taken = publishes.queue.take() if take_publishes else Taken([], [], [], 0)
        if not taken.runs and not events.frames:
            if not (self.outstanding.patient and (events.done or self._life.handing_over)):
                self.outstanding.settle_behind(events.done)
                return True
            # There is nothing new to say, but what was written patiently is waited for now, on every replica.
            events = events._replace(frames=ProgressEvent(()).encode(), flags=HAS_EVENTS)
        try:
            entry, data = _append(led, now, events, taken)
        except AppendFailed as error:
            self._runtime.disk.signs.refused(error)
            self.events.not_written(events)
            publishes.refuse(taken.waiters, taken.size, f"{NOT_STORED}{error}")
            if self.retry is None:
                self.retry = self._runtime.loop.call_later(RETRY_SECONDS, self._try_again)
            return False
        except Exception as error:
            self.events.wait_on(events.done)
            publishes.refuse(taken.waiters, taken.size, f"{OUTCOME_UNKNOWN}{type(error).__name__}: {error}")
            self._stop(error)
            return False
        # First: whatever fails from here on, `abandon` answers who waits for it.
        self.outstanding.batches.append(Outstanding(entry, data, taken.waiters, events.done, now.mono, taken.size))
        self.outstanding.bytes += taken.size
        self.events.written()
        count = entry.count
        publishes.message_count += count
        publishes.message_bytes += len(data) - len(events.frames) - count * hot.HEADER
        if patient and not taken.runs:
            self.sync.wrote_progress()
        else:
            self.outstanding.waited_end = led.log.end.log_id
            self.sync.wrote(count)
        if self.on_appended is not None:
            self.on_appended()
        if led.leader.written(led.log.end.log_id):
            self._commit(now)
        if led.log.needs_roll:
            self._files.roll()
        return True

    def write_lone(self, run: bytes, reply: Reply) -> bool:
        """Write the run of a publisher that was alone in the last batch, at once, and answer it.

        False, and nothing was done: it has to go by the queue. This is what `write` and `OutstandingBatches.commit` do
        where nothing else waits, no event is urgent and the write is the commit; it asks that first, and does no more.
        """
        led, life = self._led, self._life
        if life.closed or life.handing_over or not (life.serving and led.leader.alone) or self.on_appended is not None:
            return False
        now = read(self._runtime.clock)
        if self.outstanding.batches or self.events.urgent or not self._files.ready():
            return False
        quiet = led.cursors.quiet(now.mono)
        if not quiet and led.cursors.urgent:
            return False
        try:
            return self._write_lone(run, reply, now, quiet=quiet)
        except Exception as error:
            self._stop(error)
            return True

    def _write_lone(self, run: bytes, reply: Reply, now: Now, *, quiet: bool) -> bool:
        led, publishes, events = self._led, self.publishes, NO_EVENTS
        log, leader = led.log, led.leader
        try:
            if not quiet:
                events = self.events.take(led.cursors, now, False)
            frames, flags, _ = events
            data = bytearray(frames + run) if frames else bytearray(run)
            timestamp_ns = log.next_timestamp(now.wall_ns)
            count = hot.stamp(data, len(frames), led.id_base + log.end.offset, timestamp_ns)
            entry = log.append(
                data, count=count, flags=flags, timestamp_ns=timestamp_ns, epoch=leader.epoch, durable=leader.durable
            )
        except AppendFailed:
            self.events.not_written(events)
            return False  # nothing is written, and `write` knows what becomes of publishes that a disk refuses
        except Exception as error:
            publishes.refuse([(reply, now.mono)], 0, f"{OUTCOME_UNKNOWN}{type(error).__name__}: {error}")
            raise
        try:
            publishes.message_count += count
            publishes.message_bytes += len(run) - count * hot.HEADER
            self.outstanding.waited_end = log.end.log_id
            leader.written(log.end.log_id)
        except Exception:
            self.outstanding.keep_lone(entry, data, reply, now)
            raise
        self.outstanding.commit_lone(entry, data, reply, now)
        self.sync.wrote(count)
        self._commit(now)  # it has nothing left to apply, and deliveries to begin
        if log.needs_roll:
            self._files.roll()
        return True

    def _try_again(self) -> None:
        self.retry = None
        self.write_last_progress()
        self._resume()

    # ---- the end

    def hand_over(self, handing_over: bool) -> None:
        """Another node is about to lead, or is not any more. It would miss progress that is not written by then."""
        self._progress_unwritten = handing_over and self._life.serving
        self.write_last_progress()

    def write_last_progress(self) -> None:
        """Write it behind what a disk refused, and without publishes, once the files are free."""
        while self._progress_unwritten and not (self._life.closed or self._files.busy or self.retry):
            self._progress_unwritten = self.events.refused
            writes = self._progress_unwritten or self._led.cursors.prepare_stop() or self.outstanding.patient
            if writes and not self.write(force_events=True, take_publishes=False):
                self._progress_unwritten = True

    @property
    def last_progress_due(self) -> bool:
        """Whether progress that the next leader would miss is about to be written; a full disk is not waited for."""
        return self._progress_unwritten and self.retry is None and not self._life.closed

    def close(self) -> None:
        """Take no more publishes, and begin nothing more."""
        self.publishes.queue.closed = True
        self.sync.cancel()
        if self.retry is not None:
            self.retry.cancel()

    async def finish(self) -> None:
        """A clean stop: write what waits and the last progress, and sync."""
        if self.events.refused:
            self.write()
        if self._life.serving:
            self._led.cursors.prepare_stop()
            self.write(force_events=True)
        while self.publishes.queue.bytes_waiting:
            self.write()
        await self.sync.finish()

    def abandon(self, why: str) -> None:
        """Answer every waiter that nothing more comes."""
        self.publishes.refuse_all(why)
        behind_batches = self.outstanding.abandon(why)
        settle(self.events.give_up(), why)
        settle(behind_batches, why)


def _append(led: LedLog, now: Now, events: Events, taken: Taken) -> tuple[Entry, bytearray]:
    """Stamp the runs behind the events, and write both as one batch."""
    frames, flags, _ = events
    runs = taken.runs
    for index, delay_ms in taken.delays:
        flags |= HAS_ATTRIBUTES
        run = runs[index]
        _, covers = hot.walk(run, 0, len(run), len(run))
        runs[index] = led.cursors.deliver_at(now.wall_ns + delay_ms * 1_000_000, run, covers)
    data = bytearray().join((frames, *runs)) if frames else bytearray().join(runs)
    timestamp_ns = led.log.next_timestamp(now.wall_ns)
    count = hot.stamp(data, len(frames), led.id_base + led.log.end.offset, timestamp_ns) if runs else 0
    entry = led.log.append(
        data,
        count=count,
        flags=flags,
        timestamp_ns=timestamp_ns,
        epoch=led.leader.epoch,
        durable=led.leader.durable,
    )
    return entry, data
