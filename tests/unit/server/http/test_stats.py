"""The two forms of /stats: keys, order and types are those of nsqd, and so is what the filters do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from nsqha.quantile import Result
from nsqha.server.http.stats import (
    BrokerStats,
    ChannelStats,
    ClusterStats,
    CursorStats,
    NodeStats,
    PartitionStats,
    Selection,
    TopicStats,
    stats_json,
)
from nsqha.server.http.text import stats_text
from nsqha.server.runtime.measures import MemoryStats, memory_stats
from tests.unit.server.fake_broker import client

START = 1_763_676_634 * 10**9


def broker_of(*topics: TopicStats, **fields: Any) -> BrokerStats:
    return BrokerStats(**({"health": "OK", "start_time_ns": START, "topics": topics} | fields))


def shown(stats: BrokerStats, memory: MemoryStats | None = None, **wanted: Any) -> Any:
    return stats_json(stats, Selection(**wanted), memory)


def text_of(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def test_an_empty_broker_has_a_list_and_a_null() -> None:
    assert text_of(shown(broker_of())) == (
        '{"version":"1.3.0","health":"OK","start_time":1763676634,"topics":[],"producers":null}'
    )


def test_memory_stands_before_the_producers() -> None:
    assert text_of(shown(broker_of(), MemoryStats(1, 2, 3, 4, 5, 6, 7, 8, 9))) == (
        '{"version":"1.3.0","health":"OK","start_time":1763676634,"topics":[],'
        '"memory":{"heap_objects":1,"heap_idle_bytes":2,"heap_in_use_bytes":3,"heap_released_bytes":4,'
        '"gc_pause_usec_100":5,"gc_pause_usec_99":6,"gc_pause_usec_95":7,"next_gc_bytes":8,"gc_total_runs":9},'
        '"producers":null}'
    )


def test_a_topic_and_its_channel_key_by_key() -> None:
    channel = ChannelStats(
        channel_name="ch",
        depth=1,
        backend_depth=2,
        in_flight_count=3,
        deferred_count=4,
        message_count=5,
        requeue_count=6,
        timeout_count=7,
        client_count=0,
        paused=True,
        e2e_processing_latency=Result(9, ((0.5, 1000), (0.99, 2500))),
    )
    topic = TopicStats(topic_name="t", channels=(channel,), depth=1, message_count=2, message_bytes=3)
    assert text_of(shown(broker_of(topic))["topics"]) == (
        '[{"topic_name":"t","channels":[{"channel_name":"ch","depth":1,"backend_depth":2,"in_flight_count":3,'
        '"deferred_count":4,"message_count":5,"requeue_count":6,"timeout_count":7,"client_count":0,"clients":[],'
        '"paused":true,"e2e_processing_latency":{"count":9,"percentiles":[{"quantile":0.5,"value":1000},'
        '{"quantile":0.99,"value":2500}]}}],"depth":1,"backend_depth":0,"message_count":2,"message_bytes":3,'
        '"paused":false,"e2e_processing_latency":{"count":0,"percentiles":null}}]'
    )


CLIENT_HEAD = (
    '{"client_id":"c","hostname":"h","version":"V2","remote_address":"127.0.0.1:5","state":3,"ready_count":0,'
    '"in_flight_count":0,"message_count":0,'
)
CLIENT_MIDDLE = (
    '"finish_count":0,"requeue_count":0,"connect_ts":1700000000,"sample_rate":0,'
    '"deflate":false,"snappy":false,"user_agent":"",'
)
CLIENT_TAIL = (
    '"tls":false,"tls_cipher_suite":"","tls_version":"",'
    '"tls_negotiated_protocol":"","tls_negotiated_protocol_is_mutual":false}'
)


def clients_text(*clients: Any, **wanted: Any) -> str:
    stats = broker_of(TopicStats(topic_name="t", channels=(ChannelStats(channel_name="c", clients=clients),)))
    return text_of(shown(stats, **wanted)["topics"][0]["channels"][0]["clients"])


def test_clients_of_other_nodes_are_shown_with_those_connected_here() -> None:
    here, there = client(), replace(client(), client_id="there")
    channel = ChannelStats(channel_name="c", clients=(here,), client_count=1, relayed=(there,), relayed_count=1)
    stats = broker_of(TopicStats(topic_name="t", channels=(channel,)))
    found = shown(stats)["topics"][0]["channels"][0]
    assert found["client_count"] == 2
    assert [c["client_id"] for c in found["clients"]] == ["c", "there"]
    assert sum("[V2" in line for line in lines(stats)) == 2


def test_a_client_key_by_key() -> None:
    plain = CLIENT_HEAD + CLIENT_MIDDLE + '"topology_zone":"","topology_region":"",' + CLIENT_TAIL
    assert clients_text(client()) == f"[{plain}]"


def test_optional_keys_of_a_client_stand_where_nsqd_puts_them() -> None:
    full = client(
        zone_local_msg_count=1,
        region_local_msg_count=2,
        global_msg_count=3,
        authed=True,
        auth_identity="joe",
        auth_identity_url="u",
        topology_zone="z",
        topology_region="r",
        pub_counts=(("t", 4),),
    )
    assert clients_text(full) == (
        f'[{CLIENT_HEAD}"zone_local_msg_count":1,"region_local_msg_count":2,"global_msg_count":3,{CLIENT_MIDDLE}'
        '"authed":true,"auth_identity":"joe","auth_identity_url":"u","topology_zone":"z","topology_region":"r",'
        f'"pub_counts":[{{"topic":"t","count":4}}],{CLIENT_TAIL}]'
    )


def test_topics_and_channels_are_sorted() -> None:
    channels = tuple(ChannelStats(channel_name=name) for name in "qbk")
    topics = (TopicStats(topic_name="mm", channels=channels), TopicStats(topic_name="zz"), TopicStats(topic_name="aa"))
    found = shown(broker_of(*topics))["topics"]
    assert [t["topic_name"] for t in found] == ["aa", "mm", "zz"]
    assert [c["channel_name"] for c in found[1]["channels"]] == ["b", "k", "q"]


def test_filters() -> None:
    topics = (
        TopicStats(topic_name="a", channels=(ChannelStats(channel_name="x"), ChannelStats(channel_name="y"))),
        TopicStats(topic_name="b", channels=(ChannelStats(channel_name="y"),)),
        TopicStats(topic_name="c"),
    )

    def found(**wanted: str) -> Any:
        topics_shown = shown(broker_of(*topics), **wanted)["topics"]
        if topics_shown is None:
            return None
        return {t["topic_name"]: [c["channel_name"] for c in t["channels"]] for t in topics_shown}

    assert found() == {"a": ["x", "y"], "b": ["y"], "c": []}
    assert found(topic="a") == {"a": ["x", "y"]}
    assert found(topic="a", channel="y") == {"a": ["y"]}
    assert found(channel="x") == {"a": ["x"]}
    assert found(topic="c", channel="x") == {}
    assert found(topic="nope") is None
    assert found(topic="nope", channel="x") is None


def test_the_topic_filter_narrows_pub_counts_but_not_the_list_of_producers() -> None:
    producers = (
        client(client_id="here", pub_counts=(("t", 1), ("u", 2))),
        client(client_id="there", pub_counts=(("u", 1),)),
    )
    stats = broker_of(TopicStats(topic_name="t"), producers=producers)
    everywhere = shown(stats)["producers"]
    assert [p["pub_counts"] for p in everywhere] == [
        [{"topic": "t", "count": 1}, {"topic": "u", "count": 2}],
        [{"topic": "u", "count": 1}],
    ]
    here, there = shown(stats, topic="t")["producers"]
    assert here["pub_counts"] == [{"topic": "t", "count": 1}]
    assert "pub_counts" not in there
    assert shown(stats, topic="nope")["producers"] is None
    assert shown(stats, clients=False)["producers"] is None


def test_without_clients_only_their_number_is_left() -> None:
    channel = ChannelStats(channel_name="c", client_count=2, clients=(client(), client()))
    found = shown(broker_of(TopicStats(topic_name="t", channels=(channel,))), clients=False)
    assert found["topics"][0]["channels"][0]["clients"] is None
    assert found["topics"][0]["channels"][0]["client_count"] == 2


def test_what_nsqd_does_not_have_is_one_object_on_demand() -> None:
    cursor = CursorStats(partition=0, floor=3, next_read=5, oldest_unfinished_seconds=1.5)
    topic = TopicStats(
        topic_name="t",
        channels=(ChannelStats(channel_name="c", finish_count=3, cursors=(cursor,)),),
        partitions=(PartitionStats(partition=0, end_offset=9, sync="interval"),),
    )
    stats = broker_of(topic, node=NodeStats(hot="compiled", publish_errors=(("E_PUB_FAILED", 2),)))
    extra = stats_json(stats, Selection(), None, extra=True)["nsqha"]
    assert json.loads(text_of(extra)) == extra
    assert extra["hot"] == "compiled"
    assert extra["publish_errors"] == {"E_PUB_FAILED": 2}
    assert extra["topics"][0]["partitions"][0]["end_offset"] == 9
    assert extra["topics"][0]["channels"][0]["cursors"][0]["oldest_unfinished_seconds"] == 1.5
    assert extra["fsync_seconds"] == {"count": 0, "sum": 0.0, "buckets": {}}


# ---- text


def lines(stats: BrokerStats, memory: MemoryStats | None = None, **wanted: Any) -> list[str]:
    return stats_text(stats, Selection(**wanted), memory, START + 62_300_000_000).split("\n")


def test_the_text_of_an_empty_broker() -> None:
    head, *rest = lines(broker_of(node=NodeStats(version="0.1.0", hot="pure", sync="always")))
    assert head.startswith("nsqd v1.3.0 (built w/python3.")
    assert rest == [
        "start_time 2025-11-20T22:10:34Z",
        "uptime 1m2.3s",
        "",
        "Health: OK",
        "",
        "Topics: None",
        "",
        "Producers: None",
        "",
    ]


def test_the_text_has_a_line_of_our_own_when_asked() -> None:
    broker = broker_of(node=NodeStats(version="0.1.0", hot="pure", sync="always"))
    plain, page = (stats_text(broker, Selection(), None, START, extra=extra) for extra in (False, True))
    assert page == f"{plain}\nnsqha v0.1.0: pure hot path, sync=always, 0 connections\n"


def test_the_text_says_which_partitions_are_not_well() -> None:
    cluster = ClusterStats(node=1, under_replicated=3, below_min_isr=2)
    line = stats_text(broker_of(node=NodeStats(cluster=cluster)), Selection(), None, START, extra=True).split("\n")[-2]
    assert line.endswith(", 2 partitions below min_isr: they acknowledge nothing, 3 partitions under-replicated")
    assert "partitions" not in stats_text(broker_of(), Selection(), None, START, extra=True)


def test_the_text_of_memory() -> None:
    found = lines(broker_of(), MemoryStats(heap_objects=7))
    assert found[5:8] == ["", "Memory:", "   heap_objects             \t7"]
    assert found[15:17] == ["   gc_total_runs            \t0", ""]


def test_the_text_of_topics_channels_and_clients() -> None:
    connect_ts = START // 10**9 + 57
    consumer = client(user_agent="go-nsq/1", ready_count=1, finish_count=2, connect_ts=connect_ts)
    producer = client(pub_counts=(("a", 10), ("b", 1)), connect_ts=connect_ts)
    channel = ChannelStats(
        channel_name="c",
        paused=True,
        clients=(consumer,),
        depth=3,
        e2e_processing_latency=Result(2, ((0.5, 999), (0.9, 1500), (0.95, 2_500_000), (0.99, 3_000_000_000))),
    )
    topics = (
        TopicStats(topic_name="a", channels=(channel,), message_count=10),
        TopicStats(topic_name="b", paused=True),
    )
    assert lines(broker_of(*topics, producers=(producer,)))[6:-1] == [
        "Topics:",
        "   [a              ] depth: 0     be-depth: 0     msgs: 10       e2e%: ",
        "   *P [c                        ] depth: 3     be-depth: 0     inflt: 0    def: 0    re-q: 0     timeout: 0"
        "     msgs: 0        e2e%: 999.0ns, 1.5us, 2.5ms, 3.0s",
        "        [V2 h:5 go-nsq/1         ] state: 3 inflt: 0    rdy: 1    fin: 2        re-q: 0        msgs: 0"
        "        connected: 5s",
        "",
        "*P [b              ] depth: 0     be-depth: 0     msgs: 0        e2e%: ",
        "",
        "Producers:",
        "   [V2 h:5                  ] msgs: 11       topics: a=10,b=1 connected: 5s",
    ]


def test_the_text_without_clients() -> None:
    topic = TopicStats(topic_name="t", channels=(ChannelStats(channel_name="c", clients=(client(),)),))
    found = lines(broker_of(topic, producers=(client(pub_counts=(("t", 1),)),)), clients=False)
    assert not any("[V2" in line for line in found)


def test_memory_of_this_process() -> None:
    found = memory_stats()
    assert all(type(value) is int for value in found)
    assert found.heap_objects > 1000
    assert found.heap_in_use_bytes > 1 << 20
