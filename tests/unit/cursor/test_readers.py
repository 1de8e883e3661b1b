"""Reader channels: places of those who take the log as it lies in the files."""

from __future__ import annotations

from nsqha.cursor.committed import checkpoint
from nsqha.cursor.events import Abandoned
from nsqha.cursor.live.channel import Channel
from tests.unit.cursor.tiny import Leader, TinyLog


def with_reader(count: int = 9) -> tuple[Leader, Channel]:
    leader = Leader()
    reader = leader.create("r", reader=True)
    leader.publish(count)
    return leader, reader


def test_nothing_is_handed_out_and_depth_is_what_is_not_committed_yet():
    leader, reader = with_reader()
    assert leader.deliver(reader) == [] and leader.redeliver(reader) == []
    assert reader.cursor.depth(reader.cursor.end) == 9
    leader.cursors.requests.advance("r", 4)
    leader.flush()
    assert (reader.committed.floor, reader.cursor.next_read, reader.cursor.depth(reader.cursor.end)) == (4, 4, 5)
    assert not reader.cursor.has_final_news and reader.in_flight == 0


def test_a_pause_and_its_end_change_nothing():
    leader, reader = with_reader()
    leader.pause("r")
    leader.pause("r", paused=False)
    assert leader.deliver(reader) == []
    assert leader.restart().deliver(leader.cursors.channels["r"]) == []


def test_an_advance_never_goes_back_and_a_seek_does():
    leader, reader = with_reader()
    for target, floor in ((5, 5), (3, 5), (5, 5), (7, 7)):
        leader.cursors.requests.advance("r", target)
        leader.flush()
        assert reader.committed.floor == floor
    leader.cursors.requests.seek("r", 2)
    leader.flush()
    assert reader.committed.floor == 2


def test_advances_that_come_in_the_wrong_order_end_at_the_highest():
    """Two leaders of a job, or one that asks twice: what is applied decides, not what was seen when asking."""
    leader, reader = with_reader()
    leader.cursors.requests.advance("r", 6)
    leader.cursors.requests.advance("r", 4)
    leader.flush()
    assert reader.committed.floor == 6


def test_a_place_outside_the_log_is_its_nearest_end():
    leader, reader = with_reader()
    leader.cursors.requests.advance("r", 99)
    leader.flush()
    assert reader.committed.floor == 9
    leader.cursors.retention.propose_log_start(3, leader.log.end_position)
    leader.flush()
    leader.cursors.requests.seek("r", 0)
    leader.flush()
    assert reader.committed.floor == 3


def test_empty_moves_it_to_the_end():
    leader, reader = with_reader()
    leader.cursors.requests.empty("r")
    leader.flush()
    assert (reader.committed.floor, reader.cursor.depth(reader.cursor.end)) == (9, 0)


def test_messages_for_later_are_counted_and_not_deferred():
    leader, reader = with_reader(0)
    other = leader.create("a")
    leader.publish(3, deliver_at=leader.now.wall_ns + 10**12)
    leader.publish(1)
    assert len(other.committed.deferred) == 3
    assert len(reader.committed.deferred) == 0 and reader.cursor.deferred_count == 0
    assert reader.cursor.depth(reader.cursor.end) == 4


def test_a_floor_holds_the_log_start_and_no_policy_passes_it():
    leader, reader = with_reader()
    leader.cursors.requests.advance("r", 2)
    leader.flush()
    assert leader.cursors.retention.log_start_limit() == 2
    leader.cursors.retention.propose_log_start(9, leader.log.end_position, (Abandoned(reader.uid, 0, 9),))
    leader.flush()
    assert (reader.committed.floor, reader.committed.abandoned, leader.cursors.state.log_start[0]) == (2, 0, 2)


def test_what_a_topic_drops_for_all_channels_a_reader_does_not_wait_for():
    leader, reader = with_reader()
    leader.cursors.requests.advance("r", 9)
    leader.flush()
    leader.pause_topic()
    leader.publish(3)
    leader.cursors.requests.topic_empty()
    leader.flush()
    assert (reader.committed.floor, reader.cursor.floor, reader.cursor.depth(reader.cursor.end)) == (12, 12, 0)
    assert reader.cursor.oldest_unfinished(reader.cursor.end) is None


def test_the_kind_survives_whatever_the_state_is_made_from():
    leader, _ = with_reader()
    leader.create("a")
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    leader.flush()
    for state in (TinyLog.rebuild(leader.log), checkpoint.decode(checkpoint.encode(leader.cursors.state))):
        assert {name: channel.reader for name, channel in state.channels.items()} == {"r": True, "a": False}


def test_a_channel_of_the_same_name_and_another_kind_is_another_channel():
    leader, reader = with_reader()
    leader.delete("r")
    again = leader.create("r", uid=reader.uid + 1)
    leader.publish(1)
    assert leader.deliver(again) == list(range(10)), "the reader's was not the topic's first"


# ---- nobody's first channel


def test_the_first_channel_of_consumers_gets_the_backlog_whatever_readers_there_are():
    leader, reader = with_reader()
    leader.create("s", reader=True)
    leader.cursors.requests.advance("r", 9)
    leader.flush()
    assert (leader.cursors.state.pump, reader.committed.floor) == (0, 9)
    assert leader.deliver(leader.create("a")) == list(range(9))
    assert leader.deliver(leader.create("b")) == [], "that is not the first one"


def test_an_ephemeral_channel_of_consumers_is_a_first_one_and_takes_the_backlog():
    leader, _ = with_reader()
    for name, expected in (("x#ephemeral", list(range(9))), ("y#ephemeral", [])):
        leader.cursors.requests.create_ephemeral(name, len(name))
        leader.flush()
        assert leader.deliver(leader.cursors.channels[name]) == expected
        leader.cursors.requests.delete_ephemeral(name)
        leader.flush()


def test_when_the_last_channel_of_consumers_is_gone_the_next_one_begins_there():
    leader, _ = with_reader(4)
    leader.create("a")
    leader.delete("a")
    leader.publish(2)
    assert leader.deliver(leader.create("b")) == [4, 5]


def test_the_backlog_outlives_a_restart_a_rebuild_and_a_checkpoint():
    leader, _ = with_reader(4)
    leader.cursors.checkpoints.begin(leader.cursors.state.snapshot())
    leader.flush()
    leader.publish(2)
    for state in (TinyLog.rebuild(leader.log), checkpoint.decode(checkpoint.encode(leader.cursors.state))):
        assert (state.pump, state.applied.end_offset) == (0, 6)
    leader = leader.restart()
    assert leader.cursors.channels["r"].cursor.depth(6) == 6
    assert leader.deliver(leader.create("a")) == list(range(6))


def test_what_readers_let_go_is_gone_and_the_first_consumers_begin_behind_it():
    leader, _ = with_reader(0)
    leader.publish(3, deliver_at=leader.now.wall_ns + 10**12)
    leader.publish(6)
    leader.cursors.requests.advance("r", 5)
    leader.flush()
    assert leader.cursors.retention.log_start_limit() == 5
    leader.cursors.retention.propose_log_start(9, leader.log.end_position)
    leader.flush()
    assert (leader.cursors.state.log_start[0], leader.cursors.state.pump, leader.cursors.state.later.rows()) == (
        5,
        5,
        [],
    )
    assert leader.deliver(leader.create("a")) == [5, 6, 7, 8]


def test_a_paused_topic_keeps_its_backlog_from_retention_whatever_readers_have_read():
    leader, reader = with_reader()
    leader.pause_topic()
    leader.cursors.requests.advance("r", 9)
    leader.flush()
    assert (reader.committed.floor, leader.cursors.retention.log_start_limit()) == (9, 0)
    leader.pause_topic(paused=False)
    assert leader.deliver(leader.create("a")) == list(range(9))


def test_deferred_messages_wait_in_the_first_channel_of_consumers_too():
    leader, _ = with_reader(1)
    leader.publish(2, deliver_at=leader.now.wall_ns + 10**12)
    channel = leader.create("a")
    assert leader.deliver(channel) == [0] and len(channel.committed.deferred) == 2


def test_what_a_topic_drops_is_dropped_of_a_reader_from_where_it_stands():
    leader, reader = with_reader()
    leader.cursors.requests.advance("r", 4)
    leader.flush()
    leader.cursors.requests.topic_empty()
    leader.flush()
    assert (leader.cursors.state.pump, reader.committed.floor, reader.cursor.floor, list(reader.committed.ranges)) == (
        9,
        9,
        9,
        [],
    )
    leader.cursors.requests.topic_empty()
    leader.publish(1)
    assert (reader.committed.floor, reader.cursor.depth(reader.cursor.end)) == (9, 1)
