"""What all members logged around a moment, in one order: to see why a fault took as long as it did."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from tests.integration.cluster import Cluster

TOLD_BEFORE, TOLD_AFTER = 1.0, 4.0  # seconds around a fault
_LINE = re.compile(r"^\[\w+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) (.*)$")


def tell(cluster: Cluster, since: datetime, seconds_after: float = TOLD_AFTER) -> None:
    """Print it, with milliseconds from that moment."""
    lines = []
    for daemon in cluster.daemons:
        for text in daemon.log().splitlines():
            if found := _LINE.match(text):
                at = datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").astimezone(UTC)
                seconds = (at - since).total_seconds()
                if -TOLD_BEFORE <= seconds <= seconds_after:
                    lines.append((seconds, daemon.directory.name, found[2]))
    for seconds, name, text in sorted(lines):
        print(f"     {seconds * 1000:8.1f} {name:9s} {text}", flush=True)
