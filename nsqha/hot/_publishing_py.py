"""The pure-Python twin of `_publishing.pyx`, and the description of what both do: from a PUB to its OK.

    bytes -> Publisher.take -> PublishQueue (a run of blank frames, a Slot) -> a batch -> tell_stored -> Slot -> Replies

Replies to one client are sent in the order of its commands. The outcome of a publish is not known when the command is
read, so each publish takes a `Slot`; ready slots at the front are sent. Messages and heartbeats are not replies and do
not wait for it.

A run is the messages of one command, or of many PUBs in a row; an MPUB is one run. It is never split. Bytes count in
the node's budget from `add` until the caller of `take` gives them back.

    add -> next batch (up to `most` bytes) -> take
      +--> a lane for each source ----^

Runs that the next batch has no room for wait in lanes, one for each source, so that a source that floods the queue
delays the others by one batch or two. Sources take turns (deficit round robin): a turn is some bytes of a batch, and a
run that is larger waits until the turns of its source add up to it. A source that has nothing waiting goes before those
in the ring with its first turn, in up to half of each batch; the ring has at least one run of each batch.

Invariants: one frame per command that has a reply, in command order; after a fatal error nothing but it is written. A
run is taken once, with its waiter. Runs of one source are taken in order. A batch costs what it takes, however much
waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Protocol

from nsqha.hot._hot_py import pub_run

__all__ = ["PublishQueue", "Publisher", "Replies", "Slot", "Taken", "tell_stored"]

OK = b"\0\0\0\6\0\0\0\0OK"
FIRST_TURNS = 16  # in a batch: a source that had nothing waiting may take so much
TURNS = 256  # in a batch: a turn in the ring; small, so that runs leave about as they came, and memory is read in order
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
    """Receives the outcome of a publish. It may have a `source`: publishes of one source keep their order, and have a
    share of a batch of their own. Those without one are of one source together."""

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


Entry = tuple[bytes, Waiter, int | None]
"""A run, its waiter, and its delay (ms)."""


class Lane:
    """Runs of one source that the next batch has no room for."""

    __slots__ = ("credit", "runs", "source")

    def __init__(self, source: object, credit: int) -> None:
        self.source = source
        self.credit = credit  # bytes that it may take in this turn
        self.runs: deque[Entry] = deque()


class Lanes:
    """The lanes of one queue. A lane whose last run was overdue stays until its turn."""

    __slots__ = ("_first", "_fresh", "_most", "_of", "_ring", "_size", "_taken", "_turn_bytes", "bytes", "runs")

    def __init__(self, most: int) -> None:
        self.runs = 0  # in all lanes
        self.bytes = 0
        self._most = most
        self._first = max(1, most // FIRST_TURNS)
        self._turn_bytes = max(1, most // TURNS)
        self._of: dict[object, Lane] = {}
        self._fresh: deque[Lane] = deque()  # of sources that had nothing waiting
        self._ring: deque[Lane] = deque()  # of all others
        self._taken: list[Entry] = []  # for the batch that is being filled
        self._size = 0  # of that batch

    def __bool__(self) -> bool:
        return bool(self._of)

    def all(self) -> list[Entry]:
        return [entry for lane in self._of.values() for entry in lane.runs]

    def add(self, run: bytes, waiter: Waiter, delay_ms: int | None) -> None:
        reply = waiter[0]
        source = reply._replies if isinstance(reply, Slot) else getattr(reply, "source", None)
        lane = self._of.get(source)
        if lane is None:
            lane = self._of[source] = Lane(source, self._first)
            (self._fresh if len(run) <= self._first else self._ring).append(lane)
        lane.runs.append((run, waiter, delay_ms))
        self.runs += 1
        self.bytes += len(run)

    def fill(self, size: int) -> list[Entry]:
        """Take what goes into a batch that has `size` bytes; one run at least, if these are 0."""
        self._size = size
        while self._fresh and self._size < self._most // 2:
            self._turn(self._fresh.popleft(), 0)
        least = 0 if size else len(self._taken) + 1
        while self._ring and self._turn(self._ring.popleft(), least):
            pass
        return self._end()

    def _turn(self, lane: Lane, least: int) -> bool:
        """The turn of one source. False: its next run has no room in a batch that has `least` runs from lanes; it
        keeps its turn."""
        runs = lane.runs
        while runs and (size := len(runs[0][0])) <= lane.credit:
            if len(self._taken) >= least and self._size + size > self._most:
                self._ring.appendleft(lane)
                return False
            lane.credit -= size
            self._take(lane)
        if runs:
            lane.credit += self._turn_bytes
            self._ring.append(lane)
        else:
            del self._of[lane.source]
        return True

    def take_since(self, overdue: float) -> list[Entry]:
        """Take the first ones of each source, as long as they have waited since before `overdue`."""
        for lane in self._of.values():
            while lane.runs and lane.runs[0][1][1] < overdue:
                self._take(lane)
        return self._end()

    def _take(self, lane: Lane) -> None:
        entry = lane.runs.popleft()
        size = len(entry[0])
        self.runs -= 1
        self.bytes -= size
        self._size += size
        self._taken.append(entry)

    def _end(self) -> list[Entry]:
        taken, self._taken = self._taken, []
        return taken


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
        "_lanes",
        "_most",
        "_runs",
        "_schedule",
        "_waiters",
        "bytes_waiting",
        "closed",
        "scheduled",
        "write_lone",
    )

    def __init__(self, budget: Budget, schedule: Callable[[], object], most: int) -> None:
        """`most`: bytes of a batch; one run may be larger."""
        self.bytes_waiting = 0
        self.scheduled = False
        self.closed = False  # for `Publisher`: the queue takes nothing more
        self.write_lone: Callable[[bytes, Slot], bool] | None = None
        self._budget = budget
        self._most = most
        self._alone = 0  # as in the replies of the client that was alone in the last batch; 0: there were others
        self._schedule = schedule
        self._runs: list[bytes] = []  # of the next batch
        self._waiters: list[Waiter] = []
        self._delays: list[tuple[int, int]] = []
        self._lanes = Lanes(most)  # empty while the next batch has room

    @property
    def count(self) -> int:
        """Runs that wait."""
        return len(self._runs) + self._lanes.runs

    @property
    def runs(self) -> list[bytes]:
        """The runs that wait. Costs as much as they are."""
        return [*self._runs, *(run for run, _, _ in self._lanes.all())]

    def add(self, frames: bytes, reply: Reply, since: float, delay_ms: int | None) -> None:
        """Add a run at the end."""
        if self._lanes or (self._runs and self.bytes_waiting + len(frames) > self._most):
            self._lanes.add(frames, (reply, since), delay_ms)
        else:
            self._put(frames, (reply, since), delay_ms)
        self.bytes_waiting += len(frames)
        self._budget.used += len(frames)
        if not self.scheduled:
            self.scheduled = True
            self._schedule()

    def _put(self, run: bytes, waiter: Waiter, delay_ms: int | None) -> None:
        """Add a run to the next batch."""
        if delay_ms is not None:
            self._delays.append((len(self._runs), delay_ms))
        self._runs.append(run)
        self._waiters.append(waiter)

    @property
    def full(self) -> bool:
        """Whether the node's budget is used up."""
        return self._budget.used > self._budget.bytes_max

    def take(self) -> Taken:
        """Take the runs of the next batch: all, or those of at most `most` bytes together. The first one of the ring
        may be larger than what is left of the batch."""
        if self._lanes:
            self._put_all(self._lanes.fill(self.bytes_waiting - self._lanes.bytes))
        return self._take_next()

    def _put_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._put(*entry)

    def take_all(self) -> Taken:
        lanes, self._lanes = self._lanes, Lanes(self._most)
        self._put_all(lanes.all())
        return self._take_next()

    def _take_next(self) -> Taken:
        taken = Taken(self._runs, self._waiters, self._delays, self.bytes_waiting - self._lanes.bytes)
        if taken.runs:  # else it is a batch of events
            reply = taken.waiters[0][0]
            self._alone = 0
            if self.count == 1 and type(reply) is Slot:
                self._alone = reply._replies._alone = next(_alone)  # no reference: neither keeps the other in memory
        self._runs, self._waiters, self._delays, self.bytes_waiting = [], [], [], self._lanes.bytes
        return taken

    def take_since(self, overdue: float) -> Taken:
        """Take runs from the front while they have waited since before `overdue`: of the next batch, and then of each
        source.

        Publishes of other nodes may have waited longer than those before them in the queue, and still wait for these.
        """
        waiters = self._waiters
        n = next((n for n, (_, since) in enumerate(waiters) if since >= overdue), len(waiters))
        later = self._runs[n:], waiters[n:], [(index - n, delay) for index, delay in self._delays if index >= n]
        del self._runs[n:], waiters[n:]
        self._delays = [delay for delay in self._delays if delay[0] < n]
        if not later[0]:
            self._put_all(self._lanes.take_since(overdue))
        size = sum(map(len, self._runs))
        taken = Taken(self._runs, waiters, self._delays, size)
        self._alone = 0
        self.bytes_waiting -= size
        self._runs, self._waiters, self._delays = later
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
        alone = queue._alone and queue._alone == self._replies._alone and not queue.count and not queue.scheduled
        if alone and queue.write_lone is not None and queue.write_lone(frames, slot):
            return True
        queue.add(frames, slot, self.taken_at, None)
        if queue.full:
            self._on_full()
        return True
