"""What a node can report of itself when its metadata store was put back to an older state.

    metadata.seen       the metadata that the node had seen when it stopped to trust them: settings are in no log
    RecoveredInventory  its logs, recovered and closed again, and what they say of topics that nothing else describes

A node that still leads and follows reports the same from its status (`StaleMetadataMonitor`).

`RecoveredInventory` recovers as if every partition had other replicas, whatever the metadata say of it now: nothing is
guessed, and nothing is given up that another replica may have. The result of the recovery stays in the journal, so that
another recovery, when the metadata are accepted, finds the same: the plan identifies a log by the reported name and
end. A damaged log is therefore reported by the name that it has once it is repaired, and no part of it is ever treated
as a torn end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from nsqha import ids
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.storage import OsStorage
from nsqha.election.codec import decode, encode, from_plain, to_plain
from nsqha.election.metadata_restore import Known
from nsqha.election.model import ChannelList, PartitionMeta, TopicRecord, TopicSettings, Versioned
from nsqha.election.session import View
from nsqha.errors import ConfigError, LogCorrupt
from nsqha.nsqlog import Logger
from nsqha.pb.v1 import replication_pb2 as pb
from nsqha.server.integrity.suspect_logs import can_be_whole, good_name
from nsqha.server.opening.opener import OpenedLog, PartitionOpener
from nsqha.server.safe_mode.rebuilding import channels_of, salt_of

SEEN = "metadata.seen"
_FORMAT = 1
_FOLDER = re.compile(r"(?P<name>.+)-(?P<uid>[0-9a-f]{16})")

logger = Logger("safe_mode")


# ---- what was seen of the metadata


@dataclass(frozen=True)
class Seen:
    """All topics that were seen at one revision; revision 0: nothing was seen."""

    revision: int = 0
    topics: tuple[Known, ...] = ()


def seen_of(view: View) -> Seen:
    """What the watch has delivered, without ephemeral topics."""
    topics = [topic for topic in view.topics.values() if not ids.is_ephemeral(topic.record.name)]
    return Seen(view.revision, tuple(Known(topic.record, topic.version) for topic in topics))


def write_seen(folder: str, seen: Seen) -> None:
    """Write the file durably and atomically. OSError."""
    topics = [{"version": topic.version, "record": to_plain(topic.record)} for topic in seen.topics]
    data = msgspec.json.encode({"format": _FORMAT, "revision": seen.revision, "topics": topics})
    path = f"{folder}/{SEEN}"
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    OsStorage().sync_dir(folder)


def read_seen(folder: str) -> Seen:
    """Read the file; an empty `Seen` if there is none or it cannot be read: the logs contain less, but enough."""
    path = f"{folder}/{SEEN}"
    try:
        with open(path, "rb") as file:
            plain = msgspec.json.decode(file.read(), type=_SeenFormat)
        if plain.format > _FORMAT:
            raise ConfigError(f"format {plain.format}")
        topics = tuple(Known(from_plain(TopicRecord, topic.record), topic.version) for topic in plain.topics)
    except FileNotFoundError:
        return Seen()
    except (OSError, msgspec.MsgspecError, LogCorrupt, ConfigError) as error:
        logger.warning("seen_unreadable", "%s cannot be read and is ignored: %s", path, error)
        return Seen()
    return Seen(plain.revision, topics)


def forget_seen(folder: str) -> None:
    """Remove the file when the metadata are trusted again; durably, or a later doubt would use outdated metadata."""
    try:
        os.unlink(f"{folder}/{SEEN}")
    except FileNotFoundError:
        return
    OsStorage().sync_dir(folder)


class _SeenTopic(msgspec.Struct):
    version: int
    record: dict[str, object]


class _SeenFormat(msgspec.Struct):
    format: int
    revision: int
    topics: list[_SeenTopic]


# ---- what the logs say


@dataclass
class RecoveredInventory:
    """The replicas and topics of a node that leads and follows nothing."""

    replicas: list[pb.ReplicaStatus] = field(default_factory=list)
    topics: list[Known] = field(default_factory=list)  # that `Seen` does not have

    @classmethod
    def recovered(
        cls,
        data_path: str,
        opener: PartitionOpener,
        journal: NodeJournal,
        seen: Seen,
        stored: Mapping[str, Versioned[TopicRecord]],
    ) -> RecoveredInventory:
        """Recover every log of the data folder. Blocks. `stored`: the current metadata, for settings only."""
        held = cls()
        records = {topic.record.uid: topic.record for topic in stored.values()}
        records |= {topic.record.uid: topic.record for topic in seen.topics}
        described = {topic.record.uid for topic in seen.topics}
        for name, uid, numbers in folders(data_path):
            record = _with_others(records.get(uid) or _bare(name, uid), numbers, journal.identity.node_uid)
            opened = dict(held._recover(opener, journal, record, numbers))
            try:
                if uid not in described:
                    held.topics.append(Known(_from_logs(record, opened)))
            finally:
                for found in opened.values():
                    found.log.close()
        journal.node.clear_poison()  # every log was read from the disk and verified
        journal.commit()
        return held

    def _recover(
        self, opener: PartitionOpener, journal: NodeJournal, record: TopicRecord, numbers: Iterable[int]
    ) -> Iterator[tuple[int, OpenedLog]]:
        for number in numbers:
            key = (record.uid, number)
            known = journal.record(key)
            status = pb.ReplicaStatus(
                key=pb.PartitionKey(topic_uid=record.uid, partition=number),
                role=pb.ROLE_NONE,
                promise=0 if known is None else known.promise,
            )
            self.replicas.append(status)
            try:
                opened = opener.recover(record, [number])[number]
            except LogCorrupt as error:
                logger.error("replica_unusable", "%s/%d: %s", record.name, number, error)
                status.log_uid = 0 if known is None else known.log_uid
                status.corrupt = True
                continue
            end, report, goes_by = opened.log.end.log_id, opened.report, opened.log_uid
            damaged = report is not None and report.serve_end is not None
            sync = record.partitions[number].sync or opener.sync_of(record)
            if report is not None and damaged and can_be_whole(opened.log, report):
                goes_by = good_name(journal, key, sync) or goes_by
            if known is None or known.promise_trusted or goes_by != known.log_uid:
                # Also a promise that may be lost: the plan uses an epoch above all that any node reports.
                opener.stage_promise(key, status.promise, opened.log, goes_by, sync)
            if damaged and known is not None and (now := journal.record(key)) is not None:
                # As before, under whichever name: a lower value would read more, and cut it; with a higher one the
                # frames above the old value would not be verified.
                journal.stage(key, local_durable=max(now.local_durable, min(known.local_durable, end)))
            last = opened.log.entry_before(end)
            status.log_uid = goes_by
            status.end, status.last_epoch, status.chain = end, last.epoch, last.chain
            status.durable = min(opened.log.local_durable, end)
            status.start = opened.log.start.log_id
            status.cut = report is not None and any(cut.why == "torn" for cut in report.cuts)
            status.corrupt = damaged
            yield number, opened


def folders(data_path: str) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (topic, uid, partitions) of each topic that has logs here."""
    root = f"{data_path}/topics"
    for folder in sorted(os.listdir(root)) if os.path.isdir(root) else ():
        match = _FOLDER.fullmatch(folder)
        if match is not None and ids.valid_name(match["name"]):
            numbers = sorted(int(name) for name in os.listdir(f"{root}/{folder}") if name.isdigit())
            if numbers:
                yield match["name"], int(match["uid"], 16), numbers


def _bare(name: str, uid: int) -> TopicRecord:
    return TopicRecord(name, uid, 0)


def _with_others(record: TopicRecord, numbers: Iterable[int], node: int) -> TopicRecord:
    """The same topic, with an unnamed other replica (0) in each partition."""
    others = {number: record.partitions.get(number, PartitionMeta()) for number in numbers}
    return replace(
        record, partitions={n: replace(meta, replicas=(*meta.replicas, node, 0)) for n, meta in others.items()}
    )


def _from_logs(record: TopicRecord, opened: dict[int, OpenedLog]) -> TopicRecord:
    """What the logs say of a topic: its salt and its channels, not its settings and replicas."""
    states = [found.state for found in opened.values() if found.state is not None]
    channels = ChannelList()
    if states:
        newest = max(states, key=lambda state: state.version)
        channels = replace(channels_of(newest), version=newest.version)
    return TopicRecord(
        record.name, record.uid, record.salt or salt_of(opened), TopicSettings(), channels, partitions={}
    )


# ---- the answer


def reply(
    status: pb.StatusReply,
    name: str,
    *,
    held: bool,
    generation: int,
    view_revision: int = 0,
    topics: Iterable[Known] = (),
) -> pb.EvidenceReply:
    """The answer to an Evidence call."""
    answer = pb.EvidenceReply(status=status, name=name, held=held, generation=generation, view_revision=view_revision)
    for topic in topics:
        answer.topics.add(record=encode(topic.record), version=topic.version)
    return answer


def known_of(topic: pb.KnownTopic) -> Known:
    """Decode one topic of a `reply`. LogCorrupt, ConfigError."""
    return Known(decode(TopicRecord, topic.record), topic.version)
