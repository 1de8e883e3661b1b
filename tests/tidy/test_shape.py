"""Files stay small, private names at home, and nothing is left over."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nsqha.cli.verbs import VERBS, module_of
from tests.tidy.test_layers import ROOT, imports, modules

LINES_MAX = 600
MODULES = modules()
OURS = ("nsqha", "lookupd", "pyspark_nsqha")
STARTED = {"nsqha.__main__", "lookupd.__main__", "nsqha.cli.nsqd", *map(module_of, VERBS)}


def test_no_file_has_two_ideas() -> None:
    tests = [(str(path.relative_to(ROOT)), path) for path in (ROOT / "tests").rglob("*.py")]
    sizes = {name: len(path.read_text().splitlines()) for name, path in [*MODULES, *tests]}
    assert not {name: size for name, size in sizes.items() if size > LINES_MAX}


@pytest.mark.parametrize(("module", "path"), MODULES, ids=lambda value: value if isinstance(value, str) else "")
def test_private_names_stay_in_their_module(module: str, path: Path) -> None:
    ours = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS
    ]
    names = [alias.name for node in ours for alias in node.names]
    allowed = ("__version__", "__file__", "_hot", "_hot_py", "_publishing_py")
    assert not [name for name in names if name.startswith("_") and name not in allowed]


def test_no_module_is_left_over() -> None:
    used = set().union(*(imports(path, module) for module, path in MODULES))
    for _, path in MODULES:
        used |= {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}  # import_module
    packages = {module for module, path in MODULES if path.name == "__init__.py"}
    assert not sorted({module for module, _ in MODULES} - used - packages - STARTED)
