"""Spark Connect and Declarative Pipelines: our source and sink where the driver is behind a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.cli.brokers.v2client import Subscriber, V2Publisher
from tests.integration.devnode import BIN, DevNode, die_with_parent
from tests.integration.spark_session import environment

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(900)

RUN_SECONDS = 400.0  # on a machine that does something else, too
BODIES = [b"%03d" % i for i in range(300)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("connect"), "--sync=none")
    yield node
    assert node.stop() == 0


def publish(node: DevNode, topic: str) -> None:
    node.create(topic)
    publisher = V2Publisher(node.tcp, 10)
    publisher.publish(topic, BODIES)
    publisher.close()


def consumed(node: DevNode, topic: str) -> list[bytes]:
    """The bodies that the first channel of a topic gets."""
    bodies: list[bytes] = []
    subscriber = Subscriber(node.tcp, 20, topic, "test", window=2500)
    while len(bodies) < len(BODIES) and (messages := subscriber.messages()):
        bodies += [message.body for message in messages]
        subscriber.answer(messages, None, None)
    subscriber.leave()
    return bodies


def run(folder: Path, *command: str) -> str:
    """A command with this checkout, in a process group that ends with it."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment() | {"SPARK_LOCAL_DIRS": str(folder), "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


CLIENT = """
import sys
from pyspark.sql import SparkSession

grpc, tcp, topic, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
source = {"brokers": grpc, "subscribe": topic, "startingOffsets": "earliest"}
print("batch", spark.read.format("nsqha").options(**source).load().count())
query = (
    spark.readStream.format("nsqha").options(**source, maxOffsetsPerTrigger="100").load().select("value")
    .writeStream.format("nsqha").options(nsqd=tcp, topic=topic + "-copy", checkpointLocation=folder)
    .trigger(availableNow=True).start()
)
query.awaitTermination()
print("progress", query.lastProgress["sources"][0]["endOffset"])
failed = spark.read.format("nsqha").options(brokers=grpc, subscribe=topic, sbscribe="x")
try:
    failed.load().count()
except Exception as error:
    print("refused", "did you mean subscribe?" in str(error))
spark.stop()
"""


def test_batch_stream_and_sink_work_in_spark_connect(node: DevNode, tmp_path: Path) -> None:
    publish(node, "connect")
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    said = run(tmp_path, sys.executable, str(script), node.grpc, node.tcp, "connect", str(tmp_path / "checkpoint"))
    assert "batch 300" in said
    assert "'offset': 300" in said or '"offset": 300' in said
    assert "refused True" in said
    assert consumed(node, "connect-copy") == BODIES


PIPELINE = """
name: nsqha
storage: file://{folder}/storage
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.shuffle.partitions: "2"
"""
TRANSFORMATIONS = """
from pyspark import pipelines as dp
from pyspark.sql import functions as F

SOURCE = {{"brokers": "{grpc}", "subscribe": "{topic}", "startingOffsets": "earliest"}}


@dp.table
def orders():
    return spark.readStream.format("nsqha").options(**SOURCE).load().select("value", "partition", "offset")


@dp.materialized_view
def counted():
    return spark.read.table("orders").groupBy("partition").agg(F.count("*").alias("messages"))


dp.create_sink("copy", "nsqha", {{"nsqd": "{tcp}", "topic": "{topic}-copy"}})


@dp.append_flow(target="copy")
def copied():
    return spark.readStream.table("orders").select("value")
"""


def test_a_declarative_pipeline_has_a_table_of_ours_and_a_sink_of_ours(node: DevNode, tmp_path: Path) -> None:
    topic = "pipeline"
    publish(node, topic)
    (tmp_path / "transformations").mkdir()
    (tmp_path / "spark-pipeline.yml").write_text(PIPELINE.format(folder=tmp_path))
    text = TRANSFORMATIONS.format(grpc=node.grpc, tcp=node.tcp, topic=topic)
    (tmp_path / "transformations" / "orders.py").write_text(text)
    run(tmp_path, str(BIN / "spark-pipelines"), "run", "--remote", "local[2]")
    assert sorted(consumed(node, f"{topic}-copy")) == BODIES
