"""Which of many things are looked at this second: some in turn, and those that had something to do when looked at last.

Of thousands of partitions or topics few have anything to do, and a walk over all of them each second is what an idle
node spends its time on. One that begins to have something to do is found when its turn comes, and from then on each
second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

LOOKS = 250  # at once, besides the busy ones; who has no more than these looks at all of them
TOLD_LOOKS = 25  # likewise, of an owner that is told which have something to do

K = TypeVar("K")
V = TypeVar("V")


class LookTurns(Generic[K]):
    """Whose turn it is."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._looks = looks
        self._busy: dict[K, None] = {}
        self._waiting: list[K] = []  # their turn is still to come, the next one last: the others are not touched

    def add(self, key: K) -> None:
        """It may have something to do: it is looked at next time."""
        self._busy[key] = None

    def choose(self, things: Mapping[K, V]) -> list[V]:
        """Those of `things` to look at now; say then which are `busy`."""
        if not self._waiting:
            self._waiting = list(things)[::-1]
        turn = self._waiting[: -self._looks - 1 : -1]
        del self._waiting[-self._looks :]
        chosen = {**self._busy, **dict.fromkeys(turn)}
        return [thing for key in chosen if (thing := things.get(key)) is not None]

    def busy(self, keys: Iterable[K]) -> None:
        """These, of what was chosen, had something to do."""
        self._busy = dict.fromkeys(keys)


class InTurns(dict[K, V]):
    """Things by their keys, some of which are looked at now; the owner is told which have something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = LookTurns[K](TOLD_LOOKS)
