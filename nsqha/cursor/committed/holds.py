"""Holds: leases on a partition's log start, for readers that take the log as it lies in the files.

    HOLD id offset until  ----applied---->  {id: LiveHold(offset, until_ns, since_ns)}  ----caps---->  LOG_START

A hold is part of the committed state, so it outlives a restart and a change of leader. No clock decides: a hold is
alive for a batch whose timestamp is below `until_ns`, and timestamps of a log never fall. Holds whose time is over are
dropped when the next HOLD or LOG_START is applied.

Bounds, kept while events are applied, so that no caller can hold a log for ever:

    HOLDS_MAX      holds at once; one more is ignored (the leader refuses before)
    HOLD_MS_MAX    from one renewal to the next
    LIFE_MS_MAX    from the first HOLD of an id to its end, however often it is renewed

Invariant: a hold's offset never rises; a HOLD with a known id may lower it, but to no place below the log start.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import NamedTuple

from nsqha.cursor.events import LogHold

HOLDS_MAX = 64
HOLD_MS_MAX = 6 * 3_600_000
LIFE_MS_MAX = 7 * 24 * 3_600_000
RELEASED = 0  # as `until_ns` of a HOLD: the hold ends
NEVER_PASSED = (1 << 63) - 1  # what caps a log start if nothing is held

_NS = 1_000_000


class LiveHold(NamedTuple):
    """A hold keeps messages from `offset` on, for batches with timestamps below `until_ns`."""

    offset: int
    until_ns: int
    since_ns: int  # timestamp of the batch that made it

    @property
    def renewable_until_ns(self) -> int:
        """No renewal puts the hold's end off beyond this."""
        return self.since_ns + LIFE_MS_MAX * _NS


class Holds:
    """The holds of one partition, by id."""

    def __init__(self, rows: dict[int, LiveHold] | None = None) -> None:
        self._by_id: dict[int, LiveHold] = rows if rows is not None else {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id_: int) -> LiveHold | None:
        """The hold of this id, perhaps one whose time is over."""
        return self._by_id.get(id_)

    def ids(self) -> KeysView[int]:
        """The ids of all holds, those whose time is over included."""
        return self._by_id.keys()

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """(id, offset, until_ns, since_ns) of all, in the order of their ids."""
        return ((id_, *self._by_id[id_]) for id_ in sorted(self._by_id))

    def put(self, id_: int, hold: LiveHold) -> None:
        """Take in a row as it was stored."""
        self._by_id[id_] = hold

    def copy(self) -> Holds:
        return Holds(dict(self._by_id))

    def live(self, timestamp_ns: int) -> dict[int, LiveHold]:
        """Those that are alive for a batch with this timestamp."""
        return {id_: hold for id_, hold in self._by_id.items() if hold.until_ns > timestamp_ns}

    def lowest(self, timestamp_ns: int) -> int:
        """The lowest offset that is held from a batch with this timestamp; NEVER_PASSED if none is."""
        return min((hold.offset for hold in self.live(timestamp_ns).values()), default=NEVER_PASSED)

    # ---- applying

    def expire(self, timestamp_ns: int) -> None:
        """Drop those that are not alive for a batch with this timestamp, nor for any later one."""
        self._by_id = self.live(timestamp_ns)

    def apply(self, event: LogHold, *, log_start: int, timestamp_ns: int) -> None:
        """Take in a HOLD of a batch with this timestamp."""
        self.expire(timestamp_ns)
        if event.until_ns == RELEASED:
            self._by_id.pop(event.id, None)
            return
        offset = max(event.offset, log_start)
        held = self._by_id.get(event.id)
        if held is not None:
            offset = min(offset, held.offset)
        elif len(self._by_id) >= HOLDS_MAX:
            return
        hold = LiveHold(offset, event.until_ns, held.since_ns if held is not None else timestamp_ns)
        until_ns = min(event.until_ns, timestamp_ns + HOLD_MS_MAX * _NS, hold.renewable_until_ns)
        self._by_id[event.id] = hold._replace(until_ns=until_ns)
        self.expire(timestamp_ns)  # one that comes too late holds nothing
