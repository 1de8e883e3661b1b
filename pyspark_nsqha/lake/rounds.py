"""Rounds: plan, write, commit, until everything wanted is in the lake.

    state -> tidy -> pieces -> plan stored -> tasks write files -> checked -> commit -> floors -> tidy ..
      ^                                                                   | Moved: another run committed
      +-------------------------------------------------------------------+

A crash between any two of these steps leaves a lake that the next run completes: what was committed is there once; what
was written and not committed is written again, at the same borders, over the same names. Nothing is committed without
these checks: each partition's pieces follow each other without a gap, are chained to each other and to what the lake
has, and the driver sees their files.

An error of the store fails the round, and nothing of it is committed. A partition that cannot be read is left out from
then on; the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from nsqha.commitlog.entry import BROKEN_CHAIN, decode, genesis, next_chain
from pyspark_nsqha.lake import names, plan
from pyspark_nsqha.lake.commits.commit import Commits, Moved
from pyspark_nsqha.lake.commits.manifest import Addition, LakeFile, LakeState, Life, Missing, OffsetRange, without
from pyspark_nsqha.lake.compact import noted
from pyspark_nsqha.lake.plan import LakePiece, Planned
from pyspark_nsqha.lake.store import Store, StoreFailed
from pyspark_nsqha.lake.task import PieceOutcome
from pyspark_nsqha.model import PinnedPartition, Split

MOVED_MAX = 100  # commits that other runs may make first; then something is wrong
STALE_NS = 3600 * 10**9  # age after which a temporary file is removed, also if the plan of its run is not finished

Write = Callable[[Sequence[Split], str], list[PieceOutcome]]
"""Runs `task.write_piece` for each split, such as in Spark, with the name of a run; outcomes in the same order."""
Step = Callable[[str], None]
"""Called with the name of each step before it begins."""


class DataLoss(Exception):
    """Messages are missing, and `strict` does not allow that; nothing of the round was committed."""


@dataclass(frozen=True)
class WantedPartition:
    """One partition to write into the lake, as a whole or a range, and the parts that are known to be gone."""

    pin: PinnedPartition
    range: OffsetRange | None = None
    gone: tuple[Missing, ...] = ()
    hold_id: str = ""

    @property
    def life(self) -> Life:
        return plan.life_of(self.pin)


@dataclass
class RoundTotals:
    """The totals of all rounds of a run."""

    files: int = 0
    rows: int = 0
    bytes: int = 0  # of files
    log_bytes: int = 0
    missing: list[Missing] = field(default_factory=list)
    failed: dict[Life, str] = field(default_factory=dict)
    rounds: int = 0
    partitions: int = 0  # that were requested, including those that failed


@dataclass(frozen=True)
class RoundSettings:
    """The settings of a run."""

    run: str  # a name that no other run has
    split_bytes: int = plan.SPLIT_BYTES
    round_bytes: int = plan.ROUND_BYTES
    strict: bool = False


def _nothing(_: object) -> None:
    pass


class Rounds:
    """Writes what is wanted into one lake."""

    def __init__(
        self, commits: Commits, store: Store, write: Write, settings: RoundSettings, *, step: Step = _nothing
    ) -> None:
        self.commits = commits
        self.store = store
        self._write = write
        self._settings = settings
        self.step = step
        self.cluster = ""  # whose log it is; the first manifest says so

    def carry_out(
        self,
        wanted: Sequence[WantedPartition],
        *,
        committed: Callable[[LakeState], None] = _nothing,
        progress: Callable[[RoundTotals, int], None] = lambda totals, left: None,
    ) -> RoundTotals:
        """Run rounds until nothing is left. `committed` is called after each commit, `progress` with the bytes left.

        StoreFailed, DataLoss, Overlap or BadManifest: what was committed before stays.
        """
        totals, moved = RoundTotals(), 0
        while moved < MOVED_MAX:
            self.step("state")
            state = self.commits.state(durable=True)
            self.step("tidy")
            earlier = self.tidy(state, [one.pin for one in wanted])
            todo = [piece for one in wanted for piece in self._pieces(one, state, earlier, totals)]
            gone = [gap for one in wanted for gap in _unrecorded(one.gone, state)]
            progress(totals, sum(piece.log_bytes for piece in todo))
            if not todo and not gone:
                return totals
            part = next(plan.rounds(todo, self._settings.round_bytes), [])
            self._write_down(part, earlier, state)
            try:
                addition = self._written(part, gone, state, totals)
                if not addition:
                    continue  # every partition of this round has failed, and is left out from now on
                self.step("commit")
                after = self.commits.append(state, addition, run=self._settings.run)
            except Moved:
                moved += 1
                continue
            _count(totals, addition, part)
            self.step("committed")
            committed(after)
        raise StoreFailed(f"other runs committed to {self.store.uri} {MOVED_MAX} times meanwhile; try again")

    def tidy(self, state: LakeState, pins: Sequence[PinnedPartition] = ()) -> list[Planned]:
        """Remove files that can never count any more; returns the planned ranges of other runs, and of this one, that
        are not in the lake yet. `pins`: the logs; ranges that they do not have any more are dropped."""
        found: list[Planned] = []
        finished: set[str] = set()
        plans = list(self.store.list(names.PLAN))
        # Merged files stay for their present readers.
        kept = noted(self.store) if plans else set()
        for file in plans:
            try:
                planned = plan.decode(self.store.read(file.path))
            except FileNotFoundError:
                continue
            for one in planned:
                for path in plan.dead_files(one, self._data_files(one), state):
                    if path not in kept:
                        self.store.remove(path)
            if still := [one for one in plan.still_open(planned, state) if not _over(one, pins)]:
                found += still
            else:
                self.store.remove(file.path)
                finished.add(names.run_of_plan(file.path))
        now = time.time_ns()
        for file in list(self.store.list(names.TEMPORARY)):
            if names.run_of_temporary(file.path) in finished or now - file.modified_ns > STALE_NS:
                self.store.remove(file.path)
        return found

    def _data_files(self, planned: Planned) -> list[str]:
        folders = {names.day_folder(planned.life.topic, day) for day in planned.days}
        return [file.path for folder in sorted(folders) for file in self.store.list(folder)]

    def _pieces(
        self, one: WantedPartition, state: LakeState, earlier: Iterable[Planned], totals: RoundTotals
    ) -> list[LakePiece]:
        if one.life in totals.failed:
            return []
        return plan.pieces(
            one.pin,
            state,
            wanted=one.range,
            earlier=earlier,
            split_bytes=self._settings.split_bytes,
            hold_id=one.hold_id,
        )

    def _write_down(self, part: list[LakePiece], earlier: Sequence[Planned], state: LakeState) -> None:
        """Store the plan of this round, without what is already in a plan."""
        known = {(one.life, one.range) for one in earlier}
        new = [piece.planned for piece in part if (piece.life, piece.planned.range) not in known]
        if new:
            self.step("plan")
            run = self._settings.run
            self.store.write(names.plan(run, state.sequence), plan.encode(new), run=run)

    def _written(self, part: list[LakePiece], gone: list[Missing], state: LakeState, totals: RoundTotals) -> Addition:
        """Write the files of this round and check them. Partitions that failed are added to `totals`."""
        self.step("write")
        outcomes = self._write([piece.split for piece in part], self._settings.run) if part else []
        self.step("check")
        refused = [outcome.failed for outcome in outcomes if outcome.store_failed]
        if refused:
            raise StoreFailed(f"{refused[0]}; nothing of this round was committed")
        good: list[PieceOutcome] = []
        for piece, outcome in zip(part, outcomes, strict=True):
            if piece.life in totals.failed:
                continue
            before = _before(piece, good, state)
            why = outcome.failed or not_a_piece(outcome) or broken_link(before, outcome)
            if why:
                totals.failed[piece.life] = why
                continue
            good.append(linked(outcome, before))
        files = tuple(file for outcome in good for file in outcome.addition.files)
        missing = (*gone, *(gap for outcome in good for gap in outcome.addition.missing))
        if missing and self._settings.strict:
            gap = missing[0]
            raise DataLoss(
                f"{gap.life}: offsets [{gap.first}, {gap.end}) are missing ({gap.reason}); nothing of this round was "
                "committed; without --strict they are recorded as missing, and the rest is archived"
            )
        self._check_visible(files, state)
        return Addition(files, missing, cluster="" if state.cluster else self.cluster)

    def _check_visible(self, files: Iterable[LakeFile], state: LakeState) -> None:
        """Check that the driver sees what tasks wrote on their machines. Moved: another run has removed it, because it
        has committed the same messages."""
        sizes: dict[str, int] = {}
        folders: set[str] = set()
        for file in files:
            folder = names.day_folder(file.topic, file.day)
            if folder not in folders:
                folders.add(folder)
                sizes.update((found.path, found.size) for found in self.store.list(folder))
            if sizes.get(file.path) != file.bytes:
                if self.commits.state().sequence != state.sequence:
                    raise Moved(f"{file.path} has been removed")
                raise StoreFailed(
                    f"{file.path} was written, but {self.store.uri} does not show it on this machine: check that it is "
                    "the same folder on every machine; nothing of this round was committed"
                )


def _over(planned: Planned, pins: Sequence[PinnedPartition]) -> bool:
    """Whether the log does not have the planned range any more: another topic uid, or removed by retention."""
    lives = {plan.life_of(pin): pin for pin in pins}
    if planned.life in lives:
        return planned.end <= lives[planned.life].start.offset
    uids = {life.topic_uid for life in lives if life.topic == planned.life.topic}
    return bool(uids) and planned.life.topic_uid not in uids


def _unrecorded(gone: Iterable[Missing], state: LakeState) -> list[Missing]:
    """Gaps that are not recorded in the lake yet."""
    return [
        Missing(*gap.life, *left, gap.reason)
        for gap in gone
        for left in without(OffsetRange(gap.first, gap.end), state.covered(gap.life))
    ]


def _count(totals: RoundTotals, addition: Addition, part: Iterable[LakePiece]) -> None:
    totals.rounds += 1
    totals.files += len(addition.files)
    totals.rows += sum(file.rows for file in addition.files)
    totals.bytes += sum(file.bytes for file in addition.files)
    totals.log_bytes += sum(piece.log_bytes for piece in part if piece.life not in totals.failed)
    totals.missing += addition.missing


def _before(piece: LakePiece, good: Iterable[PieceOutcome], state: LakeState) -> LakeFile | None:
    """The file of this round or of the lake that ends where a piece begins."""
    of_round = (file for outcome in good for file in outcome.addition.files)
    for file in (*of_round, *state.files.get(piece.life, ())):
        if file.life == piece.life and file.end == piece.planned.first:
            return file
    return None


def not_a_piece(outcome: PieceOutcome) -> str:
    """Why files and gaps of an outcome are not exactly its split; empty if they are."""
    addition = outcome.addition
    written = sorted(
        [(file.first, file.end) for file in addition.files] + [(gap.first, gap.end) for gap in addition.missing]
    )
    at = outcome.split.first
    for first, end in written:
        if first != at:
            break
        at = end
    else:
        if at == outcome.split.end:
            return ""
    where = f"{outcome.split.identity.topic}/{outcome.split.identity.partition}"
    return (
        f"{where}: a task wrote {written} of [{outcome.split.first}, {outcome.split.end}): it has another nsqha version"
    )


def broken_link(before: LakeFile | None, outcome: PieceOutcome) -> str:
    """Why the first entry of a piece does not follow the file before it; empty if it does, or it is not known."""
    entry = decode(outcome.first_entry) if outcome.first_entry else None
    if before is None or entry is None or entry.log_id != before.end_log_id or before.flags & BROKEN_CHAIN:
        return ""
    if next_chain(before.chain, entry) == entry.chain:
        return ""
    return (
        f"{before.life}: log id {entry.log_id}, offset {before.end}, does not follow what the lake has up to there: "
        "the log was truncated and written again (an unclean election, a restored backup); archive to another lake"
    )


def linked(outcome: PieceOutcome, before: LakeFile | None) -> PieceOutcome:
    """The outcome with the chain before its first file, if that file follows another one."""
    files = outcome.addition.files
    if not files:
        return outcome
    if files[0].first_log_id == 1:
        chain = genesis(files[0].topic_uid, files[0].partition).chain
    elif before is not None and files[0].first_log_id == before.end_log_id:
        chain = before.chain
    else:
        return outcome
    chained = (replace(files[0], chain_before=chain), *files[1:])
    return replace(outcome, addition=replace(outcome.addition, files=chained))
