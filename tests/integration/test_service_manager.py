"""Both daemons tell the service manager that started them: more time, ready, the loop runs, stopping; in this order."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.freezing import stop as freeze_pid
from tests.integration.servers import Daemon, Host, Lookupd, Node


@pytest.mark.parametrize("kind", [Node, Lookupd])
def test_a_service_manager_hears_of_a_whole_life(kind: type[Daemon], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        prefix = ("env", f"NOTIFY_SOCKET={tmp_path}/notify", "WATCHDOG_USEC=600000")
        daemon = kind(tmp_path / "daemon", host=Host(prefix=prefix))

        def until(word: str) -> list[str]:
            heard: list[str] = []
            while not heard or word not in heard[-1].split("\n"):
                heard.append(manager.recv(4096).decode())
            return heard

        with daemon:
            start = until("READY=1")
            assert any("EXTEND_TIMEOUT_USEC=" in said for said in start)
            assert len(until("WATCHDOG=1")) <= 3
            freeze_pid(daemon.pid)
            manager.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:  # what it said before
                    manager.recv(4096)
            manager.settimeout(1.0)  # longer than its period
            with pytest.raises(TimeoutError):
                manager.recv(4096)
            os.kill(daemon.pid, signal.SIGCONT)
            manager.settimeout(30)
            until("WATCHDOG=1")
            daemon.terminate()
            until("STOPPING=1")
            assert daemon.wait() == 0
