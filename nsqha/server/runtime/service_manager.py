"""What the service manager that started this process is told, in datagrams: systemd's protocol, sd_notify(3).

    start  -> EXTEND_TIMEOUT_USEC every few seconds while the node reads its log, which may take an hour
    ready  -> READY=1, once; what waits for this unit is started then
    ..     -> WATCHDOG=1 a few times per period, as long as the loop runs: a loop that hangs is ended and started again
    stop   -> STOPPING=1, and EXTEND_TIMEOUT_USEC again: a handover is not cut short

Everything is sent by the loop itself, so silence means that the loop does not run. Nothing is sent where no service
manager asks for it ($NOTIFY_SOCKET), and one that does not listen stops nobody.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

EXTEND_SECONDS = 30.0
"""What a start or a stop that goes on is given each time; longer than any turn of the loop."""
TICKS_PER_PERIOD = 3  # one datagram that is late or lost ends nothing
Send = Callable[[bytes], None]


class ServiceManager:
    """Tells one service manager, or nobody."""

    def __init__(self, send: Send | None, watchdog_seconds: float = 0.0) -> None:
        self._send = send
        self._watchdog_seconds = watchdog_seconds
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int | None = None) -> ServiceManager:
        """The one that the environment names. A watchdog for another process is none of ours."""
        send = _sender(environ.get("NOTIFY_SOCKET", ""))
        microseconds = environ.get("WATCHDOG_USEC", "")
        ours = environ.get("WATCHDOG_PID", "") in ("", str(pid if pid is not None else os.getpid()))
        valid = microseconds.isascii() and microseconds.isdecimal() and len(microseconds) < 16
        return cls(send, int(microseconds) / 1e6 if valid and ours else 0.0)

    def starting(self, loop: asyncio.AbstractEventLoop, doing: str) -> None:
        """The process begins; `loop` ticks from now on until `close`."""
        if self._send is not None:
            self._phase = "starting"
            self._say(f"STATUS={doing}")
            self._tick(loop)

    def ready(self, status: str) -> None:
        """It serves; only the first time counts."""
        if self._phase == "starting":
            self._phase = "ready"
            self._say(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        if self._phase:
            self._phase = "stopping"
            self._say("STOPPING=1\nSTATUS=hands over, and writes what is left")

    def close(self) -> None:
        """No tick comes any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._phase = None, ""

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        words = ["WATCHDOG=1"] if self._watchdog_seconds else []
        if self._phase != "ready":
            words.append(f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1e6:.0f}")
        if words:
            self._say("\n".join(words))
        period = min(EXTEND_SECONDS, self._watchdog_seconds or EXTEND_SECONDS)
        self._timer = loop.call_later(period / TICKS_PER_PERIOD, self._tick, loop)

    def _say(self, text: str) -> None:
        assert self._send is not None
        self._send(text.encode())


def _sender(path: str) -> Send | None:
    """Sends to the socket at that path, an abstract one if it begins with @; None: no path of that protocol."""
    if not path.startswith(("/", "@")):
        return None
    address = "\0" + path[1:] if path.startswith("@") else path

    def send(datagram: bytes) -> None:
        # A full or missing socket is the manager's affair; blocking on it would be ours.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)
            to.sendto(datagram, address)

    return send
