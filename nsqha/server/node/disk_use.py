"""What fills the disk of a node although nobody waits for it: finished messages that are kept for replay.

Counted in whole file pairs below the log start that channels, holds and the pump would allow, so that the figure is
what a shorter retention frees. Only for partitions that are led here: their leader knows the channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqha.commitlog.reading.lookup import PairInfo
    from nsqha.server.partition.partition import Partition
    from nsqha.server.partition.topic import Topic

TOPICS_SHOWN = 3
MINUTE_NS = 60 * 10**9
MB = 1000**2
UNITS = ((1000**4, "TB"), (1000**3, "GB"), (MB, "MB"))


def finished_pairs(partition: Partition, wall_ns: int) -> list[PairInfo]:
    """The file pairs of this partition that only its retention keeps."""
    log = partition.log
    limit = partition.cursors.retention.log_start_limit(log.next_timestamp(wall_ns))
    return [pair for pair in log.pairs if pair.size and pair.end.offset <= limit]


def kept_for_replay(topics: Iterable[Topic], wall_ns: int) -> str:
    """Which topics keep most of that, and the command that frees it; empty: there is nothing."""
    kept: dict[str, list[PairInfo]] = {}
    for topic in topics:
        if topic.led and not topic.ephemeral:
            kept[topic.name] = [pair for partition in topic.led for pair in finished_pairs(partition, wall_ns)]
    sizes = {name: sum(pair.size for pair in pairs) for name, pairs in kept.items() if pairs}
    total = sum(sizes.values())
    if total < MB:
        return ""
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    shown = ", ".join(f"{name} ({_size(sizes[name])})" for name in names[:TOPICS_SHOWN])
    more = f" and {len(names) - TOPICS_SHOWN:,} more topics" if len(names) > TOPICS_SHOWN else ""
    first = names[0]
    return (
        f"finished messages that --retention keeps for replay fill {_size(total)}: {shown}{more}; "
        f"`nsqha topic set {first} --retention {half_age_minutes(kept[first], wall_ns)}m` frees about half of {first}"
    )


def half_age_minutes(pairs: Iterable[PairInfo], wall_ns: int) -> int:
    """So old is the newer half of the bytes, at least a minute: what is older may go."""
    newest_first = sorted(pairs, key=lambda pair: -pair.newest_ns)
    half, age_ns = sum(pair.size for pair in newest_first) / 2, 0
    for pair in newest_first:
        half -= pair.size
        age_ns = wall_ns - pair.newest_ns
        if half < 0:
            break
    return max(age_ns // MINUTE_NS, 1)


def _size(n: int) -> str:
    for unit, name in UNITS:
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n:,} bytes"
