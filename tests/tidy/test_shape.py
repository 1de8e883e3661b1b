"""Classes stay small, private names at home, and nothing is left over."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nsqha.cli.verbs import VERBS, module_of
from tests.tidy.test_layers import imports, modules

METHODS_MAX = 25
ATTRIBUTES_MAX = 15
MODULES = modules()
OURS = ("nsqha", "lookupd", "pyspark_nsqha")
STARTED = {"nsqha.__main__", "lookupd.__main__", "nsqha.cli.nsqd", *map(module_of, VERBS)}


# Over the bounds, with what they have: a number may go down, and whoever adds to one of these splits it first.
LARGE = {
    # One data structure with its readers and writers.
    "DeferredStore": (28, 12),
    # What is put together here is named here.
    "Broker": (21, 22),
    "Membership": (15, 18),
    # Counters and limits of one connection, job or thread pool, read where they are changed.
    "PartitionPublisher": (14, 16),
}


def size_of(node: ast.ClassDef) -> tuple[int, int]:
    """Methods and attributes; a record, which has fields and no __init__, counts as none."""
    methods = [item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if "__init__" not in methods:
        return len(methods), 0
    attributes = {
        at.attr
        for at in ast.walk(node)
        if isinstance(at, ast.Attribute) and isinstance(at.ctx, ast.Store) and getattr(at.value, "id", "") == "self"
    }
    return len(methods), len(attributes)


def test_classes_have_one_idea() -> None:
    classes = [node for _, path in MODULES for node in ast.walk(ast.parse(path.read_text()))]
    sizes = {node.name: size_of(node) for node in classes if isinstance(node, ast.ClassDef)}
    over = {name: size for name, size in sizes.items() if size[0] > METHODS_MAX or size[1] > ATTRIBUTES_MAX}
    assert over == LARGE, "a class that is in one of these and not in the other, or with other numbers"


@pytest.mark.parametrize(("module", "path"), MODULES, ids=lambda value: value if isinstance(value, str) else "")
def test_private_names_stay_in_their_module(module: str, path: Path) -> None:
    ours = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS
    ]
    names = [alias.name for node in ours for alias in node.names]
    allowed = ("__version__", "__file__", "_hot", "_hot_py", "_publishing_py", "_syncing_py")
    assert not [name for name in names if name.startswith("_") and name not in allowed]


def test_no_module_is_left_over() -> None:
    used = set().union(*(imports(path, module) for module, path in MODULES))
    for _, path in MODULES:
        used |= {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}  # import_module
    packages = {module for module, path in MODULES if path.name == "__init__.py"}
    assert not sorted({module for module, _ in MODULES} - used - packages - STARTED)
