"""A backfill: writes a range of time into the lake, once. It creates no channel and moves none.

    [from, until) --Snapshot with these times, and a hold--> offsets per partition --> rounds --> hold released

All messages of a batch have one timestamp, and timestamps never fall, so a time is a border between two batches. What
the lake already has is skipped: a backfill that was killed continues where it was, and one over the range of an archive
adds nothing. Messages of the range that neither lake nor log has are recorded as missing if the lake has messages on
both sides, else there is a warning. Partitions without a leader are reported in the totals and do not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pyspark_nsqha.lake.archive import HOLD_MS, Log, add_failed, begun, divided, release
from pyspark_nsqha.lake.commits.manifest import RETENTION, LakeFile, LakeState, Missing, OffsetRange, without
from pyspark_nsqha.lake.plan import life_of
from pyspark_nsqha.lake.rounds import DataLoss, Rounds, RoundTotals, WantedPartition
from pyspark_nsqha.model import PinnedPartition, ReadFailed
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest


def backfill(
    log: Log,
    rounds: Rounds,
    *,
    topics: tuple[str, ...] = (),
    pattern: str = "",
    since_ns: int | None = None,
    until_ns: int | None = None,
    strict: bool = False,
    progress: Callable[[RoundTotals, int], None] = lambda totals, left: None,
    warn: Callable[[str], None] = lambda line: None,
) -> RoundTotals:
    """Write messages whose batch has a time in [since, until); None: from the log's start, to its committed end.

    ReadFailed, StoreFailed, DataLoss, Overlap, BadManifest; each says what to do.
    """
    times = tuple(at for at in (since_ns, until_ns) if at is not None)
    rounds.step("snapshot")
    found = log.snapshot(
        SnapshotRequest(topics, pattern, times_ns=tuple(sorted(set(times))), hold_ms=HOLD_MS), partial=True
    )
    try:
        rounds.step("state")
        state = rounds.commits.state()
        failed = begun(found, state, rounds)
        if failed and not found.pins:
            raise ReadFailed(next(iter(failed.values())))
        wanted = [_wanted(pin, found, state, since_ns, until_ns) for pin in found.pins]
        for pin in found.pins:
            if why := _too_late(pin, state, since_ns, until_ns):
                if strict:
                    raise DataLoss(f"{why}; without --strict the rest is written")
                warn(why)
        parts = [replace(one, hold_id=found.hold_id) for one in divided(log, wanted, state, failed)]
        totals = rounds.carry_out(parts, progress=progress)
        add_failed(totals, found, failed)
    finally:
        release(log, found.hold_id)
    for gap in totals.missing:
        warn(f"{gap.life}: offsets [{gap.first}, {gap.end}) are missing: {gap.reason}")
    return totals


def _wanted(
    pin: PinnedPartition, found: Snapshot, state: LakeState, since_ns: int | None, until_ns: int | None
) -> WantedPartition:
    """The range of one partition, and the parts of it that are known to be gone."""
    times = found.times.get((pin.identity.topic, pin.identity.partition), {})
    first = pin.start.offset if since_ns is None else times[since_ns]
    end = pin.end.offset if until_ns is None else times[until_ns]
    life = life_of(pin)
    gone = [
        Missing(*life, *hole, RETENTION)
        for hole, left_ns, right_ns in _holes(pin, state.files.get(life, ()), state)
        if (until_ns is None or left_ns < until_ns) and (since_ns is None or right_ns >= since_ns)
    ]
    return WantedPartition(pin, OffsetRange(first, max(first, end)), tuple(gone))


def _holes(pin: PinnedPartition, files: Sequence[LakeFile], state: LakeState) -> Iterator[tuple[OffsetRange, int, int]]:
    """Ranges below the log start that the lake lacks although it has something before them, with the times of the
    messages on both sides."""
    if not files:
        return
    covered = state.covered(life_of(pin))
    for hole in without(OffsetRange(covered[0].first, pin.start.offset), covered):
        left = max((file.last_timestamp_ns for file in files if file.end <= hole.first), default=0)
        right = min((file.first_timestamp_ns for file in files if file.first >= hole.end), default=0)
        yield hole, left, right if hole.end < pin.start.offset else pin.start.timestamp_ns


def _too_late(pin: PinnedPartition, state: LakeState, since_ns: int | None, until_ns: int | None) -> str:
    """A warning about messages before everything that log and lake have; empty if there can be none."""
    life = life_of(pin)
    covered = state.covered(life)
    first = min([pin.start.offset, *(one.first for one in covered)])
    at_ns = pin.start.timestamp_ns
    if files := state.files.get(life):
        at_ns = min(at_ns, files[0].first_timestamp_ns)
    if not first or (since_ns is not None and since_ns >= at_ns) or (until_ns is not None and until_ns <= 0):
        return ""
    return f"{life}: log and lake begin at offset {first}: what was before is gone, possibly a part of this range"
