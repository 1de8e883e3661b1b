"""The audit as messages of a topic, for those who keep it elsewhere: one JSON object each.

An action never waits for its record. Records wait here, at most WAITING_MAX, and are published together; what the topic
does not take is counted (`lost`) and said, and is in the log all the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from nsqha import hot
from nsqha.errors import NsqhaError
from nsqha.nsqlog import Logger
from nsqha.server.runtime.rare_warnings import RareWarnings

WAITING_MAX = 1000
AT_ONCE = 100

logger = Logger("audit")

Publish = Callable[[str, bytes], Awaitable[None]]


class AuditTopic:
    """The way of the records into one topic."""

    def __init__(self, topic: str, publish: Publish) -> None:
        """`publish` stores frames as one unit, wherever the topic is led, and creates it; NsqhaError if not."""
        self.lost = 0
        self._topic = topic
        self._publish = publish
        self._waiting: deque[bytes] = deque()
        self._came = asyncio.Event()
        self._said = RareWarnings(logger, "audit_lost")

    def put(self, record: bytes) -> None:
        """Take a record; it never waits and raises nothing."""
        if len(self._waiting) >= WAITING_MAX:
            self._lose(1, "too many records wait already")
            return
        self._waiting.append(record)
        self._came.set()

    async def run(self) -> None:
        """Publish what comes, until it is cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                some = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
                try:
                    await self._publish(self._topic, b"".join(map(hot.frame, some)))
                except (NsqhaError, OSError) as error:
                    self._lose(len(some), str(error))

    def _lose(self, records: int, why: str) -> None:
        self.lost += records
        self._said.warning("the audit topic %s does not take %d records: %s", self._topic, records, why)
