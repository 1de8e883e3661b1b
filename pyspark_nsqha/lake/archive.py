"""The archive: everything committed goes into the lake, and retention waits for it.

    Snapshot with a hold ---> reader channel: made, or raised to what the lake has ---> rounds ---> hold released
                                                                                          |
                                                     CommitReader after each commit <-----+

The channel's floor moves after the commit, so nothing is unlinked that is not in the lake. It is made while the hold
keeps what is in the snapshot. The lake decides what is done, never the channel: a floor behind the lake (after a crash
between commit and floor) is raised; a floor ahead of the lake means that another program moved it, or that it belongs
to another lake, and then nothing is done.

New partitions, and new topics of a pattern, are in the next snapshot. A topic that was created again has another uid,
so its messages are stored besides those of the old one. A range that retention removed before it was archived is
recorded as missing: that is possible only after the lake's first message.

A failing partition does not stop the others: one without a leader, with a truncated log, or with a floor that another
program moved or that cannot be raised. It is reported in the totals, and tried again by the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pyspark_nsqha.lake.commits.manifest import RETENTION, LakeState, Life, Missing, OffsetRange, without
from pyspark_nsqha.lake.plan import life_of
from pyspark_nsqha.lake.rounds import Rounds, RoundTotals, WantedPartition
from pyspark_nsqha.model import NoBroker, PinnedPartition, ReadFailed
from pyspark_nsqha.snapshot import Snapshot, SnapshotRequest

HOLD_MS = 15 * 60 * 1000
CHANNEL = "archive"


class Log(Protocol):
    """The part of the segment service's client that is used here: `snapshot.Segments`, or a fake."""

    def snapshot(self, asked: SnapshotRequest, *, partial: bool = False) -> Snapshot:
        """What is committed; with `partial`, of partitions that answer. ReadFailed."""

    def release_hold(self, hold_id: str) -> int:
        """End a hold. ReadFailed."""

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False, topic_uid: int = 0
    ) -> dict[int, int]:
        """Move floors of a reader channel, which is created if it does not exist. ReadFailed."""


@dataclass(frozen=True)
class Subject:
    """The topics to archive, and the channel."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    channel: str = CHANNEL


def once(
    log: Log,
    rounds: Rounds,
    subject: Subject,
    *,
    progress: Callable[[RoundTotals, int], None] = lambda totals, left: None,
    warn: Callable[[str], None] = lambda line: None,
) -> RoundTotals:
    """Archive what is committed now. ReadFailed, StoreFailed, DataLoss, Overlap, BadManifest; each says what to do.

    ReadFailed if no partition can be read, or no floor moved; if only some partitions fail, they are in the totals."""
    asked = SnapshotRequest(subject.topics, subject.pattern, channel=subject.channel, hold_ms=HOLD_MS)
    rounds.step("snapshot")
    found = log.snapshot(asked, partial=True)
    try:
        rounds.step("state")
        state = rounds.commits.state(durable=True)
        failed = begun(found, state, rounds)
        for pin in found.pins:
            if why := _not_fitting(pin, state, found, subject, rounds.store.uri):
                failed[life_of(pin)] = why
        fitting = [pin for pin in found.pins if life_of(pin) not in failed]
        wanted = divided(log, wanted_of(fitting, state), state, failed)
        rounds.step("channel")
        floors = dict(found.floors)
        _raise_floors(log, [one.pin for one in wanted], floors, state, subject, failed)
        wanted = [replace(one, hold_id=found.hold_id) for one in wanted if one.life not in failed]
        pins = [one.pin for one in wanted]
        if failed and not wanted:
            raise ReadFailed(next(iter(failed.values())))

        def committed(after: LakeState) -> None:
            rounds.step("floors")
            _raise_floors(log, pins, floors, after, subject, failed)
            if all(life_of(pin) in failed for pin in pins):
                raise ReadFailed(failed[life_of(pins[0])])

        totals = rounds.carry_out(wanted, committed=committed, progress=progress)
        add_failed(totals, found, failed)
    finally:
        release(log, found.hold_id)
    for gap in totals.missing:
        warn(f"{gap.life}: offsets [{gap.first}, {gap.end}) are missing: {gap.reason}")
    return totals


def begun(found: Snapshot, state: LakeState, rounds: Rounds) -> dict[Life, str]:
    """Check that the lake is of this cluster; returns why some partitions are not in the snapshot. ReadFailed."""
    check_cluster(found, state, rounds.store.uri)
    rounds.cluster = found.cluster
    return {Life(key[0], 0, key[1]): _no_snapshot(*key, why) for key, why in found.failed.items()}


def check_cluster(found: Snapshot, state: LakeState, uri: str) -> None:
    """ReadFailed if the lake is of another cluster."""
    if found.cluster and state.cluster not in ("", found.cluster):
        raise ReadFailed(
            f"{uri} is the lake of cluster {state.cluster}, but these brokers are of cluster {found.cluster}: use "
            "another lake for each cluster"
        )


def _no_snapshot(topic: str, partition: int, why: str) -> str:
    return f"{topic}/{partition}: no snapshot: {why}; `nsqha topic show` shows its leader"


def add_failed(totals: RoundTotals, found: Snapshot, failed: Mapping[Life, str]) -> None:
    """Add the partitions without rounds, or whose floor was not moved."""
    totals.partitions = len(found.pins) + len(found.failed)
    totals.failed = {**failed, **totals.failed}


def wanted_of(pins: Sequence[PinnedPartition], state: LakeState) -> list[WantedPartition]:
    """Each partition as a whole, with what retention removed of it since the lake's first message."""
    found = []
    for pin in pins:
        life = life_of(pin)
        covered = state.covered(life)
        gone = without(OffsetRange(covered[0].first, pin.start.offset), covered) if covered else ()
        found.append(WantedPartition(pin, None, tuple(Missing(*life, *gap, RETENTION) for gap in gone)))
    return found


def divided(
    log: Log, wanted: Sequence[WantedPartition], state: LakeState, failed: dict[Life, str]
) -> list[WantedPartition]:
    """`wanted` with the borders at which the log may be divided, where something is to be written. Partitions that
    cannot be asked for them are left out, and added to `failed`."""
    ranges = []
    for one in wanted:
        start, end = one.pin.start.offset, one.pin.end.offset
        whole = (
            OffsetRange(start, end)
            if one.range is None
            else OffsetRange(max(start, one.range.first), min(end, one.range.end))
        )
        ranges += [(one.life.topic, one.life.partition, *todo) for todo in without(whole, state.covered(one.life))]
    if not ranges:
        return list(wanted)
    topics = tuple(sorted({topic for topic, *_ in ranges}))
    answer = log.snapshot(SnapshotRequest(topics, ranges=tuple(ranges)), partial=True)
    now = {life_of(pin): pin for pin in answer.pins}
    found = []
    for one in wanted:
        key = one.life.topic, one.life.partition
        if key in answer.failed:
            failed[one.life] = _no_snapshot(*key, answer.failed[key])
            continue
        cuts = now[one.life].cuts if one.life in now else ()
        last = one.pin.end
        inside = tuple(cut for cut in cuts if cut.log_id < last.log_id)
        replicas = now[one.life].replicas if one.life in now else one.pin.replicas
        found.append(replace(one, pin=replace(one.pin, cuts=(*inside, last), replicas=replicas)))
    return found


def _not_fitting(pin: PinnedPartition, state: LakeState, found: Snapshot, subject: Subject, uri: str) -> str:
    """Why lake, log and channel contradict each other; empty if they do not."""
    life = life_of(pin)
    end = state.end(life)
    if end is not None and end > pin.end.offset:
        return (
            f"{life}: {uri} has messages up to offset {end}, but the log ends at {pin.end.offset}: the log was "
            "truncated (an unclean election, a restored backup); archive to another lake"
        )
    floor = found.floors.get((life.topic, life.partition))
    there = state.covered_from(life, pin.start.offset)
    if floor is not None and floor > max(there, pin.start.offset):
        return (
            f"{life}: channel {subject.channel} is at offset {floor}, but {uri} has nothing from offset {there} on: "
            "another lake uses this channel, or files are lost; give --channel another name, or go back: "
            f"nsqha seek {life} {subject.channel} {there}"
        )
    return ""


def _raise_floors(
    log: Log,
    pins: Sequence[PinnedPartition],
    floors: dict[tuple[str, int], int],
    state: LakeState,
    subject: Subject,
    failed: dict[Life, str],
) -> None:
    """Move each floor to the end of what is in the lake without a gap; missing channels are created. `floors` has the
    present floors and is updated; `failed` gets those that could not be moved. ReadFailed if no broker answers."""
    moves: dict[tuple[str, int, bool], dict[int, int]] = {}
    for pin in pins:
        life = life_of(pin)
        floor = floors.get((life.topic, life.partition))
        there = state.covered_from(life, pin.start.offset)
        if floor is None or floor < there:
            moves.setdefault((life.topic, life.topic_uid, floor is None), {})[life.partition] = there
    for (topic, uid, new), offsets in sorted(moves.items()):
        for partition, why in _moved(log, topic, uid, new, offsets, subject.channel).items():
            if why:
                failed[Life(topic, uid, partition)] = f"{topic}/{partition}: {why}"
            else:
                failed.pop(Life(topic, uid, partition), None)
                floors[topic, partition] = offsets[partition]


def _moved(log: Log, topic: str, uid: int, new: bool, offsets: dict[int, int], channel: str) -> dict[int, str]:
    """Why the floors of a topic were not moved, by partition; empty if moved. ReadFailed if no broker answers."""
    try:
        log.commit_reader(topic, channel, offsets, back=new, topic_uid=uid)
        return dict.fromkeys(offsets, "")
    except ReadFailed as error:
        if isinstance(error, NoBroker):
            raise
        if len(offsets) == 1:
            return dict.fromkeys(offsets, str(error))
    found: dict[int, str] = {}
    for partition, offset in offsets.items():
        found |= _moved(log, topic, uid, new, {partition: offset}, channel)
    return found


def release(log: Log, hold_id: str) -> None:
    """Release the hold; if no broker answers, it ends by itself."""
    if hold_id:
        try:
            log.release_hold(hold_id)
        except ReadFailed:
            pass
