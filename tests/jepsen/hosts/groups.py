"""A control group: what the processes of one host get of the machine, and the kernel's counters of what they did not.

    with Group.made("n1") as group:
        node = subprocess.Popen([*group.prefix, "nsqd", ...])     # it and its children are in the group
        group.cpu(0.05)                                           # a twentieth of a core
        ...
        assert group.throttled() > 0
        group.cpu(None)

    cpu        a quota of 100 ms periods           throttled    periods in which somebody had to wait; cpu_used
    memory     a limit; who needs more is killed   oom_kills    processes that were
    freeze     nobody is scheduled                 frozen       whether nobody is
    slow       writes per second to a device       writes       that were done to it

Version 1, with a hierarchy for each controller, or version 2, where all are files of one folder. The names of groups
have the process that made them: those of processes that are gone are removed when the next one is made.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.integration.servers import wait_until
from tests.jepsen.hosts.namespaces import NotPossible

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "memory", "freezer", "blkio")
PERIOD_US = 100_000
EMPTY_SECONDS = 10.0
_NAME = re.compile(r"nsqha-(\d+)-")


class Group:
    """One of them, in all hierarchies that there are. Use `made`."""

    def __init__(self, name: str, root: Path = ROOT, *, controllers: Iterable[str] = CONTROLLERS) -> None:
        """`controllers`: who is in others of version 1 stays where it is for them."""
        self._unified = (root / "cgroup.controllers").exists()
        own = f"nsqha-{os.getpid()}-{name}"
        if self._unified:
            with contextlib.suppress(OSError):  # already, or only some
                (root / "cgroup.subtree_control").write_text("+cpu +memory +io")
            self._folders = dict.fromkeys(controllers, root / own)
        else:
            # often two controllers are one folder, with a link for each name
            self._folders = {each: (root / each).resolve() / own for each in controllers if (root / each).is_dir()}
        if not self._folders:
            raise NotPossible("there are no control groups")
        for folder in {*self._folders.values()}:
            _sweep(folder.parent)
            try:
                folder.mkdir()
            except OSError as error:
                raise NotPossible(f"no control group may be made here: {error}") from None

    @classmethod
    @contextlib.contextmanager
    def made(cls, name: str, root: Path = ROOT) -> Iterator[Group]:
        """NotPossible if this machine has none."""
        group = cls(name, root)
        try:
            yield group
        finally:
            group.close()

    @property
    def prefix(self) -> tuple[str, ...]:
        """What starts a command in it."""
        files = " ".join(str(folder / "cgroup.procs") for folder in sorted({*self._folders.values()}))
        return ("sh", "-c", f'for f in {files}; do echo $$ >$f || exit 1; done; exec "$@"', "sh")

    def add(self, pid: int) -> None:
        """A process that runs, with all its threads."""
        for folder in {*self._folders.values()}:
            (folder / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        folder = next(iter(self._folders.values()))
        return [int(word) for word in (folder / "cgroup.procs").read_text().split()]

    # ---- cpu

    def cpu(self, cores: float | None) -> None:
        """So much of the machine at most; None: all of it."""
        quota = "" if cores is None else str(max(1000, round(cores * PERIOD_US)))
        if self._unified:
            self._write("cpu", "cpu.max", f"{quota or 'max'} {PERIOD_US}")
        else:
            self._write("cpu", "cpu.cfs_period_us", str(PERIOD_US))
            self._write("cpu", "cpu.cfs_quota_us", quota or "-1")

    def throttled(self) -> int:
        """Periods in which it was out of its quota, since it was made."""
        return self._field("cpu", "cpu.stat", "nr_throttled")

    def cpu_used(self) -> float:
        """Seconds of a core that those in it have used, since it was made."""
        if self._unified:
            return self._field("cpu", "cpu.stat", "usage_usec") / 1e6
        return int(self._read("cpuacct", "cpuacct.usage")) / 1e9

    # ---- memory

    def memory(self, limit: int | None) -> None:
        """Bytes, the page cache that it makes included; None: as many as there are."""
        value = str(limit) if limit is not None else "max" if self._unified else "-1"
        self._write("memory", "memory.max" if self._unified else "memory.limit_in_bytes", value)

    def memory_used(self) -> int:
        name = "memory.current" if self._unified else "memory.usage_in_bytes"
        return int(self._read("memory", name))

    def oom_kills(self) -> int:
        """Processes that were killed for want of memory."""
        return self._field("memory", "memory.events" if self._unified else "memory.oom_control", "oom_kill")

    # ---- time

    def freeze(self) -> None:
        """Returns when nobody in it runs any more."""
        self._freeze(True)
        wait_until(self.frozen, "the group is frozen")

    def thaw(self) -> None:
        self._freeze(False)

    def frozen(self) -> bool:
        if self._unified:
            return self._field("freezer", "cgroup.events", "frozen") == 1
        return self._read("freezer", "freezer.state").strip() == "FROZEN"

    def _freeze(self, frozen: bool) -> None:
        if self._unified:
            self._write("freezer", "cgroup.freeze", "1" if frozen else "0")
        else:
            self._write("freezer", "freezer.state", "FROZEN" if frozen else "THAWED")

    # ---- disk

    def slow(self, device: str, writes: float | None) -> None:
        """So many writes a second to a device at most; None: as many as it takes.

        Where the disk is shared with others only what the group itself writes and syncs is held back."""
        numbers, limit = _numbers(device), None if writes is None else max(1, round(writes))
        if self._unified:
            self._write("blkio", "io.max", f"{numbers} wiops={limit or 'max'}")
        else:
            self._write("blkio", "blkio.throttle.write_iops_device", f"{numbers} {limit or 0}")

    def writes(self, device: str) -> int:
        """To a device, since it was made."""
        numbers = _numbers(device)
        if self._unified:
            found = re.search(rf"^{numbers} .*\bwios=(\d+)", self._read("blkio", "io.stat"), re.MULTILINE)
        else:
            said = self._read("blkio", "blkio.throttle.io_serviced")
            found = re.search(rf"^{numbers} Write (\d+)", said, re.MULTILINE)
        return int(found[1]) if found is not None else 0

    # ---- files

    def _write(self, controller: str, name: str, text: str) -> None:
        (self._of(controller) / name).write_text(text)

    def _read(self, controller: str, name: str) -> str:
        return (self._of(controller) / name).read_text()

    def _field(self, controller: str, name: str, field: str) -> int:
        for line in self._read(controller, name).splitlines():
            if line.split()[0] == field:
                return int(line.split()[1])
        raise NotPossible(f"{self._of(controller) / name} has no {field}")

    def _of(self, controller: str) -> Path:
        if controller not in self._folders:
            raise NotPossible(f"there is no {controller} controller")
        return self._folders[controller]

    def close(self) -> None:
        """Who is in it is let go."""
        with contextlib.suppress(OSError, NotPossible):
            self.thaw()
        for folder in {*self._folders.values()}:
            _remove(folder, EMPTY_SECONDS)


def descriptors(pid: int, limit: int | None) -> int:
    """How many a process may have open from now on, and how many it has; None: as many as ever it may."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard if limit is None else min(limit, hard), hard))
    return len(os.listdir(f"/proc/{pid}/fd"))


def _numbers(device: str) -> str:
    found = os.stat(device).st_rdev
    return f"{os.major(found)}:{os.minor(found)}"


def _sweep(folder: Path) -> None:
    """Remove groups of processes that are gone."""
    for group in folder.glob("nsqha-*"):
        made_by = _NAME.match(group.name)
        if made_by is not None and not os.path.exists(f"/proc/{made_by[1]}"):
            _remove(group, 0)


def _remove(folder: Path, seconds: float) -> None:
    """An empty one is removed; processes that are just being killed leave it soon, others are moved up."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
