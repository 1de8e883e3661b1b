"""No test stands in for a clock of the whole process: threads that other tests left would wait and measure by it."""

from __future__ import annotations

import ast

import pytest

from tests.tidy.test_layers import ROOT

SHARED = {"time", "asyncio", "os"}
CLOCKS = {"sleep", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
REPLACES = {"setattr", "patch", "object"}  # of MonkeyPatch and of unittest.mock


def text_of(node: ast.expr) -> str:
    """The constant text that it is; empty: none."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_shared_clock(path: str) -> bool:
    """Whether `a.b.time.sleep` is the clock of all that use the module `time`."""
    *_, module, name = ("", *path.split("."))
    return module in SHARED and name in CLOCKS


def replaced_clocks(source: str) -> list[int]:
    """Lines that put something in the place of a clock of a shared module."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            first, called = node.args[0], ast.unparse(node.func).rpartition(".")[2]
            second = text_of(node.args[1]) if len(node.args) > 1 else ""
            path = text_of(first) or f"{ast.unparse(first)}.{second}"
            lines += [node.lineno] if called in REPLACES and is_shared_clock(path) else []
        elif isinstance(node, ast.Assign):
            lines += [node.lineno for target in node.targets if is_shared_clock(ast.unparse(target))]
    return lines


@pytest.mark.parametrize(
    "refused",
    [
        'monkeypatch.setattr(time, "sleep", pauses.append)',
        'patch.setattr(module.time, "monotonic", lambda: now)',
        'monkeypatch.setattr("nsqha.module.time.time_ns", lambda: 7)',
        'monkeypatch.setattr(module.asyncio, "sleep", at_once)',
        'mock.patch("time.sleep")',
        'mock.patch.object(time, "sleep")',
        "module.time.monotonic = clock",
    ],
)
def test_a_clock_of_all_is_seen(refused: str) -> None:
    assert replaced_clocks(refused) == [1]


@pytest.mark.parametrize(
    "taken",
    [
        'monkeypatch.setattr(module, "time", SimpleNamespace(sleep=pauses.append))',
        'monkeypatch.setattr(module, "sleep", pauses.append)',
        'monkeypatch.setattr("nsqha.module.time", clock)',
        'monkeypatch.setattr(os, "fdatasync", refuse)',
        "self.time = 5",
    ],
)
def test_a_clock_of_one_module_is_not(taken: str) -> None:
    assert replaced_clocks(taken) == []


def test_clocks_are_stood_in_for_in_one_module_only() -> None:
    """Replace the module's own name: `setattr(module, "time", SimpleNamespace(sleep=..))`."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in replaced_clocks(path.read_text())
    ]
    assert found == []
