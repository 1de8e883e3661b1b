"""What a channel's policy passes over: its consumers do not get it, and it is counted.

It is finished where it lies in front of the reader, in runs, so it moves the floor like everything that consumers
finish, and is in the log as that. Only what is unread is passed over: not what was handed out, waits, or is deferred.
The reader goes no further than its window; when that moves, because progress was committed, there is another look.

What waits for its next delivery and is older than the policy allows is finished when its turn comes, and counted as
expired (`Channel.redelivery`). A message that was never delivered, and is deferred, goes when it is due.
"""

from __future__ import annotations

from nsqha.cursor.live.unread import UnreadLog
from nsqha.cursor.policy import PassingPolicy
from nsqha.hot import FINISHED, Ring

_PIECES_MAX = 5_000  # at once; each is a run between two messages that are settled already


class PassingOver:
    """Counts what one channel has passed over, by reason, and what an operator finished."""

    __slots__ = ("counting", "dropped", "expired", "expires_below", "finished_by_operator", "skipped")

    def __init__(self) -> None:
        self.expires_below = 0  # messages below this offset are older than the policy allows, as of the last second
        self.counting = False  # how much is unread must be counted first: a part with each look
        self.finished_by_operator = 0
        self.expired = 0
        self.skipped = 0  # the policy is to skip everything
        self.dropped = 0  # the oldest, beyond the depth that the policy allows

    def look(self, ring: Ring, unread: UnreadLog, end: int, policy: PassingPolicy) -> bool:
        """Pass over what is to be passed over now of what the channel may read, up to `end`; whether there was any."""
        self.counting = False
        if policy.skip:
            skipped = _pass_over(ring, unread, end, end - ring.next)
            self.skipped += skipped
            return skipped > 0
        expired = dropped = 0
        if self.expires_below > ring.next:
            expired = _pass_over(ring, unread, min(end, self.expires_below), end - ring.next)
            self.expired += expired
        if policy.max_depth is not None:
            excess = unread.beyond(end, policy.max_depth)
            self.counting = excess is None
            dropped = _pass_over(ring, unread, end, excess) if excess else 0
            self.dropped += dropped
        return expired + dropped > 0


def _pass_over(ring: Ring, unread: UnreadLog, end: int, count_max: int) -> int:
    """Finish up to `count_max` of the oldest unread messages below `end`; how many it were."""
    end = min(end, unread.window_end())
    count = 0
    for _ in range(_PIECES_MAX):
        place = unread.skip() if ring.next >= unread.stop else ring.next
        if place >= end or count >= count_max:
            break
        if place < unread.stop:
            stop = min(end, unread.stop, place + count_max - count)
        elif unread.again and unread.again[0][0] <= place:
            stop = place + 1  # handed out by the last leader, before a clean stop
        else:
            break  # an ordered channel waits for what is deferred
        ring.settle(place, stop, FINISHED)
        unread.look()
        count += stop - place
    return count
