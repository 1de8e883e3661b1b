"""The batch source in a real Spark, from real nodes: what was published is what is read, once, as it was at load()."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from pyspark_nsqha.options import ConnectOptions
from pyspark_nsqha.snapshot import Segments, SnapshotRequest
from tests.integration.cluster import Cluster
from tests.integration.servers import Node, free_port

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
names = count(1)


class Broker(Node):
    """A node that is alone, with a gRPC address."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.grpc = f"127.0.0.1:{free_port()}"
        super().__init__(directory, sync="none", flags=[f"--grpc-address={self.grpc}", *flags])

    def listening(self) -> bool:
        return super().listening() and "gRPC: listening on" in self.log()

    def admin(self, rpc: str, **fields: Any) -> Any:
        with Admin(self.grpc, 10) as admin:
            return admin.call(rpc, **fields)

    def create(self, topic: str, *channels: str, partitions: int = 1) -> None:
        self.admin("CreateTopic", topic=topic, channels=channels, settings={"partitions": partitions})

    def publish(self, topic: str, bodies: Iterable[bytes], *, delay_ms: int = 0, connections: int = 1) -> None:
        """Each connection keeps to one partition, the next one to the next."""
        bodies = list(bodies)
        for at in range(connections):
            publisher = V2Publisher(self.tcp, 20)
            publisher.publish(topic, bodies[at::connections], delay_ms)
            publisher.close()

    @property
    def segments(self) -> Segments:
        return Segments(ConnectOptions((self.grpc,)))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("node")) as node:
        yield node


@pytest.fixture
def topic() -> str:
    return f"batch-{next(names)}"


def bodies(n: int, size: int = 200, *, seed: int = 1) -> list[bytes]:
    """Half of each is random, so that nothing looks like anything else."""
    rng = random.Random(seed)
    return [b'{"n":%d,"seed":%d,"pad":"%s"}' % (at, seed, rng.randbytes(size // 2).hex().encode()) for at in range(n)]


def checksum(of: Iterable[bytes]) -> tuple[int, int]:
    """How many, and the sum of their CRCs: the order does not matter, one byte does."""
    crcs = [zlib.crc32(body) for body in of]
    return len(crcs), sum(crcs)


def spark_checksum(table: Any) -> tuple[int, int]:
    [row] = table.selectExpr("count(*) AS n", "coalesce(sum(crc32(value)), 0) AS crcs").collect()
    return row.n, row.crcs


def load(spark: Any, where: Any, topic: str = "", **options: object) -> Any:
    """`where`: a node, or the folder of one."""
    given = {"path" if isinstance(where, Path) else "brokers": str(getattr(where, "grpc", where))}
    if topic:
        given["subscribe"] = topic
    return spark.read.format("nsqha").options(**given, **options).load()


def refusal(table: Any) -> str:
    """The last line of what a user sees when this is read; `table` may be a call that loads it."""
    with pytest.raises(Exception) as failed:
        (table() if callable(table) else table).write.format("noop").mode("append").save()
    lines = [line.strip() for line in str(failed.value).splitlines() if line.strip()]
    return next(line for line in reversed(lines) if not line.startswith("SQLSTATE"))


# ---- all of it, as it is


def test_every_message_is_a_row_with_its_body_and_id(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic, "audit", partitions=3)
    published = bodies(3000)
    node.publish(topic, published, connections=3)
    table = load(spark, node, topic)
    assert spark_checksum(table) == checksum(published)
    rows = table.select("topic", "partition", "offset", "id", "timestamp_ns", "attempts", "value").collect()
    for pin in node.segments.snapshot(SnapshotRequest((topic,))).pins:
        own = sorted((row for row in rows if row.partition == pin.identity.partition), key=lambda row: row.offset)
        assert [row.offset for row in own] == list(range(pin.end.offset))
        assert [row.id for row in own] == [f"{pin.identity.id_base + row.offset:016x}" for row in own]
        assert all(left.timestamp_ns <= right.timestamp_ns for left, right in pairwise(own))
    assert {(row.topic, row.attempts) for row in rows} == {(topic, 1)}
    subscriber = Subscriber(node.tcp, 20, topic, "audit", window=2500)
    consumed: dict[str, bytes] = {}
    while len(consumed) < len(published):
        messages = subscriber.messages()
        consumed |= {message.id.decode(): message.body for message in messages}
        subscriber.answer(messages, None, None)
    subscriber.leave()
    assert {row.id: bytes(row.value) for row in rows} == consumed


def test_a_partition_is_read_by_several_tasks(spark: Any, node: Broker, topic: str) -> None:
    published = bodies(1000, 20_000)
    node.create(topic)
    node.publish(topic, published)
    whole, fine = load(spark, node, topic), load(spark, node, topic, splitBytes="8m")
    assert (whole.rdd.getNumPartitions(), fine.rdd.getNumPartitions()) == (1, 3)
    assert load(spark, node, topic, minPartitions=2).rdd.getNumPartitions() == 2
    assert spark_checksum(fine) == checksum(published)
    tasks = fine.selectExpr("spark_partition_id() AS task", "offset").groupBy("task").agg({"offset": "min"}).collect()
    assert [row.task for row in sorted(tasks, key=lambda row: row["min(offset)"])] == [0, 1, 2]


def test_ends_stay_as_they_were_at_load_while_producers_run(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, bodies(500))
    over = threading.Event()

    def produce() -> None:
        publisher = V2Publisher(node.tcp, 20)
        for seed in count(2):
            publisher.publish(topic, bodies(20, seed=seed))
            if over.wait(0.02):
                break
        publisher.close()

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        table = load(spark, node, topic)
        found = table.count()
        assert table.alias("a").join(table.alias("b"), ["partition", "offset"]).count() == found
        assert table.union(table).count() == 2 * found
        with_schema = load_with_schema(spark, node, topic)
        found = with_schema.count()
        assert with_schema.selectExpr("offset + 0 AS other").count() == found
    finally:
        over.set()
        producer.join()
    assert load(spark, node, topic).count() > found


def load_with_schema(spark: Any, node: Broker, topic: str) -> Any:
    reader = spark.read.format("nsqha").option("brokers", node.grpc).option("subscribe", topic)
    return reader.schema("offset bigint, value binary").load()


def test_a_schema_or_columns_say_what_is_built(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, [b"a", b"b"])
    assert load_with_schema(spark, node, topic).collect() == [(0, b"a"), (1, b"b")]
    assert load(spark, node, topic, columns="id,offset").columns == ["id", "offset"]
    not_null = spark.read.format("nsqha").option("brokers", node.grpc).option("subscribe", topic)
    assert not_null.schema("offset bigint NOT NULL").load().collect() == [(0,), (1,)]
    reader = spark.read.format("nsqha").option("brokers", node.grpc).option("subscribe", topic)
    assert refusal(reader.schema("offset int").load) == (
        "pyspark_nsqha.options.OptionError: schema: column offset is bigint, not int; cast it in a select"
    )


def test_sql_reads_through_a_view_and_is_told_so_for_a_table(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, [b"a", b"b"])
    using = f"USING nsqha OPTIONS (brokers '{node.grpc}', subscribe '{topic}')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW viewed {using}")
    assert spark.sql("SELECT offset, string(value) FROM viewed ORDER BY offset").collect() == [(0, "a"), (1, "b")]
    with pytest.raises(Exception, match="write CREATE TEMPORARY VIEW instead of TABLE"):
        spark.sql(f"CREATE TABLE kept {using}")


def test_nothing_published_is_no_row(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic, partitions=2)
    table = load(spark, node, topic)
    assert (table.count(), table.collect(), len(table.columns)) == (0, [], 13)


def test_a_limit_ends_a_task_early_and_the_next_read_is_whole(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, bodies(5000))
    table = load(spark, node, topic, batchBytes="64k")
    assert [row.offset for row in table.select("offset").limit(3).collect()] == [0, 1, 2]
    assert table.count() == 5000


def test_deferred_messages_and_emptied_ones_are_rows(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic, "audit")
    node.publish(topic, [b"now"])
    node.publish(topic, [b"later"], delay_ms=60_000)
    node.admin("EmptyChannel", topic=topic, channel="audit")
    node.publish(topic, [b"then"])
    rows = load(spark, node, topic).selectExpr("string(value) AS body", "deliver_at > timestamp AS deferred").collect()
    assert [tuple(row) for row in rows] == [("now", None), ("later", True), ("then", None)]


# ---- parts of it


def test_topics_are_chosen_by_name_by_pattern_or_by_partition(spark: Any, node: Broker) -> None:
    for name in ("chosen-a", "chosen-b", "other"):
        node.create(name, partitions=2)
        node.publish(name, [f"{name} {at}".encode() for at in range(10)], connections=2)

    def topics(table: Any) -> dict[str, int]:
        return {row.topic: row["count"] for row in table.groupBy("topic").count().collect()}

    assert topics(load(spark, node, "chosen-a,other")) == {"chosen-a": 10, "other": 10}
    assert topics(load(spark, node, subscribePattern="chosen-.*")) == {"chosen-a": 10, "chosen-b": 10}
    assert topics(load(spark, node, subscribePattern="chosen")) == {}
    assert topics(load(spark, node, assign='{"chosen-a":[1],"other":[0,1]}')) == {"chosen-a": 5, "other": 10}


def test_offsets_times_and_channels_bound_what_is_read(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, [b"old"] * 5)
    middle_ms = time.time_ns() // 10**6 + 1
    time.sleep(0.005)  # so that what follows has a later millisecond
    node.publish(topic, [b"new"] * 7)

    def offsets(**options: object) -> list[int]:
        return sorted(row.offset for row in load(spark, node, topic, **options).select("offset").collect())

    third, sixth = (json.dumps({topic: {"0": offset}}) for offset in (3, 6))
    assert offsets(startingOffsets=third, endingOffsets=sixth) == [3, 4, 5]
    assert offsets(startingTimestamp=middle_ms) == list(range(5, 12))
    assert offsets(endingTimestamp=middle_ms) == list(range(5))
    iso = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(middle_ms // 1000)) + f".{middle_ms % 1000:03d}Z"
    assert offsets(startingTimestamp=iso) == list(range(5, 12))
    by_partition = json.dumps({topic: {"0": middle_ms}})
    assert offsets(startingOffsetsByTimestamp=by_partition, startingOffsets="earliest") == list(range(5, 12))
    future = middle_ms + 3_600_000
    assert offsets(startingTimestamp=future, startingOffsetsByTimestampStrategy="latest") == []
    assert "startingTimestamp" in refusal(load(spark, node, topic, startingTimestamp=future))
    node.segments.commit_reader(topic, "audit", {0: 9})
    assert offsets(startingChannel="audit") == [9, 10, 11]
    assert "has no channel nobody" in refusal(load(spark, node, topic, startingChannel="nobody"))


def test_single_messages_are_read_by_their_ids(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic, partitions=2)
    node.publish(topic, bodies(2000), connections=2)
    every = {row.id: bytes(row.value) for row in load(spark, node, topic).select("id", "value").collect()}
    picked = random.Random(7).sample(sorted(every), 40)
    rows = load(spark, node, topic, ids=",".join(picked), columns="id,value").collect()
    assert sorted((row.id, bytes(row.value)) for row in rows) == sorted((one, every[one]) for one in picked)
    missing = f"{0xFFFF << 30:016x}"
    said = refusal(load(spark, node, topic, ids=f"{picked[0]},{missing}"))
    assert said.startswith(f"pyspark_nsqha.model.ReadFailed: ids: {missing} is in no range that is read")
    left = load(spark, node, topic, ids=f"{picked[0]},{missing}", failOnDataLoss="false")
    assert [row.id for row in left.select("id").collect()] == [picked[0]]


@pytest.fixture
def without_zones(spark: Any) -> Iterator[Any]:
    """A session in which a timestamp has no zone."""
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    yield spark
    spark.conf.unset("spark.sql.timestampType")


def test_times_are_moments_also_where_timestamps_have_no_zone(without_zones: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, bodies(5))
    table = load(without_zones, node, topic)
    assert dict(table.dtypes)["timestamp"] == dict(table.dtypes)["deliver_at"] == "timestamp"
    rows = table.selectExpr("unix_micros(timestamp) AS micros", "timestamp_ns").collect()
    assert [row.micros for row in rows] == [row.timestamp_ns // 1000 for row in rows] and len(rows) == 5


@pytest.fixture
def pushing(spark: Any) -> Iterator[Any]:
    """A session in which filters are pushed."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield spark
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_filters_that_are_pushed_change_what_is_read_and_not_what_comes(pushing: Any, node: Broker, topic: str) -> None:
    node.create(topic, partitions=2)
    node.publish(topic, bodies(3000, 2000), connections=2)
    rows = load(pushing, node, topic).select("partition", "offset", "id", "timestamp_ns").collect()
    pushed = load(pushing, node, topic, pushdown="true")
    middle = sorted(row.timestamp_ns for row in rows)[len(rows) // 2]
    some = {row.id for row in rows if row.offset % 700 == 3}
    cases: list[tuple[str, Callable[[Any], bool]]] = [
        ("offset >= 1490", lambda row: row.offset >= 1490),
        ("offset > 10 AND offset <= 20 AND partition = 1", lambda row: 10 < row.offset <= 20 and row.partition == 1),
        ("offset IN (5, 6, 1400)", lambda row: row.offset in (5, 6, 1400)),
        (f"topic = '{topic}' AND partition > 0", lambda row: row.partition > 0),
        ("topic = 'another'", lambda row: False),
        (f"id IN ({', '.join(map(repr, sorted(some)))})", lambda row: row.id in some),
        (f"timestamp_ns < {middle}", lambda row: row.timestamp_ns < middle),
        (f"timestamp > timestamp_micros({middle // 1000})", lambda row: row.timestamp_ns // 1000 > middle // 1000),
        ("offset > 1495 OR partition = 0", lambda row: row.offset > 1495 or row.partition == 0),
        ("NOT offset = 3 AND offset < 6", lambda row: row.offset != 3 and row.offset < 6),
    ]
    for where, holds in cases:
        found = pushed.where(where).select("partition", "offset", "id").collect()
        assert sorted(found) == sorted(row[:3] for row in rows if holds(row)), where
    assert pushed.where("offset IN (5, 6)").rdd.getNumPartitions() == 2
    assert pushed.where("offset IN (5, 6) AND partition = 1").rdd.getNumPartitions() == 1


def test_a_query_without_pushdown_works_while_sparks_own_switch_is_off(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, [b"a", b"b"])
    assert load(spark, node, topic).where("offset = 1").count() == 1
    with pytest.raises(Exception, match=r"spark.sql.python.filterPushdown.enabled"):
        load(spark, node, topic, pushdown="true").collect()


# ---- what cannot be


def test_what_cannot_be_read_is_said_in_one_line(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, [b"a"])
    failed = "pyspark_nsqha.model.ReadFailed: "
    silent = "pyspark_nsqha.model.NoBroker: "
    nobody = f"127.0.0.1:{free_port()}"
    said = refusal(lambda: load(spark, node, "no-such"))
    assert said.startswith("pyspark_nsqha.model.NotThere: there is no topic no-such")
    said = refusal(lambda: load(spark, Path("/nowhere"), topic))
    assert said == f"{failed}path=/nowhere: No such file or directory"
    assert refusal(lambda: load(spark, nobody, topic, numRetries=0)) == (
        f"{silent}no broker answers: {nobody} refused the connection; brokers takes addresses of --grpc-address"
    )
    assert refusal(lambda: load(spark, node.http, topic, numRetries=0)) == (
        f"{silent}no broker answers: {node.http} does not speak gRPC; brokers takes addresses of --grpc-address"
    )
    assert refusal(lambda: load(spark, node, topic, splitByte="1m")) == (
        "pyspark_nsqha.options.OptionError: there is no option 'splitbyte'; did you mean splitBytes?"
    )
    assert refusal(load(spark, node, topic, startingOffsets=json.dumps({topic: {"0": 5}}))) == (
        f"{failed}{topic}/0: startingOffsets 5 is after the committed end: asked for [5, 1), there is [0, 1)"
    )
    assert refusal(lambda: load(spark, node, "a#ephemeral")) == (
        "pyspark_nsqha.options.OptionError: subscribe: a#ephemeral is ephemeral: it has no log to read; "
        "consume it instead"
    )


def test_a_topic_that_is_made_anew_after_load_is_not_read(spark: Any, node: Broker, topic: str) -> None:
    node.create(topic)
    node.publish(topic, [b"first life"])
    table = load(spark, node, topic)
    node.admin("DeleteTopic", topic=topic)
    node.create(topic)
    node.publish(topic, [b"second life"] * 2)
    assert refusal(table) == (
        f"pyspark_nsqha.model.Gone: {topic}/0: the topic was deleted or created again since load(); load it again"
    )


# ---- files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[bytes]]]:
    """The data folder of a node that was stopped, with a log of some files, and what was published."""
    published = bodies(4000, 1000)
    with Broker(tmp_path_factory.mktemp("files"), f"--segment-bytes={MIB}") as node:
        node.create("orders", "audit")
        for at in range(0, 4000, 500):
            node.publish("orders", published[at : at + 500])
        assert node.stop() == 0
    yield node.data, published


@pytest.fixture
def copied(folder: tuple[Path, list[bytes]], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(folder[0], tmp_path / "data"))


def pairs(data: Path) -> list[Path]:
    """The segments of the only partition, oldest first."""
    return sorted(data.glob("topics/orders-*/0/*.segment"))


def test_the_folder_of_a_stopped_node_is_read_like_a_broker(spark: Any, folder: tuple[Path, list[bytes]]) -> None:
    data, published = folder
    assert spark_checksum(load(spark, data, "orders")) == checksum(published)
    assert spark_checksum(load(spark, data, subscribePattern="ord.*", splitBytes="1m")) == checksum(published)
    some = load(spark, data, "orders", startingOffsets='{"orders":{"0":3990}}').select("offset").collect()
    assert [row.offset for row in some] == list(range(3990, 4000))
    last = load(spark, data, "orders").selectExpr("max(timestamp_ns) AS at").collect()[0].at
    newest = load(spark, data, "orders", startingTimestamp=last // 10**6)
    assert newest.selectExpr("min(timestamp_ns) AS at").collect()[0].at >= last // 10**6 * 10**6


def test_the_folder_of_a_running_node_is_refused(spark: Any, node: Broker) -> None:
    assert refusal(lambda: load(spark, node.data, "orders")).endswith(
        "a broker uses this folder; read from it with the option brokers, or stop it first"
    )


def test_messages_that_are_gone_fail_a_read_that_names_them_or_are_counted(spark: Any, copied: Path) -> None:
    oldest = pairs(copied)[0]
    for file in (oldest, oldest.with_suffix(".commitlog")):
        file.unlink()
    start = load(spark, copied, "orders").selectExpr("min(offset) AS start").collect()[0].start
    assert 0 < start < 4000
    asked = {"startingOffsets": '{"orders":{"0":0}}', "endingOffsets": '{"orders":{"0":3000}}'}
    assert refusal(load(spark, copied, "orders", **asked)) == (
        f"pyspark_nsqha.model.Gone: orders/0: asked for [0, 3000), there is [{start}, 4000): retention removed {start} "
        "messages; startingOffsets earliest begins at the first message left, failOnDataLoss false reads without them"
    )
    left = load(spark, copied, "orders", **asked, failOnDataLoss="false")
    found = left.selectExpr("min(offset)", "max(offset)", "count(*)").collect()[0]
    assert tuple(found) == (start, 2999, 3000 - start)


def test_a_batch_that_does_not_verify_fails_or_is_a_row_or_is_dropped(spark: Any, copied: Path) -> None:
    segment = pairs(copied)[1]
    data = bytearray(segment.read_bytes())
    data[data.index(b'"pad":"', len(data) // 2) + 10] ^= 1  # of a body
    segment.write_bytes(data)
    said = refusal(load(spark, copied, "orders"))
    assert said.startswith("pyspark_nsqha.model.NotVerified: orders/0: log id ")
    dropped = load(spark, copied, "orders", mode="DROPMALFORMED").selectExpr("count(*) AS n").collect()[0].n
    assert 0 < dropped < 4000
    permissive = load(spark, copied, "orders", mode="PERMISSIVE")
    corrupt = permissive.where("_corrupt IS NOT NULL").select("offset", "value").collect()
    assert len(corrupt) == 1
    assert corrupt[0].value is None
    assert permissive.count() == dropped + 1
    # Nobody looks, so a byte is another: what verify none is for is a log that was verified before.
    assert load(spark, copied, "orders", verify="none").count() == 4000


# ---- a cluster


def test_a_cluster_is_read_through_any_broker_from_its_followers(spark: Any, cluster: Cluster, topic: str) -> None:
    cluster.create(topic, "steady")
    published = bodies(2000)
    publisher = V2Publisher(cluster.nodes[0].tcp, 20)
    publisher.publish(topic, published)
    publisher.close()
    for member in cluster.nodes:
        assert spark_checksum(load(spark, member, topic)) == checksum(published)
    down = cluster.followers(topic)[0]
    table = load(spark, ",".join(member.grpc for member in cluster.nodes), topic)
    down.kill()
    try:
        assert spark_checksum(table) == checksum(published)
        brokers = ",".join([down.grpc, *(member.grpc for member in cluster.nodes if member is not down)])
        assert spark_checksum(load(spark, brokers, topic)) == checksum(published)
    finally:
        down.start()
