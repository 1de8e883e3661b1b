"""All channels of one partition on its leader: what goes into the log, and what comes of it.

    requests (reconcile, seek, empty, ..) -> queue --+
    channels' progress ------------------------------+--> take_events -> front of the next batch -> ... committed
    checkpoint, carried messages, log start ---------+                                                    |
    live channels  <--  effects  <--  PartitionState.apply  <--  apply(entry, data)  <--------------------+

Nothing here changes because it was asked for; it changes when the batch that says so is applied. What was asked for is
`urgent`: the leader writes it without waiting for messages. Progress rides with data: every 4 ms while it is a few
rows, a millisecond later for each row, up to 40 ms. Each one names all channels that have news. Without data it goes
alone after 50 ms; `due_alone` says when it is small enough to go sooner.

**The bytes of `take_events` must reach the log in the order they were taken.** If a batch was definitely not stored,
they go in front of what the next call returns. A channel's progress is recognised when it comes back by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nsqha import frames
from nsqha.clock import Now
from nsqha.cursor import events
from nsqha.cursor.committed import state
from nsqha.cursor.committed.checkpoint import CheckpointWriter
from nsqha.cursor.committed.state import ChannelState, Effect, EntryLike, PartitionState
from nsqha.cursor.deferred.overlay import DeferredChange
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live import progress
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.cursor import ChannelContext, ChannelCursor, floor_progress, small_progress
from nsqha.cursor.live.ordered import OrderedChannel
from nsqha.cursor.live.progress import TakenEvents
from nsqha.cursor.passing import PassingChannels
from nsqha.cursor.requests import ChannelRequests
from nsqha.cursor.retention import ChannelRetention

NO_CHANGES: dict[int, DeferredChange] = {}

_Sent = tuple[ChannelCursor, dict[int, DeferredChange]]


@dataclass(frozen=True)
class Forgotten:
    """Deliveries of a channel that no longer count as in flight: owner -> how many."""

    channel: Channel
    counts: dict[int, int]


class _Pause(NamedTuple):
    """How long after the last progress the next one is due."""

    rides_s: float  # ... in front of a batch
    idle_s: float  # ... without one


class PartitionCursors:
    """The channels of a partition that this node leads."""

    def __init__(
        self,
        *,
        id_base: int,
        state: PartitionState | None = None,
        limits: ChannelLimits | None = None,
        ordered: bool = False,
        bounded: bool = False,
    ) -> None:
        """`bounded`: every channel keeps a limited number of unread messages, as ephemeral ones do anyway."""
        self._all_bounded = bounded
        self.state = state if state is not None else PartitionState()
        self.limits = limits if limits is not None else ChannelLimits()
        self.channels: dict[str, Channel] = {}
        self._context = ChannelContext(self.state, id_base=id_base, limits=self.limits, ordered=ordered)
        self.bounded: dict[str, Channel] = {}  # those that keep a limited number of unread messages, as ephemeral ones
        self.passing = PassingChannels(self.channels, self._context.policies)
        self.requests = ChannelRequests(self.state, self.channels, self._context.policies)
        self.retention = ChannelRetention(self.state, self.requests, self.bounded)
        self.checkpoints = CheckpointWriter(self.state, self.limits)
        self._taken: TakenEvents[_Sent] = TakenEvents()
        self._last_progress = -1e9
        self._pause = _Pause(self.limits.progress_soon_s, self.limits.progress_idle_s)
        self._dirty_since: float | None = None
        self._final = False
        for committed in self.state.channels.values():
            self._open(committed)
            self.channels[committed.name].cursor.count_from(self.state.end_for(committed))

    # ---- asking

    def keep_by(self, keep: Callable[[int], object]) -> None:
        """`keep` is called with the offsets of messages that will be asked for again within seconds."""
        self._context.keep = keep

    @property
    def urgent(self) -> bool:
        """Whether events wait that should be written now."""
        return bool(self.requests.queue) or (self._context.urgent and bool(self._context.dirty))

    @property
    def next_waits(self) -> bool:
        """Whether the next message of an ordered channel waits until what is new here is committed."""
        return self._context.ordered and self._context.urgent and bool(self._context.dirty)

    def event_deadline(self) -> float | None:
        """When events must be written even if no message comes."""
        if not (self._context.dirty or self.checkpoints.frames):
            return None
        if self._context.urgent:
            return self._context.mono
        if self._dirty_since is None:
            self._dirty_since = self._context.mono
        return max(self._dirty_since, self._last_progress) + self._pause.idle_s

    # ---- into the log

    def quiet(self, mono: float, force: bool = False) -> bool:
        """Whether nothing goes in front of a batch that is written now. Asked for each batch."""
        context, queue, checkpoints = self._context, self.requests.queue, self.checkpoints
        if not (queue or context.dirty or checkpoints.frames or self._final or checkpoints.due):
            return True
        due = mono - self._last_progress >= self._pause.rides_s
        return not (force or due or queue or context.urgent or self._final)

    @property
    def due_alone(self) -> bool:
        """Whether there is progress, and small enough for a batch of its own: the last one was."""
        return bool(self._context.dirty) and self._pause.rides_s <= self.limits.progress_alone_s

    def take_events(self, now: Now, force: bool = False) -> tuple[bytes, int]:
        """Frames for the front of the next batch, and its flags."""
        context, queue, checkpoints = self._context, self.requests.queue, self.checkpoints
        if self.quiet(now.mono, force):
            return b"", 0
        context.mono = now.mono
        if len(context.dirty) == 1 and not (queue or checkpoints.frames or self._final or checkpoints.due):
            cursor = context.dirty[0]
            if self._live_of(cursor.committed) is not None and (data := floor_progress(cursor)) is not None:
                # The usual one. Below is the same for it, in three times the time.
                context.dirty, context.urgent = [], False
                self._last_progress, self._dirty_since = now.mono, None
                self._pause = _Pause(self.limits.progress_soon_s, self.limits.progress_idle_s)
                self._taken.add(data, [(cursor, NO_CHANGES)])
                return data, frames.HAS_EVENTS
        parts: list[bytes] = []
        flags = 0
        sent = self._take_progress(parts, now)
        for event in self.requests.take() if queue else ():
            parts.append(event.encode())
            flags |= frames.HAS_CARRY if isinstance(event, events.Carry) else frames.HAS_EVENTS
        if sent:
            flags |= frames.HAS_EVENTS
        flags |= checkpoints.take(parts)
        data = b"".join(parts)
        if data:
            self._taken.add(data, sent)
        return data, flags

    def _take_progress(self, parts: list[bytes], now: Now) -> list[_Sent]:
        context = self._context
        dirty, context.dirty, context.urgent = context.dirty, [], False
        if self._final:
            dirty = [channel.cursor for channel in self.channels.values() if channel.cursor.has_final_news]
        self._last_progress, self._dirty_since = now.mono, None
        moved = self.requests.moved() if self.requests.queue else ()
        sent: list[_Sent] = []
        encoded: list[bytes] = []
        rows = ranges = 0
        for cursor in dirty:
            if self._live_of(cursor.committed) is None:
                continue
            small = None if self._final or cursor in moved else small_progress(cursor)
            if small is not None:
                encoded.append(small[0])
                rows += small[1]
                sent.append((cursor, NO_CHANGES))
            else:
                floor_before = cursor.written.floor
                news, changes = cursor.progress(final=self._final, whole=cursor in moved)
                put_back = cursor.deferred_overlay.put_back
                back = {offset for offset, change in put_back.items() if change and change is changes.get(offset)}
                encoded += [piece.encode() for piece in progress.pieces(news, floor_before, back)]
                rows += 1 + news.rows
                sent.append((cursor, changes))
            ranges += len(cursor.written.ranges)
        # Finding what is new costs time by the ranges there are; many of them are looked at less often.
        limits = self.limits
        stretch = min(ranges * limits.progress_range_s, limits.progress_ranges_s_max)
        pause = min(max(rows * limits.progress_row_s, limits.progress_soon_s), limits.progress_interval_s)
        self._pause = _Pause(pause + stretch, limits.progress_idle_s + stretch)
        self._final = False
        parts += progress.frames(encoded)
        return sent

    def deliver_at(self, due_ns: int, messages: bytes, count: int = 1) -> bytes:
        """Message frames with the attributes frame that defers them; the batch needs HAS_ATTRIBUTES."""
        return events.Attributes(covers=count, deliver_at_ns=due_ns).encode() + messages

    def prepare_stop(self) -> bool:
        """The next `take_events` is the last, perhaps: it says of everything in flight how often it was delivered.

        False if there is nothing to say."""
        self._final = any(channel.cursor.has_final_news for channel in self.channels.values())
        return self._final

    # ---- out of the log

    def start_at(self, offset: int, position: int) -> None:
        """The log's first file begins here, and all that earlier leaders wrote is applied; nothing is in flight yet."""
        if self.state.log_start[0] < offset or self.state.log_start[1] < position:
            self.state.start_at(offset, position)
            for channel in self.channels.values():
                channel.cursor.reload()

    def apply(
        self, entry: EntryLike, data: bytes | bytearray | memoryview, now: Now | None = None
    ) -> Sequence[Effect | Forgotten]:
        """Take in the next committed batch: committed state first, then the live channels."""
        if now is not None:
            self._context.mono = now.mono
        if not entry.flags and not (self.bounded or self.passing):
            return self.state.apply(entry, data)
        pump = self.state.pump
        mine = self._taken.committed(data) if entry.flags else []
        effects: list[Effect | Forgotten] = [*self.state.apply(entry, data)]
        for cursor, changes in mine:
            cursor.settled(changes)
        if effects:
            own = {id(cursor.committed) for cursor, _ in mine}
            for effect in list(effects):
                if type(effect) is state.Progressed and id(effect.channel) in own:
                    continue
                forgotten = self._live(effect, own)
                if forgotten is not None:
                    effects.append(forgotten)
        moved = self.state.pump != pump or not state.lists_only(entry, effects)
        if moved:
            for channel in self.bounded.values():
                channel.cursor.keep_unread(self.state.pump)
        self.passing.look(moved)
        return effects

    def drop_unread(self, end: int) -> int:
        """The channels that keep a limited number drop what is unread below `end`; how many messages, of all."""
        pump = self.state.pump
        return sum(channel.cursor.keep_unread(pump, drop_below=min(end, pump)) for channel in self.bounded.values())

    def floors_only(self, entry: EntryLike, effects: Sequence[Effect | Forgotten]) -> bool:
        """Whether a batch, just applied, is progress of channels that do not wait for it: their readers are at the
        end."""
        if entry.count or not effects or self._context.ordered:
            return False
        for effect in effects:
            if type(effect) is not state.Progressed or (live := self._live_of(effect.channel)) is None:
                return False
            if live.cursor.next_read < self.state.end_for(effect.channel):
                return False
        return True

    def _live(self, effect: Effect | Forgotten, own: set[int]) -> Forgotten | None:
        match effect:
            case state.Created(committed):
                self._open(committed)
            case state.Deleted(committed):
                channel = self.channels.pop(committed.name)
                self.passing.removed(channel)
                self.bounded.pop(channel.name, None)
            case state.Listed(_, paused):
                for committed in paused:
                    if (live := self._live_of(committed)) is not None:
                        live.paused = committed.silent
            case state.Progressed(committed):
                # Not ours: another leader's, before our epoch began, when nothing was in flight yet.
                if id(committed) not in own and (live := self._live_of(committed)) is not None:
                    live.cursor.reload()
            case state.Sought(committed, _, dropped, returned):
                if (live := self._live_of(committed)) is not None:
                    return Forgotten(live, live.cursor.sought(dropped=dropped, returned=returned))
            case state.DroppedByPolicy(committed, _, end):
                if (live := self._live_of(committed)) is not None:
                    return Forgotten(live, live.cursor.gone(end))
            case state.Emptied(first, end):
                for channel in self.channels.values():
                    if channel.committed.reader:
                        channel.cursor.reload()  # the reader does not go over what is finished
                    else:
                        channel.cursor.emptied(first, end)
            case state.DeliverAt(refs):
                for channel in self.channels.values():
                    if not channel.committed.reader:
                        channel.cursor.deliver_at(refs)
        return None

    def _live_of(self, committed: ChannelState) -> Channel | None:
        """The live channel; None if the same batch deleted it."""
        channel = self.channels.get(committed.name)
        return channel if channel is not None and channel.committed is committed else None

    def _open(self, committed: ChannelState) -> None:
        channel = (OrderedChannel if self._context.ordered else Channel)(committed, self._context)
        self.channels[committed.name] = channel
        self.passing.added(channel)
        if channel.ephemeral or self._all_bounded:
            self.bounded[channel.name] = channel
