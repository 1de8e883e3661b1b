"""Every verdict about a cluster over the states that it can be in.

A state that does not serve is never OK; one that serves is never CRITICAL. A cluster serves when every partition
acknowledges, and there is what a new topic or the next leader needs: a controller, metadata that are trusted and can be
read. The states are records and the answers of nodes; `tests/integration/test_check.py` makes some by processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from nsqha.cli.check.judging import of_cluster
from nsqha.cli.check.verdict import Severity
from nsqha.cli.cluster import show
from nsqha.cli.cluster.access import Picture
from nsqha.election import health
from nsqha.election.model import Controller, NodeInfo, PartitionMeta, TopicRecord, TopicSettings
from nsqha.election.moves import Intents
from nsqha.election.observed.answers import Observed, ReplicaAnswer
from nsqha.election.observed.page import ClusterPage, decode, encode

OK, WARNING, CRITICAL, _ = Severity

A, B, C = 0xA, 0xB, 0xC
KEY = (7, 0)
LEADS = ReplicaAnswer(4, position=100)
EVERYBODY = {uid: NodeInfo(uid, f"node-{uid:x}", grpc_address=f"{uid:x}:1", registration=10 + uid) for uid in (A, B, C)}


def record(*isr: int, leader: int = A, replicas: tuple[int, ...] = (A, B, C), min_isr: int = 2) -> PartitionMeta:
    return PartitionMeta(leader, 4, {uid: 100 + uid for uid in isr}, replicas, min_isr, registration=10 + leader)


def says(answer: ReplicaAnswer | None, **more: Any) -> Observed:
    """What node A says of the partition; None: it has none."""
    return Observed({A: {} if answer is None else {KEY: answer}}, **more)


def nodes(*alive: int, **changes: Any) -> Mapping[int, NodeInfo]:
    """These are alive; the changes are node A's."""
    return {uid: replace(EVERYBODY[uid], **changes) if uid == A else EVERYBODY[uid] for uid in alive}


class State(NamedTuple):
    """A state of a cluster with one partition, and what has to be said of it."""

    name: str
    serves: bool
    severity: Severity
    partition: str = health.OK  # in `cluster topics`
    meta: PartitionMeta = record(A, B, C)
    observed: Observed = says(LEADS)
    alive: Mapping[int, NodeInfo] = nodes(A, B, C)
    controller: Controller | None = Controller("l:4161", epoch=3)
    more: Mapping[str, Any] | None = None

    @property
    def picture(self) -> Picture:
        topics = {"orders": TopicRecord("orders", 7, 0, TopicSettings(), partitions={0: self.meta})}
        none = Intents({}, frozenset())
        seen = Picture("c", 1, "e:1", 5, topics, self.alive, none, self.controller, observed=self.observed)
        return replace(seen, **self.more or {})


STATES = [
    State("all in sync", True, OK),
    State("elected again since the record was read", True, OK, observed=says(LEADS._replace(leads_epoch=5))),
    State("busy: the oldest batch is 80 ms old", True, OK, observed=says(LEADS._replace(waits_ms=80))),
    State("a replica catches up", True, WARNING, health.UNDER, record(A, B)),
    State("a replica is away", True, WARNING, health.UNDER, record(A, B), alive=nodes(A, B)),
    State("a member has died, and its lease has not ended", True, WARNING,
          observed=says(LEADS._replace(waits_ms=1500))),
    State("below min_isr: the others are away", False, CRITICAL, health.BELOW, alive=nodes(A)),
    State("below min_isr: the others are rebuilt", False, CRITICAL, health.BELOW, record(A)),
    State("publishes wait for a follower that hangs", False, CRITICAL, health.STALLED,
          observed=says(LEADS._replace(waits_ms=60_000))),
    State("no leader yet", False, CRITICAL, health.LEADERLESS, record(A, B, C, leader=0), observed=Observed()),
    State("the leader is away", False, CRITICAL, health.LEADERLESS, alive=nodes(B, C), observed=Observed()),
    State("the leader runs, and was not elected again", False, CRITICAL, health.LEADERLESS,
          observed=says(ReplicaAnswer(why="it was not elected in this life"))),
    State("the leader runs, and leads an earlier epoch", False, CRITICAL, health.LEADERLESS,
          observed=says(LEADS._replace(leads_epoch=3))),
    State("the leader runs without the partition", False, CRITICAL, health.LEADERLESS, observed=says(None)),
    State("the leader declined its epoch", False, CRITICAL, health.LEADERLESS,
          observed=says(ReplicaAnswer(why="its clock is wrong"))),
    State("the leader's data directory is closed", False, CRITICAL, health.LEADERLESS,
          alive=nodes(A, B, C, poisoned="EIO"), observed=says(ReplicaAnswer(why="its data directory is closed: EIO"))),
    State("the leader does not answer, and may be frozen", False, WARNING,
          observed=Observed({}, {A: "it has not answered within 2 s"})),
    State("the leader does not answer this daemon alone", True, WARNING,
          observed=Observed({}, {A: "connection refused"})),
    State("no node could be asked", True, WARNING,
          observed=Observed({}, dict.fromkeys((A, B, C), "certificate expired"))),
    State("no controller", False, CRITICAL, controller=None),
    State("etcd is away", True, WARNING, more={"doubt": "etcd does not answer", "stale": True}),
    State("etcd is away, and the leader died after it", False, WARNING, observed=Observed({}, {A: "no connection"}),
          more={"doubt": "etcd does not answer", "stale": True}),
    State("etcd is away, and the leader restarted after it", False, CRITICAL, health.LEADERLESS, observed=says(None),
          more={"doubt": "etcd does not answer", "stale": True}),
    State("etcd was restored to an older state", False, CRITICAL, more={"doubt": "nodes wait for accept-metadata"}),
    State("a record cannot be read", False, CRITICAL, more={"unreadable": ("topics/bad: this is not a TopicRecord",)}),
    State("a node leaves", True, WARNING, alive=nodes(A, B, C, leaving=True)),
    State("a node has a disk that hangs", True, WARNING,
          alive=nodes(A, B, C, leaving=True, leaving_why="its disk hangs")),
    State("a certificate of a node has expired", True, WARNING, alive=nodes(A, B, C, trouble="c.pem expired at noon")),
    State("a node declines to lead: its clock", True, WARNING, alive=nodes(A, B, C, declines="its clock is wrong")),
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_what_is_said_of_a_cluster(state: State) -> None:
    page = show.status(state.picture)
    verdict = of_cluster(page)
    assert verdict.severity == state.severity
    assert page["healthy"] is not (state.severity == CRITICAL or bool(page["doubt"]))
    [row] = show.partitions(state.picture)
    assert row["state"] == state.partition
    assert row["why"] in verdict.nagios()
    for node in state.alive.values():
        assert all(why in verdict.nagios() for why in (node.declines, node.leaving_why, node.poisoned, node.trouble))


def test_the_matrix_keeps_its_promise() -> None:
    assert len({state.name for state in STATES}) == len(STATES) >= 12
    wrong = {state.name for state in STATES if state.severity == (CRITICAL if state.serves else OK)}
    assert not wrong


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_a_daemon_says_the_same_by_its_page(state: State) -> None:
    """Whoever asks a daemon, and has no right in etcd, is told what etcd and the nodes would have said."""
    seen = state.picture
    stale = str(seen.doubt) if seen.stale else ""
    sent = ClusterPage(
        seen.cluster_name,
        seen.cluster_id,
        seen.revision,
        seen.topics,
        seen.nodes,
        seen.controller,
        None if seen.stale else {},
        seen.unreadable,
        stale,
        "" if seen.stale else seen.doubt,
        seen.observed,
    )
    assert decode(json.loads(encode(sent))) == sent
