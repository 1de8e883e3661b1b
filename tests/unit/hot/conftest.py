"""Every test of this folder runs over both twins."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

IDS = ["pure", "compiled"]


def _twin(name: str) -> ModuleType:
    if name.endswith("_py"):
        return importlib.import_module(name)
    compiled: ModuleType = pytest.importorskip(name, reason="the extension is not built")
    return compiled


@pytest.fixture(scope="session", params=("nsqha.hot._hot_py", "nsqha.hot._hot"), ids=IDS)
def hot(request: pytest.FixtureRequest) -> ModuleType:
    """Of the functions."""
    return _twin(request.param)


@pytest.fixture(scope="session", params=("nsqha.hot._publishing_py", "nsqha.hot._publishing"), ids=IDS)
def publishing(request: pytest.FixtureRequest) -> ModuleType:
    """Of the classes between a PUB and its OK."""
    return _twin(request.param)


@pytest.fixture(scope="session", params=("nsqha.hot._syncing_py", "nsqha.hot._syncing"), ids=IDS)
def syncing(request: pytest.FixtureRequest) -> ModuleType:
    """Of the threads of disk rounds."""
    return _twin(request.param)
