"""Checker 4: `attempts` counts deliveries of a message on its channel.

    attempts  zero, more than 65,535, or not growing although the same leader delivered both times

A crash, a change of leader and a move of the channel may begin anew at 1. In a cluster samples say whether there was a
change of leader. An older delivery may have waited in the socket of another consumer: it is no fault if nothing had
been read there since the newer one; nor is one that waited behind a cut while the channel was moved.
"""

from __future__ import annotations

from tests.jepsen.checkers.view import Checker, Connection, Delivery, Key, Sent, partition_of, where
from tests.jepsen.history import Message

ATTEMPTS_MAX = 65_535


class Attempts(Checker):
    name = "attempts"

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        if not 1 <= message.attempts <= ATTEMPTS_MAX:
            self.findings.add("attempts", f"{where(t, by, key)}: attempts {message.attempts}")
        elif message.attempts <= last.attempts and not overtaken(by, message, last):
            self._not_growing(
                f"{where(t, by, key)}: attempts {message.attempts} after {last.attempts}", by, message, last
            )
        worst = self.findings.figures.get("most attempts", 0)
        self.findings.figures["most attempts"] = max(worst, message.attempts)

    def end(self) -> None:
        if self.view.figures.redelivered:
            wrong = self.findings.problems["attempts"]
            text = "attempts count on from delivery to delivery under one leader"
            seen = f"{wrong} of {self.view.figures.redelivered} repeated deliveries"
            self.findings.promise(text, "0 exceptions", seen, kept=not wrong)

    def _not_growing(self, text: str, by: Connection, message: Message, last: Delivery) -> None:
        if not self.view.cluster:
            if last.gen == by.gen:
                self.findings.add("attempts", text)
        elif (
            not by.channel.moving
            and last.sent_after > by.channel.moved_at
            and last.connection is not None
            and last.connection.node == by.node
        ):
            partition = (by.topic.name, partition_of(message.id))
            self.view.under_one_leader(partition, last.t, by.node, lambda: self.findings.add("attempts", text))


def overtaken(by: Connection, message: Message, last: Delivery) -> bool:
    """Whether it may be older than the last one that was read: it waited for longer than the message time-out, as the
    program was not given a core or was cut off, and nothing that was sent later had been read on its connection."""
    return last.connection is not by and by.sent_after <= last.t and message.attempts < last.attempts
