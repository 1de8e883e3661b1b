"""gRPC's own threads get a core only as far as the loop leaves it.

grpcio reads its sockets and parses their frames in threads of its C library, four to seven of them. Where a stranger
keeps all of them busy, the scheduler gives each as much of a core as the loop, which serves everybody else: a publish
then waited for 0.12 to 0.15 s (p99, beside `tests.jepsen.flood_latency`), and for 0.04 s with this. The threads run at
a lower priority than the process, those that are started later, too: they inherit it from the thread that starts them.
On a machine with a core to spare nothing changes.

Such a thread that has slept runs soon after it is woken, on a busy machine as well, so leases are kept.
"""

from __future__ import annotations

import os
from pathlib import Path

NAMES = frozenset(("event_engine", "lifeguard"))  # as /proc has them; the second one starts the others
LOWER = 15  # nice values: about a thirtieth of the loop's share
LOWEST = 19


def give_way_to_the_loop(tasks: Path = Path("/proc/self/task")) -> int:
    """Lower the priority of the threads that gRPC has; how many. A system that has no such list, or refuses, leaves
    them as they are."""
    lowered = 0
    try:
        wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + LOWER, LOWEST)
        threads = list(tasks.iterdir())
    except OSError:
        return 0
    for thread in threads:
        try:
            if (thread / "comm").read_text().strip() in NAMES:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), wanted)
                lowered += 1
        except OSError:
            continue  # it has ended, or a sandbox does not allow it
    return lowered
