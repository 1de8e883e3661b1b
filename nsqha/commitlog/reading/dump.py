"""A log in words, for people and scripts: `nsqha log dump`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from nsqha.commitlog.control import NAMES, iter_frames
from nsqha.commitlog.entry import BatchCorrupt, Entry
from nsqha.commitlog.reading.lookup import LogReader
from nsqha.errors import LogCorrupt
from nsqha.frames import MESSAGE

_MESSAGE = struct.Struct(">qH16s")


@dataclass(frozen=True, slots=True)
class DumpedFrame:
    """One frame; the last four are a message's."""

    type: str
    position: int  # in the partition
    size: int  # of the whole frame
    payload: bytes  # a message's body
    offset: int | None = None
    message_id: str | None = None
    timestamp_ns: int | None = None
    attempts: int | None = None


@dataclass(frozen=True, slots=True)
class DumpedBatch:
    """One entry with its frames, or a range that cannot be read."""

    entry: Entry | None
    frames: tuple[DumpedFrame, ...]
    problem: LogCorrupt | None = None


def dump(log: LogReader, first_log_id: int, end_log_id: int, *, frames: bool = True) -> Iterator[DumpedBatch]:
    """The batches of [first, end) that are here; unreadable ones are reported and passed over."""
    log_id = max(first_log_id, log.start.log_id)
    end_log_id = min(end_log_id, log.end.log_id)
    while log_id < end_log_id:
        try:
            for entry in log.entries(log_id, end_log_id):
                yield _dumped(log, entry) if frames else DumpedBatch(entry, ())
                log_id = entry.log_id + 1
        except BatchCorrupt as problem:
            yield DumpedBatch(None, (), problem)
            log_id = problem.end_log_id


def _dumped(log: LogReader, entry: Entry) -> DumpedBatch:
    try:
        return DumpedBatch(entry, tuple(_frames(entry, bytes(log.read(entry)))))
    except LogCorrupt as problem:
        return DumpedBatch(entry, (), problem)


def _frames(entry: Entry, data: bytes) -> Iterator[DumpedFrame]:
    offset = entry.first_offset
    for frame in iter_frames(data):
        position, size = entry.position + frame.position, frame.end - frame.position
        if frame.type == MESSAGE and size >= 8 + _MESSAGE.size:
            timestamp_ns, attempts, message_id = _MESSAGE.unpack_from(data, frame.payload_position)
            body = data[frame.payload_position + _MESSAGE.size : frame.end]
            text = message_id.decode("ascii", "backslashreplace")
            yield DumpedFrame("message", position, size, body, offset, text, timestamp_ns, attempts)
            offset += 1
        else:
            name = NAMES.get(frame.type, f"type {frame.type}")
            yield DumpedFrame(name, position, size, data[frame.payload_position : frame.end])
