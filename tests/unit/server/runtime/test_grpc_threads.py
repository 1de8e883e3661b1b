"""gRPC's threads run at a lower priority than the process; whatever is in the way leaves them as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsqha.server.runtime.grpc_threads import LOWER, LOWEST, give_way_to_the_loop


def tasks(folder: Path, names: dict[int, str]) -> Path:
    """As /proc/self/task."""
    for thread, name in names.items():
        (folder / str(thread)).mkdir()
        if name:
            (folder / str(thread) / "comm").write_text(f"{name}\n")
    return folder


@pytest.mark.parametrize(("ours", "theirs"), [(0, LOWER), (-5, LOWER - 5), (10, LOWEST)])
def test_they_are_lowered_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: int, theirs: int
) -> None:
    lowered: dict[int, int] = {}
    monkeypatch.setattr(os, "getpriority", lambda which, who: ours)
    monkeypatch.setattr(os, "setpriority", lambda which, who, nice: lowered.update({who: nice}))
    threads = {7: "nsqd", 8: "event_engine", 9: "lifeguard", 10: "disk syncs_0", 11: ""}
    assert give_way_to_the_loop(tasks(tmp_path, threads)) == 2
    assert lowered == {8: theirs, 9: theirs}


def test_a_sandbox_that_refuses_leaves_them_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, nice: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert give_way_to_the_loop(tasks(tmp_path, {8: "event_engine"})) == 0
    assert give_way_to_the_loop(tmp_path / "none") == 0
