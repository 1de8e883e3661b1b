"""What is committed in deploy/ and docs/ is what `nsqha generate` would write."""

from __future__ import annotations

import pytest

from nsqha.cli import build_parser
from nsqha.cli.generate.command import GENERATORS
from nsqha.cli.generate.writing import differences
from tests.tidy.test_layers import ROOT


@pytest.mark.parametrize("what", GENERATORS)
def test_generated_files_are_fresh(what: str) -> None:
    files = GENERATORS[what].files(build_parser())
    committed = {path: text for path, text in files.items() if path.startswith(("deploy/", "docs/"))}
    assert not [path for path in committed if not (ROOT / path).exists()], f"run `nsqha generate {what}`"
    changed = differences(ROOT, committed)
    assert not changed, f"run `nsqha generate {what} --force`:\n" + "\n".join(changed.values())


def test_nothing_is_in_deploy_that_nobody_wrote() -> None:
    written = {path for generator in GENERATORS.values() for path in generator.files(build_parser())}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "deploy").rglob("*") if path.is_file()}
    assert there - written == {"deploy/README.md"}
