"""Another version of the product, installed beside this one: a tree of files of its own, from which a daemon runs.

    tree = installed(folder, version="9.0.0", oldest=1, newest=2)
    node.program = tree.program("nsqd")                 # from its next start on
    assert tree.runs(node.pid)

A real older release cannot be assumed where tests run. The tree is a copy of this one with another version and other
levels in its source, compiled modules included; a tree that is given, such as a checkout of an older release, is used
as it is.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"nsqd": "nsqha.cli.nsqd", "nsqlookupd": "lookupd.__main__"}
_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_RUN = "import sys; sys.path[:0] = [{root!r}]; from {module} import main; sys.argv[0] = {daemon!r}; main()"


@dataclass(frozen=True)
class InstalledTree:
    root: Path

    @property
    def version(self) -> str:
        found = _VERSION.search((self.root / "nsqha" / "__init__.py").read_text())
        assert found is not None, f"{self.root} has no version"
        return found[1]

    def program(self, daemon: str) -> tuple[str, ...]:
        """What stands for the command of a daemon. What this process imports is nothing of ours but from there."""
        code = _RUN.format(root=str(self.root), module=PACKAGES[daemon], daemon=daemon)
        return (sys.executable, "-c", code)

    def runs(self, pid: int) -> bool:
        """Whether a process was started from it."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return any(str(self.root).encode() in word for word in words)


def installed(folder: Path, *, version: str, oldest: int, newest: int) -> InstalledTree:
    """In that folder, if it is not there yet."""
    root = folder / f"nsqha-{version}"
    if not root.exists():
        for package in ("nsqha", "lookupd"):
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "*.c"))
        _changed(root / "nsqha/__init__.py", __version__=repr(version).replace("'", '"'))
        _changed(root / "nsqha/election/model.py", PEER_LEVEL=newest, PEER_LEVEL_OLDEST=oldest)
    return InstalledTree(root)


def _changed(path: Path, **constants: object) -> None:
    text = path.read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"^{name} = [^ #\n]+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, f"{path} has {count} lines of {name}"
    path.write_text(text)
