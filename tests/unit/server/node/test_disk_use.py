"""A disk that is full of finished messages: which topics fill it, and the command."""

from __future__ import annotations

import logging

import pytest

from nsqha import hot
from nsqha.commitlog.entry import Place
from nsqha.commitlog.reading.lookup import PairInfo
from nsqha.server.node import availability, disk_use
from nsqha.server.node.broker import Broker
from nsqha.server.node.disk_use import MINUTE_NS, half_age_minutes, kept_for_replay
from nsqha.server.runtime.measures import Space
from tests.unit.server.broker_rig import on_a_broker

NOW = 10**18


def pair(size: int, age_minutes: int) -> PairInfo:
    return PairInfo(Place(1, 0, 0), Place(2, 1, size), size, NOW - age_minutes * MINUTE_NS)


@pytest.mark.parametrize(
    ("pairs", "minutes"),
    [
        ([pair(100, 90), pair(100, 60), pair(100, 30)], 60),
        ([pair(100, 90)], 90),
        ([pair(500, 90), pair(100, 60), pair(100, 30)], 90),
        ([pair(100, 90), pair(500, 30)], 30),
        ([pair(100, 0)], 1),
    ],
)
def test_the_time_that_is_proposed_keeps_the_newer_half(pairs: list[PairInfo], minutes: int) -> None:
    assert half_age_minutes(pairs, NOW) == minutes


async def filled(broker: Broker, topic: str, count: int) -> None:
    for _ in range(count):
        await broker.publishing.publish(topic, hot.frame(bytes(1000)))


@on_a_broker
async def test_what_channels_have_not_finished_is_not_counted(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_use, "MB", 1000)
    await filled(broker, "finished", 30)
    await filled(broker, "unread", 60)
    for name in ("finished", "unread"):
        await broker.channels.create(name, "c")
    assert kept_for_replay(broker.topics.values(), broker.clock.wall_ns()) == ""
    (partition,) = broker.topics["finished"].led
    partition.cursors.channels["c"].committed.floor = partition.log.end.offset
    text = kept_for_replay(broker.topics.values(), broker.clock.wall_ns())
    assert "--retention keeps for replay fill 31" in text and "finished (31" in text and "unread" not in text
    assert text.endswith("`nsqha topic set finished --retention 1m` frees about half of finished")


@on_a_broker
async def test_the_event_and_the_check_say_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "nsqha.broker")
    monkeypatch.setattr(disk_use, "MB", 1000)
    await filled(broker, "t", 30)
    await broker.channels.create("t", "c")
    (partition,) = broker.topics["t"].led
    partition.cursors.channels["c"].committed.floor = partition.log.end.offset
    monkeypatch.setattr(availability, "disk_space", lambda path: Space(5, 100))
    broker.availability.disk_low_bytes = 10
    assert broker.availability.look_at_disk()
    (said,) = [record.getMessage() for record in caplog.records if "publishes are refused" in record.getMessage()]
    (check,) = [check for check in broker.availability.checks("") if check.name == "disk_space"]
    for text in (said, check.detail):
        assert "`nsqha topic set t --retention 1m`" in text
    assert "retention" not in str(broker.availability.refuses_publish()), "clients hear the reason, in few words"
