"""Topics of a single node: it leads every partition, makes their logs and removes them.

A topic that could not be made is deleted again; while that does not succeed either, the next attempt begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nsqha import ids
from nsqha.election.model import ChannelList, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.rules import changed_settings
from nsqha.errors import NsqhaError, Poisoned, StorageError, Unavailable
from nsqha.nsqlog import Logger
from nsqha.server.opening.opener import OpenedLog
from nsqha.server.partition.file_jobs import descriptors
from nsqha.server.partition.log_sync import BEHIND_SECONDS
from nsqha.server.partition.topic import Topic
from nsqha.server.topics.settings import check_number, remarks_alone
from nsqha.server.topics.topics import files_remain

if TYPE_CHECKING:
    from nsqha.server.partition.partition import Partition
    from nsqha.server.topics.placement import TopicContext
    from nsqha.server.topics.topics import Topics

logger = Logger("topics")
settings_logger = Logger("settings")


class SingleNodePlacement:
    """The `Placement` of a single node: every partition is here."""

    def __init__(self, topics: Topics, context: TopicContext) -> None:
        self._topics = topics
        self._context = context
        self._records = context.metadata.records
        self._half_made: dict[str, TopicRecord] = {}  # in the metadata, but could not be made: no client ever used them
        self._making = 0  # partitions of topics that are being made
        self._at_most: int | None = None  # no more partitions than this are here or being made; None: not counted yet

    def settings_for(self, name: str, settings: TopicSettings) -> TopicSettings:
        return settings

    async def left_instead(self, topic: Topic) -> bool:
        return False  # as nsqd: what is deleted here is this node's alone

    def has_seen_end_of(self, topic: Versioned[TopicRecord]) -> bool:
        return False

    async def drop(self, uid: int, numbers: Collection[int]) -> None:
        """Nothing is led or followed but what the `Topic` itself has."""

    def remarks(self, settings: TopicSettings) -> list[str]:
        return remarks_alone(settings)

    async def led(self, topic: Topic) -> None:
        """This node leads them all; only the channels may still be on their way."""
        await self._topics.first_channels.finish(topic)

    async def create(self, name: str, settings: TopicSettings) -> Topic:
        with self._room(settings.partitions):
            return await self._make(name, settings)

    @contextmanager
    def _room(self, new: int) -> Iterator[None]:
        bound = self._context.options.max_node_partitions
        if self._at_most is None or 0 < bound < self._at_most + new:  # else a new topic would cost what there are
            self._at_most = self._making + sum(len(topic.record.partitions) for topic in self._topics.values())
        check_number("this node", self._at_most, new, bound)
        self._making += new
        self._at_most += new
        try:
            yield
        finally:
            self._making -= new

    async def _make(self, name: str, settings: TopicSettings) -> Topic:
        first = self._topics.first_channels
        async with self._context.changes.of(name):
            await self._bury_half_made(name)
            channels = ChannelList(unasked=first.ask_later(name))
            if not channels.unasked:  # in the first record: one write, however many there are
                for channel in await self._topics.announcer.known_channels(name):
                    channels = channels.with_channel(channel, ids.new_uid(self._context.rng))
            versioned, logs = await self._stored(name, settings, channels)
            record = versioned.record
            partitions: list[Partition] = []
            try:
                if isinstance(logs, Exception):
                    raise logs
                partitions = self._context.opener.lead(record, logs)
                topic = Topic(versioned, partitions, self._context.new_delivery)
                for started in [partition.start_epoch(record.channels, new=True) for partition in partitions]:
                    await started
            except (NsqhaError, OSError) as error:
                self._half_made[name] = record
                for partition in partitions:
                    await partition.end("the topic could not be made")
                with suppress(NsqhaError):
                    await self._bury_half_made(name)
                raise Unavailable(f"topic {name} could not be made: {error}") from error
            self._topics.add(topic)
            logger.info("topic_created", "TOPIC(%s): created", name)
        # Behind the OK of its first PUB, as nsqd does: the task of each daemon would run before it.
        self._context.disk.later(BEHIND_SECONDS, lambda: self._topics.announce(name))
        first.begin(topic)
        return topic

    async def _stored(
        self, name: str, settings: TopicSettings, channels: ChannelList
    ) -> tuple[Versioned[TopicRecord], Mapping[int, OpenedLog] | Exception]:
        """The record of a new topic and the promises of its epochs, durable, both in the time of one disk round; and
        its logs, or why they could not be made.

        The record says who leads which log in which epoch, so a start promises by it what the journal had not come to
        (`PartitionOpener.promise_named`). It does not say that publishers wait for syncs: with sync=always the journal
        has to, beside the record; a start forgets a promise that no record names (`Topics.recover`). The files wait for
        the record, or a process that dies here would leave some that nobody knows of; they are durable with their first
        entries, as the journal knows of nothing in them until then. No record: nothing was stored."""
        on_disk = not ids.is_ephemeral(name)
        if on_disk:
            await descriptors(self._context.opener.folders.open_logs)
        uid, log_uids = ids.new_uid(self._context.rng), self._drawn(settings.partitions)
        metas = {n: PartitionMeta().led_by(self._context.node_uid, log_uid) for n, log_uid in log_uids.items()}

        def make() -> tuple[Versioned[TopicRecord], Mapping[int, OpenedLog] | Exception]:
            made = self._records.create_topic(name, settings, partitions=metas, channels=channels, uid=uid)
            try:
                return made, self._context.opener.create(made.record, log_uids, at_once=False)
            except Poisoned:
                raise
            except (NsqhaError, OSError) as error:
                return made, error

        opener, promise = self._context.opener, None
        if on_disk and (settings.sync or self._context.options.sync) == "always":
            opener.promise_new(uid, metas)
            promise = self._context.journal_writer.promising()
        try:
            made, logs = await self._context.metadata.write(make)
        except BaseException:
            for number in log_uids:
                opener.forget_partition((uid, number))
            raise
        if on_disk and isinstance(logs, Mapping):
            opener.share(logs)
        if promise is not None:
            try:
                await promise.outcome()
            except NsqhaError as error:
                return made, error
        elif on_disk:  # staged by `lead`, before the loop's next turn
            self._context.disk.later(BEHIND_SECONDS, self._journal_promises)
        return made, logs

    def _journal_promises(self) -> None:
        async def write() -> None:
            await self._context.journal_writer.write()  # what a full disk refuses is written a second later

        self._context.spawn(write())

    def _drawn(self, partitions: int) -> dict[int, int]:
        return {number: ids.new_uid(self._context.rng) for number in range(partitions)}

    async def _bury_half_made(self, name: str) -> None:
        record = self._half_made.get(name)
        if record is not None:
            await self._context.metadata.write(lambda: self._records.delete_topic(name))
            del self._half_made[name]
            await self.remove_files(record)

    async def remove_files(self, record: TopicRecord) -> None:
        """What cannot be removed now is removed at the next start, by its tombstone."""
        try:
            if not ids.is_ephemeral(record.name):
                await self._context.disk.removed(lambda: self._context.opener.folders.remove(record.name, record.uid))
            self._context.opener.forget(
                record
            )  # only now: a later look at the tombstone asks whether there is anything
            await self._context.metadata.write(lambda: self._records.forget_tombstone(record.uid))
        except (StorageError, OSError) as error:
            files_remain(record.name, error)

    # ---- changed settings

    async def change(self, topic: Topic, changes: Mapping[str, Any]) -> None:
        def changed(record: TopicRecord) -> TopicRecord:
            settings = changed_settings(record, changes)
            numbers = range(len(record.partitions), settings.partitions)
            with self._room(len(numbers)):
                pass  # the record takes them
            new = {n: PartitionMeta().led_by(self._context.node_uid, ids.new_uid(self._context.rng)) for n in numbers}
            return replace(record, settings=settings, partitions={**record.partitions, **new})

        versioned = await self._topics.settings.replace(topic, changed)
        self._topics.take(versioned)
        led = {partition.number for partition in topic.led}
        if missing := [number for number in versioned.record.partitions if number not in led]:
            await self._grow(topic, missing)

    async def _grow(self, topic: Topic, numbers: list[int]) -> None:
        """Make the logs of partitions that only the record has, and lead them. Unavailable."""
        record = topic.record
        partitions: list[Partition] = []
        try:
            log_uids = {n: record.partitions[n].isr[self._context.node_uid] for n in numbers}
            for key in [key for n in numbers if self._context.opener.knows(key := (record.uid, n))]:
                self._context.opener.forget_partition(key)  # what an earlier attempt left was never used
            logs = await self._context.disk.run(lambda: self._create(record, log_uids))
            partitions = self._context.opener.lead(record, logs)
            if not topic.ephemeral:
                await self._context.journal_writer.promise()
            for started in [partition.start_epoch(record.channels) for partition in partitions]:
                await started
            for partition in partitions:
                for channel in topic.channel_names():
                    if ids.is_ephemeral(channel):
                        partition.cursors.requests.create_ephemeral(channel, ids.new_uid(self._context.rng))
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
        self._context.forget_targets()
        settings_logger.info("partitions_added", "TOPIC(%s): partitions %s added", topic.name, numbers)

    # ---- a wrong channel state

    def rebuild_state(self, name: str, partition: Partition) -> None:
        """The channel state of a partition does not fit its log: make it anew, and lead on with it."""
        self._context.spawn(self._rebuild_state(name, partition))

    async def _rebuild_state(self, name: str, partition: Partition) -> None:
        opener, number, why = self._context.opener, partition.number, "its channel state is rebuilt"
        async with self._context.changes.of(name):
            topic = self._topics.get(name)
            if topic is None or topic.leads(number) is not partition:
                return
            record, meta, key = topic.record, topic.record.partitions[number], (topic.record.uid, number)
            topic.remove_led(partition, why)
            self._context.forget_targets()
            await partition.release(why)
            opener.measures.log_events["state_diverged"] += 1
            # The cache goes over to the new state; what it has of the old one is deleted by the next start.
            try:
                state = await self._context.disk.run(lambda: opener.rebuilt_state(key, partition.log))
            except Exception as error:  # too many open files, or a bug: nothing else leads this partition
                text = "%s: the channel state is not rebuilt"
                logger.error("state_unknown", text, partition.log.directory, error=error)
                state = None
            if state is None:  # lead on: channels that can be read are read, and the others say what they lack
                state = partition.cursors.state
                state.rebuilt = state.applied.log_id
            opened = OpenedLog(partition.log, meta.isr[self._context.node_uid], state, None)
            successor = opener.partition(record, number, meta, opened)
            started = successor.start_epoch(record.channels)
            topic.add_led(successor)
            await started
            self._context.forget_targets()

    def _create(self, record: TopicRecord, log_uids: Mapping[int, int]) -> Any:
        """On the disk thread, in empty folders."""
        for number in log_uids:
            while self._context.opener.folders.remove_partition(record, number):
                pass
        return self._context.opener.create(record, log_uids)
