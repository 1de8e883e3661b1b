"""How far readers are behind, from what brokers answer."""

from __future__ import annotations

from typing import Any

import pytest

from nsqha.pb.v1 import admin_pb2, segments_pb2
from pyspark_nsqha.lag import Lag, Limit, PartitionLag, Rates, look, rates
from pyspark_nsqha.lake.manifest import Addition, Missing, State

UID = 0xABC


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
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, rpc: str, **fields: Any) -> Any:
        self.asked.append((rpc, fields))
        if rpc == "ListChannels":
            return admin_pb2.ListChannelsResponse(channels=self.channels)
        if rpc == "Seek":
            return self.plans.get(fields["channel"], admin_pb2.SeekResponse())
        assert rpc == "Snapshot"
        return segments_pb2.SnapshotResponse(partitions=self.partitions)

    def look(self, **fields: Any) -> list[Lag]:
        return look(self.ask, self.ask, **fields)


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
    assert lag.errors == ["orders/0: not led", "orders/1: no leader", "orders/2: nobody told where the channel is"]
    assert lag.messages == 0


def test_a_lake_lacks_what_is_behind_its_first_hole() -> None:
    there = [Missing("orders", UID, 0, first, end, "gone") for first, end in ((0, 40), (50, 60))]
    lake = State().with_added(Addition(missing=tuple(there)), 1)
    [lag] = Brokers([], [partition("orders", 0, 10, 100), partition("orders", 1, 0, 7)]).look(lake=lake)
    assert [(one.lake_end, one.lake_messages) for one in lag.partitions] == [(40, 60), (0, 7)]
    assert (lag.channel, lag.lake_messages, lag.messages) == ("", 67, 0)


def test_only_one_channel_may_be_asked_for_and_of_one_topic_only_its_channels() -> None:
    brokers = Brokers(
        [channel("orders", "a", 0), channel("orders", "b", 0)], [partition("orders", 0, 0, 10)]
    )
    assert [lag.channel for lag in brokers.look(topics=("orders",), channel="b")] == ["b"]
    assert brokers.asked[0] == ("ListChannels", {"topic": "orders"})
    assert ("Snapshot", {"topics": ["orders"]}) in brokers.asked
    brokers.look(pattern="o.*")
    assert ("Snapshot", {"pattern": "o.*"}) in brokers.asked


def lag_of(floor: int, end: int, **more: Any) -> Lag:
    return Lag("orders", "spark", (PartitionLag(0, 0, end, floor, end - floor, **more),))


def test_rates_are_what_floors_and_ends_rose_by() -> None:
    found = rates(lag_of(100, 200), lag_of(160, 220), 2.0)
    assert (found.read, found.published) == (30.0, 10.0)
    assert found.seconds_left(60) == pytest.approx(3.0)


def test_a_reader_that_was_moved_back_read_nothing_and_never_gets_there_at_such_a_rate() -> None:
    assert rates(lag_of(100, 200), lag_of(50, 200), 1.0) == Rates(0.0, 0.0)
    assert Rates(10.0, 10.0).seconds_left(1) is None
    assert Rates(0.0, 5.0).seconds_left(0) == 0.0


def test_a_limit_is_exceeded_by_more_and_not_by_as_much() -> None:
    lag = lag_of(100, 200, oldest_seconds=60.0)
    assert not Limit(messages=100).exceeded(lag) and Limit(messages=99).exceeded(lag)
    assert not Limit(seconds=60.0).exceeded(lag) and Limit(seconds=59.9).exceeded(lag)
    assert not Limit().exceeded(lag)
