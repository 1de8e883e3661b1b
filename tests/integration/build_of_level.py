"""A daemon of another build, as far as builds differ in what they say of themselves: levels and version.

    program(folder, build="0.0.9", oldest=1, newest=1) -> path of an executable

A real older build cannot be assumed where tests run. The program is this tree, started with other constants: so the
registration, the check at the start, the greeting of each stream and the log are those of a process of that build.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_MODULES = {"nsqd": "nsqha.cli.nsqd", "nsqlookupd": "lookupd.__main__"}
_PROGRAM = """#!{python}
import sys

sys.path.insert(0, {root!r})
import nsqha

nsqha.__version__ = {build!r}
from nsqha.election import model

model.PEER_LEVEL_OLDEST, model.PEER_LEVEL = {oldest}, {newest}
from {module} import main

main()
"""


def program(folder: Path, *, build: str, oldest: int, newest: int, daemon: str = "nsqd") -> str:
    """An executable file; what it imports later sees these constants."""
    path = folder / f"{daemon}-{build}"
    given = {"build": build, "oldest": oldest, "newest": newest, "module": _MODULES[daemon]}
    path.write_text(_PROGRAM.format(python=sys.executable, root=str(ROOT), **given))
    path.chmod(0o755)
    return str(path)
