"""The archive: everything committed goes into the lake, and retention waits for it.

    Snapshot with a hold ---> reader channel: made, or raised to what the lake has ---> rounds ---> hold released
                                                                                          |
                                                     CommitReader behind each commit <----+

The channel's floor moves behind the commit, so nothing is unlinked that is not in the lake. It is made while the hold
keeps what the snapshot named. The lake says what is done, never the channel: its floor may be behind the lake (a crash
between commit and floor), which is put right; a floor ahead of the lake means that somebody else moved it, or that the
lake is not the one that it was moved for, and nothing is done.

New partitions, and new topics of a pattern, are in the next snapshot. A topic that was made anew has another uid, so
its messages are another life beside the old one. A range that retention took before it was archived is recorded as
missing: that can only be where the lake had begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pyspark_nsqha.lake.manifest import RETENTION, Missing, Range, State, without
from pyspark_nsqha.lake.plan import life_of
from pyspark_nsqha.lake.rounds import Rounds, Totals, Wanted
from pyspark_nsqha.model import Pin, ReadFailed
from pyspark_nsqha.snapshot import Asked, Snapshot

HOLD_MS = 15 * 60 * 1000
CHANNEL = "archive"


class Log(Protocol):
    """What is needed of the segment service: `snapshot.Segments`, or a fake."""

    def snapshot(self, asked: Asked) -> Snapshot:
        """What is committed. ReadFailed."""

    def release_hold(self, hold_id: str) -> int:
        """Let retention go on. ReadFailed."""

    def commit_reader(
        self, topic: str, channel: str, offsets: Mapping[int, int], *, back: bool = False
    ) -> dict[int, int]:
        """Move floors of a reader channel; it is made if it is not there. ReadFailed."""


@dataclass(frozen=True)
class Subject:
    """Which topics, and under which channel."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    channel: str = CHANNEL


def once(
    log: Log,
    rounds: Rounds,
    subject: Subject,
    *,
    progress: Callable[[Totals, int], None] = lambda totals, left: None,
    warn: Callable[[str], None] = lambda line: None,
) -> Totals:
    """Archive what is committed now. ReadFailed, StoreFailed, DataLoss, Overlap, BadManifest; each says what to do."""
    asked = Asked(subject.topics, subject.pattern, channel=subject.channel, hold_ms=HOLD_MS)
    rounds.step("snapshot")
    found = log.snapshot(asked)
    try:
        rounds.step("state")
        state = rounds.commits.state()
        for pin in found.pins:
            _check(pin, state, found, subject, rounds.store.uri)
        wanted = [replace(one, hold_id=found.hold_id) for one in divided(log, wanted_of(found.pins, state), state)]
        rounds.step("channel")
        floors = dict(found.floors)
        _raise_floors(log, found.pins, floors, state, subject)

        def committed(after: State) -> None:
            rounds.step("floors")
            _raise_floors(log, found.pins, floors, after, subject)

        totals = rounds.carry_out(wanted, committed=committed, progress=progress)
    finally:
        release(log, found.hold_id)
    for gap in totals.missing:
        warn(f"{gap.life}: offsets [{gap.first}, {gap.end}) are missing: {gap.reason}")
    return totals


def wanted_of(pins: Sequence[Pin], state: State) -> list[Wanted]:
    """All of each partition, and what retention took of it since the lake began."""
    found = []
    for pin in pins:
        life = life_of(pin)
        covered = state.covered(life)
        gone = without(Range(covered[0].first, pin.start.offset), covered) if covered else ()
        found.append(Wanted(pin, None, tuple(Missing(*life, *gap, RETENTION) for gap in gone)))
    return found


def divided(log: Log, wanted: Sequence[Wanted], state: State) -> list[Wanted]:
    """The same, with borders at which the log may be divided, where there is something to do."""
    ranges = []
    for one in wanted:
        start, end = one.pin.start.offset, one.pin.end.offset
        whole = Range(start, end) if one.range is None else Range(max(start, one.range.first), min(end, one.range.end))
        ranges += [(one.life.topic, one.life.partition, *todo) for todo in without(whole, state.covered(one.life))]
    if not ranges:
        return list(wanted)
    topics = tuple(sorted({topic for topic, *_ in ranges}))
    now = {life_of(pin): pin for pin in log.snapshot(Asked(topics, ranges=tuple(ranges))).pins}
    found = []
    for one in wanted:
        cuts = now[one.life].cuts if one.life in now else ()
        last = one.pin.end
        inside = tuple(cut for cut in cuts if cut.log_id < last.log_id)
        replicas = now[one.life].replicas if one.life in now else one.pin.replicas
        found.append(replace(one, pin=replace(one.pin, cuts=(*inside, last), replicas=replicas)))
    return found


def _check(pin: Pin, state: State, found: Snapshot, subject: Subject, uri: str) -> None:
    """Lake, log and channel fit each other. ReadFailed if not."""
    life = life_of(pin)
    end = state.end(life)
    if end is not None and end > pin.end.offset:
        raise ReadFailed(
            f"{life}: {uri} has messages up to offset {end}, the log ends at {pin.end.offset}: the log was cut (an "
            "unclean election, a restored backup); archive to another lake"
        )
    floor = found.floors.get((life.topic, life.partition))
    there = state.covered_from(life, pin.start.offset)
    if floor is not None and floor > max(there, pin.start.offset):
        raise ReadFailed(
            f"{life}: channel {subject.channel} is at offset {floor}, and {uri} has nothing behind {there}: another "
            f"lake uses this channel, or files went; give --channel another name, or go back: nsqha seek {life.topic} "
            f"{subject.channel} {there}"
        )


def _raise_floors(
    log: Log, pins: Sequence[Pin], floors: dict[tuple[str, int], int], state: State, subject: Subject
) -> None:
    """Each floor to the end of what is in the lake without a hole; channels that are not there are made. `floors` has
    where they are, and is changed with them."""
    moves: dict[tuple[str, bool], dict[int, int]] = {}
    for pin in pins:
        topic, partition = pin.identity.topic, pin.identity.partition
        floor = floors.get((topic, partition))
        there = state.covered_from(life_of(pin), pin.start.offset)
        if floor is None or floor < there:
            moves.setdefault((topic, floor is None), {})[partition] = there
    for (topic, new), offsets in sorted(moves.items()):
        log.commit_reader(topic, subject.channel, offsets, back=new)
        floors.update(((topic, partition), offset) for partition, offset in offsets.items())


def release(log: Log, hold_id: str) -> None:
    """The hold ends by itself where nobody answers."""
    if hold_id:
        try:
            log.release_hold(hold_id)
        except ReadFailed:
            pass
