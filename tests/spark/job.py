"""A job as users submit it, in a driver of its own: `python job.py batch|stream|imports JSON`.

The JSON has the `options` of the source, `folder` for what a stream leaves behind, and `register`: whether the source
is registered, instead of being found by Spark. The last line of stdout is what it found, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

TASKS = tuple(f"pyspark_nsqha.{name}" for name in ("batch", "rows", "fetch", "scan", "sink", "stream"))


def digest(values: list[str]) -> str:
    """One text for messages in any order, from each one's MD5."""
    return hashlib.md5("".join(sorted(values)).encode()).hexdigest()


def batch(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    frame = spark.read.format("nsqha").options(**given["options"]).load()
    rows = frame.selectExpr("topic", "partition", "offset", "md5(value) AS digest").collect()
    places = {(row.topic, row.partition, row.offset) for row in rows}
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    return {
        "rows": len(rows),
        "places": len(places),
        "digest": digest([row.digest for row in rows]),
        "count": frame.count(),
        "tasks": frame.rdd.getNumPartitions(),
        "executors": len(tracker.getExecutorInfos()) - 1,  # one of them is the driver
    }


def stream(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Twice, with what is there now: the second time there is nothing new."""
    folder = given["folder"]
    for _ in range(2):
        frame = spark.readStream.format("nsqha").options(**given["options"]).load()
        writer = frame.selectExpr("md5(value) AS digest").writeStream.format("parquet").option("path", f"{folder}/out")
        query = writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
        query.awaitTermination(120)
        if query.isActive or query.exception() is not None:
            raise SystemExit(f"the stream did not end well: {query.exception()}")
    rows = spark.read.parquet(f"{folder}/out").collect()
    return {"rows": len(rows), "digest": digest([row.digest for row in rows])}


def imports(spark: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a worker's Python is, and what it has loaded when it has everything that tasks import."""
    names = TASKS

    def load(_: int) -> dict[str, Any]:
        import importlib
        import sys

        for name in names:
            importlib.import_module(name)
        return {"python": sys.prefix, "loaded": sorted(sys.modules), "from": sys.modules["pyspark_nsqha"].__file__}

    return dict(spark.sparkContext.parallelize([0], 1).map(load).collect()[0])


def main() -> None:
    from pyspark import __version__
    from pyspark.sql import SparkSession

    what, given = sys.argv[1], json.loads(sys.argv[2])
    builder: Any = SparkSession.builder
    spark = builder.getOrCreate()
    try:
        if given.get("register"):
            from pyspark_nsqha import DefaultSource

            spark.dataSource.register(DefaultSource)
        found = {"batch": batch, "stream": stream, "imports": imports}[what](spark, given)
    finally:
        spark.stop()
    print(json.dumps({"version": __version__, **found}))


if __name__ == "__main__":
    main()
