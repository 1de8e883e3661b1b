"""The topics of this node: which there are, and how they are made, changed and deleted.

Every change goes the same way: compare-and-set in the metadata store (`Metadata`), then what follows from it in the
partitions that are led here, then the answer. Their channels have a part of their own (`server.topics.channels`), and
so has what a single node does otherwise than one of a cluster (`Placement`). Slow work (metadata writes,
recovery, deletion) runs on the disk thread in order of submission.

Owner of which topics there are; a `Topic` owns what this node does for one of them. Invariants: changes of one topic
come one after the other and read the state again when their turn comes; a change that began runs to its end
(`Changes`); a topic is in this mapping from when it can take messages until its deletion is in the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from contextlib import suppress
from dataclasses import fields as dataclass_fields
from functools import partial
from typing import Any

from nsqha.election.model import Tombstone, TopicRecord, TopicSettings, Versioned
from nsqha.errors import AppendFailed, Conflict, NotFound, Unavailable
from nsqha.ids import is_ephemeral
from nsqha.nsqlog import Logger
from nsqha.server.opening.opener import RECOVERED_AT_ONCE, OpenedLog
from nsqha.server.partition.topic import Topic
from nsqha.server.runtime.tasks import some_at_once
from nsqha.server.topics.deleted_elsewhere import DeletedElsewhere
from nsqha.server.topics.first_channels import FirstChannels
from nsqha.server.topics.placement import Announcer, NoLookupd, Placement, TopicContext
from nsqha.server.topics.settings import TopicChanges, vanished_topic

logger = Logger("topics")


class Topics(Mapping[str, Topic]):
    """All topics of this node, by name; those that are being deleted included."""

    def __init__(self, context: TopicContext, ending: Callable[[], bool]) -> None:
        """`ending`: the node stops or has failed, so there are no new topics."""
        self.announcer: Announcer = NoLookupd()  # hears of topics and channels that come and go
        self.placement: Placement  # set by the broker, as they need each other
        self.settings = TopicChanges(context)
        self.first_channels = FirstChannels(self, context)
        self._context = context
        self._records = context.metadata.records
        self._ending = ending
        self._topics: dict[str, Topic] = {}
        self.deleted_elsewhere = DeletedElsewhere()

    def __getitem__(self, name: str) -> Topic:
        return self._topics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._topics)

    def __len__(self) -> int:
        return len(self._topics)

    def values(self) -> ValuesView[Topic]:
        """All of them; walked once a second, so not one by one through `__getitem__`."""
        return self._topics.values()

    # ---- start

    async def recover(self) -> None:
        """Finish deletions, then recover everything that the metadata names; promises of its epochs are staged."""
        for tombstone in self._records.tombstones().values():
            try:
                await self._context.disk.removed(lambda t=tombstone: self._context.opener.folders.remove(t.name, t.uid))  # type: ignore[misc]
                for number in range(tombstone.partitions):
                    self._context.opener.forget_partition((tombstone.uid, number))
                self._records.forget_tombstone(tombstone.uid)
            except (AppendFailed, OSError) as error:
                files_remain(tombstone.name, error)
        recovered: dict[str, Mapping[int, OpenedLog]] = {}

        async def recover(name: str, record: TopicRecord) -> None:
            settled = await self._context.disk.apart(lambda: self._context.opener.settle(record))
            recovered[name] = await self._context.disk.run(lambda: self._context.opener.recover(record, None, settled))

        found = self._records.topics().items()
        self._context.opener.forget_unnamed({versioned.record.uid for _, versioned in found})
        for _, versioned in found:
            self._context.opener.promise_named(versioned.record)
        await some_at_once((recover(name, versioned.record) for name, versioned in found), RECOVERED_AT_ONCE)
        raised = await self._context.metadata.write(lambda: self._records.raise_epochs(leader=self._context.node_uid))
        for name, versioned in raised.items():
            if name not in recovered:
                continue
            partitions = self._context.opener.lead(versioned.record, recovered[name])
            self._topics[name] = Topic(versioned, partitions, self._context.new_delivery)

    async def start_epochs(self) -> None:
        """The promises are durable: begin the epochs, and bring every log in line with its record."""
        partitions = [p for topic in self._topics.values() for p in topic.led]
        at_once = self._context.opener.folders.open_logs.logs_max  # each opens its files
        for first in range(0, len(partitions), at_once):
            some = partitions[first : first + at_once]
            for start in [partition.start_epoch() for partition in some]:
                await start
            if len(partitions) > at_once:
                for partition in some:
                    await partition.batches.sync.finish()  # only a log that is durable closes its files
        for topic in self._topics.values():
            await topic.reconcile()

    # ---- what the cluster's records say

    def adopt(self, versioned: Versioned[TopicRecord]) -> Topic:
        """A topic of the cluster, or a newer record of one: settings and channels of what is led here follow it."""
        name, record = versioned.record.name, versioned.record
        topic = self._topics.get(name)
        if topic is not None and topic.record.uid == record.uid:
            if versioned.version > topic.versioned.version:
                before = topic.record
                grown = len(record.partitions) > len(before.partitions)
                for channel in record.channels.changed_since(before.channels):
                    if channel not in record.channels.channels and channel not in topic.leaving:
                        self.deleted_elsewhere.add((name, channel))
                topic.versioned = versioned
                self.settings.apply(topic)
                if grown:
                    self._context.forget_targets()
                for partition in topic.led:
                    if partition.serving and partition.cursors.requests.reconcile(record.channels):
                        partition.write_events()
                self.announce(name)
            return topic
        if topic is not None:  # deleted and made again; the tombstone takes care of the old one's files
            self._forget(topic)
        topic = self._topics[name] = Topic(versioned, (), self._context.new_delivery)
        self.announce(name)
        return topic

    def take(self, versioned: Versioned[TopicRecord]) -> Topic:
        """Adopt a record that this node has read or written itself: the watch may be ahead of it. NotFound: it
        has seen the end of that topic, whose deletion here is over, so nothing would delete it again."""
        name, uid = versioned.record.name, versioned.record.uid
        if self.of_uid(name, uid) is None and self.placement.has_seen_end_of(versioned):
            raise vanished_topic(name)
        return self.adopt(versioned)

    async def dropped(self, tombstone: Tombstone) -> None:
        """A topic of the cluster was deleted: everything of it that is here goes."""
        topic = self._topics.get(tombstone.name)
        if topic is not None and topic.record.uid == tombstone.uid:
            await self.vanished(topic)
        numbers = range(tombstone.partitions)
        # Also where the name has a new topic already, whose record took this one's place here.
        await self.placement.drop(tombstone.uid, numbers)
        named = self._context.node_uid in tombstone.nodes  # a journal that was damaged may not know its files any more
        if named or any(self._context.opener.knows((tombstone.uid, number)) for number in numbers):
            await self._context.disk.removed(lambda: self._context.opener.folders.remove(tombstone.name, tombstone.uid))
            for number in numbers:
                self._context.opener.forget_partition((tombstone.uid, number))
        if named:
            await self._context.metadata.write(
                lambda: self._records.forget_tombstone(tombstone.uid, node=self._context.node_uid)
            )

    async def vanished(self, topic: Topic) -> None:
        """The record of the topic is gone. A change under way may wait for a commit, which will not come: it ends."""
        if not topic.deleting:
            self.deleted_elsewhere.add(topic.name)
        topic.deleting = True
        for partition in topic.led:
            partition.abandon("the topic was deleted")
        async with self._context.changes.of(topic.name):
            await self._end(topic)

    async def _end(self, topic: Topic) -> None:
        """End the topic: no client is served from it any more and its logs are closed; the files stay."""
        if self._topics.get(topic.name) is not topic:
            return
        self._forget(topic)
        await self.placement.drop(topic.record.uid, topic.record.partitions)
        for partition in topic.led:
            await partition.end("the topic was deleted")
        logger.info("topic_deleted", "TOPIC(%s): deleted", topic.name)
        self.announce(topic.name)

    def _forget(self, topic: Topic) -> None:
        topic.deleting = True
        del self._topics[topic.name]
        self._context.forget_targets()
        for consumer in topic.consumers.all():
            consumer.dismiss()

    # ---- topics

    def topic(self, name: str) -> Topic:
        found = self._topics.get(name)
        if found is None or found.deleting:
            raise NotFound(f"there is no topic {name}")
        return found

    def registrations(self) -> dict[str, list[str]]:
        """All topics that clients find here, with their channels, for the lookup daemons."""
        return {name: announced(topic) for name, topic in self._topics.items() if topic.led}

    def announce(self, name: str, more: Iterable[str] = ()) -> None:
        """The topic, its channels, or whether a part of it is led here may have changed: the lookup daemons hear.
        `more`: channels that may have come or gone in the logs alone. All of them are looked at when something else is
        led here than before."""
        topic = self._topics.get(name)
        if topic is None or not topic.led:
            self.announcer.changed(name, None)
            return
        channels, led = topic.told
        if channels is not None and led is topic.led:
            changed = {*topic.record.channels.changed_since(channels), *more}
            self.announcer.channels_changed(name, {channel: announces(topic, channel) for channel in changed})
        else:
            self.announcer.changed(name, announced(topic))
        topic.told = topic.record.channels, topic.led

    def of_uid(self, name: str, uid: int) -> Topic | None:
        """The topic, if this life of it is here."""
        found = self._topics.get(name)
        return found if found is not None and found.record.uid == uid and not found.deleting else None

    async def create_topic(self, name: str, settings: TopicSettings | None = None) -> None:
        """Make the topic, and wait until all its partitions are led. Conflict if another request was faster and it has
        other settings than those given here; OutcomeUnknown if a partition has no leader for long."""
        topic = await self.ensure_topic(name, settings)
        if settings is not None:
            has, wanted = topic.record.settings, self.placement.settings_for(name, settings)
            fields = [f.name for f in dataclass_fields(wanted) if f.name != "unknown"]
            if others := {n: value for n in fields if (value := getattr(has, n)) != getattr(wanted, n)}:
                what = ", ".join(f"{n}={'default' if value is None else value}" for n, value in others.items())
                raise Conflict(f"topic {name} was made by another request just now, with {what}")
        await self.placement.led(topic)

    async def topic_for_client(self, name: str) -> Topic:
        """The topic that a PUB or SUB names; made if that is allowed."""
        if not self._context.options.auto_create_topics and name not in self._topics:
            raise Unavailable(f"topic {name} does not exist and --auto-create-topics is off")
        return await self.ensure_topic(name)

    async def ensure_topic(self, name: str, settings: TopicSettings | None = None) -> Topic:
        """The topic, made if it is not there; all who ask at once wait for one creation. OutcomeUnknown: it goes on."""
        while True:
            found = self._topics.get(name)
            if found is not None and not found.deleting:
                return found
            if found is not None:
                async with self._context.changes.of(name):
                    continue  # the deletion has ended
            if self._ending():
                raise Unavailable("exiting")
            default = TopicSettings(partitions=self._context.options.topic_partitions)
            return await self._context.changes.once(name, partial(self.placement.create, name, settings or default))

    def add(self, topic: Topic) -> None:
        """A topic that was made here can take messages from now on."""
        self._topics[topic.name] = topic

    async def delete_topic(self, name: str, *, unless_hidden: bool = False) -> None:
        """Delete a topic. `unless_hidden`: the request may mean this node alone (`Placement.left_instead`)."""
        topic = self.topic(name)
        if unless_hidden and await self.placement.left_instead(topic):
            return
        await self._context.changes.whole(self._delete_topic(name))

    async def _delete_topic(self, name: str) -> None:
        async with self._context.changes.of(name):
            topic = self.topic(name)
            with suppress(NotFound):  # another node was faster, and the watch has not shown it yet
                await self.bury(topic)

    async def bury(self, topic: Topic) -> None:
        """Delete a topic whose lock is held."""
        name, record = topic.name, topic.record
        topic.deleting = True
        self._context.forget_targets()
        try:
            await self._context.metadata.write(lambda: self._records.delete_topic(name))
        except BaseException:
            topic.deleting = False
            raise
        # It is gone; whatever fails from here on is work for the next start, and hinders nothing.
        await self._end(topic)
        await self.placement.remove_files(record)

    async def change_settings(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change settings that may change while a topic lives (`settings`). ValueError if they do not fit."""
        self.topic(name)

        async def change() -> None:
            async with self._context.changes.of(name):
                await self.placement.change(self.topic(name), changes)

        await self._context.changes.whole(change())


def announced(topic: Topic) -> list[str]:
    """The channels that lookup daemons hear of."""
    return [name for name in topic.channel_names() if announces(topic, name)]


def partitions_here(topics: Topics, name: str) -> int:
    """How many partitions a topic has, if all of them are led here; else 0."""
    topic = topics.get(name)
    return len(topic.led) if topic is not None and len(topic.led) == len(topic.record.partitions) else 0


def announces(topic: Topic, channel: str) -> bool:
    """Whether they hear of this one: it is there and stays, and is no reader's. A node that makes a channel from there
    makes it for consumers."""
    listed = topic.record.channels.channels.get(channel)
    if listed is None:  # another node may have deleted it, and the logs do not say so yet
        return is_ephemeral(channel) and topic.has_channel(channel)
    return not listed.reader


def files_remain(topic: str, error: Exception) -> None:
    """Files of a deleted topic could not be removed: the next start does it, or the next look of a cluster's node."""
    logger.warning("files_remain", "files of the deleted topic %s are removed later: %s", topic, error)
