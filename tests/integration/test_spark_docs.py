"""What docs/spark.md and the README say of Spark is run, and its table of options is that of the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.brokers.admin import Admin
from tests.integration.devnode import DevNode

pytest.importorskip("pyspark")
from pyspark_nsqha.options import EVERYWHERE, HOLD_MS, OPTIONS, READS, WRITES, ConnectOptions, Reading, show_size
from pyspark_nsqha.reading import columns
from pyspark_nsqha.writing.sink import SinkOptions

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/spark.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"<!-- run -->\n```(sh|python)\n(.*?)```", re.DOTALL)
USES = {"reads, streams": READS, "all": EVERYWHERE, "reads": ("read",), "streams": ("readStream",), "writing": WRITES}


def table(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_option_is_in_the_table_for_what_it_is_for() -> None:
    assert {row[0].strip("`"): USES[row[1]] for row in table("Options")} == OPTIONS
    assert len(table("Options")) == len(OPTIONS)


def test_defaults_are_those_of_the_code() -> None:
    said = {row[0].strip("`"): row[2] for row in table("Options")}
    reading, sink, connection = Reading(), SinkOptions(()), ConnectOptions(())
    assert said["timeoutMs"] == f"{connection.timeout_ms}; writing {sink.timeout_ms}"
    assert said["numRetries"].split(";")[0] == str(connection.retries)
    assert said["splitBytes"] == show_size(reading.split_bytes)
    assert said["batchBytes"] == f"{show_size(reading.batch_bytes)}; writing {show_size(sink.batch_bytes)}"
    assert said["maxMessageBytes"] == show_size(sink.message_bytes_max)
    assert (said["verify"], said["mode"]) == (reading.verify, reading.mode)
    assert said["failOnDataLoss"] == str(reading.fail_on_data_loss).lower()
    assert said["ignoreColumns"] == str(sink.ignore_columns).lower()
    assert said["holdMs"] == str(HOLD_MS)


def test_every_column_is_in_the_table() -> None:
    named = [name for row in table("Columns") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(columns.KNOWN)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DevNode]:
    node = DevNode(tmp_path, "--sync=interval")
    yield node
    assert node.stop() == 0


def run_line(node: DevNode, line: str) -> None:
    """A command; one of Spark's in this process, so that all share one Spark."""
    words = shlex.split(line)
    assert words[0] == "nsqha", line
    if words[1] != "spark":
        node.ok(*words[1:])
        return
    args = build_parser("spark").parse_args(words[1:])
    assert args.run(args) == 0, line


@pytest.fixture
def here(node: DevNode, monkeypatch: pytest.MonkeyPatch) -> DevNode:
    """Commands without an address find the node, and files are in its folder."""
    for name in ("NSQHA_GRPC_ADDRESS", "NSQHA_TCP_ADDRESS"):
        monkeypatch.setenv(name, node.environment[name])
    monkeypatch.chdir(node.folder)
    return node


def bodies(node: DevNode, topic: str) -> Counter[bytes]:
    with Admin(node.grpc, 10) as admin:
        return Counter(one.body for one in admin.stream("PeekMessages", topic=topic, start=True, count_max=100))


def test_what_the_page_shows_runs_from_top_to_bottom(
    spark: Any, here: DevNode, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BLOCK.findall(PAGE)
    assert [kind for kind, _ in blocks] == ["sh", "python", "python", "sh", "python", "python", "sh"]
    names = {"spark": spark}
    addresses = {"127.0.0.1:4152": here.grpc, "127.0.0.1:4150": here.tcp}
    for kind, code in blocks:
        if kind == "sh":
            for line in code.strip().splitlines():
                run_line(here, line)
            continue
        # At once: the port that was drawn for one may begin like the other's.
        code = re.sub(r"127\.0\.0\.1:415[02]\b", lambda found: addresses[found[0]], code)
        # Spark's own folder is that of its JVM.
        for folder in ("table", "checkpoint", "lake"):
            code = code.replace(f'"{folder}"', f'"{here.folder / folder}"')
        exec(compile(code, "docs/spark.md", "exec"), names)
    said = capsys.readouterr().out
    assert "|     1|" in said and "|failed|" in said
    failed = b'{"n": 2, "state": "failed"}'
    assert bodies(here, "orders-failed") == bodies(here, "orders-again") == Counter([failed])
    assert len(bodies(here, "orders-all")) == 3
    assert "\n3\n" in said  # rows of lake and log
    shown = here.json("channel", "show", "orders", "pipeline")
    assert shown["reader"]


def test_the_catalog_that_the_page_shows_takes_a_table(tmp_path: Path) -> None:
    """In a process of its own: pyiceberg looks at the environment when it is imported."""
    settings = re.findall(r"^export (PYICEBERG_\w+)=(.+)$", PAGE, re.MULTILINE)
    assert len(settings) == 2
    environment = {name: value.replace("$PWD", str(tmp_path)) for name, value in settings}
    [line] = re.findall(r"^nsqha (spark archive .* --format iceberg)$", PAGE, re.MULTILINE)
    args = build_parser("spark").parse_args(line.split())
    code = (
        "import sys; from pyspark_nsqha.lake.commits.iceberg import IcebergCommits;"
        "from pyspark_nsqha.lake.store import Store;"
        "print(IcebergCommits(Store(sys.argv[1]), sys.argv[2], sys.argv[3]).state().sequence)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / args.to), args.catalog, args.table]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
    assert (tmp_path / "catalog.db").exists() and (tmp_path / "warehouse/nsqha/messages").is_dir()


def test_what_the_readme_shows_runs(spark: Any, here: DevNode) -> None:
    commands = re.search(r"<!-- spark commands: .*? -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert commands
    here.publish("orders", "first", "second", "third")
    lines = commands[1].strip().splitlines()
    assert len(lines) == 3
    for line in lines:
        run_line(here, line.removeprefix(".venv/bin/"))
    assert list((here.folder / "lake").rglob("*.parquet"))
