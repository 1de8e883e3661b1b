"""Whether anything can be stored on a node: a stop and a failure count more than a full disk."""

from __future__ import annotations

from pathlib import Path

from nsqha.options import Options
from nsqha.server.node.availability import Availability


def availability(folder: Path, overfull: bool = False) -> tuple[Availability, list[bool]]:
    said = [overfull]
    return Availability(Options(data_path=str(folder), disk_low_bytes=0), lambda: said[0]), said


def test_a_change_of_the_disk_is_reported_once(tmp_path: Path) -> None:
    node, _ = availability(tmp_path)
    assert not node.look_at_disk() and node.refuses_publish() is None
    node.disk_low_bytes = 1 << 62
    assert node.look_at_disk() and not node.look_at_disk()
    why = node.refuses_publish()
    assert why is not None and why.startswith("disk low: ") and why.endswith(f"{1 << 62} required")
    node.disk_low_bytes = 0
    assert node.look_at_disk() and node.refuses_publish() is None


def test_deferred_messages_that_fill_the_memory_refuse_publishes_too(tmp_path: Path) -> None:
    node, overfull = availability(tmp_path)
    overfull[0] = True
    assert node.look_at_disk() and node.refuses_publish() is not None


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    node, _ = availability(tmp_path, overfull=True)
    node.look_at_disk()
    assert node.ends() is None and not node.ending and node.health() == "OK"
    failed = [check.name for check in node.checks("") if not check.ok]
    assert failed == ["disk_space"]


def test_a_failure_ends_the_node_and_a_stop_is_named_first(tmp_path: Path) -> None:
    node, _ = availability(tmp_path)
    node.failure = "EIO"
    assert node.ending and node.ends() == node.refuses_publish() == "the disk failed: EIO"
    assert node.health() == "NOK - EIO"
    assert [check.live for check in node.checks("") if not check.ok] == [True]
    node.exiting = True
    assert node.ends() == "exiting"
