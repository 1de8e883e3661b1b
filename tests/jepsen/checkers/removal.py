"""What retention took from channels that nobody read, where their topic says so (`abandoned_after`).

    too early   the log says that retention took messages from it, and the oldest of them was younger than that
    kept back   a message that is in the files of every replica still, and that such a channel neither delivered nor
                finished: retention takes whole files from the beginning of the log, and nothing else

What is before the first message of the files was removed. Where a message was that came out nowhere says its time: it
was sent before the first one that is left was OK'd. A history without files says nothing.
"""

from __future__ import annotations

from collections import defaultdict

from tests.jepsen.checkers.view import Channel, Checker, Key, PartitionName, Sent, TopicLife, offset_of, partition_of
from tests.jepsen.history import AdminSent, AnyEvent, FaultBegun, SeekSent, Settled, Stored

MAX_CLOCK_SKEW = 10.0  # a broker's default: so far a wrong clock moves the age of messages


class Removal(Checker):
    name = "removal"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._missing: list[tuple[TopicLife, Channel, Key, Sent]] = []
        self._topics: set[str] = set()
        self._firsts: defaultdict[PartitionName, dict[str, tuple[str, Key]]] = defaultdict(dict)  # by node
        self._given_up: list[Settled] = []
        self._skew = 0.0

    def begun(self, event: FaultBegun | SeekSent | AdminSent) -> None:
        if isinstance(event, FaultBegun) and event.fault.startswith("C"):
            self._skew = MAX_CLOCK_SKEW

    def drained(self, topic: TopicLife) -> None:
        for channel in topic.channels.values():
            if channel.policy is None or not channel.policy.removed:
                continue
            self._topics.add(topic.name)
            for op in topic.ops:
                if op.result == "ok":
                    self._missing += [
                        (topic, channel, key, sent)
                        for key, sent in op.sent
                        if (delivery := channel.deliveries.get(key)) is None or not delivery.fins
                    ]

    def other(self, event: AnyEvent) -> None:
        if isinstance(event, Settled) and event.abandoned:
            self._given_up.append(event)
        if isinstance(event, Stored) and event.topic in self._topics and event.messages:
            first = event.messages[0]
            found = first.id, (first.process, first.counter)
            firsts = self._firsts[event.topic, event.partition]
            firsts[event.node] = min(firsts.get(event.node, found), found)

    def _judge_given_up(self) -> int:
        """What retention said that it took, as far as the files still say so; how many times."""
        if not self._given_up:
            return 0
        stamps = {
            (sent.op.event.topic, partition_of(sent.id), offset_of(sent.id)): sent.timestamp
            for sent in self.view.messages.values()
            if sent.id
        }
        judged: set[tuple[str, int, str, int]] = set()
        for event in self._given_up:
            channel = self.view.topic(event.topic).channels.get(event.channel)
            after = float("inf") if channel is None or channel.policy is None else channel.policy.abandoned_after
            for row in event.abandoned:
                place = event.topic, event.partition, event.channel, row.timestamp
                stamp = stamps.get((event.topic, event.partition, row.first))
                if stamp is None or place in judged:
                    continue  # nobody ever got the message, or another node says the same
                judged.add(place)
                age = (row.timestamp - stamp) / 1e9
                if age < after - self._skew:
                    text = f"{event.topic}/{event.partition} {event.channel}: [{row.first}, {row.end}) was given up"
                    self.findings.add("too early", f"{text} when its oldest message was {age:.2f} s old")
        return len(judged)

    def end(self) -> None:
        starts = {name: max(firsts.values()) for name, firsts in self._firsts.items()}
        removed = 0
        for topic, channel, key, sent in self._missing:
            number = partition_of(sent.id) if sent.id else max(sent.op.event.partition, 0)
            if (start := starts.get((topic.name, number))) is None:
                continue
            if self._before(sent, *start):
                removed += 1
            else:
                text = f"{key} on {topic.name}/{channel.name}: id {sent.id}, and the files begin at {start[0]}"
                self.findings.add("kept back", text)
        judged = self._judge_given_up()
        if self._topics:
            self.findings.figures["removed unread"] = removed
            self.findings.figures["given up, judged by the log"] = judged
            wrong = self.findings.problems["kept back"] + self.findings.problems["too early"]
            text = "retention takes from an abandoned channel only what it removes from the log"
            self.findings.promise(text, "0 exceptions", f"{wrong}; {removed} were removed", kept=not wrong)

    def _before(self, sent: Sent, start: str, first: Key) -> bool:
        """Whether the message was in front of the first one that is left."""
        if sent.id:
            return sent.id < start
        there = self.view.messages.get(first)
        return there is None or there.op.result != "ok" or sent.op.event.t <= there.op.ended
