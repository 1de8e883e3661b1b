"""The order in which messages of a topic are published, so that its channels get what they had in nsqd.

nsqd keeps a copy of a message for each channel; here a message is in the log once, and a new channel begins where the
log ends. So channels are created one after the other, those with the most messages first, and before each of them
goes what it must not get:

    create c1 | what only c1 has | create c2 | what c2 has, and c3 has not | create c3 | what c3 has | topic's queue

Each message is published once, by its id in nsqd, as late as all channels that have it need. If one channel had each
message that the next one has, which is how channels lag behind each other, every channel gets exactly its own.
Otherwise an earlier channel gets messages that it had finished: `repeats` counts them. No channel misses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nsqha.cli.imports.nsqd_folder import Damage, NsqdFolder, Queued, SourceTopic


@dataclass
class TopicLayout:
    """What becomes of a topic. The last of the levels is that of the topic's own queue."""

    topic: SourceTopic
    channels: list[str] = field(default_factory=list)  # in the order in which they are created
    level_of: dict[bytes, int] = field(default_factory=dict)  # by message id
    counts: dict[str, int] = field(default_factory=dict)  # of each channel's queue
    waiting: int = 0  # in the topic's queue
    bytes: int = 0
    repeats: dict[str, int] = field(default_factory=dict)  # messages that a channel gets and had finished
    damage: list[Damage] = field(default_factory=list)

    @property
    def messages(self) -> int:
        return len(self.level_of)

    @property
    def last(self) -> int:
        """The level of the topic's queue."""
        return len(self.channels)

    def published(self, folder: NsqdFolder, level: int) -> Iterator[Queued]:
        """The messages of a level, each once, always in the same order."""
        seen: set[bytes] = set()
        queues = [None] if level == self.last else self.channels[: level + 1]
        for queue in queues:
            for message in folder.messages(self.topic.name, queue, []):
                if self.level_of.get(message.id) == level and message.id not in seen:
                    seen.add(message.id)
                    yield message


def lay_out(folder: NsqdFolder, topic: SourceTopic) -> TopicLayout:
    """Read all queues of the topic once, and decide. It takes some 200 bytes of memory for each message."""
    layout = TopicLayout(topic)
    names = [name for name in topic.channels if not name.endswith("#ephemeral")]
    owners: dict[bytes, int] = {}  # a bit for each of `names`
    for number, name in enumerate(names):
        layout.counts[name] = 0
        for message in folder.messages(topic.name, name, layout.damage):
            layout.counts[name] += 1
            layout.bytes += len(message.body) if message.id not in owners else 0
            owners[message.id] = owners.get(message.id, 0) | 1 << number
    layout.channels = sorted(names, key=lambda name: (-layout.counts[name], name))
    rank = {name: layout.channels.index(name) for name in names}
    layout.repeats = dict.fromkeys(names, 0)
    for message_id, bits in owners.items():
        having = {name for number, name in enumerate(names) if bits >> number & 1}
        level = max(rank[name] for name in having)
        layout.level_of[message_id] = level
        for name in layout.channels[: level + 1]:
            layout.repeats[name] += name not in having
    for message in folder.messages(topic.name, None, layout.damage):
        # nsqd had it on its way to the channels when it stopped: all of them get it.
        layout.waiting += 1
        layout.bytes += len(message.body) if message.id not in owners else 0
        layout.level_of[message.id] = layout.last
    return layout
