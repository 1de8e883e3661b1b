"""Checker 1: what was OK'd comes out of every durable channel, and nothing comes out that was not put in.

Once the broker says that the channels of a topic are empty:

    lost        OK'd after the channel existed (or backlog owed to a first channel), never delivered; as the prefix, the
                middle or the postfix of what was OK'd, since these point to different causes
    dropped     delivered, never finished, gone
    torn        of one MPUB some messages came out and some did not

and at any time:

    unexpected  came out without having been sent, or although its publish failed, or on another topic
    altered     came out with another body than was sent

Recovered is what came out though its outcome was unknown; duplicates are counted by `duplicates`.
"""

from __future__ import annotations

from collections import Counter

from tests.jepsen.checkers.view import Channel, Checker, Connection, Delivery, Key, Op, Sent, TopicLife
from tests.jepsen.history import Message


class TotalQueue(Checker):
    name = "total queue"

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
        for channel in topic.channels.values():
            if channel.durable and channel.made is not None and not channel.moving:
                self._channel(topic, channel, channel.made)

    def _channel(self, topic: TopicLife, channel: Channel, made: float) -> None:
        lost: list[tuple[float, str]] = []
        came: list[float] = []  # when publishes were OK'd of which something came out
        for op in topic.ops:
            owed = (channel.owed_backlog or op.event.t >= made) and op.event.t > channel.forgiven
            count = sum(key in channel.deliveries for key, _ in op.sent)
            if count and op.result == "ok":
                came.append(op.ended)
            for key, _ in op.sent:
                if (delivery := channel.deliveries.get(key)) is None:
                    if owed and op.result == "ok":
                        lost.append((op.ended, f"{told(op, key, channel)}: OK at {op.ended:.3f}"))
                elif not delivery.fins and op.event.t > channel.forgiven:
                    text = f"{told(op, key, channel)}: delivered {delivery.count} times, never finished"
                    self.findings.add("dropped", text)
            if owed and 0 < count < len(op.sent):
                text = f"{op.event.command} {op.event.op}: {count} of {len(op.sent)} on {channel.name}"
                self.findings.add("torn", text)
        self._tell_lost(lost, came)

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
