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
        self.unheard: list[list[int]] = []

    def send(self, message: Any) -> None:
        self.sent.append((message.registration, list(message.suspects)))
        self.unheard.append(list(message.unheard))


def view(life: int) -> View:
    return View(nodes={LEADER: NodeInfo(LEADER, registration=life)} if life else {})


def watched(life: int = 3) -> tuple[Suspects, Stream]:
    suspects, stream = Suspects(SimpleNamespace(view=lambda: view(life)), node=ME, cluster_id=9), Stream()  # type: ignore[arg-type]
    suspects.registered(7)
    suspects.informs(stream)  # type: ignore[arg-type]
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
    suspects.informs(other := Stream())  # type: ignore[arg-type]
    suspects.stream_closed(other)  # type: ignore[arg-type]
    suspects.lost(LEADER)
    assert len(stream.sent) == 2 and len(other.sent) == 1


def test_a_node_that_stops_loses_every_stream_and_suspects_none():
    suspects, stream = watched()
    suspects.close()
    suspects.lost(LEADER)
    assert stream.sent == [(7, [])]


class Pushed:
    """A stream that a leader has opened."""

    def __init__(self, leader: int, silent: bool | None) -> None:
        self.leader = leader
        self.is_silent = silent
        self.late: list[bool] = []

    def silent(self, *, late: bool) -> bool | None:
        self.late.append(late)
        return self.is_silent


def test_a_leader_that_is_silent_is_named_apart_and_until_it_is_heard():
    suspects, stream = watched()
    pushed = Pushed(LEADER, True)
    for now in (1.0, 1.1, 1.2):
        suspects.look([pushed, Pushed(5, False), Pushed(6, None)], now)
    pushed.is_silent = False
    suspects.look([pushed], 1.3)
    assert stream.unheard == [[], [LEADER], []]
    assert all(suspected == [] for _, suspected in stream.sent)


def test_a_leader_that_is_heard_on_another_stream_is_not_silent():
    suspects, stream = watched()
    suspects.look([Pushed(LEADER, True), Pushed(LEADER, False)], 1.0)
    assert stream.unheard == [[]]


def test_a_stream_on_which_nobody_leads_any_more_says_nothing():
    suspects, stream = watched()
    suspects.look([Pushed(LEADER, True)], 1.0)
    suspects.look([Pushed(LEADER, None)], 1.1)
    assert stream.unheard == [[], [LEADER], []]


def test_looks_of_a_node_that_did_not_run_are_late():
    suspects, _ = watched()
    pushed = Pushed(LEADER, False)
    for now in (1.0, 1.1, 3.1, 3.2):
        suspects.look([pushed], now)
    assert pushed.late == [True, False, True, False]
