"""From a topic's record to partitions that are led: create or recover the log, load the channels, begin an epoch.

The slow halves (`recover`, `create`, `begin_at`, and what `LogFolders` and `StateLoader` do) run on the disk thread and
touch only files; the others run on the loop and touch only memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nsqha import ids
from nsqha.clock import Clock
from nsqha.commitlog import copying
from nsqha.commitlog.corruption.verdict import CorruptRange
from nsqha.commitlog.entry import BatchCorrupt, Entry
from nsqha.commitlog.files.pairs import drop_files, parse_name
from nsqha.commitlog.idle_turns import IdleTurns
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.lookup import LogIdentity
from nsqha.commitlog.reading.reader import BatchCache
from nsqha.commitlog.recovery import JournalCuts, RecoveryReport, SettledFiles, recover, settle, was_named
from nsqha.commitlog.retention import Retention
from nsqha.commitlog.storage import MemStorage, OsStorage, Storage
from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.partition import PartitionCursors
from nsqha.election.model import UNLIMITED, PartitionMeta, TopicRecord
from nsqha.errors import LogCorrupt
from nsqha.nsqlog import Logger
from nsqha.options import Options
from nsqha.replication.leader import LeaderReplica
from nsqha.replication.pauses import ProcessPause
from nsqha.server.opening.log_folders import LogFolders
from nsqha.server.opening.state_loader import StateLoader
from nsqha.server.opening.sync_history import SyncHistory, weakest
from nsqha.server.partition.context import LedLog, PartitionRuntime
from nsqha.server.partition.local_repair import LocalRepair
from nsqha.server.partition.memory import EphemeralMemory
from nsqha.server.partition.partition import Partition
from nsqha.server.partition.retention import AbandonedPolicy, RetentionRunner
from nsqha.server.runtime.budget import PublishBudget
from nsqha.server.runtime.disk import DiskRounds, bound_progress
from nsqha.server.runtime.measures import Measures

RECOVERED_AT_ONCE = 32  # topics of a start, each with up to four files open before their log is one of `OpenLogs`

logger = Logger("opening")


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A partition's log, and the log_uid it goes by from now on."""

    log: PartitionLog
    log_uid: int
    state: PartitionState | None  # None: what the log says can not be known before a leader tells what is committed
    report: RecoveryReport | None  # None: new
    damage: BatchCorrupt | None = None  # why there is no state, if that is why


class RecoveryNews:
    """Says what recovery found in the logs of one node, once each, under stable names: in log lines and in counts."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def recovered(self, partition: str, report: RecoveryReport) -> None:
        """A log was opened."""
        if report.clean:
            return
        for cut in report.cuts:
            logger.warning("log_cut", "%s: the log was cut at offset %d (%s)", partition, cut.at.offset, cut.why)
            self._measures.log_events["log_cut"] += 1
        for damage in report.damage:
            self.damaged(partition, damage)
        for position in report.unreadable:
            text = "%s: the files at position %d can not be used, and were set aside as %020d.*.unreadable"
            logger.error("log_damaged", text, partition, position, position)
            self._measures.log_events["log_damaged"] += 1
        if report.restored_anchors:
            text = "%s: anchors that were lost are written again: %d"
            logger.error("log_damaged", text, partition, report.restored_anchors)
            self._measures.log_events["log_damaged"] += 1
        if report.verdict.alarm and not report.damage:
            text = "%s: from log id %d on nothing is left of what was synced to this disk"
            logger.error("log_damaged", text, partition, report.verdict.bad)
            self._measures.log_events["log_damaged"] += 1
        if report.possible_loss:
            logger.warning("possible_loss", "%s: messages acknowledged before their fsync may be gone", partition)
            self._measures.log_events["possible_loss"] += 1

    def damaged(self, partition: str, damage: CorruptRange) -> None:
        """Batches did not verify."""
        text = "%s: offsets [%d, %d) did not verify: %s"
        logger.error("log_damaged", text, partition, damage.first.offset, damage.end.offset, damage.what)
        self._measures.log_events["log_damaged"] += 1


class PartitionOpener:
    """Opens and creates the logs of one node, and makes partitions of them."""

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
        self.on_wrong_state: Callable[[str, Partition], None] = lambda topic, partition: None
        self.measures = Measures()
        self.budget = PublishBudget(loop, options.publish_queue_bytes)
        bound_progress(disk, options.isr_timeout_ns / 1e9)
        self._options = options
        self._journal = journal
        self.syncs = SyncHistory(journal)
        self._rng = rng
        ephemeral = EphemeralMemory(
            topic_bytes_max=options.ephemeral_topic_bytes,
            node_bytes_max=options.ephemeral_bytes,
            messages_max=options.mem_queue_size,
        )
        self.folders = LogFolders(options.data_path, storage or OsStorage(), ephemeral)
        self.states = StateLoader(cursor_cache or LmdbCache.open(f"{options.data_path}/cursors.lmdb"))
        self._news = RecoveryNews(self.measures)
        self._cache = BatchCache(options.tail_cache_bytes)
        self._limits = LogLimits(segment_bytes=options.segment_bytes_or_default)
        self._cursor_limits = ChannelLimits(
            max_msg_timeout_s=options.max_msg_timeout_ns / 1e9, ephemeral_unread_max=options.mem_queue_size
        )
        self.runtime = PartitionRuntime(
            loop=loop,
            clock=clock,
            disk=disk,
            measures=self.measures,
            on_failure=fail,
            pause=ProcessPause(),
            budget=self.budget,
            wait_seconds_max=options.publish_wait_ns / 1e9,
            written_seconds_max=options.publish_outcome_wait_ns / 1e9,
            sync_every=options.sync_every,
            sync_seconds=options.sync_timeout_ns / 1e9,
            turns=IdleTurns[Partition](),
        )

    @property
    def cursor_cache(self) -> LmdbCache:
        """The cache of channel states."""
        return self.states.cache

    # ---- files, on the disk thread

    def create(self, record: TopicRecord, log_uids: Mapping[int, int], *, at_once: bool = True) -> dict[int, OpenedLog]:
        """New, empty logs. The record is durable already, so a crash here leaves nothing that is not known of. Not
        `at_once`: they are on the disk with their first entries; the loop has them `share` descriptors."""
        opened = {}
        for number, log_uid in log_uids.items():
            identity = LogIdentity(record.uid, number)
            storage, folder = self.folders.storage_of(record), self.folders.partition(record, number)
            limits = self.folders.ephemeral.limits if ids.is_ephemeral(record.name) else self._limits
            log = PartitionLog.create(storage, folder, identity, cache=self._cache, limits=limits, at_once=at_once)
            if at_once and not ids.is_ephemeral(record.name):
                log.share_descriptors(self.folders.open_logs)
            state = PartitionState() if ids.is_ephemeral(record.name) else self.states.load((record.uid, number), log)
            opened[number] = OpenedLog(log, log_uid, state, None)
        return opened

    def settle(self, record: TopicRecord, numbers: Iterable[int] | None = None) -> dict[int, SettledFiles]:
        """Bring the files of logs that are about to be recovered to the disk. Topics may be settled at once."""
        settled = {}
        for number in record.partitions if numbers is None else numbers:
            folder, identity = self.folders.partition(record, number), LogIdentity(record.uid, number)
            named = was_named(self._journal.record((record.uid, number)))
            settled[number] = settle(self.folders.storage, folder, identity, named=named)
        return settled

    def recover(
        self,
        record: TopicRecord,
        numbers: Iterable[int] | None = None,
        settled: Mapping[int, SettledFiles] = MappingProxyType({}),
    ) -> dict[int, OpenedLog]:
        """The logs of a topic that was here before; only of these partitions if given. `settled`: what `settle` has
        just returned."""
        opened = {}
        for number in record.partitions if numbers is None else numbers:
            key = (record.uid, number)
            meta = record.partitions[number]
            replicas = max(len({*meta.replicas, *meta.isr}), 1)
            alone = set(meta.isr) == {self._journal.identity.node_uid}  # what it lost, no other node has
            before = self._journal.record(key)
            recovery = recover(
                self.folders.storage,
                self.folders.partition(record, number),
                LogIdentity(record.uid, number),
                before,
                JournalCuts(self._journal, key),
                sync_always=weakest(self._journal, key, meta.sync or self.sync_of(record)) == "always",
                replicas=replicas,
                page_cache_lost=self._journal.page_cache_lost(key),
                cache=self._cache,
                limits=self._limits,
                alone=alone,
                settled=settled.get(number),
            )
            self._news.recovered(f"{record.name}/{number}", recovery.report)
            new_uid = recovery.report.new_log_uid or before is None or not before.log_uid
            log_uid = ids.new_uid(self._rng) if new_uid or before is None else before.log_uid
            state: PartitionState | None
            if replicas == 1:  # what is in the log is committed
                state, damage = self._state_of_all(key, f"{record.name}/{number}", recovery.log), None
            else:
                below = recovery.report.serve_end
                state, damage = self.states.vouched_for(key, recovery.log, below=below, alone=alone)
            recovery.log.share_descriptors(self.folders.open_logs)
            opened[number] = OpenedLog(recovery.log, log_uid, state, recovery.report, damage)
        return opened

    def _state_of_all(self, key: tuple[int, int], partition: str, log: PartitionLog) -> PartitionState:
        """The channel state of a log that no other node has. Its older entries, which recovery does not look at, may
        not verify either."""
        while True:
            try:
                return self.states.load(key, log, alone=True)
            except BatchCorrupt as damage:
                if (rebuild := log.repair.rebuilding(damage.first.log_id, damage.end.log_id, starting=True)) is None:
                    raise  # not of entries: it would be met again
                if (rebuilt := rebuild.run()) is not None:
                    self._news.damaged(partition, rebuilt)

    def begin_at(self, record: TopicRecord, number: int, anchor: Entry) -> PartitionLog:
        """An empty log in the place of what is there, which goes on behind `anchor`: catch-up pulls the rest."""
        directory = self.folders.partition(record, number)
        storage = self.folders.storage_of(record)
        if storage.exists(directory):
            # Not the tree at once: what a crash leaves of that may be a log that can not be opened.
            parsed = [parse_name(name) for name in storage.list_dir(directory)]
            drop_files(storage, directory, sorted({found[0] for found in parsed if found is not None}))
            storage.remove_tree(directory)
        identity = LogIdentity(record.uid, number)
        log = copying.begin_at(storage, directory, identity, anchor, cache=self._cache, limits=self._limits)
        log.share_descriptors(self.folders.open_logs)
        return log

    def new_log_uid(self) -> int:
        """The name of a log that is made now, or can not be vouched for under its old one."""
        return ids.new_uid(self._rng)

    def sync_of(self, record: TopicRecord) -> str:
        return "none" if ids.is_ephemeral(record.name) else record.settings.sync or self._options.sync

    # ---- memory, on the loop

    def share(self, logs: Mapping[int, OpenedLog]) -> None:
        """New logs, with files that stay open until they are durable, are among those of which some are closed."""
        for opened in logs.values():
            opened.log.share_descriptors(self.folders.open_logs)

    def lead(self, record: TopicRecord, logs: Mapping[int, OpenedLog]) -> list[Partition]:
        """Partitions over open logs, in the epochs that the record names; their promises are staged."""
        partitions = []
        for number, opened in sorted(logs.items()):
            meta = record.partitions[number]
            if not ids.is_ephemeral(record.name):
                sync = self.sync_of(record)
                self.stage_promise((record.uid, number), meta.epoch, opened.log, opened.log_uid, sync)
            partitions.append(self.partition(record, number, meta, opened))
        return partitions

    def promise_new(self, uid: int, metas: Mapping[int, PartitionMeta]) -> None:
        """Stage what `lead` promises for the logs of a new topic with sync=always, which are empty."""
        for number, meta in metas.items():
            log_uid = meta.isr[self._journal.identity.node_uid]
            self._journal.stage((uid, number), promise=meta.epoch, log_uid=log_uid, local_durable=1, recovered=True)

    def promise_named(self, record: TopicRecord) -> None:
        """Stage what a record of a single node says of logs that the journal has not heard of: the process died behind
        the first OK of a topic, or before it. Not so of a damaged journal, which may have known more."""
        if self._journal.found is None or self._journal.found.damaged:
            return
        for number, meta in record.partitions.items():
            log_uid = meta.isr.get(self._journal.identity.node_uid)
            if log_uid and not self.knows((record.uid, number)):
                # Who made it with sync=always had it in the journal.
                self._journal.stage(
                    (record.uid, number), promise=meta.epoch, log_uid=log_uid, local_durable=1, lazy=True
                )

    def stage_promise(self, key: tuple[int, int], epoch: int, log: PartitionLog, log_uid: int, sync: str) -> None:
        """Nothing of a lower epoch is taken for this open log any more; the caller makes it durable. `sync`: how it
        acknowledges."""
        known, end = self._journal.record(key), log.vouched_durable
        lazy = self.syncs.promised(key, sync, log)
        if known is not None and known.log_uid == log_uid:
            durable = max(end, known.local_durable)
            self._journal.stage(key, promise=epoch, local_durable=durable, lazy=lazy, recovered=True)
        else:
            self._journal.stage(key, promise=epoch, log_uid=log_uid, local_durable=end, lazy=lazy, recovered=True)

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
        storage = log.files.storage if ids.is_ephemeral(record.name) else None
        partition = Partition(
            self.runtime,
            LedLog(number, id_base, log, cursors, leader),
            retention=RetentionRunner(self.retention_of(record), abandoned_of(record), self.measures.retention_removed),
            sync=sync,
            memory=self.folders.ephemeral.log(storage, len(record.partitions))
            if isinstance(storage, MemStorage)
            else None,
        )
        log.on_wanted_durable = partition.files.sync
        alone = {node, *meta.replicas, *meta.isr} == {node}
        partition.local_repair = LocalRepair(
            partition,
            rebuilt=lambda damage: self._news.damaged(f"{record.name}/{number}", damage),
            mended=lambda *mended: self.on_mended(*mended),
            alone=lambda: alone,  # for as long as there is no newer record: `CorruptRanges.leads`
        )
        partition.on_damage = partition.local_repair.found
        partition.life.on_wrong_state = lambda: self.on_wrong_state(record.name, partition)
        return partition

    def rebuilt_state(self, key: tuple[int, int], log: PartitionLog) -> PartitionState | None:
        """The channel state of a log that no other node has, rebuilt because the one in use is wrong. None: the log
        does not say it."""
        try:
            return self.states.load(key, log, alone=True, distrusted=0)
        except LogCorrupt as error:
            logger.error("state_unknown", "%s: the channel state cannot be rebuilt: %s", log.directory, error)
            return None

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
        """Remember up to where the log is on this disk, and that its channels' state may be another one; the caller
        writes journal and cache at its leisure."""
        self.cursor_cache.look_at(key)
        known = self._journal.record(key)
        if known is not None and log.vouched_durable > known.local_durable:
            self._journal.stage(key, local_durable=log.vouched_durable)
        self.syncs.synced(key, log)

    def forget_unnamed(self, topic_uids: Collection[int]) -> None:
        """Forget promises for topics other than these which were to be made by a process that died before there was a
        record. Files are made behind the record: where there is a folder, the metadata lost the topic, which an
        operator may bring back."""
        records = self._journal.records().items()
        unnamed = [key for key, known in records if key[0] not in topic_uids and known.local_durable <= 1]
        here = self.folders.topic_uids() if unnamed else set[int]()
        for key in unnamed:
            if key[0] not in here:
                self.forget_partition(key)

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
        self.syncs.forget(key)
        self.cursor_cache.forget(key)


def abandoned_of(record: TopicRecord) -> AbandonedPolicy:
    """The topic's policy for channels that are not read."""
    settings = record.settings
    after_ms = settings.abandoned_after_ms
    return AbandonedPolicy(None if after_ms is None else after_ms * 1_000_000, settings.abandoned_over_bytes)
