"""What the benchmarks ask of the disk under the data directory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import disk


def test_a_folder_that_is_set_apart_says_so(tmp_path: Path) -> None:
    other, apart = tmp_path / "other", tmp_path / "apart"
    other.mkdir()
    apart.mkdir()
    chattr = shutil.which("chattr")
    if chattr is None or subprocess.run([chattr, "+T", other], capture_output=True, check=False).returncode:
        pytest.skip("this machine, or this file system, has no such flags")
    disk.set_apart(apart)
    (apart / "inner").mkdir()
    shown = subprocess.run(["lsattr", "-d", apart, apart / "inner"], capture_output=True, text=True, check=True)
    assert ["T" in line.split()[0] for line in shown.stdout.splitlines()] == [True, False]


def test_a_file_system_that_knows_no_such_flag_is_left_alone() -> None:
    disk.set_apart(Path("/proc"))
