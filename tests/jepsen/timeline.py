"""What happened to the deployment in a run, as JSON lines: faults when they come and go, samples of each node.

    {"t": 12.4, "process": "suite", "f": "fault", "type": "invoke", "value": {"n": 3, "id": "N1", "what": "n2 is cut"}}
    {"t": 17.1, "process": "suite", "f": "fault", "type": "ok", "value": {"n": 3, "id": "N1", "proof": "31 lost"}}
    {"t": 18.0, "process": "n1", "f": "sample", "type": "ok", "value": {"rate": 412, "epoch": 4, "isr": 3, "fds": 88}}

`t` is seconds since the run began, of the monotonic clock that all namespaces share.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.jepsen.deployment import Deployment

SAMPLE_SECONDS = 1.0
PAGE = os.sysconf("SC_PAGE_SIZE")


class Timeline:
    """The file, which faults and samples are written to by any thread."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self.now = now
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def fault(self, type_: str, **value: object) -> None:
        """`type_`: invoke, ok, or fail for one that did not bite."""
        self.record("suite", "fault", type_, value)

    def record(self, process: str, f: str, type_: str, value: Mapping[str, object]) -> None:
        line = json.dumps({"t": round(self.now(), 3), "process": process, "f": f, "type": type_, "value": value})
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class Sampler:
    """A thread that looks at every node once a second. It starts no process: one would end with the thread."""

    def __init__(self, deployment: Deployment, timeline: Timeline, oks: Callable[[], int]) -> None:
        """`oks`: how many publishes have been OK'd."""
        self._deployment = deployment
        self._timeline = timeline
        self._oks = oks
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        before = self._oks()
        while not self._enough.wait(SAMPLE_SECONDS):
            now = self._oks()
            epoch, isr = self._deployment.epoch_and_isr()
            shared = {"rate": round((now - before) / SAMPLE_SECONDS), "epoch": epoch, "isr": isr}
            before = now
            for node in self._deployment.nodes:
                with contextlib.suppress(OSError, AssertionError, ValueError):  # it has just been killed
                    self._timeline.record(node.name, "sample", "ok", {**shared, **usage(node.pid)})


def usage(pid: int) -> dict[str, Any]:
    """Memory in bytes and open descriptors of a process."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return {"rss": resident, "fds": len(os.listdir(f"/proc/{pid}/fd"))}
