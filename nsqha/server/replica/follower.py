"""A partition's log on a node that follows: batches come from the leader, acks go back, the committed ones are applied.

    Open -> promise, durably -> Opened(log_uid, end, chain)
    Append -> PartitionLog.append_copy -> page cache -> [disk round] -> Ack(end, durable)
    committed -> PartitionState.apply (and the cache of it), files that nobody needs are unlinked

Spec: `Push` (the follower's half) and `Sync`. The state is the same pure function of the committed log that the leader
has, so a follower that becomes leader begins with it. Ends are exclusive log ids.

Invariants: nothing is appended for an epoch below the promise; the promise is durable before the answer leaves; what is
applied is committed and never cut; an ack of `durable` is sent only after a disk round. While a job has the files for
itself (a roll, catch-up), batches wait; the leader's window bounds them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nsqha.commitlog import copying
from nsqha.commitlog.entry import FAULTY, BatchCorrupt, Entry, Place
from nsqha.commitlog.log import PartitionLog, SyncTicket
from nsqha.cursor.state import NEEDS_LOOK, PartitionState
from nsqha.errors import AppendFailed, LogCorrupt, Poisoned
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.replication.acceptance import Append, Duplicate, decide_append, first_difference
from nsqha.server.partition.file_jobs import Removals
from nsqha.server.runtime.disk import DiskRounds, LazySync

logger = Logger("follower")

T = TypeVar("T")

APPLY_SLICE = 2000  # entries read and applied at once when the committed point jumps
MUST_READ = NEEDS_LOOK | FAULTY  # what was lost here others have, and nobody knows which events were in it


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
    on_failure: Callable[[BaseException], None]
    sync_every: int  # messages per fsync with sync=interval
    sync_seconds: float


class Follower:
    """Owner of one partition's log while another node leads it."""

    def __init__(
        self,
        runtime: FollowerRuntime,
        *,
        key: tuple[int, int],
        log: PartitionLog,
        log_uid: int,
        state: PartitionState | None,
        sync: str,
        epoch: int,
    ) -> None:
        """`epoch` is the promise. `state` None: the log begins in the middle and its checkpoint has not come yet."""
        self.key = key
        self.wire_key = pb.PartitionKey(topic_uid=key[0], partition=key[1])
        self.log = log
        self.log_uid = log_uid
        self.state = state
        self.sync = sync
        self.epoch = epoch
        self.committed = state.applied.log_id + 1 if state is not None else 0
        self.tried: object = self.known  # when the state was looked for in vain; None: look again
        self.differs_at: int | None = None  # our batch that the leader of this epoch has another one for
        self.behind = True  # until a leader has said that it pushes to us
        self.closed = False
        self.stopped: str | None = None
        self.damage: tuple[int, int] | None = None  # log ids that are committed and can not be read here
        self.on_damage: Callable[[int, int], object] = lambda first, end: None
        self._damage_told: tuple[int, int] | None = None
        self._runtime = runtime
        self._port: Port | None = None
        self._told = 0  # the end of what the leader says is committed; it may be above our log's
        self._needed = 0  # its end when its epoch began: everything that was committed before is below
        self._applying = False  # the rest is applied in the next turns of the loop
        self._pending: deque[tuple[Entry, Any]] = deque()  # not applied yet; the tail of them at least
        self._held: deque[tuple[Port, pb.Append]] = deque()  # came while the files were taken
        self._exclusive: asyncio.Task[None] | None = None
        self._removals = Removals(runtime.loop, runtime.disk, self._files_failed)
        self._interruptible = False  # whoever has the files may be cancelled
        self._lazy_sync = LazySync(
            runtime.loop, runtime.disk, self, messages=runtime.sync_every, seconds=runtime.sync_seconds
        )

    # ---- the leader

    def follow(self, port: Port, epoch: int, start: int) -> None:
        """This leader's batches count from now on; the promise of its epoch is durable. `start`: its end back then."""
        assert epoch >= self.epoch, f"{self.key}: promised {self.epoch}, now {epoch}"
        if epoch != self.epoch:
            self.differs_at = None
        self._port = port
        self.epoch = epoch
        self._told = 0
        self._needed = start
        self._held.clear()

    def left(self, port: Port) -> None:
        """The stream has ended."""
        if self._port is port:
            self._listen_no_more()

    def fence(self, epoch: int) -> None:
        """Take nothing from anybody until the next `follow`: `epoch` begins.

        The leader of an earlier one is told. It may wait for acks that never come now; and if it has lost the metadata,
        nobody else says that it leads no more."""
        port, before = self._port, self.epoch
        self._listen_no_more()
        if port is not None and epoch > before:
            port.refused(self.wire_key, before, pb.REFUSAL_FENCED, epoch, "a later epoch has begun")

    def _listen_no_more(self) -> None:
        self._port = None
        self._held.clear()

    @property
    def port(self) -> Port | None:
        """The stream of the leader that this partition follows now."""
        return self._port

    @property
    def known(self) -> tuple[int, int]:
        """What the channel state may be found by: what is committed, and the end of the log, which says so, too."""
        return self.committed, self.log.end.log_id

    @property
    def complete(self) -> bool:
        """Whether everything is here that was committed when its last leader last pushed to it; whatever was lost
        before has come again."""
        return 0 < self._told <= self.log.end.log_id and self._needed <= self.log.end.log_id

    # ---- batches

    def append(self, port: Port, message: pb.Append) -> None:
        """Take in consecutive batches; says no where they do not fit, and then nothing of the rest is taken."""
        if port is not self._port or message.epoch != self.epoch or self.closed:
            port.refused(self.wire_key, message.epoch, pb.REFUSAL_FENCED, self.epoch, "another leader was promised")
            return
        if self._exclusive is not None:
            self._held.append((port, message))
            return
        try:
            self._append(message)
        except AppendFailed as error:
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
                self.exclusively(self._roll())

    def _append(self, message: pb.Append) -> None:
        """LogCorrupt: they do not follow what is here, or are not what their entries say."""
        log, last = self.log, self.log.last
        run = list(copying.batches(message.entries, message.data))
        count = 0
        try:
            if run and run[0][0].log_id != log.end.log_id:
                run = run[self._new_in([entry for entry, _, _ in run]) :]
            for entry, data, raw in run:
                log.append_copy(entry, data, raw)
                count += entry.count or 1
                if entry.lost:
                    self.on_damage(entry.log_id, entry.log_id + 1)  # whoever has more than the leader may give it
                if self.state is not None:
                    self._pending.append((entry, data if entry.flags & NEEDS_LOOK else None))
        except LogCorrupt:
            self.compare([entry for entry, _, _ in run], last)
            raise
        assert self._port is not None
        if self.sync == "always" and log.unsynced() is not None:
            self._runtime.disk.request(self)
        else:
            self._port.ack(self)
            if self.sync == "interval":
                self._lazy_sync.wrote(count)

    def _new_in(self, entries: list[Entry]) -> int:
        """The index of the first entry that is not here yet. LogCorrupt if they do not fit what is."""
        log = self.log
        start, last = log.start.log_id, log.entry_before(log.end.log_id)
        verdict = decide_append(
            entries,
            epoch=self.epoch,
            promise=self.epoch,
            last=last,
            own=lambda log_id: log.entry(log_id) if log_id >= start else None,
        )
        match verdict:
            case Append(first):
                return first
            case Duplicate():
                return len(entries)
        raise LogCorrupt(f"sent to {log}: {verdict}")

    def compare(self, entries: Sequence[Entry], last: Entry | None) -> None:
        """These, of the leader, did not fit a log whose last entry was `last`: if that shows where our log is another
        one, the search that begins with the next Open begins there."""
        start = self.log.start.log_id
        own = lambda log_id: self.log.entry(log_id) if log_id >= start else None  # noqa: E731
        if last is not None and (log_id := first_difference(entries, last=last, own=own)) is not None:
            self.differs_at = log_id

    # ---- committed

    def caught_up(self) -> None:
        """The leader may push now."""
        self.behind = False
        if self.sync != "none" and self.log.unsynced() is not None:
            self._runtime.disk.request(self)  # what was pulled; the leader may wait for nothing else
        self._apply()

    def committed_to(self, end: int) -> None:
        """The leader says that everything below `end` is committed."""
        self._told = max(self._told, end)  # of what is held back too; it may not be said again
        end = min(self._told, self.log.end.log_id)
        if end <= self.committed or self.behind:
            return
        self.committed = end
        self._apply()

    def _apply(self) -> None:
        state, pending = self.state, self._pending
        if state is None or self._applying or self.damage is not None:
            return
        left = APPLY_SLICE
        try:
            while (log_id := state.applied.log_id + 1) < self.committed:
                if not left:
                    self._applying = True  # everything else on this node has its turn
                    self._runtime.loop.call_soon(self._apply_on)
                    return
                if pending and pending[0][0].log_id == log_id:
                    entry, data = pending.popleft()
                    if data is None:
                        data = self.log.events(entry) if entry.flags & MUST_READ else b""
                    state.apply(entry, data)
                    left -= 1
                else:
                    self._read_pending(log_id)
        except BatchCorrupt as error:
            self.found(error)
        except OSError as error:
            self._try_later(error)
        except Exception as error:
            self._stop(error)

    def _try_later(self, error: OSError) -> None:
        """Too many open files and the like say nothing about the log. `keep_house` tries again."""
        logger.warning("apply_delayed", "%s: trying again: %s", self.log.directory, error)

    def found(self, damage: BatchCorrupt) -> None:
        """What is to be applied does not verify: others have it, and this replica follows on meanwhile."""
        self.damage = (damage.first.log_id, damage.end.log_id)
        if self.damage != self._damage_told:
            self._damage_told = self.damage
            logger.warning("apply_delayed", "%s: the channels wait for a repair: %s", self.log.directory, damage)
        self._pending.clear()
        self._say_so()
        self.on_damage(*self.damage)

    @property
    def fit(self) -> bool:
        """Whether it could lead, as far as is known. Its leader hears it with each ack, for when it names the next."""
        return self.state is not None and self.damage is None

    def _say_so(self) -> None:
        """To the leader, also when nothing is published."""
        if self._port is not None:
            self._port.ack(self)

    @property
    def readable(self) -> bool:
        """Whether what a leader begins with can be read: batches that are not applied yet."""
        self._look_ahead()
        return self.damage is None

    def _look_ahead(self) -> None:
        state = self.state
        if state is not None and self.damage is None:
            try:
                for entry in self.log.entries(state.applied.log_id + 1, self.log.end.log_id):
                    if entry.flags & MUST_READ:
                        self.log.events(entry)
            except BatchCorrupt as error:
                self.found(error)

    def mended(self) -> None:
        """What could not be read can be read again, perhaps. Else it is found again at once: whoever is asked meanwhile
        must not say that it could lead."""
        if self.damage is not None:
            self.damage = None
            self.tried = None  # also if nobody leads, who could say more
            if not self.behind:
                self._apply()
            try:
                self._look_ahead()
            except OSError as error:
                self._try_later(error)
            self._say_so()

    def _apply_on(self) -> None:
        self._applying = False
        if not self.closed and not self.behind:
            self._apply()

    def _read_pending(self, log_id: int) -> None:
        """Batches that were here before, or are too many to keep: from the files."""
        self._pending.clear()
        for entry in self.log.entries(log_id, min(self.log.end.log_id, log_id + APPLY_SLICE)):
            self._pending.append((entry, None))
        if not self._pending or self._pending[0][0].log_id != log_id:
            raise LogCorrupt(f"{self.log}: batch {log_id} is committed, not applied, and not here any more")

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
        if self._port is not None and not self.closed:
            self._port.ack(self)
        if self.sync == "always" and not self.closed and self.log.unsynced() is not None:
            self._runtime.disk.request(self)

    # ---- files

    async def _roll(self) -> None:
        pair = await self._runtime.disk.run(self.log.next_pair)
        self.log.use(pair)

    def keep_house(self) -> None:
        """Called about once a second: unlink what nobody needs, by what is committed and durable here."""
        if self.damage is not None and not self.closed and self._exclusive is None:
            # A repair may not have been possible when the damage was found.
            if self.state is None:
                self.on_damage(*self.damage)
            else:
                self.mended()
        state = self.state
        if self._exclusive is not None or self._removals.task is not None or self.closed:
            return
        if not self.behind:
            self._apply()
        self._removals.begin(self.log)  # what could not go before
        if state is None or self._removals.task is not None or len(self.log.pairs) == 1:
            return
        up_to: Place | None = None
        for pair in self.log.pairs[:-1]:
            end = pair.end
            if (
                end.offset > state.log_start[0]
                or end.position > state.log_start[1]
                or state.checkpoint.as_of < end.log_id
                or end.log_id > state.applied.log_id
            ):
                break
            up_to = end
        needed = max(state.checkpoint.end_log_id, state.log_start_log_id)
        if up_to is not None and self.log.local_durable > needed and self.log.forget_pairs(up_to):
            logger.info("unlinked", "%s: files below offset %d go", self.log.directory, up_to.offset)
            # Batches go on meanwhile; another role, or another log in this one's place, waits for it.
            self._removals.begin(self.log)

    def exclusively(self, job: Awaitable[None], *, interruptible: bool = False) -> None:
        """Run a job that has the files for itself; batches wait meanwhile."""
        assert self._exclusive is None, f"{self.key}: the files are taken"
        self._interruptible = interruptible
        self._exclusive = self._runtime.loop.create_task(self._run_exclusively(job))

    @property
    def busy(self) -> bool:
        """Whether a job has the files for itself."""
        return self._exclusive is not None

    @property
    def quiet(self) -> bool:
        """Whether nobody is about to change what is here: no job, and no leader that it has to catch up with."""
        return not (self.busy or self.closed or (self.behind and self._port is not None))

    async def _run_exclusively(self, job: Awaitable[None]) -> None:
        try:
            await job
        except AppendFailed as error:
            logger.warning("files_delayed", "%s; trying again", error)
        except Exception as error:
            self._files_failed(error)
        finally:
            self._exclusive = None
        held, self._held = self._held, deque()
        for port, message in held:
            self.append(port, message)
        if self._port is not None and not self.closed:
            self._port.ack(self)

    def _files_failed(self, error: Exception) -> None:
        if isinstance(error, (Poisoned, OSError)):
            self._runtime.on_failure(error)
        else:
            self._stop(error)

    # ---- a new beginning

    def restart_with(self, log: PartitionLog, log_uid: int) -> None:
        """Catch-up put another log, or an end of it before what is applied, in the place of this one."""
        self.log = log
        self.log_uid = log_uid
        self.state = None
        self.committed = 0
        self.damage = None
        self._pending.clear()

    def know(self, state: PartitionState) -> None:
        """The channel state was found in the log; what is committed behind it is applied."""
        self.state = state
        self.damage = None
        self.committed = max(self.committed, state.applied.log_id + 1)
        self._pending.clear()
        self._say_so()
        self._apply()

    def forget_pending(self) -> None:
        """The log was cut above what is applied."""
        self._pending.clear()

    # ---- end

    async def release(self) -> None:
        """Follow no longer, and leave the log and the channel state to whoever leads with them."""
        self._close()
        await self.files_free()

    async def files_free(self) -> None:
        """End what has the files for itself: catching up is given up, all else is waited for, unlinking too."""
        while task := self._exclusive or self._removals.task:
            if self._interruptible and task is self._exclusive:
                task.cancel()
            await asyncio.wait([task])
            if self._exclusive is task:  # cancelled before it began, so that nothing of it ever ran
                self._exclusive = None

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
        self._lazy_sync.cancel()

    def _stop(self, error: Exception) -> None:
        """Something happened that must not: this partition is silent from now on, so its leader goes on without it."""
        logger.error("partition_stopped", "%s stopped", self.log.directory, error=error)
        self.stopped = f"{type(error).__name__}: {error}"
        if self._port is not None:
            self._port.refused(self.wire_key, self.epoch, pb.REFUSAL_FAILED, self.epoch, self.stopped)
        self._close()
