"""How far readers are behind, from what brokers answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.spark import flags as spark_flags
from nsqha.cli.spark import lag as spark_lag
from nsqha.cli.terminal import exits
from nsqha.pb.v1 import admin_pb2, segments_pb2
from pyspark_nsqha.lag import Lag, LagSample, Limit, PartitionLag, Rates, look, rates
from pyspark_nsqha.lake.commits.manifest import Addition, LakeState, Missing

UID = 0xABC
SECOND = 10**9
NOW_NS = 1_795_168_800 * SECOND


def partition(topic: str, number: int, start: int, end: int, error: str = "") -> Any:
    found = segments_pb2.PartitionSnapshot(topic=topic, topic_uid=UID, partition=number, error=error)
    found.start.offset, found.end.offset = start, end
    return found


def channel(topic: str, name: str, *floors: int, reader: bool = True, oldest: float = 5.0) -> Any:
    parts = [
        admin_pb2.ChannelPartition(partition=number, floor=floor, oldest_unfinished_seconds=oldest)
        for number, floor in enumerate(floors)
    ]
    return admin_pb2.Channel(topic=topic, name=name, reader=reader, partitions=parts)


class Brokers:
    """What they answer, and what they were asked."""

    def __init__(self, channels: list[Any], partitions: list[Any], plans: dict[str, Any] | None = None) -> None:
        self.channels, self.partitions, self.plans = channels, partitions, plans or {}
        self.times: dict[tuple[str, int, int], int] = {}  # of the batches that begin with these messages
        self.unreachable: list[Any] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, rpc: str, **fields: Any) -> Any:
        self.asked.append((rpc, fields))
        if rpc == "ListChannels":
            return admin_pb2.ListChannelsResponse(channels=self.channels, unreachable=self.unreachable)
        if rpc == "Seek":
            return self.plans.get(fields["channel"], admin_pb2.SeekResponse())
        assert rpc == "Snapshot"
        if fields.get("cut_points"):
            return segments_pb2.SnapshotResponse(partitions=list(map(self._bordered, fields["ranges"])))
        return segments_pb2.SnapshotResponse(partitions=self.partitions)

    def _bordered(self, asked: Any) -> Any:
        found = segments_pb2.PartitionSnapshot(topic=asked["topic"], partition=asked["partition"])
        first = int(asked["first"])
        found.cuts.add(offset=first, timestamp_ns=self.times.get((found.topic, found.partition, first), 0))
        found.cuts.add(offset=first + 1, timestamp_ns=NOW_NS)
        return found

    def look(self, **fields: Any) -> list[Lag]:
        return self.whole_look(**fields).lags

    def whole_look(self, **fields: Any) -> LagSample:
        return look(self.ask, self.ask, now_ns=lambda: NOW_NS, **fields)


def plan(*partitions: tuple[int, int, int]) -> Any:
    """Partition, messages that are skipped, their bytes."""
    return admin_pb2.SeekResponse(
        partitions=[admin_pb2.SeekPartition(partition=n, messages=-count, bytes=size) for n, count, size in partitions]
    )


def test_a_lag_is_from_the_floor_to_the_committed_end() -> None:
    brokers = Brokers(
        [channel("orders", "spark", 40, 90)],
        [partition("orders", 0, 10, 100), partition("orders", 1, 0, 90)],
        {"spark": plan((0, 60, 6000), (1, 0, 0))},
    )
    [lag] = brokers.look()
    assert (lag.messages, lag.bytes, lag.oldest_seconds, lag.lake_messages) == (60, 6000, 5.0, None)
    assert lag.partitions[1] == PartitionLag(1, 0, 90, 90)


def test_looking_moves_nothing() -> None:
    brokers = Brokers([channel("orders", "spark", 4)], [partition("orders", 0, 0, 10)])
    brokers.look()
    assert all(fields["plan_only"] for rpc, fields in brokers.asked if rpc == "Seek")


def test_consumers_channels_and_ephemeral_topics_are_left_out() -> None:
    brokers = Brokers(
        [channel("orders", "billing", 0, reader=False), channel("live#ephemeral", "spark", 0)],
        [partition("orders", 0, 0, 10), partition("live#ephemeral", 0, 0, 10)],
    )
    assert brokers.look() == []


def test_bytes_of_a_plan_of_another_moment_are_taken_in_proportion() -> None:
    brokers = Brokers(
        [channel("orders", "spark", 0)], [partition("orders", 0, 0, 100)], {"spark": plan((0, 200, 2000))}
    )
    assert brokers.look()[0].bytes == 1000


def test_a_floor_ahead_of_the_end_that_was_asked_for_is_no_lag() -> None:
    [lag] = Brokers([channel("orders", "spark", 12)], [partition("orders", 0, 0, 10)]).look()
    assert (lag.messages, lag.bytes, lag.oldest_seconds) == (0, 0, 0.0)


def test_a_partition_that_nobody_leads_is_an_error_and_not_a_lag_of_nothing() -> None:
    other = channel("orders", "spark", 5, 5)
    other.partitions[1].error = "no leader"
    ends = [partition("orders", 0, 0, 0, error="not led"), partition("orders", 1, 0, 9), partition("orders", 2, 0, 9)]
    [lag] = Brokers([other], ends).look()
    silent = "orders/2: no broker reported the channel's offset"
    assert lag.errors == ["orders/0: not led", "orders/1: no leader", silent]
    assert lag.messages == 0


def test_a_lake_lacks_what_is_behind_its_first_hole() -> None:
    there = [Missing("orders", UID, 0, first, end, "gone") for first, end in ((0, 40), (50, 60))]
    lake = LakeState().with_added(Addition(missing=tuple(there)), 1)
    [lag] = Brokers([], [partition("orders", 0, 10, 100), partition("orders", 1, 0, 7)]).look(lake=lake)
    assert [(one.lake_end, one.lake_messages) for one in lag.partitions] == [(40, 60), (0, 7)]
    assert (lag.channel, lag.lake_messages, lag.messages) == ("", 67, 0)


def test_only_one_channel_may_be_asked_for_and_of_one_topic_only_its_channels() -> None:
    brokers = Brokers([channel("orders", "a", 0), channel("orders", "b", 0)], [partition("orders", 0, 0, 10)])
    assert [lag.channel for lag in brokers.look(topics=("orders",), channel="b")] == ["b"]
    assert brokers.asked[0] == ("ListChannels", {"topic": "orders"})
    assert ("Snapshot", {"topics": ["orders"]}) in brokers.asked
    brokers.look(pattern="o.*")
    assert ("Snapshot", {"pattern": "o.*"}) in brokers.asked


def test_what_a_lake_lacks_is_as_old_as_the_first_message_of_it() -> None:
    lake = LakeState().with_added(Addition(missing=(Missing("orders", UID, 0, 0, 40, "gone"),)), 1)
    ends = [partition("orders", 0, 10, 100), partition("orders", 1, 0, 7), partition("orders", 2, 0, 0)]
    brokers = Brokers([], ends)
    brokers.times = {("orders", 0, 40): NOW_NS - 90 * SECOND, ("orders", 1, 0): NOW_NS + SECOND}
    [lag] = brokers.look(topics=("orders",), lake=lake)
    assert [one.oldest_seconds for one in lag.partitions] == [90.0, 0.0, 0.0]
    assert (lag.oldest_seconds, lag.errors) == (90.0, [])
    assert Limit(seconds=89.0).exceeded(lag) and not Limit(seconds=91.0).exceeded(lag)
    [(_, asked)] = [one for one in brokers.asked if "cut_points" in one[1]]
    assert [one["first"] for one in asked["ranges"]] == [40, 0]
    del brokers.times["orders", 1, 0]
    [lag] = brokers.look(topics=("orders",), lake=lake)
    assert lag.errors == ["orders/1: the age of message 0, which the lake lacks, is not known"]


def test_nobody_is_asked_for_ages_where_channels_tell_them() -> None:
    brokers = Brokers([channel("orders", "spark", 4)], [partition("orders", 0, 0, 10)])
    [lag] = brokers.look(lake=LakeState())
    assert (lag.oldest_seconds, lag.lake_messages) == (5.0, 10)
    assert [rpc for rpc, _ in brokers.asked].count("Snapshot") == 1


def lag_of(floor: int, end: int, **more: Any) -> Lag:
    return Lag("orders", "spark", (PartitionLag(0, 0, end, floor, end - floor, **more),))


def test_rates_are_what_floors_and_ends_rose_by() -> None:
    found = rates(lag_of(100, 200), lag_of(160, 220), 2.0)
    assert (found.read, found.published) == (30.0, 10.0)
    assert found.seconds_left(60) == pytest.approx(3.0)


def test_a_reader_that_was_moved_back_has_no_time_of_arrival() -> None:
    assert rates(lag_of(100, 200), lag_of(50, 200), 1.0) == Rates(0.0, 0.0)
    assert Rates(10.0, 10.0).seconds_left(1) is None
    assert Rates(0.0, 5.0).seconds_left(0) == 0.0


def test_a_limit_is_exceeded_by_more_and_not_by_as_much() -> None:
    lag = lag_of(100, 200, oldest_seconds=60.0)
    assert not Limit(messages=100).exceeded(lag) and Limit(messages=99).exceeded(lag)
    assert not Limit(seconds=60.0).exceeded(lag) and Limit(seconds=59.9).exceeded(lag)
    assert not Limit().exceeded(lag)


# ---- what the command says, and its status


def told(brokers: Brokers, *words: str, before: Any = (), lake: LakeState | None = None) -> int:
    args = build_parser("spark").parse_args(["spark", "lag", *words])
    found = brokers.whole_look(topics=tuple(args.topic), channel=args.channel or "", lake=lake)
    return spark_lag._tell(args, found, {}, Limit(*(args.fail_above or (None, None))), before)


def watched() -> Brokers:
    return Brokers(
        [channel("orders", "spark", 0), channel("orders", "billing", 0, reader=False), channel("bills", "lake", 0)],
        [partition("orders", 0, 0, 10), partition("bills", 0, 0, 10), partition("idle", 0, 0, 10)],
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("orders --channel sparc --fail-above 10m", "topic orders has no reader channel sparc"),
        ("orders --channel sparc", "topic orders has no reader channel sparc"),
        ("orders --channel billing --fail-above 10m", "topic orders has no reader channel billing"),
        ("orders bills --channel spark --fail-above 10m", "topic bills has no reader channel spark"),
        ("--channel sparc --fail-above 10m", "none of the topics has a reader channel sparc"),
        ("orders idle --fail-above 10m", "topic idle has no reader channel"),
        ("idle --fail-above 10m --json", "topic idle has no reader channel"),
    ],
)
def test_what_is_not_there_is_no_lag_of_nothing(capsys: pytest.CaptureFixture[str], words: str, why: str) -> None:
    assert told(watched(), *words.split()) == exits.NOT_FOUND
    assert f"{why}: there is no such reader channel" in capsys.readouterr().err


def test_where_no_reader_channel_is_there_is_nothing_to_alarm_about(capsys: pytest.CaptureFixture[str]) -> None:
    brokers = Brokers([], [partition("orders", 0, 0, 10)])
    assert told(brokers, "--fail-above", "10m") == exits.NOT_FOUND
    assert told(brokers) == exits.OK
    assert "no reader channel; " in capsys.readouterr().err
    assert (
        told(brokers, "orders", "--lake", "x", "--fail-above", "10", lake=LakeState()) == exits.PARTLY
    )  # no age is told
    lacking = ("orders", "--channel", "spark", "--lake", "x")
    assert told(brokers, *lacking, lake=LakeState()) == exits.NOT_FOUND, "what a lake lacks is not that channel's lag"


def test_a_channel_that_is_there_is_found() -> None:
    for words in ("orders --channel spark", "--channel spark", "orders bills", "", "--json"):
        assert told(watched(), *words.split(), "--fail-above", "10m") == exits.OK
    assert told(watched(), "orders", "--fail-above", "9") == exits.FAILED


def test_a_channel_that_goes_while_somebody_watches_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    before = {("orders", "spark"), ("orders", "archive"), ("idle", "")}
    assert told(watched(), "--fail-above", "10m", before=before) == exits.NOT_FOUND
    assert "orders/archive is gone: there is no such" in capsys.readouterr().err
    assert told(watched(), before=before) == exits.OK


def test_what_may_be_on_a_node_that_does_not_answer_is_not_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    brokers = watched()
    brokers.unreachable = [admin_pb2.Unreachable(node=2, name="n2", why="down")]
    assert told(brokers, "idle", "--fail-above", "10m") == exits.PARTLY
    assert "topic idle has no reader channel, as far as is known: n2 did not answer" in capsys.readouterr().err
    brokers = watched()
    brokers.partitions[2].error = "no leader"
    assert told(brokers, "idle", "--fail-above", "10m") == exits.PARTLY


class Watch:
    """Looks that `nsqha spark lag --interval` makes, and what each comes to; the last one ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Brokers | exits.Exit) -> None:
        self.steps = list(steps)
        self.pauses: list[float] = []
        monkeypatch.setattr(spark_flags, "Admin", lambda *_: self)
        monkeypatch.setattr(spark_lag, "time", SimpleNamespace(sleep=self.pauses.append, monotonic=time.monotonic))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, rpc: str, **fields: Any) -> Any:
        if rpc == "ListChannels":
            self.step = self.steps.pop(0)
        if isinstance(self.step, exits.Exit):
            raise self.step
        return self.step.ask(rpc, **fields)

    call_segments = call

    def run(self, *words: str) -> int:
        args = build_parser("spark").parse_args(["spark", "lag", *words])
        return spark_lag.run_lag(args)


def test_a_watch_goes_on_when_a_look_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    away = exits.Exit(exits.UNREACHABLE, "the broker is away")
    partly = watched()
    partly.partitions[0].error = "no leader"
    watch = Watch(monkeypatch, watched(), away, partly, away, watched(), Brokers([], []))
    assert watch.run("--interval", "5s", "--fail-above", "10m") == exits.NOT_FOUND
    assert (watch.steps, watch.pauses) == ([], [5.0] * 5)
    assert capsys.readouterr().err.count("the broker is away; trying again in 5s") == 2


@pytest.mark.parametrize("status", [exits.NOT_FOUND, exits.USAGE, exits.NOT_ALLOWED])
def test_a_watch_ends_where_time_does_not_help(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    watch = Watch(monkeypatch, watched(), exits.Exit(status, "no"), watched())
    with pytest.raises(exits.Exit, match="no"):
        watch.run("--interval", "5s")


def test_a_first_look_that_fails_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(exits.Exit, match="away"):
        Watch(monkeypatch, exits.Exit(exits.UNREACHABLE, "away")).run("--interval", "5s")
    with pytest.raises(exits.Exit, match="away"):
        Watch(monkeypatch, exits.Exit(exits.UNREACHABLE, "away")).run()
