"""Conversations recorded from real nsqd and nsqlookupd, replayed against ours.

Every `must` and `should` passes. A `quirk` may differ if docs/nsq-compat.md names the case and says why.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT.parent / "shared" / "golden"
COMMANDS = Path(sys.executable).parent

LINE = re.compile(r"^(PASS|FAIL|SKIP)\s+(\S+)\s+(\S+)")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    if not (GOLDEN / "run_golden.py").exists():
        pytest.skip("the recorded conversations are not beside this checkout")
    done = subprocess.run(
        [
            *(sys.executable, str(GOLDEN / "run_golden.py"), str(GOLDEN / "cases"), "-j", "4", "--slow", "2"),
            *("--nsqd", str(COMMANDS / "nsqd"), "--nsqlookupd", str(COMMANDS / "nsqlookupd")),
        ],
        capture_output=True,
        check=False,
    )
    output = done.stdout.decode("utf-8", "replace")
    print(output)  # shown when a test fails
    found = {m[3]: m[1] for line in output.splitlines() if (m := LINE.match(line))}
    assert found, f"the runner said nothing that is understood: {output[-2000:]} {done.stderr[-2000:]!r}"
    return found


def levels() -> dict[str, str]:
    cases = [json.loads(path.read_text()) for path in (GOLDEN / "cases").glob("*.json")]
    return {case["name"]: case["level"] for case in cases}


@pytest.mark.timeout(900)
def test_every_must_and_should_passes(results: dict[str, str]) -> None:
    wanted = {name for name, level in levels().items() if level in ("must", "should")}
    assert wanted
    assert not {name: results.get(name) for name in sorted(wanted) if results.get(name) != "PASS"}


@pytest.mark.timeout(900)
def test_a_quirk_that_differs_is_explained(results: dict[str, str]) -> None:
    explained = (ROOT / "docs" / "nsq-compat.md").read_text()
    differ = {name for name, level in levels().items() if level == "quirk" and results.get(name) != "PASS"}
    assert not {name for name in differ if f"`{name}`" not in explained}
