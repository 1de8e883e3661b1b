"""Who is behind a relayed consumer, for the statistics of the leader: NSQ's tools ask the leaders of a topic who reads
it, as clients of nsqd are connected to what they read from.

A client has one entry, whatever number of partitions it reads here, and is shown by one leader of its topic: by its own
node if that leads a partition, else by the leader of the lowest partition that it reads. So the sum over all leaders
has each client once. Clients that found all leaders by a lookup have a connection to each, as with nsqd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nsqha.pb.v1 import routing_pb2
from nsqha.server.http.stats import ClientStats
from nsqha.server.routing.relay_server import RelayedConsumer

if TYPE_CHECKING:
    from nsqha.server.partition.delivery import Consumer

TEXT_MAX = 256  # characters of a client's name for itself
SUBSCRIBED = 3  # nsqd's number of that state

_TEXTS = (
    "client_id",
    "hostname",
    "remote_address",
    "user_agent",
    "topology_zone",
    "topology_region",
    "auth_identity",
    "auth_identity_url",
    "tls_cipher_suite",
    "tls_version",
    "tls_negotiated_protocol",
)
_FACTS = ("connect_ts", "deflate", "snappy", "authed", "tls", "tls_negotiated_protocol_is_mutual")


def to_wire(client: ClientStats, connection: int) -> routing_pb2.RelayedClient:
    """What the leader is to know of a client; `connection` tells it from others of this node."""
    texts = {name: getattr(client, name)[:TEXT_MAX] for name in _TEXTS}
    facts = {name: getattr(client, name) for name in _FACTS}
    return routing_pb2.RelayedClient(connection=connection, **texts, **facts)


def relayed_stats(consumers: Iterable[Consumer]) -> tuple[ClientStats, ...]:
    """The clients behind these relayed consumers, with the figures of what is led here."""
    found: dict[object, ClientStats] = {}
    for consumer in consumers:
        if not isinstance(consumer, RelayedConsumer) or consumer.client is None or not _is_shown_here(consumer):
            continue
        client = consumer.client
        key = consumer.stream, client.connection
        before = found.get(key)
        if before is None:
            known = {name: getattr(client, name) for name in (*_TEXTS, *_FACTS)}
            before = ClientStats(state=SUBSCRIBED, sample_rate=consumer.sample_rate, **known)
        found[key] = replace(
            before,
            ready_count=before.ready_count + consumer.window,
            in_flight_count=before.in_flight_count + consumer.in_flight,
            message_count=before.message_count + consumer.message_count,
            finish_count=before.finish_count + consumer.finish_count,
            requeue_count=before.requeue_count + consumer.requeue_count,
        )
    return tuple(found.values())


def _is_shown_here(consumer: RelayedConsumer) -> bool:
    leaders, topic = consumer.stream.service.leaders, consumer.topic
    nodes = [at.node for n in range(leaders.partitions(topic)) if (at := leaders.recorded(topic, n)) is not None]
    if consumer.stream.node in nodes:
        return False
    return consumer.pinned or not nodes or nodes[0] == leaders.node
