"""What replicas have in their files, when nobody runs any more: the same bytes, and which messages these are.

`entries_of` and `compare` prove the committed logs equal byte for byte; `stored` makes events of them, so that the
checkers compare what the files have with what was OK'd and with what came out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from nsqha.cli.log import Folder, folders
from nsqha.commitlog.reading.dump import dump
from nsqha.commitlog.reading.lookup import LogIdentity, LogReader
from nsqha.commitlog.storage import OsStorage
from nsqha.errors import NotFound
from tests.jepsen import history
from tests.jepsen.history import Message, Stored

AT_ONCE = 1000  # messages in one event


def open_log(folder: Folder) -> LogReader:
    return LogReader.open(OsStorage(), folder.path, LogIdentity(folder.topic_uid, folder.partition))


def entries_of(folder: Folder) -> dict[int, tuple[bytes, bytes]]:
    """Every batch of a log on disk: log id -> (entry, frames). LogCorrupt if one does not verify."""
    reader = open_log(folder)
    try:
        return {
            entry.log_id: (entry.encode(), bytes(reader.read(entry)))
            for entry in reader.entries(reader.start.log_id, reader.end.log_id)
        }
    finally:
        reader.close()


def compare(logs: dict[str, dict[int, tuple[bytes, bytes]]], *, end: int) -> list[str]:
    """What differs among logs, whose beginnings may have been unlinked at different times. All must reach `end`."""
    found = []
    for name, log in logs.items():
        if not log or max(log) + 1 < end:
            found.append(f"{name} ends at {max(log, default=-1) + 1}, below {end}")
    (reference, ours), *others = logs.items()
    for name, theirs in others:
        for log_id in sorted(ours.keys() & theirs.keys()):
            if log_id < end and ours[log_id] != theirs[log_id]:
                what = "entries" if ours[log_id][0] != theirs[log_id][0] else "bytes"
                found.append(f"{reference} and {name} have other {what} from log id {log_id} on")
                break
    return found


def stored(t: float, node: str, data: Path, topic: str, partition: int, *, end: int) -> Iterator[Stored]:
    """The messages below log id `end` that a node has of a partition; nothing if it has no replica.

    A batch that cannot be read has none; whether that is one too many is for who compares bytes."""
    try:
        found = folders(str(data), topic, partition)
    except NotFound:
        return
    for folder in found:
        reader = open_log(folder)
        try:
            for messages in _messages(reader, end):
                yield Stored(t, node, topic, partition, messages)
        finally:
            reader.close()


def _messages(reader: LogReader, end: int) -> Iterator[list[Message]]:
    rows: list[Message] = []
    for batch in dump(reader, reader.start.log_id, end):
        for frame in batch.frames:
            if frame.message_id is not None:
                process, counter = history.parse(frame.payload)
                crc = zlib.crc32(frame.payload)
                rows.append(Message(process, counter, crc, frame.message_id, 0, frame.timestamp_ns or 0))
        if len(rows) >= AT_ONCE:
            yield rows
            rows = []
    if rows:
        yield rows
