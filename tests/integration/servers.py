"""Daemons for tests: real processes on loopback, started, killed and started again on the same ports.

Ports are drawn below the kernel's ephemeral range, so nobody's outgoing connection takes one while its daemon is down.
None is drawn twice before all others were, nor by two workers of one test run: a daemon that is down, or does not
listen yet, keeps its own.
A daemon is ended by its pid, and the kernel ends it should the test process die: none is ever left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nsqha.errors import Unavailable

BIN = Path(sys.executable).parent
START_SECONDS = 60.0
STOP_SECONDS = 20.0
PORT_FIRST, EPHEMERAL_FIRST = 12_000, 32_768
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class CannotStart(Exception):
    """The daemon ended, or did not listen in time; the text has the end of what it said."""


def ports_of(environment: Mapping[str, str], seed: int) -> Iterator[int]:
    """The ports of one worker of a test run, in an order of its own, again and again."""
    worker = int(environment.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(range(PORT_FIRST, EPHEMERAL_FIRST))[worker % workers :: workers]
    random.Random(seed).shuffle(ports)
    return itertools.cycle(ports)


_ports = ports_of(os.environ, os.getpid() * 1_000_003 + time.time_ns())


def free_port() -> int:
    """A loopback port that nobody uses now and no outgoing connection will take."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: they never end")


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """The first true value of `condition`; fails the test by name if there is none in time.

    Unavailable means not yet: an etcd that has only just been started or woken up does not answer at once."""
    deadline = time.monotonic() + seconds
    while True:
        why = ""
        try:
            if value := condition():
                return value
        except Unavailable as error:
            why = f" ({error})"
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}{why}")
        time.sleep(0.01)


@dataclass(frozen=True)
class Host:
    """Where a daemon runs: its address, and what is before its command to get there."""

    ip: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


LOOPBACK = Host()


class Daemon:
    """One process that says `TCP: listening on ..` and `HTTP: listening on ..`."""

    command: str

    def __init__(self, directory: Path, flags: Sequence[str] = (), *, host: Host = LOOPBACK) -> None:
        self.host = host
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.flags = list(flags)
        self.starts = 0
        self.program: tuple[str, ...] = ()  # what stands for the command from the next start on, if anything
        self._process: subprocess.Popen[bytes] | None = None
        self.draw_ports()

    def draw_ports(self) -> None:
        """Ports for life; others if one turned out to be taken before anybody knew it."""
        self.tcp_port = free_port()
        self.http_port = free_port()

    @property
    def tcp(self) -> str:
        return f"{self.host.ip}:{self.tcp_port}"

    @property
    def http(self) -> str:
        return f"{self.host.ip}:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """What this life of the process says on stdout and stderr."""
        return self.directory / f"log.{self.starts}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def spawn(self) -> None:
        """Start the process and do not wait for it."""
        assert self._process is None, "already running"
        self.starts += 1
        arguments = [
            *self.host.prefix,
            *(self.program or (str(BIN / self.command),)),
            f"--tcp-address={self.tcp}",
            f"--http-address={self.http}",
            *self.flags,
        ]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )

    def listening(self) -> bool:
        """Whether this life of the process serves; CannotStart if it has ended instead."""
        if self._process is None or self._process.poll() is not None:
            raise CannotStart(f"{self.command} ended while starting:\n{self.log()[-3000:]}")
        said = self.log()
        return all(re.search(rf"\b{kind}: listening on \S+:\d+\s", said) for kind in ("TCP", "HTTP"))

    def start(self) -> None:
        """Start and wait until it listens."""
        self.spawn()
        deadline = time.monotonic() + START_SECONDS
        while not self.listening():
            if time.monotonic() > deadline:
                raise CannotStart(f"{self.command} does not listen after {START_SECONDS:.0f} s:\n{self.log()[-3000:]}")
            time.sleep(0.005)

    def kill(self) -> None:
        """End the process as a crash does; returns when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End the process in the ordinary way; its exit status."""
        return self._end(signal.SIGTERM)

    def terminate(self) -> None:
        """Ask it to end; `wait` for that."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Until a process that was told to end has ended; its exit status."""
        return self._end(None)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _end(self, number: signal.Signals | None) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        if number is not None:
            process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(
                f"{self.command} ignored {number.name if number else 'a signal'}:\n{self.log()[-3000:]}"
            ) from None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._end(signal.SIGKILL)

    # ---- HTTP

    def request(self, path: str, body: bytes | None = None, *, seconds: float = 10.0) -> bytes:
        """GET `path`, or POST if there is a body. OSError if no whole answer comes."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", data=body, timeout=seconds) as answer:
                data: bytes = answer.read()
                return data
        except (http.client.IncompleteRead, http.client.BadStatusLine) as error:
            raise ConnectionResetError(f"{self.command} ended in the middle of its answer") from error

    def json(self, path: str) -> Any:
        return json.loads(self.request(path))


class Node(Daemon):
    """A broker on its own data directory."""

    command = "nsqd"

    def __init__(
        self,
        directory: Path,
        *,
        sync: str = "always",
        flags: Sequence[str] = (),
        host: Host = LOOPBACK,
        data: Path | None = None,
    ) -> None:
        data = data or directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, [f"--data-path={data}", f"--sync={sync}", *flags], host=host)
        self.data = data

    def listening(self) -> bool:
        """Its gRPC port, if it is given one, comes after the others: commands are led there by way of HTTP."""
        serves_grpc = any(flag.startswith("--grpc-address=") for flag in self.flags)
        return super().listening() and (not serves_grpc or "gRPC: listening on" in self.log())

    def channel(self, topic: str, channel: str) -> dict[str, Any] | None:
        """The channel's part of /stats; None if there is no such channel."""
        stats = self.json(f"/stats?format=json&topic={topic}&channel={channel}")
        for found in stats["topics"] or []:
            for entry in found["channels"]:
                if entry["channel_name"] == channel:
                    return dict(entry)
        return None

    def progress_is_committed(self, topic: str, floor: int) -> bool:
        """Whether the only cursor of the topic's only channel has come so far, and the log has it: a kill takes
        nothing of it back, nor does a change of leaders."""
        stats = self.json(f"/stats?format=json&include_nsqha=true&topic={topic}")
        (channel,) = stats["nsqha"]["topics"][0]["channels"]
        (cursor,) = channel["cursors"]
        return bool(cursor["floor"] >= floor and not cursor["uncommitted_progress"])


class Lookupd(Daemon):
    """A lookup daemon."""

    command = "nsqlookupd"


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
