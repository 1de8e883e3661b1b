"""A small disk for one daemon: a file system in memory that only its processes see, and that a test can fill.

    with SmallDisk.mounted(folder, megabytes=256) as disk:
        Node(.., host=disk.host)      # started there; `folder` is the disk
        disk.fill(leave=16 << 20)
        disk.free()

It is mounted in a namespace that a process holds; when that ends, also with the test, the kernel removes both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.integration.devnode import die_with_parent
from tests.integration.servers import LOOPBACK, Host, wait_until
from tests.jepsen.hosts.network import NotPossible


class SmallDisk:
    """The disk, and how a process gets to see it. Use `mounted`."""

    def __init__(self, holder: int, folder: Path) -> None:
        self.host = Host(LOOPBACK.ip, ("nsenter", f"--mount=/proc/{holder}/ns/mnt", "--"))
        self._seen_from_here = Path(f"/proc/{holder}/root{folder}")

    @classmethod
    @contextlib.contextmanager
    def mounted(cls, folder: Path, *, megabytes: int) -> Iterator[SmallDisk]:
        """NotPossible says what is missing."""
        for program in ("unshare", "nsenter", "mount"):
            if shutil.which(program) is None:
                raise NotPossible(f"there is no {program} program")
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        script = 'mount -t tmpfs -o size="$1"m tmpfs "$2" && touch "$2"/.mounted && exec sleep infinity'
        holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", str(megabytes), str(folder)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        try:
            disk = cls(holder.pid, folder)
            wait_until(lambda: holder.poll() is not None or disk._is_there(), "the disk is mounted")
            if holder.poll() is not None:
                assert holder.stderr is not None
                raise NotPossible(f"no file system may be mounted here: {holder.stderr.read().decode().strip()}")
            yield disk
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()

    def _is_there(self) -> bool:
        mark = self._seen_from_here / ".mounted"
        if not mark.exists():
            return False
        mark.unlink()
        return True

    def fill(self, *, leave: int) -> None:
        """Until only so many bytes are free."""
        found = os.statvfs(self._seen_from_here)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)

    def free(self) -> None:
        """What filled it is gone."""
        self._filler.unlink()

    def empty(self) -> None:
        """Everything on it is lost."""
        for path in self._seen_from_here.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def _filler(self) -> Path:
        return self._seen_from_here / "filler"
