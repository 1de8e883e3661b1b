"""A leader begins: the tail of the one before is committed with its own first batch, and nothing is told before.

It ends by holding what comes, so that its successor reaches its end.
"""

from __future__ import annotations

import pytest

from nsqha.commitlog.log import LogLimits
from nsqha.errors import Unavailable
from nsqha.replication.leader import LeaderReplica
from tests.unit.server.shell_rig import NODE, PartitionRig

FOLLOWER = NODE + 1


def stored(rig: PartitionRig, *bodies: bytes) -> None:
    outcome = rig.publish(*bodies)
    rig.turn()
    assert outcome.answers == ["OK"]


def elected(rig: PartitionRig) -> None:
    """As if this node had just been elected with one follower in the ISR, in epoch 2."""
    leader = LeaderReplica(
        node=NODE,
        epoch=2,
        isr=(NODE, FOLLOWER),
        min_isr=2,
        sync_always=False,
        end=rig.log.end.log_id,
        durable=rig.log.local_durable,
    )
    rig.lead(leader, serving=False)


def acked(rig: PartitionRig) -> None:
    end = rig.log.end.log_id
    rig.partition.replica_acked(FOLLOWER, end, end)
    rig.turn()


def test_nothing_is_delivered_before_the_epoch_start_is_committed() -> None:
    rig = PartitionRig(sync="interval")
    stored(rig, b"one")
    elected(rig)
    start = rig.partition.start_epoch()
    consumer = rig.consume(10)
    assert consumer.wire.bodies == [] and not start.done()
    acked(rig)
    assert consumer.wire.bodies == [b"one"] and start.done()


def test_publishes_are_taken_before_that_and_answered_after_it() -> None:
    rig = PartitionRig(sync="interval")
    elected(rig)
    rig.partition.start_epoch()
    outcome = rig.publish(b"early")
    rig.turn()
    assert not outcome.answers
    acked(rig)
    acked(rig)
    assert outcome.answers == ["OK"]


def test_channels_begin_where_the_files_do_if_nothing_says_why() -> None:
    """Nobody has the event any more that let them go: it was in a batch that was given up."""
    rig = PartitionRig(sync="interval", limits=LogLimits(segment_bytes=300))
    for n in range(3):
        stored(rig, b"%d" % n * 300)
        rig.disk.work()
    rig.log.forget_pairs(rig.log.pairs[0].end)
    first = rig.log.start.offset
    assert first > 0 == rig.cursors.state.log_start[0]
    elected(rig)
    rig.partition.start_epoch()
    rig.turn()
    acked(rig)
    consumer = rig.consume(10)
    assert consumer.wire.bodies == [b"%d" % n * 300 for n in range(first, 3)]


def test_channel_events_wait_for_it() -> None:
    rig = PartitionRig(sync="interval")
    elected(rig)
    rig.partition.start_epoch()
    rig.turn()
    with pytest.raises(Unavailable):
        rig.partition.commit_events().result()
    acked(rig)
    assert rig.partition.serving
    future = rig.partition.commit_events()
    rig.turn()
    acked(rig)
    assert future.done()


def test_what_another_leader_left_uncommitted_is_committed_with_it() -> None:
    rig = PartitionRig(sync="interval")
    stored(rig, b"one")
    applied = rig.cursors.state.applied.log_id
    rig.append_copied(b"two")
    elected(rig)
    rig.partition.start_epoch()
    rig.turn()
    assert rig.cursors.state.applied.log_id == applied
    acked(rig)
    consumer = rig.consume(10)
    assert consumer.wire.bodies == [b"one", b"two"]
    assert rig.cursors.state.applied.log_id == rig.log.last.log_id


def test_the_log_is_in_line_with_the_record_from_the_first_batch_on() -> None:
    rig = PartitionRig(sync="interval")
    elected(rig)
    rig.partition.start_epoch(rig.channel_list("c", "new"))
    rig.turn()
    outcome = rig.publish(b"first")
    rig.turn()
    acked(rig)
    acked(rig)
    assert outcome.answers == ["OK"]
    assert rig.cursors.state.channels["new"].floor == 0 and rig.cursors.state.pump == 1


def test_a_leader_that_is_to_be_followed_by_another_writes_nothing_more() -> None:
    rig = PartitionRig(sync="interval")
    end = rig.log.end
    rig.partition.hand_over(True)
    outcome = rig.publish(b"later")
    rig.pass_time(3)
    assert rig.log.end == end and not outcome.answers
    rig.partition.hand_over(False)
    rig.turn()
    assert outcome.answers == ["OK"]


def test_a_leader_that_hands_over_says_first_where_its_channels_are() -> None:
    """Its successor repeats nothing that was finished, and counts attempts on."""
    rig = PartitionRig(sync="interval")
    consumer = rig.consume(2)
    stored(rig, b"one", b"two", b"three")
    rig.runtime.progress_pace.next_at = 1e9  # else it would be written with the FIN
    rig.finish(consumer)
    channel = rig.cursors.channels["c"].committed
    assert (consumer.wire.bodies, channel.floor) == ([b"one", b"two", b"three"], 0)
    rig.partition.hand_over(True)
    assert (channel.floor, channel.attempts) == (1, [(1, 3, 1)])
    end = rig.log.end
    stored_later = rig.publish(b"four")
    rig.fin(consumer, *(message_id for message_id, _, _ in consumer.wire.messages[1:]))
    rig.pass_time(3)
    assert rig.log.end == end and not stored_later.answers


def test_a_leader_that_hands_over_hands_out_nothing_more() -> None:
    rig = PartitionRig(sync="interval")
    stored(rig, b"one", b"two")
    rig.partition.hand_over(True)
    consumer = rig.consume(10)
    rig.pass_time(1)
    assert consumer.wire.bodies == []
    rig.partition.hand_over(False)
    rig.turn()
    assert consumer.wire.bodies == [b"one", b"two"], "nobody took over"


def test_what_it_held_was_definitely_not_stored() -> None:
    rig = PartitionRig(sync="interval")
    rig.partition.hand_over(True)
    outcome = rig.publish(b"later")
    rig.turn()
    rig.partition.abandon("another leads")
    assert outcome.answers == ["not stored: another leads"]


def test_who_waits_for_replicas_is_told_that_it_is_replicas() -> None:
    rig = PartitionRig(sync="interval")
    elected(rig)
    rig.partition.leader.set_isr({NODE}, {NODE})
    rig.partition.start_epoch()
    rig.turn()
    outcome = rig.publish(b"too few")
    rig.pass_time(6)
    rig.partition.keep_house(rig.partition.now())
    assert outcome.answers == ["not stored: fewer than 2 replicas (min_isr) are in sync"]
