"""Controllers hear which leaders this node has lost, each time that changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nsqha.election.model import NodeInfo
from nsqha.election.session import View
from nsqha.server.node.cluster.suspects import Suspects

ME, LEADER = 1, 2


class Stream:
    """What a controller was sent: the life of the node, and whom it suspects."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[int]]] = []

    def send(self, message: Any) -> None:
        self.sent.append((message.registration, list(message.suspects)))


def view(life: int) -> View:
    return View(nodes={LEADER: NodeInfo(LEADER, registration=life)} if life else {})


def watched(life: int = 3) -> tuple[Suspects, Stream]:
    suspects, stream = Suspects(SimpleNamespace(view=lambda: view(life)), node=ME, cluster_id=9), Stream()  # type: ignore[arg-type]
    suspects.registered(7)
    suspects.accept(stream)  # type: ignore[arg-type]
    return suspects, stream


def test_a_controller_hears_at_once_and_of_each_change():
    suspects, stream = watched()
    suspects.lost(LEADER)
    suspects.found(5)
    suspects.found(LEADER)
    suspects.registered(8)
    assert stream.sent == [(7, []), (7, [LEADER]), (7, []), (8, [])]


def test_an_unknown_leader_is_suspected_of_nothing():
    suspects, stream = watched()
    suspects.lost(0)
    assert stream.sent == [(7, [])]


def test_a_node_in_another_life_or_gone_for_good_is_forgiven():
    for after, forgiven in ((3, False), (4, True), (0, True)):
        suspects, stream = watched()
        suspects.lost(LEADER)
        suspects.forgive(view(after))
        assert (stream.sent[-1] == (7, [])) is forgiven


def test_a_stream_that_ended_is_sent_nothing():
    suspects, stream = watched()
    live = suspects.accept(other := Stream())  # type: ignore[arg-type]
    live.on_closed("gone")
    suspects.lost(LEADER)
    assert len(stream.sent) == 2 and len(other.sent) == 1


def test_a_node_that_stops_loses_every_stream_and_suspects_none():
    suspects, stream = watched()
    suspects.close()
    suspects.lost(LEADER)
    assert stream.sent == [(7, [])]
