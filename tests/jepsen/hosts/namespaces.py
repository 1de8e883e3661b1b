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

from tests.integration.servers import PR_SET_PDEATHSIG

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
