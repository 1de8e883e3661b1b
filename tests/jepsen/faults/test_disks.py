"""Disks that fail, and are mended."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.jepsen.faults.disks import failing


def test_a_disk_works_again_before_its_broker_is_waited_for() -> None:
    done: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with process:

        def killed() -> None:
            done.append("waited for")
            assert process.wait(20) < 0

        disk = SimpleNamespace(
            fail_data=lambda: done.append("fails"),
            refuses=lambda: "EIO",
            work_again=lambda: done.append("works"),
            repair=lambda: done.append("repaired"),
        )
        victim: Any = SimpleNamespace(name="n1", directory=Path("n1"), pid=process.pid, _process=process, kill=killed)
        victim.spawn = lambda: done.append("started")
        deployment: Any = SimpleNamespace(disks={"n1": disk})
        injected = failing(lambda *_: [victim], error="EIO")(deployment, random.Random(1))
        injected.heal()
    assert done == ["fails", "works", "waited for", "repaired", "started"]
    assert "it went on" in injected.proof()
