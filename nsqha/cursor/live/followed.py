"""How long messages of a channel take: one at a time is followed from when it is handed out to its FIN.

It is the one in the middle of a run that goes out when none is followed, at most one in a millisecond, and is looked
for at each pump, which every FIN causes. So nothing is done per message, and the histograms are a sample: a fair one,
since what is picked does not depend on how long it will take. A message that comes back to the channel is dropped;
redeliveries are not followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nsqha.hot import FINISHED, IN_FLIGHT, SINGLE, Ring
from nsqha.quantile import (
    ATTEMPT_BOUNDS,
    EMPTY_ATTEMPTS,
    EMPTY_MESSAGES,
    MESSAGE_BOUNDS,
    Histogram,
    HistogramData,
    summed,
)

NONE = -1
APART_SECONDS = 0.001  # from one that begins to the next


class FollowedMessage:
    """The sample of one channel of one partition."""

    __slots__ = ("_since", "handed_out", "next_at", "offset", "processed")

    def __init__(self) -> None:
        self.offset = NONE
        self._since = 0.0
        self.next_at = 0.0  # none begins before
        self.handed_out = Histogram(MESSAGE_BOUNDS)  # seconds from publish to the first delivery
        self.processed = Histogram(MESSAGE_BOUNDS)  # ... from there to FIN

    def begin(self, offset: int, age_seconds: float, now: float) -> None:
        """The message goes out now (monotonic), so long after it was published. None is followed yet."""
        self.offset, self._since, self.next_at = offset, now, now + APART_SECONDS
        self.handed_out.observe(max(0.0, age_seconds))

    def look(self, ring: Ring, now: float) -> None:
        """See whether it has been answered."""
        offset = self.offset
        if ring.low <= offset < ring.next and (state := ring.get(offset)) != FINISHED:
            if state not in (IN_FLIGHT, SINGLE):
                self.offset = NONE
            return
        if offset < ring.next:
            self.processed.observe(now - self._since)
        self.offset = NONE

    def forget(self) -> None:
        """A seek: what is in flight counts no more."""
        self.offset = NONE


class Answers:
    """What became of the messages that one channel handed out in one partition: how many, and how long it took."""

    __slots__ = ("finished", "finished_later", "followed", "requeued", "timed_out")

    def __init__(self) -> None:
        self.finished = 0
        self.finished_later = Histogram(ATTEMPT_BOUNDS)  # of these, the ones that took more attempts than one
        self.requeued = 0
        self.timed_out = 0
        self.followed = FollowedMessage()

    def times(self) -> ChannelTimes:
        bounds, counts, total = self.finished_later.data()
        first = self.finished - sum(counts)
        attempts = HistogramData(bounds, (counts[0] + first, *counts[1:]), total + first)
        return ChannelTimes(self.followed.handed_out.data(), self.followed.processed.data(), attempts)


class ChannelTimes(NamedTuple):
    """What messages of a channel took."""

    handed_out: HistogramData = EMPTY_MESSAGES  # seconds, a sample
    processed: HistogramData = EMPTY_MESSAGES  # seconds, a sample
    attempts: HistogramData = EMPTY_ATTEMPTS  # of all that were finished

    @classmethod
    def sum(cls, several: Iterable[ChannelTimes]) -> ChannelTimes:
        found = list(several)
        return cls(
            summed((times.handed_out for times in found), EMPTY_MESSAGES),
            summed((times.processed for times in found), EMPTY_MESSAGES),
            summed((times.attempts for times in found), EMPTY_ATTEMPTS),
        )


NO_TIMES = ChannelTimes()
