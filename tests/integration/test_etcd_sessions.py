"""Leases, registrations and clones against a real etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from nsqha.clock import SystemClock
from nsqha.election.model import NodeInfo
from nsqha.errors import ConfigError
from tests.etcd_server import EtcdServer, eventually
from tests.integration.etcd_rig import Open, Seen


def test_only_who_ticks_stays_alive(shared_etcd: EtcdServer, open_store: Open) -> None:
    alive, silent = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    lost = threading.Event()
    ticking = alive.sessions.open(ttl_s=2, lost=lambda: pytest.fail("lost, though it ticked"))
    hanging = silent.sessions.open(ttl_s=2, lost=lost.set)
    ticking.register(NodeInfo(7))
    first = hanging.register(NodeInfo(8))
    eventually(lambda: alive.watch.view().nodes.keys() == {7, 8})
    seen = Seen(alive)

    def gone() -> bool:
        ticking.ticked()
        return 8 not in alive.watch.view().nodes

    eventually(gone)
    assert f"nodes/{8:016x}" in seen.names
    assert ticking.fresh(SystemClock().monotonic())
    assert not hanging.fresh(SystemClock().monotonic())
    hanging.ticked()  # the loop runs again: the next renewal learns the truth
    assert lost.wait(10)
    again = silent.sessions.open(ttl_s=2, lost=lambda: None)
    assert again.register(NodeInfo(8)).registration > first.registration


def test_a_node_waits_for_its_earlier_life_to_end(shared_etcd: EtcdServer, open_store: Open) -> None:
    killed, restarted = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    earlier = killed.sessions.open(ttl_s=2, lost=lambda: None)
    first = earlier.register(NodeInfo(7))
    earlier._lease.stop(revoke=False)  # kill -9
    session = restarted.sessions.open(ttl_s=2, lost=lambda: None)
    with Ticking(session.ticked):
        second = session.register(NodeInfo(7))
    assert second.registration > first.registration
    assert restarted.records.nodes() == {7: second}


def test_a_copied_data_directory_is_refused(shared_etcd: EtcdServer, open_store: Open) -> None:
    original, copy = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    session = original.sessions.open(ttl_s=2, lost=lambda: None)
    clone = copy.sessions.open(ttl_s=2, lost=lambda: None)
    with Ticking(session.ticked, clone.ticked):
        first = session.register(NodeInfo(7, name="a", host="h1"))
        with pytest.raises(ConfigError, match=r"\(a on h1, \).*is a copy"):
            clone.register(NodeInfo(7, name="b"))
        assert original.records.nodes() == {7: first}


class Ticking:
    """A loop that runs."""

    def __init__(self, *ticked: Callable[[], None]) -> None:
        self._ticked = ticked
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            for ticked in self._ticked:
                ticked()
