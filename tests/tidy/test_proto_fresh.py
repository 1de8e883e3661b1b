"""The committed generated code is what `make proto` would write."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc_tools")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    # protoc finds the typing plugins by name on PATH.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    generate.generate(tmp_path / "generated")
    generate.install(tmp_path / "generated", tmp_path / "pb")
    committed = ROOT / "nsqha" / "pb"
    fresh = {p.relative_to(tmp_path / "pb"): p.read_text() for p in (tmp_path / "pb").rglob("*.py*")}
    there = {p.relative_to(committed): p.read_text() for p in committed.rglob("*.py*") if "__pycache__" not in p.parts}
    assert there == fresh, "run `make proto`"
