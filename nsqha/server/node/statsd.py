"""nsqd's statsd feed: every interval one snapshot as `prefix.name:value|c` and `|g` lines over UDP.

Counters are sent as the difference to the last push, gauges as they are. Lines are packed into packets of a bounded
size, a line never split, and the packets are spread over the interval (less its last second), so that a node with many
topics is not one burst. A topic that is counted lower than last time was deleted and made again: it counts from 0.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nsqha.ids import is_ephemeral
from nsqha.nsqlog import Logger
from nsqha.quantile import Result
from nsqha.server.http.broker_api import BrokerApi
from nsqha.server.http.stats import BrokerStats, ChannelStats, TopicStats
from nsqha.server.runtime.listen import reason, split_host_port
from nsqha.server.runtime.measures import MemoryStats, memory_stats

SPARE_SECONDS = 1.0


def host_prefix(pattern: str, broadcast_address: str, http_port: int) -> str:
    """`nsq.%s` -> `nsq.node_example_4151.`"""
    address = f"[{broadcast_address}]" if ":" in broadcast_address else broadcast_address
    host = f"{address}:{http_port}".replace(".", "_").replace(":", "_")
    prefix = pattern.replace("%s", host)
    return prefix if not prefix or prefix.endswith(".") else prefix + "."


@dataclass(frozen=True, slots=True)
class Push:
    """What one push was made of: the next one's counters are differences to it."""

    topics: dict[str, TopicStats]
    memory: MemoryStats


NOTHING_YET = Push({}, MemoryStats())


def lines(stats: BrokerStats, memory: MemoryStats | None, last: Push, *, exclude_ephemeral: bool) -> Iterator[str]:
    """The lines of one push, without prefix; no memory lines if `memory` is None."""
    for topic in sorted(stats.topics, key=lambda t: t.topic_name):
        if not (exclude_ephemeral and is_ephemeral(topic.topic_name)):
            yield from _topic(topic, last.topics.get(topic.topic_name), exclude_ephemeral)
    if memory is None:
        return
    for name, value in memory._asdict().items():
        if name == "gc_total_runs":
            yield f"mem.gc_runs:{_since(value, last.memory.gc_total_runs)}|c"
        else:
            yield f"mem.{name}:{value}|g"


def _topic(topic: TopicStats, last: TopicStats | None, exclude_ephemeral: bool) -> Iterator[str]:
    name = f"topic.{topic.topic_name}"
    yield f"{name}.message_count:{_since(topic.message_count, last.message_count if last else 0)}|c"
    yield f"{name}.message_bytes:{_since(topic.message_bytes, last.message_bytes if last else 0)}|c"
    yield f"{name}.depth:{topic.depth}|g"
    yield f"{name}.backend_depth:{topic.backend_depth}|g"
    yield from _latency(name, topic.e2e_processing_latency)
    before = {c.channel_name: c for c in last.channels} if last else {}
    for channel in sorted(topic.channels, key=lambda c: c.channel_name):
        if not (exclude_ephemeral and is_ephemeral(channel.channel_name)):
            yield from _channel(f"{name}.channel.{channel.channel_name}", channel, before.get(channel.channel_name))


def _channel(name: str, channel: ChannelStats, last: ChannelStats | None) -> Iterator[str]:
    yield f"{name}.message_count:{_since(channel.message_count, last.message_count if last else 0)}|c"
    yield f"{name}.depth:{channel.depth}|g"
    yield f"{name}.backend_depth:{channel.backend_depth}|g"
    yield f"{name}.in_flight_count:{channel.in_flight_count}|g"
    yield f"{name}.deferred_count:{channel.deferred_count}|g"
    yield f"{name}.requeue_count:{_since(channel.requeue_count, last.requeue_count if last else 0)}|c"
    yield f"{name}.timeout_count:{_since(channel.timeout_count, last.timeout_count if last else 0)}|c"
    yield f"{name}.clients:{channel.client_count}|g"
    yield from _latency(name, channel.e2e_processing_latency)


def _latency(name: str, latency: Result) -> Iterator[str]:
    for quantile, value in latency.percentiles or ():
        yield f"{name}.e2e_processing_latency_{quantile * 100:.0f}:{value}|g"


def _since(value: int, last: int) -> int:
    return value - last if value >= last else value


def packets(prefix: str, stat_lines: Iterable[str], size_max: int) -> Iterator[bytes]:
    """Whole lines, newline-ended, in packets of at most `size_max` bytes (a longer line is a packet of its own)."""
    packet = bytearray()
    for line in stat_lines:
        data = f"{prefix}{line}\n".encode()
        if packet and len(packet) + len(data) > size_max:
            yield bytes(packet)
            packet.clear()
        packet += data
    if packet:
        yield bytes(packet)


class StatsdPusher:
    """Pushes a broker's statistics for as long as `run` is not cancelled."""

    def __init__(self, broker: BrokerApi, address: str, prefix: str, *, interval_seconds: float) -> None:
        self._broker = broker
        self._address = address
        self._prefix = prefix
        self._interval = interval_seconds
        self._last = NOTHING_YET
        self._logger = Logger("statsd")

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._interval, loop.time())
            await asyncio.sleep(due - loop.time())
            try:
                await self._push()
            except (OSError, ValueError) as error:
                self._logger.error("statsd_failed", "STATSD: can not push to %s: %s", self._address, reason(error))

    async def _push(self) -> None:
        options = self._broker.options
        loop = asyncio.get_running_loop()
        host, port = split_host_port(self._address)
        # Resolved at every push: the host behind the name may move.
        found = await loop.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_DGRAM)
        address = str(found[0][4][0]), port
        transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=address)
        try:
            self._logger.info("statsd_push", "STATSD: pushing stats to %s", self._address)
            stats = await self._broker.snapshot_in_turns()
            memory = memory_stats()
            made = lines(
                stats,
                memory if options.statsd_mem_stats else None,
                self._last,
                exclude_ephemeral=options.statsd_exclude_ephemeral,
            )
            out = list(packets(self._prefix, made, options.statsd_udp_packet_size))
            self._last = Push({t.topic_name: t for t in stats.topics}, memory)
            pause = max(self._interval - SPARE_SECONDS, 0) / max(len(out), 1)
            for packet in out:
                transport.sendto(packet)
                await asyncio.sleep(pause)
        finally:
            transport.close()
