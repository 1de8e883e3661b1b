"""What a partition's channels keep of its log, and how its start moves on.

to_carry -> carry      deferred messages below the new start are appended again
propose_log_start      the event that says so; it is applied as far as `log_start_limit` allows then
may_unlink             files below go when that, and a checkpoint above them, is committed
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import islice

from nsqha.cursor import events
from nsqha.cursor.committed.holds import HOLDS_MAX, RELEASED, LiveHold
from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.requests import ChannelRequests
from nsqha.errors import LimitReached


class ChannelRetention:
    """Says what the log of one partition may forget, and requests that it does."""

    def __init__(self, state: PartitionState, requests: ChannelRequests, bounded: Mapping[str, Channel]) -> None:
        """`bounded` are the live channels, as they come and go, that keep a limited number of messages: the committed
        state does not say what they need."""
        self._state = state
        self._requests = requests
        self._bounded = bounded

    # ---- how far

    def log_start_limit(self, now_ns: int = 0) -> int:
        """No log start may name an offset above this at `now_ns`, the timestamp of a batch that would be written now;
        0: as if no hold had come to its end.

        It stays below what is held: events without messages may lie between the file border there and the one before,
        and the reader that holds reads them too."""
        return min(self._state.log_start_limit(), self._state.holds.lowest(now_ns) - 1)

    def kept_from(self, now_ns: int) -> int:
        """No policy gives up an unread message from here on: a reader of the log's files keeps it anyway."""
        readers = [channel.floor for channel in self._state.channels.values() if channel.reader]
        return min([self._state.holds.lowest(now_ns) - 1, *readers])

    # ---- holds

    def holds(self, now_ns: int) -> dict[int, LiveHold]:
        """The committed holds that are alive at `now_ns`, by id."""
        return self._state.holds.live(now_ns)

    def hold(self, id_: int, offset: int, until_ns: int, *, now_ns: int) -> None:
        """Keep what follows `offset` from retention until `until_ns`, as far as `holds` allows; a known hold is
        renewed. LimitReached: there are HOLDS_MAX others."""
        queue = self._requests.queue
        ids = set(self.holds(now_ns)) | {event.id for event in queue if isinstance(event, events.LogHold)}
        if id_ not in ids and len(ids) >= HOLDS_MAX:
            raise LimitReached(f"{HOLDS_MAX} readers hold this partition already: release one, or wait for its end")
        queue.append(events.LogHold(id_, offset, until_ns))

    def release(self, id_: int) -> None:
        """The hold ends."""
        self._requests.queue.append(events.LogHold(id_, 0, RELEASED))

    # ---- deferred messages

    def to_carry(self, offset: int, position: int, limit: int | None = None) -> list[Deferred]:
        """The references whose frames lie below this log start, one per message: `carry` them first.

        In order of offsets, the first `limit` of them.
        """
        found: list[Deferred] = []
        below = [channel.deferred.below(offset, position) for channel in self._state.channels.values()]
        for ref in heapq.merge(*below):
            if found and found[-1].offset == ref.offset:
                found[-1] = max(ref, found[-1], key=lambda same: same.position)
            elif len(found) == limit:
                break
            else:
                found.append(ref)
        return found

    def must_carry_more(self, offset: int, position: int, than: int) -> bool:
        """Whether a channel has more than `than` references whose frames lie below this log start."""
        below = [channel.deferred.below(offset, position) for channel in self._state.channels.values()]
        return any(next(islice(refs, than, None), None) is not None for refs in below)

    def carry(self, offset: int, frame: bytes) -> None:
        """Append a deferred message's frame again."""
        self._requests.queue.append(events.Carry(offset, frame))

    # ---- forgetting

    def propose_log_start(self, offset: int, position: int, abandoned: tuple[events.Abandoned, ...] = ()) -> None:
        """Request the event that no channel needs what is below. `abandoned`: what an explicit policy gives up."""
        self._requests.queue.append(events.LogStart(offset, position, abandoned))

    def may_unlink(self, *, end_offset: int, end_position: int, end_log_id: int) -> bool:
        """Whether a file pair that ends there is not needed any more, by what is committed.

        The caller unlinks only when its own disk also has everything below `needed_durable`.
        """
        start = self._state.log_start
        if end_offset > start[0] or end_position > start[1] or self._state.checkpoint.as_of < end_log_id:
            return False
        return not any(channel.cursor.holds_below(end_offset) for channel in self._bounded.values())

    @property
    def needed_durable(self) -> int:
        """The last log_id that must be durable before anything is unlinked: the checkpoint and the log start."""
        return max(self._state.checkpoint.end_log_id, self._state.log_start_log_id)
