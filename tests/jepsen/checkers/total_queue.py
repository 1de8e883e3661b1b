"""Checker 1: what was OK'd comes out of every durable channel, and nothing comes out that was not put in.

Once the broker says that the channels of a topic are empty:

    lost        OK'd after the channel existed (or backlog owed to a first channel), never delivered; as the prefix, the
                middle or the postfix of what was OK'd, since these point to different causes
    dropped     delivered, never finished, gone
    torn        of one MPUB some messages came out and some did not

(not what a policy of the channel explains: tests.jepsen.checkers.policy; what those passed over is counted by reason)

When the files of the replicas are there, what was excused is judged again, for the moment at which the channel was done
with it:

    too early   a policy explains it by now, and did not when the channel passed it over

and at any time:

    unexpected  came out without having been sent, or although its publish failed, or on another topic
    altered     came out with another body than was sent

Recovered is what came out though its outcome was unknown; duplicates are counted by `duplicates`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.jepsen.checkers.policy import Done
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
from tests.jepsen.history import AdminSent, AnyEvent, FaultBegun, Message, SeekSent, Settled, Settling

MAX_CLOCK_SKEW = 10.0  # a broker's default: so far a wrong clock moves the age of messages


class TotalQueue(Checker):
    name = "total queue"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._skew = 0.0
        self._passed: list[tuple[Channel, Op, Key, Sent]] = []  # excused so far
        self._settled: defaultdict[tuple[str, int, str], dict[str, list[Settling]]] = defaultdict(dict)  # by node

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
                    if owed and op.result == "ok":
                        self._passed.append((channel, op, key, sent))
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

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, Settled):
            place = event.topic, event.partition, event.channel
            self._settled[place].setdefault(event.node, []).extend(event.rows)

    def _judge_passed(self) -> None:
        """What was excused, for the moment at which its channel was done with it."""
        places = {(op.topic.name, partition_of(sent.id), c.name) for c, op, _, sent in self._passed if sent.id}
        logs = {
            place: by_offset(max(nodes.values(), key=len)) for place, nodes in self._settled.items() if place in places
        }
        zero, judged = self._zero(), 0
        for channel, op, key, sent in self._passed:
            if channel.policy is None or not sent.id:
                continue
            row = logs.get((op.topic.name, partition_of(sent.id), channel.name), {}).get(offset_of(sent.id))
            if row is None:
                continue  # its beginning was removed, or the brokers ended before they wrote it
            judged += 1
            done = done_of(row, sent, zero)
            if not channel.policy.reason_then(key, op.event.t, done, skew=self._skew):
                dead = f", dead at attempt {done.attempts}" if done.attempts else ""
                why = f"passed over at the age of {done.age:.2f} s, {done.behind} behind it{dead}"
                self.findings.add("too early", f"{told(op, key, channel)}: {why}")
        if judged:
            wrong = self.findings.problems["too early"]
            self.findings.figures["passed over, judged by the log"] = judged
            text = "a policy takes nothing from a channel before its time"
            self.findings.promise(text, "0 exceptions", f"{wrong} of {judged} that were passed over", kept=not wrong)

    def _zero(self) -> float:
        """The time of the run's beginning by the clocks of leaders, in seconds, at the latest: a message is stamped
        before its publish is OK'd."""
        ops = [op for op in self.view.ops.values() if op.result == "ok"]
        return max((sent.timestamp / 1e9 - op.ended for op in ops for _, sent in op.sent if sent.id), default=0.0)

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
        self._judge_passed()
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


def by_offset(rows: list[Settling]) -> dict[int, Settling]:
    """What a log says of each message: the last counts, as an operator may have put one back."""
    return {offset: row for row in rows for offset in range(row.first, row.end)}


def done_of(row: Settling, sent: Sent, zero: float) -> Done:
    """How a channel was done with a message. `zero`: when the run began, in seconds of the leaders' clocks."""
    behind = row.log_end - offset_of(sent.id) - 1
    return Done(row.timestamp / 1e9 - zero, (row.timestamp - sent.timestamp) / 1e9, behind, row.attempts)


def ends_of(topic: TopicLife) -> dict[int, int]:
    """Of each partition the end, as far as anybody has seen it."""
    ends: dict[int, int] = {}
    for op in topic.ops:
        for _, sent in op.sent:
            if sent.id:
                number = partition_of(sent.id)
                ends[number] = max(ends.get(number, 0), offset_of(sent.id) + 1)
    return ends
