"""A partition's log on a node that follows: batches come from the leader, acks go back, the committed ones are applied.

    Open -> promise, durably -> Opened(log_uid, end, chain)
    Append -> PartitionLog.append_copy -> page cache -> [disk round] -> Ack(end, durable)
    committed -> Applier -> PartitionState (and the cache of it), files that nothing needs are unlinked

Spec: `Push` (the follower's half) and `Sync`. Ends are exclusive log ids.

Parts: `Applier` has the channel state and what is committed, `LeaderLog` what is known of the leader's log,
`FollowerJobs` which job has the files.

Invariants: nothing is appended for an epoch below the promise; the promise is durable before the answer leaves; what is
applied is committed and never cut; an ack of `durable` is sent only after a disk round. While a job has the files to
itself (a roll, catch-up), batches wait; the leader's window bounds them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from nsqha.commitlog import copying
from nsqha.commitlog.entry import ENTRY_BYTES, Entry
from nsqha.commitlog.log import PartitionLog, SyncTicket, wake
from nsqha.cursor.committed.state import NEEDS_LOOK, PartitionState
from nsqha.errors import AppendFailed, LogCorrupt, Poisoned, StateDiverged
from nsqha.ids import PartitionKey
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.acceptance import Append, Duplicate, decide_append, first_difference
from nsqha.server.replica.following.applier import Applier
from nsqha.server.replica.following.early_promise import EarlyPromise
from nsqha.server.replica.following.follower_jobs import FollowerJobs
from nsqha.server.replica.following.follower_sync import FollowerSync
from nsqha.server.runtime.disk import DiskRounds

logger = Logger("follower")


class Port(Protocol):
    """The stream from the leader, as one partition sees it: where its answers go."""

    leader: int  # node uid

    def opened(self, follower: Follower, *, behind: bool) -> None:
        """Say where the log ends."""

    def ack(self, follower: Follower) -> None:
        """Say how far the log is, when the stream takes it."""

    def refused(self, key: pb.PartitionKey, epoch: int, refusal: pb.Refusal.ValueType, promised: int, why: str) -> None:
        """Say no."""


@dataclass(frozen=True, slots=True)
class FollowerRuntime:
    """What the node lends to each partition that it follows."""

    loop: asyncio.AbstractEventLoop
    disk: DiskRounds
    on_failure: Callable[[BaseException], None]  # the disk failed
    on_damage: Callable[[PartitionKey, int, int], object]  # log ids of a replica that do not verify
    distrust: Callable[[Follower, int], None]  # its channel state is wrong (`Applier.distrust`)
    sync_every: int  # messages per fsync with sync=interval
    sync_seconds: float


class LeaderLog:
    """Ends of the leader's log, where it is known to part from ours, and what its successor is promised."""

    __slots__ = ("committed", "differs_at", "early", "end_position", "rebuilding", "start")

    def __init__(self) -> None:
        self.start = 0  # its end when its epoch began: everything that was committed before is below
        self.committed = 0  # as the leader says; it may be above the end of our log
        self.end_position = 0  # where it ended when it was asked for batches last; 0: we catch up with none
        self.rebuilding = False  # our log began with nothing, and has not caught up since
        self.differs_at: int | None = None  # our batch that the leader of this epoch has another one for
        self.early: EarlyPromise | None = None  # to the next leader, which has not come yet

    def begin(self, start: int, *, new_epoch: bool) -> None:
        """A leader has opened the partition: what it said before does not count."""
        self.start = start
        self.committed = 0
        self.end_position = 0
        self.early = None
        if new_epoch:
            self.differs_at = None

    def is_complete(self, end: int) -> bool:
        """Whether a log that ends here has everything that was committed when the leader last pushed to it, and
        everything that was committed before its epoch."""
        return 0 < self.committed <= end and self.start <= end

    def lacked_from(self, position: int) -> int:
        """Bytes to fetch by a log that ends at `position`; 0 until the leader has said where its own ends."""
        return max(self.end_position - position, 0)

    def caught_up(self) -> None:
        """The rest is pushed."""
        self.end_position = 0
        self.rebuilding = False

    def compare(self, entries: Sequence[Entry], own_log: PartitionLog, last: Entry | None) -> None:
        """These, of the leader, did not fit our log, whose last entry was `last`: if that shows where the two part, the
        search that begins with the next Open begins there."""
        start = own_log.start.log_id
        own = lambda log_id: own_log.entry(log_id) if log_id >= start else None  # noqa: E731
        if last is not None and (log_id := first_difference(entries, last=last, own=own)) is not None:
            self.differs_at = log_id


class Follower:
    """Owner of one partition's log while another node leads it."""

    def __init__(
        self,
        runtime: FollowerRuntime,
        *,
        key: PartitionKey,
        log: PartitionLog,
        log_uid: int,
        state: PartitionState | None,
        sync: str,
        epoch: int,
    ) -> None:
        """`epoch` is the promise. `state` None: the log begins in the middle and its checkpoint has not come yet."""
        self.key = key
        self.log = log
        self.log_uid = log_uid
        self.sync = sync
        self.epoch = epoch
        self.port: Port | None = None  # the stream of the leader that is followed
        self.behind = True  # until a leader has said that it pushes to us
        self.closed = False
        self.stopped: str | None = None
        self.leader_log = LeaderLog()
        self.applier = Applier(
            log,
            state,
            loop=runtime.loop,
            may_apply=lambda: not (self.closed or self.behind),
            on_damage=partial(runtime.on_damage, key),
            on_fit=self._ack,
            on_failure=self._stop,
        )
        self.jobs = FollowerJobs(
            runtime.loop,
            runtime.disk,
            failed=self._job_failed,
            released=self._released,
            sync=lambda: runtime.disk.request(self),
        )
        log.on_wanted_durable = lambda: runtime.disk.request(self)
        wake(log)  # another owner may have looked at it
        self._runtime = runtime
        self._held: deque[tuple[Port, pb.Append]] = deque()  # came while the files were taken, or closed
        self._sync_rounds = FollowerSync(runtime.disk, self, messages=runtime.sync_every, seconds=runtime.sync_seconds)

    # ---- the leader

    def follow(self, port: Port, epoch: int, start: int) -> None:
        """This leader's batches count from now on; the promise of its epoch is durable. `start`: its end back then."""
        assert epoch >= self.epoch, f"{self.key}: promised {self.epoch}, now {epoch}"
        self.leader_log.begin(start, new_epoch=epoch != self.epoch)
        self.port = port
        self.epoch = epoch
        self._held.clear()

    def left(self, port: Port) -> None:
        """The stream has ended."""
        if self.port is port:
            self._listen_no_more()

    def fence(self, epoch: int, by: Port | None = None) -> None:
        """Take nothing from any leader until the next `follow`: `epoch` begins, or is opened on the stream `by`.

        The leader of an earlier one hears of it. It may wait for acks that never come now; and if it has lost the
        metadata, no other node says that it leads no more. So does a leader on its other stream: what waited in a cut
        for longer than the stream it came on may be opened after the one that took its place."""
        port, before = self.port, self.epoch
        self._listen_no_more()
        if port is not None and epoch > before:
            port.refused(self.wire_key, before, pb.REFUSAL_FENCED, epoch, "a later epoch has begun")
        elif port is not None and by is not None and port is not by:
            port.refused(self.wire_key, epoch, pb.REFUSAL_UNKNOWN, epoch, "its leader has opened it on another stream")

    def _listen_no_more(self) -> None:
        self.port = None
        self._held.clear()

    @property
    def complete(self) -> bool:
        """Whether everything is here that was committed when its last leader last pushed to it; whatever was lost
        before has come again."""
        return self.leader_log.is_complete(self.log.end.log_id)

    @property
    def wire_key(self) -> pb.PartitionKey:
        """The partition, in messages."""
        return pb.PartitionKey(topic_uid=self.key[0], partition=self.key[1])

    # ---- batches

    def append(self, port: Port, message: pb.Append) -> None:
        """Take in consecutive batches; says no where they do not fit, and then nothing of the rest is taken."""
        if port is not self.port or message.epoch != self.epoch or self.closed:
            port.refused(self.wire_key, message.epoch, pb.REFUSAL_FENCED, self.epoch, "another leader was promised")
            return
        if not self.jobs.ready(self.log):
            self._held.append((port, message))
            return
        try:
            self._append(message)
        except AppendFailed as error:
            self._runtime.disk.signs.refused(error)
            port.refused(self.wire_key, message.epoch, pb.REFUSAL_NO_SPACE, self.epoch, str(error))
        except LogCorrupt as error:
            port.refused(self.wire_key, message.epoch, pb.REFUSAL_MISMATCH, self.epoch, str(error))
        except OSError as error:
            port.refused(self.wire_key, message.epoch, pb.REFUSAL_UNKNOWN, self.epoch, f"not just now: {error}")
        except Poisoned as error:
            self._runtime.on_failure(error)
        except Exception as error:
            self._stop(error)
        else:
            self.committed_to(message.committed)
            if self.log.needs_roll:
                self.jobs.take(self._roll)

    def _append(self, message: pb.Append) -> None:
        """LogCorrupt: they do not follow what is here, or are not what their entries say."""
        log, raw, data = self.log, message.entries, message.data
        # One batch that goes on where the log ends is by far the usual case.
        entry = log.append_next_copy(raw, data) if len(raw) == ENTRY_BYTES else None
        if entry is not None:
            count = entry.count or 1
            if self.applier.state is not None:
                self.applier.wrote((entry, data if entry.flags & NEEDS_LOOK else None))
        else:
            count = append_each(self, message)
        assert self.port is not None
        if self.sync == "always" and not message.patient and log.unsynced() is not None:
            self._sync_rounds.request(log.end.log_id)
        else:
            self.port.ack(self)
            self._sync_rounds.wrote(self.sync, count)

    # ---- committed

    def caught_up(self) -> None:
        """The leader may push now."""
        self.behind = False
        self.leader_log.caught_up()
        if self.sync != "none" and self.log.unsynced() is not None:
            self._runtime.disk.request(self)  # what was pulled; the leader may wait for nothing else
        self.applier.apply()

    def committed_to(self, end: int) -> None:
        """The leader says that everything below `end` is committed."""
        leader = self.leader_log
        leader.committed = max(leader.committed, end)  # of what is held back too; it may not be said again
        end = min(leader.committed, self.log.end.log_id)
        if end > self.applier.committed and not self.behind:
            self.applier.apply(end)

    def _ack(self) -> None:
        """Tell the leader how far the log is, and whether this replica could lead, also when nothing is published."""
        if self.port is not None:
            self.port.ack(self)

    # ---- durability

    def set_sync(self, sync: str) -> None:
        """What the topic's OK means from now on."""
        self.sync = sync
        if not self.closed:
            self._runtime.disk.request(self)

    def sync_ticket(self) -> SyncTicket | None:
        return None if self.closed else self.log.unsynced()

    def synced(self, ticket: SyncTicket) -> None:
        self.log.synced(ticket)
        if self.port is not None and not self.closed:
            self.port.ack(self)
        if self.sync == "always" and not self.closed and self.log.unsynced() is not None:
            self._sync_rounds.synced(self.log.local_durable)

    # ---- files

    async def _roll(self) -> None:
        pair = await self._runtime.disk.run(self.log.next_pair)
        self.log.use(pair)

    def keep_house(self) -> None:
        """Called about once a second: unlink what nothing needs, by what is committed and durable here."""
        self.log.idle_at = None
        if self.closed or self.jobs.running is not None:
            return
        self.applier.look_again()
        if self.closed or self.jobs.removing:
            return
        if not self.behind:
            self.applier.apply()
        self.jobs.unlink(self.log, self.applier.state)
        self.log.idle_at = None if _waits(self) else self.log.end

    @property
    def quiet(self) -> bool:
        """Whether what is here stays as it is: there is no job, and no leader that it has to catch up with."""
        return not (self.jobs.running is not None or self.closed or (self.behind and self.port is not None))

    def _released(self) -> None:
        held, self._held = self._held, deque()
        for port, message in held:
            self.append(port, message)
        if not self.closed:
            self._ack()

    def _job_failed(self, error: Exception) -> None:
        if isinstance(error, (Poisoned, OSError)):
            self._runtime.on_failure(error)
        else:
            self._stop(error)

    def restart_with(self, log: PartitionLog, log_uid: int) -> None:
        """Catch-up put another log, or an end of it before what is applied, in the place of this one."""
        wake(self.log)
        self.log = log
        self.log_uid = log_uid
        self.leader_log.differs_at = None
        self.applier.restart_with(log)

    # ---- end

    async def release(self) -> None:
        """Follow no longer, and leave the log and the channel state to the leader that begins with them."""
        self._close()
        await self.jobs.finish()

    async def close(self) -> None:
        """The node stops: sync the log and close it."""
        await self.release()
        ticket = self.log.unsynced()
        if ticket is not None and self.stopped is None:
            await self._runtime.disk.run(ticket.run)
            self.log.synced(ticket)
        self.log.close()

    def _close(self) -> None:
        self.closed = True
        self._listen_no_more()
        self._sync_rounds.cancel()

    def _stop(self, error: Exception) -> None:
        """Something happened that must not: this partition is silent from now on, so its leader goes on without it."""
        if isinstance(error, StateDiverged) and _rebuilds(self, error, self._runtime):
            self.behind = True
            self._listen_no_more()
            return
        logger.error("partition_stopped", "%s stopped", self.log.directory, error=error)
        self.stopped = f"{type(error).__name__}: {error}"
        if self.port is not None:
            self.port.refused(self.wire_key, self.epoch, pb.REFUSAL_FAILED, self.epoch, self.stopped)
        self._close()


def _rebuilds(follower: Follower, error: StateDiverged, runtime: FollowerRuntime) -> bool:
    """The channel state is not of the log, so this replica must not lead: leave the in-sync set, and rebuild the state.
    False for a state that was rebuilt: then it is a fault of the log."""
    state, port = follower.applier.state, follower.port
    if state is None or state.rebuilt:
        return False
    text = "%s: the channel state does not fit the log; leaving the in-sync set, the state is rebuilt: %s"
    logger.error("state_diverged", text, follower.log.directory, error)
    runtime.distrust(follower, error.log_id)
    if port is not None:
        why = "its channel state is rebuilt"
        port.refused(follower.wire_key, follower.epoch, pb.REFUSAL_FAILED, follower.epoch, why)
    return True


def _waits(follower: Follower) -> bool:
    """Whether something is to be done, or may be due, although nothing is appended."""
    log, jobs, applier = follower.log, follower.jobs, follower.applier
    unsynced = follower.sync != "none" and log.local_durable < log.end.log_id
    busy = unsynced or jobs.running is not None or jobs.removing or log.forgotten_files
    uncommitted = applier.known != (log.end.log_id, log.end.log_id)
    return bool(busy or uncommitted or not applier.fit or log.doubtful_from is not None)


def append_each(follower: Follower, message: pb.Append) -> int:
    """Append what the follower does not have yet; how many messages that is."""
    log, applier, last = follower.log, follower.applier, follower.log.last
    run = list(copying.batches(message.entries, message.data))
    count = 0
    try:
        if run and run[0][0].log_id != log.end.log_id:
            run = run[first_new([entry for entry, _, _ in run], log, follower.epoch) :]
        for entry, data, raw in run:
            log.append_copy(entry, data, raw)
            count += entry.count or 1
            if entry.lost:
                applier.on_damage(entry.log_id, entry.log_id + 1)  # a replica that has more may give it
            if applier.state is not None:
                applier.wrote((entry, data if entry.flags & NEEDS_LOOK else None))
    except LogCorrupt:
        follower.leader_log.compare([entry for entry, _, _ in run], log, last)
        raise
    return count


def first_new(entries: Sequence[Entry], log: PartitionLog, epoch: int) -> int:
    """The index of the first entry, of the leader of this epoch, that the log does not have yet. LogCorrupt if they do
    not fit what it has."""
    start, last = log.start.log_id, log.entry_before(log.end.log_id)
    verdict = decide_append(
        entries,
        epoch=epoch,
        promise=epoch,
        last=last,
        own=lambda log_id: log.entry(log_id) if log_id >= start else None,
    )
    match verdict:
        case Append(first):
            return first
        case Duplicate():
            return len(entries)
    raise LogCorrupt(f"sent to {log}: {verdict}")
