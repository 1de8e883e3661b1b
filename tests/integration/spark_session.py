"""A small Spark of one's own on loopback, for tests: local[2], shared by all tests of a process.

Workers and planners are processes of their own and get this interpreter and this checkout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """What a process needs that starts Spark, or is started by it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def settings(folder: Path) -> dict[str, str]:
    """Small, quiet, and nothing outside of `folder`."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder} -Dderby.system.home={folder}",
    }


@contextmanager
def running_session(folder: Path, cores: int = 2, **more: str) -> Iterator[Any]:
    """A session in this process; ended with its JVM."""
    os.environ.update(environment())
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{cores}]").appName("nsqha")
    for name, value in {**settings(folder), **more}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
        gateway = session.sparkContext._gateway
        if gateway is not None:
            gateway.shutdown()
            # The JVM ends with its standard input, which the session would keep open as long as this process lives.
            gateway.proc.stdin.close()
            gateway.proc.wait(20)
