"""Logs for tests of the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nsqha.cursor.state import EntryLike
from tests.unit.cursor.tiny import Entry, TinyLog


class Place(NamedTuple):
    log_id: int
    offset: int
    position: int


class EmptyLog:
    """A log that nothing was written to."""

    start = end = Place(1, 0, 0)

    def entry(self, log_id: int) -> EntryLike:
        raise AssertionError("there is no entry")

    def entries(self, first_log_id: int, end_log_id: int) -> Iterable[EntryLike]:
        return ()


class CountedLog:
    """A TinyLog as a partition's log looks, which counts what is read."""

    def __init__(self, log: TinyLog) -> None:
        self.log = log
        self.entries_read = 0
        self.batches_read = 0

    @property
    def start(self) -> Place:
        if not self.log.batches:
            return Place(self.log.log_id + 1, self.log.end_offset, self.log.end_position)
        first = self.log.batches[0][0]
        return Place(first.log_id, first.first_offset, first.position)

    @property
    def end(self) -> Place:
        return Place(self.log.log_id + 1, self.log.end_offset, self.log.end_position)

    def entry(self, log_id: int) -> Entry:
        self.entries_read += 1
        assert self.start.log_id <= log_id < self.end.log_id, "asked for an entry that is not there"
        return self.log.batches[log_id - self.start.log_id][0]

    def entries(self, first_log_id: int, end_log_id: int) -> Iterable[Entry]:
        for log_id in range(max(first_log_id, self.start.log_id), min(end_log_id, self.end.log_id)):
            yield self.entry(log_id)

    def read(self, entry: EntryLike) -> bytes:
        self.batches_read += 1
        found, data = self.log.batches[entry.log_id - self.start.log_id]
        assert found == entry
        return data
