"""The stream source in a real Spark, from a real node."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.admin import Admin
from nsqha.cli.brokers.v2client import V2Publisher
from tests.integration.devnode import DevNode

pytest.importorskip("pyspark")

pytestmark = pytest.mark.timeout(300)  # the session starts in the first one
names = count(1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("stream"), "--sync=none")
    yield node
    assert node.stop() == 0


@pytest.fixture
def topic(node: DevNode) -> str:
    name = f"stream-{next(names)}"
    with Admin(node.grpc, 10) as admin:
        admin.call("CreateTopic", topic=name, settings={"partitions": 2})
    return name


def publish(node: DevNode, topic: str, *bodies: str) -> None:
    """By two connections, so that both partitions get some."""
    for half in (bodies[::2], bodies[1::2]):
        publisher = V2Publisher(node.tcp, 10)
        publisher.publish(topic, [body.encode() for body in half])
        publisher.close()


def depth(node: DevNode, topic: str, channel: str) -> int:
    """How far a channel is behind, as nsqadmin and others see it."""
    with urllib.request.urlopen(f"http://{node.http}/stats?format=json&topic={topic}") as answer:
        [found] = json.load(answer)["topics"]
    return int({each["channel_name"]: each["depth"] for each in found["channels"]}[channel])


class Copy:
    """A query that appends what it reads to files, with a checkpoint."""

    def __init__(self, spark: Any, node: DevNode, folder: Path, **options: object) -> None:
        self.spark, self.folder = spark, folder
        self.options = {"brokers": node.grpc, "startingOffsets": "earliest", **options}

    def run(self) -> Any:
        """Until everything that is there now is copied."""
        rows = self.spark.readStream.format("nsqha").options(**self.options).load()
        query = (
            rows.selectExpr("CAST(value AS STRING) AS value", "topic", "partition", "offset")
            .writeStream.format("parquet")
            .option("path", str(self.folder / "out"))
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(90)
        if (failed := query.exception()) is not None:
            raise failed
        return query

    @property
    def rows(self) -> list[tuple[str, str, int, int]]:
        return sorted(map(tuple, self.spark.read.parquet(str(self.folder / "out")).collect()))

    @property
    def values(self) -> list[str]:
        return [row[0] for row in self.rows]

    @property
    def batches(self) -> list[dict[str, Any]]:
        """The end of each micro-batch, as the checkpoint has it."""
        folder = self.folder / "checkpoint" / "offsets"
        files = sorted((file for file in folder.iterdir() if file.name.isdigit()), key=lambda file: int(file.name))
        return [json.loads(file.read_text().splitlines()[-1]) for file in files]


def test_a_stream_goes_on_where_its_checkpoint_is(spark: Any, node: DevNode, topic: str, tmp_path: Path) -> None:
    publish(node, topic, *(f"a{i:03d}" for i in range(50)))
    copy = Copy(spark, node, tmp_path, subscribe=topic)
    copy.run()
    publish(node, topic, *(f"b{i:03d}" for i in range(50)))
    copy.run()
    copy.run()
    assert copy.values == [f"{round_}{i:03d}" for round_ in "ab" for i in range(50)]
    assert len({(partition, offset) for _, _, partition, offset in copy.rows}) == 100
    record = copy.batches[-1][f"{topic}/0"]
    assert set(record) >= {"offset", "uid", "log_id", "epoch", "chain"}


def test_a_micro_batch_takes_no_more_than_the_limit(spark: Any, node: DevNode, topic: str, tmp_path: Path) -> None:
    publish(node, topic, *(f"{i:03d}" for i in range(100)))
    copy = Copy(spark, node, tmp_path, subscribe=topic, maxOffsetsPerTrigger=30)
    copy.run()
    ends = [sum(record["offset"] for record in batch.values()) for batch in copy.batches]
    assert ends == [30, 60, 90, 100]
    assert copy.values == [f"{i:03d}" for i in range(100)]


def test_a_topic_that_was_made_anew_is_not_read_over(spark: Any, node: DevNode, topic: str, tmp_path: Path) -> None:
    publish(node, topic, *(f"{i:03d}" for i in range(20)))
    copy = Copy(spark, node, tmp_path, subscribe=topic)
    copy.run()
    with Admin(node.grpc, 10) as admin:
        admin.call("DeleteTopic", topic=topic)
        admin.call("CreateTopic", topic=topic, settings={"partitions": 2})
    publish(node, topic, *(f"{i:03d}" for i in range(40)))
    with pytest.raises(Exception, match=r"the topic was deleted and created again: .*failOnDataLoss"):
        copy.run()
    assert len(copy.rows) == 20


def test_a_checkpoint_of_another_log_is_not_read_over(spark: Any, node: DevNode, topic: str, tmp_path: Path) -> None:
    publish(node, topic, *(f"{i:03d}" for i in range(20)))
    copy = Copy(spark, node, tmp_path, subscribe=topic)
    copy.run()
    # As after an unclean election: the same topic, offset and log id, but other entries before.
    last = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    *head, offsets = last.read_text().splitlines()
    said = json.loads(offsets)
    said[f"{topic}/1"]["chain"] = "0" * 16
    last.write_text("\n".join([*head, json.dumps(said)]))
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    publish(node, topic, *(f"{i:03d}" for i in range(20)))
    with pytest.raises(Exception, match=rf"{topic}/1: entry \d+ of the log has chain .* unclean election"):
        copy.run()


def test_a_commit_channel_follows_and_shows_lag(spark: Any, node: DevNode, topic: str, tmp_path: Path) -> None:
    publish(node, topic, *(f"{i:03d}" for i in range(100)))
    copy = Copy(spark, node, tmp_path, subscribe=topic, commitChannel="lake", maxOffsetsPerTrigger=60)
    copy.run()
    assert depth(node, topic, "lake") == 40  # one micro-batch late
    publish(node, topic, "more")
    copy.run()
    assert depth(node, topic, "lake") == 1
    assert len(copy.rows) == 101


def test_a_new_query_does_not_take_the_channel_of_another_one(
    spark: Any, node: DevNode, topic: str, tmp_path: Path
) -> None:
    publish(node, topic, *(f"{i:03d}" for i in range(10)))
    options = {"subscribe": topic, "commitChannel": "archive", "maxOffsetsPerTrigger": 6}
    first = Copy(spark, node, tmp_path / "first", **options)
    first.run()
    assert depth(node, topic, "archive") == 4
    for n, start in enumerate(("earliest", "latest")):
        with pytest.raises(Exception, match=rf"commitChannel archive is elsewhere: {topic}/\d at \d+ "):
            Copy(spark, node, tmp_path / f"{n}", startingOffsets=start, **options).run()
    assert depth(node, topic, "archive") == 4
    publish(node, topic, "one", "two")
    first.run()
    assert len(first.rows) == 12 and depth(node, topic, "archive") == 2


def test_a_sink_of_ours_behind_a_stream_of_ours(spark: Any, node: DevNode, topic: str, tmp_path: Path) -> None:
    publish(node, topic, *(f"{i:03d}" for i in range(50)))
    source = spark.readStream.format("nsqha").options(brokers=node.grpc, subscribe=topic, startingOffsets="earliest")
    query = (
        source.load()
        .select("value")
        .writeStream.format("nsqha")
        .options(nsqd=node.tcp, topic=f"{topic}-copy", checkpointLocation=str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    assert query.exception() is None
    copied = spark.read.format("nsqha").options(brokers=node.grpc, subscribe=f"{topic}-copy").load()
    assert sorted(row.value for row in copied.collect()) == [b"%03d" % i for i in range(50)]
