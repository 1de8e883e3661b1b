"""What a leader reports to readers of the log: what is committed now, and where it may be divided.

    applied state + log start ----on the loop---> ends, identity, floors, replicas
    files of the log ------------in a thread----> borders, times    (`Effort`: bounded, and only while the caller waits)

Only what is committed and applied is reported: (epoch, log_id, chain) of the last such entry identify the whole log up
to it, whichever node leads later. A hold, if the reader wants one, is committed first: retention keeps what is pinned
after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqha.commitlog.entry import Place
from nsqha.commitlog.reading.cuts import Cut, cut_at, cut_points, ranges_cut
from nsqha.errors import LimitReached
from nsqha.pb.v1 import segments_pb2

if TYPE_CHECKING:
    from nsqha.commitlog.reading.lookup import LogReader
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic
    from nsqha.server.segments.log_source import LogSource

BORDERS_MAX = 1 << 19  # that one node searches for one request: 4 TiB of log


class TooManyBorders(LimitReached):
    """A request needs more borders than one node searches for."""


class SnapshotAbandoned(Exception):
    """The caller does not wait for the answer any more."""


class Effort:
    """Counts what one request has cost this node: in threads, one at a time; the loop sets `ended`."""

    def __init__(self) -> None:
        self.ended = False
        self._borders = 0

    def border(self) -> None:
        """Count one more border. TooManyBorders, SnapshotAbandoned."""
        if self.ended:
            raise SnapshotAbandoned
        self._borders += 1
        if self._borders > BORDERS_MAX:
            raise TooManyBorders(
                f"the request needs more than {BORDERS_MAX} borders of this node: ask for fewer topics or ranges"
            )


@dataclass(frozen=True)
class PinRequest:
    """What a snapshot asks for in each partition besides its start and end."""

    timestamps_ns: Sequence[int] = ()
    cut_points: bool = False
    ranges: Sequence[tuple[int, int]] | None = None  # of this partition; None: all of it
    channel: str = ""


async def pin(
    source: LogSource, topic: Topic, partition: Partition, wanted: PinRequest, files: Executor, effort: Effort
) -> Any:
    """The `PartitionSnapshot` of a partition that is led here and serves; its commitlog is read in `files`.

    LogCorrupt or OSError if it cannot be read; TooManyBorders, SnapshotAbandoned."""
    state, log = partition.cursors.state, partition.log
    applied = state.applied
    end = Place(applied.log_id + 1, applied.end_offset, applied.end_position)
    start = _start(log, partition.cursors.state.log_start, end)
    answer = segments_pb2.PartitionSnapshot(
        topic=topic.name,
        topic_uid=topic.record.uid,
        partition=partition.number,
        id_base=partition.id_base,
        epoch=applied.epoch,
        chain=applied.chain,
        replicas=[
            segments_pb2.SegmentReplica(**replica._asdict()) for replica in source.replicas_of(topic, partition.number)
        ],
    )
    if wanted.channel and wanted.channel in partition.cursors.channels:
        answer.channel_floor = partition.cursors.channels[wanted.channel].committed.floor
    part = log.snapshot()
    # Shielded: it has to run to close the files, also if the caller does not wait any more.
    await asyncio.shield(source.loop.run_in_executor(files, _read, part, start, end, wanted, answer, effort))
    return answer


def _start(log: LogReader, log_start: tuple[int, int], end: Place) -> Place:
    """Where the log starts for readers: files below it may still exist and are about to be removed."""
    for pair in log.pairs:
        if pair.first.position >= log_start[1]:
            return min(pair.first, end)
    return end


def _read(log: LogReader, start: Place, end: Place, wanted: PinRequest, answer: Any, effort: Effort) -> None:
    """Fill in what is read from the files; runs in a thread."""
    try:
        if effort.ended:
            raise SnapshotAbandoned
        _set(answer.start, cut_at(log, start, end))
        _set(answer.end, cut_at(log, end, end))
        for timestamp_ns in wanted.timestamps_ns:
            entry = log.entry_for_time(timestamp_ns)
            offset = end.offset if entry is None else entry.first_offset
            answer.offsets_for_times.append(min(max(offset, start.offset), end.offset))
        if wanted.cut_points:
            whole = wanted.ranges is None
            if whole:
                cuts = cut_points(log, start, end, each=effort.border)
            else:
                cuts = ranges_cut(log, start, end, wanted.ranges or (), each=effort.border)
            for cut in cuts:
                _set(answer.cuts.add(), cut)
    finally:
        log.close()


def _set(message: Any, cut: Cut) -> None:
    message.offset, message.log_id, message.position, message.timestamp_ns = cut
