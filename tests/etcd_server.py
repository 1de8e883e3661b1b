"""A real etcd for tests: one process on free loopback ports, data under a temporary folder, ended by its pid.

    @pytest.fixture(scope="session")
    def etcd(tmp_path_factory) -> Iterator[EtcdServer]:
        with EtcdServer.running(tmp_path_factory.mktemp("etcd")) as server:
            yield server

Its data is not synced to disk unless it is `synced`. `kill`, `freeze`, `thaw` and `start` are the faults.
`EtcdMembers` is an etcd of several such processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsqha.election.etcd.binary import find_etcd
from tests import freezing
from tests.integration.servers import free_port

START_S = 20.0


@dataclass
class EtcdServer:
    folder: Path
    extra: tuple[str, ...] = ()
    scheme: str = "http"
    client_port: int = 0
    name: str = "test"
    ip: str = "127.0.0.1"
    peer_port: int = 0
    initial_cluster: str = ""  # name=URL of all members; empty: this one is alone
    prefix: tuple[str, ...] = ()  # of the command: what starts it somewhere else
    synced: bool = False  # its data are on disk before it answers
    _metrics_port: int = field(default=0, repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, *extra: str, scheme: str = "http") -> Iterator[EtcdServer]:
        server = cls(folder, extra, scheme)
        server.start()
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(folder / "data", ignore_errors=True)

    @property
    def endpoint(self) -> str:
        return f"{self.ip}:{self.client_port}"

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.endpoint,)

    @property
    def running_now(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Returns when it serves; the same port and data as before, if it ran before."""
        self.spawn()
        self.wait()

    def spawn(self) -> None:
        """Start the process and do not wait for it."""
        assert self._process is None, "already running"
        ports = [free_port() for _ in range(3)]
        self.client_port = self.client_port or ports[0]
        self.peer_port = self.peer_port or ports[1]
        self._metrics_port = ports[2]
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://{self.ip}:{self.peer_port}"
        command = [find_etcd(), "--name", self.name, "--data-dir", str(self.folder / "data")]
        command += [] if self.synced else ["--unsafe-no-fsync"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", self.initial_cluster or f"{self.name}={peer}", "--log-level", "error"]
        # Tells over plain HTTP when it serves, whatever clients need; it accepts connections long before.
        command += ["--listen-metrics-urls", f"http://{self.ip}:{self._metrics_port}", *self.extra]
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen([*self.prefix, *command], stdout=log, stderr=log, cwd=self.folder)

    def kill(self) -> None:
        """SIGKILL, frozen or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        freezing.stop(self._process.pid)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def wait(self) -> None:
        """Until it has a leader and serves."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                if b"true" in self.ask("/health"):
                    return
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"etcd did not start: {(self.folder / 'etcd.log').read_text()[-2000:]}")

    def leads(self) -> bool:
        """Whether it is the leader among its members."""
        return b"\netcd_server_is_leader 1\n" in self.ask("/metrics")

    def ask(self, path: str) -> bytes:
        """GET of what it says of itself; OSError if it does not answer."""
        with urllib.request.urlopen(f"http://{self.ip}:{self._metrics_port}{path}", timeout=1) as answer:
            return bytes(answer.read())


class EtcdMembers:
    """One etcd of several members; a majority of them has to run."""

    def __init__(self, members: Sequence[EtcdServer]) -> None:
        """Members with addresses, ports and names of their own."""
        self.members = tuple(members)
        everybody = ",".join(f"{member.name}=http://{member.ip}:{member.peer_port}" for member in self.members)
        for member in self.members:
            member.initial_cluster = everybody

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path, *extra: str, count: int = 3, scheme: str = "http") -> Iterator[EtcdMembers]:
        """All on loopback."""
        ports = [free_port() for _ in range(2 * count)]
        members = []
        for n in range(count):
            (folder / f"m{n + 1}").mkdir(parents=True, exist_ok=True)
            member = EtcdServer(folder / f"m{n + 1}", extra, scheme, ports[2 * n], f"m{n + 1}")
            member.peer_port = ports[2 * n + 1]
            members.append(member)
        etcd = cls(members)
        try:
            etcd.start()
            yield etcd
        finally:
            etcd.kill()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    def start(self) -> None:
        """Start who does not run; returns when all serve."""
        for member in self.members:
            if not member.running_now:
                member.spawn()
        for member in self.members:
            member.wait()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def leader(self) -> EtcdServer:
        """The member that leads; waited for."""
        found: list[EtcdServer] = []

        def look() -> bool:
            for member in self.members:
                with contextlib.suppress(OSError):
                    if member.running_now and member.leads():
                        found.append(member)
            return bool(found)

        eventually(look)
        return found[0]


def eventually(check: object, *, within_s: float = 20.0) -> None:
    """Wait for something that other threads bring about; how long it takes is not what is tested."""
    assert callable(check)
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
