"""Proves that the lake is the log.

    ranges    files of a life follow each other without gap and overlap               from the manifests
    files     exist with their sizes, and their footers agree                         a listing, the ends of files
    chains    each file is chained to the one before                                  from the manifests
    anchor    the chain of the last file is that of the broker's entry there          one batch per partition
    contents  each byte and row, and the log's rows if it still has them              `contents`, only in full

(log id, chain) identifies everything before: if links and anchor hold, the entries that were verified when the files
were written are those of the log that is served now. If a link cannot be proven (the log was recovered there, or the
file before is not in the lake) the file before it has an anchor of its own. Links prove what the log no longer has.

What the log does not have any more is in the lake, or was before the lake's start: a log that starts after the lake's
end, or a topic of which the lake has only other uids, is a gap. The snapshot must be taken before the state is read:
what retention removes in between was in the lake before.

A gap with a reason in a manifest is reported; it is a problem if the caller says so, or if the log has the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from nsqha.commitlog.entry import BROKEN_CHAIN
from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits.manifest import LakeFile, LakeState, Life, Missing, OffsetRange, without
from pyspark_nsqha.lake.compact import replaced
from pyspark_nsqha.lake.contents import GAP, MISMATCH, Check, Problem, differences, problem
from pyspark_nsqha.lake.parquet import BadFile, footer_of, open_file
from pyspark_nsqha.lake.plan import life_of
from pyspark_nsqha.lake.store import Store
from pyspark_nsqha.lake.task import Read
from pyspark_nsqha.model import CutPoint, Gone, PinnedPartition, ReadFailed, Split

THREADS = 8  # that read footers
_MINUTE_NS = 60 * 10**9
AGAIN_MAX = 5  # retries after retention has removed what is being compared


@dataclass
class LakePartition:
    """What the lake has of one life."""

    life: Life
    first: int
    end: int
    files: int
    rows: int
    bytes: int
    behind: int | None = None  # messages that are committed and not in the lake; None: no broker was asked


@dataclass
class LakeReport:
    """What was checked, and what is wrong."""

    partitions: list[LakePartition] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # what could not be checked
    anchors: int = 0
    rows_read: int = 0
    rows_compared: int = 0


def verify(
    state: LakeState,
    store: Store,
    topics: Sequence[str],
    *,
    pins: Sequence[PinnedPartition] | None = None,
    read: Read | None = None,
    check: Check | None = None,
    hold_id: str = "",
    now_again: Callable[[], Sequence[PinnedPartition]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LakeReport:
    """Verify what the lake has of these topics. `pins`: what is committed now; `read` reads it, under `hold_id` if it
    is held; `check` reads everything. `now_again` returns new pins, if retention removes what is to be compared.

    StoreFailed if the lake cannot be read.
    """
    report = LakeReport()
    lives = sorted(life for life in {*state.files, *state.missing} if life.topic in topics)
    now = {life_of(pin): pin for pin in pins or ()}
    for topic in topics:
        if not any(life.topic == topic for life in lives):
            committed = any(life.topic == topic and pin.end.offset for life, pin in now.items())
            if committed or pins is None:
                report.problems.append(Problem(GAP, topic, 0, 0, 0, "", f"{store.uri} has nothing of this topic"))
    for life in lives:
        files = state.files.get(life, ())
        report.partitions.append(_partition(life, files, state))
        report.missing += state.missing.get(life, ())
        report.problems += holes(life, state)
        report.problems += broken_links(files)
    wanted = [file for life in lives for file in state.files.get(life, ())]
    there = _check_files(store, topics, wanted, report, progress)
    for life, pin in now.items():
        _check_log(life, pin, state, report)
        if read is not None:
            _check_anchors(life, pin, state.files.get(life, ()), read, hold_id, report)
            _check_missing(life, pin, state, read, hold_id, report)
    if check is not None:
        _check_contents([file for file in wanted if file.path in there], now, check, hold_id, now_again, report)
    return report


def _partition(life: Life, files: Sequence[LakeFile], state: LakeState) -> LakePartition:
    covered = state.covered(life)
    sums = (len(files), sum(file.rows for file in files), sum(file.bytes for file in files))
    return LakePartition(life, covered[0].first, covered[-1].end, *sums)


def holes(life: Life, state: LakeState) -> Iterator[Problem]:
    """Ranges between files for which no manifest has a reason."""
    for left, right in pairwise(state.covered(life)):
        yield Problem(GAP, life.topic, life.partition, left.end, right.first, "", "no file of the lake has them")


def broken_links(files: Iterable[LakeFile]) -> Iterator[Problem]:
    """Files that are not chained to the one before although they begin where it ends."""
    for before, file in pairwise(files):
        unknown = file.chain_before is None or before.flags & BROKEN_CHAIN
        if _meet(before, file) and not unknown and file.chain_before != before.chain:
            yield problem(file, MISMATCH, f"it is not chained to {before.path}: they are of different logs")


def _meet(before: LakeFile, file: LakeFile) -> bool:
    return before.end == file.first and before.end_log_id == file.first_log_id


def _check_files(
    store: Store,
    topics: Sequence[str],
    wanted: Sequence[LakeFile],
    report: LakeReport,
    progress: Callable[[int, int], None],
) -> set[str]:
    """Check sizes by a listing, and footers by reading the ends of files; returns the paths with the right sizes."""
    sizes = {
        found.path: found.size
        for topic in topics
        for found in store.list(f"{names.DATA}/topic={topic}", recursive=True)
    }
    there = []
    for file in wanted:
        if file.path not in sizes:
            report.problems.append(problem(file, GAP, "the file is gone"))
        elif sizes[file.path] != file.bytes:
            sized = f"the file has {sizes[file.path]} bytes, but was written with {file.bytes}"
            report.problems.append(problem(file, MISMATCH, sized))
        else:
            there.append(file)
    stray = sorted(set(sizes) - {file.path for file in wanted})
    until = replaced(store) if stray else {}
    if merged := [path for path in stray if path in until]:
        removed = datetime.fromtimestamp(-(-max(until[path] for path in merged) // _MINUTE_NS) * 60)
        report.notes.append(
            f"{len(merged)} files replaced by compact; the first compact after {removed:%Y-%m-%d %H:%M} removes them"
        )
    stray = [path for path in stray if path not in until]
    if stray:
        which = f"{len(stray)} files are not in any manifest, such as {stray[0]}"
        report.notes.append(f"{which}: of a run that is not finished, or was killed")
    done = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda file: list(_footer_problems(file, store)), there):
            report.problems += found
            done += 1
            progress(done, len(there))
    return {file.path for file in there}


def _footer_problems(file: LakeFile, store: Store) -> Iterator[Problem]:
    try:
        with store.open(file.path) as source:
            footer = footer_of(open_file(source))
    except FileNotFoundError:
        yield problem(file, GAP, "the file is gone")
    except BadFile as error:
        yield problem(file, MISMATCH, str(error))
    else:
        yield from (problem(file, MISMATCH, why) for why in differences(file, footer))


# ---- against the log


def _check_log(life: Life, pin: PinnedPartition, state: LakeState, report: LakeReport) -> None:
    """Check that the lake has all that the log still has, up to the lake's end."""
    covered = state.covered(life)
    start = pin.start.offset
    if not covered:
        _check_new(life, pin, state, report)
        return
    if start > covered[-1].end:
        why = "neither the lake nor the log has them: retention removed them, or manifests are lost"
        report.problems.append(Problem(GAP, life.topic, life.partition, covered[-1].end, start, "", why))
    end = covered[-1].end
    whole = OffsetRange(pin.start.offset, min(end, pin.end.offset))
    inner = OffsetRange(covered[0].first, end)
    for first, behind in without(whole, covered):
        if behind <= inner.first:
            report.problems.append(
                Problem(GAP, life.topic, life.partition, first, behind, "", "the log has them, the lake begins later")
            )
    if end > pin.end.offset:
        why = "the log ends before them: it was truncated (an unclean election, a restored backup)"
        report.problems.append(Problem(MISMATCH, life.topic, life.partition, pin.end.offset, end, "", why))
    for partition in report.partitions:
        if partition.life == life:
            partition.behind = max(pin.end.offset - end, 0)


def _check_new(life: Life, pin: PinnedPartition, state: LakeState, report: LakeReport) -> None:
    """Check a life of which the lake has nothing: if it is new, its log begins with its first message."""
    start, end = pin.start.offset, pin.end.offset
    report.partitions.append(LakePartition(life, start, start, 0, 0, 0, end - start))
    lives = [one for one in {*state.files, *state.missing} if one.topic == life.topic]
    if start:
        why = "neither the lake nor the log has them: retention removed them before they were archived"
        report.problems.append(Problem(GAP, life.topic, life.partition, 0, start, "", why))
    if end > start and lives and not any(one.topic_uid == life.topic_uid for one in lives):
        theirs = ", ".join(sorted({f"{one.topic_uid:016x}" for one in lives}))
        why = f"the lake has only other topics of this name (uid {theirs}, the log's is {life.topic_uid:016x})"
        report.problems.append(Problem(GAP, life.topic, life.partition, start, end, "", why))
    elif end > start:
        report.notes.append(f"{life}: offsets [{start}, {end}) of the log are not in the lake yet")


def _check_missing(
    life: Life, pin: PinnedPartition, state: LakeState, read: Read, hold_id: str, report: LakeReport
) -> None:
    """Check that the log does not have what was recorded as missing."""
    for gap in state.missing.get(life, ()):
        first, end = max(gap.first, pin.start.offset), min(gap.end, pin.end.offset)
        if first >= end:
            continue
        files = state.files.get(life, ())
        cuts = [CutPoint(file.end, file.end_log_id, 0, 0) for file in files if pin.start.offset <= file.end <= first]
        low = max(cuts, default=pin.start)
        cuts = [CutPoint(file.first, file.first_log_id, 0, 0) for file in files if end <= file.first <= pin.end.offset]
        high = min(cuts, default=pin.end)
        at = pin.end.log_id - 1, pin.chain
        borders = (low.log_id, high.log_id, low.offset, high.offset)
        split = Split(pin.identity, first, end, *borders, *at, pin.replicas, pin.path, hold_id)
        try:
            for _, batches in read(split, lambda *_: None):
                for batch in batches:
                    offsets = batch.column("offset")
                    there = offsets[0].as_py(), offsets[-1].as_py() + 1
                    why = f"recorded as missing ({gap.reason}), but the log has them"
                    report.problems.append(Problem(MISMATCH, life.topic, life.partition, *there, "", why))
        except Gone:
            continue
        except ReadFailed as error:
            report.failed.append(str(error))


def _check_anchors(
    life: Life, pin: PinnedPartition, files: Sequence[LakeFile], read: Read, hold_id: str, report: LakeReport
) -> None:
    """Check that the last entry of each unbroken part of the lake is the log's, if the log has it."""
    for file in anchors(files):
        log_id = file.end_log_id - 1
        if not pin.start.log_id <= log_id < pin.end.log_id or file.end > pin.end.offset:
            continue
        report.anchors += 1
        # The replica proves that it has the snapshot's end, so its entry is the log's, whatever the lake has.
        at = pin.end.log_id - 1, pin.chain
        borders = (file.end, file.end, log_id, log_id + 1, file.end, file.end)
        split = Split(pin.identity, *borders, *at, pin.replicas, pin.path, hold_id)
        try:
            chains = [int(entries.table["chain"][-1]) for entries, _ in read(split, lambda *_: None)]
        except Gone:
            report.anchors -= 1
            report.notes.append(f"{life}: retention removed log id {log_id} before the lake was compared with it")
        except ReadFailed as error:
            report.failed.append(str(error))
        else:
            if chains[-1:] != [file.chain]:
                theirs = f"{chains[-1]:016x}" if chains else "none"
                why = f"the log's entry {log_id} has chain {theirs}, but the manifest {file.chain:016x}"
                report.problems.append(problem(file, MISMATCH, why))


def anchors(files: Sequence[LakeFile]) -> Iterator[LakeFile]:
    """The last file of each part whose links are proven."""
    for file, behind in pairwise(files):
        if not _meet(file, behind) or behind.chain_before is None or file.flags & BROKEN_CHAIN:
            yield file
    if files:
        yield files[-1]


def _check_contents(
    files: Sequence[LakeFile],
    now: dict[Life, PinnedPartition],
    check: Check,
    hold_id: str,
    now_again: Callable[[], Sequence[PinnedPartition]] | None,
    report: LakeReport,
) -> None:
    """Check all files by tasks. If retention was faster, check again with what the log has left."""
    for again in range(AGAIN_MAX + 1):
        gone = []
        work = [(file, split_of(file, now.get(file.life), hold_id)) for file in files]
        for file, found in zip(files, check(work), strict=True):
            if found.gone and now_again is not None:
                gone.append(file)
                continue
            report.rows_read += found.rows
            report.rows_compared += found.compared
            report.problems += [one for one in found.problems if one not in report.problems]
            if found.failed:
                report.failed.append(found.failed)
        if not gone or now_again is None:
            return
        # The last time they are read without the log, which loses them too fast.
        files, now = gone, {life_of(pin): pin for pin in now_again()} if again < AGAIN_MAX - 1 else {}


def split_of(file: LakeFile, pin: PinnedPartition | None, hold_id: str = "") -> Split | None:
    """The part of a file that the log still has; None if there is none."""
    if pin is None or file.end_log_id > pin.end.log_id or file.end <= pin.start.offset:
        return None
    low = CutPoint(file.first, file.first_log_id, 0, 0)
    if file.first_log_id < pin.start.log_id:
        low = pin.start
    first = max(file.first, low.offset)
    if first >= file.end:
        return None
    return Split(
        pin.identity,
        first,
        file.end,
        low.log_id,
        file.end_log_id,
        low.offset,
        file.end,
        pin.end.log_id - 1,
        pin.chain,
        pin.replicas,
        pin.path,
        hold_id,
    )
