"""Topics and channels that another node of the cluster deleted a moment ago.

nsqadmin sends a deletion to every leader of a topic. The first one deletes it in the whole cluster, so the others
answer that it is done, and not that there is no such topic or channel.
"""

from __future__ import annotations

import asyncio

SECONDS = 10.0
NAMES_MAX = 10_000  # more deletions than that within these seconds answer 404 as they would a moment later


class DeletedElsewhere:
    """Names of topics, and of channels as (topic, channel)."""

    def __init__(self) -> None:
        self._until: dict[str | tuple[str, str], float] = {}  # oldest first

    def add(self, name: str | tuple[str, str]) -> None:
        now = asyncio.get_running_loop().time()
        self._until.pop(name, None)
        self._until[name] = now + SECONDS
        while len(self._until) > NAMES_MAX or self._until[next(iter(self._until))] < now:
            del self._until[next(iter(self._until))]

    def __contains__(self, name: object) -> bool:
        until = self._until.get(name)  # type: ignore[call-overload]
        return until is not None and asyncio.get_running_loop().time() < until
