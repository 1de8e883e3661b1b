"""Requests become events, in the order in which they were made."""

from __future__ import annotations

import pytest

from nsqha.cursor.committed.state import PartitionState
from nsqha.cursor.events import TARGET_END, Carry, ChannelsEvent, Ephemeral, Seek, TopicEmpty
from nsqha.cursor.policy import ChannelPolicies
from nsqha.cursor.requests import ChannelRequests
from nsqha.election.policy import ChannelPolicy
from nsqha.errors import NotFound
from tests.unit.cursor.tiny import Info, Leader, Record


def requests_of_nothing() -> ChannelRequests:
    return ChannelRequests(PartitionState(), {}, ChannelPolicies())


def test_a_record_becomes_an_event_once():
    requests = requests_of_nothing()
    record = Record(3, False, {"b": Info(2), "a": Info(1)})
    assert requests.reconcile(record)
    assert not requests.reconcile(record)
    assert not requests.reconcile(record._replace(version=2))
    (event,) = requests.take()
    assert isinstance(event, ChannelsEvent)
    assert [channel.name for channel in event.channels] == ["a", "b"]
    assert requests.take() == []
    assert not requests.reconcile(record), "it is on its way, though it is not in the log yet"


def test_an_epoch_begins_with_the_channel_list_if_that_is_news():
    requests = requests_of_nothing()
    record = Record(1, False, {"a": Info(1)})
    assert requests.opening_events(record)
    assert requests.opening_events(record) == b""


def test_requests_about_channels_that_are_not_there():
    requests = requests_of_nothing()
    requests.delete_ephemeral("a#ephemeral")
    for ask in (requests.empty, requests.undo, lambda name: requests.seek(name, 0), lambda n: requests.advance(n, 0)):
        with pytest.raises(NotFound, match="there is no channel a"):
            ask("a")
    assert requests.queue == []
    requests.create_ephemeral("a#ephemeral", 7)
    assert requests.take() == [Ephemeral("a#ephemeral", 7, exists=True)]


def test_a_seek_says_where_the_cursor_is_when_it_is_written():
    leader = Leader()
    channel = leader.create("c")
    leader.publish(5)
    requests = leader.cursors.requests
    requests.topic_empty()
    requests.seek("c", 3)
    assert requests.moved() == {channel.cursor}
    leader.deliver(channel)
    leader.fin(channel, 0, 1)
    channel.cursor.progress()
    requests.queue.append(Carry(1, b"frame"))
    empty, seek, carry = requests.take()
    assert isinstance(empty, TopicEmpty) and isinstance(carry, Carry)
    assert isinstance(seek, Seek) and (seek.target, seek.old_floor) == (3, 2)
    assert requests.moved() == set()


def test_empty_is_a_seek_to_the_end_that_drops_what_is_deferred():
    leader = Leader()
    leader.create("c")
    leader.publish(5)
    requests = leader.cursors.requests
    requests.empty("c")
    (seek,) = requests.take()
    assert isinstance(seek, Seek) and seek.drop_deferred and seek.target == TARGET_END


def test_a_new_leader_follows_the_policies_that_its_record_has():
    """Also where the log has that version of the channel list already."""
    policies, state = ChannelPolicies(), PartitionState()
    state.version = 5
    requests = ChannelRequests(state, {}, policies)
    assert requests.opening_events(Record(5, policy=ChannelPolicy(retry_ms=1000))) == b""
    retry = policies.retry("c")
    assert retry is not None
    assert retry.first_s == 1.0
    assert not requests.reconcile(Record(4)), "an older record"
    assert policies.retry("c") is retry
