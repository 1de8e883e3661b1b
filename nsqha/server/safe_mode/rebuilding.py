"""Rebuilds the metadata of a single node from its logs, for a data folder whose metadata file is gone.

The folder name has topic and uid, a message id the salt, channel events the channels. The topic's settings are not in
the logs: they get their defaults, which is logged. A topic that was being deleted when the metadata file was lost may
come back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nsqha import ids
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.storage import Storage
from nsqha.cursor.committed.state import PartitionState
from nsqha.election.model import ChannelInfo, ChannelList, PartitionMeta, TopicRecord, TopicSettings
from nsqha.nsqlog import Logger
from nsqha.server.opening.opener import OpenedLog, PartitionOpener

_FOLDER = re.compile(r"(?P<name>.+)-(?P<uid>[0-9a-f]{16})")

logger = Logger("rebuilding")


def records(storage: Storage, opener: PartitionOpener, journal: NodeJournal, data_path: str) -> Iterator[TopicRecord]:
    """The record of each topic that has a folder. Blocks: it recovers every log to read it."""
    root = f"{data_path}/topics"
    for folder in storage.list_dir(root) if storage.exists(root) else ():
        match = _FOLDER.fullmatch(folder)
        if match is None or not ids.valid_name(match["name"]):
            logger.warning("stray_folder", "%s/%s is not a topic's folder and is ignored", root, folder)
            continue
        numbers = sorted(int(name) for name in storage.list_dir(f"{root}/{folder}") if name.isdigit())
        if not numbers or numbers != list(range(len(numbers))):
            logger.error(
                "partitions_missing", "%s/%s is ignored: it needs partitions 0 to n, it has %s", root, folder, numbers
            )
            continue
        yield _record(opener, journal, match["name"], int(match["uid"], 16), len(numbers))


def _record(opener: PartitionOpener, journal: NodeJournal, name: str, uid: int, partitions: int) -> TopicRecord:
    settings = TopicSettings(partitions=partitions)
    bare = TopicRecord(name, uid, 0, settings, partitions={n: PartitionMeta() for n in range(partitions)})
    opened = opener.recover(bare)
    try:
        states = [found.state for found in opened.values() if found.state is not None]
        newest = max(states, key=lambda state: state.version)
        metas = {}
        for number, found in opened.items():
            promised = journal.record((uid, number))
            last = found.log.last
            epoch = max(promised.promise if promised else 0, last.epoch if last else 0) + 1
            metas[number] = PartitionMeta(epoch=epoch).led_by(journal.identity.node_uid, found.log_uid)
        logger.warning(
            "topic_rebuilt",
            "topic %s was rebuilt from its log; its settings have their default values, its channels no policies",
            name,
        )
        return TopicRecord(name, uid, salt_of(opened), settings, channels_of(newest), metas)
    finally:
        for found in opened.values():
            found.log.close()


def channels_of(state: PartitionState) -> ChannelList:
    """The channel list in a log's state, with a version above the log's."""
    channels = {c.name: ChannelInfo(c.uid, c.paused, c.reader) for c in state.channels.values() if not c.ephemeral}
    return ChannelList(state.version, state.paused, channels).above(state.version)


def salt_of(opened: dict[int, OpenedLog]) -> int:
    """The salt in the ids of the topic's messages; 0 without messages, as then nothing can collide."""
    for number, found in opened.items():
        message = _first_message(found.log)
        if message is not None:
            wire, offset = message
            return (wire - offset - (number << ids.PARTITION_SHIFT)) >> ids.SALT_SHIFT
    return 0


def _first_message(log: PartitionLog) -> tuple[int, int] | None:
    """(number in the wire id, offset) of the oldest message; None without messages."""
    batch = log.batch_at(log.start.offset) if log.start.offset < log.end.offset else None
    if batch is None:
        return None
    position = batch.locate(log.start.offset)
    number = ids.parse_message_id(bytes(batch.data[position + 18 : position + 34]))
    assert number is not None, "a stored message has no id"
    return number, log.start.offset
