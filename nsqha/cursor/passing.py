"""The channels of a partition whose policies pass over messages, which are looked at with every batch, or have dead
letters moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nsqha.cursor.live.channel import Channel
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.policy import ChannelPolicies, PassingPolicy


class PassingChannels:
    """Which these are, and has them pass over what is to be passed over."""

    def __init__(self, channels: Mapping[str, Channel], policies: ChannelPolicies) -> None:
        """`channels` are the live ones, as they come and go."""
        self._channels = channels
        self._policies = policies
        self._as_of = -1  # how many changes of policies are in what was found
        self._new: list[Channel] = []  # channels that came since
        self._found: list[tuple[ChannelCursor, PassingPolicy]] = []
        self.moving: list[ChannelCursor] = []  # those whose dead letters belong in another topic
        self._when_moving: Callable[[PassingChannels], object] = lambda passing: None

    def __bool__(self) -> bool:
        return bool(self._found)

    def when_moving(self, tell: Callable[[PassingChannels], object]) -> None:
        """`tell` is called whenever a channel comes to those whose dead letters are moved."""
        self._when_moving = tell
        if self.moving:
            tell(self)

    def added(self, channel: Channel) -> None:
        """A channel has come."""
        self._new.append(channel)

    def removed(self, channel: Channel) -> None:
        """A channel has gone."""
        cursor = channel.cursor
        self._new = [new for new in self._new if new is not channel]
        self._found = [found for found in self._found if found[0] is not cursor]
        self.moving = [moving for moving in self.moving if moving is not cursor]

    def look(self, moved: bool = True) -> None:
        """The pump has moved, or the window of a channel, or, if not `moved`, there may be other policies or channels
        now."""
        if self._as_of != self._policies.changes:
            self._as_of = self._policies.changes
            self._found, self.moving, self._new = [], [], [*self._channels.values()]
        known = len(self._found)
        if self._new:
            self._choose()
        for cursor, policy in self._found if moved else self._found[known:]:
            if cursor.passing.look(cursor.ring, cursor.unread, cursor.end, policy):
                cursor.mark_dirty()

    def _choose(self) -> None:
        for channel in self._new:
            if not channel.committed.reader:
                channel.cursor.passing.expires_below = 0  # until `expire` says more
                if (policy := self._policies.passing(channel.name)) is not None:
                    self._found.append((channel.cursor, policy))
                if (death := self._policies.death(channel.name)) is not None and death.topic is not None:
                    self.moving.append(channel.cursor)
                    self._when_moving(self)
        self._new = []

    def expire(self, wall_ns: int, first_since: Callable[[int], int]) -> bool:
        """Called about once a second: find what has become too old, and pass over it, and go on counting what is unread
        where that takes many looks and batches may not come; whether there was any.

        `first_since(time_ns)` is the offset of the first message that was published then or later."""
        known: dict[int, int] = {}
        for cursor, policy in self._found:
            if policy.ttl_ns is None or _done(cursor):
                continue
            if policy.ttl_ns not in known:
                known[policy.ttl_ns] = first_since(wall_ns - policy.ttl_ns)
            cursor.passing.expires_below = known[policy.ttl_ns]
        due = bool(known) or any(cursor.passing.counting for cursor, _ in self._found)
        if due:
            self.look()
        return due


def _done(cursor: ChannelCursor) -> bool:
    """Whether consumers are known to be done with everything; where that must be counted first, some is."""
    if cursor.floor < cursor.end or not cursor.deferred_overlay.prepare_figures():
        return False
    return cursor.deferred_overlay.lowest_waiting() is None
