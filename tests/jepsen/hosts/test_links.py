"""What a link does to packets, seen by who receives them; and that connections live through it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.jepsen.hosts.conftest import SHORT, connects, started
from tests.jepsen.hosts.firewall import Drop, Firewall
from tests.jepsen.hosts.links import WHOLE, Link, Trouble
from tests.jepsen.hosts.namespaces import NotPossible
from tests.jepsen.hosts.network import Network

DATAGRAMS = 500
MEGABYTES = 2
# Answers with the numbers that have come, in their order, one second after the last one.
LIST = """
import socket, struct, sys
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
box.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
box.bind((sys.argv[1], 9))
print("ready", flush=True)
box.settimeout(1)
numbers = []
sys.stdin.readline()
try:
    while True:
        numbers.append(struct.unpack("I", box.recv(100))[0])
except TimeoutError:
    print(*numbers, flush=True)
"""
SEND = """
import socket, struct, sys, time
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(int(sys.argv[2])):
    box.sendto(struct.pack("I", n), (sys.argv[1], 9))
    time.sleep(0.0005)
"""
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 8000))
print("ready", flush=True)
while True:
    peer = server.accept()[0]
    while data := peer.recv(1 << 16):
        peer.sendall(data)
"""
# Sends what it is told to by stdin's lines, and says when the echo of it is back and right.
TALK = """
import hashlib, os, socket, sys, threading, time
peer = socket.create_connection((sys.argv[1], 8000), 20)
peer.settimeout(60)
print("ready", flush=True)
for line in sys.stdin:
    size = int(line)
    data = os.urandom(size)
    threading.Thread(target=peer.sendall, args=(data,)).start()
    back, began = bytearray(), time.monotonic()
    while len(back) < size:
        back += peer.recv(1 << 16)
    print(bytes(back) == data, time.monotonic() - began, flush=True)
"""


@pytest.fixture
def link(network: Network) -> Iterator[Link]:
    network.host("a"), network.host("b")
    try:
        with Link.plugged(network, "a") as link:
            yield link
    except NotPossible as error:
        pytest.skip(str(error))


def numbers(network: Network) -> list[int]:
    """What host b gets of 0, 1, 2 .. that host a sends."""
    a, b = network.host("a"), network.host("b")
    with started(b, LIST, b.ip) as receiver:
        subprocess.run([*a.prefix, sys.executable, "-c", SEND, b.ip, str(DATAGRAMS)], check=True)
        return [int(word) for word in receiver.communicate(b"\n")[0].split()]


def test_a_link_without_trouble_carries_all_in_order(network: Network, link: Link) -> None:
    assert numbers(network) == list(range(DATAGRAMS))
    assert link.sent().packets >= DATAGRAMS
    assert link.sent().lost == link.sent().delayed == 0


def test_what_is_lost_and_repeated_is_counted(network: Network, link: Link) -> None:
    link.trouble(sent=Trouble(loss=0.2, duplicate=0.2, delay=0.001))
    got, carried = numbers(network), link.sent()
    assert carried.lost > 20
    assert carried.duplicated > 20
    # Neighbours may have asked for each other meanwhile.
    assert abs(len(set(got)) - (DATAGRAMS - carried.lost)) <= 3
    assert abs(len(got) - len(set(got)) - carried.duplicated) <= 3
    assert sorted(got) == got, "and nothing overtakes"


def test_what_is_held_back_is_overtaken(network: Network, link: Link) -> None:
    link.trouble(sent=Trouble(reorder=0.1))
    got = numbers(network)
    assert sorted(got) == list(range(DATAGRAMS))
    assert got != sorted(got)
    assert link.sent().reordered > 5


def test_a_delay_is_had_in_each_direction_and_ends(network: Network, link: Link) -> None:
    a, b = network.host("a"), network.host("b")
    with started(b, ECHO, b.ip), started(a, TALK, b.ip) as talker:
        link.trouble(sent=Trouble(delay=0.1), received=Trouble(delay=0.15, jitter=0.05))
        assert asked(talker, 10) >= 0.2
        assert link.sent().delayed > 0
        assert link.received().delayed > 0
        link.trouble()
        before = link.sent().delayed
        asked(talker, 10)
        assert link.sent().delayed == before


def asked(talker: subprocess.Popen[bytes], size: int) -> float:
    """How long an echo of random bytes takes; AssertionError if it is not what was sent."""
    assert talker.stdin is not None
    assert talker.stdout is not None
    talker.stdin.write(b"%d\n" % size)
    talker.stdin.flush()
    right, seconds = talker.stdout.readline().split()
    assert right == b"True"
    return float(seconds)


def test_a_connection_lives_through_all_of_it(network: Network, link: Link) -> None:
    a, b = network.host("a"), network.host("b")
    bad = Trouble(delay=0.002, jitter=0.002, loss=0.02, duplicate=0.02, reorder=0.02)
    with started(b, ECHO, b.ip), started(a, TALK, b.ip) as talker:
        for trouble in (WHOLE, bad, WHOLE):
            link.trouble(sent=trouble, received=trouble)
            asked(talker, MEGABYTES << 18)
        carried = link.unplug()
        asked(talker, MEGABYTES << 20)
    assert min(carried.lost, carried.duplicated, carried.reordered) > 0


def test_a_slow_line_takes_its_time_and_loses_what_does_not_fit(network: Network, link: Link) -> None:
    a, b = network.host("a"), network.host("b")
    with started(b, ECHO, b.ip), started(a, TALK, b.ip) as talker:
        link.trouble(sent=Trouble(rate=200_000, queue=10_000))
        assert asked(talker, 100_000) >= 0.4
        carried = link.sent()
        assert carried.delayed > 0
        assert carried.overflowed > 0


def test_cuts_and_losses_are_had_behind_a_link_too(network: Network, link: Link) -> None:
    a, b = network.host("a"), network.host("b")
    with started(b, ECHO, b.ip):
        assert connects(a, b, port=8000)
        cut = network.cut_one_way("a", "b")
        assert not connects(a, b, SHORT, 8000)
        cut.heal()
        assert cut.packets() > 0
        try:
            firewall = Firewall(network)
        except NotPossible as error:
            pytest.skip(str(error))
        loss = firewall.drop(Drop("a", "b"))
        assert not connects(a, b, SHORT, 8000)
        loss.heal()
        assert loss.packets() > 0
        assert connects(a, b, port=8000)


def test_a_host_whose_link_is_gone_is_on_the_switch(network: Network, link: Link) -> None:
    a, b = network.host("a"), network.host("b")
    link.unplug()
    with started(b, ECHO, b.ip):
        assert connects(a, b, port=8000)
    link.unplug()
