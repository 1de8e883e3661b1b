"""How many bytes the logs of #ephemeral topics hold in memory, per topic and in the whole node.

    publish -> [full: dropped, and OK, as nsqd does] -> log in memory -> commit -> trim
    trim: more than 3/4 are used -> channels drop their oldest unread messages, to 1/2 -> the files go

What consumers have in flight, and what waits for a time, stays; so does what no channel takes yet. If that alone fills
the bound, new messages are dropped. When all topics together hold more than the node may, each is bounded by an equal
share. The log of such a topic is cut into small files, as memory is given back a file at a time.

Invariant: a log holds at most its bound, one publish for which there was room just before, and the batch under way.
"""

from __future__ import annotations

from typing import Protocol

from nsqha.clock import Now
from nsqha.commitlog.log import LogLimits
from nsqha.commitlog.storage import MemStorage
from nsqha.server.partition.retention import RetainedLog, RetentionRunner

FILES = 16  # a log within its bound has about so many
FILE_BYTES_MIN = 64 << 10


class LogInMemory(RetainedLog, Protocol):
    """The partition whose log is trimmed."""

    retention: RetentionRunner


class EphemeralMemory:
    """The bytes that all #ephemeral topics of a node hold, and what they dropped to stay within their bounds."""

    def __init__(
        self, *, topic_bytes_max: int = 64 << 20, node_bytes_max: int = 256 << 20, messages_max: int = 10_000
    ) -> None:
        """`messages_max`: messages that a topic without channels keeps."""
        self.topic_bytes_max = topic_bytes_max
        self.messages_max = messages_max
        self.used = 0
        self.dropped = 0  # messages
        self._node_bytes_max = node_bytes_max
        self._logs = 0

    @property
    def limits(self) -> LogLimits:
        """When a log begins new files."""
        size = max(self.topic_bytes_max // FILES, FILE_BYTES_MIN)
        return LogLimits(segment_bytes=size, commitlog_bytes=size)

    def log(self, storage: MemStorage, partitions: int = 1) -> EphemeralLog:
        """The bound of one log, which has `storage` for itself; its topic has so many partitions."""
        self._logs += 1
        return EphemeralLog(self, storage, self.topic_bytes_max // partitions)

    def share(self) -> int:
        """What each log may have at most, just now."""
        if self.used <= self._node_bytes_max:
            return self._node_bytes_max
        return self._node_bytes_max // max(self._logs, 1)

    def ended(self) -> None:
        """A log is gone."""
        self._logs -= 1


class EphemeralLog:
    """The bound of one partition's log in memory."""

    __slots__ = ("_bytes_max", "_counted", "_ended", "_node", "_storage")

    def __init__(self, node: EphemeralMemory, storage: MemStorage, bytes_max: int) -> None:
        self._node = node
        self._storage = storage
        self._bytes_max = bytes_max
        self._counted = 0
        self._ended = False

    @property
    def messages_max(self) -> int:
        return self._node.messages_max

    def _used(self) -> int:
        used = self._storage.used
        self._node.used += used - self._counted
        self._counted = used
        return used

    def full(self, waiting: int) -> bool:
        """Whether nothing more may come, with so many bytes on their way into the log."""
        return self._used() + waiting >= min(self._bytes_max, self._node.share())

    def dropped(self, count: int) -> None:
        """So many messages are not kept."""
        self._node.dropped += count

    def trim(self, partition: LogInMemory, now: Now) -> None:
        """Give memory back, if too much is used."""
        used, limit = self._used(), min(self._bytes_max, self._node.share())
        if used <= limit // 4 * 3:
            return
        log = partition.log
        cut = log.entry_at_position(max(log.end.position - limit // 2, log.start.position))
        if cut is not None and (dropped := partition.cursors.drop_unread(cut.first_offset)):
            self.dropped(dropped)
            partition.write_events()
        partition.retention.step(partition, now, by_age=False)  # nothing of it goes by age

    def end(self) -> None:
        """The log is closed for good: its memory is free at once, whatever still refers to it."""
        if not self._ended:
            self._ended = True
            self._storage.clear()
            self._used()
            self._node.ended()
