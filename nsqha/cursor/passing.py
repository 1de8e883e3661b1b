"""The channels of a partition whose policies pass over messages; looked at with every batch."""

from __future__ import annotations

from collections.abc import Mapping

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
        self._found: list[tuple[ChannelCursor, PassingPolicy]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def channels_changed(self) -> None:
        """A channel has come or gone."""
        self._as_of = -1

    def look(self) -> None:
        """The pump has moved, or the window of a channel, or a policy is another one."""
        if self._as_of != self._policies.changes:
            self._as_of = self._policies.changes
            policies = (
                (c.cursor, self._policies.passing(c.name)) for c in self._channels.values() if not c.committed.reader
            )
            self._found = [(cursor, policy) for cursor, policy in policies if policy is not None]
        for cursor, policy in self._found:
            if cursor.passing.look(cursor.ring, cursor.unread, cursor.end, policy):
                cursor.mark_dirty()
