"""What this machine can do, found out by doing it once, and the one line that says what is missing.

here = capabilities()
if missing := lacking({"namespaces", "disks"}): print(missing)
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.jepsen.hosts.disks import Disk
from tests.jepsen.hosts.firewall import Drop, Firewall
from tests.jepsen.hosts.groups import Group
from tests.jepsen.hosts.namespaces import NETWORK, Namespaces, NotPossible, TimeNamespace
from tests.jepsen.hosts.network import Network

DISK_BYTES = 64 << 20


def _namespaces() -> None:
    with Network.made() as network:
        network.host("probe")


def _disks() -> None:
    with tempfile.TemporaryDirectory(prefix="nsqha-probe-") as folder, Disk.made(Path(folder), size=DISK_BYTES) as disk:
        disk.power_loss()


def _firewall() -> None:
    with Network.made() as network:
        network.host("probe")
        Firewall(network).drop(Drop(target="probe", port=1, fraction=0.5)).heal()


def _taps() -> None:
    with Namespaces.held(NETWORK) as inside:
        inside.run("ip", "tuntap", "add", "dev", "tap0", "mode", "tap")


def _groups() -> None:
    with Group.made("probe") as group:
        group.cpu(0.5)
        group.memory(1 << 30)
        group.throttled()
        group.oom_kills()


def _time_namespaces() -> None:
    TimeNamespace(3600).end()


CAPABILITIES: dict[str, Callable[[], None]] = {
    "namespaces": _namespaces,  # hosts, and cuts between them
    "disks": _disks,
    "firewall": _firewall,  # losses of a port or a fraction
    "links": _taps,
    "groups": _groups,
    "time namespaces": _time_namespaces,
}


@functools.cache
def why_not(capability: str) -> str:
    """Why this machine does not have it; empty: it does."""
    if os.geteuid() != 0:
        return "this is not root"
    try:
        CAPABILITIES[capability]()
    except (NotPossible, OSError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def capabilities() -> frozenset[str]:
    return frozenset(each for each in CAPABILITIES if not why_not(each))


def lacking(needs: Iterable[str]) -> str:
    """One line: what is missing of these, and why; empty if all of it is here."""
    reasons: dict[str, list[str]] = {}
    for each in sorted(needs):
        if reason := why_not(each):
            reasons.setdefault(" ".join(reason.split()), []).append(each)
    return "; ".join(f"no {', '.join(each)}: {reason}" for reason, each in reasons.items())
