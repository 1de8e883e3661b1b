"""docs/backup.md: a node that is alone is copied, goes on, and is put back as it was."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.integration.devnode import DevNode

PAGE = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()


def commands(mark: str) -> str:
    """The block of commands behind this remark."""
    found = re.search(rf"<!-- {mark}\b.*?-->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    assert found, mark
    return found[1]


def in_shell(folder: Path, mark: str) -> None:
    subprocess.run(["sh", "-ec", commands(mark)], cwd=folder, check=True, timeout=60)


def test_what_was_copied_comes_back_and_nothing_else(tmp_path: Path) -> None:
    node = DevNode(tmp_path)
    node.create("orders", "billing")
    node.publish("orders", "first", "second")
    assert node.ok("sub", "orders", "billing", "-n", "1").split() == ["first"]
    assert node.stop() == 0
    in_shell(tmp_path, "backup")

    node = DevNode(tmp_path)
    node.publish("orders", "third")
    assert node.ok("sub", "orders", "billing", "-n", "2").split() == ["second", "third"]
    assert node.stop() == 0
    in_shell(tmp_path, "restore")

    node = DevNode(tmp_path)
    assert node.ok("sub", "orders", "billing", "-n", "1").split() == ["second"], "finished since the copy"
    node.publish("orders", "fourth")
    assert node.ok("sub", "orders", "billing", "-n", "1").split() == ["fourth"], "the third is not known any more"
    assert node.stop() == 0
