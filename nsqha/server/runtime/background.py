"""Tasks that nobody waits for: what fails in one is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from nsqha.nsqlog import Log

log = Log("background")


class Background:
    """The background tasks of one owner. Without it the loop would hold them by weak references alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", "a background task failed", error=error)

    def cancel(self) -> None:
        """The owner stops."""
        for task in list(self._tasks):
            task.cancel()
