"""What retention took from channels that nobody read, where their topic says so (`abandoned_after`).

    kept back   a message that is in the files of every replica still, and that such a channel neither delivered nor
                finished: retention takes whole files from the beginning of the log, and nothing else

What is before the first message of the files was removed. Where a message was that came out nowhere says its time: it
was sent before the first one that is left was OK'd. A history without files says nothing.
"""

from __future__ import annotations

from collections import defaultdict

from tests.jepsen.checkers.view import Channel, Checker, Key, PartitionName, Sent, TopicLife, partition_of
from tests.jepsen.history import AnyEvent, Stored


class Removal(Checker):
    name = "removal"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._missing: list[tuple[TopicLife, Channel, Key, Sent]] = []
        self._topics: set[str] = set()
        self._firsts: defaultdict[PartitionName, dict[str, tuple[str, Key]]] = defaultdict(dict)  # by node

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
        if isinstance(event, Stored) and event.topic in self._topics and event.messages:
            first = event.messages[0]
            found = first.id, (first.process, first.counter)
            firsts = self._firsts[event.topic, event.partition]
            firsts[event.node] = min(firsts.get(event.node, found), found)

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
        if self._topics:
            self.findings.figures["removed unread"] = removed
            wrong = self.findings.problems["kept back"]
            text = "retention takes from an abandoned channel only what it removes from the log"
            self.findings.promise(text, "0 exceptions", f"{wrong}; {removed} were removed", kept=not wrong)

    def _before(self, sent: Sent, start: str, first: Key) -> bool:
        """Whether the message was in front of the first one that is left."""
        if sent.id:
            return sent.id < start
        there = self.view.messages.get(first)
        return there is None or there.op.result != "ok" or sent.op.event.t <= there.op.ended
