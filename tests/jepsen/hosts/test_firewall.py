"""What the switch is told to lose is lost, counted, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.servers import Host
from tests.jepsen.hosts.conftest import ACCEPT, SHORT, connects, started
from tests.jepsen.hosts.firewall import Drop, Firewall
from tests.jepsen.hosts.namespaces import NotPossible
from tests.jepsen.hosts.network import Network

OTHER_PORT = 7001
DATAGRAMS = 1000
COUNT = """
import socket, sys
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
box.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
box.bind((sys.argv[1], 9))
print("ready", flush=True)
sys.stdin.readline()
box.setblocking(False)
got = 0
try:
    while True:
        box.recv(100)
        got += 1
except BlockingIOError:
    print(got, flush=True)
"""
SEND = """
import socket, sys
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(int(sys.argv[2])):
    box.sendto(b"x", (sys.argv[1], 9))
"""
ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
peer = server.accept()[0]
peer.recv(1)
peer.close()
server.close()
sys.stdin.readline()
"""
WAIT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
peer.send(b"x")
peer.settimeout(float(sys.argv[3]))
print("ended" if peer.recv(1) == b"" else "?")
"""


@pytest.fixture(scope="module")
def firewall(network: Network) -> Iterator[Firewall]:
    try:
        yield Firewall(network)
    except NotPossible as error:
        pytest.skip(str(error))


def test_one_direction_is_lost_and_counted(firewall: Firewall, two: tuple[Host, Host]) -> None:
    a, b = two
    loss = firewall.drop(Drop("a", "b"))
    assert loss.packets() == 0
    assert not connects(a, b, SHORT)
    assert loss.packets() > 0
    loss.heal()
    lost = loss.packets()
    assert connects(a, b)
    assert loss.packets() == lost


def test_a_port_is_lost_and_others_are_not(firewall: Firewall, two: tuple[Host, Host]) -> None:
    a, b = two
    with started(b, ACCEPT, b.ip, OTHER_PORT):
        loss = firewall.drop(Drop(target="b", port=OTHER_PORT))
        assert connects(a, b)
        assert loss.packets() == 0
        assert not connects(a, b, SHORT, OTHER_PORT)
        assert loss.packets() > 0
        assert connects(Host(), b, port=OTHER_PORT), "the control leg"
        loss.heal()
        assert connects(a, b, port=OTHER_PORT)


def test_what_is_lost_of_a_fraction_is_counted_packet_by_packet(firewall: Firewall, two: tuple[Host, Host]) -> None:
    a, b = two
    with started(b, COUNT, b.ip) as counter:
        loss = firewall.drop(Drop("a", "b", fraction=0.3), Drop("b", "a", fraction=0.3))
        subprocess.run([*a.prefix, sys.executable, "-c", SEND, b.ip, str(DATAGRAMS)], check=True)
        got = int(counter.communicate(b"\n")[0])
        loss.heal()
    assert got + loss.packets() == DATAGRAMS
    assert 0.15 * DATAGRAMS < loss.packets() < 0.45 * DATAGRAMS  # ten standard deviations


def test_nobody_hears_that_a_connection_has_ended(firewall: Firewall, two: tuple[Host, Host]) -> None:
    a, b = two

    def hears(port: int) -> bool:
        with started(b, ANSWER, b.ip, port):
            command = [*a.prefix, sys.executable, "-c", WAIT, b.ip, str(port), str(SHORT)]
            return b"ended" in subprocess.run(command, capture_output=True).stdout

    assert hears(OTHER_PORT + 1)
    loss = firewall.drop(Drop("b", "a", endings=True))
    assert not hears(OTHER_PORT + 2)
    assert loss.packets() > 0
    loss.heal()


def test_losses_come_and_go_apart_from_each_other(firewall: Firewall, two: tuple[Host, Host]) -> None:
    a, b = two
    first, second = firewall.drop(Drop("a", "b")), firewall.drop(Drop("b", "a"))
    second.heal()
    assert not connects(a, b, SHORT)
    first.heal()
    assert connects(a, b)
