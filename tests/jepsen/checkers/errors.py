"""Which errors a broker may log under which faults. What no fault of the run explains makes the run red.

A broken invariant is not in the table: no fault explains it (`partition_stopped`, `state_diverged`, `task_failed`, ..).
"""

from __future__ import annotations

from collections.abc import Iterable

DISKS = "DL"  # letters of faults: disks, and limits of memory and descriptors
ETCD = "ENPD"  # of etcd itself, and what keeps a node from it
EXPLAINED = {
    "channel_stuck": "D",
    "clock_skew": "C",
    "close_failed": DISKS,
    "committed_cut": "D",
    "copy_stopped": "D",
    "cursor_cache_lost": DISKS,
    "disk_hangs": "DLPE",
    "disk_refuses": DISKS,
    "disk_slow": "DLPE",
    "events_lost": "D",
    "given_up": "D",
    "log_damaged": "D",
    "metadata_failed": ETCD,
    "metadata_in_doubt": "DE",
    "metadata_stale": "DE",
    "old_directory": "D",
    "partitions_missing": "DE",
    "poisoned": DISKS,
    "possible_loss": "D",
    "push_stopped": "D",
    "record_unreadable": "DE",
    "replica_unusable": DISKS,
    "scrub_damage": "D",
    "scrub_damage_more": "D",
    "sound_again": "D",
    "state_unknown": "D",
}


def unexplained(errors: Iterable[tuple[str, str]], faults: Iterable[str]) -> list[str]:
    """Of (event, line), those that none of these faults (ids) explains."""
    letters = {fault[0] for fault in faults}
    return [f"{event}: {line}" for event, line in errors if not letters & set(EXPLAINED.get(event, ""))]
