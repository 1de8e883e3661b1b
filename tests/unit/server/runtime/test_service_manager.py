"""What a service manager hears of a start, a life and a stop, and that nobody waits for it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nsqha.server.runtime.service_manager import EXTEND_SECONDS, TICKS_PER_PERIOD, ServiceManager
from tests.fakes.loop import VirtualLoop

MORE_TIME = b"EXTEND_TIMEOUT_USEC=30000000"


class Heard:
    """A manager and what was sent to it since the last look."""

    def __init__(self, watchdog_seconds: float = 0.0) -> None:
        self.loop = VirtualLoop()
        self._said: list[bytes] = []
        self.manager = ServiceManager(self._said.append, watchdog_seconds)

    def since(self, act: Callable[[], object]) -> list[bytes]:
        self._said.clear()
        act()
        return list(self._said)


def test_a_long_start_asks_for_more_time_before_what_it_has_is_over() -> None:
    heard = Heard()
    assert heard.since(lambda: heard.manager.starting(heard.loop, "reads")) == [b"STATUS=reads", MORE_TIME]
    assert heard.since(lambda: heard.loop.pass_time(EXTEND_SECONDS)) == [MORE_TIME] * TICKS_PER_PERIOD


def test_it_is_ready_once_and_asks_for_nothing_more() -> None:
    heard = Heard()
    heard.manager.starting(heard.loop, "reads")
    assert heard.since(lambda: heard.manager.ready("serves")) == [b"READY=1\nSTATUS=serves"]
    assert heard.since(lambda: heard.manager.ready("serves again")) == [], "another life of the same process"
    assert heard.since(lambda: heard.loop.pass_time(600)) == []


def test_the_watchdog_hears_of_every_third_of_its_period() -> None:
    heard = Heard(watchdog_seconds=6)
    heard.manager.starting(heard.loop, "reads")
    heard.manager.ready("serves")
    assert heard.since(lambda: heard.loop.pass_time(6.1)) == [b"WATCHDOG=1"] * 3


def test_a_stop_says_so_and_asks_for_time_until_it_is_over() -> None:
    heard = Heard(watchdog_seconds=6)
    heard.manager.starting(heard.loop, "reads")
    heard.manager.ready("serves")
    (said,) = heard.since(heard.manager.stopping)
    assert said.startswith(b"STOPPING=1\n")
    assert heard.since(lambda: heard.loop.pass_time(2.1)) == [b"WATCHDOG=1\n" + MORE_TIME]
    heard.manager.close()
    assert heard.since(lambda: heard.loop.pass_time(60)) == []


@pytest.mark.parametrize("abstract", [False, True])
def test_the_environment_names_the_socket(tmp_path: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as at:
        name = f"{tmp_path}/notify"
        at.bind(f"\0{name}" if abstract else name)
        at.settimeout(5)
        manager = ServiceManager.of({"NOTIFY_SOCKET": f"@{name}" if abstract else name, "WATCHDOG_USEC": "3000000"})
        loop = VirtualLoop()
        manager.starting(loop, "reads")
        assert at.recv(1000) == b"STATUS=reads"
        assert at.recv(1000) == b"WATCHDOG=1\n" + MORE_TIME


@pytest.mark.parametrize(
    ("environ", "period"),
    [
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, 0.0),
        ({"WATCHDOG_USEC": "-3"}, 0.0),
        ({"WATCHDOG_USEC": "9" * 40}, 0.0),
        ({"WATCHDOG_USEC": "²"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_watchdog_of_another_process_or_without_sense_is_none(environ: dict[str, str], period: float) -> None:
    assert ServiceManager.of(environ, pid=7)._watchdog_seconds == period


@pytest.mark.parametrize("path", ["", "relative", "vsock:2:1234", "/nowhere/at/all", "/" + "x" * 300])
def test_without_a_manager_that_listens_all_goes_on(path: str) -> None:
    loop = VirtualLoop()
    manager = ServiceManager.of({"NOTIFY_SOCKET": path})
    manager.starting(loop, "reads")
    manager.ready("serves")
    loop.pass_time(60)
    manager.stopping()
    manager.close()


def test_a_manager_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as at:
        at.bind(f"{tmp_path}/full")
        loop = VirtualLoop()
        manager = ServiceManager.of({"NOTIFY_SOCKET": f"{tmp_path}/full", "WATCHDOG_USEC": "3000"})
        manager.starting(loop, "reads")
        loop.pass_time(1)  # a thousand datagrams; its queue takes some dozens
        manager.close()
