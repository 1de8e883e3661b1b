"""A written batch until it is committed, and telling those who wait for it; and for publishes that never became one.

A publisher that can not be told keeps no other one from its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from nsqha import hot
from nsqha.commitlog.entry import Entry
from nsqha.errors import Unavailable
from nsqha.hot import Waiter
from nsqha.nsqlog import Log

log = Log("partition")


class Outstanding:
    """A written batch that is not committed yet, and who waits for it."""

    __slots__ = ("data", "done", "entry", "size", "waiters", "written_at")

    def __init__(
        self,
        entry: Entry,
        data: bytearray,
        waiters: list[Waiter],
        done: list[asyncio.Future[None]],
        written_at: float,
        size: int,
    ) -> None:
        self.entry = entry
        self.data = data
        self.waiters = waiters
        self.done = done  # end when its events are applied
        self.written_at = written_at
        self.size = size  # what it has of the budget

    def committed(self) -> None:
        """Tell everybody."""
        hot.tell_stored(self.waiters, _not_told)
        if self.done:
            settle(self.done)


def refuse(waiters: Iterable[Waiter], why: str) -> None:
    """Tell publishers that nothing was stored, or that nobody knows; `why` says which."""
    for reply, _ in waiters:
        try:
            reply.failed(why)
        except Exception as error:
            _not_told(error)


def settle(futures: Iterable[asyncio.Future[None]], why: str | None = None) -> None:
    """End those that have not been given up. `why`: what they wait for will not come."""
    for future in futures:
        if future.done():
            continue
        if why is None:
            future.set_result(None)
        else:
            future.set_exception(Unavailable(why))


def settle_behind(batches: Sequence[Outstanding], futures: list[asyncio.Future[None]]) -> None:
    """There is nothing more to write for these: they end with what is written, the last batch included."""
    if batches:
        batches[-1].done += futures
    else:
        settle(futures)


def _not_told(error: Exception) -> None:
    log.error("reply_failed", "a publisher could not be answered", error=error)
