"""The series of /metrics are bounded: what is merged, what it adds up to, and that labels do not flap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from nsqha.quantile import Result
from nsqha.server.http.metrics import families
from nsqha.server.http.metrics.series import ALL, OTHER, SERIES_MAX, SeriesBound
from nsqha.server.http.stats import (
    BrokerStats,
    ChannelStats,
    ClusterStats,
    CursorStats,
    NodeStats,
    PartitionStats,
    TopicStats,
)


def channel(name: str, partitions: int = 1, *, count: int = 0) -> ChannelStats:
    cursors = tuple(
        CursorStats(partition=n, floor=0, next_read=0, depth=n + 1, oldest_unfinished_seconds=float(n))
        for n in range(partitions)
    )
    return ChannelStats(
        channel_name=name,
        message_count=count,
        finish_count=count,
        client_count=1,
        e2e_processing_latency=Result(1, ((0.99, 1_000_000_000),)),
        cursors=cursors,
    )


def topic(name: str, channels: Sequence[ChannelStats], partitions: int = 1, *, count: int = 0) -> TopicStats:
    parts = tuple(
        PartitionStats(partition=n, leader_epoch=n, end_offset=10, isr_size=3 - n % 2, replicas=3, min_isr=2)
        for n in range(partitions)
    )
    return TopicStats(topic_name=name, channels=tuple(channels), message_count=count, partitions=parts)


def many(topics: int, partitions: int, channels: int) -> list[TopicStats]:
    return [
        topic(f"t{t}", [channel(f"c{c}", partitions, count=c) for c in range(channels)], partitions, count=t)
        for t in range(topics)
    ]


def scrape(topics: Sequence[TopicStats], bound: SeriesBound) -> dict[str, float]:
    node = NodeStats(cluster=ClusterStats(node=1))
    stats = BrokerStats(health="OK", start_time_ns=0, topics=tuple(topics), node=node)
    body, _ = families.render(stats, "", bound)
    found: dict[str, float] = {}
    for family in parse_text(body.decode()):
        for sample in family.samples:
            name = sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}"
            assert name not in found, f"{name} is there twice"
            found[name] = sample.value
    return found


def merged(found: dict[str, float]) -> tuple[float, ...]:
    return tuple(found[f"nsqha_metrics_merged{{label={label}}}"] for label in ("partition", "channel", "topic"))


def own_channels(found: dict[str, float]) -> set[str]:
    return {name for name in found if name.startswith("nsqha_channel_clients{") and OTHER not in name}


@pytest.mark.parametrize(
    ("topics", "partitions", "channels"),
    [(60, 16, 2), (1, 1023, 1), (3, 1, 2000), (1000, 1, 2), (5000, 1, 1), (40, 16, 40), (2000, 0, 0)],
)
def test_no_topics_and_channels_make_more_than_the_bound(topics: int, partitions: int, channels: int) -> None:
    found = scrape(many(topics, partitions, channels), SeriesBound())
    assert len(found) <= SERIES_MAX
    published = sum(value for name, value in found.items() if name.startswith("nsqha_publish_messages_total"))
    assert published == sum(range(topics))
    depth = sum(value for name, value in found.items() if name.startswith("nsqha_channel_depth{"))
    assert depth == topics * channels * sum(range(1, partitions + 1))


def test_partition_labels_go_first_and_figures_are_merged_by_their_kind() -> None:
    found = scrape(many(60, 16, 2), SeriesBound())
    assert merged(found) == (960, 0, 0)
    assert {
        "nsqha_partition_end_offset{partition=all,topic=t1}": 160,
        "nsqha_partition_epoch{partition=all,topic=t1}": 15,
        "nsqha_partition_isr_size{partition=all,topic=t1}": 2,
        "nsqha_partition_sync_mode{mode=always,partition=all,topic=t1}": 1,
        "nsqha_channel_depth{channel=c1,partition=all,topic=t1}": 136,
        "nsqha_channel_oldest_unfinished_seconds{channel=c1,partition=all,topic=t1}": 15,
        "nsqha_channel_acked_total{channel=c1,topic=t1}": 1,
    }.items() <= found.items()
    assert not any("partition=1," in name for name in found)


def test_channels_go_by_rank_before_any_topic_does() -> None:
    found = scrape(many(3, 1, 300), SeriesBound())
    partitions, channels, topics = merged(found)
    assert (partitions, topics) == (3, 0)
    assert 0 < channels < 900
    assert len(own_channels(found)) == 900 - channels
    assert "nsqha_channel_clients{channel=c299,topic=t0}" in found
    assert "nsqha_channel_clients{channel=c0,topic=t0}" not in found
    of_t0 = [v for name, v in found.items() if name.startswith("nsqha_channel_acked_total") and "topic=t0" in name]
    assert sum(of_t0) == sum(range(300))
    assert found[f"nsqha_channel_end_to_end_seconds{{channel={OTHER},quantile=0.99,topic=t0}}"] == 1


def test_topics_go_last_and_channels_of_equal_name_are_added() -> None:
    found = scrape(many(2000, 1, 1), SeriesBound())
    _, channels, topics = merged(found)
    assert topics == channels > 0
    assert "nsqha_publish_messages_total{topic=t1999}" in found
    assert "nsqha_publish_messages_total{topic=t0}" not in found
    assert found[f"nsqha_channel_clients{{channel={OTHER},topic={OTHER}}}"] == topics
    assert found[f"nsqha_partition_end_offset{{partition={ALL},topic={OTHER}}}"] == 10 * topics


def test_labels_do_not_flap_at_the_bound() -> None:
    bound, name = SeriesBound(), "nsqha_partition_epoch{partition=0,topic=t0}"
    at = next(n for n in range(1, 500) if merged(scrape(many(n, 4, 1), SeriesBound()))[0])
    assert name in scrape(many(at - 1, 4, 1), bound)
    assert name not in scrape(many(at, 4, 1), bound)
    assert name not in scrape(many(at - 1, 4, 1), bound), "it is merged until there is a margin"
    assert name in scrape(many(at // 2, 4, 1), bound)


def test_a_channel_keeps_its_series_when_others_overtake_it() -> None:
    bound = SeriesBound()
    channels = [channel(f"c{n}", count=n) for n in range(900)]
    before = own_channels(scrape([topic("t", channels)], bound))
    turned = [channel(f"c{n}", count=900 - n) for n in range(900)]
    assert own_channels(scrape([topic("t", turned)], bound)) == before
    more = [*turned, channel("new", count=10_000)]
    assert before <= own_channels(scrape([topic("t", more)], bound))


def test_merged_counters_never_go_back() -> None:
    bound = SeriesBound()
    channels = [channel(f"c{n}", count=1000 + n) for n in range(1000)]
    name = f"nsqha_channel_acked_total{{channel={OTHER},topic=t}}"
    first = scrape([topic("t", channels)], bound)[name]
    without = [c for c in channels if c.channel_name != "c0"]
    assert scrape([topic("t", without)], bound)[name] == first, "c0 was deleted"
    again = [*without, channel("c0", count=1)]
    assert scrape([topic("t", again)], bound)[name] == first + 1, "it was created again"
    fewer = again[:1] + again[400:]
    grown = [replace(c, finish_count=c.finish_count + 5) for c in fewer]
    assert scrape([topic("t", grown)], bound).get(name, first + 1) >= first + 1, "some have series of their own now"


def test_merged_topic_counters_never_go_back() -> None:
    bound, topics = SeriesBound(), many(1000, 1, 1)
    name = f"nsqha_publish_messages_total{{topic={OTHER}}}"
    first = scrape(topics, bound)[name]
    assert scrape(topics[3:], bound)[name] == first
