"""`topic create` waits until messages can be acknowledged, as long as that may still come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser, exits, topic
from nsqha.cli.admin import Admin
from nsqha.pb.v1 import admin_pb2 as pb


def partition(*in_sync: bool, leader: int = 1, min_isr: int = 2, alive: int = 3) -> Any:
    replicas = [pb.Replica(node=n, alive=n <= alive, in_sync=member) for n, member in enumerate(in_sync, 1)]
    return pb.PartitionState(leader=leader, replicas=replicas, min_isr=min_isr)


def named(state: Any, replicas: int = 3) -> Any:
    return pb.Topic(name="orders", partitions=[state], settings=pb.TopicSettings(replicas=replicas))


UNPLACED = partition(leader=0)
JOINING = partition(True, False, False)
SERVES = partition(True, True, False)
TOO_FEW = partition(True, False, alive=1)


class Broker:
    """Answers each DescribeTopic with the next state, the last one for ever."""

    def __init__(self, *states: Any) -> None:
        self.states = list(states)
        self.asked = 0

    def call(self, rpc: str, **_: Any) -> Any:
        if rpc == "GetNode":
            return pb.GetNodeResponse()
        self.asked += rpc == "DescribeTopic"
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        remarks = ["replicas is 5, and there are 3 hosts"] if rpc == "CreateTopic" else []
        return SimpleNamespace(topic=named(state), remarks=remarks)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic, "LOOK_SECONDS", 0)


def create(monkeypatch: pytest.MonkeyPatch, broker: Broker, *flags: str) -> int:
    broker.messages = pb  # type: ignore[attr-defined]
    monkeypatch.setattr(Admin, "of", lambda args: Entered(broker))
    args = build_parser("topic").parse_args(["topic", "create", "orders", *flags])
    status: int = args.run(args)
    return status


class Entered:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def __enter__(self) -> Any:
        return self._broker

    def __exit__(self, *_: object) -> None:
        pass


def test_it_returns_when_every_partition_acknowledges(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(UNPLACED, JOINING, JOINING, SERVES)
    assert create(monkeypatch, broker) == exits.OK
    assert broker.asked == 3


def test_it_does_not_wait_for_nodes_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = Broker(TOO_FEW)
    with pytest.raises(exits.Exit, match="orders exists, but orders/0 can not acknowledge messages yet") as failed:
        create(monkeypatch, broker, "--timeout", "1h")
    assert (failed.value.status, broker.asked) == (exits.PARTLY, 0)
    told = capsys.readouterr()
    assert "(1 replica still without a node)" in told.out and "there are 3 hosts" in told.err


def test_its_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(exits.Exit, match="below min_isr") as failed:
        create(monkeypatch, Broker(JOINING), "--timeout", "1ms")
    assert failed.value.status == exits.PARTLY


def test_nobody_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(UNPLACED)
    assert create(monkeypatch, broker, "--no-wait") == exits.OK
    assert broker.asked == 0
