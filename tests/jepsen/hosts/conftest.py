"""Hosts that several tests of this folder use."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.servers import Host
from tests.jepsen.hosts.network import Network, NotPossible

PORT = 7000
ACCEPT = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
kept = []
while True:
    kept.append(server.accept()[0])
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"
SHORT = 0.5  # in which a connection that is cut off is not made


@contextlib.contextmanager
def started(host: Host, code: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program on a host, which has said that it is ready."""
    command = [*host.prefix, sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def connects(source: Host, target: Host, seconds: float = 10, port: int = PORT) -> bool:
    command = [*source.prefix, sys.executable, "-c", CONNECT, target.ip, str(port), str(seconds)]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        with Network.made() as network:
            yield network
    except NotPossible as error:
        pytest.skip(f"hosts can not be made here: {error}")


@pytest.fixture(scope="module")
def two(network: Network) -> Iterator[tuple[Host, Host]]:
    """Two hosts, a and b; b accepts connections."""
    a, b = network.host("a"), network.host("b")
    with started(b, ACCEPT, b.ip, PORT):
        yield a, b
