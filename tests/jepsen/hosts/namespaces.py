"""Namespaces of Linux that live as long as the process that holds them: nothing that is made in them has to be cleaned.

    with Namespaces.held(NETWORK | MOUNTS) as inside:
        inside.run("ip", "link", "set", "lo", "up")
        subprocess.Popen([*inside.prefix, "some", "daemon"])
        (inside.root / "mnt/file").read_text()          # what is mounted there, as seen from here

The holder dies with this process (also by SIGKILL); when everybody who runs in them is gone too, the kernel removes
interfaces and mounts. Mounts made in them are seen nowhere else, and those made elsewhere later are not seen there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.integration.servers import PR_SET_PDEATHSIG, wait_until

NETWORK = 0x40000000  # CLONE_NEWNET
MOUNTS = 0x00020000  # CLONE_NEWNS
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_OPTIONS = {NETWORK: ("--net", "net"), MOUNTS: ("--mount", "mnt")}

_libc = ctypes.CDLL(None, use_errno=True)


class NotPossible(Exception):
    """This kernel, or what this process may do in it, does not have what is asked for."""


class Namespaces:
    """A process that does nothing but be in them."""

    def __init__(self, kinds: int) -> None:
        for program in ("sleep", "nsenter"):
            if shutil.which(program) is None:
                raise NotPossible(f"there is no {program} program")
        try:
            self._holder = subprocess.Popen(
                ["sleep", "infinity"], stdin=subprocess.DEVNULL, preexec_fn=lambda: _enter_new(kinds)
            )
        except (OSError, subprocess.SubprocessError):  # the child can not say why
            raise NotPossible("no namespaces may be made here, which takes root (CAP_SYS_ADMIN)") from None
        self.pid = self._holder.pid
        self._boots = 0
        entered = [f"{option}=/proc/{self.pid}/ns/{name}" for kind, (option, name) in _OPTIONS.items() if kinds & kind]
        self.prefix = ("nsenter", *entered)

    @classmethod
    @contextlib.contextmanager
    def held(cls, kinds: int) -> Iterator[Namespaces]:
        """NotPossible says what is missing."""
        namespaces = cls(kinds)
        try:
            yield namespaces
        finally:
            namespaces.end()

    @property
    def root(self) -> Path:
        """The root of their file systems, for processes that are not in them."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def held_now(self) -> bool:
        return self._holder.poll() is None

    def run(self, *command: str, given: str | None = None) -> str:
        """What a command in them says. NotPossible if it fails."""
        return run(*self.prefix, *command, given=given)

    def boot(self) -> str:
        """Who looks from now on finds that the kernel was started anew (MOUNTS): the boot id that is read there."""
        boot_id = str(uuid.uuid4())
        if self._boots:
            self.run("umount", BOOT_ID)
        self._boots += 1
        with tempfile.NamedTemporaryFile("w", prefix="nsqha-boot-") as file:  # a mount keeps what is unlinked
            file.write(f"{boot_id}\n")
            file.flush()
            self.run("mount", "--bind", file.name, BOOT_ID)
        return boot_id

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


class TimeNamespace:
    """What is started in it has other monotonic clocks, as on a machine that was started earlier or later."""

    def __init__(self, offset_seconds: int) -> None:
        """NotPossible if this kernel, or its `unshare`, has none. A clock can not be before its zero."""
        given = ("unshare", "--time", f"--monotonic={offset_seconds}", f"--boottime={offset_seconds}")
        self.offset_seconds = offset_seconds
        self._holder = subprocess.Popen(
            [*given, "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        try:
            wait_until(self._there, "a time namespace", 10)
        except AssertionError:
            self.end()
            raise NotPossible("there are no time namespaces here") from None
        self.prefix = ("nsenter", f"--time=/proc/{self._holder.pid}/ns/time_for_children")

    def _there(self) -> bool:
        if self._holder.poll() is not None:
            raise NotPossible(f"no time namespace can be {self.offset_seconds} s off here")
        return monotonic_offset(self._holder.pid) == self.offset_seconds

    def end(self) -> None:
        """Who is in it stays there."""
        self._holder.kill()
        self._holder.wait()


def monotonic_offset(pid: int) -> int | None:
    """Seconds by which the monotonic clock of a process is off; None: there is no such process, or no such file."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines():
            clock, seconds, _ = line.split()
            if clock in ("monotonic", "1"):
                return int(seconds)
    return None


def run(*command: str, given: str | None = None) -> str:
    """What a command says. NotPossible with its error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, input=given)
    if done.returncode:
        why = next(iter(done.stderr.strip().splitlines()), f"status {done.returncode}")
        raise NotPossible(f"{' '.join(command)}: {why}")
    return done.stdout


def _enter_new(kinds: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if _libc.unshare(kinds):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if kinds & MOUNTS and _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
