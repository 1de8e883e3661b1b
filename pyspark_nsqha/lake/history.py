"""Lake and log as one history: `option("archive", uri)` of the batch source.

    offsets   lake's first ...................... log start ............ pinned end
              |----- files of the lake -----------|------- the log ------|
                                                  ^ when the read is planned

What the log has is read from the log; only what retention has removed is read from the lake. So no message is read
twice, and a gap between both is noticed: it raises Gone, or with failOnDataLoss=false is left out and counted. At
load() the start of each partition and the offsets of times are pinned; files are looked up when the read is planned.
The snapshot is taken before the lake is read: what retention removed meanwhile was archived before.

Only the topic with the present uid is read. A topic that was created again begins at 0 again; the messages of the
former one are in the lake, and can be read as Parquet.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pyspark_nsqha.lake.commits.commit import ManifestCommits
from pyspark_nsqha.lake.commits.manifest import BadManifest, LakeFile, LakeState, OffsetRange, Overlap, joined, without
from pyspark_nsqha.lake.parquet import BadFile, footer_of, open_file, read_rows
from pyspark_nsqha.lake.plan import life_of
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.model import CutPoint, Gone, PinnedPartition, ReadFailed
from pyspark_nsqha.planner import PlannedRange
from pyspark_nsqha.reading.columns import CORRUPT, arrow_schema

logger = logging.getLogger(__name__)

Key = tuple[str, int]
FILES_A_TASK_MAX = 64


class LakePart(NamedTuple):
    """Messages [first, end) of one file; of these only `wanted`, if it is not None."""

    uri: str
    file: LakeFile
    first: int
    end: int
    wanted: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Lengthened:
    """Pins that begin where the lake does, and the offsets of times in them."""

    pins: tuple[PinnedPartition, ...]
    times: Mapping[Key, Mapping[int, int]]


def state_of(uri: str) -> LakeState:
    """The state of a lake. ReadFailed if it cannot be read, or is not a lake."""
    try:
        state = ManifestCommits(Store(uri)).state()
    except (StoreFailed, BadManifest, Overlap) as error:
        raise ReadFailed(f"archive: {error}") from None
    if not state.sequence:
        raise ReadFailed(f"archive: {uri} is no lake: it has no manifest; nsqha spark archive --to makes one")
    return state


def lengthened(uri: str, pins: Sequence[PinnedPartition], times: Mapping[Key, Mapping[int, int]]) -> Lengthened:
    """The pins of a snapshot, extended to the lake's start. ReadFailed."""
    state, store = state_of(uri), Store(uri)
    found, found_times = [], dict(times)
    for pin in pins:
        key = (pin.identity.topic, pin.identity.partition)
        below = [file for file in state.files.get(life_of(pin), ()) if file.first < pin.start.offset]
        if not below:
            found.append(pin)
            continue
        if below[0].identity != pin.identity:
            raise ReadFailed(f"archive: {below[0].path} and the log have different id bases: it is another cluster's")
        found.append(replace(pin, start=CutPoint(below[0].first, 0, 0, below[0].first_timestamp_ns)))
        found_times[key] = {
            at: _offset_of(at, below, pin.start.offset, store) if offset <= pin.start.offset else offset
            for at, offset in times.get(key, {}).items()
        }
    return Lengthened(tuple(found), found_times)


def _offset_of(at_ns: int, files: Sequence[LakeFile], log_start: int, store: Store) -> int:
    """The first message below the log start that is not older; the log start if there is none."""
    index = bisect_left(files, at_ns, key=lambda file: file.last_timestamp_ns)
    if index == len(files):
        return log_start
    file = files[index]
    if file.first_timestamp_ns >= at_ns:
        return file.first
    offset = file.first
    for batch in _rows(LakePart(store.uri, file, file.first, file.end), ("offset", "timestamp_ns")):
        older = int(np.searchsorted(batch.column("timestamp_ns").to_numpy(), at_ns))
        offset += older
        if older < batch.num_rows:
            break
    return min(offset, log_start)


def divide(
    uri: str,
    ranges: Sequence[PlannedRange],
    now: Sequence[PinnedPartition],
    *,
    since_ns: int = 0,
    until_ns: int = 1 << 63,
    fail_on_data_loss: bool = True,
) -> tuple[list[LakePart], list[PlannedRange]]:
    """What is read from the lake, and what is left for the log, by the pins of `now`. Messages that are older than
    `since_ns`, or not older than `until_ns`, may be left out. ReadFailed; Gone if messages are in neither, unless
    `fail_on_data_loss` is false."""
    state = state_of(uri)
    uri = Store(uri).uri  # a relative path is relative to this process, not to the tasks
    starts = {life_of(pin): pin.start.offset for pin in now}
    parts: list[LakePart] = []
    left: list[PlannedRange] = []
    for asked in ranges:
        start = min(max(starts.get(life_of(asked.pin), asked.first), asked.first), asked.end)
        left.append(_from(asked, start))
        below = OffsetRange(asked.first, start)
        mine = [
            LakePart(uri, file, max(file.first, below.first), min(file.end, below.end), asked.wanted)
            for file in state.files.get(life_of(asked.pin), ())
            if file.first < below.end and file.end > below.first
        ]
        _check_whole(asked, below, mine, fail_on_data_loss)
        parts += [
            part for part in mine if part.file.last_timestamp_ns >= since_ns and part.file.first_timestamp_ns < until_ns
        ]
    left = [one for one in left if one.first < one.end and one.wanted != ()]
    return [part for part in map(_narrowed, parts) if part.first < part.end], left


def _from(asked: PlannedRange, first: int) -> PlannedRange:
    wanted = None if asked.wanted is None else tuple(offset for offset in asked.wanted if offset >= first)
    return asked._replace(first=first, wanted=wanted)


def _check_whole(asked: PlannedRange, below: OffsetRange, parts: Iterable[LakePart], fail_on_data_loss: bool) -> None:
    there = joined(OffsetRange(part.first, part.end) for part in parts)
    holes = list(without(below, there))
    if asked.wanted is not None:
        holes = [hole for hole in holes if any(hole.first <= offset < hole.end for offset in asked.wanted)]
    if not holes:
        return
    topic, partition = asked.key
    count = sum(hole.end - hole.first for hole in holes)
    what = f"{topic}/{partition}: offsets [{holes[0].first}, {holes[0].end}) are neither in the lake nor in the log"
    if fail_on_data_loss:
        more = f" ({count} messages in {len(holes)} ranges)" if len(holes) > 1 else ""
        raise Gone(
            f"{what}{more}; failOnDataLoss false reads without them",
            planned=(asked.first, asked.end),
            available=(holes[-1].end, asked.end),
        )
    logger.warning("%s; %d messages are left out", what, count)


def _narrowed(part: LakePart) -> LakePart:
    if part.wanted is None:
        return part
    wanted = tuple(offset for offset in part.wanted if part.first <= offset < part.end)
    return (
        part._replace(first=wanted[0], end=wanted[-1] + 1, wanted=wanted) if wanted else part._replace(end=part.first)
    )


def tasks(parts: Iterable[LakePart], split_bytes: int) -> list[tuple[LakePart, ...]]:
    """Tasks of consecutive parts of one partition, with about `split_bytes` of files each."""
    found: list[tuple[LakePart, ...]] = []
    size = 0
    for part in parts:
        fits = found and size + part.file.bytes <= split_bytes and len(found[-1]) < FILES_A_TASK_MAX
        if fits and found[-1][-1].file.life == part.file.life:
            found[-1] = (*found[-1], part)
            size += part.file.bytes
        else:
            found.append((part,))
            size = part.file.bytes
    return found


def part_rows(part: LakePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a part. ReadFailed if the file does not verify."""
    stored = [name for name in columns if name != CORRUPT]
    needed = stored if part.wanted is None else [*dict.fromkeys((*stored, "offset"))]
    schema = arrow_schema(columns)
    for batch in _rows(part, needed):
        if part.wanted is not None:
            kept = np.isin(batch.column("offset").to_numpy(), np.array(part.wanted, np.int64), assume_unique=True)
            if not kept.any():
                continue
            batch = batch.filter(pa.array(kept))
        arrays = [pa.nulls(batch.num_rows, pa.binary()) if name == CORRUPT else batch.column(name) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _rows(part: LakePart, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    file = part.file
    where = f"{file.topic}/{file.partition}: offsets [{part.first}, {part.end}) of {file.path} in {part.uri}"
    rows = 0
    try:
        with Store(part.uri).open(file.path) as source:
            opened = open_file(source)
            footer = footer_of(opened)
            if (footer.identity, footer.first, footer.end, footer.crc) != (
                file.identity,
                file.first,
                file.end,
                file.crc,
            ):
                raise BadFile("it is not the file that the manifest names")
            for batch in read_rows(opened, footer, first=part.first, end=part.end, columns=columns):
                rows += batch.num_rows
                yield batch
    except FileNotFoundError:
        raise ReadFailed(f"{where}: the file is gone; run nsqha spark verify to find all missing files") from None
    except (BadFile, StoreFailed) as error:
        raise ReadFailed(f"{where}: {error}; run nsqha spark verify --full to find all bad files") from None
    if rows != part.end - part.first:
        raise ReadFailed(f"{where}: {rows} rows were read; run nsqha spark verify --full to find what is wrong")
