"""Settings of a topic that may change while it lives, and what follows from them.

    change: read the record -> new settings, partitions' records -> compare-and-set -> what is here follows

The record is the intent. What a change means for partitions is written in the same compare-and-set:

    min_isr     the records of the partitions; their leaders go by it when the watch brings it
    replicas    nothing here: the controller moves replicas until each partition has as many; min_isr follows the moves
    partitions  new records, placed; in a cluster the controller elects their leaders, a node that is alone makes their
                logs and begins their epochs. Their epoch starts bring all channels of the topic. Never fewer.

A new partition that could not be made after its record was written is made by the same change asked for again, or by
the next start. Publishers that have nothing under way choose anew among all partitions; consumers get a place at each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.election.model import PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.placement import able, host_of, min_isr_of, replicas_wanted
from nsqha.election.rules import changed_settings, with_settings
from nsqha.errors import Conflict, NotFound, NsqhaError, Unavailable
from nsqha.nsqlog import Log
from nsqha.server.replica.log_manager import abandoned_of
from nsqha.server.runtime.metadata import CHANGE_RETRIES

if TYPE_CHECKING:
    from nsqha.server.node.membership import Cluster
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.replica.log_manager import PartitionOpener
    from nsqha.server.runtime.disk import DiskRounds
    from nsqha.server.runtime.journal import JournalWriter
    from nsqha.server.runtime.metadata import Metadata

log = Log("settings")


class TopicChanges:
    """Carries out changes of settings on one node; whoever calls holds the topic's lock."""

    def __init__(
        self,
        node_uid: int,
        rng: random.Random,
        metadata: Metadata,
        disk: DiskRounds,
        journal_writer: JournalWriter,
        opener: PartitionOpener,
        *,
        adopt: Callable[[Versioned[TopicRecord]], Topic],
        forget_targets: Callable[[], None],
    ) -> None:
        """`adopt`: has what is led here follow a newer record; `forget_targets`: publishers choose anew."""
        self._node_uid = node_uid
        self._rng = rng
        self._metadata = metadata
        self._store = metadata.store
        self._disk = disk
        self._journal_writer = journal_writer
        self._opener = opener
        self._adopt = adopt
        self._forget_targets = forget_targets

    async def change(self, topic: Topic, changes: Mapping[str, Any], cluster: Cluster | None) -> None:
        """Change these settings. ValueError if they do not fit, NotFound, Unavailable."""
        if cluster is None:
            await self._change_alone(topic, changes)
        else:
            await self._change_in(cluster, topic, changes)

    async def _change_in(self, cluster: Cluster, topic: Topic, changes: Mapping[str, Any]) -> None:
        def changed(record: TopicRecord) -> TopicRecord:
            found, first = with_settings(record, changes), len(record.partitions)
            new = cluster.placed(found.settings, {}, first=first) if found.settings.partitions > first else {}
            return replace(found, partitions={**found.partitions, **new})

        versioned = await self._replace(topic, changed)
        self._adopt(versioned)
        await cluster.replicas.settle(versioned)

    async def _change_alone(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        def changed(record: TopicRecord) -> TopicRecord:
            settings = changed_settings(record, changes)
            numbers = range(len(record.partitions), settings.partitions)
            new = {n: PartitionMeta().led_by(self._node_uid, ids.new_uid(self._rng)) for n in numbers}
            return replace(record, settings=settings, partitions={**record.partitions, **new})

        versioned = await self._replace(topic, changed)
        self._adopt(versioned)
        led = {partition.number for partition in topic.led}
        if missing := [number for number in versioned.record.partitions if number not in led]:
            await self._grow(topic, missing)

    async def _replace(self, topic: Topic, changed: Callable[[TopicRecord], TopicRecord]) -> Versioned[TopicRecord]:
        """Compare-and-set on what the record is now, tried again when somebody else was faster."""
        name, uid = topic.name, topic.record.uid
        for _ in range(CHANGE_RETRIES):
            known = await self._metadata.read(lambda: self._store.topic(name))
            if known is None or known.record.uid != uid:
                raise NotFound(f"there is no topic {name} any more")
            record = changed(known.record)
            if record == known.record:
                return known
            try:
                return await self._metadata.write(lambda v=known.version, r=record: self._store.replace(name, v, r))  # type: ignore[misc]
            except Conflict:
                continue
        raise Unavailable(f"topic {name} is being changed by too many at once")

    # ---- partitions of a node that is alone

    async def _grow(self, topic: Topic, numbers: list[int]) -> None:
        """Make the logs of partitions that only the record has, and lead them. Unavailable."""
        record = topic.record
        partitions: list[Partition] = []
        try:
            log_uids = {n: record.partitions[n].isr[self._node_uid] for n in numbers}
            for key in [key for n in numbers if self._opener.knows(key := (record.uid, n))]:
                self._opener.forget_partition(key)  # what an earlier attempt left was used by nobody
            logs = await self._disk.run(lambda: self._create(record, log_uids))
            partitions = self._opener.lead(record, logs)
            if not topic.ephemeral:
                await self._journal_writer.promise()
            for started in [partition.start_epoch(record.channels) for partition in partitions]:
                await started
            for partition in partitions:
                for channel in topic.channel_names():
                    if ids.is_ephemeral(channel):
                        partition.cursors.create_ephemeral(channel, ids.new_uid(self._rng))
                await partition.commit_events()
        except (NsqhaError, OSError) as error:
            for partition in partitions:
                await partition.end("the partition could not be made")
            raise Unavailable(
                f"the settings of topic {topic.name} say {len(record.partitions)} partitions now, but {numbers} could "
                f"not be made: {error}; ask for the same again"
            ) from error
        for partition in partitions:
            topic.add_led(partition)
        self._forget_targets()
        log.info("partitions_added", "TOPIC(%s): partitions %s added", topic.name, numbers)

    def _create(self, record: TopicRecord, log_uids: Mapping[int, int]) -> Any:
        """On the disk thread, in empty folders."""
        for number in log_uids:
            while self._opener.remove_partition(record, number):
                pass
        return self._opener.create(record, log_uids)

    # ---- what is led here

    def apply(self, topic: Topic) -> None:
        """What is led here goes by the record's settings from now on."""
        record = topic.record
        for partition in topic.led:
            partition.set_sync(self._opener.sync_of(record))
            partition.trimmer.change(retention=self._opener.retention_of(record), abandoned=abandoned_of(record))


def remarks(settings: TopicSettings, cluster: Cluster | None) -> list[str]:
    """What somebody should know who has just asked for these settings."""
    if cluster is None:
        more = (settings.replicas or 1) > 1 or (settings.min_isr or 1) > 1
        return ["this node is alone: partitions have one replica until the topic is in a cluster"] if more else []
    nodes = able(cluster.nodes())
    hosts = len({host_of(node) for node in nodes.values()})
    wanted = replicas_wanted(settings, nodes)
    said = []
    if wanted > hosts:
        there = f"{hosts} host{'s' if hosts != 1 else ''} that can have them"
        said.append(f"replicas is {wanted}, and there are {there}; the rest is added when nodes come")
    if min_isr_of(settings, wanted) > hosts:
        floor = min_isr_of(settings, wanted)
        said.append(f"min_isr is {floor}: a new partition acknowledges nothing until it has so many replicas")
    return said
