"""What a replay has to send and has sent: in memory, and in a file from which a later run continues.

    planned   |-----------------------------------|      offsets per partition, fixed when the replay begins
    done      |----------|      |--|                     stored in the other topic
    running              |-----|                         what a run was sending when the file was last written

The file is written before each wave and after it: a later run sends `planned` without `done`, and counts what was
running as possibly stored already. The file is JSON, replaced as a whole:

    {"nsqha_replay": 1, "topic", "topic_uid": 16 hex digits, "into", "asked": {..}, "partitions": {"0": {"planned":
     [[first, end]], "done": [[first, end]]}}, "running": [[partition, first, end]], "sent", "possible_duplicates",
     "missing"}

Invariant: done only grows, and what is in it has a broker's OK (or is missing, if that is allowed).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nsqha.ids import OFFSET_MAX, PARTITIONS_MAX
from nsqha.ranges import RangeSet

FORMAT = 1
FILE_BYTES_MAX = 64 << 20


class BadState(Exception):
    """A state file that cannot be used; the message is one line that says why and what to do."""


class ReplaySpan(NamedTuple):
    """Messages [first, end) of a partition."""

    partition: int
    first: int
    end: int

    @property
    def messages(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Order:
    """What a replay is asked for: the state of another order is refused."""

    topic: str
    topic_uid: int
    into: str
    asked: Mapping[str, Any] = field(default_factory=dict)  # range, query, delay: as the user wrote them


class ReplayState:
    """How far a replay is. With a path it is saved there."""

    def __init__(self, order: Order, planned: Iterable[ReplaySpan], path: Path | None = None) -> None:
        self.order = order
        self.path = path
        self.planned: dict[int, RangeSet] = {}
        self.done: dict[int, RangeSet] = {}
        self.running: tuple[ReplaySpan, ...] = ()
        self.sent = 0
        self.sent_before = 0  # by earlier runs; in `sent` as well
        self.possible_duplicates = 0
        self.missing = 0  # planned, but not readable any more
        for span in planned:
            self.planned.setdefault(span.partition, RangeSet()).add(span.first, span.end)

    @property
    def total(self) -> int:
        """The planned messages; with a query, those that it reads."""
        return sum(span.messages for span in _spans(self.planned))

    @property
    def left(self) -> int:
        return sum(span.messages for span in self.remaining())

    @property
    def ends(self) -> dict[int, int]:
        """For each partition the end of what is planned."""
        ends: dict[int, int] = {}
        for span in _spans(self.planned):
            ends[span.partition] = max(ends.get(span.partition, 0), span.end)
        return ends

    def remaining(self) -> list[ReplaySpan]:
        """What is planned and not done, by partition and offset."""
        left: dict[int, RangeSet] = {}
        for partition, planned in self.planned.items():
            left[partition] = RangeSet(planned)
            for first, end in self.done.get(partition, ()):
                left[partition].discard(first, end)
        return list(_spans(left))

    def next_wave(self, messages: int, *, single: bool) -> list[ReplaySpan]:
        """About `messages` next messages: of each partition in proportion to what is left there, so that all of them
        move through time together. `single`: one span of each partition."""
        left: dict[int, list[ReplaySpan]] = {}
        for span in self.remaining():
            left.setdefault(span.partition, []).append(span)
        total = sum(span.messages for spans in left.values() for span in spans)
        wave = []
        for spans in left.values():
            mine = sum(span.messages for span in spans)
            share = max(-(-messages * mine // total), 1)
            for span in spans[:1] if single else spans:
                if share <= 0:
                    break
                taken = span._replace(end=min(span.end, span.first + share))
                share -= taken.messages
                wave.append(taken)
        return wave

    def begin(self, wave: Iterable[ReplaySpan]) -> None:
        """Save that a wave is about to run."""
        self.running = tuple(wave)
        self.save()

    def end(self, done: Iterable[ReplaySpan], *, sent: int, possible_duplicates: int, missing: int = 0) -> None:
        """Save that a wave has ended, and what of it is stored."""
        for span in done:
            self.done.setdefault(span.partition, RangeSet()).add(span.first, span.end)
        self.running = ()
        self.sent += sent
        self.possible_duplicates += possible_duplicates
        self.missing += missing
        self.save()

    def save(self) -> None:
        """Write the file atomically and durably. BadState if it cannot be written."""
        if self.path is None:
            return
        text = json.dumps(self._record())
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            with open(temporary, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise BadState(f"--state {self.path} cannot be written: {error.strerror}") from None

    def _record(self) -> dict[str, Any]:
        order = self.order
        partitions = {
            str(partition): {"planned": list(ranges), "done": list(self.done.get(partition, ()))}
            for partition, ranges in self.planned.items()
        }
        return {
            "nsqha_replay": FORMAT,
            "topic": order.topic,
            "topic_uid": f"{order.topic_uid:016x}",
            "into": order.into,
            "asked": dict(order.asked),
            "partitions": partitions,
            "running": [list(span) for span in self.running],
            "sent": self.sent,
            "possible_duplicates": self.possible_duplicates,
            "missing": self.missing,
        }

    @classmethod
    def load(cls, path: Path) -> ReplayState | None:
        """The state that an earlier run saved; None if there is none. What was running may be stored. BadState."""
        try:
            with open(path, "rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadState(f"--state {path} cannot be read: {error.strerror}") from None
        try:
            if len(raw) > FILE_BYTES_MAX:
                raise ValueError
            found = cls._decoded(json.loads(raw), path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BadState(f"--state {path} is not the state of a replay: name another file, or remove it") from None
        found.sent_before = found.sent
        found.possible_duplicates += sum(span.messages for span in found.running)
        found.running = ()
        return found

    @classmethod
    def _decoded(cls, record: Any, path: Path) -> ReplayState:
        if record["nsqha_replay"] != FORMAT:
            raise ValueError
        asked = dict(record["asked"])
        order = Order(str(record["topic"]), int(record["topic_uid"], 16), str(record["into"]), asked)
        partitions = record["partitions"]
        state = cls(order, (), path)
        for name in ("planned", "done"):
            ranges: dict[int, RangeSet] = getattr(state, name)
            for number, one in partitions.items():
                ranges[_number(int(number), PARTITIONS_MAX)] = RangeSet(_range(*pair) for pair in one[name])
        state.running = tuple(ReplaySpan(int(number), *_range(*pair)) for number, *pair in record["running"])
        state.sent, state.possible_duplicates, state.missing = (
            _number(record[name], OFFSET_MAX * PARTITIONS_MAX) for name in ("sent", "possible_duplicates", "missing")
        )
        return state

    def check(self, order: Order) -> None:
        """BadState if the state is of another order."""
        mine = self.order
        if mine.topic_uid != order.topic_uid and mine.topic == order.topic:
            raise BadState(f"--state {self.path}: topic {mine.topic} was created again since; remove it to start over")
        if mine != order:
            ours, theirs = _words(mine), _words(order)
            differ = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
            what = "; ".join(f"{name} {ours.get(name) or 'not given'}" for name in differ)
            raise BadState(f"--state {self.path} is of another replay ({what}): name another file, or remove it")


def _spans(ranges: Mapping[int, RangeSet]) -> Iterable[ReplaySpan]:
    for partition in sorted(ranges):
        for first, end in ranges[partition]:
            yield ReplaySpan(partition, first, end)


def _words(order: Order) -> dict[str, Any]:
    return {"topic": order.topic, "into": order.into, **order.asked}


def _range(first: Any, end: Any) -> tuple[int, int]:
    if _number(first, OFFSET_MAX) > _number(end, OFFSET_MAX):
        raise ValueError
    return first, end


def _number(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError
    return value
