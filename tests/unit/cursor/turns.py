"""Judges whose turn it was, in the random lives of a channel: what is unread, what came back, what is due."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.channel import Channel, Redelivery
from nsqha.hot import WAITING
from tests.unit.cursor.model import FINISHED, ChannelModel


class Back(NamedTuple):
    """A message came back: where the reader must be for its turn, and when that was."""

    place: int
    since: float


@dataclass
class Turns:
    """What one channel of one leader handed out, and what came back to it."""

    channel: Channel
    limits: ChannelLimits
    others: list[bool] = field(default_factory=list)  # for each that was handed out: whether it was not unread
    back: dict[int, Back] = field(default_factory=dict)

    def came_back(self, offset: int, pump: int, now: float) -> None:
        place = min(pump, self.channel.cursor.next_read + self.limits.retry_after_max)
        self.back[offset] = Back(place, now)

    def handed_out(self, count: int, *, other: bool) -> None:
        self.others += [other] * count

    def is_in_order(self, redelivery: Redelivery) -> bool:
        """Whether it is a message that another leader handed out, in the order of the log."""
        ring = self.channel.cursor.ring
        return redelivery.offset == ring.next and ring.get(redelivery.offset) != WAITING

    def waiting(self) -> dict[int, Back]:
        """What waits in memory without a delay; it came back with a known place."""
        ring, delays = self.channel.cursor.ring, self.channel.cursor.waiting.delays
        return {
            offset: back
            for offset, back in self.back.items()
            if ring.low <= offset < ring.next and ring.get(offset) == WAITING and offset not in delays
        }

    def unread_ready(self, model: ChannelModel, now_ns: int) -> bool:
        """Whether certainly something unread can be handed out."""
        cursor = self.channel.cursor
        end = cursor.unread.window_end()
        return not model.paused and any(
            cursor.next_read <= offset < end
            and status != FINISHED
            and offset not in model.in_flight
            and offset not in cursor.deferred_overlay
            and (offset not in model.due or model.due[offset].at_ns <= now_ns)
            for offset, status in model.status.items()
        )

    def share_is_used(self) -> bool:
        return sum(self.others[-(self.limits.share_of - 1) :]) >= self.limits.share

    def has_turn(self, back: Back, now: float, early_s: float = 0.0) -> bool:
        return self.channel.cursor.next_read >= back.place or now - back.since >= self.limits.retry_wait_s - early_s
