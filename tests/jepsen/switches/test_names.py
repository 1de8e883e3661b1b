"""A file system that keeps only the names that it was told to keep, of what a process made, renamed and synced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.jepsen.program import ROOT
from tests.jepsen.switches.names import NamesFile

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from nsqha.commitlog.storage import OsStorage
from tests.jepsen.switches import names
names.follow(Path(sys.argv[2]))
storage, at = OsStorage(), sys.argv[3]
exec(sys.argv[4])
"""


def forgotten(tmp_path: Path, what: str) -> set[str]:
    """What is there after a process did this and power was lost."""
    names, at = NamesFile(tmp_path / "names"), tmp_path / "data"
    at.mkdir()
    subprocess.run([sys.executable, "-c", PROGRAM, str(ROOT), str(names.path), str(at), what], check=True)
    names.forget()
    assert names.path.read_bytes() == b""
    return {str(path.relative_to(at)) for path in at.rglob("*")}


def test_a_name_stays_when_its_directory_was_synced(tmp_path: Path) -> None:
    what = """
storage.open(f"{at}/synced", create=True).sync()
storage.sync_dir(at)
storage.open(f"{at}/synced", create=True).sync()  # it was there: no new name
storage.make_dirs(f"{at}/a/b")
for folder in storage.begin_dirs(f"{at}/c/d", 2):
    storage.sync_dir(folder)
for folder in storage.begin_dirs(f"{at}/c/e/f", 2)[:1]:
    storage.sync_dir(folder)
storage.open(f"{at}/new", create=True).sync()
storage.open(f"{at}/a/b/new", create=True).sync()
"""
    assert forgotten(tmp_path, what) == {"synced", "a", "a/b", "c", "c/d"}


def test_a_rename_goes_back_until_it_is_synced(tmp_path: Path) -> None:
    what = """
for name in ("first", "second", "third", "replaced"):
    storage.open(f"{at}/{name}", create=True)
storage.sync_dir(at)
storage.rename(f"{at}/first", f"{at}/1")
storage.sync_dir(at)
storage.rename(f"{at}/second", f"{at}/2")
storage.rename(f"{at}/third", f"{at}/replaced")
"""
    assert forgotten(tmp_path, what) == {"1", "second", "replaced"}
