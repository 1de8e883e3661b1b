"""What nodes call durable, looked at on their disks: bytes that a power loss now could not take (I10).

    log       below `local_durable`, segment and commitlog are on the disk as the process sees them, and so are the
              names of the files; looked at when it rises, and in the last two pairs when a log is opened
    journal   no promise is acted upon while something of the journal is not on the disk
    removal   a node takes its name off a tombstone when no file of the topic can come back to it

A log that lies about itself is otherwise noticed only where the page cache goes before anybody else writes the same
file, and no other replica has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from nsqha.commitlog.journal import JOURNAL
from nsqha.errors import LogCorrupt

if TYPE_CHECKING:
    from nsqha.commitlog.files.pairs import Pair
    from nsqha.commitlog.log import PartitionLog
    from nsqha.election.model import Tombstone
    from tests.sim.node import SimNode
    from tests.sim.storage import Inode, SimStorage

Key = tuple[int, int]

PAIRS_RECOVERED = 2  # what recovery syncs and reads; the ones before were synced when they were full


class Durability:
    """Of all nodes of one cluster."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Key], tuple[PartitionLog, int]] = {}  # log, below what it was looked at

    def log(self, node: SimNode, key: Key, log: PartitionLog) -> str | None:
        """What a log calls durable and the disk has not."""
        seen = self._seen.get((node.name, key))
        durable = min(log.local_durable, log.end.log_id)
        if seen is not None and seen == (log, durable):
            return None
        first = log.files.pairs[-PAIRS_RECOVERED:][0].first.log_id if seen is None or seen[0] is not log else seen[1]
        self._seen[node.name, key] = log, durable
        for pair, low, high in _parts(log, max(first, log.start.log_id), durable):
            try:
                begin = log.entry(low).position - pair.position
                end = log.entry(high - 1).end_position - pair.position
            except (LogCorrupt, OSError):
                continue  # damaged: what is in its place comes from another replica
            slots = pair.slot(low), pair.slot(high - 1) + ENTRY_BYTES
            for kind, (start, stop) in ((SEGMENT, (begin, end)), (COMMITLOG, slots)):
                if why := _not_on_disk(node.storage, pair.path(kind), start, stop):
                    return f"I10 {node.name} {key}: [{low}, {high}) is called durable, and {why}"
        return None

    def journal(self, node: SimNode) -> str | None:
        """What of the journal is not on the disk."""
        assert node.journal is not None
        why = _not_on_disk(node.storage, f"{node.options.data_path}/{JOURNAL}", 0, node.journal._file.end)
        return f"I2 {node.name} acts on a promise, and {why}" if why else None

    def removed(self, nodes: Iterable[SimNode], tombstone: Tombstone) -> Iterator[str]:
        """Files of a deleted topic on nodes that say they have none."""
        folder = f"/{tombstone.name}-{tombstone.uid:016x}/"
        for node in nodes:
            for path in sorted({*node.storage._names, *node.storage._disk_names}):
                if folder in path:
                    yield f"{node.name} has no more of {tombstone.name}, it says, and {path} may be there"


def _parts(log: PartitionLog, first: int, end: int) -> Iterator[tuple[Pair, int, int]]:
    """[first, end) by pairs of files."""
    while first < end:
        pair = log.files.pair_of(first)
        i = log.files.pairs.index(pair)
        high = min(end, log.files.pairs[i + 1].first.log_id) if i + 1 < len(log.files.pairs) else end
        yield pair, first, high
        first = high


def _not_on_disk(storage: SimStorage, path: str, start: int, stop: int) -> str | None:
    inode: Inode | None = storage._names.get(path)
    if inode is None or storage._disk_names.get(path) is not inode:
        return f"the name {path} is not synced"
    if inode.disk[start:stop] != inode.now[start:stop]:
        return f"[{start}, {stop}) of {path} is not on the disk"
    return None
