"""The statsd feed: names and values are nsqd's."""

from __future__ import annotations

import asyncio
import socket

import pytest

from nsqha.quantile import Result
from nsqha.server.http.stats import BrokerStats, ChannelStats, TopicStats
from nsqha.server.node.statsd import NOTHING_YET, Push, StatsdPusher, host_prefix, lines, packets
from nsqha.server.runtime.measures import MemoryStats
from tests.unit.server.fake_broker import SECOND, BrokerTopic, FakeBroker


def stats_of(*topics: TopicStats) -> BrokerStats:
    return BrokerStats(health="OK", start_time_ns=0, topics=topics)


def push_of(*topics: TopicStats) -> Push:
    return Push({t.topic_name: t for t in topics}, MemoryStats(gc_total_runs=3))


def lines_of(*topics: TopicStats, last: Push = NOTHING_YET, exclude_ephemeral: bool = False) -> list[str]:
    return list(lines(stats_of(*topics), None, last, exclude_ephemeral=exclude_ephemeral))


@pytest.mark.parametrize(
    ("pattern", "address", "prefix"),
    [
        ("nsq.%s", "node.example", "nsq.node_example_4151."),
        ("%s.x.", "10.0.0.1", "10_0_0_1_4151.x."),
        ("plain", "h", "plain."),
        ("%s", "::1", "[__1]_4151."),
        ("", "h", ""),
    ],
)
def test_the_prefix_names_the_host(pattern: str, address: str, prefix: str) -> None:
    assert host_prefix(pattern, address, 4151) == prefix


def test_the_first_push_counts_from_zero() -> None:
    channel = ChannelStats(
        channel_name="c",
        message_count=5,
        depth=1,
        backend_depth=1,
        in_flight_count=2,
        deferred_count=3,
        requeue_count=4,
        timeout_count=6,
        client_count=7,
    )
    topic = TopicStats(topic_name="t", message_count=10, message_bytes=100, depth=2, channels=(channel,))
    assert lines_of(topic) == [
        "topic.t.message_count:10|c",
        "topic.t.message_bytes:100|c",
        "topic.t.depth:2|g",
        "topic.t.backend_depth:0|g",
        "topic.t.channel.c.message_count:5|c",
        "topic.t.channel.c.depth:1|g",
        "topic.t.channel.c.backend_depth:1|g",
        "topic.t.channel.c.in_flight_count:2|g",
        "topic.t.channel.c.deferred_count:3|g",
        "topic.t.channel.c.requeue_count:4|c",
        "topic.t.channel.c.timeout_count:6|c",
        "topic.t.channel.c.clients:7|g",
    ]


def test_counters_are_differences_and_gauges_are_not() -> None:
    before = TopicStats(
        topic_name="t", message_count=10, depth=4, channels=(ChannelStats(channel_name="c", requeue_count=2),)
    )
    now = TopicStats(
        topic_name="t", message_count=13, depth=5, channels=(ChannelStats(channel_name="c", requeue_count=9),)
    )
    found = lines_of(now, last=push_of(before))
    assert "topic.t.message_count:3|c" in found
    assert "topic.t.depth:5|g" in found
    assert "topic.t.channel.c.requeue_count:7|c" in found


def test_a_topic_made_anew_counts_from_zero() -> None:
    found = lines_of(
        TopicStats(topic_name="t", message_count=2), last=push_of(TopicStats(topic_name="t", message_count=10))
    )
    assert "topic.t.message_count:2|c" in found


def test_percentiles_are_named_in_percent() -> None:
    topic = TopicStats(topic_name="t", e2e_processing_latency=Result(1, ((0.99, 1500), (0.5, 7), (0.999, 9))))
    assert lines_of(topic)[4:] == [
        "topic.t.e2e_processing_latency_99:1500|g",
        "topic.t.e2e_processing_latency_50:7|g",
        "topic.t.e2e_processing_latency_100:9|g",
    ]


def test_ephemeral_ones_can_be_left_out() -> None:
    topics = (
        TopicStats(topic_name="t#ephemeral"),
        TopicStats(topic_name="t", channels=(ChannelStats(channel_name="c#ephemeral"), ChannelStats(channel_name="d"))),
    )
    assert any("#ephemeral" in line for line in lines_of(*topics))
    found = lines_of(*topics, exclude_ephemeral=True)
    assert not any("#ephemeral" in line for line in found)
    assert any(".d." in line for line in found)


def test_memory_comes_last() -> None:
    found = list(lines(stats_of(), MemoryStats(1, 2, 3, 4, 5, 6, 7, 8, 9), push_of(), exclude_ephemeral=False))
    assert found == [
        "mem.heap_objects:1|g",
        "mem.heap_idle_bytes:2|g",
        "mem.heap_in_use_bytes:3|g",
        "mem.heap_released_bytes:4|g",
        "mem.gc_pause_usec_100:5|g",
        "mem.gc_pause_usec_99:6|g",
        "mem.gc_pause_usec_95:7|g",
        "mem.next_gc_bytes:8|g",
        "mem.gc_runs:6|c",
    ]


def test_packets_are_bounded_and_lines_whole() -> None:
    made = list(packets("p.", ["a:1|c", "b:1|c", "c" * 30 + ":1|c", "d:1|c"], 18))
    assert made == [b"p.a:1|c\np.b:1|c\n", b"p." + b"c" * 30 + b":1|c\n", b"p.d:1|c\n"]
    assert list(packets("p.", [], 18)) == []


def test_a_push_arrives() -> None:
    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        broker = FakeBroker(statsd_interval_ns=SECOND)
        broker.topics["t"] = BrokerTopic(bodies=[b"x"])
        pusher = StatsdPusher(broker, f"127.0.0.1:{receiver.getsockname()[1]}", "p.", interval_seconds=0.01)
        task = asyncio.create_task(pusher.run())
        try:
            return await asyncio.wait_for(loop.sock_recv(receiver, 65536), 5)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            receiver.close()

    packet = asyncio.run(run())
    assert b"p.topic.t.message_count:1|c\n" in packet
    assert len(packet) <= 508


def test_a_push_that_fails_is_tried_again() -> None:
    async def run() -> None:
        pusher = StatsdPusher(FakeBroker(), "no-port", "p.", interval_seconds=0.001)
        task = asyncio.create_task(pusher.run())
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
