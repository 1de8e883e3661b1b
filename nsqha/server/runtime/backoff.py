"""How long an owner waits before it tries again: twice as long each time, up to a bound."""

from __future__ import annotations


class Backoff:
    """Computes the pauses between the tries of one owner, in seconds."""

    __slots__ = ("_first", "_max", "_next")

    def __init__(self, first: float, max: float) -> None:
        """`first` is the pause after a first failure, `max` the longest."""
        self._first = self._next = first
        self._max = max

    def next_pause(self) -> float:
        """The pause before the next try; each call counts one more failed try."""
        pause = self._next
        self._next = min(2 * pause, self._max)
        return pause

    def reset(self) -> None:
        """A try succeeded: the next pause is the first one again."""
        self._next = self._first

    def at_max(self) -> None:
        """The next pause is the longest: another try cannot succeed soon."""
        self._next = self._max

    def __repr__(self) -> str:
        return f"Backoff(next {self._next:g} s, {self._first:g} to {self._max:g} s)"
