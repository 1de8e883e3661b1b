"""What `nsqha stats` and `topic show` say of partitions that are not well, from what a node answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli import stats as stats_verb
from nsqha.cli.brokers.admin import replication
from nsqha.cli.stats import StatsSample
from nsqha.election.health import BELOW, LEADERLESS, UNDER
from nsqha.pb.v1 import admin_pb2 as pb


def partition(number: int, *alive: bool, leader: int = 1, under: bool = False) -> Any:
    replicas = [pb.Replica(node=n, alive=up, in_sync=True) for n, up in enumerate(alive, 1)]
    return pb.PartitionState(partition=number, leader=leader, replicas=replicas, min_isr=2, under_replicated=under)


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (partition(0, True, True, True), ""),
        (partition(0, True, True, False, under=True), UNDER),
        (partition(0, True, False, False, under=True), BELOW),
        (partition(0, False, True, True, leader=0), LEADERLESS),
    ],
)
def test_the_replication_of_a_partition_in_words(state: Any, what: str) -> None:
    assert replication(state) == what


def test_a_node_that_is_well_still_says_which_partitions_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    topic = pb.Topic(name="orders", partitions=[partition(n, True, n > 1, under=n < 2) for n in range(3)])
    answers: dict[str, Any] = {
        "GetNode": pb.GetNodeResponse(health="OK"),
        "ListTopics": pb.ListTopicsResponse(topics=[topic]),
        "ListChannels": pb.ListChannelsResponse(),
    }
    look = StatsSample(SimpleNamespace(call=lambda rpc, **_: answers[rpc]), "")  # type: ignore[arg-type]
    look.show(None, None)
    shown = capsys.readouterr().out
    assert "2 partitions below min_isr, nothing is acknowledged: orders/0, orders/1\n" in shown
    assert "orders/2" not in shown


class Connections:
    """Stands in for `Admin`; counts the connections that are open."""

    def __init__(self) -> None:
        self.opened = self.open = 0

    def of(self, _: Any) -> Connections:
        return self

    def __enter__(self) -> Any:
        self.opened += 1
        self.open += 1
        answers = {
            "GetNode": pb.GetNodeResponse(),
            "ListTopics": pb.ListTopicsResponse(),
            "ListChannels": pb.ListChannelsResponse(),
        }
        return SimpleNamespace(call=lambda rpc, **_: answers[rpc])

    def __exit__(self, *_: object) -> None:
        self.open -= 1


def test_a_watch_holds_no_connection_between_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker closes idle ones, perhaps just when the next call is on its way."""
    connections, held = Connections(), []

    def sleep(seconds: float) -> None:
        held.append(connections.open)
        if len(held) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(stats_verb, "Admin", connections)
    monkeypatch.setattr(stats_verb, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    with pytest.raises(KeyboardInterrupt):
        stats_verb.run(build_parser("stats").parse_args(["stats", "--watch", "5s", "--json"]))
    assert held == [0, 0, 0] and connections.opened == 3
