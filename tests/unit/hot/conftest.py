"""Every test of this folder runs over both twins."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

TWINS = ("nsqha.hot._hot_py", "nsqha.hot._hot")


@pytest.fixture(scope="session", params=TWINS, ids=["pure", "compiled"])
def hot(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == TWINS[0]:
        return importlib.import_module(request.param)
    compiled: ModuleType = pytest.importorskip(request.param, reason="the extension is not built")
    return compiled
