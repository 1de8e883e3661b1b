"""One class, one name: whoever looks for a name finds one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.tidy.test_layers import modules


def test_a_class_name_exists_once() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    assert len(found) > 600
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
