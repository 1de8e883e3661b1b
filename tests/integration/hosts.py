"""Several hosts on this machine: network namespaces on one switch, with addresses of their own, that can be cut apart.

    with Network.made() as network:
        a, b = network.host("a"), network.host("b")       # Host: address, and what starts a process there
        network.cut("a", "b")                             # packets between them are lost, in silence
        network.heal()

This process is on the switch too, with an address of its own. A namespace lives as long as the process that holds it;
when these end, also with this process, the kernel removes namespaces, switch and addresses: nothing has to be cleaned.

A cut points both sides' neighbour entry for the other at a hardware address that nobody has. So what is sent goes
nowhere, as with a broken switch: no error, no reset, and connections that stand do not notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator

from tests.integration.servers import PR_SET_PDEATHSIG, Host, wait_until

CLONE_NEWNET = 0x40000000
NOBODY = "02:00:00:00:ff:ff"
PREFIX = "198.18"  # of RFC 2544: for tests of network devices, in use nowhere else
OURS = 254

_libc = ctypes.CDLL(None, use_errno=True)


class NotPossible(Exception):
    """This kernel, or what this process may do in it, has no namespaces or no switches."""


class Network:
    """The switch, and who is on it. Use `made`."""

    def __init__(self) -> None:
        self._subnet = f"{PREFIX}.{random.randrange(1, 255)}"
        self._leg = f"nsqha{os.getpid() % 1_000_000}"
        self._holders: list[subprocess.Popen[bytes]] = []
        self._hosts: dict[str, tuple[int, Host]] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._switch = 0

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Network]:
        """NotPossible says what is missing."""
        for program in ("ip", "nsenter"):
            if shutil.which(program) is None:
                raise NotPossible(f"there is no {program} program")
        network = cls()
        try:
            network._switch = network._namespace()
            network._run(network._switch, "ip link add switch type bridge")
            network._run(network._switch, "ip link set switch up")
            network._plug(network._leg, OURS, into=None)
            yield network
        finally:
            for holder in network._holders:
                holder.kill()
                holder.wait()
            # The kernel takes a moment to remove what was in them.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not os.path.exists(f"/sys/class/net/{network._leg}"), "the leg is gone", 10)

    def host(self, name: str) -> Host:
        """The host with this name, which is made if it is not there."""
        if name not in self._hosts:
            pid, number = self._namespace(), len(self._hosts) + 1
            self._plug("eth0", number, into=pid)
            self._hosts[name] = (number, Host(f"{self._subnet}.{number}", ("nsenter", f"--net=/proc/{pid}/ns/net")))
        return self._hosts[name][1]

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two hosts any more."""
        self._cuts.add((one, other))
        self._point(one, other, NOBODY)
        self._point(other, one, NOBODY)

    def cut_off(self, one: str, others: Iterable[str]) -> None:
        for other in others:
            if other != one:
                self.cut(one, other)

    def heal(self) -> None:
        """All cuts end."""
        for one, other in self._cuts:
            self._point(one, other, _hardware(self._hosts[other][0]))
            self._point(other, one, _hardware(self._hosts[one][0]))
        self._cuts.clear()

    def _point(self, at: str, to: str, hardware: str) -> None:
        host, target = self._hosts[at][1], self._hosts[to][1]
        command = f"ip neigh replace {target.ip} lladdr {hardware} dev eth0 nud permanent"
        _checked([*host.prefix, *command.split()])

    def _plug(self, device: str, number: int, *, into: int | None) -> None:
        """Connect a namespace, or this process's own, to the switch."""
        port = f"port{number}"
        target = into if into is not None else os.getpid()
        self._run(self._switch, f"ip link add {port} type veth peer name {device} netns {target}")
        self._run(self._switch, f"ip link set {port} master switch up")
        for command in (
            f"ip link set {device} address {_hardware(number)}",
            f"ip addr add {self._subnet}.{number}/24 dev {device}",
            f"ip link set {device} up",
        ):
            self._run(into, command)
        if into is not None:
            self._run(into, "ip link set lo up")

    def _namespace(self) -> int:
        """The process that holds a new one."""
        command = [shutil.which("sleep") or "sleep", "infinity"]
        try:
            holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_in_new_namespace)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotPossible(f"no network namespace may be made here: {error}") from None
        self._holders.append(holder)
        return holder.pid

    @staticmethod
    def _run(pid: int | None, command: str) -> None:
        prefix = [] if pid is None else ["nsenter", f"--net=/proc/{pid}/ns/net"]
        _checked([*prefix, *command.split()])


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _in_new_namespace() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


__all__ = ["Network", "NotPossible"]
