"""Where a stream between nodes is to connect to, and whether it should try at all.

A lookup of a name takes a thread of the loop's few and can not be given up, so there is one at a time for each name,
whatever waits for it. An address that could not be reached is left alone for a moment, as gRPC's channels do: owners of
streams try again as often as they like.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from nsqha.server.runtime.backoff import Backoff
from nsqha.server.runtime.tasks import awaited

AGAIN_SECONDS = 0.1  # after a first failure, doubled with each one up to
AGAIN_SECONDS_MAX = 1.0
FORGET_SECONDS = 10.0  # after which a failure is a first one

_lookups: dict[tuple[asyncio.AbstractEventLoop, str, int], asyncio.Task[list[str]]] = {}


async def addresses(host: str, port: int) -> list[str]:
    """IP addresses of `host`, in the order in which to try them; at least one. OSError, ValueError."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]
    key = (asyncio.get_running_loop(), host, port)
    lookup = _lookups.get(key)
    if lookup is None:
        lookup = _lookups[key] = awaited(key[0], _look_up(host, port))  # it cannot be cancelled: a thread runs it
        lookup.add_done_callback(lambda done: _lookups.pop(key))
    return await asyncio.shield(lookup)


async def _look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class Failures:
    """Addresses that could not be reached lately."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Backoff, str]] = {}  # left alone until, how long next time, why

    def why(self, address: str, now: float) -> str:
        """Why it is not tried now; empty: it may be."""
        last = self._last.get(address)
        return f"{last[2]} (a moment ago)" if last is not None and now < last[0] else ""

    def failed(self, address: str, now: float, why: str) -> None:
        self._last = {each: last for each, last in self._last.items() if now < last[0] + FORGET_SECONDS}
        last = self._last.get(address)
        if last is not None and now < last[0]:
            return  # one more that was under way
        backoff = Backoff(AGAIN_SECONDS, AGAIN_SECONDS_MAX) if last is None else last[1]
        self._last[address] = (now + backoff.next_pause(), backoff, why)

    def reached(self, address: str) -> None:
        self._last.pop(address, None)
