"""Imports go down: through the rooms of nsqha/server, and through the modules of every package, as its `__init__`
lists them. So no import leads back to where it began. An import counts wherever it stands: for types only, in a
function, or as the name that `import_module` gets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from nsqha.cli.verbs import VERBS, module_of
from tests.tidy.test_layers import modules

Arrow = tuple[str, str]  # a module, and one that it imports

FILES: dict[str, Path] = dict(modules())
PACKAGES = sorted(module for module, path in FILES.items() if path.name == "__init__.py")
MODULES_MAX = 15

COMPUTED = {"nsqha.cli": tuple(map(module_of, VERBS))}
"""What modules import by names that they put together themselves."""


# ---- the rules


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_modules(package: str) -> None:
    names = listed(package)
    assert len(set(names)) == len(names)
    assert not set(names) ^ set(children(package)), f"{package}/__init__.py and the files do not agree"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down_the_list(package: str) -> None:
    """For nsqha.server these are the rooms."""
    up = [f"{a} imports {b}" for a, b in sorted(arrows()) if is_up(package, a, b)]
    assert not up, f"an import goes only to what {package}/__init__.py lists further down; hand in what is needed"


def test_no_import_leads_back_to_where_it_began() -> None:
    found = circle(arrows())
    assert not found, "let the lower side own a Protocol, or move what both need below both"


def test_a_large_package_has_rooms() -> None:
    large = {}
    for package in PACKAGES:
        files = [name for name in children(package) if f"{package}.{name}" not in PACKAGES]
        if len(files) > MODULES_MAX:
            large[package] = len(files)
    assert not large, "a package of more modules wants rooms"


def test_names_of_imported_modules_are_written_out() -> None:
    assert {module for module in FILES if computes_an_import(tree(module))} == COMPUTED.keys()


def test_every_kind_of_import_is_an_arrow() -> None:
    source = """
from nsqha import ids
from nsqha.cli.terminal import exits
from nsqha.errors import NsqhaError
import nsqha.clock, os
if TYPE_CHECKING:
    from nsqha.ranges import Ranges
def run():
    from nsqha.hot import Ring
    return asyncio.to_thread(importlib.import_module, "nsqha.admin.service")
"""
    found = {"ids", "cli.terminal.exits", "errors", "clock", "ranges", "hot", "admin.service"}
    assert imported(ast.parse(source)) == {f"nsqha.{name}" for name in found}
    assert not computes_an_import(ast.parse(source))
    assert computes_an_import(ast.parse("import_module(f'nsqha.{name}')"))
    assert computes_an_import(ast.parse("to_thread(importlib.import_module, name)"))


def test_a_circle_is_found() -> None:
    assert circle({("a", "b"), ("b", "c"), ("c", "b"), ("a", "c")}) in (["b", "c", "b"], ["c", "b", "c"])
    assert not circle({("a", "b"), ("b", "c"), ("a", "c")})


# ---- what packages say of themselves


@cache
def listed(package: str) -> tuple[str, ...]:
    """The names in the block that follows "Downwards:" in the docstring of its `__init__`."""
    block = re.search(r"\b[Dd]ownwards:.*\n\n((?: {4}.*\n?)+)", ast.get_docstring(tree(package)) or "")
    assert block, f"{package}/__init__.py has no list that begins with `Downwards:`"
    return tuple(re.findall(r"^ {4}(\w+) ", block[1], re.MULTILINE))


def children(package: str) -> list[str]:
    """Names of its modules and packages; `__main__` is only started."""
    inside = {module.removeprefix(f"{package}.") for module in FILES if module.startswith(f"{package}.")}
    return sorted(name for name in inside if "." not in name and name != "__main__")


def is_up(package: str, importer: str, target: str) -> bool:
    """Whether an import between two children of the package goes against its list."""
    a, b = child(package, importer), child(package, target)
    order = listed(package)
    return a != b and a in order and b in order and order.index(b) < order.index(a)


def child(package: str, module: str) -> str:
    return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else ""


# ---- what modules import


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def arrows() -> frozenset[Arrow]:
    found = {(module, target) for module in FILES for target in imported(tree(module))}
    found |= {(module, target) for module, targets in COMPUTED.items() for target in targets}
    return frozenset((module, target) for module, target in found if module != target)


def imported(parsed: ast.AST) -> set[str]:
    """Modules of ours."""
    found: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else str(node.module) for name in names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)
    return found & FILES.keys()


def computes_an_import(parsed: ast.AST) -> bool:
    """Whether `import_module`, called or handed to who calls it, gets another thing than a name that is written out."""
    for node in ast.walk(parsed):
        words = [node.func, *node.args] if isinstance(node, ast.Call) else []
        for function, name in pairwise(words):
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__") and not isinstance(name, ast.Constant):
                return True
    return False


def circle(found: Collection[Arrow]) -> list[str]:
    """Modules of which each imports the next, and the last is the first; empty if there is no such circle."""
    graph: dict[str, set[str]] = {}
    for importer, target in sorted(found):
        graph.setdefault(importer, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []
