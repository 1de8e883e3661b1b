"""The deferred messages of a channel as its leader sees them: the committed set and what changed since.

A change (deferred, deferred again, finished) counts for the leader at once, is written with the next progress event and
becomes part of the committed set when that event is applied. In between, it is in the overlay here:

    put/finish -> changes, unsent -> take_unsent -> in a batch on its way -> settled: the committed set has it

Losing the overlay in a crash is harmless: nothing in it moved a committed floor. An ephemeral channel writes nothing:
its set is its own and changed directly (`direct`).

**By due time.** Two sources, the committed set (in its own order, read in slices behind a mark) and a heap of overlay
changes, feed one queue of what is due. An entry of the queue is only a hint; `due` hands out one whose message is still
deferred for that time. So a change needs to undo nothing, it only has to make sure that the message is hinted again:
by the heap while it is in the overlay, and by pulling the mark back when it is committed behind it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from nsqha.cursor.deferred.dead import DEAD_FROM, dead_in, is_dead
from nsqha.cursor.deferred.deferred_set import BEFORE_ALL, COUNT_ROWS, Deferred, DeferredSet, DueKey

_SLICE = 256
_FEW = 1000
_NEVER = 1 << 63


@dataclass(slots=True)
class DeferredChange:
    """What became of one offset. `ref` None: finished. `fresh`: the committed set does not hold the offset."""

    ref: Deferred | None
    fresh: bool

    @property
    def weight(self) -> int:
        """What it adds to the size of the committed set."""
        return int(self.fresh) if self.ref is not None else int(self.fresh) - 1


class DeferredOverlay:
    """Deferred messages, committed or about to be."""

    __slots__ = (
        "_changes",
        "_dead",
        "_direct",
        "_extra",
        "_heap",
        "_mark",
        "_next",
        "_ready",
        "_unsent",
        "_waiting_from",
        "committed",
        "put_back",
    )  # fmt: skip

    def __init__(self, committed: DeferredSet, *, direct: bool = False) -> None:
        self.committed = committed
        self._direct = direct
        self._changes: dict[int, DeferredChange] = {}
        self._unsent: dict[int, None] = {}
        self._extra = 0  # the sum of all weights
        self._heap: list[DueKey] = []  # of changes that put; stale ones are passed over
        self._ready: deque[DueKey] = deque()
        self._mark = BEFORE_ALL  # the committed set has been read up to here
        self._dead: int | None = None  # how many are dead letters; None: nobody has asked yet
        # Of what is not committed: deferred after it was finished; by which change on its way, None: not written yet.
        self.put_back: dict[int, DeferredChange | None] = {}
        self._waiting_from = 0  # only dead letters have lower offsets
        following = committed.next_due(BEFORE_ALL)
        self._next = _NEVER if following is None else following  # nothing behind the mark is due before this

    # ---- asking

    def __len__(self) -> int:
        return len(self.committed) + self._extra

    def __contains__(self, offset: int) -> bool:
        return self.get(offset) is not None

    def get(self, offset: int) -> Deferred | None:
        """What is held for `offset` now."""
        change = self._changes.get(offset)
        if change is None:
            return self.committed.get(offset)
        if change.ref is None or change.fresh:
            return change.ref
        held = self.committed.get(offset)  # it may have been carried meanwhile
        return change.ref._replace(position=held.position) if held is not None else change.ref

    def lowest(self, first: int = 0) -> int | None:
        """The lowest deferred offset at or above `first`."""
        at = self.committed.next_offset(first)
        while at is not None and at in self._changes and self._changes[at].ref is None:
            at = self.committed.next_offset(at + 1)
        fresh = [o for o, change in self._changes.items() if o >= first and change.fresh and change.ref is not None]
        return min(fresh, default=at) if at is None else min([at, *fresh])

    def lowest_waiting(self) -> int | None:
        """The lowest deferred offset that is not a dead letter's."""
        alive = len(self) - self.dead
        if alive <= 0:
            return None
        if alive <= _FEW:  # beside any number of dead letters
            changes = self._changes.items()
            mine = [offset for offset, change in changes if change.ref is not None and not is_dead(change.ref)]
            held = self.committed.due(BEFORE_ALL, DEAD_FROM - 1, _FEW + len(changes))
            return min([*mine, *(ref.offset for ref in held if ref.offset not in self._changes)])
        for ref in self.items(self._waiting_from):
            if not is_dead(ref):
                return ref.offset
            self._waiting_from = ref.offset + 1
        return None

    def prepare_figures(self, now_ns: int | None = None) -> bool:
        """Look at some of what `dead` and `lowest_waiting` need, and `overdue` at `now_ns`, about COUNT_ROWS rows;
        whether they are quick now."""
        if now_ns is not None and self.committed.counted_due_from(now_ns + 1) is None:
            return False
        if self._dead is None and self.committed.counted_due_from(DEAD_FROM) is None:
            return False
        if len(self) - self.dead <= _FEW:
            return True
        looked = 0
        for ref in islice(self.items(self._waiting_from), COUNT_ROWS):
            if not is_dead(ref):
                return True
            self._waiting_from = ref.offset + 1
            looked += 1
        return looked < COUNT_ROWS

    def items(self, first: int) -> Iterator[Deferred]:
        """All from offset `first` on, by offset. The set must not change meanwhile."""
        fresh = sorted(o for o, change in self._changes.items() if o >= first and change.fresh)
        held = (ref.offset for ref in self.committed.items(first))
        for offset in heapq.merge(held, fresh):
            if (ref := self.get(offset)) is not None:
                yield ref

    @property
    def dead(self) -> int:
        """How many are dead letters. Counted when it is asked for first: a new leader has better things to do. The
        committed set keeps its part up to date from then on."""
        if self._dead is None:
            self._dead = self.committed.count_due_from(DEAD_FROM) if len(self.committed) else 0
            for offset, change in self._changes.items():
                self._dead += is_dead(change.ref) - is_dead(self.committed.get(offset))
        return self._dead

    def dead_letters(self, after: DueKey, limit: int, *, committed: bool = False) -> list[Deferred]:
        """Up to `limit` dead letters in order of death, those behind `after`. `committed`: those that the log has."""
        new = [
            ref
            for change in (() if committed else self._changes.values())
            if (ref := change.ref) is not None and is_dead(ref) and (ref.due_ns, ref.offset) > after
        ]
        held: list[Deferred] = []
        while len(held) < limit and (page := dead_in(self.committed, after, limit)):
            held += [ref for ref in page if ref.offset not in self._changes]
            after = (page[-1].due_ns, page[-1].offset)
        # A change of what the committed set holds may have been carried meanwhile: `get` knows where its frame is.
        found = sorted([*held, *new], key=lambda ref: (ref.due_ns, ref.offset))[:limit]
        return [self.get(ref.offset) or ref for ref in found]

    def offsets(self, first: int, end: int) -> list[int]:
        """The deferred offsets in [first, end)."""
        found = {o for o, change in self._changes.items() if first <= o < end and change.ref is not None}
        for ref in self.committed.items(first):
            if ref.offset >= end:
                break
            if ref.offset not in self._changes:
                found.add(ref.offset)
        return sorted(found)

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    @property
    def uncommitted(self) -> int:
        return len(self._changes)

    # ---- changing

    def put(self, ref: Deferred) -> None:
        """Defer, or change due time and attempts of what is deferred."""
        if self._direct:
            self.committed.put(ref)
            self._waiting_from = min(self._waiting_from, ref.offset)
            self._hint((ref.due_ns, ref.offset))
            return
        self._change(ref.offset, ref)
        if len(self._heap) > 2 * len(self._changes) + _SLICE:
            self._heap = [(c.ref.due_ns, c.ref.offset) for c in self._changes.values() if c.ref is not None]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (ref.due_ns, ref.offset))

    def finish(self, offset: int) -> None:
        """The message is done."""
        if self._direct:
            self.committed.remove(offset)
            return
        self._change(offset, None)

    def _change(self, offset: int, ref: Deferred | None) -> None:
        old = self._changes.get(offset)
        if old is None:
            held = self.committed.get(offset)
            fresh = held is None
        else:
            held, fresh = old.ref, old.fresh
        new = DeferredChange(ref, fresh)
        if self._dead is not None:
            self._dead += is_dead(ref) - is_dead(held)
        self._waiting_from = min(self._waiting_from, offset)
        self._extra += new.weight - (old.weight if old is not None else 0)
        self._changes[offset] = new
        self._unsent[offset] = None

    # ---- into the log

    def take_unsent(self, limit: int) -> dict[int, DeferredChange]:
        """Up to `limit` changes to write, in the order they were made."""
        offsets = list(islice(self._unsent, limit))
        for offset in offsets:
            del self._unsent[offset]
        taken = {offset: self._changes[offset] for offset in offsets}
        for offset in self.put_back.keys() & taken.keys() if self.put_back else ():
            if self.put_back[offset] is None:
                self.put_back[offset] = taken[offset]
        return taken

    def settled(self, sent: dict[int, DeferredChange]) -> None:
        """The batch with these changes was applied to the committed set."""
        for offset, change in sent.items():
            current = self._changes.get(offset)
            if current is None:
                continue
            self._extra -= current.weight
            if self.put_back and self.put_back.get(offset) is change:
                del self.put_back[offset]
            if current is change:
                del self._changes[offset]
                if change.ref is not None:
                    self._hint((change.ref.due_ns, offset))
            else:
                current.fresh = self.committed.get(offset) is None
                self._extra += current.weight

    def arrived(self, ref: Deferred) -> None:
        """The log itself deferred this message (a deliver-at time)."""
        self._waiting_from = min(self._waiting_from, ref.offset)
        self._hint((ref.due_ns, ref.offset))

    def finished(self, first: int) -> list[int]:
        """Offsets at or above `first` that are done, while the committed set still holds them."""
        return [o for o, change in self._changes.items() if o >= first and change.ref is None and not change.fresh]

    def keep_committed(self, below: int = _NEVER) -> None:
        """Forget changes below an offset that are not deferred in the committed set, nor put back: the log will not
        take them."""
        known = self.put_back
        for offset in [o for o in self._changes if o < below and o not in known and self.committed.get(o) is None]:
            del self._changes[offset]
            self._unsent.pop(offset, None)
        self._extra = sum(change.weight for change in self._changes.values())
        self._dead = None

    # ---- by due time

    def due(self, now_ns: int, in_flight: Container[int]) -> Deferred | None:
        """A message that is due and not in flight; the same one until its state changes."""
        ready = self._ready
        while ready or self.gather(now_ns):
            due_ns, offset = ready[0]
            if offset not in in_flight:
                ref = self.get(offset)
                if ref is not None and ref.due_ns == due_ns:
                    return ref
            ready.popleft()
        return None

    def gather(self, now_ns: int) -> bool:
        """Queue what has become due, some at a time; whether there is something in the queue."""
        if self._ready:
            return True
        heap = self._heap
        while heap and heap[0][0] <= now_ns and len(self._ready) < _SLICE:
            self._ready.append(heapq.heappop(heap))
        if self._next <= now_ns:
            refs = self.committed.due(self._mark, now_ns, _SLICE)
            self._ready.extend((ref.due_ns, ref.offset) for ref in refs)
            if refs:
                self._mark = (refs[-1].due_ns, refs[-1].offset)
            following = self.committed.next_due(self._mark)
            self._next = _NEVER if following is None else following
        return bool(self._ready)

    def next_due(self) -> int | None:
        """When `gather` finds more; None while there is something to hand out, or nothing deferred."""
        if self._ready:
            return None
        due_ns = min(self._heap[0][0], self._next) if self._heap else self._next
        return due_ns if due_ns < DEAD_FROM else None

    def _hint(self, key: DueKey) -> None:
        if key <= self._mark:
            self._mark = (key[0], key[1] - 1)
        self._next = min(self._next, key[0])


def overdue(overlay: DeferredOverlay, now_ns: int) -> int:
    """How many deferred messages are due, those in flight included."""
    committed = overlay.committed
    count = len(committed) - committed.count_due_from(now_ns + 1)
    for offset, change in overlay._changes.items():
        count += change.ref is not None and change.ref.due_ns <= now_ns
        held = None if change.fresh else committed.get(offset)
        count -= held is not None and held.due_ns <= now_ns
    return count


def count_between(overlay: DeferredOverlay, first: int, end: int) -> int:
    """How many there are in [first, end); quick where the committed set's `counted_from` knows both places."""
    count = overlay.committed.count_from(first) - overlay.committed.count_from(end)
    return count + sum(change.weight for offset, change in overlay._changes.items() if first <= offset < end)
