"""The ports that tests draw for daemons: below the ephemeral range, and no two daemons of one test run get the same."""

from __future__ import annotations

from itertools import islice

from tests.integration.servers import EPHEMERAL_FIRST, PORT_FIRST, free_port, ports_of


def drawn(count: int, **environment: str) -> list[int]:
    return list(islice(ports_of(environment, 1), count))


def test_none_comes_again_before_all_others_have() -> None:
    whole = EPHEMERAL_FIRST - PORT_FIRST
    found = drawn(2 * whole)
    assert set(found[:whole]) == set(range(PORT_FIRST, EPHEMERAL_FIRST))
    assert found[whole:] == found[:whole] != sorted(found[:whole])


def test_workers_have_none_in_common() -> None:
    of = [set(drawn(20_000, PYTEST_XDIST_WORKER=f"gw{n}", PYTEST_XDIST_WORKER_COUNT="3")) for n in range(3)]
    assert sum(map(len, of)) == len(set().union(*of)) == EPHEMERAL_FIRST - PORT_FIRST


def test_a_worker_that_took_the_place_of_one_that_died_has_some_too() -> None:
    assert drawn(1, PYTEST_XDIST_WORKER="gw2", PYTEST_XDIST_WORKER_COUNT="2")


def test_ports_that_are_drawn_before_they_are_used_differ() -> None:
    found = [free_port() for _ in range(500)]
    assert len(set(found)) == len(found)
