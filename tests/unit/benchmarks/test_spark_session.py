"""Whose CPU is whose: the JVM, and the Python below it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import spark


def process(root: Path, pid: int, name: str, parent: int, own: int, ended: int) -> None:
    folder = root / str(pid)
    folder.mkdir()
    words = ["S", str(parent), *["0"] * 9, str(own), "0", str(ended), "0"]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(words)}\n")


def test_processes_are_found_below_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "PROC", tmp_path)
    monkeypatch.setattr(spark, "TICK", 1)
    here = os.getpid()
    process(tmp_path, here, "python", 1, 1000, 1000)
    process(tmp_path, 11, "java", here, 7, 2)
    process(tmp_path, 12, "python3", 11, 3, 4)
    process(tmp_path, 13, "a (b) c", 12, 5, 0)
    process(tmp_path, 14, "java", 1, 500, 500)  # of somebody else
    (tmp_path / "15").mkdir()  # it ended meanwhile
    (tmp_path / "uptime").write_text("")
    assert spark.Session().read() == (7, 2 + 3 + 4 + 5)
