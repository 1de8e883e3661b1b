"""A broker in memory that keeps the contract of `server.http.broker_api.BrokerApi` and remembers what was published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nsqha.clock import ManualClock
from nsqha.election.model import PartitionMeta, TopicRecord, TopicSettings
from nsqha.errors import NotFound, Unavailable
from nsqha.options import Options, checked
from nsqha.server.http.broker_api import BoundPorts, Check
from nsqha.server.http.stats import BrokerStats, ChannelStats, ClientStats, NodeStats, TopicStats

SECOND = 10**9


@dataclass
class BrokerChannel:
    paused: bool = False
    clients: tuple[ClientStats, ...] = ()
    depth: int = 0


@dataclass
class BrokerTopic:
    paused: bool = False
    channels: dict[str, BrokerChannel] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    partitions: int = 1
    emptied: list[int | None] = field(default_factory=list)  # which of its partitions

    @property
    def record(self) -> TopicRecord:
        metas = {n: PartitionMeta() for n in range(self.partitions)}
        return TopicRecord("t", 1, 1, TopicSettings(partitions=self.partitions), partitions=metas)


def bodies_of(frames: bytes) -> list[bytes]:
    """The bodies of message frames."""
    bodies = []
    while frames:
        end = 4 + int.from_bytes(frames[:4], "big")
        bodies.append(frames[34:end])
        frames = frames[end:]
    return bodies


class FakeTopics(dict[str, BrokerTopic]):
    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.deleted_elsewhere: set[str | tuple[str, str]] = set()

    async def create_topic(self, topic: str) -> None:
        self.maybe_refuse()
        self.setdefault(topic, BrokerTopic())

    async def ensure_topic(self, topic: str) -> None:
        await self.create_topic(topic)

    async def delete_topic(self, topic: str, *, unless_hidden: bool = False) -> None:
        self.topic(topic)
        del self[topic]

    def topic(self, topic: str) -> BrokerTopic:
        self.maybe_refuse()
        if topic not in self:
            raise NotFound(topic)
        return self[topic]

    def maybe_refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal


class FakeEndpoints:
    def __init__(self) -> None:
        self.finished: list[str] = []

    async def finish_message(self, topic: str, channel: str, message_id: str) -> None:
        if not message_id.startswith("0"):
            raise NotFound(message_id)
        self.finished.append(message_id)

    async def unfinished(self, topic: str, channel: str, partition: int | None) -> int:
        return 0


class FakeChannels:
    def __init__(self, topics: FakeTopics) -> None:
        self._topics = topics

    async def create(self, topic: str, channel: str) -> None:
        self._topics.topic(topic).channels.setdefault(channel, BrokerChannel())

    async def delete(self, topic: str, channel: str) -> None:
        self._channel(topic, channel)
        del self._topics[topic].channels[channel]

    async def pause(self, topic: str, channel: str, paused: bool) -> None:
        self._channel(topic, channel).paused = paused

    async def pause_topic(self, topic: str, paused: bool) -> None:
        self._topics.topic(topic).paused = paused

    async def empty(self, topic: str, channel: str, partition: int | None = None) -> None:
        self._channel(topic, channel).depth = 0
        self._topics.topic(topic).emptied.append(partition)

    async def empty_topic(self, topic: str, partition: int | None = None) -> None:
        self._topics.topic(topic).bodies.clear()
        self._topics.topic(topic).emptied.append(partition)

    def has(self, topic: str, channel: str) -> bool:
        return topic in self._topics and channel in self._topics[topic].channels

    def _channel(self, topic: str, channel: str) -> BrokerChannel:
        found = self._topics.topic(topic).channels.get(channel)
        if found is None:
            raise NotFound(channel)
        return found


class FakePublishing:
    def __init__(self, topics: FakeTopics) -> None:
        self.delays: list[int | None] = []
        self.chosen: list[int | None] = []
        self.partitions_of: dict[str, int] = {}
        self.crowded = False
        self._topics = topics

    def named_partitions(self, topic: str) -> int:
        return self.partitions_of.get(topic, 0)

    def patience(self) -> float:
        return float("inf")

    async def publish(
        self,
        topic: str,
        frames: bytes,
        *,
        partition: int | None = None,
        deliver_in_ms: int | None = None,
        until: float | None = None,
    ) -> None:
        self._topics.maybe_refuse()
        bodies = bodies_of(frames)
        assert bodies
        self._topics.setdefault(topic, BrokerTopic()).bodies += bodies
        self.delays.append(deliver_in_ms)
        self.chosen.append(partition)

    async def room(self, until: float | None = None) -> None:
        if self.crowded:
            raise Unavailable("too many publishes are waiting for the disk")


class FakeSide:
    """It is one of a cluster while there is a page."""

    def __init__(self) -> None:
        self.cluster: bytes | None = None

    async def page(self) -> bytes | None:
        return self.cluster


class FakeBroker:
    def __init__(self, **options: Any) -> None:
        self.options = checked(Options(broadcast_address="node.example", **options))
        self.ports = BoundPorts(tcp=4150, http=4151, https=4152, grpc_address="127.0.0.1:4155")
        self.clock = ManualClock()
        self.start_time_ns = self.clock.wall_ns()
        self.exiting = False
        self.side = FakeSide()
        self.topics = FakeTopics()
        self.channels = FakeChannels(self.topics)
        self.publishing = FakePublishing(self.topics)
        self.endpoints = FakeEndpoints()
        self.producers: tuple[ClientStats, ...] = ()
        self.health_text = "OK"
        self.check_list: Sequence[Check] = ()
        self.log_levels: list[str] = []

    def set_lookupds(self, addresses: Sequence[str]) -> None:
        self.options = replace(self.options, lookupd_tcp_addresses=tuple(addresses))

    def set_log_level(self, level: str) -> None:
        self.options = replace(self.options, log_level=level)

    def health(self) -> str:
        return self.health_text

    def checks(self) -> Sequence[Check]:
        return self.check_list

    async def snapshot_in_turns(self, topic: str = "", clients: bool = False) -> BrokerStats:
        return self.snapshot(topic, clients)

    def snapshot(self, topic: str = "", clients: bool = True) -> BrokerStats:
        return BrokerStats(
            health=self.health_text,
            start_time_ns=self.start_time_ns,
            topics=tuple(
                TopicStats(
                    topic_name=name,
                    message_count=len(t.bodies),
                    message_bytes=sum(map(len, t.bodies)),
                    depth=len(t.bodies),
                    paused=t.paused,
                    channels=tuple(
                        ChannelStats(
                            channel_name=channel,
                            paused=c.paused,
                            depth=c.depth,
                            client_count=len(c.clients),
                            clients=c.clients if clients else (),
                        )
                        for channel, c in t.channels.items()
                    ),
                )
                for name, t in self.topics.items()
                if topic in ("", name)
            ),
            producers=self.producers if clients else (),
            node=NodeStats(version="9.9.9", hot="pure", connections=3),
        )


def client(**fields: Any) -> ClientStats:
    """A connection, as far as a test does not care."""
    wanted = {
        "client_id": "c",
        "hostname": "h",
        "remote_address": "127.0.0.1:5",
        "state": 3,
        "connect_ts": 1_700_000_000,
    }
    return ClientStats(**(wanted | fields))
