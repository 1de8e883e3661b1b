from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nsqha.election.model import (
    ChannelInfo,
    ChannelList,
    ClusterRecord,
    PartitionMeta,
    TopicSettings,
)
from nsqha.errors import Conflict, NotFound
from nsqha.ids import SALT_BITS


def test_each_change_of_a_channel_list_raises_its_version_by_one() -> None:
    channels = ChannelList()
    steps = [
        channels := channels.with_channel("a", 1),
        channels := channels.with_channel("b", 2),
        channels := channels.with_channel_paused("a", True),
        channels := channels.with_topic_paused(True),
        channels := channels.without_channel("b"),
    ]
    assert [step.version for step in steps] == [1, 2, 3, 4, 5]
    assert channels == ChannelList(5, True, {"a": ChannelInfo(1, True)})
    assert steps[0] == ChannelList(1, False, {"a": ChannelInfo(1)})


def test_what_changes_nothing_raises_nothing() -> None:
    channels = ChannelList().with_channel("a", 1)
    assert channels.with_channel_paused("a", False) is channels
    assert channels.with_topic_paused(False) is channels


def test_channels_are_created_once_and_must_exist_to_be_changed() -> None:
    channels = ChannelList().with_channel("a", 1)
    with pytest.raises(Conflict):
        channels.with_channel("a", 2)
    with pytest.raises(NotFound):
        channels.without_channel("b")
    with pytest.raises(NotFound):
        channels.with_channel_paused("b", True)


@pytest.mark.parametrize("name", ["", "a b", "c#ephemeral", "x" * 65])
def test_only_durable_channels_are_in_the_list(name: str) -> None:
    with pytest.raises(ValueError, match="durable channel"):
        ChannelList().with_channel(name, 1)


def test_a_list_after_a_rebuild_is_newer_than_every_copy() -> None:
    channels = ChannelList().with_channel("a", 1)
    assert channels.above(40).version == 41
    assert channels.above(0).version == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": "sometimes"}, "sync is 'sometimes'; it must be always, interval or none"),
        ({"partitions": 0}, "partitions is 0; it must be 1 to 1023"),
        ({"partitions": 1024}, "partitions is 1024; it must be 1 to 1023"),
        ({"retention_ms": -2}, "retention_ms is -2; it must be -1 or more"),
        ({"retention_bytes": -2}, "retention_bytes is -2; it must be -1 or more"),
        ({"abandoned_after_ms": 0}, "abandoned_after_ms is 0; it must be 1 or more"),
        ({"abandoned_over_bytes": 0}, "abandoned_over_bytes is 0; it must be 1 or more"),
        ({"replicas": 16}, "replicas is 16; it must be 1 to 15"),
        ({"min_isr": 0}, "min_isr is 0; it must be 1 to 15"),
        ({"replicas": 2, "min_isr": 3}, "min_isr is 3; it cannot be more than replicas, 2"),
    ],
)
def test_settings_that_can_not_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        TopicSettings(**changes)  # type: ignore[arg-type]
    assert str(error.value) == message
    with pytest.raises(ValueError):
        replace(TopicSettings(), **changes)  # type: ignore[arg-type]


def test_by_default_nothing_unread_is_ever_passed_by_retention() -> None:
    assert TopicSettings().abandoned_after_ms is None
    assert TopicSettings().abandoned_over_bytes is None


def test_every_salt_leads_back_to_its_counter() -> None:
    rng = random.Random(1)
    for _ in range(200):
        counter = rng.randrange(1 << SALT_BITS)
        cluster = ClusterRecord(rng.getrandbits(64), salt_counter=counter)
        salt = cluster.next_salt()
        assert replace(cluster, salt_counter=0).past_salt(salt).salt_counter == counter + 1
        assert replace(cluster, salt_counter=counter + 5).past_salt(salt).salt_counter == counter + 5


def test_a_partition_led_by_one_node_is_that_node_alone() -> None:
    meta = PartitionMeta(leader=1, epoch=8, isr={1: 10, 2: 20}, replicas=(1, 2), min_isr=2, version=3).led_by(2, 20)
    assert meta == PartitionMeta(leader=2, epoch=8, isr={2: 20}, replicas=(2,), min_isr=1, version=3)


def test_what_was_never_acknowledged_is_known_until_the_isr_has_reached_its_floor() -> None:
    made = PartitionMeta(leader=1, isr={1: 5}, replicas=(1, 2, 3), min_isr=2, nothing_acked=True)
    assert made.nothing_acked
    assert replace(made, epoch=2, replicas=(1, 2)).nothing_acked, "a change that lets nobody acknowledge"
    joined = replace(made, isr={1: 5, 2: 6})
    assert not joined.nothing_acked and not replace(joined, isr={1: 5}).nothing_acked
    lowered = replace(made, min_isr=1)
    assert not lowered.nothing_acked and not replace(lowered, min_isr=2).nothing_acked
    assert not replace(PartitionMeta(), min_isr=2).nothing_acked, "a record that says nothing may have been used"
