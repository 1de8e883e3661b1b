"""One partition on the node that leads it: group commit in, committed batches out.

    publish, events -> GroupCommit -> PartitionLog.append -> {disk round || push} -> LeaderReplica -> commit
    commit -> channel events applied, high watermark moved, publishers answered, channels pumped

What goes wrong here stays here: a broken invariant or an event that can not be applied stops this partition, answers
everything that waits, and no other partition notices. A disk that fails ends the node (`on_failure`).

A leader begins with its epoch-start batch. Until that is committed and applied it takes publishes, but delivers
nothing and writes no channel events: what it knows of the channels may be older than what another leader committed.

Invariants: batches commit in log order; a waiter is answered exactly once; no append while a roll is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.clock import Now, read
from nsqha.commitlog.log import wake
from nsqha.cursor.committed.state import NEEDS_LOOK
from nsqha.cursor.events import ChannelListLike, EpochStart
from nsqha.errors import AppendFailed, Poisoned, Unavailable
from nsqha.frames import HAS_EVENTS
from nsqha.nsqlog import Logger
from nsqha.server.partition.context import LedLog, PartitionLifecycle, PartitionRuntime
from nsqha.server.partition.delivery import Deliveries
from nsqha.server.partition.file_jobs import FileJobs
from nsqha.server.partition.group_commit import GroupCommit
from nsqha.server.partition.local_repair import LocalRepair
from nsqha.server.partition.memory import EphemeralLog
from nsqha.server.partition.outstanding import Outstanding
from nsqha.server.partition.retention import RetentionRunner, pass_over_old

logger = Logger("partition")


class Partition:
    """Owner of one partition's log, commit point and channels."""

    def __init__(
        self,
        runtime: PartitionRuntime,
        led: LedLog,
        *,
        retention: RetentionRunner,
        sync: str,
        memory: EphemeralLog | None,
    ) -> None:
        """`memory`: what bounds an #ephemeral topic."""
        self.number = led.number
        self.id_base = led.id_base
        self.log = led.log
        wake(self.log)  # another owner may have looked at it
        runtime.turns.add(self)
        self.cursors = led.cursors
        self.cursors.keep_by(led.log.shelf.keep_retry)
        self.cursors.passing.when_moving(runtime.moving.add)
        self.leader = led.leader
        self.life = PartitionLifecycle(runtime.pause)
        self.files = FileJobs(
            runtime,
            led.log,
            self.life,
            failed=self._job_failed,
            ended=self._job_ended,
            sync=lambda: self.batches.sync.request(),
        )
        self.batches = GroupCommit(
            runtime,
            led,
            self.life,
            self.files,
            sync=sync,
            memory=memory,
            commit=self._commit,
            resume=self._resume,
            stop=self._stop,
        )
        self.deliveries = Deliveries(
            self, runtime.loop, self._due, self.batches.flush_events, self.batches.write_progress
        )
        self.retention = retention
        self.local_repair: LocalRepair | None = None  # of a log that no other node has
        self.on_damage: Callable[[int, int], object] = lambda first, end: None  # log ids that do not verify
        self.queue = self.batches.publishes.open_queue
        self.publish = self.batches.publishes.publish  # bound: no call more for each publish
        self._runtime = runtime

    def start_epoch(self, channels: ChannelListLike | None = None, *, new: bool = False) -> asyncio.Future[None]:
        """Write the epoch-start batch, synced; the future ends when it is committed and applied.

        `channels`: the channel list as the metadata has it; the log is brought in line with it in the same batch, so
        before anything of this epoch is acknowledged. What an earlier leader left uncommitted at the end of the log
        is committed with it. `new`: the log is empty, and a publisher waits that it may be written to; its disk round,
        with the names of its files, begins behind that one's OK unless `sync` is always.
        """
        for entry in self.log.entries(self.cursors.state.applied.log_id + 1, self.log.end.log_id):
            data = bytearray(self.log.events(entry)) if entry.flags & NEEDS_LOOK else bytearray()
            batch = Outstanding(entry, data, [], [], self._runtime.clock.monotonic(), 0)
            self.batches.outstanding.batches.append(batch)
        events = EpochStart(self.leader.epoch, self.leader.node).encode()
        if channels is not None:
            events += self.cursors.requests.opening_events(channels)
        self.batches.events.first(events, HAS_EVENTS)
        future: asyncio.Future[None] = self._runtime.loop.create_future()
        if self.closed:
            future.set_exception(Unavailable(self.life.why))
            return future
        self.batches.events.wait(future)
        self.batches.schedule()
        if new:
            self.batches.sync.request_behind()
        else:
            self.batches.sync.request()
        return future

    # ---- how far it has come

    @property
    def serving(self) -> bool:
        """Whether the epoch start is applied: deliveries and channel events may go on."""
        return self.life.serving

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more."""
        return self.life.closed

    @property
    def begins(self) -> str:
        """Why its epoch has only begun: no channel event is written before the epoch start is committed."""
        return self.leader.waits_for or "the leader has only just been elected"

    @property
    def held_up(self) -> bool:
        """Whether events can not be written just now, however urgent they are: by a roll, or a disk that refused."""
        life = self.life
        return not life.serving or self.files.busy or life.handing_over or self.batches.retry is not None

    def now(self) -> Now:
        return read(self._runtime.clock)

    @property
    def high_watermark(self) -> int:
        """End of what is committed, as an offset."""
        outstanding = self.batches.outstanding.batches
        return outstanding[0].entry.first_offset if outstanding else self.log.end.offset

    # ---- channel events

    def commit_events(self) -> asyncio.Future[None]:
        """Write the channel events that are due; the future ends when they are committed and applied."""
        future: asyncio.Future[None] = self._runtime.loop.create_future()
        if self.closed or not self.serving:
            future.set_exception(Unavailable(self.life.why if self.closed else self.begins))
            return future
        self.batches.events.wait(future)
        self.batches.schedule()
        return future

    def write_events(self) -> None:
        """Channel events were queued, or a checkpoint was begun; no caller waits for them."""
        self.batches.events.want()
        self.batches.schedule()

    def _resume(self) -> None:
        """What held events up is over."""
        if not self.closed:
            self.batches.schedule()
            self.deliveries.arm(self._runtime.clock.monotonic())

    # ---- commit

    def replica_acked(self, node: int, end: int, durable: int) -> None:
        """A follower has everything below `end`, and everything below `durable` on its disk."""
        if not self.life.ended and self.leader.acked(node, end=end, durable=durable):
            self.committed_moved()

    def committed_moved(self) -> None:
        """The commit point moved, by an ack or because others are asked now."""
        self._commit(self.now())
        self.batches.flush_publishes()

    def _commit(self, now: Now) -> None:
        try:
            news = self.batches.outstanding.commit(now)
        except Exception as error:
            self._stop(error)
            return
        if news:
            self.deliveries.pump(now)
        else:
            self.deliveries.arm(now.mono, ())
        memory = self.batches.publishes.memory
        if memory is not None and self.serving and not self.closed:
            memory.trim(self, now)
        if self.batches.on_committed is not None:
            self.batches.on_committed()

    def hand_over(self, handing_over: bool) -> None:
        """Write and deliver nothing for a while: what comes waits, for this leader or for the next one, which learns
        first where the channels are and what is in flight."""
        if handing_over == self.life.handing_over:
            return
        self.life.handing_over = handing_over
        wake(self.log)
        self.batches.hand_over(handing_over)
        if not handing_over:
            self._resume()
            for delivery in self.deliveries.values():
                delivery.wake()

    # ---- time

    def _due(self) -> None:
        if self.closed:
            return
        try:
            now = self.now()
            self.deliveries.due(now)
            deadline = self.cursors.event_deadline()
            events_due = self.cursors.urgent or (deadline is not None and deadline <= now.mono)
            if events_due and not self.held_up and self.files.ready():
                self.batches.write(patient=not self.cursors.urgent)
            self.deliveries.arm(now.mono)
        except Exception as error:
            self._stop(error)

    def keep_house(self, now: Now) -> None:
        """Called about once a second: answer publishes that waited too long, let go of what is not needed any more."""
        if self.closed:
            return
        self.batches.publishes.expire(self._runtime.wait_seconds_max)
        self.batches.outstanding.answer_overdue(now.mono - self._runtime.written_seconds_max)
        self.deliveries.watch_clock(now)
        if self.serving:
            self.retention.step(self, now, by_age=self._runtime.clock.trusted)
            _replace_checkpoints(self)
            if self._runtime.clock.trusted and pass_over_old(self.cursors, self.log, now):
                self.deliveries.arm(now.mono)
            if (memory := self.batches.publishes.memory) is not None:
                memory.trim(self, now)
        if self.local_repair is not None:
            self.local_repair.step()
        self.log.idle_at = None if _waits(self) else self.log.end

    # ---- jobs on the files

    def _job_failed(self, error: Exception) -> None:
        if isinstance(error, AppendFailed):
            self._runtime.disk.signs.refused(error)
            logger.warning("files_delayed", "%s; trying again", error)
        elif isinstance(error, OSError):
            self._runtime.on_failure(error)
        else:
            self._stop(error)

    def _job_ended(self) -> None:
        self.batches.write_last_progress()  # before a commit shows that the next leader has everything
        # A roll syncs what was written; the round that was asked for it may have found nothing left to do.
        self.batches.sync.acked(self.log.local_durable)
        self._resume()

    # ---- end

    async def close(self) -> None:
        """A clean stop: write the last progress, sync, and answer who still waits."""
        if self.closed:
            return
        self._close("shutting down")
        await self.files.wait()
        await self.batches.finish()
        self.abandon("shutting down")
        self.log.close()

    async def end(self, why: str) -> None:
        """The topic was deleted: answer who waits, and close the files when no job has them."""
        self.abandon(why)
        await self.files.wait()
        self.log.close()
        if (memory := self.batches.publishes.memory) is not None:
            memory.end()

    async def release(self, why: str) -> None:
        """Lead no longer: answer who waits, and leave the log and the channel state to the follower that takes them."""
        self.abandon(why)
        await self.files.wait()

    def _stop(self, error: Exception) -> None:
        """Something happened that must not. The disk: the node ends. Else this partition stops: silent, not wrong."""
        if isinstance(error, Poisoned):
            self._runtime.on_failure(error)
        elif not self.life.ended:
            logger.error("partition_stopped", "%s stopped", self.log.directory, error=error)
            self.life.stopped = f"stopped: {type(error).__name__}: {error}"
            self.abandon(f"the partition {self.life.stopped}")

    def _close(self, why: str) -> None:
        """Take nothing more, and begin nothing more."""
        self.life.close(why)
        self.batches.close()
        self.deliveries.cancel()

    def abandon(self, why: str) -> None:
        """Answer everything that waits: the partition ends here."""
        self._close(why)
        self.life.end(why)
        self.batches.abandon(why)


def _waits(partition: Partition) -> bool:
    """Whether something is to be done, or may be due, although nothing is appended."""
    batches, log = partition.batches, partition.log
    unsynced = batches.sync.setting != "none" and log.local_durable < log.end.log_id
    return bool(
        unsynced
        or partition.held_up
        or batches.outstanding.batches
        or batches.publishes.queue.bytes_waiting
        or batches.publishes.memory is not None
        or partition.cursors.passing
        or log.forgotten_files
        or (partition.local_repair is not None and partition.local_repair.damage)
    )


def _replace_checkpoints(partition: Partition) -> None:
    """A checkpoint of a state that was rebuilt takes the place of earlier ones, which may hold the wrong state."""
    state, checkpoints = partition.cursors.state, partition.cursors.checkpoints
    if state.checkpoint.as_of < state.rebuilt and not checkpoints.unfinished:
        checkpoints.begin(state.snapshot())
        partition.write_events()
