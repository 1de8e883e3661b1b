"""What is compiled needs no newer C library than the tag of its wheels says (`make dist` asks auditwheel the same)."""

from __future__ import annotations

import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import nsqha.hot

GLIBC_MINOR_MAX = 17  # manylinux_2_17
COMPILED = sorted(Path(nsqha.hot.__file__).parent.glob("*" + EXTENSION_SUFFIXES[0]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="versions of symbols are glibc's")
@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.name.split(".")[0])
def test_no_symbol_is_younger_than_the_tag(path: Path) -> None:
    wanted = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())}
    assert max(wanted, default=(2, 0)) <= (2, GLIBC_MINOR_MAX)
