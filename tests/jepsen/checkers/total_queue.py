"""Checker 1: what was OK'd comes out of every durable channel, and nothing comes out that was not put in.

Once the broker says that the channels of a topic are empty:

    lost        OK'd after the channel existed (or backlog owed to a first channel), never delivered; as the prefix, the
                middle or the postfix of what was OK'd, since these point to different causes
    dropped     delivered, never finished, gone
    torn        of one MPUB some messages came out and some did not

(not what a policy of the channel explains: tests.jepsen.checkers.policy; what those passed over is counted by reason)

and at any time:

    unexpected  came out without having been sent, or although its publish failed, or on another topic
    altered     came out with another body than was sent

Recovered is what came out though its outcome was unknown; duplicates are counted by `duplicates`.
"""

from __future__ import annotations

from collections import Counter

from tests.jepsen.checkers.view import (
    Channel,
    Checker,
    Connection,
    Delivery,
    Key,
    Op,
    Sent,
    TopicLife,
    offset_of,
    partition_of,
)
from tests.jepsen.history import AdminSent, FaultBegun, Message, SeekSent

MAX_CLOCK_SKEW = 10.0  # a broker's default: so far a wrong clock moves the age of messages


class TotalQueue(Checker):
    name = "total queue"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._skew = 0.0

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun) and event.fault.startswith("C"):
            self._skew = MAX_CLOCK_SKEW

    def moved(self, t: float, by: Connection, key: Key, sent: Sent, message: Message) -> None:
        text = f"{key} of {sent.op.event.topic} on {by.topic.name}/{by.channel.name} at {t:.3f}"
        letters = by.topic.letters
        if not any(c.policy is not None and c.policy.letters is letters for c in sent.op.topic.channels.values()):
            self.findings.add("unexpected", f"{text}: no dead of its topic are moved there")
        if message.crc != sent.crc:
            self.findings.add("altered", f"{text}: another body than was sent")

    def ended(self, op: Op) -> None:
        if op.result == "fail":
            for key, sent in op.sent:
                if sent.id:
                    self.findings.add("unexpected", f"{key} came out although its publish failed")

    def stray(self, t: float, by: Connection, message: Message) -> None:
        where = f"{(message.process, message.counter)} on {by.topic.name}/{by.channel.name} at {t:.3f}"
        self.findings.add("unexpected", f"{where}, id {message.id}: nobody sent it")

    def delivered(self, t: float, by: Connection, key: Key, sent: Sent, message: Message, last: Delivery) -> None:
        op = sent.op
        if op.event.topic != by.topic.name or op.result == "fail":
            text = f"{key} on {by.topic.name}/{by.channel.name} at {t:.3f}"
            self.findings.add("unexpected", f"{text}: published to {op.event.topic}, outcome {op.result}")
        if message.crc != sent.crc:
            self.findings.add("altered", f"{key} on {by.channel.name} at {t:.3f}: another body than was sent")

    def drained(self, topic: TopicLife) -> None:
        ends: dict[int, int] = {}
        if any(channel.policy is not None for channel in topic.channels.values()):
            ends = ends_of(topic)
        for channel in topic.channels.values():
            removed = channel.policy is not None and channel.policy.removed  # see tests.jepsen.checkers.removal
            if channel.durable and channel.made is not None and not channel.moving and not removed:
                self._channel(topic, channel, channel.made, ends)

    def _channel(self, topic: TopicLife, channel: Channel, made: float, ends: dict[int, int]) -> None:
        lost: list[tuple[float, str]] = []
        came: list[float] = []  # when publishes were OK'd of which something came out
        for op in topic.ops:
            owed = (channel.owed_backlog or op.event.t >= made) and op.event.t > channel.forgiven
            count = sum(key in channel.deliveries for key, _ in op.sent)
            excused = 0
            if count and op.result == "ok":
                came.append(op.ended)
            for key, sent in op.sent:
                delivery = channel.deliveries.get(key)
                if (delivery is None or not delivery.fins) and self._excused(channel, op, key, sent, ends):
                    excused += 1
                elif delivery is None:
                    if owed and op.result == "ok":
                        lost.append((op.ended, f"{told(op, key, channel)}: OK at {op.ended:.3f}"))
                elif not delivery.fins and op.event.t > channel.forgiven:
                    text = f"{told(op, key, channel)}: delivered {delivery.count} times, never finished"
                    self.findings.add("dropped", text)
            if owed and not excused and 0 < count < len(op.sent):
                text = f"{op.event.command} {op.event.op}: {count} of {len(op.sent)} on {channel.name}"
                self.findings.add("torn", text)
        self._tell_lost(lost, came)

    def _excused(self, channel: Channel, op: Op, key: Key, sent: Sent, ends: dict[int, int]) -> bool:
        """Whether a policy explains that the channel has not finished the message."""
        if channel.policy is None:
            return False
        behind = ends[partition_of(sent.id)] - offset_of(sent.id) - 1 if sent.id else None
        reason = channel.policy.reason(key, op.event.t, behind, self.view.t, skew=self._skew)
        if reason and op.result == "ok":
            name = f"by policy, {reason}"
            self.findings.figures[name] = self.findings.figures.get(name, 0) + 1
        return bool(reason)

    def _tell_lost(self, lost: list[tuple[float, str]], came: list[float]) -> None:
        first, last = min(came, default=float("inf")), max(came, default=float("-inf"))
        parts: Counter[str] = Counter()
        for ended, text in lost:
            part = "prefix" if ended < first else "postfix" if ended > last else "middle"
            parts[part] += 1
            self.findings.add("lost", f"{text} ({part})")
        for part, number in parts.items():
            self.findings.figures[f"lost {part}"] = self.findings.figures.get(f"lost {part}", 0) + number

    def end(self) -> None:
        for topic in self.view.topics.values():
            if not topic.drained and any(c.durable and c.made is not None for c in topic.channels.values()):
                self.findings.add("undrained", f"topic {topic.name} was not empty at the end")
        figures = self.view.figures
        lost = self.findings.problems["lost"]
        if figures.ok and not self.findings.problems["undrained"]:
            text = "what was OK'd comes out of every durable channel"
            self.findings.promise(text, "0 lost", f"{lost} lost of {figures.ok} OK'd", kept=not lost)
            if figures.mpubs:
                torn = self.findings.problems["torn"]
                self.findings.promise("an MPUB is stored whole or not at all", "0 torn", f"{torn} torn", kept=not torn)


def told(op: Op, key: Key, channel: Channel) -> str:
    event = op.event
    return f"{key} on {op.topic.name}/{channel.name}, {event.command} at {event.t:.3f} in life {event.gen}"


def ends_of(topic: TopicLife) -> dict[int, int]:
    """Of each partition the end, as far as anybody has seen it."""
    ends: dict[int, int] = {}
    for op in topic.ops:
        for _, sent in op.sent:
            if sent.id:
                number = partition_of(sent.id)
                ends[number] = max(ends.get(number, 0), offset_of(sent.id) + 1)
    return ends
