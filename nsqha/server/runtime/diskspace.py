"""How much room the file system of the data directory has."""

from __future__ import annotations

import os
from typing import NamedTuple


class Space(NamedTuple):
    """Of one file system."""

    free_bytes: int
    total_bytes: int


def of(path: str) -> Space:
    """Free is what an ordinary user may still write."""
    found = os.statvfs(path)
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
