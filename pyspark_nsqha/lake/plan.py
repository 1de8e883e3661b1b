"""Plans which messages are not in the lake yet, and how they are divided among tasks.

    log      start ------------------------------------- end
    lake          [==========)       [====)
    todo     [---)            [-----)      [------------)
    pieces   [---)            [-----)      [------|-----)     at cuts, about `split_bytes` each

Pieces begin and end at borders of batches wherever one is known: cuts of the snapshot, ends of files, and borders of an
earlier plan. A run first stores its plan. The next run after a crash divides at the same borders, so it writes the same
files over the existing ones, and no file is left that no commit names.

A file that overlaps what is committed, and that no commit names, can never count any more: two archivers ran at once
and one was later. Any run may remove it at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyspark_nsqha.lake import names
from pyspark_nsqha.lake.commits.manifest import LakeState, Life, OffsetRange, without
from pyspark_nsqha.model import CutPoint, PinnedPartition, Split

SPLIT_BYTES = 64 << 20
ROUND_BYTES = 4 << 30


class Planned(NamedTuple):
    """A range of an earlier plan: its borders, and the days that its files may be of."""

    life: Life
    first: int
    end: int
    first_log_id: int
    end_log_id: int
    first_day: str
    last_day: str

    @property
    def range(self) -> OffsetRange:
        return OffsetRange(self.first, self.end)

    @property
    def days(self) -> list[str]:
        return names.days_between(names.day_start(self.first_day), names.day_start(self.last_day))


@dataclass(frozen=True)
class LakePiece:
    """The range that one task writes, and its size in the log."""

    split: Split
    log_bytes: int
    planned: Planned

    @property
    def life(self) -> Life:
        return self.planned.life


def life_of(pin: PinnedPartition) -> Life:
    identity = pin.identity
    return Life(identity.topic, identity.topic_uid, identity.partition)


def pieces(
    pin: PinnedPartition,
    state: LakeState,
    *,
    wanted: OffsetRange | None = None,
    earlier: Iterable[Planned] = (),
    split_bytes: int = SPLIT_BYTES,
    hold_id: str = "",
) -> list[LakePiece]:
    """The pieces of one partition that are still to be written, ascending; of `wanted`, or of the whole log."""
    life = life_of(pin)
    whole = OffsetRange(pin.start.offset, pin.end.offset)
    if wanted is not None:
        whole = OffsetRange(max(whole.first, wanted.first), min(whole.end, wanted.end))
    borders = _borders(pin, state, life)
    hints = [plan for plan in earlier if plan.life == life]
    for plan in hints:
        borders.setdefault(plan.first, CutPoint(plan.first, plan.first_log_id, -1, 0))
        borders.setdefault(plan.end, CutPoint(plan.end, plan.end_log_id, -1, 0))
    found: list[LakePiece] = []
    for todo in without(whole, state.covered(life)):
        forced = {offset for plan in hints for offset in plan.range if todo.first < offset < todo.end}
        for first, end in _divided(todo, pin.cuts, forced, split_bytes):
            found.append(_piece(pin, life, OffsetRange(first, end), borders, hold_id))
    return found


def _borders(pin: PinnedPartition, state: LakeState, life: Life) -> dict[int, CutPoint]:
    """Known borders by offset. Batches without messages belong to the file after them at the start of the log, and to
    the one before them at its end; elsewhere the border of a file counts."""
    borders = {cut.offset: cut for cut in (*pin.cuts, pin.end, pin.start)}
    borders[pin.end.offset] = pin.end if pin.end.offset > pin.start.offset else pin.start
    for file in state.files.get(life, ()):
        borders[file.first] = CutPoint(file.first, file.first_log_id, -1, file.first_timestamp_ns)
        borders[file.end] = CutPoint(file.end, file.end_log_id, -1, file.last_timestamp_ns)
    return borders


def _divided(todo: OffsetRange, cuts: Sequence[CutPoint], forced: set[int], split_bytes: int) -> Iterator[OffsetRange]:
    """Divide `todo` at cuts: before a part would exceed `split_bytes`, and at the `forced` offsets."""
    first, at = todo.first, _position(cuts, todo.first)
    last: CutPoint | None = None
    inside = {cut.offset: cut for cut in cuts if todo.first < cut.offset < todo.end}
    for offset in sorted({*inside, *forced}):
        cut = inside.get(offset)
        if last is not None and cut is not None and cut.position - at > split_bytes:
            yield OffsetRange(first, last.offset)
            first, at, last = last.offset, last.position, None
        if offset in forced:
            yield OffsetRange(first, offset)
            first, at, last = offset, _position(cuts, offset), None
        else:
            last = cut
    end = _position(cuts, todo.end)
    if last is not None and end - at > split_bytes:
        yield OffsetRange(first, last.offset)
        first = last.offset
    yield OffsetRange(first, todo.end)


def _position(cuts: Sequence[CutPoint], offset: int) -> int:
    """The position of the last cut at or below a message."""
    return max((cut.position for cut in cuts if cut.offset <= offset), default=cuts[0].position if cuts else 0)


def _piece(
    pin: PinnedPartition, life: Life, wanted: OffsetRange, borders: dict[int, CutPoint], hold_id: str
) -> LakePiece:
    """One piece. For an unknown border the nearest one outside is used: the reader drops the rest."""
    everywhere = sorted({*borders.values(), pin.start, pin.end})
    low = borders.get(wanted.first) or max((cut for cut in everywhere if cut.offset <= wanted.first), default=pin.start)
    high = borders.get(wanted.end) or min((cut for cut in everywhere if cut.offset >= wanted.end), default=pin.end)
    cuts = pin.cuts or (pin.start, pin.end)
    split = Split(
        pin.identity,
        wanted.first,
        wanted.end,
        low.log_id,
        high.log_id,
        low.offset,
        high.offset,
        pin.end.log_id - 1,
        pin.chain,
        pin.replicas,
        pin.path,
        hold_id,
    )
    log_bytes = max(_position(cuts, wanted.end) - _position(cuts, wanted.first), 0)
    timed = [cut for cut in cuts if cut.timestamp_ns]  # 0: the entries at that border do not verify
    latest = min((cut.timestamp_ns for cut in timed if cut.offset >= wanted.end), default=pin.end.timestamp_ns)
    known = pin.start.timestamp_ns or latest
    earliest = max((cut.timestamp_ns for cut in timed if cut.offset <= wanted.first), default=known)
    days = names.day_of(earliest), names.day_of(max(latest, earliest))
    return LakePiece(split, log_bytes, Planned(life, *wanted, low.log_id, high.log_id, *days))


def rounds(found: Iterable[LakePiece], round_bytes: int = ROUND_BYTES) -> Iterator[list[LakePiece]]:
    """Divide the pieces into rounds that are committed one by one: partitions take turns, each in order."""
    queues: dict[Life, list[LakePiece]] = {}
    for piece in found:
        queues.setdefault(piece.life, []).append(piece)
    part: list[LakePiece] = []
    size = 0
    while queues:
        for life in list(queues):
            piece = queues[life].pop(0)
            if not queues[life]:
                del queues[life]
            part.append(piece)
            size += piece.log_bytes
            if size >= round_bytes:
                yield part
                part, size = [], 0
    if part:
        yield part


# ---- stored plans


def encode(planned: Iterable[Planned]) -> bytes:
    """The bytes of a plan."""
    return json.dumps([[*plan.life, *plan[1:]] for plan in planned], separators=(",", ":")).encode()


def decode(raw: bytes) -> list[Planned]:
    """Parse a plan; empty if it is not one: then its run died before it wrote any file."""
    try:
        rows: list[list[Any]] = json.loads(raw)
        return [Planned(Life(*row[:3]), *row[3:]) for row in rows]
    except (ValueError, TypeError):
        return []


def still_open(planned: Iterable[Planned], state: LakeState) -> list[Planned]:
    """The planned ranges that are not wholly in the lake: the rest is divided at these borders."""
    return [plan for plan in planned if list(without(plan.range, state.covered(plan.life)))]


def dead_files(plan: Planned, paths: Iterable[str], state: LakeState) -> list[str]:
    """The paths of files in the planned range that no commit names or ever can, as they overlap committed ones. Merged
    files are left out: they have no plan, and overlap the files that they replace until they are committed."""
    named = {file.path for file in state.files.get(plan.life, ())}
    covered = state.covered(plan.life)
    found = []
    for path in paths:
        name = names.parse_data(path)
        if (
            name is None
            or name.merged
            or path in named
            or Life(name.topic, name.topic_uid, name.partition) != plan.life
        ):
            continue
        inside = plan.first <= name.first and name.end <= plan.end
        if inside and any(first < name.end and name.first < end for first, end in covered):
            found.append(path)
    return found
