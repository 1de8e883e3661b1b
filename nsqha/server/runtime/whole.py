"""Work that ends once it has begun, whatever becomes of the task that waits for it.

Changes of files and of the journal belong together in steps; a task that is cancelled between two of them would leave
a log that is neither the one nor the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; a cancellation is passed on when it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen: whoever was cancelled does not want it
        raise asyncio.CancelledError
    return task.result()
