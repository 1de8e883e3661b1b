"""Every script tells what happens: see `transcript`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.transcript import play

SCRIPTS = sorted(Path(__file__).parent.glob("*.script"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    assert play(path.read_text()) == path.read_text()


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 9
