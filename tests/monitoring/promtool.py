"""promtool, of Prometheus: from the PATH, or from where `make` put Debian's package."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `promtool` or `prometheus`."""
    found = shutil.which(name, path=str(UNPACKED)) or shutil.which(name)
    why = f"{name} is missing: `make test` unpacks Debian's package prometheus into .venv"
    if not found and "CI" not in os.environ:
        pytest.skip(why)  # not Debian, and there is none on the PATH
    assert found, why
    return found


def promtool(*words: str) -> str:
    """Run it; what it says if it fails is in the error."""
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
