"""Whether a client is still there: heartbeats out, and the end of one that is silent or takes nothing, as nsqd has it.

A beat goes out every interval. A client that for two intervals neither ended nor began a command is dropped; so is one
that took, over a whole interval, no byte of what waits for it. Who is not read at present can not be blamed for its
silence.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

SLACK_SECONDS = 0.05


class HeartbeatClient(Protocol):
    """The connection, as far as it is looked at here."""

    writable: bool

    @property
    def blocked(self) -> bool:
        """Whether its commands wait, so that it is not read."""

    @property
    def unread_bytes(self) -> int:
        """Written, and not taken by the client."""

    def beat(self) -> None:
        """Send a heartbeat."""

    def close(self) -> None:
        """Drop it."""


class Heartbeat:
    """The heartbeat of one connection. `heard_at` is set by it whenever a command comes, in seconds of the loop's
    clock."""

    __slots__ = ("_beat_at", "_client", "_loop", "_seconds", "_timer", "_unread", "heard_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, client: HeartbeatClient) -> None:
        self.heard_at = 0.0
        self._loop = loop
        self._client = client
        self._seconds = 0.0  # the interval; 0: none
        self._beat_at = 0.0  # the next one
        self._unread = 0  # bytes that the client had not taken at the last one
        self._timer: asyncio.TimerHandle | None = None

    def set(self, interval_ms: int) -> None:
        """Beat so often from now on; 0: never. An interval that is in force already goes on as it is."""
        seconds = interval_ms / 1000
        if seconds == self._seconds:
            return
        self.cancel()
        self._seconds = seconds
        if seconds > 0:
            self._beat_at = self._loop.time() + seconds
            self._timer = self._loop.call_later(seconds, self._due)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        """A heartbeat is due, or the client's time is over."""
        client, now, interval = self._client, self._loop.time(), self._seconds
        deadline = (now if client.blocked else self.heard_at) + 2 * interval
        if now > deadline - SLACK_SECONDS:
            client.close()
            return
        if now > self._beat_at - SLACK_SECONDS:
            self._beat_at = now + interval
            if self._takes_nothing():
                client.close()
                return
            if client.writable:
                client.beat()
        self._timer = self._loop.call_later(min(self._beat_at, deadline) - now, self._due)

    def _takes_nothing(self) -> bool:
        """Whether the client took no byte of what waits for it since the last heartbeat (nsqd's write deadline)."""
        before = self._unread
        self._unread = 0 if self._client.writable else self._client.unread_bytes
        return 0 < before <= self._unread
