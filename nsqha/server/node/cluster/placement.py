"""Topics of a cluster as one of its nodes makes and changes them: records with replicas on several nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.election.model import TRIED_SECONDS, ChannelList, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.moves import is_hidden
from nsqha.election.placement import (
    CountedLoad,
    able,
    min_isr_of,
    place,
    refuse_too_many_replicas,
    replicas_wanted,
    staying,
)
from nsqha.election.rules import with_settings
from nsqha.errors import Conflict, LimitReached, OutcomeUnknown, Unavailable, too_many_changes
from nsqha.nsqlog import Logger
from nsqha.server.runtime.metadata import CHANGE_RETRIES
from nsqha.server.topics import settings as topic_settings

if TYPE_CHECKING:
    from nsqha.clock import Clock
    from nsqha.server.node.cluster.membership import Membership
    from nsqha.server.partition.topic import Topic
    from nsqha.server.topics.placement import TopicContext
    from nsqha.server.topics.topics import Topics

BEGUN_POLL_SECONDS = 0.005
LED_SECONDS = 10.0  # that an explicit creation waits for the leaders of all partitions

logger = Logger("topics")


class ClusterPlacement:
    """A `Placement`: nodes are chosen here, the controller elects their leaders."""

    def __init__(self, topics: Topics, context: TopicContext, cluster: Membership, clock: Clock) -> None:
        self._topics = topics
        self._cluster = cluster
        self._clock = clock
        self._node = cluster.node
        self._context = context
        self._records = context.metadata.records
        self._load = CountedLoad()

    def settings_for(self, name: str, settings: TopicSettings) -> TopicSettings:
        if ids.is_ephemeral(name):  # kept by this node only, and nowhere on a disk
            return replace(settings, partitions=1, replicas=1, min_isr=None)
        if settings.replicas is None and self._context.options.topic_replicas:
            return replace(settings, replicas=self._context.options.topic_replicas)
        return settings

    async def create(self, name: str, settings: TopicSettings) -> Topic:
        """A topic of the cluster; its first partition is led by this node, the controller elects the other leaders."""
        alone = ids.is_ephemeral(name)
        refuse_too_many_replicas(settings, self._cluster.view().topics, [self._node, *self._cluster.nodes()])
        settings = self.settings_for(name, settings)
        async with self._context.changes.of(name):
            await self._connections_tried()
            # In its first record: a leader of a partition may take messages as soon as that is stored.
            channels = ChannelList()
            for channel in await self._topics.announcer.known_channels(name):
                channels = channels.with_channel(channel, ids.new_uid(self._context.rng))
            topic = await self._created(name, settings, channels, alone=alone)
        await _begun(topic, self._context.options.publish_wait_ns / 1e9)
        return topic

    async def _connections_tried(self) -> None:
        """Wait for nodes that have just registered, this one included: in a cluster that starts, all of them will have
        joined in a moment, and a topic would get fewer replicas than there are nodes."""
        cluster, loop = self._cluster, asyncio.get_running_loop()
        deadline = loop.time() + TRIED_SECONDS
        while loop.time() < deadline:
            me = cluster.registration.info
            others = [info for uid, info in cluster.nodes().items() if uid != self._node]
            if not any(info.just_registered for info in (*others, me) if info is not None):
                return
            await asyncio.sleep(BEGUN_POLL_SECONDS)

    async def _created(self, name: str, settings: TopicSettings, channels: ChannelList, *, alone: bool) -> Topic:
        """Write the topic's first record, or find the one that another node was faster with."""
        cluster = self._cluster
        log_uid = cluster.replicas.logs.draw_log_uid()
        try:
            metas = self.placed(settings, {0: log_uid}, alone=alone)
            with cluster.news.being_made(name):  # until here: the settling below has its turn before the watch's
                versioned = await self._context.metadata.write(
                    lambda: self._records.create_topic(name, settings, partitions=metas, channels=channels)
                )
        except Conflict:
            cluster.replicas.logs.forget_log_uid(log_uid)
            found = await self._context.metadata.read(lambda: self._records.topic(name))
            if found is None or self.has_seen_end_of(found):
                raise Unavailable(f"topic {name} comes and goes") from None
            return self._topics.adopt(found)
        except (Unavailable, LimitReached):  # certainly not made: clients may ask for it again and again
            cluster.replicas.logs.forget_log_uid(log_uid)
            raise
        if not metas[0].leader:
            cluster.replicas.logs.forget_log_uid(log_uid)
        topic = self._topics.take(versioned)
        await cluster.replicas.settle(versioned, written=True)
        logger.info("topic_created", "TOPIC(%s): created", name)
        return topic

    async def led(self, topic: Topic) -> None:
        leaders, changed = self._cluster.leaders, asyncio.Event()
        end = leaders.when_changed(lambda name: changed.set() if name == topic.name else None)
        try:
            async with asyncio.timeout(LED_SECONDS):
                while self._without_leader(topic):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            without = ", ".join(map(str, self._without_leader(topic)))
            raise OutcomeUnknown(
                f"topic {topic.name} is there, but after {LED_SECONDS:.0f} s these partitions have no leader: "
                f"{without}; they get one as soon as enough of their replicas answer (nsqha cluster status shows it)"
            ) from None
        finally:
            end()

    def _without_leader(self, topic: Topic) -> list[int]:
        if topic.deleting:
            return []
        numbers = sorted(topic.record.partitions)
        return [number for number in numbers if self._cluster.leaders.recorded(topic.name, number) is None]

    async def change(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        cluster = self._cluster

        def changed(record: TopicRecord) -> TopicRecord:
            found, first = with_settings(record, changes), len(record.partitions)
            new = self.placed(found.settings, {}, first=first) if found.settings.partitions > first else {}
            return replace(found, partitions={**found.partitions, **new})

        versioned = await self._topics.settings.replace(topic, changed)
        self._topics.take(versioned)
        await cluster.replicas.settle(versioned)

    def placed(
        self, settings: TopicSettings, log_uids: Mapping[int, int], *, alone: bool = False, first: int = 0
    ) -> dict[int, PartitionMeta]:
        """New partitions from `first` on: those in `log_uids` led by this node, others by the one that the controller
        elects. A node that has not joined leads none of them, and gets no replica. `alone`: an #ephemeral topic, which
        no other node has a copy of. Unavailable: no node has joined."""
        cluster, me = self._cluster, self._cluster.registration.info
        registration = cluster.replicas.registration
        nodes = {} if alone else able(cluster.nodes())
        if me is None or not registration or (alone and me.joining):
            raise Unavailable("this node is only just joining the cluster")
        if me.joining:
            nodes.pop(self._node, None)
            log_uids = {}
        elif log_uids:
            nodes.setdefault(self._node, me)
        if not nodes:
            raise Unavailable(f"no node can take replicas now; this one is joining: {me.joining}")
        load = self._load.of(cluster.view().topics)
        wanted, before = replicas_wanted(settings, nodes), load.replicas.copy()
        mine = place(sorted(log_uids), wanted, nodes, load, prefer=self._node)
        others = place([n for n in range(first, settings.partitions) if n not in log_uids], wanted, nodes, load)
        for node, count in load.replicas.items():
            new, bound = count - before[node], self._context.options.max_node_partitions
            topic_settings.check_number(f"node {node:016x}", before[node], new, bound)
        metas = {}
        for number, replicas in {**mine, **others}.items():
            meta = PartitionMeta(replicas=replicas, min_isr=min_isr_of(settings, len(replicas)))
            if number in log_uids:
                isr = {self._node: log_uids[number]}
                meta = replace(meta, leader=self._node, isr=isr, registration=registration, nothing_acked=True)
            metas[number] = meta
        return metas

    async def left_instead(self, topic: Topic) -> bool:
        """nsqadmin's cross at a node: a tombstone at the lookup daemons, then /topic/delete at that node."""
        intents = await self._context.metadata.read(self._cluster.store.intents.all)
        if not is_hidden(intents, topic.record.uid, self._node, self._clock.wall_ns()):
            return False
        for number in topic.record.partitions:
            await self._give_lead_away(topic, number)
        text = "TOPIC(%s): kept: a lookup daemon hides this node for it, so its deletion here means this node alone"
        logger.info("topic_left", text, topic.name)
        return True

    async def _give_lead_away(self, topic: Topic, number: int) -> None:
        """Have the next replica lead, if this node does, and let it stay the preferred one."""
        name, uid = topic.name, topic.record.uid
        for _ in range(CHANGE_RETRIES):
            found = await self._context.metadata.read(lambda: self._records.topic(name))
            if found is None or found.record.uid != uid:
                raise topic_settings.vanished_topic(name)
            meta = found.record.partitions[number]
            if meta.leader != self._node or meta.successor:
                return
            nodes = staying(self._cluster.nodes())
            heirs = [node for node in meta.replicas if node != self._node and node in meta.isr and node in nodes]
            if not heirs:
                raise Conflict(
                    f"topic {name} was not deleted, as a lookup daemon hides this node for it; but this node has the "
                    f"only replica of partition {number} that is in sync, so it goes on leading it"
                )
            replicas = (heirs[0], *(node for node in meta.replicas if node not in (heirs[0], self._node)), self._node)
            changed = replace(meta, replicas=replicas, successor=heirs[0])
            with suppress(Conflict):
                await self._context.metadata.write(partial(self._records.replace_partition, name, uid, number, changed))
                return
        raise too_many_changes(f"topic {name}")

    def has_seen_end_of(self, topic: Versioned[TopicRecord]) -> bool:
        view = self._cluster.view()
        now = view.topics.get(topic.record.name)
        return view.revision >= topic.version and (now is None or now.record.uid != topic.record.uid)

    async def drop(self, uid: int, numbers: Collection[int]) -> None:
        await self._cluster.replicas.removal.drop(uid, numbers)

    async def remove_files(self, record: TopicRecord) -> None:
        """Nothing before the watch has shown this node the tombstone (`Topics.dropped`): an older view that comes first
        makes the logs again, and then nothing else would name them."""

    def remarks(self, settings: TopicSettings) -> list[str]:
        return topic_settings.remarks(settings, self._cluster.nodes())


async def _begun(topic: Topic, seconds: float) -> None:
    """Wait until what is led here serves, but no longer than that: its epochs begin when enough replicas are in."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not all(p.serving or p.closed for p in topic.led) and not topic.deleting and loop.time() < deadline:
        await asyncio.sleep(BEGUN_POLL_SECONDS)
