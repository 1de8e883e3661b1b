"""A standalone Spark: the package by installation and by archive, and what is said where it is missing."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.devnode import DevNode
from tests.spark.job import digest
from tests.spark.rig import body
from tests.spark.standalone import Standalone, archive, bare_python, named_python, outcome, whole_python

pytestmark = pytest.mark.timeout(400)

PYTHON = "python-of-the-cluster"
"""The name by which driver and workers know their Python: theirs has pyarrow and numpy, ours has everything."""
MESSAGES = 2000


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevNode]:
    node = DevNode(tmp_path_factory.mktemp("node"), "--sync=none")
    node.ok("topic", "create", "orders", "--partitions", "4")
    for begin in range(0, MESSAGES, 100):
        node.publish("orders", *(body(number, 300).decode("latin-1") for number in range(begin, begin + 100)))
    yield node
    node.stop()


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    """What a job has to find."""
    bodies = [body(number, 300).decode("latin-1").encode() for number in range(MESSAGES)]
    digests = [hashlib.md5(one).hexdigest() for one in bodies]
    return {"rows": MESSAGES, "places": MESSAGES, "count": MESSAGES, "digest": digest(digests)}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Python of tasks: no gRPC, no package of ours."""
    folder = tmp_path_factory.mktemp("bare")
    return named_python(folder / "bin", PYTHON, bare_python(folder / "venv", "numpy", "pyarrow"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has everything."""
    return whole_python(tmp_path_factory.mktemp("whole") / "venv")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    """A folder in which that is what the cluster's is called."""
    return named_python(tmp_path_factory.mktemp("here") / "bin", PYTHON, whole)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory, bare: Path) -> Iterator[Standalone]:
    with Standalone.running(tmp_path_factory.mktemp("standalone"), bare) as spark:
        yield spark


@pytest.fixture
def given(node: DevNode) -> dict[str, Any]:
    return {"options": {"brokers": node.grpc, "subscribe": "orders"}}


def test_the_package_is_installed_on_every_machine(
    spark: Standalone, given: dict[str, Any], published: dict[str, Any], whole: Path
) -> None:
    found = outcome(spark.submit(whole, "batch", given))
    assert found.items() >= published.items()
    assert (found["executors"], found["tasks"]) == (2, 4)


def test_the_package_comes_with_the_job(
    spark: Standalone, given: dict[str, Any], published: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    files = ("--py-files", str(archive(tmp_path / "nsqha.zip")))
    loaded = outcome(spark.submit(PYTHON, "imports", given, *files, path=here))
    assert "nsqha.zip" in loaded["from"] and sys.prefix != loaded["python"]
    assert not {"grpc", "re2", "pandas", "google.protobuf"} & set(loaded["loaded"])
    found = outcome(spark.submit(PYTHON, "batch", given | {"register": True}, *files, path=here))
    assert found.items() >= published.items()


@pytest.mark.parametrize("register", [True, False])
def test_without_the_package_the_error_names_it(
    spark: Standalone, given: dict[str, Any], here: Path, register: bool
) -> None:
    """Registered, it is also the control of the test above: all is the same but the archive."""
    done = spark.submit(PYTHON, "batch", given | {"register": register}, path=here)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'pyspark_nsqha'" in done.stdout + done.stderr


def test_an_archive_does_not_reach_tasks_of_a_source_that_is_not_registered(
    spark: Standalone, given: dict[str, Any], here: Path, tmp_path: Path
) -> None:
    """That is Spark's: what it finds by itself it makes without the files of the job. Should it change, the line in the
    documents goes."""
    files = ("--py-files", str(archive(tmp_path / "nsqha.zip")))
    done = spark.submit(PYTHON, "batch", given, *files, path=here)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'pyspark_nsqha'" in done.stdout + done.stderr
