"""Which twin serves, and that both and the stub say the same."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nsqha import hot as chosen
from nsqha.hot import _hot_py, _publishing_py

HERE = Path(chosen.__file__).parent


def active(root: Path = HERE.parents[1], **environment: str) -> str:
    """What a new interpreter chooses that finds the package in `root`."""
    code = "from nsqha import hot; print(hot.ACTIVE, hot.Ring.__module__, hot.Replies.__module__)"
    env = {key: value for key, value in os.environ.items() if key != "NSQHA_NO_EXT"} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True).stdout


def test_the_environment_forces_the_twin() -> None:
    assert active(NSQHA_NO_EXT="1").split() == ["pure", "nsqha.hot._hot_py", "nsqha.hot._publishing_py"]


@pytest.mark.skipif(importlib.util.find_spec("nsqha.hot._hot") is None, reason="the extension is not built")
@pytest.mark.parametrize("value", ["", "0"])
def test_the_extension_serves_when_it_is_there(value: str) -> None:
    assert active(NSQHA_NO_EXT=value).split() == ["compiled", "nsqha.hot._hot", "nsqha.hot._publishing"]


def test_without_the_extension_the_twin_serves(tmp_path: Path) -> None:
    # The package as it is installed where the compiler is missing (optional = true): everything but the extension.
    package = tmp_path / "nsqha" / "hot"
    package.mkdir(parents=True)
    (tmp_path / "nsqha" / "__init__.py").touch()
    for path in HERE.glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    assert active(tmp_path).split() == ["pure", "nsqha.hot._hot_py", "nsqha.hot._publishing_py"]


def test_the_package_exports_everything(hot: ModuleType, publishing: ModuleType, syncing: ModuleType) -> None:
    of_both = {"ACTIVE", "NOT_STORED", "OUTCOME_UNKNOWN", "Reply", "Taken", "Waiter"}
    for name in chosen.__all__:
        assert name in of_both or any(hasattr(room, name) for room in (hot, publishing, syncing)), name


def test_both_twins_have_the_same_classes() -> None:
    compiled = pytest.importorskip("nsqha.hot._publishing", reason="the extension is not built")
    for twin in (vars(_publishing_py)[name] for name in _publishing_py.__all__):
        for name in [n for n in vars(twin) if not n.startswith("_")] if inspect.isclass(twin) else []:
            assert hasattr(getattr(compiled, twin.__name__), name), f"{twin.__name__}.{name}"


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def test_the_stub_says_what_the_twin_says() -> None:
    stub = ast.parse((HERE / "_hot.pyi").read_text())
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    for name, node in functions.items():
        assert list(inspect.signature(getattr(_hot_py, name)).parameters) == parameters(node), name
    [ring] = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    methods = {node.name: node for node in ring.body if isinstance(node, ast.FunctionDef) and not node.decorator_list}
    for name, node in methods.items():
        assert list(inspect.signature(getattr(_hot_py.Ring, name)).parameters) == parameters(node), name
    public = {name for name in vars(_hot_py.Ring) if not name.startswith("_") and callable(getattr(_hot_py.Ring, name))}
    assert public == {name for name in methods if not name.startswith("_")}
