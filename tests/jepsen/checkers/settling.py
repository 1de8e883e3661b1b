"""When channels were done with messages, and what retention took from them, as the log of a replica says it.

    PROGRESS   floor and ranges: done, or deferred (put in the same event, or by the message's own deliver-at time);
               finished: what was deferred is done
    LOG_START  what an abandoned channel loses

A log whose beginning was removed says nothing of the former: what was deferred before is not known. Nor does it of a
channel that was moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsqha import frames
from nsqha.cli.log import folders
from nsqha.commitlog.control import iter_frames
from nsqha.commitlog.entry import Entry
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.cursor import events
from nsqha.cursor.committed.loading import load
from nsqha.cursor.committed.state import NEEDS_LOOK, PartitionState
from nsqha.cursor.deferred.dead import DEAD_FROM
from nsqha.errors import LogCorrupt, NotFound
from tests.jepsen.checkers.storage import open_log
from tests.jepsen.history import Settled, Settling


class ChannelRows:
    """What the batches of one log say of one channel."""

    def __init__(self) -> None:
        self.rows: list[Settling] = []
        self.abandoned: list[Settling] = []
        self.moved = False
        self._floor = 0
        self._ranges: set[int] = set()  # what is done, or deferred, above the floor
        self._deferred: dict[int, int] = {}  # offset -> attempts at which it died; 0: it is no dead letter

    def deliver_at(self, offset: int) -> None:
        """It is deferred as soon as the channel has it."""
        if offset >= self._floor:
            self._deferred[offset] = 0

    def progress(self, entry: Entry, said: events.ChannelProgress) -> None:
        for offset, due_ns, attempts in said.puts:
            self._deferred[offset] = attempts if due_ns >= DEAD_FROM else 0
        passed = {offset for first, end in said.ranges for offset in range(max(first, self._floor), end)}
        passed |= set(range(self._floor, said.floor))
        new = passed - self._ranges
        self._floor = max(self._floor, said.floor)
        self._ranges = {offset for offset in self._ranges | new if offset >= self._floor}
        done = {offset: 0 for offset in new if offset not in self._deferred}
        done |= {offset: self._deferred.pop(offset, 0) for offset in said.finished}
        for offset, attempts in sorted(done.items()):
            self._add(entry, offset, attempts)

    def _add(self, entry: Entry, offset: int, attempts: int) -> None:
        row = Settling(offset, offset + 1, entry.timestamp_ns, entry.end_offset, attempts)
        if self.rows:
            last = self.rows[-1]
            if last.end == offset and (last.timestamp, last.attempts) == (row.timestamp, attempts):
                row = Settling(last.first, row.end, row.timestamp, row.log_end, attempts)
                del self.rows[-1]
        self.rows.append(row)


def rows_of(batches: Iterator[tuple[Entry, bytes]], uids: set[int]) -> dict[int, ChannelRows]:
    """By channel uid, for batches from the beginning of a log, or of a log that begins later."""
    found = {uid: ChannelRows() for uid in uids}
    for entry, data in batches:
        if entry.flags & frames.HAS_ATTRIBUTES:
            for offset in events.deliver_at_in(data, entry.first_offset):
                for each in found.values():
                    each.deliver_at(offset)
        for event in _events(data):
            match event:
                case events.ProgressEvent(channels):
                    for said in channels:
                        if said.uid in found:
                            found[said.uid].progress(entry, said)
                case events.Seek(uid):
                    if uid in found:
                        found[uid].moved = True
                case events.TopicEmpty():
                    for each in found.values():
                        each.moved = True
                case events.LogStart(abandoned=abandoned):
                    for a in abandoned:
                        if a.uid in found:
                            row = Settling(a.first, a.end, entry.timestamp_ns, entry.end_offset)
                            found[a.uid].abandoned.append(row)
    return found


def _events(data: bytes) -> Iterator[events.Event | None]:
    for frame in iter_frames(data):
        if frame.type in (frames.PROGRESS, frames.SEEK, frames.TOPIC_EMPTY, frames.LOG_START):
            yield events.decode(frame.type, bytes(data[frame.payload_position : frame.end]))


def settled(t: float, node: str, data: Path, topic: str, partition: int, *, end: int) -> Iterator[Settled]:
    """What a node has of a partition below log id `end`; nothing if it has no replica, or one that cannot be read."""
    try:
        found = folders(str(data), topic, partition)
    except NotFound:
        return
    for folder in found:
        log = open_log(folder)
        try:
            yield from _settled(t, node, log, topic, partition, end)
        except LogCorrupt:
            continue  # whether it should have been mended is for who compares bytes
        finally:
            log.close()


def channel_state(log: Any, end: int) -> PartitionState:
    """As the log says it."""
    return load(log, log.events, end_log_id=end, committed=end, distrusted=0).state


def _settled(t: float, node: str, log: LogReader, topic: str, partition: int, end: int) -> Iterator[Settled]:
    state = channel_state(log, end)
    names = {channel.uid: name for name, channel in state.channels.items()}
    whole = log.start.log_id == 1
    entries = log.entries(log.start.log_id, min(end, log.end.log_id))
    read = frames.HAS_ATTRIBUTES | NEEDS_LOOK
    batches = ((entry, bytes(log.read(entry))) for entry in entries if entry.flags & read)
    for uid, each in rows_of(batches, {*names}).items():
        rows = each.rows if whole and not each.moved else []
        if rows or each.abandoned:
            yield Settled(t, node, topic, partition, names[uid], rows, each.abandoned)
