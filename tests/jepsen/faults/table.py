"""All kinds of faults, by id; and which of them are meant by words like `N1,P1-leader,P`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from tests.jepsen.faults import clocks, damage, disks, etcd, links, lone, membership, network, overload, processes
from tests.jepsen.faults.fault import FaultKind

ROOMS = (network, links, processes, etcd, disks, damage, clocks, membership, overload)
FAULTS: dict[str, FaultKind] = {kind.id: kind for room in ROOMS for kind in room.KINDS}
LONE_FAULTS: dict[str, FaultKind] = {kind.id: kind for kind in lone.KINDS}  # of a node without a cluster


def chosen(words: Iterable[str], table: Mapping[str, FaultKind] = MappingProxyType(FAULTS)) -> list[FaultKind]:
    """The kinds with these ids, families (`P1`) or letters (`P`); ValueError names a word that is none."""
    found: dict[str, FaultKind] = {}
    for word in words:
        some = [kind for kind in table.values() if word in (kind.id, kind.family, kind.family.rstrip("0123456789"))]
        if not some:
            raise ValueError(f"there is no fault {word}; there are {', '.join(table)}")
        found.update((kind.id, kind) for kind in some)
    return list(found.values())


def possible(kinds: Iterable[FaultKind], here: Collection[str], sync: str) -> tuple[list[FaultKind], list[str]]:
    """Those that this machine can do and this sync mode promises something under, and why not the others."""
    able: list[FaultKind] = []
    others: list[str] = []
    for kind in kinds:
        missing = sorted(kind.needs - set(here))
        if missing:
            others.append(f"{kind.id} needs {', '.join(missing)}")
        elif sync not in kind.syncs:
            others.append(f"{kind.id} promises nothing with sync={sync}")
        else:
            able.append(kind)
    return able, others
