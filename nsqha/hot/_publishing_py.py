"""The pure-Python twin of `_publishing.pyx`, and the description of what both do: from a PUB to its OK.

    bytes -> Publisher.take -> PublishQueue (a run of blank frames, a Slot) -> a batch -> tell_stored -> Slot -> Replies

Replies to one client are sent in the order of its commands. The outcome of a publish is not known when the command is
read, so each publish takes a `Slot`; ready slots at the front are sent. Messages and heartbeats are not replies and do
not wait for it.

A run is the messages of one command, or of many PUBs in a row; an MPUB is one run. It is never split. Bytes count in
the node's budget from `add` until the caller of `take` gives them back.

Invariants: one frame per command that has a reply, in command order; after a fatal error nothing but it is written. A
run is taken once, with its waiter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Protocol

from nsqha.hot._hot_py import pub_run

__all__ = ["PublishQueue", "Publisher", "Replies", "Slot", "Taken", "tell_stored"]

OK = b"\0\0\0\6\0\0\0\0OK"
_alone = count(1)
_OKS = [OK * n for n in range(256)]


class Client(Protocol):
    """The client that `Replies` writes to."""

    def heed_unread(self) -> None:
        """Called when a reply was written although the client is behind with reading."""

    def publish_failed(self, command: str, why: str) -> bytes:
        """Count a failed publish; return its error frame."""

    def close(self) -> None:
        """Close the connection after everything written has been sent."""


class Budget(Protocol):
    """The number of bytes of publishes under way, and its limit."""

    used: int
    bytes_max: int


# Every reason of a failed publish begins with one of these; the first one promises that it may be sent again.
NOT_STORED = "not stored: "
OUTCOME_UNKNOWN = "outcome unknown: "


class Reply(Protocol):
    """Receives the outcome of a publish."""

    def stored(self) -> None:
        """Committed."""

    def failed(self, why: str) -> None:
        """`why` begins with NOT_STORED or OUTCOME_UNKNOWN."""


Waiter = tuple[Reply, float]
"""The receiver of an outcome, and since when it waits on the loop's clock."""


class Slot:
    """The place of a reply in its client's queue; a publish's outcome fills it."""

    __slots__ = ("_close", "_command", "_data", "_ready", "_replies")

    def __init__(self, replies: Replies, command: str, data: bytes, ready: bool = False, close: bool = False) -> None:
        self._replies = replies
        self._command = command
        self._data = data
        self._ready = ready
        self._close = close  # close the client after writing

    def stored(self) -> None:
        self._ready = True
        self._replies._settle(self)

    def failed(self, why: str) -> None:
        self._data = self._replies._client.publish_failed(self._command, why)
        self._ready = self._close = True
        self._replies._settle(self)


class Replies:
    """The pending replies to one client, in command order.

    `write` writes to its socket; `behind`: the client does not read what is written. The client may change both.
    `on_empty` is called when no reply is pending any more.
    """

    __slots__ = ("_alone", "_client", "_slots", "behind", "on_empty", "write")

    def __init__(self, client: Client, write: Callable[[bytes], object]) -> None:
        self.write = write
        self.behind = False
        self.on_empty: Callable[[], None] | None = None
        self._alone = 0  # the number of the last batch that this client had to itself
        self._client = client
        self._slots: deque[Slot] = deque()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def publish(self, command: str, count: int) -> Slot:
        """Add a slot for a publish; `count` commands in a row share one outcome, with a reply each if they are PUB."""
        if command == "PUB" and count != 1:
            slot = Slot(self, command, _OKS[count] if count < 256 else OK * count)
        else:
            slot = Slot(self, command, OK)
        self._slots.append(slot)
        return slot

    def reply(self, data: bytes) -> None:
        """Send a frame after the replies of all earlier commands."""
        if self._slots:
            self._slots.append(Slot(self, "", data, True))
        else:
            self._send(data)

    def fatal(self, data: bytes) -> None:
        """Send an error frame after the replies of all earlier commands, then close."""
        if self._slots:
            self._slots.append(Slot(self, "", data, True, True))
        else:
            self.write(data)
            self._client.close()

    def clear(self) -> None:
        """Drop all replies; the client is gone."""
        self._slots.clear()

    def _send(self, data: bytes) -> None:
        self.write(data)
        if self.behind:
            self._client.heed_unread()

    def _settle(self, slot: Slot) -> None:
        """A slot became ready: write all replies that have no unready one before them, in one piece."""
        slots = self._slots
        if not slots or slots[0] is not slot:
            return
        out = []
        closing = False
        while slots and slots[0]._ready and not closing:
            first = slots.popleft()
            out.append(first._data)
            closing = first._close
        data = out[0] if len(out) == 1 else b"".join(out)
        if closing:
            slots.clear()
            self.write(data)
            self._client.close()
            return
        self._send(data)
        if not slots and self.on_empty is not None:
            self.on_empty()


def tell_stored(waiters: list[Waiter], on_error: Callable[[Exception], None]) -> None:
    """Report to all waiters that their publishes are committed; an error of one goes to `on_error`, the others go on.

    Backwards, so that all but the first of a client's replies are ready when it writes: one system call."""
    for reply, _ in reversed(waiters):
        try:
            reply.stored()
        except Exception as error:
            on_error(error)


class Taken(NamedTuple):
    """Runs that were taken together, in the order in which they came."""

    runs: list[bytes]
    waiters: list[Waiter]  # one for each run
    delays: list[tuple[int, int]]  # (index of a run, delay ms) of deferred publishes
    size: int  # bytes, as they count in the budget


class PublishQueue:
    """Publishes of one partition that are not written yet. `schedule` is called at the first `add`, and at the next
    one after `scheduled` was reset.

    A client that was alone in the last batch, and now has the queue to itself, probably waits for each OK: what it
    publishes is not worth gathering. Its `Publisher` calls `write_lone(run, slot)` first, which writes it at once and
    answers the slot, or returns False: then the run is added as any other.
    """

    __slots__ = (
        "_alone",
        "_budget",
        "_delays",
        "_schedule",
        "_waiters",
        "bytes_waiting",
        "closed",
        "runs",
        "scheduled",
        "write_lone",
    )

    def __init__(self, budget: Budget, schedule: Callable[[], object]) -> None:
        self.runs: list[bytes] = []
        self.bytes_waiting = 0
        self.scheduled = False
        self.closed = False  # for `Publisher`: the queue takes nothing more
        self.write_lone: Callable[[bytes, Slot], bool] | None = None
        self._budget = budget
        self._alone = 0  # as in the replies of the client that was alone in the last batch; 0: there were others
        self._schedule = schedule
        self._waiters: list[Waiter] = []
        self._delays: list[tuple[int, int]] = []

    def add(self, frames: bytes, reply: Reply, since: float, delay_ms: int | None) -> None:
        """Add a run at the end."""
        if delay_ms is not None:
            self._delays.append((len(self.runs), delay_ms))
        self.runs.append(frames)
        self._waiters.append((reply, since))
        self.bytes_waiting += len(frames)
        self._budget.used += len(frames)
        if not self.scheduled:
            self.scheduled = True
            self._schedule()

    @property
    def full(self) -> bool:
        """Whether the node's budget is used up."""
        return self._budget.used > self._budget.bytes_max

    def take(self, most: int) -> Taken:
        """Take the runs of the next batch: all, or those of at most `most` bytes together, but at least one."""
        if self.bytes_waiting <= most:
            return self.take_all()
        size = n = 0
        for run in self.runs:
            if n and size + len(run) > most:
                break
            size += len(run)
            n += 1
        return self._take_first(n, size)

    def take_all(self) -> Taken:
        taken = Taken(self.runs, self._waiters, self._delays, self.bytes_waiting)
        if taken.runs:  # else it is a batch of events
            reply = taken.waiters[0][0]
            self._alone = 0
            if len(taken.runs) == 1 and type(reply) is Slot:
                self._alone = reply._replies._alone = next(_alone)  # no reference: neither keeps the other in memory
        self.runs, self._waiters, self._delays, self.bytes_waiting = [], [], [], 0
        return taken

    def take_since(self, overdue: float) -> Taken:
        """Take runs from the front while they have waited since before `overdue`.

        Publishes of other nodes may have waited longer than those before them in the queue, and still wait for these.
        """
        n = next((n for n, (_, since) in enumerate(self._waiters) if since >= overdue), len(self._waiters))
        return self._take_first(n, sum(map(len, self.runs[:n])))

    def _take_first(self, n: int, size: int) -> Taken:
        self._alone = 0
        taken = Taken(self.runs[:n], self._waiters[:n], [d for d in self._delays if d[0] < n], size)
        del self.runs[:n], self._waiters[:n]
        self._delays = [(index - n, delay) for index, delay in self._delays if index >= n]
        self.bytes_waiting -= size
        return taken


class Publisher:
    """Publishes runs of PUBs of one connection to one queue, while the connection sends nothing else.

    `line`: the command line that the session has found valid, with its newline. `counts`: messages by topic. `time`:
    the loop's clock. `on_full`: called when the node's budget is used up.
    """

    __slots__ = ("_counts", "_line", "_on_full", "_queue", "_replies", "_size_max", "_time", "_topic", "taken_at")

    def __init__(
        self,
        line: bytes,
        topic: str,
        size_max: int,
        queue: PublishQueue,
        replies: Replies,
        counts: dict[str, int],
        time: Callable[[], float],
        on_full: Callable[[], object],
    ) -> None:
        self.taken_at = 0.0  # on the loop's clock, read once per tick
        self._line = line
        self._topic = topic
        self._size_max = size_max
        self._queue = queue
        self._replies = replies
        self._counts = counts
        self._time = time
        self._on_full = on_full

    def take(self, data: bytes) -> bool:
        """Publish `data` if it is nothing but whole PUBs with this line; False: it is not, and nothing was done."""
        if self._queue.closed:
            return False
        end, count, frames = pub_run(data, 0, len(data), self._line, self._size_max)
        if end != len(data) or not count:
            return False
        slot = self._replies.publish("PUB", count)
        self._counts[self._topic] += count
        self.taken_at = self._time()
        queue = self._queue
        alone = queue._alone and queue._alone == self._replies._alone and not queue.runs and not queue.scheduled
        if alone and queue.write_lone is not None and queue.write_lone(frames, slot):
            return True
        queue.add(frames, slot, self.taken_at, None)
        if queue.full:
            self._on_full()
        return True
