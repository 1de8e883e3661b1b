"""Group commit of one partition: who is answered what, and when, while the disk is slow, full, or fails."""

from __future__ import annotations

import errno
import random

import pytest

from nsqha import hot
from nsqha.commitlog.log import LogLimits
from nsqha.errors import LogCorrupt, Poisoned, Unavailable
from nsqha.server.node.snapshot import oldest_unfinished_seconds
from nsqha.server.partition.memory import EphemeralMemory
from tests.sim.storage import SimStorage
from tests.unit.server.shell_rig import Outcome, PartitionRig

ONE_BATCH = LogLimits(segment_bytes=100)  # a roll behind each
BIG = b"x" * 70_000  # above FLUSH_BYTES: written although a batch is outstanding


def full_disk(rig: PartitionRig) -> SimStorage:
    storage = rig.storage
    assert isinstance(storage, SimStorage)
    storage.fail("pwrite", code=errno.ENOSPC, times=10_000)
    return storage


def sim_rig(**options: object) -> PartitionRig:
    return PartitionRig(storage=SimStorage(random.Random(1)), **options)  # type: ignore[arg-type]


def rolling_with_news() -> PartitionRig:
    """A roll is under way, and a message that was finished is not written yet."""
    rig = sim_rig(limits=ONE_BATCH)
    rig.store(b"x" * 100)
    assert rig.disk.jobs, "a roll"
    rig.finish(rig.consume(10))
    return rig


# ---- ordered channels


def test_the_fin_of_an_ordered_channel_is_written_without_an_alarm():
    rig = PartitionRig(sync="interval", ordered=True)
    rig.publish(b"one", b"two", b"three")
    rig.turn()
    consumer = rig.consume(10)
    for n in range(2):
        assert len(consumer.wire.messages) == n + 1, "one at a time"
        rig.finish(consumer, n)
        rig.turn()  # no time passes
        rig.turn()
    assert len(consumer.wire.messages) == 3


def test_with_sync_always_the_next_in_order_waits_for_the_disk():
    rig = PartitionRig(ordered=True)
    rig.store(b"one", b"two")
    consumer = rig.consume(10)
    end = rig.log.end.log_id
    rig.finish(consumer)
    rig.turn()
    assert rig.log.end.log_id == end + 1, "the FIN is in the log at the end of the tick"
    assert len(consumer.wire.messages) == 1
    rig.disk.begin()
    rig.disk.end()
    assert len(consumer.wire.messages) == 2


def test_the_disk_has_the_fin_before_channels_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    rig = PartitionRig(ordered=True)
    rig.store(b"one", b"two")
    consumer = rig.consume(10)
    begin, ends = rig.log.end.log_id, list[int]()
    monkeypatch.setattr(rig.partition.deliveries["c"], "pump", lambda now: ends.append(rig.log.end.log_id))
    rig.finish(consumer)
    assert ends == [begin + 1]


# ---- answers


def test_ok_waits_for_the_disk():
    rig = PartitionRig()
    outcome = rig.publish(b"one")
    rig.turn()
    rig.disk.begin()
    assert outcome.answers == []
    rig.disk.end()
    assert outcome.answers == ["OK"]


def test_with_sync_interval_ok_waits_for_the_write_only():
    rig = PartitionRig(sync="interval")
    outcome = rig.publish(b"one")
    rig.turn()
    assert outcome.answers == ["OK"]


def test_sync_none_asks_for_no_round_and_interval_by_count_and_time():
    rigs = {sync: PartitionRig(sync=sync, sync_every=10) for sync in ("none", "interval")}
    for rig in rigs.values():
        rig.disk.wanting.clear()
        outcome = rig.publish(*[b"x"] * 9)
        rig.turn()
        assert outcome.answers == ["OK"] and not rig.disk.wanting
        rig.publish(b"x")
        rig.turn()
    assert [bool(rig.disk.wanting) for rig in rigs.values()] == [False, True]
    for rig in rigs.values():
        rig.disk.sync()
        rig.publish(b"x")
        rig.turn()
        assert not rig.disk.wanting
        rig.pass_time(2.1)
    assert [bool(rig.disk.wanting) for rig in rigs.values()] == [False, True]


def test_an_entry_says_what_was_durable_everywhere_when_it_was_written_and_no_more():
    """What it says more would be called corrupt after a crash, and never be cut."""
    rig = PartitionRig(sync="interval", channel=False)
    for body in (b"one", b"two"):
        rig.publish(body)
        rig.turn()
    assert [rig.log.entry(log_id).durable for log_id in (1, 2)] == [1, 1]
    rig.disk.request(rig.partition.batches.sync)
    rig.disk.sync()
    for body in (b"three", b"four"):
        rig.publish(body)
        rig.turn()
    assert [rig.log.entry(log_id).durable for log_id in (3, 4)] == [3, 3]


def test_answers_come_in_the_order_of_the_log():
    rig = PartitionRig()
    order: list[int] = []

    class Numbered(Outcome):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def stored(self) -> None:
            order.append(self.n)

    rig.partition.publish(hot.frame(b"a"), Numbered(0))
    rig.turn()
    rig.disk.begin()
    rig.partition.publish(hot.frame(BIG), Numbered(1))
    rig.turn()
    rig.partition.publish(hot.frame(b"c"), Numbered(2))
    rig.disk.end()
    rig.disk.sync()
    rig.disk.sync()
    assert order == [0, 1, 2]


def test_a_closed_partition_refuses_at_once():
    rig = PartitionRig()
    rig.partition.abandon("the topic was deleted")
    outcome = rig.publish(b"late")
    assert outcome.answers == ["not stored: the topic was deleted"]


def test_a_reply_that_breaks_does_not_keep_the_others_from_their_answer():
    rig = PartitionRig()

    class Broken(Outcome):
        def stored(self) -> None:
            raise RuntimeError("a socket in a strange state")

    rig.partition.publish(hot.frame(b"a"), Broken())
    second = rig.store(b"b")
    third = rig.store(b"c")
    assert second.answers == ["OK"] and third.answers == ["OK"]


def test_what_was_written_with_sync_none_is_synced_when_the_setting_changes():
    rig = PartitionRig(sync="none")
    rig.publish(b"one")
    rig.turn()
    rig.partition.batches.sync.change("interval")
    rig.pass_time(2.1)
    assert list(rig.disk.wanting) == [rig.partition.batches.sync]


def test_figures_are_there_although_a_batch_can_not_be_read():
    rig = PartitionRig()
    rig.store(b"one")

    def broken(offset: int) -> None:
        raise LogCorrupt("a hole")

    rig.log.entry_for_offset = broken  # type: ignore[method-assign, assignment]
    assert oldest_unfinished_seconds(rig.partition, rig.cursors.channels["c"], rig.partition.now()) is None


# ---- rolls


def test_a_batch_that_a_roll_made_durable_is_answered():
    """The disk round that it asked for finds nothing left to sync, so nobody else tells the leader."""
    rig = PartitionRig(limits=ONE_BATCH)
    outcome = rig.publish(b"y" * 200)
    rig.turn()
    rig.disk.work()  # the roll; a round of other partitions was under way meanwhile
    rig.disk.sync()
    assert outcome.answers == ["OK"]


def test_nothing_is_appended_while_a_roll_is_under_way():
    rig = PartitionRig(limits=ONE_BATCH)
    rig.publish(b"y" * 200)
    rig.turn()
    end = rig.log.end
    second = rig.publish(b"z")
    rig.partition.commit_events()
    rig.turn()
    assert rig.log.end == end
    rig.disk.work()
    rig.disk.sync()
    assert second.answers == ["OK"]


def test_a_clean_stop_does_not_begin_a_roll():
    """It would run on files that the stop closes."""
    rig = PartitionRig(limits=ONE_BATCH)
    rig.publish(b"y" * 200)
    closing = rig.loop.create_task(rig.partition.close())
    rig.disk.work()
    assert closing.done() and closing.exception() is None
    assert rig.failures == [] and rig.disk.jobs == []


# ---- a full disk


def test_what_a_full_disk_refuses_is_not_stored_and_the_next_is():
    rig = sim_rig()
    storage = full_disk(rig)
    outcome = rig.publish(b"one")
    rig.turn()
    assert len(outcome.answers) == 1 and outcome.answers[0].startswith("not stored:")
    storage.heal()
    second = rig.store(b"two")
    assert second.answers == ["OK"] and rig.log.end.offset == 1


def test_channel_events_that_a_full_disk_refused_are_written_when_it_has_room():
    rig = sim_rig()
    rig.store(b"one")
    consumer = rig.consume(10)
    rig.finish(consumer)
    storage = full_disk(rig)
    rig.pass_time(3)  # the progress is due, and refused
    storage.heal()
    rig.pass_time(3)  # nobody publishes
    rig.disk.sync()
    assert rig.floor == 1


def test_what_a_full_disk_refuses_does_not_grow_for_as_long_as_it_is_full():
    """Consumers go on: what becomes of the same messages again and again is one event in the end, not one for each."""
    rig = sim_rig()
    rig.store(*[b"m"] * 20)
    consumer = rig.consume(20)
    storage = full_disk(rig)
    subscription = consumer.subscriptions[0]
    for _ in range(100):
        for message_id, _, _ in consumer.wire.messages:
            assert (
                subscription.channel.req(
                    int(message_id, 16) - subscription.id_base, subscription.owner, 6_000, rig.partition.now()
                )
                is None
            )
            consumer.in_flight -= 1
        consumer.wire.sent.clear()
        consumer.wake()
        rig.pass_time(7)
        assert len(consumer.wire.messages) == 20
    end, waiting = rig.log.end, rig.partition.commit_events()
    storage.heal()
    rig.pass_time(3)
    rig.disk.sync()
    assert waiting.done() and waiting.exception() is None
    sizes = [entry.size for entry in rig.log.entries(end.log_id, rig.log.end.log_id)]
    assert max(sizes) < 1_000, "20 deferrals of 18 bytes"
    deferred = rig.cursors.channels["c"].committed.deferred
    assert {ref.attempts for ref in deferred.items()} == {100}


def test_what_holds_events_up_is_not_looked_at_again_and_again():
    """A roll on a slow disk, say: the loop of a node has other things to do."""
    rig = rolling_with_news()
    rig.loop.pass_time(60, most=100)
    end = rig.log.end.log_id
    rig.disk.work()
    rig.pass_time(1.1)
    rig.disk.sync()
    assert rig.log.end.log_id > end and rig.floor == 1


def test_the_last_progress_is_written_behind_what_a_full_disk_refused():
    rig = sim_rig()
    rig.store(b"one", b"two")
    consumer = rig.consume(10)
    storage = full_disk(rig)
    rig.finish(consumer)
    rig.pass_time(3)
    rig.finish(consumer, 1)
    storage.heal()
    closing = rig.loop.create_task(rig.partition.close())
    rig.disk.work()
    assert closing.done() and rig.floor == 2


def test_a_leader_that_hands_over_during_a_roll_writes_its_progress_afterwards():
    rig = rolling_with_news()
    rig.partition.hand_over(True)
    held = rig.publish(b"held")
    end = rig.log.end
    assert rig.partition.batches.last_progress_due
    rig.disk.work()
    assert not rig.partition.batches.last_progress_due
    rig.pass_time(3)
    rig.disk.sync()
    assert rig.floor == 1
    assert (rig.log.end.log_id, rig.log.end.offset) == (end.log_id + 1, end.offset) and not held.answers


def test_a_leader_that_hands_over_says_first_what_a_full_disk_refused():
    """Also where the retry is over and the flush that it asked for has not come yet."""
    for flush_first in (False, True):
        rig = sim_rig()
        rig.store(b"one", b"two")
        consumer = rig.consume(10)
        storage = full_disk(rig)
        rig.finish(consumer)
        rig.pass_time(3)
        rig.finish(consumer, 1)
        retry = rig.loop.scheduler.first_timer
        assert retry is not None
        storage.heal()
        if flush_first:
            rig.partition.hand_over(True)
            assert not rig.partition.batches.last_progress_due, "nobody waits for a full disk"
            retry._run()
        else:
            retry._run()
            rig.partition.hand_over(True)
        end = rig.log.end.log_id
        rig.disk.sync()
        assert rig.floor == 2 and rig.log.end.log_id == end


def test_a_leader_that_hands_over_before_its_epoch_has_begun_has_nothing_to_say():
    rig = sim_rig()
    rig.partition.life.serving = False
    rig.partition.hand_over(True)
    assert not rig.partition.batches.last_progress_due


def test_what_a_full_disk_refuses_of_the_last_words_is_said_when_it_has_room():
    rig = sim_rig()
    rig.store(b"one")
    consumer = rig.consume(10)
    rig.finish(consumer)
    storage = full_disk(rig)
    rig.partition.hand_over(True)
    rig.pass_time(3)
    storage.heal()
    rig.pass_time(3)
    rig.disk.sync()
    assert rig.floor == 1


def test_a_full_disk_does_not_breed_timers():
    rig = sim_rig()
    full_disk(rig)
    for _ in range(50):
        rig.publish(b"one")
        rig.partition.commit_events()
        rig.turn()
    assert len(rig.loop.armed) <= 3


# ---- a disk that fails


def test_who_waits_for_an_event_hears_that_the_disk_failed():
    rig = sim_rig()
    storage = rig.storage
    assert isinstance(storage, SimStorage)
    storage.fail("pwrite", code=errno.EIO, times=10_000)
    storage.fail("truncate", code=errno.EIO, times=10_000)
    outcome = rig.publish(b"one")
    waiting = rig.partition.commit_events()
    rig.turn()
    assert [type(f) for f in rig.failures] == [Poisoned]
    rig.partition.abandon("the disk failed")  # as the broker does on a failure
    assert len(outcome.answers) == 1 and outcome.answers[0].startswith("outcome unknown")
    assert isinstance(waiting.exception(), Unavailable)


def test_a_broken_invariant_stops_the_partition_and_answers_who_waits():
    rig = PartitionRig()
    rig.publish(b"written before")
    rig.turn()

    def broken(*args: object, **kwargs: object) -> None:
        raise AssertionError("cannot be")

    rig.log.append = broken  # type: ignore[method-assign]
    outcome = rig.publish(BIG)
    waiting = rig.partition.commit_events()
    rig.turn()
    assert rig.partition.closed
    assert len(outcome.answers) == 1 and "cannot be" in outcome.answers[0]
    assert isinstance(waiting.exception(), Unavailable)
    assert rig.failures == []  # the disk is fine, other partitions go on
    assert rig.partition.life.stopped is not None and "cannot be" in rig.partition.life.stopped


def test_an_event_that_cannot_be_applied_stops_the_partition():
    rig = PartitionRig()
    first, second = rig.publish(b"a"), rig.publish(b"b")
    rig.turn()

    def broken(*args: object, **kwargs: object) -> None:
        raise LogCorrupt("an event that nobody understands")

    rig.cursors.apply = broken  # type: ignore[method-assign, assignment]
    rig.disk.sync()
    assert rig.partition.closed
    for outcome in (first, second):
        assert len(outcome.answers) == 1 and outcome.answers[0].startswith("outcome unknown")


# ---- events


def test_an_event_that_another_batch_carries_is_waited_for():
    """Its first asker went away; who asks again must not hear of success before it is committed."""
    rig = PartitionRig()
    rig.partition.write_events()
    rig.cursors.requests.topic_empty()
    rig.turn()
    rig.disk.begin()
    waiting = rig.partition.commit_events()
    rig.turn()
    assert not waiting.done()
    rig.disk.end()
    rig.turn()
    assert waiting.done()


# ---- deferred publishes


def test_a_deferred_publish_that_an_ephemeral_topic_drops_delays_no_other():
    memory = EphemeralMemory(topic_bytes_max=1 << 20, node_bytes_max=1 << 20, messages_max=1)
    rig = PartitionRig(sync="none", memory=memory, channel=False)
    rig.publish(b"kept")
    rig.turn()
    dropped = rig.publish(b"dropped", defer_ms=60_000)
    rig.turn()
    assert dropped.answers == ["OK"]
    rig.channels("c")
    later = rig.publish(b"later")
    rig.turn()
    assert later.answers == ["OK"]
    assert rig.consume(10).wire.bodies == [b"kept", b"later"]


def test_all_messages_of_a_deferred_run_are_deferred():
    rig = PartitionRig()
    rig.store(b"one", b"two", defer_ms=2_000)
    consumer = rig.consume(10)
    assert consumer.wire.bodies == []
    rig.pass_time(2.1)
    assert consumer.wire.bodies == [b"one", b"two"]


def test_a_carried_message_comes_out_as_it_was_published():
    rig = PartitionRig()
    rig.store(b"one", b"two", defer_ms=2_000)
    stored = [rig.log.message(offset) for offset in (0, 1)]
    for _ in range(2):  # what was carried may be carried again
        for ref in rig.cursors.retention.to_carry(2, rig.log.end.position):
            rig.cursors.retention.carry(ref.offset, rig.log.message(ref.offset, ref.position))
        rig.partition.commit_events()
        rig.disk.sync()
    carried = rig.cursors.retention.to_carry(2, rig.log.end.position)
    assert all(ref.position for ref in carried)
    assert [rig.log.message(ref.offset, ref.position) for ref in carried] == stored
    consumer = rig.consume(10)
    rig.pass_time(2.1)
    assert consumer.wire.bodies == [b"one", b"two"]


# ---- the end


def test_a_publish_that_could_not_be_written_in_time_is_refused_and_never_stored():
    rig = PartitionRig()
    first = rig.publish(b"first")
    rig.turn()
    rig.pass_time(4.0)
    late = rig.publish(b"waits for the first one")
    rig.turn()
    rig.clock.advance(3.0)
    soon = rig.publish(b"later")
    rig.turn()
    rig.clock.advance(2.5)
    rig.partition.keep_house(rig.partition.now())
    assert late.answers == ["not stored: the log could not be written in time"]
    assert (first.answers, soon.answers) == ([], [])
    rig.disk.sync()
    rig.disk.sync()
    assert (first.answers, soon.answers, len(late.answers)) == (["OK"], ["OK"], 1)
    assert [bytes(rig.log.message(offset)[34:]) for offset in range(rig.log.end.offset)] == [b"first", b"later"]


def test_a_written_publish_without_outcome_is_answered_unknown_and_only_once():
    rig = PartitionRig()
    outcome = rig.publish(b"one")
    rig.turn()
    used = rig.budget.used
    rig.clock.advance(29.0)
    rig.partition.keep_house(rig.partition.now())
    assert outcome.answers == []
    rig.clock.advance(2.0)
    for _ in range(2):
        rig.partition.keep_house(rig.partition.now())
    assert outcome.answers == ["outcome unknown: not confirmed in time"]
    assert rig.budget.used == used > 0, "the batch is held as long as its disk hangs"
    rig.disk.sync()
    assert len(outcome.answers) == 1 and rig.budget.used == 0
    assert rig.log.end.offset == 1


def test_a_round_that_ends_after_the_partition_did_is_ignored():
    rig = PartitionRig()
    outcome = rig.publish(b"one")
    rig.turn()
    rig.disk.begin()
    rig.partition.abandon("the topic was deleted")
    rig.log.close()
    rig.disk.end()
    rig.turn()
    assert rig.failures == []
    assert outcome.answers == ["outcome unknown: the topic was deleted"]


def test_publishers_that_are_not_read_are_read_again_when_the_partition_ends():
    rig = PartitionRig(waiting_bytes_max=10)
    rig.publish(b"one, which is more than ten bytes")
    woken: list[bool] = []
    rig.budget.when_room(lambda: woken.append(True))
    rig.partition.abandon("the topic was deleted")
    rig.turn()
    assert woken == [True]


def test_a_clean_stop_answers_what_it_stored():
    rig = PartitionRig()
    outcome = rig.publish(b"one")
    closing = rig.loop.create_task(rig.partition.close())
    rig.disk.work()
    assert closing.done() and outcome.answers == ["OK"]
    assert rig.publish(b"late").answers == ["not stored: shutting down"]


def test_channel_events_queued_too_early_wait_for_the_epoch_and_block_none():
    rig = PartitionRig(channel=False)
    rig.partition.life.serving = False
    rig.partition.start_epoch()
    rig.turn()
    rig.cursors.requests.reconcile(
        rig.channel_list("c")
    )  # the record changed; whoever waits for it is told to try again
    outcome = rig.publish(b"one")
    rig.turn()
    for _ in range(3):
        rig.disk.sync()
        rig.turn()
    assert outcome.answers == ["OK"] and list(rig.cursors.channels) == ["c"]
