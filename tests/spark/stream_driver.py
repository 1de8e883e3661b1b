"""A streaming query in a process of its own, to be killed: `python -m tests.spark.stream_driver CONFIG`.

CONFIG is JSON: `folder` for Spark's files, `source` and `sink` options with `format`, `columns` to select, `settings`
of the session, and `once`: whether the query ends with what is there when it begins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.devnode import die_with_parent
from tests.integration.spark_session import ROOT, environment

START_SECONDS = 200.0  # on a machine that does something else, too
POLL_SECONDS = 0.002


def main(config: dict[str, Any]) -> None:
    """Run the query until it ends."""
    from tests.integration.spark_session import running_session

    folder = Path(config["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    sink = dict(config["sink"])
    with running_session(folder, **config["settings"]) as spark:
        rows = spark.readStream.format("nsqha").options(**config["source"]).load().selectExpr(*config["columns"])
        writer = rows.writeStream.format(sink.pop("format")).options(**sink)
        trigger = {"availableNow": True} if config["once"] else {"processingTime": "0 seconds"}
        writer.trigger(**trigger).start().awaitTermination()


class Driver:
    """The process, and all that it starts."""

    def __init__(self, folder: Path, *, source: dict[str, str], sink: dict[str, str], columns: list[str]) -> None:
        self.folder = folder
        self.checkpoint = Path(sink["checkpointLocation"])
        self._config: dict[str, Any] = {"source": source, "sink": sink, "columns": columns}
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, settings: dict[str, str] | None = None, *, once: bool = False) -> None:
        """Start it, as often as it ended."""
        assert self._process is None
        self._lives += 1
        own = str(self.folder / f"life-{self._lives}")
        config = self._config | {"folder": own, "settings": settings or {}, "once": once}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.stream_driver", json.dumps(config)],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def log_path(self) -> Path:
        return self.folder / f"log.{self._lives}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9 of the driver with its JVM, executors and workers."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait(20)

    def run_to_the_end(self) -> None:
        """Process what is there now."""
        self.start(once=True)
        try:
            assert self._process is not None
            assert self._process.wait(START_SECONDS) == 0, self.log_path.read_text(errors="replace")[-4000:]
            self._process = None
        finally:
            self.kill()

    def wait_above(self, least: int, look: Callable[[], int], what: str) -> None:
        """Until `look` finds more than `least`. It looks often: what is waited for may be over soon."""
        deadline = time.monotonic() + START_SECONDS
        while look() <= least:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no {what}:\n{self.log_path.read_text(errors='replace')[-4000:]}")
            time.sleep(POLL_SECONDS)

    def members(self, word: str) -> list[int]:
        """Processes of this driver whose command line has a word."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                ours = entry.name.isdigit() and os.getsid(int(entry.name)) == self.pid
                if ours and word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
        return found


def numbers(folder: Path) -> list[int]:
    """The micro-batches that have a file in a folder of a checkpoint."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())
    except FileNotFoundError:
        return []


def newest(folder: Path) -> int:
    return max(numbers(folder), default=-1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
