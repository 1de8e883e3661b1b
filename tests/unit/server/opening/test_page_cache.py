"""A page cache has one name as long as it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqha.server.opening import page_cache
from nsqha.server.opening.page_cache import boot_id, mount, page_cache_of, superblock


def test_a_folder_has_the_page_cache_of_its_file_system(tmp_path: Path) -> None:
    name = page_cache_of(str(tmp_path))
    assert name.startswith(boot_id())
    inside = tmp_path / "inside"
    inside.mkdir()
    assert page_cache_of(str(inside)) == name
    assert page_cache_of("/proc") != name


def test_the_superblock_is_known_by_its_folder_in_sysfs(tmp_path: Path) -> None:
    device = tmp_path / "devices/block/sdb1"
    device.mkdir(parents=True)
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/8:17").symlink_to(device)
    assert superblock("8:17", tmp_path) == ""
    (tmp_path / "fs/btrfs/features").mkdir(parents=True)
    assert superblock("8:17", tmp_path) == ""
    found = tmp_path / "fs/xfs/sdb1"
    found.mkdir(parents=True)
    assert superblock("8:17", tmp_path) == f"xfs-{found.stat().st_ino}"
    assert superblock("0:45", tmp_path) == ""  # no block device


def test_where_there_is_no_superblock_to_see_the_mount_counts(tmp_path: Path) -> None:
    assert mount("/proc").startswith("mount")
    assert mount("/proc") != mount(str(tmp_path))


def test_without_a_boot_id_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "BOOT_ID", tmp_path / "nothing")
    assert page_cache_of(str(tmp_path)) == ""
