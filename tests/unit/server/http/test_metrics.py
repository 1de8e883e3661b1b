"""/metrics: valid in both formats, documented, and named by Prometheus' rules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from nsqha.quantile import Histogram, Result
from nsqha.server.http.metrics.families import render
from nsqha.server.http.metrics.series import SeriesBound
from nsqha.server.http.stats import (
    BrokerStats,
    ChannelStats,
    ClockOffset,
    ClusterStats,
    CursorStats,
    NodeStats,
    PartitionStats,
    PushLag,
    ScrubStats,
    TopicStats,
)

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def stats() -> BrokerStats:
    fsync = Histogram((0.001, 0.01))
    for value in (0.0005, 0.001, 0.005, 7.0):
        fsync.observe(value)
    cursors = tuple(
        CursorStats(partition=n, floor=n, next_read=9, depth=n + 1, oldest_unfinished_seconds=age)
        for n, age in enumerate((None, 2.5))
    )
    channel = ChannelStats(
        channel_name="c",
        message_count=5,
        finish_count=4,
        e2e_processing_latency=Result(1, ((0.99, 1_500_000),)),
        cursors=cursors,
    )
    topic = TopicStats(
        topic_name="t",
        message_count=5,
        message_bytes=50,
        channels=(channel,),
        partitions=(PartitionStats(partition=0, end_offset=5, sync="interval"),),
    )
    node = NodeStats(
        version="1",
        hot="pure",
        fsync_seconds=fsync.data(),
        publish_errors=(("E_PUB_FAILED", 2),),
        grpc_requests=((("nsqha.v1.Admin/Seek", "OK"), 3),),
        auth_refused=(("no_answer", 4),),
        log_events=(("cut", 1),),
        scrub=ScrubStats(rounds=3, read_bytes=4096, damaged_ranges=2),
    )
    return BrokerStats(health="OK", start_time_ns=5 * 10**9, topics=(topic,), node=node)


def samples(accept: str = "") -> dict[str, float]:
    body, _ = render(stats(), accept, SeriesBound())
    parse = parse_openmetrics if accept else parse_text
    found = {}
    for family in parse(body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_figures_come_from_the_snapshot(accept: str) -> None:
    found = samples(accept)
    expected = {
        "nsqha_publish_messages_total{topic=t}": 5,
        "nsqha_publish_bytes_total{topic=t}": 50,
        "nsqha_publish_errors_total{code=E_PUB_FAILED}": 2,
        "nsqha_grpc_requests_total{code=OK,method=nsqha.v1.Admin/Seek}": 3,
        "nsqha_auth_refused_logins_total{why=no_answer}": 4,
        "nsqha_log_events_total{event=cut}": 1,
        "nsqha_scrub_rounds_total{}": 3,
        "nsqha_scrub_read_bytes_total{}": 4096,
        "nsqha_scrub_damaged_ranges{}": 2,
        "nsqha_fsync_seconds_bucket{le=0.001}": 2,
        "nsqha_fsync_seconds_bucket{le=0.01}": 3,
        "nsqha_fsync_seconds_bucket{le=+Inf}": 4,
        "nsqha_fsync_seconds_count{}": 4,
        "nsqha_fsync_seconds_sum{}": 7.0065,
        "nsqha_partition_end_offset{partition=0,topic=t}": 5,
        "nsqha_partition_sync_mode{mode=interval,partition=0,topic=t}": 1,
        "nsqha_channel_acked_total{channel=c,topic=t}": 4,
        "nsqha_channel_end_to_end_seconds{channel=c,quantile=0.99,topic=t}": 0.0015,
        "nsqha_channel_depth{channel=c,partition=0,topic=t}": 1,
        "nsqha_channel_depth{channel=c,partition=1,topic=t}": 2,
        "nsqha_channel_oldest_unfinished_seconds{channel=c,partition=0,topic=t}": 0,
        "nsqha_channel_oldest_unfinished_seconds{channel=c,partition=1,topic=t}": 2.5,
        "nsqha_start_time_seconds{}": 5,
        "nsqha_healthy{}": 1,
        "nsqha_metrics_merged{label=partition}": 0,
        "nsqha_metrics_merged{label=channel}": 0,
        "nsqha_metrics_merged{label=topic}": 0,
    }
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)


def test_names_follow_prometheus_rules_and_every_metric_has_help() -> None:
    body, _ = render(stats(), OPENMETRICS, SeriesBound())
    families = list(parse_openmetrics(body.decode()))
    assert len(families) > 40
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"nsqha_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|usec|millis|kb|mb)\b", family.name), family.name


def test_a_member_of_a_cluster_shows_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    lags = (PushLag(node=2, name="n2", entries=3, bytes=300), PushLag(node=0xAB, name="", entries=9))
    cluster = ClusterStats(
        node=1,
        registered=True,
        nodes=3,
        leaders=4,
        followers=5,
        under_replicated=3,
        below_min_isr=2,
        catch_up_bytes=700,
        rebuild_bytes=800,
        push_lag=lags,
        clock_offsets=(ClockOffset(node=2, name="n2", seconds=-3.5),),
    )
    alone = stats()
    partition = replace(alone.topics[0].partitions[0], isr_size=2, replicas=3, min_isr=2, below_min_isr=True)
    topic = replace(alone.topics[0], partitions=(partition,))
    member = replace(alone, topics=(topic,), node=replace(alone.node, cluster=cluster))
    assert not [name for name in samples() if "cluster" in name or "push_lag" in name], "a node that is alone"
    monkeypatch.setattr(f"{__name__}.stats", lambda: member)
    found = samples(OPENMETRICS)
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    for family in parse_openmetrics(render(member, OPENMETRICS, SeriesBound())[0].decode()):
        assert family.documentation.endswith("."), family.name
        assert f"| `{family.name}" in page, f"{family.name} is not in docs/metrics.md"
    assert {
        "nsqha_cluster_registered{}": 1,
        "nsqha_cluster_leaders{}": 4,
        "nsqha_cluster_followers{}": 5,
        "nsqha_cluster_under_replicated{}": 3,
        "nsqha_cluster_below_min_isr{}": 2,
        "nsqha_catch_up_left_bytes{kind=follower}": 700,
        "nsqha_catch_up_left_bytes{kind=rebuild}": 800,
        "nsqha_partition_below_min_isr{partition=0,topic=t}": 1,
        "nsqha_partition_isr_size{partition=0,topic=t}": 2,
        "nsqha_partition_replicas{partition=0,topic=t}": 3,
        "nsqha_push_lag_entries{follower=n2}": 3,
        "nsqha_push_lag_bytes{follower=n2}": 300,
        "nsqha_push_lag_entries{follower=00000000000000ab}": 9,
        "nsqha_clock_offset_seconds{peer=n2}": -3.5,
    }.items() <= found.items()
