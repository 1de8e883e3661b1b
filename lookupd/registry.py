"""Who produces which topic: the lookup daemon's whole memory, and the rules by which it shows it.

A *peer* is one nsqd connection that said IDENTIFY; its id is its remote `ip:port`. It registers topics and channels,
and leaves all of them when it disconnects. A new connection may have the id of one whose end is not known yet: then it
takes over what it registers. The *names* stay, without producers, until they are deleted: a topic keeps its channels,
so that a new nsqd can create them before the first message. Only #ephemeral names go with their last producer.

A *tombstone* hides one peer from /lookup of one topic for a while, so that its topic can be deleted there without
clients coming back in between; registering afresh (UNREGISTER, REGISTER) lifts it. A peer that has not been heard of
for the inactive timeout is not shown at all.

Nothing is stored and lookup daemons do not know each other: clients ask all of them. Invariants: a peer is in
`topic.producers` exactly when the topic is in `peer.topics`, the same for channels; a channel's topic exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nsqha.clock import Now
from nsqha.ids import is_ephemeral

NAMES_MAX = 1_000_000
"""Topics and channels together; a registration that would exceed it is refused."""
REGISTRATIONS_MAX = 3_000_000
"""Names times their producers; as above. Each takes about 300 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """The data that a peer sends with IDENTIFY."""

    hostname: str = ""
    broadcast_address: str
    tcp_port: int
    http_port: int
    version: str
    topology_zone: str = ""
    topology_region: str = ""

    @property
    def node(self) -> str:
        """How POST /topic/tombstone names it."""
        return f"{self.broadcast_address}:{self.http_port}"


@dataclass(slots=True, eq=False)
class Peer:
    """One connected nsqd."""

    id: str
    info: PeerInfo
    heard: Now
    topics: dict[str, set[str]] = field(default_factory=dict)
    """The topics that it produces, and the channels of each that it registered."""


@dataclass(slots=True, eq=False)
class Production:
    """One peer's registration of one topic."""

    peer: Peer
    tombstone: Now | None = None
    partitions: int = 1  # that the topic has there


@dataclass(slots=True, eq=False)
class LookupTopic:
    """The producers of a topic, and the producers of each of its channels; by peer id."""

    producers: dict[str, Production] = field(default_factory=dict)
    channels: dict[str, dict[str, Peer]] = field(default_factory=dict)
    ephemeral: set[str] = field(default_factory=set)  # of its channels


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer for one topic."""

    channels: list[str]
    producers: list[Peer]
    partitions: int = 0
    """How many there are, all of them at the one producer; 0: with several producers there is no telling."""


@dataclass(frozen=True, slots=True)
class LookupPeer:
    """One peer with its topics, each with whether it is tombstoned there."""

    peer: Peer
    topics: list[tuple[str, bool]]


class Registry:
    """The names, the peers, and who produces what. Peers are in the order in which they joined."""

    def __init__(self, *, inactive_timeout_s: float, tombstone_lifetime_s: float) -> None:
        self._inactive_timeout_s = inactive_timeout_s
        self._tombstone_lifetime_s = tombstone_lifetime_s
        self._topics: dict[str, LookupTopic] = {}
        self._peers: dict[str, Peer] = {}
        self._names = 0
        self._registered = 0  # producers of all topics and channels

    # ---- what peers do

    def join(self, peer_id: str, info: PeerInfo, now: Now) -> Peer:
        peer = self._peers[peer_id] = Peer(peer_id, info, now)
        return peer

    def leave(self, peer: Peer) -> None:
        """The peer is gone: remove all its registrations."""
        for topic in list(peer.topics):
            self.unregister(peer, topic)
        if self._peers.get(peer.id) is peer:
            del self._peers[peer.id]

    def register(self, peer: Peer, topic: str, channel: str = "", partitions: int = 0) -> bool:
        """Add the peer to the topic and, if given, to its channel. False: NAMES_MAX or REGISTRATIONS_MAX is reached.
        `partitions`: how many the topic has there; 0: not said."""
        if self._registered + 2 > REGISTRATIONS_MAX or not self.create(topic, channel):
            return False
        entry = self._topics[topic]
        known = entry.producers.get(peer.id)
        if known is None or known.peer is not peer:
            self._registered += known is None
            entry.producers[peer.id] = Production(peer)
            peer.topics.setdefault(topic, set())
        if partitions or not channel:
            entry.producers[peer.id].partitions = partitions or 1
        if channel:
            members = entry.channels[channel]
            self._registered += peer.id not in members
            members[peer.id] = peer
            peer.topics.setdefault(topic, set()).add(channel)
        return True

    def unregister(self, peer: Peer, topic: str, channel: str = "") -> None:
        """Take the peer out of the channel, or out of the topic and all its channels. Unknown names are fine."""
        if channel:
            self._drop_channel_producer(peer, topic, channel)
            return
        entry = self._topics.get(topic)
        if entry is None:
            return
        for name in [*peer.topics.get(topic, ()), *entry.ephemeral]:
            self._drop_channel_producer(peer, topic, name)
        known = entry.producers.get(peer.id)
        if known is not None and known.peer is peer:
            del entry.producers[peer.id]
            self._registered -= 1
        peer.topics.pop(topic, None)
        if not entry.producers and is_ephemeral(topic):
            self.delete_topic(topic)

    def _drop_channel_producer(self, peer: Peer, topic: str, channel: str) -> None:
        entry = self._topics.get(topic)
        peer.topics.get(topic, set()).discard(channel)
        if entry is None or channel not in entry.channels:
            return
        members = entry.channels[channel]
        if members.get(peer.id) is peer:
            del members[peer.id]
            self._registered -= 1
        if not members and is_ephemeral(channel):
            self.delete_channel(topic, channel)

    # ---- what operators do

    def create(self, topic: str, channel: str = "") -> bool:
        """Make the names known. False: NAMES_MAX is reached."""
        entry = self._topics.get(topic)
        missing = (entry is None) + (bool(channel) and (entry is None or channel not in entry.channels))
        if self._names + missing > NAMES_MAX:
            return False
        self._names += missing
        if entry is None:
            entry = self._topics[topic] = LookupTopic()
        if channel:
            entry.channels.setdefault(channel, {})
            if is_ephemeral(channel):
                entry.ephemeral.add(channel)
        return True

    def delete_topic(self, topic: str) -> None:
        """Forget the topic and its channels; producers stay connected. An unknown topic is fine."""
        entry = self._topics.get(topic)
        if entry is None:
            return
        for channel in list(entry.channels):
            self.delete_channel(topic, channel)
        for production in entry.producers.values():
            production.peer.topics.pop(topic, None)
        self._registered -= len(entry.producers)
        del self._topics[topic]
        self._names -= 1

    def delete_channel(self, topic: str, channel: str) -> bool:
        """Forget the channel; False if it is not known."""
        entry = self._topics.get(topic)
        if entry is None or channel not in entry.channels:
            return False
        members = entry.channels.pop(channel)
        entry.ephemeral.discard(channel)
        for peer in members.values():
            peer.topics.get(topic, set()).discard(channel)
        self._registered -= len(members)
        self._names -= 1
        return True

    def tombstone(self, topic: str, node: str, now: Now) -> None:
        """Hide the producers of `topic` that are at `node` (`broadcast_address:http_port`). None matching is fine."""
        entry = self._topics.get(topic)
        for production in entry.producers.values() if entry else ():
            if production.peer.info.node == node:
                production.tombstone = now

    # ---- what is shown

    def topics(self) -> list[str]:
        return sorted(self._topics)

    def channels(self, topic: str) -> list[str]:
        """Empty for an unknown topic."""
        entry = self._topics.get(topic)
        return sorted(entry.channels) if entry else []

    def lookup(self, topic: str, now: Now) -> Lookup | None:
        """Who can be connected to for `topic` now; None for an unknown topic."""
        shown = self.producers(topic, now)
        if shown is None:
            return None
        partitions = shown[0].partitions if len(shown) == 1 else 0
        return Lookup(self.channels(topic), [production.peer for production in shown], partitions)

    def producers(self, topic: str, now: Now) -> list[Production] | None:
        """The same without the channels."""
        entry = self._topics.get(topic)
        if entry is None:
            return None
        return [
            production
            for production in entry.producers.values()
            if self._active(production.peer, now) and not self._hidden(production, now)
        ]

    def nodes(self, now: Now) -> list[LookupPeer]:
        """All active peers; a tombstone is shown, but does not hide a peer here."""
        return [
            LookupPeer(peer, self._topics_of(peer, now)) for peer in self._peers.values() if self._active(peer, now)
        ]

    def topic_names(self) -> list[str]:
        """In no order."""
        return list(self._topics)

    def channel_names(self, topic: str) -> list[str]:
        """In no order; empty for an unknown topic."""
        entry = self._topics.get(topic)
        return list(entry.channels) if entry else []

    def has_channel(self, topic: str, channel: str) -> bool:
        entry = self._topics.get(topic)
        return entry is not None and channel in entry.channels

    def active_peers(self, now: Now) -> list[Peer]:
        """All peers that are shown."""
        return [peer for peer in self._peers.values() if self._active(peer, now)]

    def hidden(self, peer: Peer, topic: str, now: Now) -> bool | None:
        """Whether a tombstone hides the peer; None: it does not produce the topic any more."""
        entry = self._topics.get(topic)
        production = entry.producers.get(peer.id) if entry else None
        return None if production is None or production.peer is not peer else self._hidden(production, now)

    def registrations(self) -> Iterator[tuple[str, list[tuple[Peer, Now | None]]]]:
        """All registrations, for /debug: ("category:key:subkey", each peer and its tombstone), also of names that no
        peer has. The registry may change between two of them."""
        yield "client::", [(peer, None) for peer in self._peers.values()]
        for topic in self.topic_names():
            entry = self._topics.get(topic)
            if entry is None:
                continue
            yield f"topic:{topic}:", [(each.peer, each.tombstone) for each in entry.producers.values()]
            for channel in list(entry.channels):
                yield f"channel:{topic}:{channel}", [(peer, None) for peer in entry.channels.get(channel, {}).values()]

    def _topics_of(self, peer: Peer, now: Now) -> list[tuple[str, bool]]:
        return [(name, self._hidden(self._topics[name].producers[peer.id], now)) for name in sorted(peer.topics)]

    def _active(self, peer: Peer, now: Now) -> bool:
        return now.mono - peer.heard.mono <= self._inactive_timeout_s

    def _hidden(self, production: Production, now: Now) -> bool:
        return production.tombstone is not None and now.mono - production.tombstone.mono < self._tombstone_lifetime_s
