"""Hosts on a switch, and what cuts do to their packets."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.servers import Host, wait_until
from tests.jepsen.hosts.namespaces import BOOT_ID
from tests.jepsen.hosts.network import Network, NotPossible

PORT = 7000
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
kept = []
while True:
    kept.append(server.accept()[0])
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3]))"


@contextlib.contextmanager
def accepting(host: Host) -> Iterator[None]:
    """A server on a host."""
    command = [*host.prefix, sys.executable, "-c", ECHO, host.ip, str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield
    finally:
        server.kill()
        server.communicate()


def connects(source: Host, target: Host, seconds: float = 10) -> bool:
    command = [*source.prefix, sys.executable, "-c", CONNECT, target.ip, str(PORT), str(seconds)]
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
    a, b = network.host("a"), network.host("b")
    with accepting(b):
        yield a, b


HERE = Host()
SHORT = 0.5  # in which a connection that is cut off is not made


def test_a_cut_swallows_packets_and_counts_them(network: Network, two: tuple[Host, Host]) -> None:
    a, b = two
    assert connects(a, b)
    cut = network.cut("a", "b")
    assert cut.packets() == 0
    assert not connects(a, b, SHORT)
    assert cut.packets() > 0
    cut.heal()
    swallowed = cut.packets()
    assert connects(a, b)
    assert cut.packets() == swallowed, "a cut that has ended counts no more"


def test_a_cut_of_one_direction_leaves_the_other(network: Network, two: tuple[Host, Host]) -> None:
    a, b = two
    cut = network.cut_one_way("b", "a")
    before = network.lost()
    assert not connects(a, b, SHORT)
    lost = network.lost() - before
    assert lost["b", "a"] > 0, "the answers are lost"
    assert lost["a", "b"] == 0, "the question has arrived"
    cut.heal()
    assert connects(a, b)


def test_what_two_cuts_have_cut_passes_when_both_are_healed(network: Network, two: tuple[Host, Host]) -> None:
    a, b = two
    first, second = network.cut("a", "b"), network.cut_off("a", ["a", "b"])
    first.heal()
    assert not connects(a, b, SHORT)
    second.heal()
    assert connects(a, b)


def test_no_cut_touches_the_control_leg(network: Network, two: tuple[Host, Host]) -> None:
    _, b = two
    network.host("c")
    cut = network.cut_off("b", ["a", "c"])
    assert connects(HERE, b)
    cut.heal()


def test_two_networks_are_apart_and_nothing_stays_of_them() -> None:
    try:
        with Network.made() as one, Network.made() as other:
            a, b = one.host("a"), other.host("a")
            assert a.ip != b.ip
            legs = leg_names()
            assert len(legs) >= 2
            with accepting(b):
                assert connects(HERE, b)
                assert not connects(a, b, SHORT)
    except NotPossible as error:
        pytest.skip(f"hosts can not be made here: {error}")
    wait_until(lambda: not (leg_names() & {one.leg, other.leg}), "the legs are gone")


def test_a_host_that_boots_has_another_boot_id_and_the_machine_does_not(network: Network) -> None:
    network.host("a")
    inside = network.namespaces("a")
    before = Path(BOOT_ID).read_text()
    assert inside.run("cat", BOOT_ID) == before
    ids = [inside.boot() for _ in range(2)]
    assert inside.run("cat", BOOT_ID) == f"{ids[1]}\n"
    assert Path(BOOT_ID).read_text() == before
    assert len({*ids, before.strip()}) == 3


def leg_names() -> set[str]:
    said = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return {name.split("@")[0] for line in said.splitlines() if (name := line.split(": ")[1]).startswith("nsqha")}
