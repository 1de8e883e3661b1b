"""Checker 7: a channel's place in a partition is a register: each operation finds what the last one left.

    floor       where a seek found the channel is before where the last one had put it: its floor went back by itself
    undo        an undo did not go back to where the last move had found the channel
    not again   a seek backwards was answered, and what it was to repeat did not come again
    passed over a seek found the channel's floor behind a message that was OK'd and had never come: it was lost, and a
                seek backwards would hide that

The model of one (channel, partition) has two numbers: where the last move put it, and where an undo goes. Operations on
a channel are asked for one at a time, so an order of them is given, and a search for one is not needed; after one of
unknown outcome, or an empty, both numbers are unknown until the next answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.jepsen.checkers.view import (
    Channel,
    Checker,
    Connection,
    Delivery,
    Key,
    Sent,
    TopicLife,
    offset_of,
    partition_of,
)
from tests.jepsen.history import AdminEnded, AdminSent, FaultBegun, FaultEnded, Message, Place, SeekEnded, SeekSent


@dataclass
class Register:
    """One partition of a channel that is moved."""

    placed: int | None = None  # where the last move put it
    undo: int | None = None  # where an undo goes
    moved_at: float = -1.0  # when the last move was answered
    again: dict[int, tuple[Key, float]] = field(default_factory=dict)  # offset -> what has to come, and since when
    delivered: dict[int, tuple[Key, Delivery, Sent]] = field(default_factory=dict)  # by offset

    def forget(self, t: float) -> None:
        """`t`: whatever it was has happened by then."""
        self.placed = self.undo = None
        self.moved_at = t
        self.again.clear()


@dataclass
class Floor:
    """Where a seek found a channel, and what had not come until then."""

    where: str
    ends: dict[int, int]  # by partition
    missing: list[tuple[Key, Sent]]


class Cursors(Checker):
    name = "cursor operations"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._registers: dict[int, dict[int, Register]] = {}  # by channel, by partition
        self._asked: dict[int, tuple[Channel, SeekSent | AdminSent]] = {}
        self._floors: list[Floor] = []
        self._moves = self._repeated = 0

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun):
            return
        channel = self.view.topic(event.topic).channels.get(event.channel)
        if channel is not None and channel.moving:
            self._asked[event.op] = channel, event
            if id(channel) not in self._registers:
                self._registers[id(channel)] = self._begin(channel)

    def _begin(self, channel: Channel) -> dict[int, Register]:
        """A channel is moved for the first time: what it has delivered so far."""
        registers: dict[int, Register] = {}
        for key, delivery in channel.deliveries.items():
            sent = self.view.messages[key]
            register = registers.setdefault(partition_of(sent.id), Register())
            register.delivered[offset_of(sent.id)] = key, delivery, sent
        return registers

    def over(self, event: FaultEnded | SeekEnded | AdminEnded) -> None:
        channel, asked = self._asked.pop(event.op, (None, None))
        if channel is None or asked is None or event.result == "fail":
            return
        registers = self._registers[id(channel)]
        places = event.places if isinstance(event, SeekEnded) else []
        self._look_below(channel, asked, places, event.t)
        if event.result == "info" or not places:
            for register in registers.values():
                register.forget(event.t if event.result == "ok" else float("inf"))
        for place in places:
            register = registers.setdefault(place.partition, Register())
            if place.error:
                register.forget(float("inf"))
            else:
                self._moves += 1
                where = f"{asked.topic}/{place.partition} {asked.channel} at {event.t:.3f}"
                self._moved(where, register, asked, place, event.t)

    def _look_below(self, channel: Channel, asked: SeekSent | AdminSent, places: list[Place], t: float) -> None:
        """What has not come yet is remembered; where it stands is known when it comes, here or elsewhere."""
        ends = {place.partition: place.from_offset for place in places if not place.error}
        made, since = channel.made, max(channel.forgiven, channel.forgiven_before)
        if not ends or made is None or channel.policy is not None or not channel.durable or len(channel.moving) > 1:
            return
        ops = self.view.topic(asked.topic).ops
        due = [op for op in ops if op.result == "ok" and max(made, since) < op.event.t and op.ended < asked.t]
        missing = [(key, sent) for op in due for key, sent in op.sent if simple(sent) and key not in channel.deliveries]
        if missing:
            self._floors.append(Floor(f"{asked.topic} {channel.name} at {t:.3f}", ends, missing))

    def _moved(self, where: str, register: Register, asked: SeekSent | AdminSent, place: Place, t: float) -> None:
        to = asked.to if isinstance(asked, SeekSent) else ""
        if register.placed is not None and place.from_offset < register.placed:
            self.findings.add("floor", f"{where}: was put to {register.placed}, is at {place.from_offset}")
        if to == "undo" and register.undo is not None and place.to_offset != register.undo and not place.clamped:
            self.findings.add("undo", f"{where}: went to {place.to_offset}, not back to {register.undo}")
        self._check_again(where, register, place.from_offset, asked.t)
        register.placed, register.undo = place.to_offset, place.from_offset
        back_to = register.moved_at if to == "undo" else -1.0
        for offset in range(place.to_offset, place.from_offset):
            found = register.delivered.get(offset)
            if found is not None and simple(found[2]) and not finished_before(found[1], back_to):
                register.again[offset] = found[0], asked.t
        register.moved_at = t

    def _check_again(self, where: str, register: Register, end: int, since: float) -> None:
        """What had to come again, below `end`, has; what is behind is not asked for any more."""
        for offset, (key, asked) in register.again.items():
            if offset < end and register.delivered[offset][1].t < asked:
                self.findings.add(
                    "not again", f"{where}: {key} at offset {offset} was to be repeated since {asked:.3f}"
                )
        register.again.clear()

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        registers = self._registers.get(id(by.channel))
        if registers is None:
            return
        register = registers.setdefault(partition_of(message.id), Register())
        offset = offset_of(message.id)
        self._repeated += offset in register.again
        register.delivered[offset] = key, last, sent

    def drained(self, topic: TopicLife) -> None:
        for channel in topic.channels.values():
            for number, register in self._registers.get(id(channel), {}).items():
                if not channel.moving:
                    self._check_again(f"{topic.name}/{number} {channel.name}", register, 1 << 62, self.view.t)

    def end(self) -> None:
        for floor in self._floors:
            for key, sent in floor.missing:
                if sent.id and offset_of(sent.id) < floor.ends.get(partition_of(sent.id), 0):
                    text = f"{floor.where}: {key} at offset {offset_of(sent.id)} had never come"
                    self.findings.add("passed over", f"{text}, and the floor was {floor.ends[partition_of(sent.id)]}")
        self.findings.figures["moves answered"] = self._moves
        self.findings.figures["repeated as asked"] = self._repeated
        if self._moves:
            wrong = self.findings.problems.total()
            text = "a seek repeats what it says, an undo goes back"
            self.findings.promise(text, "0 exceptions", f"{wrong} in {self._moves} moves of partitions", kept=not wrong)


def finished_before(delivery: Delivery, t: float) -> bool:
    """What had been finished above the floor when the last move came is finished again after its undo."""
    return any(fin.t <= t for fin in delivery.fins)


def simple(sent: Sent) -> bool:
    """Whether its place among the others is that of its offset: it was not published for later."""
    return not sent.op.event.delay
