"""All channels of one partition on its leader: what goes into the log, and what comes of it.

    requests (reconcile, seek, empty, ..) -> queue --+
    channels' progress ------------------------------+--> take_events -> front of the next batch -> ... committed
    checkpoint, carried messages, log start ---------+                                                    |
    live channels  <--  effects  <--  PartitionState.apply  <--  apply(entry, data)  <--------------------+

Nothing here changes because it was asked for; it changes when the batch that says so is applied. What was asked for is
`urgent`: the leader writes it without waiting for messages. Progress rides with data at most every 100 ms and goes
alone after a second.

**The bytes of `take_events` must reach the log in the order they were taken.** If a batch was definitely not stored,
they go in front of what the next call returns. A channel's progress is recognised when it comes back by its bytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from nsqha import frames
from nsqha.clock import Now
from nsqha.cursor import checkpoint, events, progress, state
from nsqha.cursor import seek as seeks
from nsqha.cursor.channel import Channel
from nsqha.cursor.cursor import ChannelContext
from nsqha.cursor.deferred import Deferred
from nsqha.cursor.deferred_overlay import DeferredChange
from nsqha.cursor.holds import HOLDS_MAX, RELEASED, LiveHold
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.ordered import OrderedChannel
from nsqha.cursor.state import ChannelState, Effect, EntryLike, PartitionState
from nsqha.errors import LimitReached, NotFound


class ChannelInfoLike(Protocol):
    """A channel of the metadata record."""

    @property
    def uid(self) -> int: ...
    @property
    def paused(self) -> bool: ...
    @property
    def reader(self) -> bool: ...


class ChannelListLike(Protocol):
    """The metadata record of a topic's channels."""

    @property
    def version(self) -> int: ...
    @property
    def paused(self) -> bool: ...
    @property
    def channels(self) -> Mapping[str, ChannelInfoLike]: ...


@dataclass(frozen=True)
class Forgotten:
    """Deliveries of a channel that count no longer as in flight: owner -> how many."""

    channel: Channel
    counts: dict[int, int]


@dataclass
class _SeekRequest:
    channel: Channel
    target: int
    drop_deferred: bool = False
    undo: bool = False
    forward: bool = False


_Queued = (
    events.ChannelsEvent
    | events.Ephemeral
    | events.TopicEmpty
    | events.Carry
    | events.LogStart
    | events.LogHold
    | _SeekRequest
)  # fmt: skip


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
        """`bounded`: every channel keeps only so many unread messages, as ephemeral ones do anyway."""
        self._bounded = bounded
        self.state = state if state is not None else PartitionState()
        self.limits = limits if limits is not None else ChannelLimits()
        self.channels: dict[str, Channel] = {}
        self._context = ChannelContext(self.state, id_base=id_base, limits=self.limits, ordered=ordered)
        self._queue: list[_Queued] = []
        self._taken: deque[tuple[bytes, list[tuple[Channel, dict[int, DeferredChange]]]]] = deque()
        self._ephemerals: list[Channel] = []
        self._version = self.state.version  # the highest that the log has, or will have
        self._last_progress = -1e9
        self._interval_s = self.limits.progress_interval_s
        self._dirty_since: float | None = None
        self._checkpoint: Iterator[bytes] | None = None
        self._checkpoint_begun = 0  # the position of the log's end when the last one was begun here
        self._checkpoint_as_of = 0  # of that one
        self._final = False
        for committed in self.state.channels.values():
            self._open(committed)
            self.channels[committed.name].count_from(self.state.end_for(committed))

    # ---- asking

    @property
    def pump(self) -> int:
        """The end of what channels may read."""
        return self.state.pump

    @property
    def log_start(self) -> tuple[int, int]:
        """Offset and position below which nobody needs anything."""
        return self.state.log_start

    @property
    def urgent(self) -> bool:
        """Whether events wait that should be written now."""
        return bool(self._queue) or (self._context.urgent and bool(self._context.dirty))

    def event_deadline(self) -> float | None:
        """When events must be written even if no message comes."""
        if not (self._context.dirty or self._checkpoint):
            return None
        if self._context.urgent:
            return self._context.mono
        if self._dirty_since is None:
            self._dirty_since = self._context.mono
        return max(self._dirty_since, self._last_progress) + self.limits.progress_idle_s

    def _channel(self, name: str) -> Channel:
        channel = self.channels.get(name)
        if channel is None:
            raise NotFound(f"there is no channel {name}")
        return channel

    # ---- requests: each becomes an event

    def reconcile(self, record: ChannelListLike) -> bool:
        """Bring the log in line with the metadata record; False if it is, or knows a newer one."""
        if record.version <= max(self._version, self.state.version):
            return False
        self._version = record.version
        channels = tuple(
            events.ChannelEntry(name, info.uid, info.paused, info.reader)
            for name, info in sorted(record.channels.items())
        )
        self._queue.append(events.ChannelsEvent(record.version, record.paused, channels))
        return True

    def opening_events(self, record: ChannelListLike) -> bytes:
        """What the epoch-start batch says of the channel list, so that the log is in line from its first message on."""
        assert not self._queue, "events are queued already"
        return self._event(self._queue.pop()).encode() if self.reconcile(record) else b""

    def create_ephemeral(self, name: str, uid: int) -> None:
        if name not in self.channels:
            self._queue.append(events.Ephemeral(name, uid, exists=True))

    def delete_ephemeral(self, name: str) -> None:
        channel = self.channels.get(name)
        if channel is not None:
            self._queue.append(events.Ephemeral(name, channel.uid, exists=False))

    def topic_empty(self) -> None:
        """Drop what the topic holds back from its channels."""
        self._queue.append(events.TopicEmpty())

    def plan_seek(self, name: str, target: int) -> seeks.SeekPlan:
        """What `seek` would do now."""
        return seeks.plan(self.state, self._channel(name), target)

    def seek(self, name: str, target: int) -> seeks.SeekPlan:
        """Move a channel's cursor to an offset (`events.TARGET_END`: the pump)."""
        channel = self._channel(name)
        self._queue.append(_SeekRequest(channel, target))
        return seeks.plan(self.state, channel, target)

    def advance(self, name: str, target: int) -> None:
        """Move a channel's cursor forward to an offset; it stays if it is there, or beyond, when that is applied."""
        self._queue.append(_SeekRequest(self._channel(name), target, forward=True))

    def empty(self, name: str) -> seeks.SeekPlan:
        """Drop everything a channel has: unread, in flight, waiting, deferred."""
        channel = self._channel(name)
        self._queue.append(_SeekRequest(channel, events.TARGET_END, drop_deferred=True))
        return seeks.plan(self.state, channel, events.TARGET_END)

    def undo(self, name: str) -> seeks.SeekPlan:
        """Go back to where the channel's last seek came from."""
        channel = self._channel(name)
        undo = channel.committed.undo
        if undo is None:
            raise NotFound(f"channel {name} has no seek to undo")
        self._queue.append(_SeekRequest(channel, undo.floor, undo=True))
        return seeks.plan(self.state, channel, undo.floor)

    # ---- into the log

    def take_events(self, now: Now, force: bool = False) -> tuple[bytes, int]:
        """Frames for the front of the next batch, and its flags."""
        context = self._context
        if not (self._queue or context.dirty or self._checkpoint or self._final or self.checkpoint_due):
            return b"", 0
        context.mono = now.mono
        due = now.mono - self._last_progress >= self._interval_s
        if not (force or due or self._queue or context.urgent or self._final):
            return b"", 0
        parts: list[bytes] = []
        flags = 0
        sent = self._take_progress(parts, now)
        for request in self._queue:
            parts.append(self._event(request).encode())
            flags |= frames.HAS_CARRY if isinstance(request, events.Carry) else frames.HAS_EVENTS
        self._queue.clear()
        if sent:
            flags |= frames.HAS_EVENTS
        flags |= self._take_checkpoint(parts)
        data = b"".join(parts)
        if data:
            self._taken.append((data, sent))
        return data, flags

    def _take_progress(self, parts: list[bytes], now: Now) -> list[tuple[Channel, dict[int, DeferredChange]]]:
        context = self._context
        dirty, context.dirty, context.urgent = context.dirty, [], False
        if self._final:
            dirty = [channel for channel in self.channels.values() if channel.has_final_news]
        self._last_progress, self._dirty_since = now.mono, None
        moved = {request.channel for request in self._queue if isinstance(request, _SeekRequest)}
        sent: list[tuple[Channel, dict[int, DeferredChange]]] = []
        pieces: list[events.ChannelProgress] = []
        ranges = 0
        for channel in dirty:
            if self.channels.get(channel.name) is channel:
                floor_before = channel.written.floor
                news, changes = channel.progress(final=self._final, whole=channel in moved)
                pieces += progress.pieces(news, floor_before)
                sent.append((channel, changes))
                ranges += len(channel.written.ranges)
        # Finding what is new costs time by the ranges there are; many of them are looked at less often.
        stretched = self.limits.progress_interval_s * (1 + ranges / 5000)
        self._interval_s = min(stretched, self.limits.progress_idle_s)
        self._final = False
        parts += progress.frames(pieces)
        return sent

    def _take_checkpoint(self, parts: list[bytes]) -> int:
        if self._checkpoint is None and self.checkpoint_due:
            self.begin_checkpoint(self.state.snapshot())
        if self._checkpoint is None:
            return 0
        size = 0
        while size < self.limits.checkpoint_bytes_per_batch:
            frame = next(self._checkpoint, None)
            if frame is None:
                self._checkpoint = None
                break
            parts.append(frame)
            size += len(frame)
        return frames.HAS_CHECKPOINT if size else 0

    def _event(self, request: _Queued) -> events.Event:
        if isinstance(request, _SeekRequest):
            return seeks.event(
                request.channel,
                request.target,
                drop_deferred=request.drop_deferred,
                undo=request.undo,
                forward=request.forward,
            )
        return request

    # ---- checkpoints

    @property
    def checkpoint_due(self) -> bool:
        """Whether the log grew enough since the last one. Asked for each batch."""
        mark, end = self.state.checkpoint, self.state.applied.end_position
        if end - mark.end_position < self.limits.checkpoint_every_bytes:
            return False
        grown = end - max(mark.end_position, self._checkpoint_begun)
        return grown >= max(self.limits.checkpoint_every_bytes, 4 * mark.size)

    @property
    def checkpointing(self) -> bool:
        """Whether a checkpoint is being written, or waits to be committed; it rides with the next batches."""
        return self._checkpoint is not None or self._checkpoint_as_of > self.state.checkpoint.as_of

    def begin_checkpoint(self, snapshot: PartitionState) -> None:
        """Write `snapshot`, which may lag behind, with the next batches; replaces one that is being written."""
        if snapshot.applied.log_id >= self.state.checkpoint.as_of:
            self._checkpoint_begun = self.state.applied.end_position
            self._checkpoint_as_of = snapshot.applied.log_id
            self._checkpoint = checkpoint.write(snapshot, self.limits.checkpoint_frame_bytes)

    def deliver_at(self, due_ns: int, messages: bytes, count: int = 1) -> bytes:
        """Message frames with the attributes frame that defers them; the batch needs HAS_ATTRIBUTES."""
        return events.Attributes(covers=count, deliver_at_ns=due_ns).encode() + messages

    def prepare_stop(self) -> bool:
        """The next `take_events` is the last, perhaps: it says of everything in flight how often it was delivered.

        False if there is nothing to say."""
        self._final = any(channel.has_final_news for channel in self.channels.values())
        return self._final

    # ---- what the log may forget

    def log_start_limit(self, now_ns: int = 0) -> int:
        """No log start may name an offset above this at `now_ns`, the timestamp of a batch that would be written now;
        0: as if no hold had come to its end.

        It stays below what is held: events without messages may lie between the file border there and the one before,
        and whoever holds reads them too."""
        return min(self.state.log_start_limit(), self.state.holds.lowest(now_ns) - 1)

    def kept_from(self, now_ns: int) -> int:
        """No policy gives up an unread message from here on: who reads the log's files keeps it anyway."""
        readers = [channel.floor for channel in self.state.channels.values() if channel.reader]
        return min([self.state.holds.lowest(now_ns) - 1, *readers])

    def holds(self, now_ns: int) -> dict[int, LiveHold]:
        """The committed holds that are alive at `now_ns`, by id."""
        return self.state.holds.live(now_ns)

    def hold(self, id_: int, offset: int, until_ns: int, *, now_ns: int) -> None:
        """Keep what follows `offset` from retention until `until_ns`, as far as `holds` allows; a known hold is
        renewed. LimitReached: there are HOLDS_MAX others."""
        ids = set(self.holds(now_ns)) | {event.id for event in self._queue if isinstance(event, events.LogHold)}
        if id_ not in ids and len(ids) >= HOLDS_MAX:
            raise LimitReached(f"{HOLDS_MAX} readers hold this partition already: release one, or wait for its end")
        self._queue.append(events.LogHold(id_, offset, until_ns))

    def release(self, id_: int) -> None:
        """The hold ends."""
        self._queue.append(events.LogHold(id_, 0, RELEASED))

    def to_carry(self, offset: int, position: int, limit: int | None = None) -> list[Deferred]:
        """The references whose frames lie below this log start, one per message: `carry` them first.

        In order of offsets, the first `limit` of them.
        """
        found: list[Deferred] = []
        below = [channel.deferred.below(offset, position) for channel in self.state.channels.values()]
        for ref in heapq.merge(*below):
            if found and found[-1].offset == ref.offset:
                found[-1] = max(ref, found[-1], key=lambda same: same.position)
            elif len(found) == limit:
                break
            else:
                found.append(ref)
        return found

    def must_carry_more(self, offset: int, position: int, than: int) -> bool:
        """Whether a channel has more than so many references whose frames lie below this log start."""
        below = [channel.deferred.below(offset, position) for channel in self.state.channels.values()]
        return any(next(islice(refs, than, None), None) is not None for refs in below)

    def carry(self, offset: int, frame: bytes) -> None:
        """Append a deferred message's frame again."""
        self._queue.append(events.Carry(offset, frame))

    def propose_log_start(self, offset: int, position: int, abandoned: tuple[events.Abandoned, ...] = ()) -> None:
        """Say that nobody needs what is below. `abandoned`: what an explicit policy gives up."""
        self._queue.append(events.LogStart(offset, position, abandoned))

    def may_unlink(self, *, end_offset: int, end_position: int, end_log_id: int) -> bool:
        """Whether a file pair that ends there is not needed any more, by what is committed.

        Whoever unlinks also asks that its own disk has everything below `needed_durable`.
        """
        start = self.state.log_start
        if end_offset > start[0] or end_position > start[1] or self.state.checkpoint.as_of < end_log_id:
            return False
        return not any(channel.holds_below(end_offset) for channel in self._ephemerals)

    @property
    def needed_durable(self) -> int:
        """The last log_id that must be durable before anything is unlinked: the checkpoint and the log start."""
        return max(self.state.checkpoint.end_log_id, self.state.log_start_log_id)

    # ---- out of the log

    def start_at(self, offset: int, position: int) -> None:
        """The log's first file begins here, and all that earlier leaders wrote is applied; nothing is in flight yet."""
        if self.state.log_start[0] < offset or self.state.log_start[1] < position:
            self.state.start_at(offset, position)
            for channel in self.channels.values():
                channel.reload()

    def apply(
        self, entry: EntryLike, data: bytes | bytearray | memoryview, now: Now | None = None
    ) -> Sequence[Effect | Forgotten]:
        """Take in the next committed batch: committed state first, then the live channels."""
        if now is not None:
            self._context.mono = now.mono
        if not entry.flags and not self._ephemerals:
            return self.state.apply(entry, data)
        mine = self._came_back(data) if entry.flags else []
        effects: list[Effect | Forgotten] = [*self.state.apply(entry, data)]
        for channel, changes in mine:
            channel.settled(changes)
        if effects:
            own = {id(channel.committed) for channel, _ in mine}
            for effect in list(effects):
                forgotten = self._live(effect, own)
                if forgotten is not None:
                    effects.append(forgotten)
        for channel in self._ephemerals:
            channel.keep_unread(self.state.pump)
        return effects

    def _came_back(self, data: bytes | bytearray | memoryview) -> list[tuple[Channel, dict[int, DeferredChange]]]:
        """The progress of ours that is in this batch."""
        mine: list[tuple[Channel, dict[int, DeferredChange]]] = []
        front = bytes(data[: sum(len(taken) for taken, _ in self._taken) + 64])
        at = 0
        while self._taken and at < len(front):
            taken, sent = self._taken[0]
            if front.startswith(taken, at):
                self._taken.popleft()
                mine += sent
                at += len(taken)
            else:
                size, frame_type = frames.HEAD.unpack_from(front, at) if at + 8 <= len(front) else (0, 0)
                if frame_type < frames.CONTROL_MIN:
                    break
                at += 4 + size
        return mine

    def _live(self, effect: Effect | Forgotten, own: set[int]) -> Forgotten | None:
        match effect:
            case state.Created(committed):
                self._open(committed)
            case state.Deleted(committed):
                channel = self.channels.pop(committed.name)
                self._ephemerals = [c for c in self._ephemerals if c is not channel]
            case state.Listed():
                for name, channel in self.channels.items():
                    if not channel.ephemeral:  # the pause of an ephemeral channel is in memory only
                        channel.paused = self.state.channels[name].silent
            case state.Progressed(committed):
                # Not ours: another leader's, before our epoch began, when nothing was in flight yet.
                if id(committed) not in own and (live := self._live_of(committed)) is not None:
                    live.reload()
            case state.Sought(committed, _, dropped):
                if (live := self._live_of(committed)) is not None:
                    return Forgotten(live, live.sought(dropped=dropped))
            case state.DroppedByPolicy(committed, _, end):
                if (live := self._live_of(committed)) is not None:
                    return Forgotten(live, live.gone(end))
            case state.Emptied(first, end):
                for channel in self.channels.values():
                    if channel.committed.reader:
                        channel.reload()  # nobody reads on over what is finished
                    else:
                        channel.emptied(first, end)
            case state.DeliverAt(refs):
                for channel in self.channels.values():
                    if not channel.committed.reader:
                        channel.deliver_at(refs)
        return None

    def _live_of(self, committed: ChannelState) -> Channel | None:
        """The live channel; None if the same batch deleted it."""
        channel = self.channels.get(committed.name)
        return channel if channel is not None and channel.committed is committed else None

    def _open(self, committed: ChannelState) -> None:
        channel = (OrderedChannel if self._context.ordered else Channel)(committed, self._context)
        self.channels[committed.name] = channel
        if channel.ephemeral or self._bounded:
            self._ephemerals.append(channel)
