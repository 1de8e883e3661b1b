"""One partition on the node that leads it: group commit in, committed batches out.

    publish, events -> waiting -> flush -> PartitionLog.append -> {disk round || push} -> LeaderReplica -> commit
    commit -> channel events applied, high watermark moved, publishers answered, channels pumped

Adaptive group commit: publishes gather until nothing is outstanding and the publishers answered just now are back
(`group_commit.Gathering`), or until `FLUSH_BYTES` wait; with followers `PUSHED_FLUSH_BYTES`, as each batch costs each
of them a message and an ack. They leave at the end of a tick. Merging stops at `BATCH_BYTES`; an MPUB is never split.

What goes wrong here stays here: a broken invariant or an event that can not be applied stops this partition, answers
everybody who waits, and no other partition notices. A disk that fails ends the node (`on_failure`).

A leader begins with its epoch-start batch. Until that is committed and applied it takes publishes, but delivers
nothing and writes no channel events: what it knows of the channels may be older than what another leader committed.

Invariants: batches commit in log order; a waiter is answered exactly once; no append while a roll is under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nsqha import hot
from nsqha.clock import Clock, Now, read
from nsqha.commitlog.entry import Entry, Place
from nsqha.commitlog.log import PartitionLog, SyncTicket
from nsqha.cursor.events import EpochStart
from nsqha.cursor.partition import ChannelListLike, Forgotten, PartitionCursors
from nsqha.cursor.state import NEEDS_LOOK, Effect, EpochStarted
from nsqha.errors import AppendFailed, Poisoned, Unavailable
from nsqha.frames import HAS_ATTRIBUTES, HAS_EVENTS
from nsqha.hot import NOT_STORED, OUTCOME_UNKNOWN, Reply, Taken, Waiter
from nsqha.nsqlog import Logger
from nsqha.replication.leader import LeaderReplica
from nsqha.server.partition.delivery import Deliveries
from nsqha.server.partition.file_jobs import FileJobs
from nsqha.server.partition.group_commit import (
    Events,
    Linger,
    Outstanding,
    PendingEvents,
    refuse,
    settle,
    settle_behind,
)
from nsqha.server.partition.local_repair import LocalRepair
from nsqha.server.partition.retention import RetentionRunner
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.runtime.disk import DiskRounds, LazySync
from nsqha.server.runtime.measures import Measures

logger = Logger("partition")

T = TypeVar("T")

FLUSH_BYTES = 64 << 10  # while a batch is outstanding, the next one waits for its commit or for this much
PUSHED_FLUSH_BYTES = 256 << 10
BATCH_BYTES = 512 << 10  # merging stops here
RETRY_SECONDS = 1.0  # after an append that failed: channel events are tried again


@dataclass(frozen=True, slots=True)
class PartitionRuntime:
    """What the node lends to each of its partitions."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    disk: DiskRounds
    measures: Measures
    on_failure: Callable[[BaseException], None]
    budget: PublishBudget  # of the whole node: beyond it publishers are not read
    wait_seconds_max: float  # a publish that could not be written for so long is refused
    written_seconds_max: float  # a written publish without outcome is answered "unknown"
    sync_every: int  # messages per fsync with sync=interval
    sync_seconds: float


class Partition:
    """Owner of one partition's log, commit point and channels."""

    def __init__(
        self,
        runtime: PartitionRuntime,
        *,
        number: int,
        id_base: int,
        log: PartitionLog,
        cursors: PartitionCursors,
        leader: LeaderReplica,
        retention: RetentionRunner,
        sync: str,
        held_back_max: int | None,
    ) -> None:
        """`held_back_max`: messages kept while no channel takes them; None: all."""
        self.held_back_max = held_back_max
        self.retention = retention
        self.number = number
        self.id_base = id_base
        self.log = log
        self.cursors = cursors
        self.leader = leader
        self.deliveries = Deliveries(self, runtime.loop, self._due)
        self.message_count = 0
        self.message_bytes = 0
        self.closed = False
        self.stopped: str | None = None  # which broken invariant ended it; shown in the health checks
        self.sync = sync
        self.serving = False  # the epoch start is applied: deliveries and channel events may go on
        self.on_effects: Callable[[Sequence[Effect | Forgotten]], None] = lambda effects: None
        self.on_damage: Callable[[int, int], object] = lambda first, end: None  # log ids that do not verify
        self.local_repair: LocalRepair | None = None  # of a log that nobody else has
        self.on_appended: Callable[[], None] | None = None  # a batch is in the log: push it
        self.on_committed: Callable[[], None] | None = None  # the commit point moved
        self._runtime = runtime
        self._loop = runtime.loop
        self._clock = runtime.clock
        self._disk = runtime.disk
        self._measures = runtime.measures
        self._on_failure = runtime.on_failure
        self._queue = hot.PublishQueue(runtime.budget, self._flush_soon)
        self._linger = Linger()
        self._events = PendingEvents()
        self._outstanding: deque[Outstanding] = deque()
        self._files = FileJobs(runtime.loop, runtime.disk, failed=self._job_failed, ended=self._job_ended)
        self._retry: asyncio.TimerHandle | None = None
        self._why = "the partition is closed"
        self._ended = False
        self._holding = self._unsaid = False
        self._lazy_sync = LazySync(
            runtime.loop, runtime.disk, self, messages=runtime.sync_every, seconds=runtime.sync_seconds
        )
        self._budget = runtime.budget

    def start_epoch(self, channels: ChannelListLike | None = None) -> asyncio.Future[None]:
        """Write the epoch-start batch, synced; the future ends when it is committed and applied.

        `channels`: the channel list as the metadata has it; the log is brought in line with it in the same batch, so
        before anything of this epoch is acknowledged. What an earlier leader left uncommitted at the end of the log
        is committed with it.
        """
        for entry in self.log.entries(self.cursors.state.applied.log_id + 1, self.log.end.log_id):
            data = bytearray(self.log.events(entry)) if entry.flags & NEEDS_LOOK else bytearray()
            self._outstanding.append(Outstanding(entry, data, [], [], self._clock.monotonic(), 0))
        events = EpochStart(self.leader.epoch, self.leader.node).encode()
        if channels is not None:
            events += self.cursors.opening_events(channels)
        self._events.first(events, HAS_EVENTS)
        future: asyncio.Future[None] = self._loop.create_future()
        if self.closed:
            future.set_exception(Unavailable(self._why))
            return future
        self._events.wait(future)
        self._schedule_flush()
        self._disk.request(self)
        return future

    # ---- publishing

    def publish(self, frames: bytes, reply: Reply, delay_ms: int | None = None, *, waited: float = 0.0) -> None:
        """Store a run of blank frames as one unit; `reply` hears of the outcome.

        `delay_ms`: every channel gets the messages so long after the flush. `waited`: seconds since its client sent it,
        if it comes from another node.
        """
        if self.closed:
            reply.failed(f"{NOT_STORED}{self._why}")
            return
        if self.held_back_max is not None:
            frames = self._fitting(frames)
            if not frames:
                reply.stored()
                return
        self._queue.add(frames, reply, self._loop.time() - waited, delay_ms)

    @property
    def queue(self) -> hot.PublishQueue | None:
        """For publishers that put whole runs there themselves; None: only `publish` knows what it takes."""
        return self._queue if self.held_back_max is None else None

    def _fitting(self, frames: bytes) -> bytes:
        """What of a publish an #ephemeral topic keeps while no channel takes it: nsqd drops the rest and says OK."""
        assert self.held_back_max is not None
        _, count = hot.walk(frames, 0, len(frames), len(frames))
        waiting = sum(hot.walk(run, 0, len(run), len(run))[1] for run in self._queue.runs)
        room = max(self.held_back_max - (self.log.end.offset + waiting - self.cursors.pump), 0)
        if self.cursors.state.moving or count <= room:
            return frames
        self.message_count += count - room
        end, _ = hot.walk(frames, 0, len(frames), room)
        return frames[:end]

    @property
    def begins(self) -> str:
        """Why its epoch has only begun: no channel event is written before the epoch start is committed."""
        return self.leader.waits_for or "the leader has only just been elected"

    def commit_events(self) -> asyncio.Future[None]:
        """Write the channel events that are due; the future ends when they are committed and applied."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self.closed or not self.serving:
            future.set_exception(Unavailable(self._why if self.closed else self.begins))
            return future
        self._events.wait(future)
        self._schedule_flush()
        return future

    def _schedule_flush(self) -> None:
        """Write at the end of this tick, and wait for no publisher."""
        self._linger.stop()
        if not self._queue.scheduled:
            self._queue.scheduled = True
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._loop.call_soon(self._end_of_tick)

    def _end_of_tick(self) -> None:
        self._queue.scheduled = False
        self._flush()

    def _flush(self) -> None:
        queue = self._queue
        try:
            while True:
                # Who waits for an OK passes here in two or three turns: as few calls as can be.
                if queue.runs and not self._outstanding and self._linger.waits(len(queue.runs), queue.bytes_waiting):
                    if not queue.scheduled:
                        queue.scheduled = True
                        self._flush_soon()
                    return
                urgent = self._events.urgent or (self.serving and self.cursors.urgent)  # before, nothing takes them
                if self._files.busy or self.closed or self._holding or not (queue.runs or urgent):
                    return
                if not urgent and self._outstanding and queue.bytes_waiting < self._flush_bytes:
                    return
                if not self._write(force_events=self._events.forced()):
                    return
        except Exception as error:
            self._stop(error)

    @property
    def waiting_bytes(self) -> int:
        """Of publishes that are not written yet."""
        return self._queue.bytes_waiting

    @property
    def unsynced_messages(self) -> int:
        """Written since a disk round was last asked for, with sync=interval."""
        return self._lazy_sync.unsynced

    @property
    def _flush_bytes(self) -> int:
        """How much is written although a batch is outstanding."""
        return FLUSH_BYTES if self.on_appended is None else PUSHED_FLUSH_BYTES

    def _write(self, *, force_events: bool = False, publishes: bool = True) -> bool:
        """Write one batch. False if the disk refused."""
        now = self.now()
        events = self._events.take(self.cursors if self.serving else None, now, force_events)
        taken = self._queue.take(BATCH_BYTES) if publishes else Taken([], [], [], 0)
        if not taken.runs and not events.frames:
            settle_behind(self._outstanding, events.done)
            return True
        try:
            entry, data = self._append(now, events, taken)
        except AppendFailed as error:
            self._events.not_written(events)
            self._refuse(taken.waiters, taken.size, f"{NOT_STORED}{error}")
            if self._retry is None:
                self._retry = self._loop.call_later(RETRY_SECONDS, self._try_again)
            return False
        except Exception as error:
            self._events.wait_on(events.done)
            self._refuse(taken.waiters, taken.size, f"{OUTCOME_UNKNOWN}{_text(error)}")
            self._stop(error)
            return False
        self._events.written()
        count = entry.count
        self.message_count += count
        self.message_bytes += len(data) - len(events.frames) - count * hot.HEADER
        self._outstanding.append(Outstanding(entry, data, taken.waiters, events.done, now.mono, taken.size))
        if self.sync == "always":
            self._disk.request(self)
        elif self.sync == "interval":
            self._lazy_sync.wrote(count)
        if self.on_appended is not None:
            self.on_appended()
        if self.leader.written(self.log.end.log_id):
            self._commit(now)
        if self.log.needs_roll:
            self.roll()
        return True

    def _append(self, now: Now, events: Events, taken: Taken) -> tuple[Entry, bytearray]:
        """Stamp the runs behind the events, and write both as one batch."""
        frames, flags, _ = events
        runs = taken.runs
        for index, delay_ms in taken.delays:
            flags |= HAS_ATTRIBUTES
            run = runs[index]
            _, covers = hot.walk(run, 0, len(run), len(run))
            runs[index] = self.cursors.deliver_at(now.wall_ns + delay_ms * 1_000_000, run, covers)
        data = bytearray().join((frames, *runs)) if frames else bytearray().join(runs)
        timestamp_ns = self.log.next_timestamp(now.wall_ns)
        count = hot.stamp(data, len(frames), self.id_base + self.log.end.offset, timestamp_ns) if runs else 0
        entry = self.log.append(
            data,
            count=count,
            flags=flags,
            timestamp_ns=timestamp_ns,
            epoch=self.leader.epoch,
            durable=self.leader.durable,
        )
        return entry, data

    def _refuse(self, waiters: list[Waiter], size: int, why: str) -> None:
        """Answer publishes that were not written, or nobody knows whether."""
        self._budget.give(size)
        refuse(waiters, why)

    @property
    def held_up(self) -> bool:
        """Whether events can not be written just now, however urgent they are: by a roll, or a disk that refused."""
        return not self.serving or self._files.busy or self._holding or self._retry is not None

    def _go_on(self) -> None:
        """What held them up is over."""
        if not self.closed:
            self._schedule_flush()
            self.deliveries.arm(self._clock.monotonic())

    def _try_again(self) -> None:
        self._retry = None
        self._say_last()
        self._go_on()

    # ---- durability

    def set_sync(self, sync: str) -> None:
        """What OK means from now on; batches that wait are judged by the new meaning."""
        self.sync = sync
        if sync == "always":
            self._disk.request(self)
        elif sync == "interval" and self.log.unsynced() is not None:
            self._lazy_sync.wrote(0)
        if self.leader.set_sync_always(sync == "always"):
            self._commit(self.now())

    def sync_ticket(self) -> SyncTicket | None:
        return None if self.closed else self.log.unsynced()

    def synced(self, ticket: SyncTicket) -> None:
        self._acked(self.log.synced(ticket))
        if self.sync == "always" and not self.closed and self.log.unsynced() is not None:
            self._disk.request(self)
        if self._queue.runs:
            self._flush()

    def _acked(self, durable: int) -> None:
        """Our own disk has everything below `durable`."""
        if not self._ended and self.leader.acked(self.leader.node, end=self.log.end.log_id, durable=durable):
            self._commit(self.now())

    def hold(self, holding: bool) -> None:
        """Write and hand out nothing for a while: what comes waits, for this leader or for the next, who is told before
        where the channels are and what is in flight."""
        if holding == self._holding:
            return
        self._holding, self._unsaid = holding, holding and self.serving
        self._say_last()
        if not holding:
            self._go_on()
            for delivery in self.deliveries.values():
                delivery.wake()

    def _say_last(self) -> None:
        """Write the last progress, behind what a disk refused and without publishes, once the files are free."""
        while self._unsaid and not (self.closed or self._files.busy or self._retry):
            self._unsaid = self._events.refused
            if (self._unsaid or self.cursors.prepare_stop()) and not self._write(force_events=True, publishes=False):
                self._unsaid = True

    @property
    def has_last_words(self) -> bool:
        """Whether the next leader will miss what is about to be written."""
        return self._unsaid and self._retry is None and not self.closed

    @property
    def hands_out(self) -> bool:
        """Whether messages may be delivered."""
        return self.serving and not self._holding

    def replica_acked(self, node: int, end: int, durable: int) -> None:
        """A follower has everything below `end`, and everything below `durable` on its disk."""
        if not self._ended and self.leader.acked(node, end=end, durable=durable):
            self.committed_moved()

    def committed_moved(self) -> None:
        """The commit point moved, by an ack or because others are asked now."""
        self._commit(self.now())
        if self._queue.runs:
            self._flush()

    # ---- commit

    def _commit(self, now: Now) -> None:
        try:
            self._commit_batches(now)
        except Exception as error:
            self._stop(error)
            return
        self.deliveries.pump(now)
        if self.on_committed is not None:
            self.on_committed()

    def _commit_batches(self, now: Now) -> None:
        committed = self.leader.committed
        outstanding = self._outstanding
        cursors = self.cursors
        answered, runs, size = False, len(self._queue.runs), self._queue.bytes_waiting
        while outstanding and outstanding[0].entry.log_id < committed:
            batch = outstanding[0]
            entry = batch.entry
            effects = cursors.apply(entry, batch.data, now)
            if effects:
                if not self.serving:
                    self.serving = any(isinstance(e, EpochStarted) and e.epoch == self.leader.epoch for e in effects)
                    if self.serving:
                        cursors.start_at(self.log.start.offset, self.log.start.position)
                    if self.serving and cursors.urgent:
                        self._schedule_flush()  # what was queued too early
                self.on_effects(effects)
            # Only now: had that failed, `abandon` would answer these.
            outstanding.popleft()
            self._budget.give(batch.size)
            if batch.waiters:
                answered = True
                runs += len(batch.waiters)
                size += batch.size
            if entry.count:
                self._measures.publish_seconds.observe(now.mono - batch.written_at)
                self._measures.batch_messages.observe(entry.count)
            batch.committed()
        if answered and not outstanding:
            self._linger.committed(runs, size, self._flush_bytes)

    # ---- timers

    def _due(self) -> None:
        if self.closed:
            return
        try:
            self._do_what_is_due()
        except Exception as error:
            self._stop(error)

    def _do_what_is_due(self) -> None:
        now = self.now()
        self.deliveries.due(now)
        deadline = self.cursors.event_deadline()
        if not self.held_up and (self.cursors.urgent or (deadline is not None and deadline <= now.mono)):
            self._write()
        self.deliveries.arm(now.mono)

    def keep_house(self, now: Now) -> None:
        """Called about once a second: answer publishes that waited too long, let go of what nobody needs."""
        if self.closed:
            return
        overdue = self._loop.time() - self._runtime.wait_seconds_max
        expired = self._queue.take_since(overdue)
        if expired.waiters:
            why = self.leader.waits_for or "the log could not be written in time"
            self._refuse(expired.waiters, expired.size, f"{NOT_STORED}{why}")
        for batch in self._outstanding:
            if batch.waiters and batch.written_at < now.mono - self._runtime.written_seconds_max:
                waiters, batch.waiters = batch.waiters, []
                self._refuse(waiters, 0, f"{OUTCOME_UNKNOWN}{self.leader.waits_for or 'not confirmed in time'}")
        self.deliveries.watch_clock(now)
        if self.serving:
            self.retention.step(self, now)
        if self.local_repair is not None:
            self.local_repair.step()

    def write_events(self) -> None:
        """Channel events were queued, or a checkpoint was begun; nobody waits for them."""
        self._events.want()
        self._schedule_flush()

    def roll(self) -> None:
        """Begin a new pair of files."""
        self.work_on_files(self.log.next_pair, self.log.use)

    def work_on_files(self, job: Callable[[], T], then: Callable[[T], None]) -> bool:
        """Run a job that has the files for itself; False: not now."""
        if self._files.busy or self.closed:
            return False
        self._files.run(job, then)
        return True

    def drop_files(self, up_to: Place | None) -> None:
        """Unlink the files that end at or below `up_to`, and what could not go before, beside whatever is appended."""
        if not (self._files.busy or self._files.removing or self.closed):
            if up_to is not None:
                self.log.forget_pairs(up_to)
            self._files.remove(self.log)

    def _job_failed(self, error: Exception) -> None:
        if isinstance(error, AppendFailed):
            logger.warning("files_delayed", "%s; trying again", error)
        elif isinstance(error, OSError):
            self._on_failure(error)
        else:
            self._stop(error)

    def _job_ended(self) -> None:
        self._say_last()  # before a commit shows that the next leader has everything
        # A roll syncs what was written; the round that was asked for it may have found nothing left to do.
        self._acked(self.log.local_durable)
        self._go_on()

    def now(self) -> Now:
        return read(self._clock)

    @property
    def high_watermark(self) -> int:
        """End of what is committed, as an offset."""
        return self._outstanding[0].entry.first_offset if self._outstanding else self.log.end.offset

    # ---- end

    async def close(self) -> None:
        """A clean stop: write the last progress, sync, and answer who still waits."""
        if self.closed:
            return
        self._close("shutting down")
        await self._files.wait()
        if self._events.refused:
            self._write()
        if self.serving:
            self.cursors.prepare_stop()
            self._write(force_events=True)
        while self._queue.runs:
            self._write()
        ticket = self.log.unsynced()
        if ticket is not None and not self._ended:
            await self._disk.run(ticket.run)
            self._acked(self.log.synced(ticket))
        self.abandon("shutting down")
        self.log.close()

    async def end(self, why: str) -> None:
        """The topic was deleted: answer who waits, and let go of the files when nobody works on them."""
        self.abandon(why)
        await self._files.wait()
        self.log.close()

    async def release(self, why: str) -> None:
        """Lead no longer: answer who waits, and leave the log and the channel state to whoever follows with them."""
        self.abandon(why)
        await self._files.wait()

    def _stop(self, error: Exception) -> None:
        """Something happened that must not. The disk: the node ends. Else this partition stops: silent, not wrong."""
        if isinstance(error, Poisoned):
            self._on_failure(error)
        elif not self._ended:
            logger.error("partition_stopped", "%s stopped", self.log.directory, error=error)
            self.stopped = f"stopped: {_text(error)}"
            self.abandon(f"the partition {self.stopped}")

    def _close(self, why: str) -> None:
        """Take nothing more, and begin nothing more."""
        if not self.closed:
            self.closed = self._queue.closed = True
            self._why = why
        self.deliveries.cancel()
        self._lazy_sync.cancel()
        if self._retry is not None:
            self._retry.cancel()

    def abandon(self, why: str) -> None:
        """Answer everybody who waits: the partition ends here."""
        self._close(why)
        self._ended = True
        waiting = self._queue.take_all()
        self._refuse(waiting.waiters, waiting.size, f"{NOT_STORED}{why}")
        outstanding = list(self._outstanding)
        self._outstanding.clear()
        for batch in outstanding:
            self._refuse(batch.waiters, batch.size, f"{OUTCOME_UNKNOWN}{why}")
        for done in (self._events.give_up(), *(batch.done for batch in outstanding)):
            settle(done, why)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
