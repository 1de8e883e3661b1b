"""One class, one name: whoever looks for a name finds one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.tidy.test_layers import ROOT, modules

TEST_NAME_MAX = 80
HELPER = re.compile(r"^Fake|(Rig|Disk|Loop)$")


def test_a_class_name_exists_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    assert len(found) > 600
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_fake_of_the_tests_exists_once_and_a_rig_says_what_it_sets_up() -> None:
    """The fakes that several rooms use are in tests/fakes, each with a contract test in tests/contract."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and HELPER.search(node.name):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert len(found) > 30
    assert "Rig" not in found
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_names_of_tests_fit() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    ]
    assert len(names) > 3000
    assert [name for name in names if len(name) > TEST_NAME_MAX] == []
