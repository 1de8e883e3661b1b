"""Checker 5: a channel of an ordered topic delivers each partition in the order of its log, one message at a time.

    order    a message came after a later one of its partition
    overlap  a message came although the one before was neither finished nor refused

The next message is delivered only after the FIN of the one before is committed, whoever leads: so nothing but a seek
goes back. Excused: what may have waited in the socket of another consumer while that was not read, and what a power
loss with another sync than `always` may undo. Messages with a delay of their own have no place in the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.jepsen.checkers.view import Checker, Connection, Delivery, Key, Sent, partition_of, where
from tests.jepsen.history import AnyEvent, FaultBegun, Message

POWER_LOSS = ("D1", "D2", "D3")  # kinds of faults after which the files may lack what was not synced


@dataclass
class Latest:
    """The highest message that a partition of a channel delivered."""

    id: str
    t: float
    by: Connection
    delivery: Delivery


class Ordered(Checker):
    name = "ordered channels"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._latest: dict[tuple[int, int], Latest] = {}
        self._delivered = 0
        self._undone_at = -1.0

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, FaultBegun) and event.fault in POWER_LOSS and self.view.run.sync != "always":
            self._undone_at = event.t

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        if not by.channel.ordered or sent.op.event.delay:
            return
        self._delivered += 1
        place = (id(by.channel), partition_of(message.id))
        latest = self._latest.get(place)
        if latest is not None and message.id != latest.id and self._binding(by, latest):
            text = f"{where(t, by, key)}, id {message.id}"
            if message.id < latest.id:
                if latest.by is not by and by.sent_after <= latest.t:
                    return  # it may be older
                self.findings.add("order", f"{text}: came after {latest.id} at {latest.t:.3f}")
            elif not latest.delivery.fins:
                self.findings.add("overlap", f"{text}: {latest.id}, delivered at {latest.t:.3f}, is not finished")
        self._latest[place] = Latest(message.id, t, by, last)

    def _binding(self, by: Connection, latest: Latest) -> bool:
        channel = by.channel
        sent = latest.delivery.sent_after
        return not channel.moving and sent > channel.moved_at and latest.t > self._undone_at

    def end(self) -> None:
        if self._delivered:
            wrong = self.findings.problems["order"] + self.findings.problems["overlap"]
            text = "an ordered channel delivers a partition in the order of its log, one message at a time"
            self.findings.promise(text, "0 violations", f"{wrong} of {self._delivered} deliveries", kept=not wrong)
