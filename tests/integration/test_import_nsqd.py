"""`nsqha import nsqd` into a real broker, with the commands of docs/moving-from-nsqd.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.servers import Node
from tests.unit.cli.test_import_nsqd import nsqd_data, write_queue

DOCS = Path(__file__).resolve().parents[2] / "docs" / "moving-from-nsqd.md"


def test_the_commands_of_the_page_move_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "nsqd"
    source.mkdir()
    nsqd_data(source, channels={"slow": True, "fast": False})
    write_queue(source, "t:slow", list(range(500)))
    write_queue(source, "t:fast", list(range(500)), read=400)
    write_queue(source, "t", [500])
    commands = re.findall(r"^ +nsqha (import nsqd .*)$", DOCS.read_text(), re.MULTILINE)
    assert len(commands) == 2
    with Node(tmp_path / "data") as node:
        for command in [*commands, commands[-1]]:  # the last once more: nothing is published twice
            words = command.replace("/var/lib/nsqd", str(source)).replace("127.0.0.1:4151", node.http).split()
            subprocess.run([sys.executable, "-m", "nsqha", *words], cwd=tmp_path, check=True)
        (topic,) = node.json("/stats?format=json")["topics"]
        channels = {c["channel_name"]: (c["depth"], c["paused"]) for c in topic["channels"]}
        assert channels == {"slow": (501, True), "fast": (101, False)}


def test_a_broker_that_starts_on_the_folder_of_an_nsqd_serves_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    nsqd_data(tmp_path / "data", channels={"c": False})
    with Node(tmp_path) as node:
        assert "`nsqha import nsqd " in node.log()
