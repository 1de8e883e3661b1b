"""promtool, of Prometheus: from the PATH, or from where `make` put Debian's package."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `promtool` or `prometheus`."""
    found = shutil.which(name, path=str(UNPACKED)) or shutil.which(name)
    assert found, f"{name} is missing: `make test` unpacks Debian's package prometheus into .venv"
    return found


def promtool(*words: str) -> str:
    """Run it; what it says if it fails is in the error."""
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
