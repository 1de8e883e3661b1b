"""Messages belong to one life of their topic and channel, and a paused channel gives nothing.

risen    a message of a deleted topic
stale    a new ephemeral channel delivered what was OK'd before it existed
paused   delivered to a connection that subscribed while the channel was paused
"""

from __future__ import annotations

from tests.jepsen.checkers.view import Checker, Connection, Delivery, Key, Sent, where
from tests.jepsen.history import Message


class Lives(Checker):
    name = "lives of topics and channels"

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        channel, op = by.channel, sent.op
        if op.topic is not by.topic:
            self.findings.add("risen", f"{where(t, by, key)}: published before the topic was deleted")
        born = channel.born.get(by.gen)
        if not channel.durable and op.result == "ok" and born is not None and op.ended < born:
            self.findings.add(
                "stale", f"{where(t, by, key)}: OK'd at {op.ended:.3f}, the channel was made at {born:.3f}"
            )
        if channel.pause_since is not None and by.since > channel.pause_since:
            self.findings.add("paused", f"{where(t, by, key)}: paused since {channel.pause_since:.3f}")
