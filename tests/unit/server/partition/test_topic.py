"""What a topic remembers of its consumers, and of partitions that are led elsewhere now."""

from __future__ import annotations

from typing import Any

from nsqha.server.partition.delivery import Consumer
from nsqha.server.partition.topic import EndedCounts, TopicConsumers
from tests.unit.server.shell_rig import FakeWire, PartitionRig


class Elsewhere(Consumer):
    """A client of another node, which reads partition 0."""

    relayed = True

    def __init__(self) -> None:
        wire: Any = FakeWire()
        super().__init__(wire, topic="t", channel="c", msg_timeout=60.0, sample_rate=0, only=0)
        self.standby: list[bool] = []

    def set_standby(self, standby: bool) -> None:
        self.standby.append(standby)


def here(channel: str = "c") -> Consumer:
    wire: Any = FakeWire()
    return Consumer(wire, topic="t", channel=channel, msg_timeout=60.0, sample_rate=0)


def test_a_channel_is_read_until_its_last_consumer_goes() -> None:
    consumers = TopicConsumers()
    mine, theirs = here(), Elsewhere()
    consumers.add(mine)
    consumers.add(theirs)
    assert (consumers.here, consumers.relayed) == ({"c": [mine]}, {"c": [theirs]})
    assert consumers.remove(mine) and consumers.reads("c")
    assert consumers.remove(theirs) and not consumers.reads("c")
    assert not consumers.remove(theirs), "it is gone already"
    assert consumers.all() == []


def test_clients_of_other_nodes_stand_by_while_one_of_this_node_reads_their_channel() -> None:
    consumers = TopicConsumers()
    mine, theirs, other = here(), Elsewhere(), here("another")
    for consumer in (theirs, other):
        consumers.add(consumer)
        consumers.set_standby(consumer.channel)
    consumers.add(mine)
    consumers.set_standby("c")
    consumers.remove(mine)
    consumers.set_standby("c")
    assert theirs.standby == [False, True, False]


def test_what_was_counted_stays_until_the_channel_is_deleted() -> None:
    counts = EndedCounts()
    rig = PartitionRig()
    rig.store(b"one", b"two")
    rig.finish(rig.consume(10))
    for _ in range(2):  # as of two epochs, or partitions
        counts.keep(rig.partition)
    assert (counts.topic["message_count"], counts.topic["message_bytes"]) == (4, 12)
    assert (counts.channel("c")["message_count"], counts.channel("c")["finish_count"]) == (4, 2)
    counts.forget("c")
    assert not counts.channel("c") and counts.topic["message_count"] == 4
