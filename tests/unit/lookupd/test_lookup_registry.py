"""What the lookup daemon remembers and shows: producers leave, names stay, tombstones and silence hide."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookupd import registry as registry_module
from lookupd.registry import Peer, PeerInfo, Registry
from nsqha.clock import Now
from nsqha.ids import is_ephemeral

T0 = Now(1000.0, 10**18)


def later(seconds: float) -> Now:
    return Now(T0.mono + seconds, T0.wall_ns + int(seconds * 1e9))


def info(host: str = "a", http_port: int = 4151) -> PeerInfo:
    return PeerInfo(broadcast_address=host, tcp_port=4150, http_port=http_port, version="1.3.0")


def registry() -> Registry:
    return Registry(inactive_timeout_s=300, tombstone_lifetime_s=45)


def producers(db: Registry, topic: str, now: Now = T0) -> list[str]:
    found = db.lookup(topic, now)
    assert found is not None
    return [peer.id for peer in found.producers]


def test_a_channel_registers_its_topic_as_well() -> None:
    db = registry()
    peer = db.join("p1", info(), T0)
    assert db.register(peer, "orders", "billing")
    assert db.topics() == ["orders"]
    assert db.channels("orders") == ["billing"]
    assert producers(db, "orders") == ["p1"]


def test_names_stay_when_the_producer_leaves() -> None:
    db = registry()
    peer = db.join("p1", info(), T0)
    db.register(peer, "orders", "billing")
    db.leave(peer)
    assert producers(db, "orders") == []
    assert db.channels("orders") == ["billing"]
    assert db.nodes(T0) == []


def test_a_peer_that_came_back_from_the_same_port_stays_when_its_old_connection_ends() -> None:
    """A host that lost power, or a proxy: the new connection may be here before the end of the old one is known."""
    db = registry()
    old = db.join("p1", info(), T0)
    db.register(old, "orders", "billing#ephemeral")
    db.register(old, "live#ephemeral", "c")
    new = db.join("p1", info("b"), later(1))
    db.register(new, "orders", "billing#ephemeral")
    db.register(new, "live#ephemeral", "c")
    db.leave(old)
    found = db.lookup("orders", later(1))
    assert found is not None and found.producers == [new] and found.channels == ["billing#ephemeral"]
    assert producers(db, "live#ephemeral") == ["p1"]
    assert [(node.peer, node.topics) for node in db.nodes(later(1))] == [
        (new, [("live#ephemeral", False), ("orders", False)])
    ]
    db.leave(new)
    assert db.topics() == ["orders"] and producers(db, "orders") == [] and db.channels("orders") == []


def test_ephemeral_names_go_with_their_last_producer() -> None:
    db = registry()
    one, two = db.join("p1", info(), T0), db.join("p2", info("b"), T0)
    for peer in (one, two):
        db.register(peer, "orders", "tail#ephemeral")
        db.register(peer, "live#ephemeral", "c")
    db.unregister(one, "orders", "tail#ephemeral")
    db.unregister(one, "live#ephemeral")
    assert db.topics() == ["live#ephemeral", "orders"]
    assert db.channels("orders") == ["tail#ephemeral"]
    db.leave(two)
    assert db.topics() == ["orders"]
    assert db.channels("orders") == []


def test_unregister_of_a_topic_leaves_its_channels_too() -> None:
    db = registry()
    peer = db.join("p1", info(), T0)
    db.register(peer, "orders", "billing")
    db.unregister(peer, "orders")
    assert producers(db, "orders") == []
    assert not any(peer.topics.values())
    assert [key for key, members in db.registrations() if members] == ["client::"]


def test_unknown_names_can_be_unregistered() -> None:
    db = registry()
    peer = db.join("p1", info(), T0)
    db.unregister(peer, "nope")
    db.unregister(peer, "nope", "c")
    assert db.topics() == []


def test_a_silent_producer_is_hidden_until_it_pings() -> None:
    db = registry()
    peer = db.join("p1", info(), T0)
    db.register(peer, "orders")
    assert producers(db, "orders", later(300)) == ["p1"]
    assert producers(db, "orders", later(300.1)) == []
    assert db.nodes(later(301)) == []
    peer.heard = later(301)
    assert producers(db, "orders", later(302)) == ["p1"]


def test_a_tombstone_hides_one_node_from_one_topic_for_its_lifetime() -> None:
    db = registry()
    one, two = db.join("p1", info("a"), T0), db.join("p2", info("b"), T0)
    for peer in (one, two):
        db.register(peer, "orders")
        db.register(peer, "other")
    db.tombstone("orders", "a:4151", T0)
    assert producers(db, "orders") == ["p2"]
    assert producers(db, "other") == ["p1", "p2"]
    assert [node.topics for node in db.nodes(T0)] == [
        [("orders", True), ("other", False)],
        [("orders", False), ("other", False)],
    ]
    assert producers(db, "orders", later(44.9)) == ["p2"]
    assert producers(db, "orders", later(45)) == ["p1", "p2"]


def test_registering_again_keeps_a_tombstone_but_registering_afresh_lifts_it() -> None:
    db = registry()
    peer = db.join("p1", info("a"), T0)
    db.register(peer, "orders")
    db.tombstone("orders", "a:4151", T0)
    db.register(peer, "orders", "c")
    assert producers(db, "orders") == []
    db.unregister(peer, "orders")
    db.register(peer, "orders")
    assert producers(db, "orders") == ["p1"]


def test_a_deleted_topic_is_unknown_and_can_come_back() -> None:
    db = registry()
    peer = db.join("p1", info(), T0)
    db.register(peer, "orders", "c")
    db.delete_topic("orders")
    db.delete_topic("orders")
    assert db.lookup("orders", T0) is None
    assert not peer.topics
    assert not any(peer.topics.values())
    db.register(peer, "orders")
    assert producers(db, "orders") == ["p1"]


def test_a_channel_can_be_deleted_once() -> None:
    db = registry()
    db.create("orders", "c")
    assert db.delete_channel("orders", "c")
    assert not db.delete_channel("orders", "c")
    assert not db.delete_channel("nope", "c")
    assert producers(db, "orders") == []


def test_names_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(registry_module, "NAMES_MAX", 3)
    db = registry()
    peer = db.join("p1", info(), T0)
    assert db.register(peer, "a", "c")
    assert not db.register(peer, "b", "c")
    assert db.topics() == ["a"]
    assert db.register(peer, "b")
    assert db.register(peer, "b")
    assert not db.create("d")
    db.delete_topic("a")
    assert db.create("d", "e")


PEERS = ("p1", "p2", "p3")
TOPICS = ("t", "u", "e#ephemeral")
CHANNELS = ("", "c", "x#ephemeral")
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["register", "unregister", "leave", "delete_topic", "delete_channel", "create"]),
        st.sampled_from(PEERS),
        st.sampled_from(TOPICS),
        st.sampled_from(CHANNELS),
    ),
    max_size=40,
)


class Model:
    """The registry as three sets and no bookkeeping."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self.facts: set[tuple[str, str, str]] = set()  # (topic, channel or "", peer)

    def forget(self, topic: str, channel: str | None) -> None:
        gone = [name for name in self.names if name[0] == topic and channel in (None, name[1])]
        self.names -= set(gone)
        self.facts = {fact for fact in self.facts if (fact[0], fact[1]) not in gone}

    def apply(self, operation: str, peer: str, topic: str, channel: str) -> None:
        match operation:
            case "register":
                for name in {"", channel}:
                    self.names.add((topic, name))
                    self.facts.add((topic, name, peer))
            case "create":
                self.names |= {(topic, ""), (topic, channel)}
            case "delete_topic":
                self.forget(topic, None)
            case "delete_channel":
                if channel:
                    self.forget(topic, channel)
            case "unregister":
                self.remove(peer, topic, channel)
            case "leave":
                for name in sorted({fact[0] for fact in self.facts if fact[2] == peer}):
                    self.remove(peer, name, "")

    def remove(self, peer: str, topic: str, channel: str) -> None:
        touched = [name for name in self.names if name[0] == topic and (not channel or name[1] == channel)]
        self.facts -= {(name[0], name[1], peer) for name in touched}
        for name in sorted(touched, reverse=True):  # channels before their topic
            if is_ephemeral(name[1] or name[0]) and not any(fact[:2] == name for fact in self.facts):
                self.forget(name[0], name[1] or None)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_any_history_gives_what_a_naive_model_gives(operations: list[tuple[str, str, str, str]]) -> None:
    db, model = registry(), Model()
    peers: dict[str, Peer] = {}
    for operation, name, topic, channel in operations:
        peer = peers.get(name) or peers.setdefault(name, db.join(name, info(name), T0))
        match operation:
            case "register":
                db.register(peer, topic, channel)
            case "unregister":
                db.unregister(peer, topic, channel)
            case "leave":
                db.leave(peers.pop(name))
            case "delete_topic":
                db.delete_topic(topic)
            case "delete_channel":
                db.delete_channel(topic, channel)
            case "create":
                db.create(topic, channel)
        model.apply(operation, name, topic, channel)
    names = {(topic, "") for topic in db.topics()}
    names |= {(topic, channel) for topic in db.topics() for channel in db.channels(topic)}
    facts = set()
    for key, members in db.registrations():
        category, topic, channel = key.split(":")
        if category != "client":
            facts.update((topic, channel, peer.id) for peer, _ in members)
    assert names == model.names
    assert facts == model.facts
    assert db._names == len(names)
    for peer in peers.values():
        mine = {fact[:2] for fact in facts if fact[2] == peer.id}
        assert {*peer.topics} == {topic for topic, channel in mine if not channel}
        assert {(topic, channel) for topic, of in peer.topics.items() for channel in of} == {
            name for name in mine if name[1]
        }
    assert db._registered == len(facts)


def test_registrations_are_bounded_by_names_times_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "REGISTRATIONS_MAX", 10)
    db = registry()
    peers = [db.join(f"p{number}", info(f"p{number}"), T0) for number in range(6)]
    assert [db.register(peer, "t", "c") for peer in peers] == [True] * 5 + [False]
    assert not db.register(peers[0], "other") and db.topics() == ["t"], "a refused name is not kept"
    db.unregister(peers[0], "t", "c")
    assert not db.register(peers[5], "t", "c")
    db.leave(peers[1])
    assert db.register(peers[5], "t", "c")
    db.delete_topic("t")
    assert db.register(peers[0], "t", "c") and db._registered == 2


def test_what_goes_while_an_answer_is_made_is_passed_over() -> None:
    db = registry()
    peer = db.join("p1", info("p1"), T0)
    for topic in ("a", "b", "c"):
        db.register(peer, topic, "x")
    found = []
    for key, members in db.registrations():
        found += [key] if members else []
        if key == "topic:a:":
            db.delete_channel("a", "x")
            db.delete_topic("b")
            db.register(peer, "d")
    assert found == ["client::", "topic:a:", "topic:c:", "channel:c:x"]
    assert (db.hidden(peer, "b", T0), db.hidden(peer, "c", T0)) == (None, False)
