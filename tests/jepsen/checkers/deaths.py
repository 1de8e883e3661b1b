"""Checker 11: what is dead has failed: a REQ, a time-out or a lost connection ended each of its deliveries.

    not failed   it died of a REQ although nobody sent one, or of what the policy does not know
    finished     it died although its FIN is settled (`duplicates`)
    unbroken     it died of a time-out or a lost connection, and no fault was there from its publish to its death: who
                 reads it answers at once

What a node that stands still hands on too late, or never, has failed too: the leader waited for its answer. How long
it lived says when it died by the load's clock: the leader has one clock for both.
"""

from __future__ import annotations

from collections import defaultdict

from tests.jepsen.checkers.view import Channel, Checker, Connection, Delivery, Fin, Key, Sent
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    Answered,
    AnyEvent,
    Died,
    FaultBegun,
    FaultEnded,
    Letter,
    SeekEnded,
    SeekSent,
)

BY_REQ = "requeued"
BY_SILENCE = ("timed_out", "disconnected")
AFTERMATH_SECONDS = 15.0  # after a fault: its victim starts, or is found to be gone
CLOCKS_SECONDS = 1.0  # by which the moment of a death may be wrong


class Deaths(Checker):
    name = "deaths"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._died: list[tuple[Channel, Died]] = []
        self._fins: dict[tuple[int, str], tuple[Delivery, list[Fin]]] = {}  # by channel and id: when it was found dead
        self._refused: defaultdict[int, set[str]] = defaultdict(set)  # by channel: ids that were answered by REQ
        self._faults: dict[int, tuple[float, float]] = {}  # from, to

    def answered(self, event: Answered, by: Connection) -> None:
        if event.command == "REQ":
            self._refused[id(by.channel)].update(event.ids)

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun):
            self._faults[event.op] = event.t, float("inf")

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        if event.op in self._faults:
            self._faults[event.op] = self._faults[event.op][0], event.t + AFTERMATH_SECONDS

    def other(self, event: AnyEvent) -> None:
        if not isinstance(event, Died):
            return
        channel = self.view.topic(event.topic).channels[event.channel]
        self._died.append((channel, event))
        dead = {letter.id for letter in event.letters}
        for key, delivery in channel.deliveries.items():
            if (message_id := self.view.messages[key].id) in dead:
                self._fins[id(channel), message_id] = delivery, list(delivery.fins)

    def end(self) -> None:
        by_id = {sent.id: (key, sent) for key, sent in self.view.messages.items()} if self._died else {}
        letters = by_silence = 0
        for channel, event in self._died:
            letters += len(event.letters)
            for letter in event.letters:
                by_silence += letter.id not in self._refused[id(channel)]
                self._judge(channel, event, letter, *by_id.get(letter.id, (None, None)))
        if letters:
            self.findings.figures["died without a REQ"] = by_silence
            wrong = sum(self.findings.problems.values())
            text = "nothing dies that did not fail: by a REQ, a time-out or a lost connection"
            seen = f"{wrong} of {letters}; {by_silence} without a REQ"
            self.findings.promise(text, "0 exceptions", seen, kept=not wrong)

    def _judge(self, channel: Channel, event: Died, letter: Letter, key: Key | None, sent: Sent | None) -> None:
        text = f"{letter.id} {key} on {event.topic}/{event.channel}: died, {letter.reason}"
        refused = letter.id in self._refused[id(channel)]
        delivery, fins = self._fins.get((id(channel), letter.id), (None, []))
        settled = [fin.t for fin in fins if delivery is not None and fin in delivery.fins and fin.settled]
        if settled:
            self.findings.add("finished", f"{text}; its FIN at {settled[-1]:.3f} had taken effect")
        elif letter.reason not in (BY_REQ, *BY_SILENCE) or (letter.reason == BY_REQ and not refused):
            self.findings.add("not failed", text)
        elif not refused and self._faults and sent is not None and not self._broken(sent.op.event.t, letter):
            self.findings.add("unbroken", f"{text}, {letter.lived:.1f} s after its publish at {sent.op.event.t:.3f}")

    def _broken(self, published: float, letter: Letter) -> bool:
        """Whether a fault was there while it lived."""
        died = published + letter.lived + CLOCKS_SECONDS
        return any(since < died and until > published for since, until in self._faults.values())
