"""Checker 8: a seek to a time goes to the first message at or after it, on every leader, whenever it is asked.

    too late    a message at or after the time is before the place that was found: the replay skips it
    too early   a message at or behind the place is older than the time: the replay repeats more than was asked for
    unstable    the same time was found at two places

The time that counts is the one asked for less the allowance for clocks. A place that was clamped, as the log begins
later or is not read so far, says nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from tests.jepsen.checkers.view import Checker, PartitionName, offset_of, partition_of
from tests.jepsen.history import AdminEnded, AdminSent, FaultBegun, FaultEnded, Place, SeekEnded, SeekSent


class Replay(Checker):
    name = "replay from a time"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._asked: dict[int, SeekSent] = {}
        self._found: defaultdict[PartitionName, list[tuple[float, int, Place]]] = defaultdict(list)

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, SeekSent) and event.to == "time":
            self._asked[event.op] = event

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        asked = self._asked.pop(event.op, None)
        if asked is not None and isinstance(event, SeekEnded) and event.result == "ok":
            for place in event.places:
                if not place.error and not place.clamped:
                    found = self._found[asked.topic, place.partition]
                    found.append((event.t, asked.value - asked.skew_ns, place))

    def end(self) -> None:
        stamps: defaultdict[PartitionName, list[tuple[int, int]]] = defaultdict(list)
        for sent in self.view.messages.values():
            if sent.id and sent.op.topic is self.view.topics.get(sent.op.event.topic):
                name = (sent.op.event.topic, partition_of(sent.id))
                if name in self._found:
                    stamps[name].append((offset_of(sent.id), sent.timestamp))
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

    def _check(self, name: PartitionName, found: list[tuple[float, int, Place]], known: list[tuple[int, int]]) -> None:
        """`known`: offsets with their times, which grow with them (log agreement checks that)."""
        times = [timestamp for _, timestamp in known]
        places: dict[int, int] = {}
        for t, asked, place in found:
            where = f"{name[0]}/{name[1]} at {t:.3f}: time {asked} was found at offset {place.to_offset}"
            at = bisect_left(times, asked)
            if at < len(known) and known[at][0] < place.to_offset:
                self.findings.add("too late", f"{where}, but offset {known[at][0]} is of {known[at][1]}")
            if at and known[at - 1][0] >= place.to_offset:
                self.findings.add("too early", f"{where}, but offset {known[at - 1][0]} is of {known[at - 1][1]}")
            if place.timestamp and places.setdefault(asked, place.to_offset) != place.to_offset:
                self.findings.add("unstable", f"{where}, before at {places[asked]}")
