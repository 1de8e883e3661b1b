"""The files of one log: pairs, oldest first, of which only a few old ones stay open."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqha.commitlog.entry import Entry, Place
from nsqha.commitlog.files.pairs import Pair

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Inode, Storage

OPEN_PAIRS = 4  # old pairs whose files stay open


class PairList:
    """The pairs of one log, and its last entry. So the last entry of each pair is known without reading it."""

    __slots__ = ("_on_open", "_on_release", "_open_old", "last", "pairs", "storage")

    def __init__(self, storage: Storage, pairs: list[Pair], last: Entry) -> None:
        """`last` is the last entry; the anchor of the last pair if that one is empty."""
        self.storage = storage
        self.pairs = pairs
        self.last = last
        self._open_old: list[Pair] = []
        self._on_open: Callable[[], object] | None = None
        self._on_release: Callable[[], object] | None = None

    # ---- finding

    def pair_of(self, log_id: int) -> Pair:
        """The pair that this log id belongs to; its files are about to be used."""
        pairs = self.pairs
        pair = pairs[bisect_right(pairs, log_id, key=lambda p: p.first.log_id) - 1]
        self.use(pair)
        return pair

    def use(self, pair: Pair) -> None:
        """The pair's files are about to be opened, if they are not."""
        if pair is not self.pairs[-1] and not pair.is_open:
            self._opened(pair)

    def _opened(self, pair: Pair) -> None:
        """An old pair's files are in use: keep only a few open."""
        self._open_old.append(pair)
        if len(self._open_old) > OPEN_PAIRS:
            self._open_old.pop(0).release()

    def last_of(self, pair: Pair) -> Entry:
        """Its last entry, or its anchor if it has none: from the next pair, or from memory."""
        pairs = self.pairs
        i = bisect_right(pairs, pair.position, key=lambda p: p.position)
        return pairs[i].anchor if i < len(pairs) else self.last

    def first_where(
        self, pair: Pair, wanted: Callable[[Entry], bool], guess: int | None = None
    ) -> tuple[int, Entry | None]:
        """The first entry of the pair that verifies and is `wanted`, which must be monotone; or (its end, None).

        `guess`: a log id near it, where it is looked for first. Of the pair's last entry there is a good copy."""
        self.use(pair)
        low, last = pair.first.log_id, self.last_of(pair)
        high = last.log_id + 1
        best: tuple[int, Entry | None] = (high, None)
        middle = (low + high) // 2 if guess is None else min(max(guess, low), high - 1)
        below = above = guess is None  # whether an entry was found on this side of the one that is looked for
        step = 1
        while low < high:
            probe = middle
            # An entry that does not verify cannot answer; the next one that does, answers for it.
            while (entry := pair.read_entry(probe)) is None and probe + 1 < high:
                probe += 1
            if entry is None and probe == last.log_id:
                entry = last
            if entry is not None and not wanted(entry):
                low, below = probe + 1, True
            else:
                if entry is not None:
                    best = (probe, entry)
                high, above = middle, True
            if below and above:
                middle = (low + high) // 2
            else:
                middle = max(high - step, low) if above else min(low + step - 1, high - 1)
                step *= 2
        return best

    def written(self) -> dict[str, Inode]:
        """The open files of the newest pair, by path; none if they are closed or not on a disk."""
        return self.pairs[-1].inodes()

    # ---- coming and going

    def add(self, new: Pair) -> None:
        """The log goes on in a new pair."""
        old = self.pairs[-1]
        self.pairs.append(new)
        new.on_open = self._on_open
        self._opened(old)

    def forget(self, up_to: Place) -> list[Pair]:
        """Take out the pairs that end at or below `up_to`, but never the last one."""
        n = 0
        for after in self.pairs[1:]:
            end = after.first
            if end.offset > up_to.offset or end.position > up_to.position:
                break
            n += 1
        dropped = self.pairs[:n]
        del self.pairs[:n]
        for pair in dropped:
            pair.release()
        return dropped

    def end_with(self, pair: Pair, last: Entry) -> list[Pair]:
        """The log ends in `pair` now, with this entry: take out the pairs behind."""
        n = self.pairs.index(pair) + 1
        removed = self.pairs[n:]
        del self.pairs[n:]
        for gone in removed:
            gone.release()
        self.last = last
        if pair in self._open_old:
            self._open_old.remove(pair)
        return removed

    def release(self) -> None:
        """Let go of all files; a sync in another thread ends before they are closed."""
        self._open_old.clear()
        for pair in self.pairs:
            pair.release()
        if self._on_release is not None:
            self._on_release()

    def on_open(self, opened: Callable[[], object], released: Callable[[], object]) -> None:
        """Call these whenever a pair opens files that were closed, and when all of them have been let go of."""
        self._on_open, self._on_release = opened, released
        for pair in self.pairs:
            pair.on_open = opened
