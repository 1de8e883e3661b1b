"""A disk that breaks: a file with ext4 on a loop device, mounted in the namespaces of a host and nowhere else.

    with Disk.made(folder) as disk:
        node = Node(disk.at / "node")
        ...
        node.kill()
        disk.power_loss()                 # what was not synced is gone
        node.start()

What can be done to it, how it is healed, and what shows that it happened:

    power_loss     shutdown ioctl without a flush of the journal, unmounted and mounted: page cache and what the journal
                   had not committed are lost, as the kernel's own tests have it. A file that was not synced is gone.
    fill           one file takes what is free but a rest; `free` removes it. A write gets ENOSPC.
    read_only      the file system notices an error, with files open; `repair` unmounts, checks and mounts. EROFS.
    fail_data      the device ends, for the kernel, behind journal and metadata: an fsync of data gets EIO, and the next
                   one says that all is well, as Linux does; `work_again`.
    hang           whoever writes waits (FIFREEZE); `go_on`.
    snapshot       a copy of the disk at one moment; `put_back` makes it the disk again, as with a virtual machine that
                   is restored.

`at` is its root as everybody sees it, in the host or not: by the process that holds the mount. Who uses the disk has to
be dead before it is unmounted. The image is sparse; it lies in a folder of the caller's, and goes with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.jepsen.hosts.namespaces import MOUNTS, Namespaces, NotPossible, run

SIZE = 1 << 30  # sparse; a broker wants 256 MiB free
BLOCK = 4096
UNMOUNT_SECONDS = 20.0

_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/ext4.h
_WITHOUT_LOG_FLUSH = 2
_LOOP_SET_STATUS64, _LOOP_GET_STATUS64 = 0x4C04, 0x4C05
_LOOP_INFO_BYTES, _SIZE_LIMIT_AT = 232, 32  # struct loop_info64, linux/loop.h
PROGRAMS = ("mkfs.ext4", "dumpe2fs", "e2fsck", "mount", "umount", "losetup", "fsfreeze")


class Disk:
    """One file system. Use `made`."""

    def __init__(self, folder: Path, *, inside: Namespaces, size: int = SIZE) -> None:
        self.image = folder / "disk.img"
        self._inside = inside
        self._point = folder / "disk"
        self._point.mkdir(parents=True)
        self._freezer: subprocess.Popen[bytes] | None = None
        self._limited = False
        with self.image.open("wb") as file:
            file.truncate(size)
        # Metadata and journal in front, so that data can fail alone.
        layout = "packed_meta_blocks=1,lazy_itable_init=1,nodiscard"
        run("mkfs.ext4", "-q", f"-b{BLOCK}", "-m0", "-i65536", "-Jsize=16", "-E", layout, str(self.image))
        self._data_from = _first_free_block(self.image) * BLOCK
        self.device = ""
        self.mount()

    @classmethod
    @contextlib.contextmanager
    def made(cls, folder: Path, *, inside: Namespaces | None = None, size: int = SIZE) -> Iterator[Disk]:
        """On a host, or for everybody who knows its path. NotPossible says what is missing."""
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise NotPossible(f"there is no {missing[0]} program")
        with contextlib.ExitStack() as stack:
            holder = inside or stack.enter_context(Namespaces.held(MOUNTS))
            disk = cls(folder, inside=holder, size=size)
            try:
                yield disk
            finally:
                disk.close()

    @property
    def at(self) -> Path:
        return self._inside.root / self._point.relative_to("/")

    def mount(self) -> None:
        # An error of its metadata makes the file system read-only, as distributions have it.
        self._inside.run("mount", "-o", "loop,errors=remount-ro", str(self.image), str(self._point))
        self.device = self._source()

    def unmount(self) -> None:
        """Nobody uses it any more; who was killed just now is waited for. The page cache is gone with it."""
        deadline = time.monotonic() + UNMOUNT_SECONDS
        while True:
            try:
                self._inside.run("umount", str(self._point))
                return
            except NotPossible as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the disk is still in use: {error}") from None
                time.sleep(0.02)

    def remount(self) -> None:
        """The page cache is forgotten: what is read next comes from the disk."""
        self.unmount()
        self.mount()

    def close(self) -> None:
        """Whatever was done to it."""
        if not self._inside.held_now:
            return  # the kernel unmounts it
        self.go_on()
        self.work_again()
        with contextlib.suppress(AssertionError):
            self.unmount()

    # ---- power

    def power_loss(self) -> None:
        """Nobody runs on it. AssertionError unless a file that was not synced is gone."""
        self.shut_down()
        self.boot()

    def shut_down(self) -> None:
        """From now on it refuses everything, and what is not on the disk is lost. Then `boot`."""
        self._lost = self.at / f"unsynced-{secrets.token_hex(4)}"
        self._lost.write_bytes(os.urandom(BLOCK))
        folder = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _EXT4_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(folder)

    def boot(self) -> None:
        """It is mounted again after `shut_down`. AssertionError unless a file that was not synced is gone."""
        self.remount()
        kept = self._lost.read_bytes() if self._lost.exists() else b""
        assert not kept, f"{self._lost.name} has {len(kept)} bytes though nobody synced it"
        self._lost.unlink(missing_ok=True)

    # ---- space

    def fill(self, leave: int = 0) -> None:
        """Take all that is free, but about so many bytes."""
        with self._filler.open("ab") as filler:
            step = 1 << 30
            while (space := self.free_bytes() - leave) >= BLOCK and step >= BLOCK:
                size = os.fstat(filler.fileno()).st_size
                try:
                    os.posix_fallocate(filler.fileno(), size, min(step, space) // BLOCK * BLOCK)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    os.ftruncate(filler.fileno(), size)
                    step = min(step, space) // 2

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        found = os.statvfs(self.at)
        return found.f_bavail * found.f_frsize

    @property
    def _filler(self) -> Path:
        return self.at / "filler"

    # ---- errors

    def read_only(self) -> None:
        """What an error of the file system does; files that are open for writing stay so, and refuse."""
        name = os.path.basename(self.device)
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test\n")

    def repair(self) -> None:
        """Checked and mounted anew; nobody runs on it."""
        self.work_again()
        self.unmount()
        done = subprocess.run(["e2fsck", "-fy", str(self.image)], capture_output=True, text=True)
        assert done.returncode < 4, f"e2fsck: {done.stdout}{done.stderr}"  # 1 and 2: there was something to mend
        self.mount()

    def fail_data(self) -> None:
        """Data that are not in the page cache can be neither written nor read."""
        self._limit(self._data_from)
        self._limited = True

    def work_again(self) -> None:
        if self._limited:
            self._limit(0)
            self._limited = False

    def refuses(self) -> str:
        """How a small write and its fsync are refused: the name of the error; "" if they are not."""
        probe = self.at / f"probe-{secrets.token_hex(4)}"
        try:
            with probe.open("wb", buffering=0) as file:
                file.write(os.urandom(BLOCK))
                os.fsync(file.fileno())
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        return ""

    def _limit(self, size: int) -> None:
        """Where the device ends, for the kernel; 0: where the image does."""
        device = os.open(self.device, os.O_RDWR)
        try:
            info = bytearray(fcntl.ioctl(device, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_BYTES)))
            struct.pack_into("Q", info, _SIZE_LIMIT_AT, size)
            fcntl.ioctl(device, _LOOP_SET_STATUS64, bytes(info))
        finally:
            os.close(device)

    # ---- time

    def hang(self) -> None:
        """Whoever writes waits until `go_on`; what is written is on the disk."""
        # By a process that ends it when it hears nothing of this one any more: what is frozen outlives its mount.
        command = 'fsfreeze -f "$1" && echo hangs && { read -r _ || fsfreeze -u "$1"; }'
        self._freezer = subprocess.Popen(
            [*self._inside.prefix, "sh", "-c", command, "sh", str(self._point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is not for it
        )
        assert self._freezer.stdout is not None
        assert self._freezer.stdout.readline() == b"hangs\n", "the file system can not be frozen"

    def go_on(self) -> None:
        if self._freezer is not None:
            self._freezer.communicate()
            self._freezer = None

    def snapshot(self, name: str = "snapshot") -> Path:
        """A copy of the disk as it is now, with all that was written; writers wait meanwhile."""
        copy = self.image.with_name(f"{name}.img")
        self.hang()
        try:
            run("cp", "--sparse=always", str(self.image), str(copy))
        finally:
            self.go_on()
        return copy

    def put_back(self, snapshot: Path) -> None:
        """The disk is what it was then. Nobody runs on it."""
        self.unmount()
        run("cp", "--sparse=always", str(snapshot), str(self.image))
        self.mount()

    def _source(self) -> str:
        for line in Path(f"/proc/{self._inside.pid}/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[4] == str(self._point):
                return fields[fields.index("-") + 2]
        raise AssertionError(f"{self._point} is not mounted")


def _first_free_block(image: Path) -> int:
    said = run("dumpe2fs", str(image))
    found = re.search(r"Free blocks: (\d+)", said)
    assert found is not None, said
    return int(found[1])
