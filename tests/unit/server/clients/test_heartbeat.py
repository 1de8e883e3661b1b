"""Who is dropped for silence, and who is not."""

from __future__ import annotations

from nsqha.server.clients.heartbeat import Heartbeat
from tests.fakes.loop import VirtualLoop


class Client:
    """A connection that does nothing by itself; beats every ten seconds."""

    def __init__(self) -> None:
        self.blocked = False
        self.writable = True
        self.unread_bytes = 0
        self.beats = 0
        self.closed_at: float | None = None
        self.loop = VirtualLoop()
        self.began = self.loop.time()
        self.heartbeat = Heartbeat(self.loop, self)  # type: ignore[arg-type]
        self.heard()
        self.heartbeat.set(10_000)

    def heard(self) -> None:
        self.heartbeat.heard_at = self.loop.time()

    def beat(self) -> None:
        self.beats += 1

    def close(self) -> None:
        self.closed_at = self.loop.time() - self.began
        self.heartbeat.cancel()


def test_a_client_that_is_silent_for_two_intervals_is_dropped() -> None:
    client = Client()
    client.loop.pass_time(15)
    client.heard()
    client.loop.pass_time(100)
    assert client.beats >= 2 and client.closed_at is not None
    assert 34 < client.closed_at < 36


def test_a_client_that_is_not_read_has_all_the_time() -> None:
    """The bound on publishes that wait is reached: what it sends, heartbeats too, stays in its socket."""
    client = Client()
    client.blocked = True
    client.loop.pass_time(200)
    assert client.closed_at is None and client.beats >= 19
    client.blocked = False
    client.heard()
    client.loop.pass_time(100)
    assert client.closed_at is not None and 219 < client.closed_at < 231


def test_a_client_that_takes_nothing_for_an_interval_is_dropped_read_or_not() -> None:
    for blocked in (False, True):
        client = Client()
        client.blocked = blocked
        client.writable, client.unread_bytes = False, 1000
        client.loop.pass_time(15)
        assert client.closed_at is None
        client.heard()
        client.loop.pass_time(15)
        assert client.closed_at is not None and 19 < client.closed_at < 21


def test_without_an_interval_nobody_is_dropped() -> None:
    client = Client()
    client.heartbeat.set(0)
    client.loop.pass_time(1000)
    assert client.closed_at is None and client.beats == 0
