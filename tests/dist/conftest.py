"""What `make dist` has put into dist/, and what it needs at run time as wheels, fetched once."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from release.build import BUILD_NEEDS, interpreters

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
HOUSES = ROOT / "build" / "wheelhouse"


def distributions() -> list[Path]:
    return sorted(DIST.glob("nsqha-*"))


def python_of(path: Path) -> str:
    """The interpreter for a distribution: its own CPython, or this one."""
    tag = path.name.split("-")[2] if path.suffix == ".whl" else "py3"
    if not tag.startswith("cp"):
        return sys.executable
    (found,) = [python for python in interpreters() if version_tag(python) == tag]
    return found


def version_tag(python: str) -> str:
    code = "import sys; print(f'cp{sys.version_info[0]}{sys.version_info[1]}', end='')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="session")
def wheelhouse() -> Callable[[str], Path]:
    """A folder with all that nsqha needs, for an interpreter; the package index is asked for what is missing in it."""
    needs = [*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"], *BUILD_NEEDS]

    def of(python: str) -> Path:
        house = HOUSES / version_tag(python)
        marker = house / ".complete"
        if not marker.exists() or marker.read_text() != "\n".join(needs):
            house.mkdir(parents=True, exist_ok=True)
            env = house.parent / f"env-{house.name}"
            subprocess.run([python, "-m", "venv", str(env)], check=True)
            command = [str(env / "bin/python"), "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(house)]
            subprocess.run([*command, *needs], check=True, timeout=600)
            marker.write_text("\n".join(needs))
        return house

    return of


def clean_environment(env: Path) -> dict[str, str]:
    """Nothing of this checkout or of the person who runs the tests."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    return {"PATH": f"{env / 'bin'}:/usr/bin:/bin", "HOME": str(env), **kept}
