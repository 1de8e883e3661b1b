"""The oldest PySpark that is promised: what works on the newest works there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.devnode import DevNode
from tests.integration.spark_session import ROOT
from tests.spark.job import digest
from tests.spark.rig import body
from tests.spark.standalone import JOB, environment, outcome, run

pytestmark = pytest.mark.timeout(900)  # the first time it is downloaded, half a gigabyte

OLDEST = "4.1"
INSTALL_SECONDS = 800
MESSAGES = 1000


@pytest.fixture(scope="module")
def oldest() -> Path:
    """A Python with that PySpark, and everything else of ours; made once, in our own environment, and kept."""
    folder = Path(sys.prefix) / f"spark-{OLDEST}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", f"pyspark=={OLDEST}.*"],
        ):
            subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = Path("lib") / version / "site-packages"
        # Its own packages are found first, so ours are all but Spark.
        (folder / packages / "ours.pth").write_text(f"{Path(sys.prefix) / packages}\n")
        (folder / "complete").touch()
    return python


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("node"), "--sync=none")
    node.ok("topic", "create", "orders", "--partitions", "2")
    for begin in range(0, MESSAGES, 100):
        node.publish("orders", *(body(number, 300).decode("latin-1") for number in range(begin, begin + 100)))
    yield node
    node.stop()


@pytest.mark.parametrize("what", ["batch", "stream"])
def test_the_oldest_spark_reads_the_same(oldest: Path, node: DevNode, tmp_path: Path, what: str) -> None:
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.log.level": "ERROR",
    }
    confs = " ".join(f"--conf {key}={value}" for key, value in settings.items())
    env = environment(
        PYTHONPATH=os.fspath(ROOT),
        PYSPARK_PYTHON=str(oldest),
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_SUBMIT_ARGS=f"--master local[2] {confs} pyspark-shell",
    )
    options = {"brokers": node.grpc, "subscribe": "orders", "startingOffsets": "earliest"}
    given = json.dumps({"options": options, "folder": str(tmp_path)})
    found: dict[str, Any] = outcome(run([str(oldest), str(JOB), what, given], env, tmp_path))
    digests = [hashlib.md5(body(n, 300).decode("latin-1").encode()).hexdigest() for n in range(MESSAGES)]
    assert found["version"].startswith(f"{OLDEST}.")
    assert (found["rows"], found["digest"]) == (MESSAGES, digest(digests))
