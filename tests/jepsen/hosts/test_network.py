"""Hosts on a switch, and what cuts do to their packets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.servers import Host, wait_until
from tests.jepsen.hosts.conftest import ACCEPT, PORT, SHORT, connects, started
from tests.jepsen.hosts.namespaces import BOOT_ID
from tests.jepsen.hosts.network import Network, NotPossible

HERE = Host()


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
            with started(b, ACCEPT, b.ip, PORT):
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
