"""Publishes of one partition that are not written yet: runs of blank frames, each with somebody who waits for its end.

    publish -> add -> [the flush] -> take -> Taken, the next batch

A run is what one command brought, an MPUB whole; it is never split. What is taken together becomes one batch, at most
`BATCH_BYTES` of it unless a single run is larger. Bytes count in the node's budget from `add` until whoever took them
gives them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nsqha.server.budget import PublishBudget

BATCH_BYTES = 256 << 10  # merging stops here

# How every reason begins that a publish is answered with; the first is a promise that it may be sent again.
NOT_STORED = "not stored: "
OUTCOME_UNKNOWN = "outcome unknown: "


class Reply(Protocol):
    """Somebody who waits for the outcome of a publish."""

    def stored(self) -> None:
        """Committed."""

    def failed(self, why: str) -> None:
        """`why` begins with NOT_STORED or OUTCOME_UNKNOWN."""


Waiter = tuple[Reply, float]
"""Who waits, and since when on the loop's clock."""


@dataclass(slots=True)
class Taken:
    """Runs that go together, in the order in which they came."""

    runs: list[bytes]
    waiters: list[Waiter]  # one for each run
    delays: list[tuple[int, int]]  # (index of a run, delay ms) of deferred publishes
    size: int  # bytes, as the budget has them


class PublishQueue:
    """One partition's queue. `bytes_waiting` is kept by hand: it is asked for at each flush."""

    __slots__ = ("_budget", "_delays", "_waiters", "bytes_waiting", "runs")

    def __init__(self, budget: PublishBudget) -> None:
        self.runs: list[bytes] = []
        self.bytes_waiting = 0
        self._budget = budget
        self._waiters: list[Waiter] = []
        self._delays: list[tuple[int, int]] = []

    def add(self, frames: bytes, reply: Reply, since: float, delay_ms: int | None) -> None:
        """Put a run at the end."""
        if delay_ms is not None:
            self._delays.append((len(self.runs), delay_ms))
        self.runs.append(frames)
        self._waiters.append((reply, since))
        self.bytes_waiting += len(frames)
        self._budget.used += len(frames)

    def take(self) -> Taken:
        """The next batch's runs: all that wait, or as many as reach `BATCH_BYTES`."""
        if self.bytes_waiting <= BATCH_BYTES:
            return self.take_all()
        size = n = 0
        for run in self.runs:
            if n and size + len(run) > BATCH_BYTES:
                break
            size += len(run)
            n += 1
        return self._take_first(n, size)

    def take_all(self) -> Taken:
        taken = Taken(self.runs, self._waiters, self._delays, self.bytes_waiting)
        self.runs, self._waiters, self._delays, self.bytes_waiting = [], [], [], 0
        return taken

    def take_since(self, overdue: float) -> Taken:
        """The first ones, as far as all of them have waited since before `overdue`.

        Publishes of other nodes have waited longer than those in front of them may have; they wait for these.
        """
        n = next((n for n, (_, since) in enumerate(self._waiters) if since >= overdue), len(self._waiters))
        return self._take_first(n, sum(map(len, self.runs[:n])))

    def _take_first(self, n: int, size: int) -> Taken:
        taken = Taken(self.runs[:n], self._waiters[:n], [d for d in self._delays if d[0] < n], size)
        del self.runs[:n], self._waiters[:n]
        self._delays = [(index - n, delay) for index, delay in self._delays if index >= n]
        self.bytes_waiting -= size
        return taken
