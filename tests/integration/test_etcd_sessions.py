"""Leases, registrations and clones against a real etcd."""

from __future__ import annotations

import threading

import pytest

from nsqha.clock import SystemClock
from nsqha.election.model import NodeInfo
from nsqha.errors import ConfigError
from tests.etcd_server import EtcdServer, eventually
from tests.integration.etcd_rig import Open, Seen, Ticking


def test_only_who_ticks_stays_alive(shared_etcd: EtcdServer, open_store: Open) -> None:
    alive, silent = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    lost = threading.Event()
    # It must renew in time also beside other work of the machine; the other one shall be over soon.
    ticking = alive.sessions.open(ttl_s=10, lost=lambda: pytest.fail("lost, though it ticked"))
    hanging = silent.sessions.open(ttl_s=2, lost=lost.set)
    with Ticking(ticking.ticked):
        ticking.register(NodeInfo(7))
        seen = Seen(alive)
        first = hanging.register(NodeInfo(8))
        # It came, and went.
        eventually(lambda: seen.names.count(f"nodes/{8:016x}") > 1 and alive.watch.view().nodes.keys() == {7})
        assert ticking.fresh(SystemClock().monotonic())
        assert not hanging.fresh(SystemClock().monotonic())
    hanging.ticked()  # the loop runs again: the next renewal learns the truth
    assert lost.wait(20)
    again = silent.sessions.open(ttl_s=2, lost=lambda: None)
    assert again.register(NodeInfo(8)).registration > first.registration


def test_a_node_waits_for_its_earlier_life_to_end(shared_etcd: EtcdServer, open_store: Open) -> None:
    killed, restarted = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    earlier = killed.sessions.open(ttl_s=2, lost=lambda: None)
    first = earlier.register(NodeInfo(7))
    earlier._lease.stop(revoke=False)  # kill -9
    session = restarted.sessions.open(ttl_s=6, lost=lambda: None)
    with Ticking(session.ticked):
        second = session.register(NodeInfo(7))
    assert second.registration > first.registration
    assert restarted.records.nodes() == {7: second}


def test_a_copied_data_directory_is_refused(shared_etcd: EtcdServer, open_store: Open) -> None:
    original, copy = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    session = original.sessions.open(ttl_s=4, lost=lambda: None)
    clone = copy.sessions.open(ttl_s=4, lost=lambda: None)
    with Ticking(session.ticked, clone.ticked):
        first = session.register(NodeInfo(7, name="a", host="h1"))
        with pytest.raises(ConfigError, match=r"\(a on h1, \).*is a copy"):
            clone.register(NodeInfo(7, name="b"))
        assert original.records.nodes() == {7: first}


def test_a_copy_is_refused_before_it_may_start(shared_etcd: EtcdServer, open_store: Open) -> None:
    original, copy = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    claim = original.sessions.claim(NodeInfo(7, name="a", folder="boot 8:1 5"), ttl_s=1)
    with pytest.raises(ConfigError, match=r"\(a on no host, \).*is a copy"):
        copy.sessions.claim(NodeInfo(7, name="b", folder="boot 8:1 6"), ttl_s=1)  # the original still starts
    session = original.sessions.open(ttl_s=1, lost=lambda: None)
    with Ticking(session.ticked):
        session.register(NodeInfo(7, name="a", folder="boot 8:1 5"))
        claim.release()
        with pytest.raises(ConfigError, match="is a copy"):
            copy.sessions.claim(NodeInfo(7, name="b", folder=""), ttl_s=1)
    session.close()
    copy.sessions.claim(NodeInfo(7, name="b"), ttl_s=1).release()


def test_a_predecessor_that_had_the_same_lock_is_not_waited_for(shared_etcd: EtcdServer, open_store: Open) -> None:
    killed, restarted = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    node = NodeInfo(7, folder="boot 8:1 5")
    earlier, unreleased = killed.sessions.open(ttl_s=60, lost=lambda: None), killed.sessions.claim(node, ttl_s=60)
    earlier.register(node)
    begun = SystemClock().monotonic()
    restarted.sessions.claim(node, ttl_s=60).release()
    assert SystemClock().monotonic() - begun < 30, "neither its lease nor that of its claim was waited for"
    unreleased.release()


def test_a_claim_waits_until_the_lease_of_a_predecessor_ends(shared_etcd: EtcdServer, open_store: Open) -> None:
    killed, restarted = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    earlier = killed.sessions.open(ttl_s=2, lost=lambda: None)
    earlier.register(NodeInfo(7))
    earlier._lease.stop(revoke=False)  # kill -9
    restarted.sessions.claim(NodeInfo(7), ttl_s=6).release()
    assert not restarted.records.nodes()


def test_a_name_belongs_to_one_live_node(shared_etcd: EtcdServer, open_store: Open) -> None:
    first, second = open_store(shared_etcd.endpoint), open_store(shared_etcd.endpoint)
    session = first.sessions.open(ttl_s=4, lost=lambda: None)
    other = second.sessions.open(ttl_s=4, lost=lambda: None)
    with Ticking(session.ticked, other.ticked):
        session.register(NodeInfo(7, name="a", tcp_address="h1:1"))
        with pytest.raises(ConfigError, match="node name a is taken by node 0000000000000007 at h1:1, which is alive"):
            other.register(NodeInfo(8, name="a"))
        assert set(first.records.nodes()) == {7}, "no other node sees one that is refused"
        threading.Timer(1.0, session.close).start()
        assert other.register(NodeInfo(8, name="a")).registration, "a node that is gone has its name no more"
