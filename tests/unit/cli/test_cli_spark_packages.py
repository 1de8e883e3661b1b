"""A verb of `nsqha spark` where a package of its extra is missing: one line, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder
class Nothing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nothing())
sys.argv = ["nsqha", *{words!r}]
from nsqha.cli import main
main()
"""


def blocked(package: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED.format(package=package, words=["spark", *words])]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)


@pytest.mark.parametrize(
    "words",
    [
        ["archive", "orders", "--to", "lake", "--once"],
        ["verify", "orders", "--lake", "lake"],
        ["compact", "--lake", "lake"],
        ["replay", "orders", "--from", "start", "--into", "again", "--plan"],
    ],
    ids=lambda words: words[0],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(words: list[str], tmp_path: Path) -> None:
    done = blocked("pyspark", tmp_path, *words)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    install = f"pyspark is not installed here: in the clone of nsqha: {sys.executable} -m pip install -e '.[spark]'"
    assert done.stderr.splitlines()[-1].endswith(install), done.stderr


def test_lag_needs_no_spark_and_names_its_own_flag(tmp_path: Path) -> None:
    done = blocked("pyspark", tmp_path, "lag", "--broker", "127.0.0.1:1")
    assert done.returncode == 6, done.stderr
    assert "cannot reach the broker at 127.0.0.1:1" in done.stderr and "or set --broker or" in done.stderr


def test_lag_needs_no_pyarrow_either(tmp_path: Path) -> None:
    done = blocked("pyarrow", tmp_path, "lag", "--broker", "127.0.0.1:1")
    assert done.returncode == 6, done.stderr
