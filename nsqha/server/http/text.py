"""The text form of /stats: what people see with curl, in nsqd's layout.

`include_nsqha=true` adds one line of our own at the end.

nsqd v1.3.0 (built w/python3.11)
start_time 2026-11-20T22:10:34Z
uptime 24.7s

Health: OK

Memory: ...            label padded to 25, tab, number

Topics:
   [orders         ] depth: 0     be-depth: 0     msgs: 10       e2e%: 1.2ms, 9.0ms
   *P [mail                     ] depth: 3     ...            *P: paused
        [V2 web1:52344 pynsq/0.9.1] state: 3 inflt: 0    rdy: 1    ...

Producers: None
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from nsqha.goflags import format_duration
from nsqha.options import version_line
from nsqha.quantile import Result
from nsqha.server.http.stats import BrokerStats, ChannelStats, ClientStats, NodeStats, Selection, TopicStats, select
from nsqha.server.runtime.measures import MemoryStats

_SECOND = 1_000_000_000
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def stats_text(
    stats: BrokerStats, wanted: Selection, memory: MemoryStats | None, now_ns: int, *, extra: bool = False
) -> str:
    """The whole page; `now_ns` is the wall clock. `extra`: with the line about this node that nsqd does not have."""
    page = "".join(f"{line}\n" for line in _lines(stats, wanted, memory, now_ns))
    return f"{page}\n{_node(stats.node)}\n" if extra else page


def _lines(stats: BrokerStats, wanted: Selection, memory: MemoryStats | None, now_ns: int) -> Iterator[str]:
    selected = select(stats, wanted)
    started = datetime.fromtimestamp(stats.start_time_ns // _SECOND, UTC)
    yield version_line("nsqd")
    yield f"start_time {started:%Y-%m-%dT%H:%M:%SZ}"
    yield f"uptime {format_duration(max(now_ns - stats.start_time_ns, 0))}"
    yield ""
    yield f"Health: {stats.health}"
    yield ""
    if memory is not None:
        yield "Memory:"
        for label, value in memory._asdict().items():
            yield f"   {label:<25}\t{value}"
        yield ""
    yield "Topics:" if selected.topics else "Topics: None"
    for number, topic in enumerate(selected.topics or ()):
        if number:
            yield ""
        yield from _topic(topic, wanted, now_ns)
    yield ""
    yield "Producers:" if selected.producers else "Producers: None"
    for producer in selected.producers or ():
        yield f"   {_client(producer, '', now_ns)}"


def _topic(topic: TopicStats, wanted: Selection, now_ns: int) -> Iterator[str]:
    yield (
        f"{'*P ' if topic.paused else '   '}[{topic.topic_name:<15}] depth: {topic.depth:<5} "
        f"be-depth: {topic.backend_depth:<5} msgs: {topic.message_count:<8} "
        f"e2e%: {_latency(topic.e2e_processing_latency)}"
    )
    for channel in topic.channels:
        yield _channel(channel)
        if wanted.clients:
            yield from (
                f"        {_client(client, wanted.topic, now_ns)}" for client in channel.clients + channel.relayed
            )


def _channel(channel: ChannelStats) -> str:
    return (
        f"   {'*P ' if channel.paused else '   '}[{channel.channel_name:<25}] depth: {channel.depth:<5} "
        f"be-depth: {channel.backend_depth:<5} inflt: {channel.in_flight_count:<4} def: {channel.deferred_count:<4} "
        f"re-q: {channel.requeue_count:<5} timeout: {channel.timeout_count:<5} msgs: {channel.message_count:<8} "
        f"e2e%: {_latency(channel.e2e_processing_latency)}"
    )


def _client(client: ClientStats, topic: str, now_ns: int) -> str:
    port = client.remote_address.rpartition(":")[2]
    who = f"{client.hostname}:{port} {client.user_agent}"
    connected = format_duration(max(now_ns // _SECOND - client.connect_ts, 0) * _SECOND)
    published = [(name, count) for name, count in client.pub_counts if topic in ("", name)]
    if published:
        total = sum(count for _, count in published)
        topics = ",".join(f"{name}={count}" for name, count in published)
        return f"[V2 {who:<21}] msgs: {total:<8} topics: {topics} connected: {connected}"
    return (
        f"[V2 {who:<21}] state: {client.state} inflt: {client.in_flight_count:<4} rdy: {client.ready_count:<4} "
        f"fin: {client.finish_count:<8} re-q: {client.requeue_count:<8} msgs: {client.message_count:<8} "
        f"connected: {connected}"
    )


def _latency(latency: Result) -> str:
    return ", ".join(_human(value) for _, value in latency.percentiles or ())


def _human(nanoseconds: int) -> str:
    for scale, unit in _UNITS:
        if nanoseconds > scale:
            return f"{nanoseconds / scale:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"


def _node(node: NodeStats) -> str:
    troubles = ", publishes refused: disk low" if node.disk_refusing else ""
    if node.cluster is not None and node.cluster.below_min_isr:
        troubles += f", {node.cluster.below_min_isr} partitions below min_isr: they acknowledge nothing"
    if node.cluster is not None and node.cluster.under_replicated:
        troubles += f", {node.cluster.under_replicated} partitions under-replicated"
    return f"nsqha v{node.version}: {node.hot} hot path, sync={node.sync}, {node.connections} connections{troubles}"
