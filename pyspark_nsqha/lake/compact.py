"""Compaction merges small files of a day: an archive that runs every minute writes a thousand per day and partition.

    |a|b|c|d|  e  |f|g|     files of one partition and day, each beginning where the one before ends
    | merged  | e | m |     as large as `target_bytes`; the manifest names m and no longer f, g

A merged file is committed like any other, in place of the files that it is made from: at every moment each message is
in exactly one file that counts. A reader of earlier manifests may still read the old files: they are removed by the
next run after they were replaced for longer than `keep_ns`.

Only files whose log ids meet are merged, so the merged file proves as much as its parts: it begins with the chain
before the first and ends with the chain of the last. If a file does not verify, the run ends.

A note under `replaced/` is written first: the names of old and new files, and how long the old ones are kept. Any run
removes files that a note names and no manifest does, after the `keep_ns` of the note or its own, whichever is longer. A
new file that is in no manifest may be about to be committed. So no run removes it before twice the time after which its
own run does not commit it any more; the age of a note is measured by the store's clock alone. New files have tags, so
the removal of one cannot hit that of another run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits.commit import Commits, Moved
from pyspark_nsqha.lake.commits.manifest import Addition, LakeFile, LakeState
from pyspark_nsqha.lake.parquet import SCHEMA, BadFile, FileMaker, footer_of, open_file, read_rows
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.model import bug_report

TARGET_BYTES = 128 << 20
KEEP_NS = 3600 * 10**9
COMMIT_NS = 3600 * 10**9  # a round that takes longer is not committed
FILES_MAX = 2000  # of one merged file: a task opens them one by one
ROUND_BYTES = 4 << 30
MOVED_MAX = 20

Group = tuple[LakeFile, ...]


class CannotMerge(Exception):
    """A file is not what its manifest says; the message names it."""


def merged_path(group: Group, tag: str) -> str:
    """The path of the file that has all messages of the group."""
    return replace(group[0], end=group[-1].end, merged=tag).path


class Merged(NamedTuple):
    """The file that a task made from a group, or why it failed."""

    file: LakeFile | None
    failed: str = ""


Merge = Callable[[Sequence[Group], str], list[Merged]]
"""Runs `MergeTask` with a tag for each group, such as in Spark; results in the same order."""


@dataclass
class CompactTotals:
    """The totals of a compaction."""

    merged: int = 0  # small files that were merged
    files: int = 0  # that were made from them
    bytes: int = 0  # of the new files
    removed: int = 0  # old files, replaced earlier


def groups(files: Iterable[LakeFile], target_bytes: int = TARGET_BYTES) -> Iterator[Group]:
    """Groups of one life's files to merge: two or more adjacent ones of a day, together as large as the target."""
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
    """Makes one file from a group."""

    store: Store
    run: str
    tag: str

    def __call__(self, group: Group) -> Merged:
        try:
            return Merged(merge(group, self.store, self.run, self.tag))
        except (CannotMerge, StoreFailed) as error:
            return Merged(None, str(error))
        except Exception as error:
            return Merged(None, f"{group[0].path}: {bug_report(error)}")


def merge(group: Group, store: Store, run: str, tag: str) -> LakeFile:
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
            raise CannotMerge(f"{file.path} is gone: run nsqha spark verify to find all missing files") from None
        except BadFile as error:
            raise CannotMerge(f"{file.path}: {error}; run nsqha spark verify --full to find all bad files") from None
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
        merged=tag,
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
) -> CompactTotals:
    """Merge until nothing is left to merge. CannotMerge, StoreFailed, BadManifest: what was committed before stays."""
    totals = CompactTotals()
    done = moved = 0
    while moved < MOVED_MAX:
        totals.removed += remove_replaced(commits, store, keep_ns, run)
        state = commits.state()
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
        note = _Note.written(store, part, run=run, keep_ns=keep_ns)
        found = run_merge(part, note.tag)
        if failed := [one.failed for one in found if one.file is None]:
            raise CannotMerge(failed[0])
        made = tuple(one.file for one in found if one.file is not None)
        if not _committed(commits, store, state, note, part, made, run=run):
            moved += 1
            continue
        done += sum(file.bytes for group in part for file in group)
        totals.merged += len(note.old)
        totals.files += len(made)
        totals.bytes += sum(file.bytes for file in made)
    raise StoreFailed(f"other runs committed to {store.uri} {MOVED_MAX} times meanwhile; try again")


def _committed(
    commits: Commits,
    store: Store,
    state: LakeState,
    note: _Note,
    part: Sequence[Group],
    made: tuple[LakeFile, ...],
    *,
    run: str,
) -> bool:
    """Commit the merged files in place of the old ones. False: the lake does not have the old ones any more.

    An archiver that commits meanwhile does not change the old files, so the same merged files are committed on top of
    it. Merging again instead would never end if an archiver commits more often than a merge takes."""
    for _ in range(MOVED_MAX):
        note.check(store, made)
        try:
            commits.append(state, Addition(made, replaced=note.old), run=run)
        except Moved:
            state = commits.state()
            there = {file for files in state.files.values() for file in files}
            if not all(file in there for group in part for file in group):
                return False
        else:
            return True
    return False


def _round(wanted: Sequence[Group]) -> list[Group]:
    found: list[Group] = []
    size = 0
    for group in wanted:
        if size >= ROUND_BYTES:
            break
        found.append(group)
        size += sum(file.bytes for file in group)
    return found


@dataclass(frozen=True)
class _Note:
    """The note of a round: what it is about to do."""

    path: str
    tag: str
    raw: bytes
    old: tuple[str, ...]
    begun_ns: int

    @classmethod
    def written(cls, store: Store, part: Sequence[Group], *, run: str, keep_ns: int) -> _Note:
        begun_ns = _now_ns()
        tag = os.urandom(8).hex()
        old = tuple(file.path for group in part for file in group)
        raw = json.dumps({"keep_ns": keep_ns, "old": old, "new": [merged_path(group, tag) for group in part]}).encode()
        path = names.replaced(run, tag)
        store.write(path, raw, run=run)
        return cls(path, tag, raw, old, begun_ns)

    def check(self, store: Store, made: Iterable[LakeFile]) -> None:
        """Check that the new files may be committed: they exist, and no run is about to remove them. StoreFailed."""
        sizes: dict[str, int] = {}
        for folder in sorted({names.day_folder(file.topic, file.day) for file in made}):
            sizes.update((found.path, found.size) for found in store.list(folder))
        for file in made:
            if sizes.get(file.path) != file.bytes:
                raise StoreFailed(
                    f"{file.path} was written, but {store.uri} does not show it on this machine: check that it is the "
                    "same folder on every machine; nothing of this round was committed"
                )
        try:
            there = store.read(self.path)
        except FileNotFoundError:
            there = b""
        if there != self.raw or _now_ns() - self.begun_ns > COMMIT_NS:
            raise StoreFailed(
                "a round took so long that its files may already be removed; nothing of it was committed; use a "
                "smaller --target-bytes"
            )


def _now_ns() -> int:
    """A monotonic time that includes the time in which the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class _FoundNote:
    """A note that was read from the store."""

    path: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    age_ns: int
    keep_ns: int

    def may_go(self, path: str, keep_ns: int) -> bool:
        """Whether this note allows to remove a file that no manifest names."""
        keep = max(keep_ns, self.keep_ns, 2 * COMMIT_NS if path in self.new else 0)
        return self.age_ns >= keep


def _notes(store: Store, now_ns: Callable[[], int]) -> list[_FoundNote]:
    found = []
    listed = list(store.list(names.REPLACED))
    now = now_ns() if listed else 0
    for file in listed:
        try:
            about = json.loads(store.read(file.path))
            old, new = (tuple(map(str, about[name])) for name in ("old", "new"))
            found.append(_FoundNote(file.path, old, new, max(now - file.modified_ns, 0), int(about["keep_ns"])))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue
    return found


def noted(store: Store) -> set[str]:
    """Paths that only `compact` removes, after their time."""
    return {path for note in _notes(store, lambda: 0) for path in (*note.old, *note.new)}


def replaced(store: Store) -> dict[str, int]:
    """When each merged file may be removed: nanoseconds since 1970, by the store's clock."""
    far = 1 << 62
    found: dict[str, int] = {}
    for note in _notes(store, lambda: far):
        for path in note.old:
            found[path] = max(found.get(path, 0), far - note.age_ns + note.keep_ns)
    return found


def _named(state: LakeState) -> set[str]:
    return {file.path for files in state.files.values() for file in files}


def remove_replaced(commits: Commits, store: Store, keep_ns: int, run: str) -> int:
    """Remove old files that were replaced long enough ago, and new ones that were not committed; returns the number."""
    # Read before the notes: if a file is not named here, the run that replaced it has already written its note.
    named = _named(commits.state())
    notes = _notes(store, lambda: store.now_ns(run))
    if not notes:
        return 0
    # Read again right before removing: what has been committed meanwhile, or may still be committed, stays.
    state = commits.state()
    named |= _named(state)
    spared = named | commits.proposed(state)
    removed: set[str] = set()
    for note in notes:
        loose = [path for path in (*note.old, *note.new) if path not in named and names.parse_data(path) is not None]
        going = [
            path
            for path in loose
            if path not in spared
            and all(one.may_go(path, keep_ns) for one in notes if path in one.old or path in one.new)
        ]
        for path in going:
            if path not in removed:
                store.remove(path)
                removed.add(path)
        if len(going) == len(loose) and (all(path in named for path in note.new) or note.may_go(note.new[0], keep_ns)):
            store.remove(note.path)
    return len(removed)
