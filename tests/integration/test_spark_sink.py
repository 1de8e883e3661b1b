"""The sink in a real Spark, into a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli.brokers.v2client import Subscriber
from tests.integration.servers import Node

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(300)  # the session starts in the first one


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), sync="none") as node:
        yield node


def consumed(node: Node, topic: str, count: int) -> list[bytes]:
    """The bodies that a consumer of a new channel gets, in the order of the log."""
    bodies: list[bytes] = []
    subscriber = Subscriber(node.tcp, 20, topic, "test", window=2500)
    while len(bodies) < count and (messages := subscriber.messages()):
        bodies += [message.body for message in messages]
        subscriber.answer(messages, None, None)
    subscriber.leave()
    return bodies


def test_a_table_is_published_once_and_each_task_keeps_its_order(spark: Any, node: Node) -> None:
    rows = spark.range(0, 20_000, 1, 2).selectExpr("concat('row ', lpad(id, 6, '0')) AS value", "'orders' AS topic")
    rows.write.format("nsqha").option("nsqd", node.tcp).mode("append").save()
    bodies = consumed(node, "orders", 20_000)
    assert sorted(bodies) == [b"row %06d" % i for i in range(20_000)]
    for task in (range(10_000), range(10_000, 20_000)):
        mine = [body for body in bodies if int(body[4:]) in task]
        assert mine == sorted(mine)


def test_delays_and_topics_of_rows_are_heeded(spark: Any, node: Node) -> None:
    rows = [(b"now", "left", None), (b"later", "right", 60_000), (b"also now", "right", 0)]
    table = spark.createDataFrame(rows, "value binary, topic string, defer_ms int").coalesce(1)
    table.write.format("nsqha").option("nsqd", node.tcp).mode("append").save()
    assert consumed(node, "left", 1) == [b"now"]
    assert consumed(node, "right", 1) == [b"also now"]
    channel = node.channel("right", "test")
    assert channel is not None
    assert channel["deferred_count"] == 1


def test_what_cannot_be_written_is_said_before_a_task_starts(spark: Any, node: Node) -> None:
    rows = spark.range(1).selectExpr("'v' AS value", "id AS partition")
    writer = rows.write.format("nsqha").option("nsqd", node.tcp).option("topic", "never").mode("append")
    with pytest.raises(Exception, match=r"column 'partition' cannot be written: .* ignoreColumns to true"):
        writer.save()
    with pytest.raises(Exception, match=r"a log cannot be overwritten: use mode\('append'\)"):
        rows.write.format("nsqha").option("nsqd", node.tcp).option("topic", "never").mode("overwrite").save()
    writer.option("ignoreColumns", "true").save()
    assert consumed(node, "never", 1) == [b"v"]


def test_a_row_that_cannot_be_sent_fails_the_job_by_its_number(spark: Any, node: Node) -> None:
    rows = spark.range(0, 10, 1, 1).selectExpr("if(id = 7, cast(null AS string), 'v') AS value")
    with pytest.raises(Exception, match="row 8: value is null, and NSQ has no null"):
        rows.write.format("nsqha").option("nsqd", node.tcp).option("topic", "nulls").mode("append").save()


def test_a_stream_is_published_batch_by_batch(spark: Any, node: Node, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    for batch in range(3):
        (lines / f"{batch}.txt").write_text("".join(f"{batch} {i:03d}\n" for i in range(200)))
    rows = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(lines))
    query = (
        rows.writeStream.format("nsqha")
        .option("nsqd", node.tcp)
        .option("topic", "streamed")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    assert query.exception() is None
    expected = [b"%d %03d" % (batch, i) for batch in range(3) for i in range(200)]
    assert sorted(consumed(node, "streamed", 600)) == expected
