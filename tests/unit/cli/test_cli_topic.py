"""`topic create`, and `set --partitions`, wait until messages can be acknowledged, as long as that may still come."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser, topic
from nsqha.cli.brokers.admin import Admin
from nsqha.cli.terminal import exits
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
    with pytest.raises(exits.Exit, match="orders exists, but orders/0 cannot acknowledge messages yet") as failed:
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


class Growing(Broker):
    """Has one partition, which waits for a node that is not there, until more are asked for."""

    def call(self, rpc: str, **fields: Any) -> Any:
        answer = super().call(rpc, **fields)
        self.grown |= rpc == "UpdateTopicSettings"
        if hasattr(answer, "topic"):
            states = [TOO_FEW, *([answer.topic.partitions[0]] * self.grown)]
            parts = [pb.PartitionState() for _ in states]
            for number, (part, state) in enumerate(zip(parts, states, strict=True)):
                part.CopyFrom(state)
                part.partition = number
            answer.topic = pb.Topic(name="orders", partitions=parts)
        return answer

    grown = False


def test_new_partitions_are_waited_for_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Growing(UNPLACED, UNPLACED, JOINING, SERVES)
    assert change(monkeypatch, broker, "--partitions", "2") == exits.OK
    assert broker.asked == 3, "once before the change, twice after it"
    broker = Growing(UNPLACED)
    assert change(monkeypatch, broker, "--partitions", "2", "--no-wait") == exits.OK
    assert change(monkeypatch, Growing(UNPLACED), "--sync", "none") == exits.OK


def test_what_new_partitions_wait_for_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(topic, "SAY_SECONDS", -1)
    with pytest.raises(exits.Exit, match=r"orders has 2 partitions, but orders/1 .* below min_isr") as end:
        change(monkeypatch, Growing(UNPLACED, UNPLACED, TOO_FEW), "--partitions", "2", "--timeout", "1h")
    assert end.value.status == exits.PARTLY
    assert "waiting, at most 1h00m: orders/1 cannot acknowledge messages yet: no leader" in capsys.readouterr().err


def test_a_change_that_is_asked_for_again_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Growing(SERVES)
    broker.grown = True
    with pytest.raises(exits.Exit, match="orders/0 cannot acknowledge messages yet: below min_isr"):
        change(monkeypatch, broker, "--partitions", "2")


def change(monkeypatch: pytest.MonkeyPatch, broker: Broker, *flags: str) -> int:
    monkeypatch.setattr(Admin, "of", lambda args: Entered(broker))
    args = build_parser("topic").parse_args(["topic", "set", "orders", *flags])
    status: int = args.run(args)
    return status


OLD = 1_700_000_000 * 10**9
KEEPS = pb.PartitionState(high_watermark=500, log_start_offset=100, bytes=3_000_000, first_timestamp_ns=OLD)
PLANS = [
    (["--retention", "1h"], r"older than 1h00m \(the oldest one is of 2023-11-1.*keeps 400 messages, 3.0 MB"),
    (["--retention-bytes", "1MB"], r"above 1.0 MB per partition are removed \(2.0 MB now\).*keeps 400 messages"),
    (["--abandoned-after", "30d"], r"a channel without consumers .* older than 30d0h \(the topic has 1 channel\)"),
    (["--retention", "default"], r"older than 1d0h"),
    (["--retention", "forever"], ""),
    (["--retention", "9d"], ""),
    (["--retention-bytes", "unlimited"], ""),
    (["--abandoned-after", "never"], ""),
    (["--sync", "always"], ""),
]


@pytest.mark.parametrize(("flags", "plan"), PLANS)
def test_a_retention_that_keeps_less_is_shown_with_what_it_removes(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], plan: str
) -> None:
    asked: list[str] = []
    settings = pb.TopicSettings(retention_ms=7 * 86_400_000)
    found = pb.Topic(name="orders", settings=settings, partitions=[KEEPS], channels=["billing"])
    node = pb.GetNodeResponse(retention_ms=86_400_000, retention_bytes=1 << 30)

    class Answers:
        messages = pb

        def call(self, rpc: str, **_: Any) -> Any:
            return node if rpc == "GetNode" else SimpleNamespace(topic=found, remarks=[])

    monkeypatch.setattr(topic, "confirm", lambda question, *, yes: asked.append(question))
    monkeypatch.setattr(Admin, "of", lambda args: Entered(Answers()))  # type: ignore[arg-type]
    args = build_parser("topic").parse_args(["topic", "set", "orders", *flags])
    assert args.run(args) == exits.OK
    assert bool(asked) is bool(plan) and re.search(plan, "".join(asked))


def test_emptying_a_topic_says_how_many_messages_go(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool, int]] = []
    states = [
        pb.PartitionState(log_end_offset=500, pump_offset=100),
        pb.PartitionState(log_end_offset=7, pump_offset=0),
    ]

    class Answers:
        def call(self, rpc: str, **_: Any) -> Any:
            return SimpleNamespace(topic=pb.Topic(name="orders", partitions=states), skipped=0)

    monkeypatch.setattr(topic, "confirm", lambda question, *, yes, skips: asked.append((question, yes, skips)))
    monkeypatch.setattr(Admin, "of", lambda args: Entered(Answers()))  # type: ignore[arg-type]
    args = build_parser("topic").parse_args(["topic", "empty", "orders"])
    assert args.run(args) == exits.OK
    states[:] = [pb.PartitionState(log_end_offset=7, pump_offset=7)]
    assert args.run(args) == exits.OK
    (question, yes, skips), (_, nothing, _) = asked
    assert "drop 407 messages of topic orders" in question and not yes and nothing, "nothing is there to ask about"
    assert skips == 407
