"""One RDY window, shared out among the partitions of a topic that different nodes lead.

The socket's node owns the window. It lends parts of it to leaders elsewhere; what it has not lent serves partitions led
here. A leader has at most as many of its messages in flight as it was lent: what is lent and what is in flight from
here never exceed RDY (a client that lowers RDY gets there as it answers, as with nsqd).

A part is taken back by lowering it, and is free again when the leader says so: until then it counts with what it was.
Each change has a serial; a status counts only if it names the newest one, so that no old word is believed.

    shares(rdy, backlogged, turn)   how much each leader should have
    LentCredit                      one leader's part: what was said, what is believed
"""

from __future__ import annotations

from collections.abc import Sequence

RESERVE = 4  # a leader without a backlog keeps a quarter of an even share


def shares(rdy: int, backlogged: Sequence[bool], turn: int) -> list[int]:
    """Parts of `rdy`, one for each partition group; `backlogged`: messages wait there and their part is used up.

    The backlogged ones share what the others do not keep; if none is backlogged all share alike. What is left of a
    division goes round with `turn`, which is how one message window serves many partitions.
    """
    count = len(backlogged)
    wanting = [n for n in range(count) if backlogged[n]] or list(range(count))
    if not wanting:
        return []
    keep = rdy // (RESERVE * count) if len(wanting) < count else 0
    parts = [keep] * count
    base, extra = divmod(rdy - keep * (count - len(wanting)), len(wanting))
    for place, n in enumerate(wanting):
        parts[n] = base + ((place - turn) % len(wanting) < extra)
    return parts


class LentCredit:
    """The part of a window that one leader was lent."""

    __slots__ = ("held", "serial", "size")

    def __init__(self) -> None:
        self.size = 0  # as it was last sent to the leader
        self.held = 0  # the leader may have this number in flight: it counts against RDY
        self.serial = 0

    def set(self, size: int) -> int:
        """Lend so much from now on; returns the serial to send with it."""
        self.size = size
        self.held = max(self.held, size)
        self.serial += 1
        return self.serial

    def heard(self, serial: int, held: int) -> None:
        """What the leader holds since it got `serial`."""
        if serial == self.serial:
            self.held = max(held, self.size)
