"""From a topic's record to partitions that are led: create or recover the log, load the channels, begin an epoch.

The slow halves (`recover`, `create`, `remove`) run on the disk thread and touch only files; the others run on the
loop and touch only memory. A partition's folder is `topics/<name>-<topic uid>/<partition>`: the name is for people,
the uid makes delete-and-recreate and names such as `..` harmless. An #ephemeral topic has the same log in memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from nsqha import ids
from nsqha.clock import Clock
from nsqha.commitlog import copying
from nsqha.commitlog.entry import FAULTY, BatchCorrupt, Entry
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.lookup import LogIdentity, LogReader
from nsqha.commitlog.pairs import drop_files, parse_name, unlink_some
from nsqha.commitlog.reader import BatchCache
from nsqha.commitlog.recovery import JournalCuts, RecoveryReport, recover
from nsqha.commitlog.retention import Retention
from nsqha.commitlog.storage import MemStorage, OsStorage, Storage, parent
from nsqha.commitlog.verdict import CorruptRange
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.lmdb_cache import LmdbCache
from nsqha.cursor.loading import first_checkpoint_end
from nsqha.cursor.partition import PartitionCursors
from nsqha.cursor.state import NEEDS_LOOK, PartitionState
from nsqha.election.model import UNLIMITED, PartitionMeta, TopicRecord
from nsqha.errors import LogCorrupt
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.replication.leader import LeaderReplica
from nsqha.server.partition.context import LedLog, PartitionRuntime
from nsqha.server.partition.local_repair import LocalRepair
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.retention import AbandonedPolicy, RetentionRunner
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.runtime.disk import DiskRounds
from nsqha.server.runtime.measures import Measures

UNLINKED_AT_ONCE = 4  # files of a deleted topic: a large one takes a tenth of a second
DURABLE_ENTRIES = 512  # of a log's end that are asked what is durable everywhere: a leader's first know little

MUST_READ = NEEDS_LOOK | FAULTY  # what was lost here other replicas have, and only they know which events were in it

logger = Logger("opening")


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A partition's log, and the log_uid it goes by from now on."""

    log: PartitionLog
    log_uid: int
    state: PartitionState | None  # None: what the log says can not be known before a leader tells what is committed
    report: RecoveryReport | None  # None: new
    damage: BatchCorrupt | None = None  # why there is no state, if that is why


class PartitionOpener:
    """Opens, creates and removes the partitions of one node."""

    def __init__(
        self,
        options: Options,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        disk: DiskRounds,
        journal: NodeJournal,
        rng: random.Random,
        fail: Callable[[BaseException], None],
        storage: Storage | None = None,
        cursor_cache: LmdbCache | None = None,
    ) -> None:
        """`storage`, `cursor_cache`: those of the data directory, if not given."""
        self.on_mended: Callable[[PartitionLog, int, int], None] = lambda log, first_log_id, end_log_id: None
        self.measures = Measures()
        self.budget = PublishBudget(loop, options.publish_queue_bytes)
        self._options = options
        self._journal = journal
        self._rng = rng
        self._storage: Storage = storage or OsStorage()
        self._cache = BatchCache(options.tail_cache_bytes)
        self.cursor_cache = cursor_cache or LmdbCache.open(f"{options.data_path}/cursors.lmdb")
        self._limits = LogLimits(segment_bytes=options.segment_bytes_or_default)
        self._cursor_limits = ChannelLimits(
            max_msg_timeout_s=options.max_msg_timeout_ns / 1e9, ephemeral_unread_max=options.mem_queue_size
        )
        self._runtime = PartitionRuntime(
            loop=loop,
            clock=clock,
            disk=disk,
            measures=self.measures,
            on_failure=fail,
            budget=self.budget,
            wait_seconds_max=options.publish_wait_ns / 1e9,
            written_seconds_max=options.publish_outcome_wait_ns / 1e9,
            sync_every=options.sync_every,
            sync_seconds=options.sync_timeout_ns / 1e9,
        )

    # ---- files, on the disk thread

    def folder(self, name: str, uid: int) -> str:
        return f"{self._options.data_path}/topics/{name}-{uid:016x}"

    def create(self, record: TopicRecord, log_uids: Mapping[int, int]) -> dict[int, OpenedLog]:
        """New, empty logs. The record is durable already, so a crash here leaves nothing that nobody knows of."""
        storage = self._storage_of(record)
        folder = self.folder(record.name, record.uid)
        opened = {}
        for number, log_uid in log_uids.items():
            identity = LogIdentity(record.uid, number)
            log = PartitionLog.create(storage, f"{folder}/{number}", identity, cache=self._cache, limits=self._limits)
            state = PartitionState() if ids.is_ephemeral(record.name) else self.state_of((record.uid, number), log)
            opened[number] = OpenedLog(log, log_uid, state, None)
        return opened

    def recover(self, record: TopicRecord, numbers: Iterable[int] | None = None) -> dict[int, OpenedLog]:
        """The logs of a topic that was here before; only of these partitions if given."""
        folder = self.folder(record.name, record.uid)
        opened = {}
        for number in record.partitions if numbers is None else numbers:
            key = (record.uid, number)
            meta = record.partitions[number]
            replicas = max(len({*meta.replicas, *meta.isr}), 1)
            alone = set(meta.isr) == {self._journal.identity.node_uid}  # what it lost, nobody has
            before = self._journal.record(key)
            recovery = recover(
                self._storage,
                f"{folder}/{number}",
                LogIdentity(record.uid, number),
                before,
                JournalCuts(self._journal, key),
                sync_always=self.sync_of(record) == "always",
                replicas=replicas,
                host_restarted=self._journal.host_restarted,
                cache=self._cache,
                limits=self._limits,
                alone=alone,
            )
            self._tell(f"{record.name}/{number}", recovery.report)
            new_uid = recovery.report.new_log_uid or before is None or not before.log_uid
            log_uid = ids.new_uid(self._rng) if new_uid or before is None else before.log_uid
            state: PartitionState | None
            if replicas == 1:  # what is in the log is committed
                state, damage = self._state_of_all(key, f"{record.name}/{number}", recovery.log), None
            else:
                below = recovery.report.serve_end
                state, damage = self.state_vouched_for(key, recovery.log, below=below, alone=alone)
            opened[number] = OpenedLog(recovery.log, log_uid, state, recovery.report, damage)
        return opened

    def _state_of_all(self, key: tuple[int, int], partition: str, log: PartitionLog) -> PartitionState:
        """The channel state of a log that nobody else has. Its older entries, which recovery does not look at, may not
        verify either."""
        while True:
            try:
                return self.state_of(key, log, alone=True)
            except BatchCorrupt as damage:
                if (rebuild := log.rebuilding(damage.first.log_id, damage.end.log_id, starting=True)) is None:
                    raise  # not of entries: it would be met again
                if (rebuilt := rebuild.run()) is not None:
                    self._tell_damage(partition, rebuilt)

    def state_vouched_for(
        self,
        key: tuple[int, int],
        log: PartitionLog,
        *,
        committed: int = 0,
        below: int | None = None,
        seen_as: LogReader | None = None,
        alone: bool = False,
    ) -> tuple[PartitionState | None, BatchCorrupt | None]:
        """The channel state up to what is known to be committed: `committed`, or what the batches say of all replicas.

        `seen_as`: a snapshot of a log that is in use; only that is looked at, and not what the cache has of an earlier
        one. `alone`: no other replica has more, so what is lost is passed over. None: nothing that is known to be
        committed says it, as in a log that was begun anew a moment ago; or a batch does not verify, which is returned.
        """
        committed = max(committed, durable_everywhere(seen_as or log))
        committed = committed if below is None else min(committed, below)
        must_read = NEEDS_LOOK if alone else MUST_READ

        def load(committed: int) -> PartitionState:
            return self.state_of(key, log, committed=committed, seen_as=seen_as, must_read=must_read)

        try:
            try:
                return load(committed), None
            except BatchCorrupt:
                raise
            except LogCorrupt:
                # It was trimmed, and fell silent: no batch behind the checkpoint says that this is committed.
                end = trimmed_for(seen_as or log, must_read)
                if end <= committed or (below is not None and below < end):
                    raise
                return load(end), None
        except LogCorrupt as error:
            logger.warning("state_unknown", "%s: the channels are not known yet: %s", log.directory, error)
            return None, error if isinstance(error, BatchCorrupt) else None

    def begin_at(self, record: TopicRecord, number: int, anchor: Entry) -> PartitionLog:
        """An empty log in the place of what is there, which goes on behind `anchor`: catch-up pulls the rest."""
        directory = f"{self.folder(record.name, record.uid)}/{number}"
        storage = self._storage_of(record)
        if storage.exists(directory):
            # Not the tree at once: what a crash leaves of that may be a log that can not be opened.
            parsed = [parse_name(name) for name in storage.list_dir(directory)]
            drop_files(storage, directory, sorted({found[0] for found in parsed if found is not None}))
            storage.remove_tree(directory)
        identity = LogIdentity(record.uid, number)
        return copying.begin_at(storage, directory, identity, anchor, cache=self._cache, limits=self._limits)

    def new_log_uid(self) -> int:
        """The name of a log that is made now, or can not be vouched for under its old one."""
        return ids.new_uid(self._rng)

    def state_of(
        self,
        key: tuple[int, int],
        log: PartitionLog,
        *,
        committed: int | None = None,
        seen_as: LogReader | None = None,
        must_read: int = NEEDS_LOOK,
        alone: bool = False,
    ) -> PartitionState:
        """The channel state that a log says, up to `committed` if that is not its end. `alone`: without what can not be
        read, as nobody has more. LogCorrupt."""
        read = lambda entry: _events(log, cast(Entry, entry), alone)  # noqa: E731
        if seen_as is None:
            return self.cursor_cache.load(key, log, read, committed=committed, must_read=must_read).state
        see = lambda entry: _events(seen_as, cast(Entry, entry), alone)  # noqa: E731
        later = (log, read)
        return self.cursor_cache.load(key, seen_as, see, committed=committed, later=later, must_read=must_read).state

    def state_anew(self, key: tuple[int, int], log: LogReader, *, committed: int) -> PartitionState:
        """The channel state that is left when nothing says what it was: every channel will begin where the log does."""
        self.cursor_cache.forget(key)
        state = PartitionState()
        for entry in log.entries(log.start.log_id, committed):
            state.apply(entry, log.events(entry) if entry.flags & NEEDS_LOOK else b"")
        return state

    def remove(self, name: str, uid: int) -> bool:
        """Unlink some of what is left of a deleted topic; whether there is more. If not, it is gone durably: its
        tombstone goes next. Safe to repeat."""
        return self._remove(self.folder(name, uid), within=True)

    def has_files(self, record: TopicRecord, number: int) -> bool:
        """Whether anything of a partition is here."""
        return self._storage.exists(f"{self.folder(record.name, record.uid)}/{number}")

    def remove_partition(self, record: TopicRecord, number: int) -> bool:
        """The same of one partition: the journal forgets it too."""
        return self._remove(f"{self.folder(record.name, record.uid)}/{number}", within=False)

    def _remove(self, folder: str, *, within: bool) -> bool:
        storage = self._storage
        here = storage.exists(folder)
        for directory in [f"{folder}/{name}" for name in storage.list_dir(folder)] if here and within else [folder]:
            if self._unlink_some(directory):
                return True
        storage.remove_tree(folder)
        if storage.exists(above := parent(folder)):
            storage.sync_dir(above)
        return False

    def _unlink_some(self, directory: str) -> bool:
        try:
            return unlink_some(self._storage, directory, UNLINKED_AT_ONCE)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False  # nothing of ours; it goes with the folder

    def sync_of(self, record: TopicRecord) -> str:
        return "none" if ids.is_ephemeral(record.name) else record.settings.sync or self._options.sync

    def _storage_of(self, record: TopicRecord) -> Storage:
        return MemStorage() if ids.is_ephemeral(record.name) else self._storage

    def _tell(self, partition: str, report: RecoveryReport) -> None:
        """Say what recovery found, once each, under stable names."""
        if report.clean:
            return
        for cut in report.cuts:
            logger.warning("log_cut", "%s: the log was cut at offset %d (%s)", partition, cut.at.offset, cut.why)
            self.measures.log_events["log_cut"] += 1
        for damage in report.damage:
            self._tell_damage(partition, damage)
        for position in report.unreadable:
            text = "%s: the files at position %d can not be used, and were set aside as %020d.*.unreadable"
            logger.error("log_damaged", text, partition, position, position)
            self.measures.log_events["log_damaged"] += 1
        if report.restored_anchors:
            text = "%s: anchors that were lost are written anew: %d"
            logger.error("log_damaged", text, partition, report.restored_anchors)
            self.measures.log_events["log_damaged"] += 1
        if report.verdict.alarm and not report.damage:
            text = "%s: from log id %d on nothing is left of what was synced to this disk"
            logger.error("log_damaged", text, partition, report.verdict.bad)
            self.measures.log_events["log_damaged"] += 1
        if report.possible_loss:
            logger.warning("possible_loss", "%s: messages acknowledged before their fsync may be gone", partition)
            self.measures.log_events["possible_loss"] += 1

    def _tell_damage(self, partition: str, damage: CorruptRange) -> None:
        text = "%s: offsets [%d, %d) did not verify: %s"
        logger.error("log_damaged", text, partition, damage.first.offset, damage.end.offset, damage.what)
        self.measures.log_events["log_damaged"] += 1

    # ---- memory, on the loop

    def lead(self, record: TopicRecord, logs: Mapping[int, OpenedLog]) -> list[Partition]:
        """Partitions over open logs, in the epochs that the record names; their promises are staged."""
        partitions = []
        for number, opened in sorted(logs.items()):
            meta = record.partitions[number]
            if not ids.is_ephemeral(record.name):
                self.stage_promise((record.uid, number), meta.epoch, opened.log, opened.log_uid)
            partitions.append(self.partition(record, number, meta, opened))
        return partitions

    def stage_promise(self, key: tuple[int, int], epoch: int, log: PartitionLog, log_uid: int) -> None:
        """Nothing of a lower epoch is taken for this log any more; the caller makes it durable."""
        end = log.vouched_durable
        known = self._journal.record(key)
        if known is None or known.log_uid != log_uid:
            self._journal.stage(key, promise=epoch, log_uid=log_uid, local_durable=end)
        else:
            self._journal.stage(key, promise=epoch, local_durable=max(end, known.local_durable))

    def partition(self, record: TopicRecord, number: int, meta: PartitionMeta, opened: OpenedLog) -> Partition:
        """A partition that this node leads in the epoch and with the ISR that `meta` names."""
        log = opened.log
        sync = self.sync_of(record)
        id_base = ids.id_base(number, record.salt)
        node = self._journal.identity.node_uid
        leader = LeaderReplica(
            node=node,
            epoch=meta.epoch,
            isr={node, *meta.isr},
            min_isr=meta.min_isr,
            sync_always=sync == "always",
            end=log.end.log_id,
            durable=log.local_durable,
        )
        assert opened.state is not None, f"{log.directory}: led without its channels"
        cursors = PartitionCursors(
            id_base=id_base,
            state=opened.state,
            limits=self._cursor_limits,
            ordered=record.settings.ordered,
            bounded=ids.is_ephemeral(record.name),
        )
        partition = Partition(
            self._runtime,
            LedLog(number, id_base, log, cursors, leader),
            retention=RetentionRunner(self.retention_of(record), abandoned_of(record)),
            sync=sync,
            held_back_max=self._options.mem_queue_size if ids.is_ephemeral(record.name) else None,
        )
        alone = {node, *meta.replicas, *meta.isr} == {node}
        partition.local_repair = LocalRepair(
            partition,
            told=lambda damage: self._tell_damage(f"{record.name}/{number}", damage),
            mended=lambda *mended: self.on_mended(*mended),
            alone=lambda: alone,  # for as long as nobody has a newer record: `Damage.leads`
        )
        partition.on_damage = partition.local_repair.found
        return partition

    def retention_of(self, record: TopicRecord) -> Retention:
        """How long and how much of finished messages is kept for replay."""
        if ids.is_ephemeral(record.name):
            return Retention(keep_ns=0, keep_bytes=0)
        settings = record.settings
        keep_ns = self._options.retention_ns if settings.retention_ms is None else settings.retention_ms * 1_000_000
        keep_bytes = self._options.retention_bytes if settings.retention_bytes is None else settings.retention_bytes
        return Retention(
            keep_ns=None if settings.retention_ms == UNLIMITED else keep_ns,
            keep_bytes=None if keep_bytes == UNLIMITED else keep_bytes,
        )

    def stage_durable(self, key: tuple[int, int], log: PartitionLog) -> None:
        """Remember up to where the log is on this disk; the caller writes the journal at its leisure."""
        known = self._journal.record(key)
        if known is not None and log.vouched_durable > known.local_durable:
            self._journal.stage(key, local_durable=log.vouched_durable)

    def forget(self, record: TopicRecord) -> None:
        """The topic's files are gone."""
        for number in record.partitions:
            self.forget_partition((record.uid, number))

    def knows(self, key: tuple[int, int]) -> bool:
        """Whether this node has, or had, files of the partition."""
        return self._journal.record(key) is not None

    def forget_partition(self, key: tuple[int, int]) -> None:
        """Its files are gone, or about to go."""
        self._journal.forget(key)
        self.cursor_cache.forget(key)


def _events(log: LogReader, entry: Entry, alone: bool) -> bytes | bytearray:
    try:
        return log.events(entry)
    except BatchCorrupt as error:
        if not alone:
            raise
        text = "%s: what its channels did in a batch is lost: %s; messages may come again, deferred ones may not"
        logger.error("events_lost", text, log.directory, error)
        return b""


def durable_everywhere(log: LogReader) -> int:
    """The end of what the last batches call durable on every replica that was in sync: it is committed."""
    end = log.end.log_id
    try:
        return max((entry.durable for entry in log.entries(end - DURABLE_ENTRIES, end)), default=0)
    except LogCorrupt:
        return 0


def trimmed_for(log: LogReader, must_read: int) -> int:
    """The end of the checkpoint that a log which begins in the middle begins there for; 0: none can be told."""
    return first_checkpoint_end(log, lambda entry: log.events(cast(Entry, entry)), must_read)


def abandoned_of(record: TopicRecord) -> AbandonedPolicy:
    """The topic's policy for channels that nobody reads."""
    settings = record.settings
    after_ms = settings.abandoned_after_ms
    return AbandonedPolicy(None if after_ms is None else after_ms * 1_000_000, settings.abandoned_over_bytes)
