"""A log for tests of the cache."""

from __future__ import annotations

from collections.abc import Iterable

from nsqha.cursor.committed.state import EntryLike
from tests.unit.cursor.tiny import Entry, Place, TinyLog


class CountedLog:
    """A TinyLog that counts what is read of it."""

    def __init__(self, log: TinyLog) -> None:
        self.log = log
        self.entries_read = 0
        self.batches_read = 0

    @property
    def start(self) -> Place:
        return self.log.start

    @property
    def end(self) -> Place:
        return self.log.end

    def entry(self, log_id: int) -> Entry:
        self.entries_read += 1
        return self.log.entry(log_id)

    def entries(self, first_log_id: int, end_log_id: int) -> Iterable[Entry]:
        for entry in self.log.entries(first_log_id, end_log_id):
            self.entries_read += 1
            yield entry

    def read(self, entry: EntryLike) -> bytes:
        self.batches_read += 1
        return self.log.read(entry)
