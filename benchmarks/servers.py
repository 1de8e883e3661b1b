"""Starts the daemons that are measured: a fresh process and an empty data directory for each cell.

A *subject* is a way to start a server: our broker with the compiled functions, our broker without them, or another
NSQ V2 daemon. Every server listens on loopback on ports the kernel chose and is ended by its pid; should this
process be killed outright, the kernel kills the servers (parent death signal), so none is ever left behind.
"""

from __future__ import annotations

import compileall
import ctypes
import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .client import Address
from .procstat import ProcessTree

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.002
IMPLEMENTATIONS = ("compiled", "pure")
# Without its bytecode kept, a start of ours would measure Python's compiler.
NOT_INHERITED = ("NSQHA_NO_EXT", "PYTHONDONTWRITEBYTECODE")
NSQD_FLAGS = "--tcp-address={tcp} --http-address={http} --data-path={data}"

_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class CannotStart(Exception):
    """The daemon ended or did not get ready; the text has the end of what it said."""


class NotForThisSubject(Exception):
    """The subject has no such mode. The cell is left out, not failed."""


@dataclass(frozen=True)
class Subject:
    """One way to start a server. `command` may hold {data} {tcp} {http} {sync} {sync_every}."""

    name: str
    command: str
    ours: bool = True
    nodes: int = 0  # of a cluster, each topic with as many replicas; 0: a server that is alone
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, *, data: Path, tcp: str, http: str, sync: str, flags: Sequence[str]) -> list[str]:
        """The argument list. A daemon that can not sync before it answers has no sync=always cells."""
        if self.nodes and flags:
            raise NotForThisSubject("the rows that need flags of their own are for one server")
        if sync == "always" and "{sync" not in self.command:
            raise NotForThisSubject("put {sync_every} into the peer's command to run it with a sync per message")
        template = self.command if "{data}" in self.command else f"{self.command} {NSQD_FLAGS}"
        values = {
            "data": data,
            "tcp": tcp,
            "http": http,
            "sync": sync,
            "sync_every": 1 if sync == "always" else 2500,
        }
        return [word.format(**values) for word in shlex.split(template)] + list(flags)


def compile_modules() -> None:
    """Write the bytecode of our broker, as installing a wheel does: the first start should cost what all others do."""
    found = importlib.util.find_spec("nsqha")
    if found is not None and found.submodule_search_locations:
        compileall.compile_dir(found.submodule_search_locations[0], quiet=2)


def our_broker(implementation: str, command: str | None = None) -> Subject:
    """This project's `nsqd`, with or without its compiled functions."""
    installed = Path(sys.executable).parent / "nsqd"
    return Subject(
        name=implementation,
        command=f"{command or shlex.quote(str(installed))} {NSQD_FLAGS} --sync={{sync}}",
        environment={"NSQHA_NO_EXT": "1" if implementation == "pure" else ""},
    )


def our_cluster(nodes: int) -> Subject:
    """So many of our brokers with etcd and a lookup daemon, as `nsqha dev --nodes` starts them.

    Clients talk to the first node, which leads what they publish to; CPU and memory are those of the brokers together.
    """
    installed = Path(sys.executable).parent / "nsqha"
    ports = " ".join(
        f"--{name}-port=0" for name in ("tcp", "http", "grpc", "peer", "etcd", "lookupd-tcp", "lookupd-http")
    )
    return Subject(
        name=f"{nodes} nodes",
        command=f"{shlex.quote(str(installed))} dev --json --nodes={nodes} --data-dir={{data}} --sync={{sync}} {ports}",
        nodes=nodes,
    )


class Server:
    """A running daemon and its data directory. `start` again after `stop` or `kill` to measure a restart."""

    def __init__(
        self,
        subject: Subject,
        directory: Path,
        *,
        sync: str,
        flags: Sequence[str] = (),
        cores: set[int] | None = None,
    ) -> None:
        self.subject = subject
        self.data = directory / "data"
        self.ready_s = 0.0
        self._sync = sync
        self._flags = flags
        self._cores = cores
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.tcp: Address = ("127.0.0.1", 0)
        self.http: Address = ("127.0.0.1", 0)
        self.data.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start and wait until /ping answers 200; `ready_s` is the time since just before exec."""
        ports_known = "{tcp}" in self.subject.command and not self.subject.ours
        tcp, web = (_free_address(), _free_address()) if ports_known else ("127.0.0.1:0", "127.0.0.1:0")
        arguments = self.subject.arguments(data=self.data, tcp=tcp, http=web, sync=self._sync, flags=self._flags)
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        environment |= {name: value for name, value in self.subject.environment.items() if value}
        begun = time.perf_counter()
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=self._before_exec,
                )
            except OSError as error:
                raise CannotStart(f"{arguments[0]}: {error.strerror}") from error
        self.tree = ProcessTree([self._process.pid])
        deadline = begun + START_TIMEOUT_S
        if self.subject.nodes:
            nodes = self._nodes(deadline)
            self.tcp, self.http = _address(nodes[0]["tcp"]), _address(nodes[0]["http"].removeprefix("http://"))
            self.tree = ProcessTree([node["pid"] for node in nodes])
        elif ports_known:
            self.tcp, self.http = _address(tcp), _address(web)
        else:
            self.tcp, self.http = self._announced(deadline)
        while not _answers_ping(self.http):
            self._still_starting(deadline)
        self.ready_s = time.perf_counter() - begun

    def stop(self) -> float:
        """End the daemon in the ordinary way; the seconds it took."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the daemon as a crash does."""
        self._end(signal.SIGKILL)

    def empty(self) -> None:
        """Forget all data of a server that is not running."""
        shutil.rmtree(self.data)
        self.data.mkdir()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 12) -> str:
        """The end of what the daemon printed."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def get(self, path: str) -> bytes:
        """The body of a GET on the daemon's HTTP port."""
        connection = http.client.HTTPConnection(*self.http, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    @property
    def grpc(self) -> str:
        """The address of our broker's administration, once it listens."""
        deadline = time.perf_counter() + START_TIMEOUT_S
        while not (found := re.findall(r"\bgRPC: listening on (\S+:\d+)\s", self._log.read_text(errors="replace"))):
            self._still_starting(deadline)
        return str(found[-1])

    def _before_exec(self) -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._cores:
            os.sched_setaffinity(0, self._cores)

    def _end(self, number: signal.Signals) -> float:
        process, self._process = self._process, None
        if process is None:
            return 0.0
        begun = time.perf_counter()
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return time.perf_counter() - begun

    def _announced(self, deadline: float) -> tuple[Address, Address]:
        """The addresses in the daemon's own words: `TCP: listening on 127.0.0.1:4150`, the same for HTTP."""
        while True:
            found = parse_listening(self._log.read_text(errors="replace"))
            if "TCP" in found and "HTTP" in found:
                return found["TCP"], found["HTTP"]
            self._still_starting(deadline)

    def _nodes(self, deadline: float) -> list[dict[str, Any]]:
        """The nodes of a cluster, from the line of JSON that it prints when it serves."""
        while True:
            for line in self._log.read_text(errors="replace").splitlines():
                if line.startswith("{"):
                    nodes: list[dict[str, Any]] = json.loads(line)["nodes"]
                    return nodes
            self._still_starting(deadline)

    def _still_starting(self, deadline: float) -> None:
        if not self.alive():
            raise CannotStart(f"{self.subject.name} ended while starting:\n{self.log_tail()}")
        if time.perf_counter() > deadline:
            raise CannotStart(f"{self.subject.name} is not ready after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}")
        time.sleep(POLL_S)


@contextmanager
def fresh_server(
    subject: Subject, workspace: Path, *, sync: str, flags: Sequence[str] = (), cores: set[int] | None = None
) -> Iterator[Server]:
    """A server on an empty data directory; both are gone afterwards, whatever happens."""
    directory = workspace / "cell"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    server = Server(subject, directory, sync=sync, flags=flags, cores=cores)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def parse_listening(text: str) -> dict[str, Address]:
    """Addresses by protocol from a daemon's log."""
    found = re.findall(r"\b(TCP|HTTP): listening on (\S+:\d+)\s", text)
    return {protocol: _address(address) for protocol, address in found}


def _address(text: str) -> Address:
    host, port = text.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _answers_ping(address: Address) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
