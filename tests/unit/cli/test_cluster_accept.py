"""`nsqha cluster accept-metadata` decides on what no node can change meanwhile."""

from __future__ import annotations

import argparse
from typing import Any, cast

import pytest

from nsqha.cli.cluster import accept as cluster_accept
from nsqha.cli.terminal import exits
from nsqha.election.elect import ReplicaReport
from nsqha.election.metadata_restore import NodeInventory, WaitingNode, plan
from nsqha.election.model import PartitionMeta, TopicRecord, Versioned

A, B = 1, 2


class Cluster:
    """What etcd says, look by look: (waiting node -> is it held, registered nodes, is there a controller)."""

    def __init__(self, *looks: tuple[dict[int, bool], set[int], bool]) -> None:
        self.looks = list(looks)
        self.waiting: dict[int, WaitingNode] = {}
        self.now = 0.0

    def look(self) -> Any:
        held, self.registered, self.controlled = self.looks[0]
        if len(self.looks) > 1:
            del self.looks[0]
        self.waiting = {uid: WaitingNode(uid, held=is_held) for uid, is_held in held.items()}
        return self

    def nodes(self) -> set[int]:
        return self.registered

    def controller(self) -> object | None:
        return object() if self.controlled else None

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def held(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the evidence that counts is asked for, by those looks."""
    monkeypatch.setattr(cluster_accept, "time", cluster)
    monkeypatch.setattr(cluster_accept, "_ask", lambda *args: {})
    cluster_accept._held(cast(Any, cluster), cast(Any, cluster), {A, B}, 9, argparse.Namespace())


HELD = {A: True, B: True}


@pytest.mark.parametrize(
    "not_yet",
    [
        ({A: True}, set[int](), False),  # B has not come back
        ({A: True, B: False}, set[int](), False),  # it runs, in doubt, and may lead
        (HELD, {3}, False),  # a node that was not heard believes, and runs
        (HELD, set[int](), True),  # somebody may elect
    ],
)
def test_evidence_counts_when_nobody_leads_follows_or_elects_any_more(
    not_yet: tuple[dict[int, bool], set[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(not_yet, not_yet, (HELD, set(), False))
    held(cluster, monkeypatch)
    assert cluster.now > 0 and len(cluster.looks) == 1
    with pytest.raises(exits.Exit, match="did not stop within"):
        held(Cluster(not_yet), monkeypatch)


def test_a_replica_without_a_log_is_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    meta = PartitionMeta(epoch=5, isr={A: 1, B: 2}, replicas=(A, B, 3), min_isr=2)
    topic = Versioned(TopicRecord("orders", 7, 1, partitions={0: meta}), 4)
    found = {
        A: NodeInventory(A, "a", replicas={(7, 0): ReplicaReport(1, 1, 5, 100, 5)}),
        B: NodeInventory(B, "b"),
    }
    planned = plan({"orders": topic}, (), 0, found, salt_constant=0)
    cluster_accept._print(planned, found)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1:3] for row in rows[1:]] == [["a", "5:100"], ["b", "nothing"], [f"{3:016x}", "no"]]
    (lost,) = cluster_accept._costs(planned, found)
    assert lost.startswith("orders/0: acknowledged messages may be lost: 2 of its replicas did not answer or")
