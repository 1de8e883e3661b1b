"""What the benchmarks ask of the disk under the data directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import disk


def test_a_folder_that_is_set_apart_says_so(tmp_path: Path) -> None:
    if subprocess.run(["lsattr", "-d", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no such flags")
    disk.set_apart(tmp_path)
    (tmp_path / "inner").mkdir()
    shown = subprocess.run(["lsattr", "-d", tmp_path, tmp_path / "inner"], capture_output=True, text=True, check=True)
    assert ["T" in line.split()[0] for line in shown.stdout.splitlines()] == [True, False]


def test_a_file_system_that_knows_no_such_flag_is_left_alone() -> None:
    disk.set_apart(Path("/proc"))
