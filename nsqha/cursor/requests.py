"""What a partition's leader was asked to do with its channels, until it is in the log.

A request changes nothing: it becomes an event of the next batch, and its effect comes when that batch is applied. A
seek is made into an event only then, because the event says where the cursor was.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from nsqha.cursor import events
from nsqha.cursor import seek as seeks
from nsqha.cursor.committed.state import PartitionState, Undo
from nsqha.cursor.listing import NO_CHANNELS, ChannelEntry, Listing
from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.policy import ChannelPolicies
from nsqha.errors import NotFound

Planning = Generator[None, None, seeks.SeekPlan]


@dataclass(frozen=True)
class _SeekRequest:
    cursor: ChannelCursor
    target: int
    drop_deferred: bool = False
    undo: bool = False
    forward: bool = False

    def event(self) -> events.Seek:
        return seeks.event(
            self.cursor, self.target, drop_deferred=self.drop_deferred, undo=self.undo, forward=self.forward
        )


def _entry(name: str, channels: Mapping[str, events.ChannelInfoLike]) -> ChannelEntry:
    info = channels[name]
    return ChannelEntry(name, info.uid, info.paused, info.reader)


class ChannelRequests:
    """Requests about the channels of one partition, in the order in which they go into the log."""

    def __init__(self, state: PartitionState, channels: Mapping[str, Channel], policies: ChannelPolicies) -> None:
        """`channels` are the live ones, as they come and go; `policies` is what they follow."""
        self.queue: list[events.Event | _SeekRequest] = []
        self._state = state
        self._channels = channels
        self._policies = policies
        self._version = state.version  # the highest of a channel list that the log has, or will have
        self._record: events.ChannelListLike | None = None  # the last one that became an event
        self._listing = NO_CHANNELS  # of that

    # ---- which channels there are

    def reconcile(self, record: events.ChannelListLike) -> bool:
        """Bring the log in line with the metadata record; False if it is, or knows a newer one. Policies, which are in
        no log, count from now on."""
        self._policies.follow(record)
        if record.version <= max(self._version, self._state.version):
            return False
        self._version = record.version
        self.queue.append(events.ChannelsEvent(record.version, record.paused, self._listed(record)))
        return True

    def _listed(self, record: events.ChannelListLike) -> Listing:
        """The channels of the record, in the order of their names."""
        before, channels = self._record, record.channels
        if before is None:
            self._listing = Listing.of(_entry(name, channels) for name in sorted(channels))
        else:
            changes = {
                name: _entry(name, channels) if name in channels else None for name in record.changed_since(before)
            }
            self._listing = self._listing.changed(changes)
        self._record = record
        return self._listing

    def opening_events(self, record: events.ChannelListLike) -> bytes:
        """What the epoch-start batch says of the channel list, so that the log is in line from its first message on."""
        assert not self.queue, "events are queued already"
        self.reconcile(record)
        return b"".join(event.encode() for event in self.take())

    def create_ephemeral(self, name: str, uid: int) -> None:
        if name not in self._channels:
            self.queue.append(events.Ephemeral(name, uid, exists=True))

    def delete_ephemeral(self, name: str) -> None:
        channel = self._channels.get(name)
        if channel is not None:
            self.queue.append(events.Ephemeral(name, channel.uid, exists=False))

    def topic_empty(self) -> None:
        """Drop what the topic holds back from its channels."""
        self.queue.append(events.TopicEmpty())

    # ---- where they are

    def planning_seek(self, name: str, target: int) -> Planning:
        """What `seek` would do now, counted in steps."""
        cursor = self._cursor(name)
        return seeks.planning(self._state, cursor, seeks.move_to(self._state, cursor, target), target)

    def planning_undo(self, name: str) -> Planning:
        """What `undo` would do now, counted in steps."""
        cursor = self._cursor(name)
        return seeks.planning(self._state, cursor, seeks.move_back(self._state, cursor, self._undo(name)))

    def seek(self, name: str, target: int) -> None:
        """Move a channel's cursor to an offset (`events.TARGET_END`: the pump)."""
        self.queue.append(_SeekRequest(self._cursor(name), target))

    def advance(self, name: str, target: int) -> None:
        """Move a channel's cursor forward to an offset; it stays if it is there, or beyond, when that is applied."""
        self.queue.append(_SeekRequest(self._cursor(name), target, forward=True))

    def empty(self, name: str) -> None:
        """Drop everything a channel has: unread, in flight, waiting, deferred."""
        self.queue.append(_SeekRequest(self._cursor(name), events.TARGET_END, drop_deferred=True))

    def undo(self, name: str) -> None:
        """Go back to where the channel's last seek came from."""
        self.queue.append(_SeekRequest(self._cursor(name), self._undo(name).floor, undo=True))

    def _undo(self, name: str) -> Undo:
        undo = self._cursor(name).committed.undo
        if undo is None:
            raise NotFound(f"channel {name} has no seek to undo")
        return undo

    def _cursor(self, name: str) -> ChannelCursor:
        channel = self._channels.get(name)
        if channel is None:
            raise NotFound(f"there is no channel {name}")
        return channel.cursor

    # ---- into the log

    def moved(self) -> set[ChannelCursor]:
        """The cursors that are to be moved: all of their progress is written before."""
        return {request.cursor for request in self.queue if isinstance(request, _SeekRequest)}

    def take(self) -> list[events.Event]:
        """The events of all requests, which are in the caller's hands from now on."""
        taken = [request.event() if isinstance(request, _SeekRequest) else request for request in self.queue]
        self.queue.clear()
        return taken
