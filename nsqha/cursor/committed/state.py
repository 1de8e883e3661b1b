"""The committed state of one partition's channels: a pure function of the partition's log.

Every replica computes it by applying the committed batches in order; a leader starts from it, recovery rebuilds it from
a checkpoint and the batches behind. There is no other source: no clock, no configuration, no random number.

What a channel is, here:

    floor      all below is finished or deferred. Only a seek lowers it.
    ranges     what was finished above the floor, [first, end)
    deferred   messages that wait for a due time; independent of the floor
    attempts   deliveries of unfinished messages, known after a clean stop only
    seek       log_id of the last seek. Progress whose writer had not applied it is stale: the offsets it speaks of were
               forgotten by the seek. Only what it says of messages that are deferred here, or put back, still holds.
    undo       where the last seek came from, and the deferred messages that it dropped

The **pump** is the end of what the topic has handed to its channels. It is the end of the log, except that it stands
still while the topic is paused or has no channel of consumers; unpause and first create move it to that event's own
place, which is the first offset of the event's batch. A new channel starts at the pump as it was before the event moved
it. nsqd's "the first channel gets the backlog, a later one starts now", its topic pause and its topic empty all follow
from this.

A message with a deliver-at time is deferred by every channel when the pump passes it: the attributes frame is the
event. Until then it is remembered in `deferred.later`.

Ephemeral channels are in the log by name only: they write no progress, hold nothing back and end with their leader's
epoch. Their cursors live in the leader's memory (`live.channel`), so here their floor is where they began.

A reader's channel is the place of a reader that takes the log as it lies in the files. It hands out nothing, so nothing
is deferred in it, the pump does not move for it, and it goes up to the log's end; seeks alone move its floor, which
holds the log start back as any durable channel's does, and no policy gives up what it has not read. A topic that has
only readers' channels lets go what they have read; the pump, where consumers will begin, then follows the log start.

A hold (`holds`) keeps the log start from passing what a batch reader needs, as long as batches' timestamps say.

Invariants: floor <= pump, a reader's floor <= log end; no range begins at or below the floor; no message is deferred
and in a range; log start <= pump and <= every durable floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from nsqha import frames, hot
from nsqha.cursor import events
from nsqha.cursor.committed.holds import Holds
from nsqha.cursor.deferred.dead import DEAD_FROM, clear_alive
from nsqha.cursor.deferred.deferred_set import BEFORE_ALL, Deferred, DeferredSet, MemoryDeferred, NewDeferred
from nsqha.cursor.deferred.later import LaterMessages
from nsqha.cursor.listing import ChannelEntry, Listing
from nsqha.errors import LogCorrupt
from nsqha.ids import is_ephemeral
from nsqha.ranges import RangeSet

# How many dropped messages a channel remembers for an undo. They are in each checkpoint, and written to the cache with
# every change of the channel: 26 bytes each, so 52 KB.
UNDO_DEFERRED_MAX = 2000

NEEDS_LOOK = frames.HAS_EVENTS | frames.HAS_ATTRIBUTES | frames.HAS_CHECKPOINT | frames.HAS_CARRY


class EntryLike(Protocol):
    """What is needed of a commitlog entry."""

    @property
    def log_id(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def timestamp_ns(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def chain(self) -> int: ...
    @property
    def flags(self) -> int: ...


class AppliedEntry(NamedTuple):
    """The last batch that went into a state. (log_id, epoch, chain) name the whole log up to it."""

    log_id: int = 0
    epoch: int = 0
    chain: int = 0
    end_offset: int = 0
    end_position: int = 0


@dataclass(frozen=True)
class Undo:
    """Where a seek came from; `ranges` None: they did not fit into the event, so finished messages come again.

    `deferred` are messages that the seek dropped and an undo defers again; `lost` counts those above the bound."""

    floor: int
    ranges: tuple[events.Range, ...] | None
    deferred: tuple[Deferred, ...] = ()
    lost: int = 0

    def returning(self, log_start: tuple[int, int]) -> list[Deferred]:
        """Those that an undo would defer again: what the seek dropped, as far as the log still has it."""
        offset, position = log_start
        return [ref for ref in self.deferred if (ref.position >= position if ref.position else ref.offset >= offset)]


@dataclass(frozen=True)
class CheckpointMark:
    """The newest complete checkpoint: what it holds, how big it is, and where in the log it ended."""

    as_of: int = 0
    size: int = 0
    end_log_id: int = 0
    end_position: int = 0


@dataclass
class ChannelState:
    """One channel's committed cursor."""

    name: str
    uid: int
    floor: int
    deferred: DeferredSet
    paused: bool = False
    reader: bool = False
    seek: int = 0
    undo: Undo | None = None
    abandoned: int = 0  # messages that a policy gave up
    ranges: RangeSet = field(default_factory=RangeSet)
    attempts: list[tuple[int, int, int]] = field(default_factory=list)  # first, end, deliveries

    @property
    def ephemeral(self) -> bool:
        return is_ephemeral(self.name)

    @property
    def silent(self) -> bool:
        """Whether it hands out nothing."""
        return self.paused or self.reader

    def finish(self, ranges: Sequence[events.Range]) -> None:
        """Add finished ranges, which are in order."""
        if len(ranges) > 100:  # one pass over both is cheaper than many insertions
            self.ranges = RangeSet(sorted([*self.ranges, *ranges]))
            return
        for first, end in ranges:
            self.ranges.add(first, end)

    def forget_finished_deferred(self) -> None:
        """What was put back since these ranges were known is deferred, and not finished."""
        for first, end in [*self.ranges]:
            at = self.deferred.next_offset(first)
            while at is not None and at < end:
                self.ranges.discard(at, at + 1)
                at = self.deferred.next_offset(at + 1)

    def raise_floor(self, floor: int) -> None:
        """Everything below `floor` is settled; the floor goes on over what is finished there."""
        if floor < self.floor:
            floor = self.floor
        self.floor = self.ranges.swallow(floor) if self.ranges else floor
        while self.attempts and self.attempts[0][1] <= self.floor:
            del self.attempts[0]


class ChannelTable(dict[str, ChannelState]):
    """The channels of a partition, by name."""

    listed: Listing | None = None  # the durable ones, as the last event listed them; None: they are from a checkpoint

    def listing(self) -> Listing:
        """The durable channels."""
        if self.listed is None:
            durable = [channel for _, channel in sorted(self.items()) if not channel.ephemeral]
            self.listed = Listing.of(ChannelEntry(c.name, c.uid, c.paused, c.reader) for c in durable)
        return self.listed

    @property
    def consumed(self) -> bool:
        """Whether there is a channel of consumers; those of readers of the files do not count."""
        for channel in self.values():  # noqa: SIM110  asked for each batch; a generator costs three times as much
            if not channel.reader:
                return True
        return False

    def by_uid(self, uid: int) -> ChannelState | None:
        return next((channel for channel in self.values() if channel.uid == uid), None)


# ---- what applying a batch did, for those that keep more than the committed state


@dataclass(frozen=True)
class Created:
    """A channel began, at the pump as it was before the event."""

    channel: ChannelState


@dataclass(frozen=True)
class Deleted:
    """A channel is gone, with its deferred set."""

    channel: ChannelState


@dataclass(frozen=True)
class Listed:
    """The channel list was applied; the topic may be paused or not, and so are these channels, which were not so
    before."""

    version: int
    paused: tuple[ChannelState, ...]


@dataclass(frozen=True)
class Progressed:
    """A channel's floor, finished ranges or deferred set are what its leader wrote."""

    channel: ChannelState


@dataclass(frozen=True)
class Sought:
    """The channel's cursor was moved to `floor`. `dropped`: its deferred messages went, but the dead letters;
    `returned` came back."""

    channel: ChannelState
    floor: int
    dropped: bool
    returned: tuple[Deferred, ...] = ()


@dataclass(frozen=True)
class Emptied:
    """[first, end) is finished for all channels."""

    first: int
    end: int


@dataclass(frozen=True)
class DroppedByPolicy:
    """By policy, `channel` does not get [first, end)."""

    channel: ChannelState
    first: int
    end: int


@dataclass(frozen=True)
class DeliverAt:
    """The pump passed these messages; every channel defers them."""

    refs: tuple[Deferred, ...]


@dataclass(frozen=True)
class LogStartMoved:
    """The log start is here: nothing below it is read any more."""

    offset: int
    position: int


@dataclass(frozen=True)
class CheckpointComplete:
    """A checkpoint has all its frames: channels can be known from it and what comes behind its `as_of`."""

    mark: CheckpointMark


@dataclass(frozen=True)
class EpochStarted:
    """The first batch of a leader."""

    epoch: int


Effect = (
    Created
    | Deleted
    | Listed
    | Progressed
    | Sought
    | Emptied
    | DroppedByPolicy
    | DeliverAt
    | LogStartMoved
    | CheckpointComplete
    | EpochStarted
)  # fmt: skip


def lists_only(entry: EntryLike, effects: Sequence[object]) -> bool:
    """Whether a batch changed the channel list and nothing else. Unless the pump moved with that, no channel has
    anything new but those that these effects name."""
    return bool(effects) and not entry.count and all(isinstance(e, (Created, Deleted, Listed)) for e in effects)


class PartitionState:
    """Channels by name, the pump, log start: everything that the events of one partition say."""

    def __init__(self, new_deferred: NewDeferred | None = None) -> None:
        self.new_deferred: NewDeferred = new_deferred or (lambda uid: MemoryDeferred())
        self.applied = AppliedEntry()
        self.epoch = 0  # of the last epoch start
        self.pump = 0
        self.paused = False
        self.version = 0
        self.channels = ChannelTable()
        self.log_start = (0, 0)  # offset, position
        self.log_start_log_id = 0  # of the event that said so
        self.holds = Holds()
        self.checkpoint = CheckpointMark()
        self.later = LaterMessages()
        self.partial: tuple[int, int, int] | None = None  # id, next sequence, bytes of the checkpoint being written
        self.rebuilt = 0  # an earlier state was wrong; this one was made anew from the log, up to this batch

    # ---- asking

    @property
    def moving(self) -> bool:
        """Whether the pump follows the log."""
        return not self.paused and self.channels.consumed

    def end_for(self, channel: ChannelState) -> int:
        """The end of what the channel may read."""
        return self.applied.end_offset if channel.reader else self.pump

    def clamp(self, channel: ChannelState, target: int) -> int:
        """Where a seek of the channel to `target` would go."""
        return min(max(target, self.log_start[0]), self.end_for(channel))

    def log_start_limit(self) -> int:
        """No log start may name an offset above this: a channel may still need what follows."""
        floors = [channel.floor for channel in self.channels.values() if not channel.ephemeral]
        if self.channels and not self.paused and not self.channels.consumed:
            return min(floors)  # an archive alone would keep everything for ever: its readers say what may go
        return min([self.pump, *floors])

    # ---- applying

    def apply(self, entry: EntryLike, data: bytes | bytearray | memoryview) -> list[Effect]:
        """Take in the next committed batch. What it changed is returned; nothing for a batch of plain messages."""
        log_id = entry.log_id
        assert log_id > self.applied.log_id, f"batch {log_id} applied twice"
        effects: list[Effect] = []
        if (flags := entry.flags) & NEEDS_LOOK:
            floor = events.floor_in(data) if flags & NEEDS_LOOK == frames.HAS_EVENTS else None
            if floor is None:
                self._apply_frames(entry, data, effects)
            else:
                _move_floor(self, *floor, (), effects)
        end = entry.first_offset + entry.count
        applied = (log_id, entry.epoch, entry.chain, end, entry.position + entry.size)
        self.applied = tuple.__new__(AppliedEntry, applied)  # AppliedEntry(...), in half the time
        if self.moving:
            self.pump = end
            if self.later.offsets:
                self._move_pump(end, effects)
        return effects

    def _apply_frames(self, entry: EntryLike, data: bytes | bytearray | memoryview, effects: list[Effect]) -> None:
        offset, at, end = entry.first_offset, 0, len(data)
        while at < end:
            if end - at < frames.HEAD.size:
                raise LogCorrupt(f"batch {entry.log_id}: {end - at} stray bytes at {at}")
            size, frame_type = frames.HEAD.unpack_from(data, at)
            after = at + 4 + size
            if size < 4 or after > end:
                raise LogCorrupt(f"batch {entry.log_id}: the frame at {at} does not fit")
            if frame_type == frames.MESSAGE:
                if not entry.flags & frames.HAS_ATTRIBUTES:
                    return  # channel events come first
                after, count = hot.walk(data, at, end, end)
                if not count:
                    raise LogCorrupt(f"batch {entry.log_id}: the message at {at} does not fit")
                offset += count
            elif frame_type == frames.PROGRESS and _apply_cursors(self, data, at + 8, after, effects):
                if self.pump < entry.first_offset and self.moving:
                    self._move_pump(entry.first_offset, effects)
            elif (event := events.decode(frame_type, bytes(data[at + 8 : after]), self.channels.listing)) is not None:
                if isinstance(event, events.Attributes):
                    if event.deliver_at_ns:
                        for covered in range(offset, min(offset + event.covers, entry.first_offset + entry.count)):
                            self.later.add(covered, event.deliver_at_ns)
                else:
                    self._apply_event(event, entry, entry.position + at, effects)
                    if self.moving:
                        self._move_pump(entry.first_offset, effects)
            at = after

    def _apply_event(self, event: events.Event, entry: EntryLike, position: int, effects: list[Effect]) -> None:
        match event:
            case events.ProgressEvent(channels):
                by_uid = {channel.uid: channel for channel in self.channels.values()}
                for change in channels:
                    if change.uid in by_uid:
                        self._progress(by_uid[change.uid], change, effects)
            case events.ChannelsEvent():
                self._channels(event, effects)
            case events.Ephemeral(name, uid, exists):
                self._ephemeral(name, uid, exists, effects)
            case events.TopicEmpty():
                self._topic_empty(entry.first_offset, effects)
            case events.Seek():
                self._seek(event, entry.log_id, effects)
            case events.Carry(offset):
                self._carry(offset, position + events.CARRY_HEAD)
            case events.LogStart():
                self._log_start(event, entry, effects)
            case events.LogHold():
                self.holds.apply(event, log_start=self.log_start[0], timestamp_ns=entry.timestamp_ns)
            case events.CheckpointFrame():
                self._checkpoint_frame(event, entry, effects)
            case events.EpochStart(epoch):
                self.epoch = epoch
                for channel in [c for c in self.channels.values() if c.ephemeral]:
                    self._delete(channel, effects)
                effects.append(EpochStarted(epoch))

    # ---- the pump

    def _move_pump(self, offset: int, effects: list[Effect]) -> None:
        self.pump = offset
        later = self.later
        if later.offsets and later.offsets[0] < offset:
            refs = later.cut(offset)
            for channel in self.channels.values():
                if not (channel.ephemeral or channel.reader):
                    for ref in refs:
                        channel.deferred.put(ref)
            effects.append(DeliverAt(refs))

    def _lift_pump(self, offset: int) -> None:
        """What is below goes without having been handed to a channel."""
        if self.pump < offset:
            self.pump = offset
            self.later.cut(offset)

    def _topic_empty(self, place: int, effects: list[Effect]) -> None:
        first = self.pump
        if first >= place:
            return
        self.pump = place
        self.later.cut(place)
        for channel in self.channels.values():
            if not channel.ephemeral:
                channel.ranges.add(first, place)
                channel.raise_floor(channel.floor)  # a reader's may be anywhere up to the end
        effects.append(Emptied(first, place))

    # ---- which channels there are

    def _channels(self, event: events.ChannelsEvent, effects: list[Effect]) -> None:
        if event.version < self.version:
            return
        self.version = event.version
        gone, came = event.channels.since(self.channels.listing())
        self.channels.listed = event.channels
        wanted = {channel.name: channel for channel in came}
        for name, uid, *_ in gone:
            if name not in wanted or wanted[name].uid != uid:
                self._delete(self.channels[name], effects)
        paused = []
        for name, new in wanted.items():
            if name not in self.channels:
                self._create(name, new.uid, effects, reader=new.reader)
            channel = self.channels[name]
            if channel.paused != new.paused:
                channel.paused = new.paused
                paused.append(channel)
        self.paused = event.paused
        effects.append(Listed(event.version, tuple(paused)))

    def _ephemeral(self, name: str, uid: int, exists: bool, effects: list[Effect]) -> None:
        if exists and name not in self.channels:
            self._create(name, uid, effects)
        elif not exists and name in self.channels and self.channels[name].uid == uid:
            self._delete(self.channels[name], effects)

    def _create(self, name: str, uid: int, effects: list[Effect], *, reader: bool = False) -> None:
        channel = ChannelState(name, uid, self.pump, self.new_deferred(uid), reader=reader)
        self.channels[name] = channel
        effects.append(Created(channel))

    def _delete(self, channel: ChannelState, effects: list[Effect]) -> None:
        del self.channels[channel.name]
        channel.deferred.clear()
        effects.append(Deleted(channel))

    # ---- where they are

    def _progress(self, channel: ChannelState, change: events.ChannelProgress, effects: list[Effect]) -> None:
        stale = change.seek < channel.seek
        deferred = channel.deferred
        for offset, due_ns, attempts in change.puts:
            held = deferred.get(offset)
            if held is not None:
                deferred.put(Deferred(offset, due_ns, attempts, held.position))
            elif change.put_back and offset >= self.log_start[0]:  # wherever the floor is, or was moved to
                deferred.put(Deferred(offset, due_ns, attempts))
                channel.ranges.discard(offset, offset + 1)
            elif not stale and offset >= channel.floor:  # below: a policy gave it up meanwhile
                deferred.put(Deferred(offset, due_ns, attempts))
        for offset in change.finished:
            if deferred.remove(offset) and offset >= channel.floor:
                channel.ranges.add(offset, offset + 1)
        if not stale:
            channel.finish(change.ranges)
            if change.attempts_known:
                channel.attempts.clear()
            channel.attempts += change.attempts
        channel.raise_floor(channel.floor if stale else change.floor)
        effects.append(Progressed(channel))

    def _seek(self, event: events.Seek, log_id: int, effects: list[Effect]) -> None:
        channel = self.channels.by_uid(event.uid)
        if channel is None or (event.undo and channel.undo is None):
            return
        if event.forward and self.clamp(channel, event.target) <= channel.floor:
            return
        back = channel.undo
        dropped: list[Deferred] = []
        alive = 0
        if event.drop_deferred and len(channel.deferred):
            alive = len(channel.deferred) - channel.deferred.count_due_from(DEAD_FROM)
            dropped = channel.deferred.due(BEFORE_ALL, DEAD_FROM - 1, UNDO_DEFERRED_MAX)
        kept = tuple(sorted(dropped))
        channel.undo = Undo(event.old_floor, event.old_ranges, kept, alive - len(kept))
        channel.seek = log_id
        channel.ranges = RangeSet()
        channel.attempts.clear()
        channel.floor = self.clamp(channel, back.floor if event.undo and back else event.target)
        if event.undo and back and back.ranges:
            channel.ranges = RangeSet(back.ranges)
            channel.raise_floor(channel.floor)
        if event.drop_deferred:
            clear_alive(channel.deferred)
        returned = back.returning(self.log_start) if event.undo and back else []
        for ref in returned:
            channel.deferred.put(ref)
        if event.undo:
            channel.forget_finished_deferred()
        effects.append(Sought(channel, channel.floor, event.drop_deferred, tuple(returned)))

    # ---- what the log may forget

    def _carry(self, offset: int, position: int) -> None:
        for channel in self.channels.values():
            ref = channel.deferred.get(offset)
            if ref is not None:
                channel.deferred.put(ref._replace(position=position))

    def _log_start(self, event: events.LogStart, entry: EntryLike, effects: list[Effect]) -> None:
        self.holds.expire(entry.timestamp_ns)
        for abandoned in event.abandoned:
            self._abandon(abandoned, effects)
        offset = min(event.offset, self.log_start_limit(), self.holds.lowest(entry.timestamp_ns))
        position = event.position
        # A reference that was not carried keeps its frame, whatever the writer believed.
        for channel in self.channels.values():
            for ref in channel.deferred.below(offset, position):
                if ref.position:
                    position = min(position, ref.position)
                else:
                    offset = min(offset, ref.offset)
        self.log_start = (max(self.log_start[0], offset), max(self.log_start[1], position))
        self._lift_pump(self.log_start[0])
        self.log_start_log_id = entry.log_id
        effects.append(LogStartMoved(*self.log_start))

    def _abandon(self, abandoned: events.Abandoned, effects: list[Effect]) -> None:
        end = min(abandoned.end, self.applied.end_offset)
        if abandoned.uid == 0:
            if not self.moving:
                self._lift_pump(end)
            return
        channel = self.channels.by_uid(abandoned.uid)
        if channel is not None and not channel.reader and channel.floor < min(end, self.pump):
            first, end = channel.floor, min(end, self.pump)
            channel.abandoned += end - first - channel.ranges.count_below(end)
            channel.raise_floor(end)
            effects.append(DroppedByPolicy(channel, first, end))

    def start_at(self, offset: int, position: int) -> None:
        """The log's first file begins here. If that is above the last known log start, the file wins."""
        self.log_start = (max(self.log_start[0], offset), max(self.log_start[1], position))
        self._lift_pump(offset)
        for channel in self.channels.values():
            if not channel.ephemeral:  # these are not where it says anyway, and every replica has to say the same
                channel.raise_floor(offset)

    # ---- checkpoints

    def snapshot(self) -> PartitionState:
        """A copy that stays as it is now, to write a checkpoint from."""
        return self._copy(lambda channel: channel.deferred.snapshot())

    def outline(self) -> PartitionState:
        """A copy without the deferred messages."""
        return self._copy(lambda channel: MemoryDeferred())

    def _copy(self, deferred: Callable[[ChannelState], DeferredSet]) -> PartitionState:
        copy = PartitionState(self.new_deferred)
        copy.__dict__.update(self.__dict__)
        copy.later = self.later.copy()
        copy.holds = self.holds.copy()
        copy.channels = ChannelTable(
            (
                name,
                replace(
                    channel,
                    ranges=channel.ranges.copy(),
                    attempts=channel.attempts[:],
                    deferred=deferred(channel),
                ),
            )
            for name, channel in self.channels.items()
        )
        return copy

    def _checkpoint_frame(self, frame: events.CheckpointFrame, entry: EntryLike, effects: list[Effect]) -> None:
        size = len(frame.body)
        if frame.sequence == 0:
            self.partial = (frame.id, 0, 0)
        if self.partial is None or self.partial[:2] != (frame.id, frame.sequence):
            self.partial = None
            return
        size += self.partial[2]
        self.partial = (frame.id, frame.sequence + 1, size)
        if frame.last:
            self.partial = None
            if frame.as_of >= self.checkpoint.as_of:
                self.checkpoint = CheckpointMark(frame.as_of, size, entry.log_id, entry.position + entry.size)
                effects.append(CheckpointComplete(self.checkpoint))


def _apply_cursors(
    state: PartitionState, data: bytes | bytearray | memoryview, at: int, end: int, effects: list[Effect]
) -> bool:
    """Apply a progress that moves floors and finishes ranges, the usual one. False, and nothing was done: it says more.
    Batches carry them by the hundred a second, so this is `_progress` of such a change, quicker."""
    changes = events.cursors_in(data, at, end)
    if changes is None:
        return False
    for uid, seek, floor, ranges in changes:
        _move_floor(state, uid, seek, floor, ranges, effects)
    return True


def _move_floor(
    state: PartitionState, uid: int, seek: int, floor: int, ranges: Sequence[events.Range], effects: list[Effect]
) -> None:
    """`_progress` of a change that has no lists but ranges."""
    for channel in state.channels.values():
        if channel.uid == uid:
            break
    else:
        return
    if seek < channel.seek:
        floor, ranges = channel.floor, ()
    if ranges:
        channel.finish(ranges)
    channel.raise_floor(floor)
    effects.append(Progressed(channel))
