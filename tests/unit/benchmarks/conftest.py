"""These tests need the compiled load generator; it is built here as `make bench` builds it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket, socketpair
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the benchmark is no part of the installed package

from benchmarks.build import CannotBuild, build

if TYPE_CHECKING:
    from benchmarks.loadgen import Engine

try:
    build()
except CannotBuild as refusal:
    collect_ignore_glob = ["test_*.py"]
    print(f"tests/unit/benchmarks is left out: {refusal}", file=sys.stderr)


@pytest.fixture
def engine() -> Iterator[Engine]:
    from benchmarks.loadgen import Engine

    made = Engine()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[socket, socket]]]:
    """Makes (client's end, server's end). The test plays the server; nothing moves unless the engine runs."""
    opened: list[socket] = []

    def make() -> tuple[socket, socket]:
        ours, theirs = socketpair()
        theirs.setblocking(False)
        opened.extend((ours, theirs))
        return ours, theirs

    yield make
    for each in opened:
        each.close()
