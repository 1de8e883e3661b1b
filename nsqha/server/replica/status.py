"""What a node tells others of its replicas, and what it gives them: status, where epochs end, batches.

Batches of a partition that is led here go to followers that catch up, committed or not, and without their frames where
those were given up; what is committed goes to any replica that has to mend its copy, from any that has it. Both are
read off the loop, through files of their own (`LogReader.part`): old batches come from the disk, and no client waits
for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqha.commitlog import copying
from nsqha.commitlog.entry import BatchCorrupt
from nsqha.errors import NotFound, Unavailable
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.replica.leading.leadership import waits_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqha.commitlog.reading.lookup import LogReader
    from nsqha.ids import PartitionKey
    from nsqha.server.integrity.log_integrity import LogIntegrity
    from nsqha.server.peers.api import PeerIdentity, PeerServer
    from nsqha.server.replica.leading.leadership import Leadership
    from nsqha.server.replica.replica_runtime import ReplicaRuntime
    from nsqha.server.replica.replica_table import ReplicaTable

FETCH_BYTES_MAX = 4 << 20
SHOWN_MAX = 100  # damaged ranges of a replica that are listed one by one

logger = Logger("status")


class ReplicaAnswers:
    """Answers for one node."""

    def __init__(self, runtime: ReplicaRuntime, table: ReplicaTable, integrity: LogIntegrity) -> None:
        self._table = table
        self._integrity = integrity
        self._journal = runtime.journal
        self._disk = runtime.disk
        self._node = runtime.node
        self._cluster_id = runtime.cluster_id
        self._clock = runtime.clock

    def register(self, server: PeerServer) -> None:
        """Be asked."""
        server.on_call("Status", self.status)
        server.on_call("EpochEnd", self.epoch_end)
        server.on_call("Fetch", self.fetch)

    async def status(self, peer: PeerIdentity, request: pb.StatusRequest) -> pb.StatusReply:
        """What this node has of some partitions, or of all."""
        return self.status_of(request)

    def status_of(self, request: pb.StatusRequest) -> pb.StatusReply:
        """The same. Unavailable: it is of another cluster."""
        self._check_cluster(request.cluster_id)
        table, journal = self._table, self._journal
        reply = pb.StatusReply(node_uid=self._node, registration=table.registration, poisoned=journal.node.poisoned)
        reply.wall_ns = self._clock.raw_wall_ns()
        if request.clock_only:
            return reply
        keys = [(key.topic_uid, key.partition) for key in request.keys] or [*table.leading, *table.followers]
        for key in keys:
            leads_epoch, waits_ms = 0, 0
            if (leadership := table.leading.get(key)) is not None:
                log, log_uid, committed = leadership.log, leadership.log_uid, leadership.committed
                role, stopped, known = pb.ROLE_LEADER, leadership.partition.life.stopped, True
                led_by = self._node
                if stopped is None:
                    leads_epoch, waits_ms = leadership.epoch, round(waits_seconds(leadership) * 1000)
            elif (follower := table.followers.get(key)) is not None:
                log, log_uid, committed = follower.log, follower.log_uid, follower.applier.committed
                role = pb.ROLE_CATCHING_UP if follower.behind else pb.ROLE_FOLLOWER
                stopped, known = follower.stopped, follower.applier.state is not None
                led_by = follower.port.leader if follower.port is not None else 0
            else:
                continue
            last = log.entry_before(log.end.log_id)
            record = journal.record(key)
            cut, damaged = self._integrity.suspects.doubts(key)
            declined_epoch, declines = table.declined.get(key, (0, ""))
            shown = reply.replicas.add(
                key=pb.PartitionKey(topic_uid=key[0], partition=key[1]),
                role=role if stopped is None else pb.ROLE_NONE,
                promise=0 if record is None else record.promise,
                log_uid=log_uid,
                end=log.end.log_id,
                last_epoch=last.epoch,
                chain=last.chain,
                durable=min(log.local_durable, log.end.log_id),
                committed=committed,
                cut=cut,
                corrupt=damaged or stopped is not None or not known,
                start=log.start.log_id,
                led_by=led_by,
                declined_epoch=declined_epoch,
                declines=declines,
                position=log.end.position,
                leads_epoch=leads_epoch,
                waits_ms=waits_ms,
            )
            ranges = self._integrity.corrupt.shown(key)
            shown.damaged_ranges = len(ranges)
            for range_ in ranges[:SHOWN_MAX]:
                shown.damage.add(**range_._asdict())
        return reply

    def unled(self, keys: Sequence[PartitionKey], most: int) -> list[PartitionKey]:
        """Those that have a replica here and no leader that serves, as far as this node knows. Not all are looked at
        when more than `most` are among the first ones: the rest is returned as it is."""
        leading, followers = self._table.leading, self._table.followers
        found: list[PartitionKey] = []
        for place, key in enumerate(keys):
            if (leadership := leading.get(key)) is not None:
                if leadership.partition.life.serving:
                    continue
            elif (follower := followers.get(key)) is None or follower.port is not None:
                continue
            found.append(key)
            if len(found) > most:
                return [*found, *keys[place + 1 :]]
        return found

    async def epoch_end(self, peer: PeerIdentity, request: pb.EpochEndRequest) -> pb.EpochEndReply:
        """Where an epoch ends in the log of a partition that is led here."""
        leadership = self._led(request.cluster_id, request.key, request.epoch)
        found = copying.epoch_end(leadership.log, request.asked_epoch)
        return pb.EpochEndReply(epoch=found.epoch, end=found.end, chain=found.chain, start=leadership.log.start.log_id)

    async def fetch(self, peer: PeerIdentity, request: pb.FetchRequest) -> pb.FetchReply:
        """Batches of a partition that is led here."""
        if not request.epoch:
            return await self._fetch_anywhere(request)
        leadership = self._led(request.cluster_id, request.key, request.epoch)
        log = leadership.log
        end, position = log.end.log_id, log.end.position
        if request.first < log.start.log_id:
            anchor = log.entry_before(log.start.log_id)
            reply = pb.FetchReply(committed=leadership.committed, end=end, end_position=position)
            reply.anchor = anchor.encode()
            return reply
        if request.first >= end:
            return pb.FetchReply(committed=leadership.committed, end=end, end_position=position)
        run = await self._read(log, request, request.end or end, lost=True)
        if self._led(request.cluster_id, request.key, request.epoch) is not leadership:
            raise Unavailable("this node began another epoch of the partition meanwhile; its files may have been cut")
        reply = pb.FetchReply(entries=run.entries, data=run.data, committed=leadership.committed, end=end)
        reply.end_position = position
        return reply

    async def _read(
        self, log: LogReader, request: pb.FetchRequest, end: int, *, lost: bool = False
    ) -> copying.BatchRun:
        """Batches of one pair of files; `lost`: also those that were given up. LogCorrupt also if retention takes the
        files meanwhile."""
        part, max_bytes = log.part_at(request.first), min(max(request.max_bytes, 1), FETCH_BYTES_MAX)
        try:
            return await self._disk.read(
                lambda: copying.read_run(part, request.first, min(end, part.end.log_id), max_bytes, lost=lost)
            )
        except BatchCorrupt as error:
            key = (request.key.topic_uid, request.key.partition)
            if self._integrity.corrupt.found(key, error.first.log_id, error.end.log_id) and lost:
                text = "%s: %s; no replica can be made of it until it is mended, or given up with `nsqha log skip`"
                logger.error("copy_stopped", text, log.directory, error)
            raise

    async def _fetch_anywhere(self, request: pb.FetchRequest) -> pb.FetchReply:
        """Any replica gives what it has to one that mends its copy, and that finds out whether it fits."""
        self._check_cluster(request.cluster_id)
        key = (request.key.topic_uid, request.key.partition)
        log, committed = self._table.log_of(key), self._table.committed_of(key)
        end = 0 if log is None else min(log.end.log_id, request.end or committed)
        if log is None or not log.start.log_id <= request.first < end:
            raise NotFound(f"log id {request.first} is not here")
        past = log.past
        run = await self._read(log, request, end)
        if self._table.log_of(key) is not log or log.past is not past:
            # Other batches may have come since, and been committed: what was read is not what we vouch for.
            raise NotFound("this replica was cut or began again meanwhile")
        committed = self._table.committed_of(key)
        return pb.FetchReply(entries=run.entries, data=run.data, committed=committed, end=log.end.log_id)

    def _led(self, cluster_id: int, key: pb.PartitionKey, epoch: int) -> Leadership:
        self._check_cluster(cluster_id)
        leadership = self._table.leading.get((key.topic_uid, key.partition))
        if leadership is None or leadership.epoch != epoch:
            raise Unavailable(f"this node does not lead the partition in epoch {epoch}")
        return leadership

    def _check_cluster(self, cluster_id: int) -> None:
        if cluster_id != self._cluster_id:
            raise Unavailable(f"this node does not belong to cluster {cluster_id:016x}")
