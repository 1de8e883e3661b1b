"""Decides what is read and divides it into tasks. Pure: no files, no network, no Spark.

    bounds + snapshot ----resolve----> ranges: messages [first, end) per partition
    filters, ids ---------narrow-----> fewer, shorter ones
    borders --------------divide-----> tasks: one or several Splits each

    borders      |-----8 MiB-----|-----8 MiB-----|---5---|-----8 MiB-----|
    range             [first                                   end)
    splits       |       one       |             another               |

The splits of a range cover it exactly, in order, with no message twice. Splits meet only at borders between batches, so
no batch is fetched by two of them; the known borders limit how small splits can be. Ends are exclusive.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from nsqha.ids import partition_of
from pyspark_nsqha.model import CutPoint, Gone, PinnedPartition, ReadFailed, Split
from pyspark_nsqha.options import EARLIEST, LATEST, Bound, Bounds, TopicSelection, show_size

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Topic and partition."""

NAMED_MAX: Final = 5
TASKS_MAX: Final = 200_000
"""A driver cannot plan more tasks; a larger splitBytes makes fewer of them."""


class PlannedRange(NamedTuple):
    """Messages [first, end) of a pinned partition; of these only `wanted`, if it is not None."""

    pin: PinnedPartition
    first: int
    end: int
    wanted: tuple[int, ...] | None = None  # offsets, ascending

    @property
    def key(self) -> Key:
        return self.pin.identity.topic, self.pin.identity.partition


@dataclass(frozen=True)
class SplitPart:
    """A split, and which of its messages become rows: all, or `wanted`."""

    split: Split
    wanted: tuple[int, ...] | None = None


Task = tuple[SplitPart, ...]


# ---- where reading begins and ends


def resolve(
    pins: Sequence[PinnedPartition],
    subscription: TopicSelection,
    bounds: Bounds,
    *,
    times: Mapping[Key, Mapping[int, int]],
    floors: Mapping[Key, int],
    fail_on_data_loss: bool,
) -> list[PlannedRange]:
    """The range of each partition that is subscribed to; a range may be empty.

    ReadFailed if a bound names what does not exist, is reversed or beyond the committed end; Gone if retention has
    removed requested messages, unless `fail_on_data_loss` is false: then they are left out and counted in the log.
    """
    pins = _chosen(pins, subscription)
    for bound in (bounds.start, bounds.end):
        _check_named(pins, bound)
    starts, ends = _Places.of(bounds.start), _Places.of(bounds.end)
    ranges = []
    for pin in pins:
        key = (pin.identity.topic, pin.identity.partition)
        known = times.get(key, {})
        first = _floor(key, pin, bounds.channel, floors) if bounds.channel else starts.place(key, pin, known)
        if first is None:
            first = _after_all(key, pin, bounds)
        end = ends.place(key, pin, known)
        asked = PlannedRange(pin, first, pin.end.offset if end is None else end)
        ranges.append(available(asked, pin.start.offset, fail_on_data_loss, bounds))
    return ranges


def available(
    asked: PlannedRange, log_start: int, fail_on_data_loss: bool, bounds: Bounds | None = None
) -> PlannedRange:
    """A range without what retention has removed from it. ReadFailed, Gone: as `resolve`."""
    pin, first, end = asked.pin, asked.first, asked.end
    where, have = _name(asked.key), (log_start, pin.end.offset)
    if end > pin.end.offset or first > pin.end.offset:
        what = _said(bounds, start=first > pin.end.offset)
        wrong = first if first > pin.end.offset else end
        raise ReadFailed(
            f"{where}: {what}{wrong} is after the committed end: asked for [{first}, {end}), there is {_span(have)}",
            planned=(first, end),
            available=have,
        )
    if first > end:
        raise ReadFailed(
            f"{where}: asked for [{first}, {end}), which ends before it begins; there is {_span(have)}",
            planned=(first, end),
            available=have,
        )
    if first >= log_start or first == end:
        return asked
    left = min(log_start, end)
    if fail_on_data_loss:
        raise Gone(
            f"{where}: asked for [{first}, {end}), there is {_span(have)}: retention removed {left - first} messages; "
            "startingOffsets earliest begins at the first message left, failOnDataLoss false reads without them",
            planned=(first, end),
            available=have,
        )
    logger.warning("%s: retention removed %d messages [%d, %d): they are left out", where, left - first, first, left)
    wanted = None if asked.wanted is None else tuple(offset for offset in asked.wanted if offset >= left)
    return PlannedRange(pin, left, end, wanted)


def _chosen(pins: Sequence[PinnedPartition], subscription: TopicSelection) -> Sequence[PinnedPartition]:
    """The partitions that are subscribed to. ReadFailed: one does not exist."""
    if not subscription.assigned:
        return pins
    there = {(pin.identity.topic, pin.identity.partition): pin for pin in pins}
    asked = [(topic, number) for topic, numbers in subscription.assigned for number in numbers]
    if missing := [key for key in asked if key not in there]:
        raise ReadFailed(f"assign: there is no partition {_some(missing)}; `nsqha topic show` lists them")
    return [there[key] for key in asked]


def _check_named(pins: Sequence[PinnedPartition], bound: Bound) -> None:
    """Check, as Kafka's source does, that offsets are given for all partitions or for none. ReadFailed."""
    named = {key for key, _ in (*bound.offsets, *bound.times_ns)}
    if not named:
        return
    there = {(pin.identity.topic, pin.identity.partition) for pin in pins}
    if unknown := sorted(named - there):
        raise ReadFailed(f"{bound.option}: {_some(unknown)} is not among the partitions that are read; leave it out")
    if missing := sorted(there - named):
        hint = "-2 is earliest, -1 is latest" if bound.offsets else "each needs a time"
        raise ReadFailed(f"{bound.option}: {_some(missing)} is missing; name every partition that is read, {hint}")


def _floor(key: Key, pin: PinnedPartition, channel: str, floors: Mapping[Key, int]) -> int:
    if key not in floors:
        raise ReadFailed(f"startingChannel: {_name(key)} has no channel {channel}; `nsqha channel list` shows them")
    # A floor above the pinned end has moved while the snapshot was taken.
    return min(floors[key], pin.end.offset)


class _Places(NamedTuple):
    """A bound with dicts, for look-ups in many partitions."""

    bound: Bound
    offsets: Mapping[Key, int]
    times_ns: Mapping[Key, int]

    @classmethod
    def of(cls, bound: Bound) -> _Places:
        return cls(bound, dict(bound.offsets), dict(bound.times_ns))

    def place(self, key: Key, pin: PinnedPartition, times: Mapping[int, int]) -> int | None:
        """The offset of the bound in a partition; None if a time was given and everything is older."""
        at = self.bound.time_ns if self.bound.time_ns is not None else self.times_ns.get(key)
        if at is not None:
            return None if times[at] >= pin.end.offset else times[at]
        offset = self.offsets.get(key, self.bound.place)
        return {EARLIEST: pin.start.offset, LATEST: pin.end.offset}.get(offset, offset)


def _after_all(key: Key, pin: PinnedPartition, bounds: Bounds) -> int:
    """Where to begin if everything is older than the given time; ReadFailed unless the strategy is latest."""
    if bounds.after_all == "error":
        raise ReadFailed(
            f"{bounds.start.option}: all messages of {_name(key)} are older; give an earlier time, or "
            "startingOffsetsByTimestampStrategy latest, which reads nothing there"
        )
    return pin.end.offset


# ---- narrower ranges


def narrow_to_ids(ranges: Sequence[PlannedRange], ids: Iterable[str], fail_on_data_loss: bool) -> list[PlannedRange]:
    """Ranges with only these ids. ReadFailed names an id that no range has, unless `fail_on_data_loss` is false."""
    of_partition: dict[int, list[int]] = {}
    for at, asked in enumerate(ranges):
        of_partition.setdefault(asked.key[1], []).append(at)
    wanted: dict[int, set[int]] = {}
    missing = []
    for one in ids:
        number, found = int(one, 16), False
        for at in of_partition.get(partition_of(number), []):
            asked = ranges[at]
            offset = number - asked.pin.identity.id_base
            if asked.first <= offset < asked.end:
                wanted.setdefault(at, set()).add(offset)
                found = True
        if not found:
            missing.append(one)
    if missing:
        what = f"ids: {_some(missing)} is in no range that is read (another topic's, trimmed, or outside the bounds)"
        if fail_on_data_loss:
            raise ReadFailed(f"{what}; failOnDataLoss false reads the others")
        logger.warning("%s and left out: %d ids", what, len(missing))
    return [_only(ranges[at], offsets) for at, offsets in sorted(wanted.items())]


def _only(asked: PlannedRange, offsets: Iterable[int]) -> PlannedRange:
    kept = tuple(sorted(offset for offset in set(offsets) if asked.first <= offset < asked.end))
    if asked.wanted is not None:
        before = set(asked.wanted)
        kept = tuple(offset for offset in kept if offset in before)
    if not kept:
        return PlannedRange(asked.pin, asked.first, asked.first, ())
    return PlannedRange(asked.pin, kept[0], kept[-1] + 1, kept)


@dataclass(frozen=True)
class Restriction:
    """What filters allow, the same for all partitions. Spark applies them again to the rows: more may be read."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    partition_least: int = 0
    partition_most: int = 1 << 31
    first: int = 0
    end: int = 1 << 63
    offsets: frozenset[int] | None = None
    ids: frozenset[str] | None = None
    since_ns: int = 0
    until_ns: int = 1 << 63  # exclusive

    def apply(self, ranges: Iterable[PlannedRange]) -> list[PlannedRange]:
        """The ranges without what cannot be in the result, as far as this is known without reading entries."""
        left = []
        for asked in ranges:
            topic, partition = asked.key
            if self.topics is not None and topic not in self.topics:
                continue
            if self.partitions is not None and partition not in self.partitions:
                continue
            if not self.partition_least <= partition <= self.partition_most:
                continue
            first, end = max(asked.first, self.first), min(asked.end, self.end)
            asked = asked._replace(first=first, end=max(first, end))
            if self.offsets is not None:
                asked = _only(asked, self.offsets)
            if self.ids is not None:
                base = asked.pin.identity.id_base
                asked = _only(asked, (int(one, 16) - base for one in self.ids))
            left.append(asked)
        return left

    def by_time(self, asked: PlannedRange) -> PlannedRange:
        """A range cut at the borders of its pin by their times: what is left out is older, or newer."""
        cuts = asked.pin.cuts
        first, end = asked.first, asked.end
        for cut in cuts:
            if not cut.timestamp_ns:  # not known
                continue
            if cut.timestamp_ns < self.since_ns:
                first = max(first, cut.offset)
            if cut.timestamp_ns >= self.until_ns:
                end = min(end, cut.offset)
                break
        if (first, end) == (asked.first, asked.end):
            return asked
        first = min(first, asked.end)
        end = max(min(end, asked.end), first)
        wanted = None if asked.wanted is None else tuple(offset for offset in asked.wanted if first <= offset < end)
        return PlannedRange(asked.pin, first, end, wanted)


# ---- tasks


def plan(ranges: Sequence[PlannedRange], *, split_bytes: int, min_partitions: int = 0, hold_id: str = "") -> list[Task]:
    """Tasks by topic, partition and offset. ReadFailed if a pin has no borders around its range."""
    pieces = [(asked, _around(asked)) for asked in ranges if asked.first < asked.end]
    total = sum(cuts[-1].position - cuts[0].position for _, cuts in pieces)
    target = max(min(split_bytes, -(-total // min_partitions) if min_partitions else split_bytes), 1)
    if total // target > TASKS_MAX:
        wide = f"{show_size(total)} bytes in splits of {show_size(target)}"
        raise ReadFailed(f"{wide} are more than {TASKS_MAX} tasks; raise splitBytes or lower minPartitions")
    tasks: list[Task] = []
    for asked, cuts in pieces:
        if asked.wanted is None:
            borders = _divided(cuts, target)
            tasks += [(SplitPart(_split(asked, low, high, hold_id)),) for low, high in borders]
        else:
            tasks += _packed(asked, cuts, target, hold_id)
    return tasks


def _around(asked: PlannedRange) -> tuple[CutPoint, ...]:
    """The borders of a range: the last one before it, those inside, the first one after it."""
    pin = asked.pin
    # Batches of events after the pinned end have its offset, too; but the chain proves only what is before the end.
    cuts = [cut for cut in pin.cuts if cut.log_id < pin.end.log_id]
    if any(cut.log_id >= pin.end.log_id or cut.offset >= pin.end.offset for cut in pin.cuts):
        cuts.append(pin.end)
    offsets = [cut.offset for cut in cuts]
    low = bisect_right(offsets, asked.first) - 1
    high = bisect_left(offsets, asked.end)
    if low < 0 or high >= len(cuts) or low >= high:
        raise ReadFailed(
            f"{_name(asked.key)}: the broker sent no borders around [{asked.first}, {asked.end}); try again",
            planned=(asked.first, asked.end),
        )
    return tuple(cuts[low : high + 1])


def _divided(cuts: Sequence[CutPoint], target: int) -> list[tuple[CutPoint, CutPoint]]:
    """Pairs of adjacent chosen borders, about equally far apart, `target` bytes or a little more or less."""
    total = cuts[-1].position - cuts[0].position
    count = max(-(-total // target), 1)
    chosen = [cuts[0]]
    for cut in cuts[1:-1]:
        share = cuts[0].position + len(chosen) * total / count
        # The border that is nearest to an equal share, and one message at least in each part.
        near = cut.position >= share - _half(cuts, cut)
        if near and len(chosen) < count and chosen[-1].offset < cut.offset < cuts[-1].offset:
            chosen.append(cut)
    chosen.append(cuts[-1])
    return list(pairwise(chosen))


def _half(cuts: Sequence[CutPoint], cut: CutPoint) -> float:
    at = bisect_left(cuts, cut.log_id, key=lambda one: one.log_id)
    return (cuts[at + 1].position - cut.position) / 2


def _packed(asked: PlannedRange, cuts: Sequence[CutPoint], target: int, hold_id: str) -> list[Task]:
    """Splits around single messages with as few bytes as the borders allow; several in one task."""
    assert asked.wanted is not None
    tasks: list[Task] = []
    parts: list[SplitPart] = []
    load = 0
    for low, high in pairwise(cuts):
        begin, behind = bisect_left(asked.wanted, low.offset), bisect_left(asked.wanted, high.offset)
        wanted = asked.wanted[begin:behind]
        if not wanted:
            continue
        narrow = PlannedRange(asked.pin, wanted[0], wanted[-1] + 1)
        whole = len(wanted) == narrow.end - narrow.first
        parts.append(SplitPart(_split(narrow, low, high, hold_id), None if whole else wanted))
        load += high.position - low.position
        if load >= target:
            tasks.append(tuple(parts))
            parts, load = [], 0
    if parts:
        tasks.append(tuple(parts))
    return tasks


def _split(asked: PlannedRange, low: CutPoint, high: CutPoint, hold_id: str) -> Split:
    pin = asked.pin
    return Split(
        identity=pin.identity,
        first=max(asked.first, low.offset),
        end=min(asked.end, high.offset),
        first_log_id=low.log_id,
        end_log_id=high.log_id,
        first_offset=low.offset,
        end_offset=high.offset,
        at_log_id=pin.end.log_id - 1,
        chain=pin.chain,
        replicas=pin.replicas,
        path=pin.path,
        hold_id=hold_id,
    )


def with_borders(
    ranges: Sequence[PlannedRange], now: Sequence[PinnedPartition], fail_on_data_loss: bool
) -> list[PlannedRange]:
    """The same ranges, with borders and replicas of a later snapshot, without what retention has removed since.

    Gone if a topic was deleted or created again. What is committed only grows: a lower later end is another log's.
    """
    later = {(pin.identity.topic, pin.identity.partition): pin for pin in now}
    found = []
    for asked in ranges:
        pin = later.get(asked.key)
        if pin is None or pin.identity != asked.pin.identity:
            raise Gone(f"{_name(asked.key)}: the topic was deleted or created again since load(); load it again")
        if pin.end.log_id < asked.pin.end.log_id or pin.end.offset < asked.pin.end.offset:
            raise ReadFailed(
                f"{_name(asked.key)}: the log ends before what was pinned at load(): {pin.end.offset} now, "
                f"{asked.pin.end.offset} then; it lost what was committed, or another cluster answers; load it again"
            )
        merged = replace(asked.pin, cuts=pin.cuts, replicas=pin.replicas, path=pin.path)
        found.append(available(asked._replace(pin=merged), pin.start.offset, fail_on_data_loss))
    return found


def left_of(split: Split, now: PinnedPartition, first: int) -> Split | None:
    """A split from `first` on, by a later snapshot's borders; None if nothing is left. ReadFailed: no border."""
    if first >= split.end:
        return None
    low = [cut for cut in now.cuts if cut.offset <= first and cut.log_id < split.end_log_id]
    if not low:
        raise ReadFailed(
            f"{_name((split.identity.topic, split.identity.partition))}: the broker sent no border before {first}; "
            "try again",
            planned=(first, split.end),
        )
    replicas = now.replicas or split.replicas
    return replace(split, first=first, first_log_id=low[-1].log_id, first_offset=low[-1].offset, replicas=replicas)


# ---- texts


def _said(bounds: Bounds | None, *, start: bool) -> str:
    if bounds is None:
        return ""
    return f"{(bounds.start if start else bounds.end).option} "


def _span(span: tuple[int, int]) -> str:
    return f"[{span[0]}, {span[1]})"


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _some(found: Sequence[Key | str]) -> str:
    names = [one if isinstance(one, str) else _name(one) for one in found]
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
