"""Who may ask what: nodes of the cluster, lookup daemons, administrators, and strangers with the right CA."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nsqha.election.model import NodeInfo, PartitionMeta, TopicRecord, Versioned
from nsqha.election.session import View
from nsqha.errors import Unavailable
from nsqha.server.peers.api import PeerIdentity
from nsqha.server.peers.identity import Members, MembersOnly, is_member, may_administrate, may_call

NODES = {1: NodeInfo(1, broadcast_address="one"), 2: NodeInfo(2, broadcast_address="two")}
AWAY = PartitionMeta(leader=1, isr={1: 11, 3: 33}, replicas=(1, 3, 4))
VIEW = View(nodes=NODES, topics={"t": Versioned(TopicRecord("t", 7, 0, partitions={0: AWAY}), 1)})

NODE = PeerIdentity("a", 1, (), True)
NAMED = PeerIdentity("a", 0, ("other", "two"), True)
AWAY_NODE = PeerIdentity("a", 3, (), True)
JOINING = PeerIdentity("a", 4, (), True)
LOOKUPD = PeerIdentity("a", 0, ("lookup1",), True)
FOREIGN = PeerIdentity("a", 99, ("one",), True)
ADMINISTRATOR = PeerIdentity("a", verified=True, administrator=True)
NOBODY = PeerIdentity("a", verified=True)  # an address, a mail address, or only a common name
UNVERIFIED = PeerIdentity("a")  # there is no TLS


@pytest.mark.parametrize("peer", [NODE, NAMED, AWAY_NODE, JOINING])
def test_nodes_of_the_cluster_may_do_everything(peer: PeerIdentity) -> None:
    assert is_member(VIEW, peer) and may_administrate(VIEW, peer)
    assert all(may_call(VIEW, peer, method) for method in ("Push", "Fetch", "Status", "Administer"))


@pytest.mark.parametrize("peer", [LOOKUPD, FOREIGN, NOBODY])
def test_others_with_a_certificate_may_not(peer: PeerIdentity) -> None:
    assert not is_member(VIEW, peer) and not may_administrate(VIEW, peer)
    for method in ("Push", "Fetch", "EpochEnd", "Forward", "Relay", "Reconcile", "Administer"):
        assert not may_call(VIEW, peer, method)


def test_a_lookup_daemon_may_ask_how_nodes_are_and_a_foreign_node_may_not() -> None:
    for method in ("Status", "Live", "KnownChannels"):
        assert may_call(VIEW, LOOKUPD, method)
        assert not any(may_call(VIEW, peer, method) for peer in (FOREIGN, NOBODY, ADMINISTRATOR))


def test_a_uid_decides_alone() -> None:
    assert not is_member(VIEW, FOREIGN), "its DNS name is one of ours, its uid is not"


def test_an_administrator_is_who_the_certificate_calls_so() -> None:
    assert may_administrate(VIEW, ADMINISTRATOR) and not is_member(VIEW, ADMINISTRATOR)
    assert may_administrate(VIEW, replace(LOOKUPD, administrator=True)), "whatever else it names"


def test_without_tls_everybody_is_believed() -> None:
    assert may_administrate(VIEW, UNVERIFIED) and may_call(VIEW, UNVERIFIED, "Push")


def test_a_node_without_lease_keeps_its_name_as_long_as_a_record_names_it() -> None:
    third = {3: NodeInfo(3, broadcast_address="three"), 9: NodeInfo(9, broadcast_address="nine")}
    views = [replace(VIEW, nodes={**NODES, **third}), VIEW, replace(VIEW, topics={})]
    known = Members(lambda: views[0])
    three, nine = PeerIdentity("a", 0, ("three",), True), PeerIdentity("a", 0, ("nine",), True)
    assert is_member(known.view(), three) and is_member(known.view(), nine)
    del views[0]  # both are gone, and nine held nothing
    assert is_member(known.view(), three) and not is_member(known.view(), nine)
    assert three.may_be(3, known.name_of(3)) and not nine.may_be(3, known.name_of(3))
    assert not nine.may_be(9, known.name_of(9))
    del views[0]
    assert not is_member(known.view(), three) and known.name_of(3) == "", "nothing names it any more"
    assert is_member(known.view(), NAMED)


class Server:
    """Where methods are registered."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def on_stream(self, method: str, accept: Any) -> None:
        self.methods[method] = accept

    on_call = on_stream


def test_strangers_do_not_reach_a_method() -> None:
    server, reached = Server(), []

    async def answer(peer: PeerIdentity, request: Any) -> Any:
        reached.append(peer)
        return request

    guarded = MembersOnly(cast(Any, server), lambda: VIEW)
    guarded.on_call("Fetch", answer)
    guarded.on_stream("Push", lambda stream: cast(Any, reached.append(stream.peer)))
    with pytest.raises(Unavailable, match="for nodes of this cluster"):
        asyncio.run(server.methods["Fetch"](FOREIGN, "?"))
    with pytest.raises(Unavailable, match="for nodes of this cluster"):
        server.methods["Push"](SimpleNamespace(peer=LOOKUPD))
    assert reached == []
    assert asyncio.run(server.methods["Fetch"](NODE, "?")) == "?"
    server.methods["Push"](SimpleNamespace(peer=NAMED))
    assert reached == [NODE, NAMED]
