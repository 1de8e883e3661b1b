"""Where a cache lies, and what makes its borders near."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsqha.cursor.cache import lmdb_cache, lmdb_partition, lmdb_proof, lmdb_tables


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cursors.lmdb")


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers fill, transactions end and heads break after a few rows."""
    monkeypatch.setattr(lmdb_partition, "ROOM", 3)
    monkeypatch.setattr(lmdb_tables, "ROWS_PER_TXN", 2)
    monkeypatch.setattr(lmdb_cache, "ROWS_PER_TXN", 2)
    monkeypatch.setattr(lmdb_cache, "SLICE_ROWS", 2)
    monkeypatch.setattr(lmdb_cache, "BURIED_ROWS", 6)
    monkeypatch.setattr(lmdb_tables, "PIECE_BYTES", 64)


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is written, but nobody waits for the disk."""
    monkeypatch.setattr(lmdb_tables.Tables, "sync", lambda tables: lmdb_proof.prove(tables._env.path()))
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
