"""Which topics the lookup daemons hear of: those that are led here, from when they are until they are not."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from nsqha.election.model import ChannelList, TopicRecord, Versioned
from nsqha.options import Options
from nsqha.server.topics import Topics


class Registrar:
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def changed(self, topic: str, channels: Any) -> None:
        self.told.append((topic, channels))


def topics() -> tuple[Any, Registrar]:
    nothing = cast(Any, SimpleNamespace(store=None))
    made: Any = Topics(
        Options(),
        node_uid=1,
        rng=random.Random(1),
        metadata=nothing,
        disk=nothing,
        journal_writer=nothing,
        opener=nothing,
        changes=nothing,
        new_delivery=nothing,
        ending=lambda: False,
        forget_targets=lambda: None,
    )
    made._settings = SimpleNamespace(apply=lambda topic: None)
    made.registrar = registrar = Registrar()
    return made, registrar


def record(*channels: str, version: int = 1) -> Versioned[TopicRecord]:
    known = ChannelList()
    for uid, channel in enumerate(channels, 1):
        known = known.with_channel(channel, uid)
    return Versioned(TopicRecord("t", 7, 3, channels=known), version)


LED: Any = SimpleNamespace(serving=False, cursors=SimpleNamespace(channels={"mine#ephemeral": None}))


def test_a_topic_of_the_cluster_is_announced_while_a_part_of_it_is_led_here() -> None:
    made, registrar = topics()
    topic = made.adopt(record("c"))
    assert registrar.told == [("t", None)] and made.registrations() == {}
    topic.led = (LED,)
    made.announce("t")
    assert registrar.told[-1] == ("t", ["c", "mine#ephemeral"])
    assert made.registrations() == {"t": ["c", "mine#ephemeral"]}
    topic.led = ()
    made.announce("t")
    assert registrar.told[-1] == ("t", None) and made.registrations() == {}


def test_channels_that_another_node_made_or_deleted_are_announced() -> None:
    made, registrar = topics()
    made.adopt(record("c")).led = (LED,)
    made.adopt(record("c", "d", version=2))
    assert registrar.told[-1] == ("t", ["c", "d", "mine#ephemeral"])
    made.adopt(record("d", version=3))
    assert registrar.told[-1] == ("t", ["d", "mine#ephemeral"])


def test_a_topic_of_the_same_name_takes_nothing_over() -> None:
    made, registrar = topics()
    made.adopt(record("c")).led = (LED,)
    other = record("e", version=4)
    made.adopt(Versioned(replace(other.record, uid=8), 4))
    assert registrar.told[-1] == ("t", None)
