"""What comes back does not stop what is unread: of any 128 messages handed out at most 64 are other than unread.

The last messages handed out are kept as the bits of a number, so a run costs one shift however long it is.
"""

from __future__ import annotations

from nsqha.cursor.limits import ChannelLimits


class UnreadShare:
    """The share of one channel; it counts only while something unread can be handed out."""

    __slots__ = ("_limits", "others")

    def __init__(self, limits: ChannelLimits) -> None:
        self._limits = limits
        self.others = 0  # the last messages handed out, the latest lowest: 1 if it was not unread

    def note(self, count: int, *, other: bool) -> None:
        """`count` messages were handed out; `other`: they were not unread."""
        last = self._limits.share_of - 1  # all that the next one is judged by
        self.others = (self.others << min(count, last) | other) & ((1 << last) - 1)

    def unread_first(self) -> int:
        """How many unread messages have to be handed out before something else may be."""
        share, share_of = self._limits.share, self._limits.share_of
        others, count = self.others, 0
        while others.bit_count() >= share:
            out = share_of - others.bit_length()
            others = (others << out) & ((1 << (share_of - 1)) - 1)
            count += out
        return count
