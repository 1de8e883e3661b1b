"""Small files of a day become large ones: an archive that runs every minute writes a thousand a day and partition.

    |a|b|c|d|  e  |f|g|     files of one partition and day, each beginning where the one before ends
    | merged  | e | m |     as large as `target_bytes`; the manifest names m and no longer f, g

A merged file is committed like any other, in the place of the files that it is made of: at every moment each message is
in exactly one file that counts. Who has read the manifests before may still read the old files: they are removed by the
next run that finds them replaced for longer than `keep_ns`.

Only files whose log ids meet are merged, so the merged file is as provable as its parts: it begins with the chain
before the first and ends with the chain of the last. Whatever does not verify while it is read ends the run.

A note under `replaced/` is written first; it has the names of old and new files. Of these, `keep_ns` later, any run
removes what no manifest names. A commit that comes later than half of that is not made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyspark_nsqha.jobs import told
from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commit import Commits, Moved
from pyspark_nsqha.lake.manifest import Addition, LakeFile, State
from pyspark_nsqha.lake.parquet import SCHEMA, BadFile, FileMaker, footer_of, open_file, read_rows
from pyspark_nsqha.lake.store import Store, StoreFailed

TARGET_BYTES = 128 << 20
KEEP_NS = 3600 * 10**9
FILES_MAX = 2000  # of one merged file: a task opens them one by one
ROUND_BYTES = 4 << 30
MOVED_MAX = 20

Group = tuple[LakeFile, ...]


class CannotMerge(Exception):
    """A file is not what its manifest says; the message names it."""


def merged_path(group: Group) -> str:
    """The name of the file that has all messages of the group."""
    return replace(group[0], end=group[-1].end, merged=True).path


class Merged(NamedTuple):
    """What a task made of a group, or why not."""

    file: LakeFile | None
    failed: str = ""


Merge = Callable[[Sequence[Group]], list[Merged]]
"""Runs `MergeTask` for each group, somewhere; results in the same order."""


@dataclass
class Totals:
    """What was done."""

    merged: int = 0  # files that were small
    files: int = 0  # that were made of them
    bytes: int = 0  # of these
    removed: int = 0  # old files, replaced earlier


def groups(files: Iterable[LakeFile], target_bytes: int = TARGET_BYTES) -> Iterator[Group]:
    """What is to be merged of one life's files: two or more neighbours of a day, as large as the target together."""
    group: list[LakeFile] = []
    size = 0
    for file in files:
        fits = size + file.bytes <= target_bytes and len(group) < FILES_MAX
        if group and not (fits and _meet(group[-1], file)):
            if len(group) > 1:
                yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file.bytes
    if len(group) > 1:
        yield tuple(group)


def _meet(before: LakeFile, file: LakeFile) -> bool:
    return (before.day, before.end, before.end_log_id) == (file.day, file.first, file.first_log_id)


@dataclass(frozen=True)
class MergeTask:
    """Makes one file of a group."""

    store: Store
    run: str

    def __call__(self, group: Group) -> Merged:
        try:
            return Merged(merge(group, self.store, self.run))
        except (CannotMerge, StoreFailed) as error:
            return Merged(None, str(error))
        except Exception as error:
            return Merged(None, f"{group[0].path}: {told(error)}")


def merge(group: Group, store: Store, run: str) -> LakeFile:
    """The file that has all messages of the group. CannotMerge, StoreFailed."""
    first, last = group[0], group[-1]
    maker = FileMaker(first.identity, first.first)
    for file in group:
        try:
            with store.open(file.path) as source:
                opened = open_file(source)
                footer = footer_of(opened)
                if (footer.identity, footer.first, footer.end, footer.crc) != (
                    file.identity,
                    file.first,
                    file.end,
                    file.crc,
                ):
                    raise BadFile("it is not the file that the manifest names")
                for batch in read_rows(opened, footer, first=file.first, end=file.end, columns=SCHEMA.names):
                    maker.add(batch)
        except FileNotFoundError:
            raise CannotMerge(f"{file.path} is gone: nsqha spark verify tells what else is") from None
        except BadFile as error:
            raise CannotMerge(f"{file.path}: {error}; nsqha spark verify --full tells what else is wrong") from None
    made = maker.finish()
    merged = replace(
        first,
        end=last.end,
        rows=made.rows,
        bytes=made.data.size,
        last_timestamp_ns=last.last_timestamp_ns,
        end_log_id=last.end_log_id,
        epoch=last.epoch,
        chain=last.chain,
        flags=last.flags,
        crc=made.crc,
        file_crc=made.file_crc,
        merged=True,
    )
    store.write(merged.path, made.data, run=run)
    return merged


def compact(
    commits: Commits,
    store: Store,
    run_merge: Merge,
    *,
    run: str,
    topics: Sequence[str] = (),
    target_bytes: int = TARGET_BYTES,
    keep_ns: int = KEEP_NS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Totals:
    """Until nothing is left to merge. CannotMerge, StoreFailed, BadManifest: what was committed before stays."""
    totals = Totals()
    done = moved = 0
    while moved < MOVED_MAX:
        state = commits.state()
        totals.removed += remove_replaced(store, state, keep_ns)
        wanted = [
            group
            for life, files in sorted(state.files.items())
            if not topics or life.topic in topics
            for group in groups(files, target_bytes)
        ]
        left = sum(file.bytes for group in wanted for file in group)
        progress(done, done + left)
        if not wanted:
            return totals
        part = _round(wanted)
        paths = tuple(file.path for group in part for file in group)
        noted_ns = time.time_ns()
        note = names.replaced(f"{run}-{state.sequence:020d}")
        store.write(note, _encode([*paths, *map(merged_path, part)]), run=run)
        found = run_merge(part)
        if failed := [one.failed for one in found if one.file is None]:
            raise CannotMerge(failed[0])
        made = tuple(one.file for one in found if one.file is not None)
        if keep_ns and time.time_ns() - noted_ns > keep_ns // 2:
            raise StoreFailed(
                "a round took so long that its files may be removed already; use a smaller --target-bytes"
            )
        try:
            commits.append(state, Addition(made, replaced=paths), run=run)
        except Moved:
            moved += 1  # an archiver, most likely: the same files are merged again, under the same names
            continue
        done += sum(file.bytes for group in part for file in group)
        totals.merged += len(paths)
        totals.files += len(made)
        totals.bytes += sum(file.bytes for file in made)
    raise StoreFailed(f"somebody else committed to {store.uri} {MOVED_MAX} times meanwhile; try again")


def _round(wanted: Sequence[Group]) -> list[Group]:
    found: list[Group] = []
    size = 0
    for group in wanted:
        if size >= ROUND_BYTES:
            break
        found.append(group)
        size += sum(file.bytes for file in group)
    return found


def _encode(paths: Sequence[str]) -> bytes:
    return json.dumps({"at_ns": time.time_ns(), "paths": paths}).encode()


def remove_replaced(store: Store, state: State, keep_ns: int) -> int:
    """Old files that were replaced long enough ago, and merged ones that came to nothing; how many."""
    now = time.time_ns()
    removed = 0
    named = {file.path for files in state.files.values() for file in files}
    for note in list(store.list(names.REPLACED)):
        try:
            about = json.loads(store.read(note.path))
            at_ns, paths = int(about["at_ns"]), [str(path) for path in about["paths"]]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue
        if now - at_ns < keep_ns:
            continue
        for path in paths:
            if path not in named and names.parse_data(path) is not None:
                store.remove(path)
                removed += 1
        store.remove(note.path)
    return removed
