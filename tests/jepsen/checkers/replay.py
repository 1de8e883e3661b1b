"""Checker 8: a seek to a time goes to the first message at or after it, on every leader, whenever it is asked.

    too late    a message at or after the time is before the place that was found: the replay skips it
    too early   a message at or behind the place is older than the time, and was there before the seek was asked for:
                the replay repeats more than was asked for
    unstable    the same time was found at two places

The time that counts is the one asked for less the allowance for clocks. A place that was clamped, as the log begins
later or is not read so far, says nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from tests.jepsen.checkers.view import Checker, PartitionName, offset_of, partition_of
from tests.jepsen.history import AdminEnded, AdminSent, FaultBegun, FaultEnded, Place, SeekEnded, SeekSent


@dataclass(frozen=True)
class Found:
    """A place that a seek found."""

    t: float
    asked_at: float
    time_ns: int
    place: Place


class Replay(Checker):
    name = "replay from a time"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._asked: dict[int, SeekSent] = {}
        self._found: defaultdict[PartitionName, list[Found]] = defaultdict(list)

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, SeekSent) and event.to == "time":
            self._asked[event.op] = event

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        asked = self._asked.pop(event.op, None)
        if asked is not None and isinstance(event, SeekEnded) and event.result == "ok":
            for place in event.places:
                if not place.error and not place.clamped:
                    found = self._found[asked.topic, place.partition]
                    found.append(Found(event.t, asked.t, asked.value - asked.skew_ns, place))

    def end(self) -> None:
        stamps: defaultdict[PartitionName, list[tuple[int, int, float]]] = defaultdict(list)
        for sent in self.view.messages.values():
            if sent.id and sent.op.topic is self.view.topics.get(sent.op.event.topic):
                name = (sent.op.event.topic, partition_of(sent.id))
                if name in self._found:
                    stored = sent.op.ended if sent.op.result == "ok" else float("inf")
                    stamps[name].append((offset_of(sent.id), sent.timestamp, stored))
        count = 0
        for name, found in self._found.items():
            known = sorted(stamps[name])
            count += len(found)
            self._check(name, found, known)
        self.findings.figures["seeks to a time"] = count
        if count:
            wrong = self.findings.problems.total()
            text = "a time means the first message at or after it"
            self.findings.promise(text, "0 exceptions", f"{wrong} of {count}", kept=not wrong)

    def _check(self, name: PartitionName, found: list[Found], known: list[tuple[int, int, float]]) -> None:
        """`known`: offsets with their times, which grow with them (log agreement checks that), and when they were
        surely stored."""
        times = [timestamp for _, timestamp, _ in known]
        places: dict[int, int] = {}
        for each in found:
            asked, to = each.time_ns, each.place.to_offset
            where = f"{name[0]}/{name[1]} at {each.t:.3f}: time {asked} was found at offset {to}"
            at = bisect_left(times, asked)
            if at < len(known) and known[at][0] < to:
                self.findings.add("too late", f"{where}, but offset {known[at][0]} is of {known[at][1]}")
            first = bisect_left(known, (to,), hi=at)
            older = [(offset, time) for offset, time, stored in known[first:at] if stored < each.asked_at]
            if older:
                self.findings.add("too early", f"{where}, but offset {older[-1][0]} is of {older[-1][1]}")
            if each.place.timestamp and places.setdefault(asked, to) != to:
                self.findings.add("unstable", f"{where}, before at {places[asked]}")
