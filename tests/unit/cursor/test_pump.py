"""The pump: which messages a channel gets, as nsqd decides it."""

from __future__ import annotations

from nsqha.cursor.limits import ChannelLimits
from tests.unit.cursor.tiny import Leader


def test_without_a_channel_the_pump_stands_still_and_the_first_gets_all():
    leader = Leader()
    leader.publish(3)
    assert leader.cursors.state.pump == 0
    channel = leader.create("c")
    assert leader.cursors.state.pump == 3
    assert channel.committed.floor == 0
    assert channel.cursor.message_count == 3


def test_a_later_channel_starts_now():
    leader = Leader()
    leader.create("a")
    leader.publish(3)
    assert leader.create("b").committed.floor == 3


def test_when_the_last_channel_goes_the_topic_holds_its_messages_again():
    leader = Leader()
    leader.create("a")
    leader.publish(2)
    leader.delete("a")
    leader.publish(3)
    assert leader.cursors.state.pump == 2
    assert leader.create("b").committed.floor == 2


def test_a_paused_topic_holds_its_messages_also_from_a_new_channel():
    leader = Leader()
    a = leader.create("a")
    leader.pause_topic()
    leader.publish(2)
    b = leader.create("b")
    assert leader.cursors.state.pump == 0
    leader.pause_topic(False)
    assert leader.deliver(a) == [0, 1] == leader.deliver(b)


def test_the_first_channel_of_a_paused_topic_waits_for_unpause():
    leader = Leader()
    leader.pause_topic()
    leader.publish(2)
    channel = leader.create("a")
    assert leader.deliver(channel) == []
    leader.pause_topic(False)
    assert leader.deliver(channel) == [0, 1]


def test_topic_empty_drops_only_what_the_topic_holds():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(2)
    leader.pause_topic()
    leader.publish(3)
    leader.cursors.requests.topic_empty()
    leader.flush()
    leader.publish(1)
    leader.pause_topic(False)
    assert leader.deliver(channel) == [0, 1, 5]
    assert channel.cursor.message_count == 3
    leader.fin(channel, 0, 1, 5)
    leader.flush()
    assert channel.committed.floor == 6


def test_topic_empty_of_a_flowing_topic_drops_nothing():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(2)
    leader.cursors.requests.topic_empty()
    leader.flush()
    assert leader.deliver(channel) == [0, 1]


def test_a_message_for_later_is_deferred_when_the_pump_passes_it():
    leader = Leader()
    channel = leader.create("a")
    leader.publish(1)
    leader.publish(1, deliver_at=leader.now.wall_ns + 10_000_000_000)
    leader.publish(1)
    assert leader.deliver(channel) == [0, 2]
    assert channel.cursor.deferred_count == 1
    leader.fin(channel, 0, 2)
    leader.flush()
    assert channel.committed.floor == 3
    leader.clock.advance(10)
    assert [r.offset for r in leader.redeliver(channel)] == [1]
    assert channel.cursor.deferred_count == 0


def test_a_message_for_later_waits_with_a_paused_topic_and_keeps_its_time():
    leader = Leader()
    channel = leader.create("a")
    leader.pause_topic()
    leader.publish(1, deliver_at=leader.now.wall_ns + 10_000_000_000)
    assert leader.cursors.state.later.rows() == [(0, leader.now.wall_ns + 10_000_000_000)]
    leader.clock.advance(60)
    leader.pause_topic(False)
    assert [r.offset for r in leader.redeliver(channel)] == [0]
    assert leader.cursors.state.later.rows() == []


def test_topic_empty_forgets_messages_for_later():
    leader = Leader()
    leader.create("a")
    leader.pause_topic()
    leader.publish(2, deliver_at=leader.now.wall_ns + 10_000_000_000)
    leader.cursors.requests.topic_empty()
    leader.flush()
    leader.pause_topic(False)
    assert leader.cursors.channels["a"].cursor.deferred_count == 0
    assert leader.cursors.state.channels["a"].floor == 2


def test_a_channel_recreated_under_its_name_is_another_one():
    leader = Leader()
    old = leader.create("a", uid=7)
    leader.publish(2)
    leader.record = leader.record._replace(version=5, channels={"a": leader.record.channels["a"]._replace(uid=8)})
    leader.cursors.requests.reconcile(leader.record)
    leader.flush()
    new = leader.cursors.channels["a"]
    assert (new is not old, new.uid, new.committed.floor) == (True, 8, 0 if new is old else 2)


def test_an_old_record_is_not_applied():
    leader = Leader()
    leader.create("a")
    leader.create("b")
    assert not leader.cursors.requests.reconcile(leader.record._replace(version=1, channels={}))
    assert not leader.cursors.urgent
    assert set(leader.restart().cursors.channels) == {"a", "b"}


def test_ephemeral_channels_end_with_the_epoch_and_hold_nothing():
    leader = Leader()
    leader.cursors.requests.create_ephemeral("e#ephemeral", 9)
    leader.flush()
    leader.publish(3)
    channel = leader.cursors.channels["e#ephemeral"]
    assert leader.deliver(channel, 2) == [0, 1]
    leader.fin(channel, 0, 1)
    assert leader.cursors.take_events(leader.now, force=True) == (b"", 0)
    assert leader.cursors.retention.log_start_limit() == 3
    assert leader.restart().cursors.channels == {}


def test_an_ephemeral_channel_that_nobody_reads_drops_its_oldest_messages():
    leader = Leader(limits=ChannelLimits(ephemeral_unread_max=3))
    leader.cursors.requests.create_ephemeral("e#ephemeral", 9)
    leader.flush()
    channel = leader.cursors.channels["e#ephemeral"]
    leader.publish(2)
    leader.publish(4)
    assert channel.cursor.depth(leader.cursors.state.pump) == 3
    assert leader.deliver(channel) == [3, 4, 5]
    leader.publish(1)
    assert leader.deliver(channel) == [6]
