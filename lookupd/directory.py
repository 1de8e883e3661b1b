"""Answers to clients about the cluster: its topics, channels and leaders, read from a view of the metadata.

A topic's producers are the nodes that lead its partitions now and hold a lease; they do not have to register. Clients
reach a node at its `broadcast_address` with the ports of its addresses.

`lookupd.http_api` merges in stock nsqds that register with this daemon. A registration by a node of the cluster itself
(same broadcast address and TCP port) is left out: except for #ephemeral names, the metadata know better.

As on upstream's daemon a *tombstone* hides one node from /lookup of one topic for a while, in this daemon's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsqha.clock import Now
from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord
from nsqha.election.session import View

TOMBSTONES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where clients reach a node."""

    host: str
    tcp_port: int
    http_port: int

    @property
    def node(self) -> str:
        """How POST /topic/tombstone names it."""
        return f"{self.host}:{self.http_port}"


def endpoint(node: NodeInfo) -> Endpoint:
    host, tcp_port = _split(node.tcp_address)
    _, http_port = _split(node.http_address)
    return Endpoint(node.broadcast_address or node.hostname or host, tcp_port, http_port)


def found_by_clients(node: NodeInfo) -> bool:
    """Whether clients can be sent to a node: its ports are no unix sockets, and not off."""
    where = endpoint(node)
    return where.tcp_port > 0 and where.http_port > 0


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdecimal() else (address, 0)


def producer(node: NodeInfo) -> dict[str, Any]:
    """A node as upstream's daemon describes an nsqd."""
    where = endpoint(node)
    return {
        "remote_address": f"{where.host}:{where.tcp_port}",
        "hostname": node.hostname or node.host or where.host,
        "broadcast_address": where.host,
        "tcp_port": where.tcp_port,
        "http_port": where.http_port,
        "version": node.version,
        "topology_zone": node.zone,
        "topology_region": node.region,
    }


def writable(meta: PartitionMeta) -> bool:
    """Whether publishes to this partition can be acknowledged, as far as the record says."""
    return len(meta.isr) >= meta.min_isr and not meta.successor


def never_reached(meta: PartitionMeta, leader: NodeInfo) -> bool:
    """True for a leader that no other broker can connect to, of a partition that has never acknowledged anything."""
    return bool(leader.joining) and meta.nothing_acked


class LookupDirectory:
    """Answers from one view at a time; its only state are tombstones."""

    def __init__(self, tombstone_lifetime_s: float) -> None:
        self._lifetime_s = tombstone_lifetime_s
        self._tombstones: dict[tuple[str, str], float] = {}  # (topic, "host:http port") -> since

    def leaders(
        self, view: View, topic: str, now: Now, *, access: str = "", hidden_too: bool = False
    ) -> dict[int, NodeInfo] | None:
        """Partition -> the node that leads it; None if the cluster has no such topic.

        `access` "w": only what can be written to; "r": also what a tombstone hides, because it may hold messages."""
        found = view.topics.get(topic)
        if found is None:
            return None
        shown = {}
        for number, meta in sorted(found.record.partitions.items()):
            node = view.nodes.get(meta.leader)
            if node is None or not found_by_clients(node) or never_reached(meta, node):
                continue
            if access == "w" and not writable(meta):
                continue
            if hidden_too or access == "r" or not self.hidden(topic, node, now):
                shown[number] = node
        return shown

    def channels(self, view: View, topic: str) -> set[str]:
        """The channels that consumers may read. Without reader channels: a broker elsewhere that creates such a topic
        asks here, and would create them for consumers."""
        found = view.topics.get(topic)
        listed = found.record.channels.channels if found is not None else {}
        return {name for name, info in listed.items() if not info.reader}

    def led(self, view: View) -> dict[int, dict[str, list[int]]]:
        """Node -> topic -> partitions that it leads; every node that clients are sent to has an entry."""
        led: dict[int, dict[str, list[int]]] = {uid: {} for uid, node in view.nodes.items() if found_by_clients(node)}
        for name, topic in sorted(view.topics.items()):
            for number, meta in sorted(topic.record.partitions.items()):
                if meta.leader in led:
                    led[meta.leader].setdefault(name, []).append(number)
        return led

    def addresses(self, view: View) -> set[tuple[str, int]]:
        """(broadcast address, TCP port) of all nodes."""
        return {(where.host, where.tcp_port) for where in map(endpoint, view.nodes.values())}

    def tombstone(self, view: View, topic: str, node: str, now: Now) -> int:
        """Hide a node of the cluster; returns its uid, 0: there is no such node or topic."""
        self._tombstones = {key: at for key, at in self._tombstones.items() if now.mono - at < self._lifetime_s}
        found = [info.node_uid for info in view.nodes.values() if endpoint(info).node == node]
        if topic not in view.topics or not found:
            return 0
        if len(self._tombstones) < TOMBSTONES_MAX:
            self._tombstones[topic, node] = now.mono
        return found[0]

    def hidden(self, topic: str, node: NodeInfo, now: Now) -> bool:
        since = self._tombstones.get((topic, endpoint(node).node))
        return since is not None and now.mono - since < self._lifetime_s


def meta_info(record: TopicRecord) -> dict[str, Any]:
    """The answer to `metainfo` of clients of the Youzan fork."""
    replicas = record.settings.replicas or max((len(meta.replicas) for meta in record.partitions.values()), default=0)
    return meta_of(len(record.partitions), replicas, record.settings.ordered)


def meta_of(partitions: int, replicas: int, ordered: bool) -> dict[str, Any]:
    return {
        "partition_num": partitions,
        "replica": replicas,
        "extend_support": False,
        "ordered": ordered,
        "multi_part": True,
        "disable_channel_auto_create": False,
    }
