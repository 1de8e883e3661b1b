"""What one connection between nodes may cost: a bound of frames that carry nothing, and turns.

In one turn of the loop, or one millisecond of its clock, up to TURN_FRAMES, TURN_BYTES and `stream.TURN_MESSAGES`
are handled. Then the connection is not read until all others had a turn, whatever it sends. Those that have not
greeted yet share a part of each turn (`runtime.budget`); nodes of the cluster do not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nsqha.server.peers.http2 import ENHANCE_YOUR_CALM, Http2Error
from nsqha.server.runtime.budget import SharedTurns

# What frames cost that carry no message: one connection of them must not keep the loop from all others.
FRAME_COST = 50
HEADER_BYTE_COST = 2
CREDIT_COST = 1  # of a WINDOW_UPDATE, which a client sends for what it reads
COST_MAX = 60_000  # at once
COST_PER_SECOND = 10_000  # later
TURN_FRAMES = 64
TURN_BYTES = 1 << 20

Later = Callable[[Callable[[], None]], object]


class FrameBudget:
    """What one connection may still send of frames that carry nothing: a token bucket."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = float(COST_MAX)
        self._filled_at = loop.time()

    def charge(self, cost: int) -> None:
        """Count a frame. Http2Error: there are too many of them."""
        self._left -= cost
        if self._left < 0:
            now = self._loop.time()
            self._left = min(self._left + (now - self._filled_at) * COST_PER_SECOND, COST_MAX)
            self._filled_at = now
            if self._left < 0:
                raise Http2Error("too many frames that carry nothing", ENHANCE_YOUR_CALM)


def _nothing() -> None:
    """What a turn of a connection that is gone does."""


class ReadTurns:
    """The turns that one connection has at being read."""

    __slots__ = ("_loop", "_read_on", "bytes", "charge", "frames", "later", "resting", "strangers")

    def __init__(self, loop: asyncio.AbstractEventLoop, read_on: Callable[[], None]) -> None:
        """`read_on`: another turn begins; it handles what the last one left."""
        self.resting = False  # others have their turn
        self.frames = TURN_FRAMES  # left in this turn
        self.bytes = TURN_BYTES
        self.charge = FrameBudget(loop).charge
        self.later: Later = loop.call_soon  # what calls, when it is time for another turn
        self.strangers: SharedTurns | None = None  # with whom it shares them
        self._loop = loop
        self._read_on = read_on

    def share(self, strangers: SharedTurns | None) -> None:
        """Have turns when it is time among these; None: in each turn of the loop."""
        self.strangers = strangers
        self.later = self._loop.call_soon if strangers is None else strangers.later

    def begin(self) -> None:
        """A turn begins."""
        self.frames, self.bytes = TURN_FRAMES, TURN_BYTES

    def rest(self, transport: asyncio.Transport | None) -> None:
        """Read nothing until others had their turn."""
        if transport is not None and not transport.is_closing():
            self.resting = True
            transport.pause_reading()
            self.later(lambda: self._go_on(transport))

    def end(self) -> None:
        """Nothing is left to be read."""
        self._read_on = _nothing

    def _go_on(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        self.resting = False
        self.begin()
        self._read_on()
        if not self.resting and not transport.is_closing():
            transport.resume_reading()
