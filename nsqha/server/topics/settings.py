"""Settings of a topic that may change while it lives, and what follows from them.

    change: read the record -> new settings, partitions' records -> compare-and-set -> what is here follows

The record is the intent. What a change means for partitions is written in the same compare-and-set:

    min_isr     the records of the partitions; their leaders go by it when the watch brings it
    replicas    nothing here: the controller moves replicas until each partition has as many; min_isr follows the moves
    partitions  new records, placed; in a cluster the controller elects their leaders, a single node makes their logs
                and begins their epochs. Their epoch starts bring all channels of the topic. Never fewer.

A new partition that could not be made after its record was written is made by the same change asked for again, or by
the next start. Publishers that have nothing under way choose again among all partitions; consumers are attached to
each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nsqha.commitlog.log import wake
from nsqha.election.model import NodeInfo, TopicRecord, TopicSettings, Versioned
from nsqha.election.placement import able, host_of, min_isr_of, replicas_wanted
from nsqha.errors import Conflict, LimitReached, NotFound, too_many_changes
from nsqha.server.opening.opener import abandoned_of
from nsqha.server.runtime.metadata import CHANGE_RETRIES

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.topics.placement import TopicContext

AGAIN_SECONDS = 1.0  # after a full disk refused the journal


def check_number(node: str, has: int, new: int, partitions_max: int) -> None:
    """LimitReached: the node has no place for new partitions. Each costs memory, and time of every start."""
    if new > 0 and 0 < partitions_max < has + new:
        raise LimitReached(
            f"{node} has {has} partitions and would have {has + new}, more than the {partitions_max} that "
            "--max-node-partitions allows: delete topics that are not used, ask for fewer partitions, or raise the flag"
        )


class TopicChanges:
    """Writes changes of settings into records, and has what is led here follow them."""

    def __init__(self, context: TopicContext) -> None:
        self._metadata = context.metadata
        self._records = context.metadata.records
        self._opener = context.opener
        self._journal_writer = context.journal_writer
        self._spawn = context.spawn

    async def replace(self, topic: Topic, changed: Callable[[TopicRecord], TopicRecord]) -> Versioned[TopicRecord]:
        """Compare-and-set on what the record is now, tried again when another change was faster."""
        name, uid = topic.name, topic.record.uid
        for _ in range(CHANGE_RETRIES):
            known = await self._metadata.read(lambda: self._records.topic(name))
            if known is None or known.record.uid != uid:
                raise vanished_topic(name)
            record = changed(known.record)
            if record == known.record:
                return known
            try:
                return await self._metadata.write(lambda v=known.version, r=record: self._records.replace(name, v, r))  # type: ignore[misc]
            except Conflict:
                continue
        raise too_many_changes(f"topic {name}")

    def apply(self, topic: Topic) -> None:
        """What is led here goes by the record's settings from now on."""
        record = topic.record
        for partition in topic.led:
            wake(partition.log)
            self._change_sync(topic, partition)
            partition.retention.change(retention=self._opener.retention_of(record), abandoned=abandoned_of(record))

    def _change_sync(self, topic: Topic, partition: Partition) -> None:
        sync, key = self._opener.sync_of(topic.record), (topic.record.uid, partition.number)
        if sync != partition.batches.sync.setting and self._opener.syncs.changes(key, sync, partition.log):
            self._spawn(self._weaken_sync(topic, partition))
        else:
            partition.batches.sync.change(sync)

    async def _weaken_sync(self, topic: Topic, partition: Partition) -> None:
        """Acknowledge without a disk round once the journal says so: a later start has to know, whatever the setting
        is by then."""
        while not await self._journal_writer.write():
            await asyncio.sleep(AGAIN_SECONDS)
        if partition.serving:
            partition.batches.sync.change(self._opener.sync_of(topic.record))


def vanished_topic(name: str) -> NotFound:
    """The error of a request whose topic was deleted meanwhile."""
    return NotFound(f"there is no topic {name} any more")


def remarks_alone(settings: TopicSettings) -> list[str]:
    """Remarks for an operator who has just asked a single node for these settings."""
    more = (settings.replicas or 1) > 1 or (settings.min_isr or 1) > 1
    return ["this node is alone: partitions have one replica until the topic is in a cluster"] if more else []


def remarks(settings: TopicSettings, alive: Mapping[int, NodeInfo]) -> list[str]:
    """Remarks for an operator who has just asked a cluster with these nodes for these settings."""
    nodes = able(alive)
    hosts = len({host_of(node) for node in nodes.values()})
    wanted = replicas_wanted(settings, nodes)
    said = []
    if wanted > hosts:
        there = f"{hosts} host{'s' if hosts != 1 else ''} that can have them"
        said.append(f"replicas is {wanted}, and there are {there}; the rest is added when nodes come")
    if min_isr_of(settings, wanted) > hosts:
        floor = min_isr_of(settings, wanted)
        said.append(f"min_isr is {floor}: a new partition acknowledges nothing until it has {floor} replicas")
    return said
