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
    command = [sys.executable, "-c", BLOCKED.format(package="pyspark", words=["spark", *words])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("pip install 'nsqha[spark]'"), done.stderr
