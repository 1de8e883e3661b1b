"""What the nodes of a cluster look like, once a second: memory, descriptors, and what the metadata say they lead.

A sample asks no node: it reads /proc of the process and the view of the metadata that this process watches. So it goes
on under any fault, and disturbs none.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.jepsen.history import AnyEvent, Led, Sample

if TYPE_CHECKING:
    from tests.integration.cluster import Cluster, Member

SECONDS = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """A thread that samples until it is closed."""

    def __init__(
        self,
        cluster: Cluster,
        record: Callable[[AnyEvent], None],
        now: Callable[[], float],
        *,
        pid_of: Callable[[Member], int | None] | None = None,
        figures: Callable[[Member], dict[str, float]] = lambda member: {},
    ) -> None:
        """`record` and `now` are those of the load. `pid_of`: of the daemon itself, where the process that was started
        is a wrapper around it; None: it does not run. `figures`: what else is sampled."""
        self._cluster = cluster
        self._record = record
        self._now = now
        self._pid_of = pid_of or pid
        self._figures = figures
        self._topics: set[str] = set()  # that were there
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(10)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._enough.wait(max(0.0, due - time.monotonic())):
            due = max(due + SECONDS, time.monotonic())
            self.look()

    def look(self) -> None:
        """One sample of each node."""
        led = self._led()
        deleted = self._deleted()
        for member in self._cluster.nodes:
            process = self._pid_of(member)
            rss, fds = usage(process)
            figures = self._figures(member)
            self._record(
                Sample(self._now(), member.name, rss, fds, led[member.name], figures, process or 0, deleted)
            )

    def _deleted(self) -> list[str]:
        """Topics that were there, and are not."""
        there = self._cluster.store.watch.view().topics.keys()
        self._topics |= there
        return sorted(self._topics - there)

    def _led(self) -> defaultdict[str, list[Led]]:
        """By name of the node; what nobody leads is missing."""
        view = self._cluster.store.watch.view()
        names = {uid: info.name for uid, info in view.nodes.items()}
        led: defaultdict[str, list[Led]] = defaultdict(list)
        for topic, versioned in view.topics.items():
            for number, meta in versioned.record.partitions.items():
                isr = sorted(names.get(uid, f"{uid:016x}") for uid in meta.isr)
                floor = 0 if meta.nothing_acked else meta.min_isr
                led[names.get(meta.leader, "")].append(Led(topic, number, meta.epoch, isr, len(meta.replicas), floor))
        return led


def pid(member: Member) -> int | None:
    return member.pid if member.running else None


def usage(process: int | None) -> tuple[int, int]:
    """Resident bytes and open descriptors; zeros for a process that is not there."""
    if process is None:
        return 0, 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        folder = Path(f"/proc/{process}")
        pages = int((folder / "statm").read_text().split()[1])
        return pages * PAGE_BYTES, len(os.listdir(folder / "fd"))
    return 0, 0
