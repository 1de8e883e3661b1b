"""What the process uses, told by the system."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from nsqha.server.runtime.measures import open_files, open_files_told


def test_an_open_file_is_counted_whoever_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in (True, False):
        if not told:
            monkeypatch.setattr(os, "stat", lambda path: SimpleNamespace(st_size=0))
            assert open_files_told() == 0, "kernels before Linux 6.2 have 0 there"
        before = open_files()
        with open(os.devnull, "rb"):
            assert open_files() == before + 1


def test_a_system_without_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> object:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "stat", missing)
    monkeypatch.setattr(os, "listdir", missing)
    assert open_files() == open_files_told() == 0
