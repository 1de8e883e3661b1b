"""Publishers that wait for their OKs share batches, and nobody waits long for those who do not come back."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest

from nsqha import hot
from nsqha.commitlog.log import LogLimits
from nsqha.server.partition.delivery import Delivery
from nsqha.server.partition.group_commit import LOOP_BYTES, OUTSTANDING_BYTES
from nsqha.server.partition.publishes import BATCH_BYTES, LINGER_SECONDS, SKIPPED_MAX, TURNS, Linger
from tests.sim.storage import SimStorage
from tests.unit.server.shell_rig import Outcome, PartitionRig


def quick_turns() -> Linger:
    """Where the loop's turns take no time."""
    return Linger(lambda: 0.0)


def turns_of(gathering: Linger, runs: int, size: int) -> int:
    """How many turns a flush of so much waits."""
    turns = 0
    while gathering.waits(runs, size):
        turns += 1
        assert turns <= TURNS, "it waits for ever"
    return turns


def test_without_a_commit_nothing_waits():
    assert turns_of(quick_turns(), 0, 0) == 0


def test_a_flush_goes_as_soon_as_everybody_is_back():
    gathering = quick_turns()
    gathering.committed(16, 1600, 1 << 20)
    assert [gathering.waits(n, 100 * n) for n in (1, 11, 15)] == [True, True, True]
    assert not gathering.waits(16, 1600)
    assert turns_of(gathering, 0, 0) == 0, "the next flush is another one's"


def test_what_can_not_wait_for_publishers_does_not():
    gathering = quick_turns()
    gathering.committed(16, 1600, 1 << 20)
    assert gathering.waits(1, 100)
    gathering.stop()
    assert not gathering.waits(1, 100)
    gathering.committed(16, 1600, 1 << 20)
    assert gathering.waits(1, 100), "that was nobody's fault"


@pytest.mark.parametrize(("runs", "size", "waits"), [(3, 970, False), (3, 960, True), (4, 750, False), (9, 740, True)])
def test_bodies_that_differ_and_runs_that_come_in_pieces(runs, size, waits):
    gathering = quick_turns()
    gathering.committed(4, 1000, 1 << 20)
    assert gathering.waits(runs, size) is waits


def test_what_is_written_anyway_is_not_waited_beyond():
    gathering = quick_turns()
    gathering.committed(4, 2000, 500)
    assert turns_of(gathering, 1, 500) == 0


MISSING = pytest.mark.parametrize(
    ("expected", "there"), [((2, 100), (1, 50)), ((16, 1600), (12, 1200))], ids=["most", "the last ones"]
)


@MISSING
def test_those_who_do_not_come_back_are_waited_for_more_and_more_rarely(expected, there):
    gathering = quick_turns()
    waited = []
    for n in range(400):
        gathering.committed(*expected, 1 << 20)
        if turns_of(gathering, *there):
            waited.append(n)
    assert waited[:6] == [0, 2, 5, 10, 19, 36]
    assert waited[-1] - waited[-2] == SKIPPED_MAX + 1


@MISSING
def test_one_success_and_they_are_waited_for_again(expected, there):
    gathering = quick_turns()
    for _ in range(SKIPPED_MAX * 3):
        gathering.committed(*expected, 1 << 20)
        turns_of(gathering, *there)
    for _ in range(SKIPPED_MAX + 1):
        gathering.committed(*expected, 1 << 20)
        assert turns_of(gathering, *expected) == 0
    for n in (1, 0, 1):
        gathering.committed(*expected, 1 << 20)
        assert turns_of(gathering, *there) == n * (TURNS - 1), "as after the first time in vain"


def test_most_are_waited_for_also_where_the_last_ones_never_come():
    gathering = quick_turns()
    for _ in range(400):
        gathering.committed(16, 1600, 1 << 20)
        assert gathering.waits(11, 1100)
        turns_of(gathering, 12, 1200)


def test_where_strangers_make_turns_long_nobody_is_waited_for_longer():
    now = [0.0]
    gathering = Linger(lambda: now[0])
    gathering.committed(16, 1600, 1 << 20)
    assert gathering.waits(1, 100)
    now[0] += LINGER_SECONDS / 2
    assert gathering.waits(2, 200)
    now[0] += LINGER_SECONDS / 2
    assert not gathering.waits(3, 300)
    assert turns_of(gathering, 0, 0) == 0, "the next flush is another one's"
    gathering.committed(16, 1600, 1 << 20)
    assert turns_of(gathering, 1, 100) == 0, "as after any time in vain"
    gathering.committed(16, 1600, 1 << 20)
    assert turns_of(gathering, 1, 100) == TURNS - 1


def test_where_turns_are_long_fewer_flushes_wait_for_those_who_are_back():
    now = [0.0]
    gathering = Linger(lambda: now[0])

    def waits() -> bool:
        """Whether a flush waits for publishers that all are back one turn later."""
        gathering.committed(16, 1600, 1 << 20)
        waited = gathering.waits(4, 400)
        now[0] += LINGER_SECONDS
        assert not gathering.waits(16, 1600)
        return waited

    waited = [n for n in range(400) if waits()]
    assert waited[:6] == [0, 2, 5, 10, 19, 36]
    assert waited[-1] - waited[-2] == SKIPPED_MAX + 1


def test_a_pause_of_publishers_is_no_long_turn():
    now = [0.0]
    gathering = Linger(lambda: now[0])
    for _ in range(4):
        gathering.committed(16, 1600, 1 << 20)
        now[0] += 1.0
        assert not gathering.waits(16, 1600), "they are back a second later"
    gathering.committed(16, 1600, 1 << 20)
    assert gathering.waits(4, 400)


class Again:
    """A publisher that waits for each OK and publishes again some turns of the loop later."""

    def __init__(self, rig: PartitionRig, turns: int, rounds: int) -> None:
        self.rig, self.turns, self.rounds = rig, turns, rounds
        self.answers = 0

    def publish(self) -> None:
        self.rig.partition.publish(hot.frame(b"x" * 100), self)

    def stored(self) -> None:
        self.answers += 1
        self.rounds -= 1
        if self.rounds:
            self.later(self.turns)

    def failed(self, why: str) -> None:
        raise AssertionError(why)

    def later(self, turns: int) -> None:
        if turns:
            self.rig.loop.call_soon(self.later, turns - 1)
        else:
            self.publish()


def batches(rig: PartitionRig, publishers: list[Again]) -> int:
    """How many batches it takes until all are done, with a disk round for each."""
    before = rig.partition.log.end.log_id
    for publisher in publishers:
        publisher.publish()
        rig.turn()
    for _ in range(1000):
        rig.disk.sync()
    assert not any(publisher.rounds for publisher in publishers)
    return rig.partition.log.end.log_id - before


def test_publishers_in_two_groups_become_one():
    """The first of them finds nothing outstanding; without gathering it would be in a group of its own for ever."""
    rig = PartitionRig()
    assert batches(rig, [Again(rig, n % 3, 40) for n in range(8)]) <= 40 + 3


def test_who_is_answered_at_once_waits_for_those_who_are_slower_to_come_back():
    rig = PartitionRig(sync="interval")
    before = rig.log.end.log_id
    publishers = [Again(rig, n % 3, 40) for n in range(8)]
    for publisher in publishers:
        publisher.publish()
    rig.turn()
    assert not any(publisher.rounds for publisher in publishers)
    assert rig.log.end.log_id - before == 40, "once for each round, not three times"


def test_a_publisher_that_is_alone_waits_for_nobody():
    rig = PartitionRig()
    assert batches(rig, [Again(rig, 3, 20)]) == 20


def test_those_who_come_late_do_not_hold_up_the_others():
    rig = PartitionRig()
    slow, quick = Again(rig, TURNS * 3, 10), Again(rig, 0, 200)
    batches(rig, [slow, quick])
    assert slow.answers == 10 and quick.answers == 200


RUN = b"x" * (400 << 10)  # a batch has one


class Polite(Outcome):
    source = "polite"


def flooded(rig: PartitionRig, runs: int = 20) -> list[Outcome]:
    return [rig.publish(RUN) for _ in range(runs)]


def answered(outcomes: list[Outcome]) -> int:
    assert all(outcome.answers in ([], ["OK"]) for outcome in outcomes)
    return sum(map(len, [outcome.answers for outcome in outcomes]))


def test_one_iteration_of_the_loop_writes_a_bounded_part_of_the_queue():
    rig = PartitionRig(sync="none")
    outcomes = flooded(rig)
    rig.loop.run_ready()
    assert answered(outcomes) == LOOP_BYTES // len(RUN) + 1
    rig.turn()
    assert answered(outcomes) == 20


def test_who_publishes_during_a_flood_is_in_one_of_the_next_batches():
    rig = PartitionRig()
    outcomes = flooded(rig, 40)
    rig.turn()
    written = rig.partition.batches.outstanding
    assert OUTSTANDING_BYTES <= written.bytes < OUTSTANDING_BYTES + BATCH_BYTES
    polite = Polite()
    rig.partition.publish(hot.frame(b"polite"), polite)
    rig.disk.sync()
    assert not polite.answers and answered(outcomes) < 20
    rig.disk.sync()
    assert polite.answers == ["OK"] and answered(outcomes) < 30
    for _ in range(3):
        rig.disk.sync()
    assert answered(outcomes) == 40 and not written.bytes and not rig.budget.used


def test_what_waits_for_a_commit_is_written_when_sync_becomes_none():
    rig = PartitionRig()
    outcomes = flooded(rig)
    rig.turn()
    rig.partition.batches.sync.change("none")
    rig.turn()
    assert answered(outcomes) == 20


def wrote_progress_alone(rig: PartitionRig) -> None:
    """The node has just spent what it may on progress in batches of its own."""
    rig.runtime.progress_pace.next_at = 1e9


def quiet_channel() -> PartitionRig:
    """Two messages are stored and delivered; one is finished."""
    rig = PartitionRig()
    rig.store(b"one", b"two")
    consumer = rig.consume(2)
    rig.pass_time(1)
    rig.disk.sync()
    wrote_progress_alone(rig)
    rig.finish(consumer)
    return rig


def delivered(n: int, **rig_settings: Any) -> tuple[PartitionRig, Any]:
    """`n` messages are stored and delivered, and a while has passed."""
    rig = PartitionRig(**rig_settings)
    consumer = rig.consume(n)
    rig.publish(*(b"%d" % i for i in range(n)))
    rig.turn()
    if rig.partition.leader.sync_always:
        rig.disk.sync()
    rig.pass_time(1)
    return rig, consumer


@pytest.mark.parametrize("sync", ["always", "none"])
def test_a_lone_node_writes_what_was_finished_in_the_turn_of_the_fin(sync: str):
    rig, consumer = delivered(2, sync=sync)
    before = rig.log.end
    rig.finish(consumer)
    assert (rig.log.end.log_id, rig.log.end.offset) == (before.log_id + 1, before.offset)
    assert not rig.disk.wanting, "it requests no disk round"
    assert rig.floor == (1 if sync == "none" else 0)


def test_progress_of_its_own_is_written_every_10_ms_by_all_partitions_together():
    rig, consumer = delivered(4)
    before = rig.log.end.log_id
    rig.finish(consumer, 0)
    rig.clock.advance(0.009)
    rig.finish(consumer, 1)
    assert rig.log.end.log_id == before + 1
    assert rig.runtime.progress_pace.next_at > rig.clock.monotonic(), "the node's other partitions wait as well"
    rig.clock.advance(0.0011)
    rig.finish(consumer, 2)
    assert rig.log.end.log_id == before + 2
    rig.finish(consumer, 3)
    rig.pass_time(0.07)
    assert rig.log.end.log_id == before + 3, "nothing waits longer than 50 ms"


def test_progress_that_can_ride_has_no_batch_of_its_own():
    rig, consumer = delivered(1)
    before = rig.log.end.log_id
    consumer.subscriptions[0].channel.fin(0, consumer.subscriptions[0].owner)
    consumer.in_flight -= 1
    consumer.wake()
    rig.publish(b"next")  # in the same tick
    rig.turn()
    assert rig.log.end.log_id == before + 1
    rig.disk.sync()
    assert rig.floor == 1


def test_with_followers_progress_has_no_batch_of_its_own_before_50_ms():
    rig, consumer = delivered(1)
    rig.partition.batches.set_followers(lambda: None, lambda: None)
    before = rig.log.end.log_id
    rig.finish(consumer)
    assert rig.log.end.log_id == before
    rig.pass_time(0.06)
    assert rig.log.end.log_id == before + 1


def test_progress_that_took_time_to_make_has_no_batch_of_its_own_next():
    rig, consumer = delivered(60)
    before = rig.log.end.log_id
    rig.fin(consumer, *(message[0] for message in consumer.wire.messages[1::2]))  # thirty ranges
    assert rig.log.end.log_id == before + 1
    rig.clock.advance(0.02)
    rig.finish(consumer, 2)
    assert rig.log.end.log_id == before + 1


def test_a_batch_of_progress_wakes_no_channel_that_has_read_everything(monkeypatch: pytest.MonkeyPatch):
    rig, consumer = delivered(2, sync="none")
    rig.channels("c", "d")
    pumped: list[str] = []
    pump = Delivery.pump
    monkeypatch.setattr(Delivery, "pump", lambda self, now: (pumped.append(self.channel.name), pump(self, now)))
    rig.finish(consumer)
    assert (rig.floor, pumped) == (1, ["c"]), "the FIN woke it, and that is all"


def test_progress_is_in_the_log_after_50_ms_without_a_disk_round():
    rig = quiet_channel()
    before = rig.log.end.log_id
    rig.pass_time(0.04)
    assert rig.log.end.log_id == before
    rig.pass_time(0.02)
    assert rig.log.end.log_id == before + 1
    rig.turn()
    assert not rig.disk.wanting, "it requests no disk round"
    rig.pass_time(0.5)
    assert rig.disk.wanting, "a patient one comes in the end"
    rig.disk.sync()
    assert rig.floor == 1
    rig.pass_time(5)
    assert rig.log.end.log_id == before + 1, "nothing changed, so nothing is written"


def test_progress_that_waits_for_the_disk_holds_no_publish_up():
    rig = quiet_channel()
    rig.pass_time(0.06)
    before = rig.log.end.log_id
    outcome = rig.publish(b"three")
    rig.turn()
    assert rig.log.end.log_id == before + 1
    rig.disk.sync()
    assert (outcome.answers, rig.floor) == (["OK"], 1), "one round is for both"


def test_a_caller_behind_progress_brings_the_disk_round():
    rig = quiet_channel()
    rig.pass_time(0.06)
    done = rig.partition.commit_events()
    rig.turn()
    rig.disk.sync()
    assert done.done() and rig.floor == 1


def test_a_leader_that_hands_over_does_not_wait_for_the_patient_round():
    rig = quiet_channel()
    rig.pass_time(0.06)
    rig.partition.hand_over(True)
    rig.turn()
    rig.disk.sync()
    assert rig.partition.leader.committed == rig.log.end.log_id


# ---- a publisher that was alone in the last batch


def lone(rig: PartitionRig, outcome: Outcome, body: bytes = b"lone") -> bool:
    """A publish that the queue was not asked for; whether it was taken."""
    return rig.partition.batches.write_lone(hot.frame(body), outcome)


def test_a_lone_publish_is_written_committed_delivered_and_answered_at_once():
    rig = PartitionRig(sync="interval")
    consumer = rig.consume(10)
    rig.publish(b"one")
    rig.turn()
    before, outcome = rig.log.end, Outcome()
    assert lone(rig, outcome, b"two") and outcome.answers == ["OK"]
    assert (rig.log.end.log_id, rig.log.end.offset) == (before.log_id + 1, before.offset + 1)
    assert rig.partition.leader.committed == rig.log.end.log_id == rig.cursors.state.applied.log_id + 1
    assert consumer.wire.bodies == [b"one", b"two"], "in this turn"
    assert rig.partition.batches.sync.unsynced_messages == 2
    publishes = rig.partition.batches.publishes
    assert (publishes.message_count, publishes.message_bytes) == (2, 6)
    assert rig.partition.high_watermark == rig.log.end.offset and not rig.budget.used


def acked(rig: PartitionRig) -> None:
    end = rig.log.end.log_id
    rig.partition.replica_acked(8, end, end)


def test_with_followers_who_was_alone_is_pushed_at_once():
    rig = PartitionRig(sync="interval")
    pushed: list[int] = []
    rig.partition.batches.set_followers(lambda: pushed.append(rig.log.end.log_id), None)
    rig.partition.leader.set_isr({7, 8}, {7, 8})
    rig.publish(b"one")
    assert not pushed, "nothing is known of who publishes"
    rig.turn()
    acked(rig)
    first = rig.publish(b"two")
    assert len(pushed) == 2, "in the turn of the publish"
    second = rig.publish(b"three")
    rig.turn()
    assert len(pushed) == 2, "it waits for the commit of the batch before"
    acked(rig)
    assert first.answers == ["OK"] and not second.answers
    outcomes = [second, rig.publish(b"four")]
    rig.turn()
    assert len(pushed) == 3, "now there are two"
    acked(rig)
    outcomes += [rig.publish(b"five"), rig.publish(b"six")]
    assert len(pushed) == 3, "the first of them waits for the other"
    rig.turn()
    acked(rig)
    assert len(pushed) == 4 and [outcome.answers for outcome in outcomes] == [["OK"]] * 4


def waits_for_the_disk(rig: PartitionRig) -> None:
    rig.partition.batches.sync.change("always")


def has_followers(rig: PartitionRig) -> None:
    rig.partition.batches.set_followers(lambda: None, None)


def waits_for_a_replica(rig: PartitionRig) -> None:
    rig.partition.leader.set_isr({7, 8}, {7, 8})


def has_an_outstanding_batch(rig: PartitionRig) -> None:
    waits_for_the_disk(rig)
    rig.publish(b"outstanding")
    rig.turn()
    rig.partition.leader.sync_always = False


def has_a_channel_to_create(rig: PartitionRig) -> None:
    rig.cursors.requests.reconcile(rig.channel_list("c", "d"))


def has_progress_to_write(rig: PartitionRig) -> None:
    wrote_progress_alone(rig)
    rig.publish(b"one")
    rig.turn()
    rig.finish(rig.consume(1))
    rig.clock.advance(1.0)


def has_a_caller_of_events(rig: PartitionRig) -> None:
    rig.partition.batches.events.wait(rig.loop.create_future())


def hands_over(rig: PartitionRig) -> None:
    rig.partition.hand_over(True)


def is_closed(rig: PartitionRig) -> None:
    rig.partition.abandon("gone")


def has_just_begun(rig: PartitionRig) -> None:
    rig.partition.life.serving = False


def rolls(rig: PartitionRig) -> None:
    rig.partition.files.roll()
    rig.turn()


@pytest.mark.parametrize(
    "state",
    [
        waits_for_the_disk,
        has_followers,
        waits_for_a_replica,
        has_an_outstanding_batch,
        has_a_channel_to_create,
        has_a_caller_of_events,
        hands_over,
        is_closed,
        has_just_begun,
        rolls,
    ],
)
def test_a_lone_publish_goes_by_the_queue_where_something_else_has_a_say(state: Callable[[PartitionRig], None]):
    rig = PartitionRig(sync="interval")
    state(rig)
    before, outcome = rig.log.end, Outcome()
    assert not lone(rig, outcome)
    assert rig.log.end == before and not outcome.answers, "nothing was done"


def test_what_is_finished_since_a_moment_keeps_no_publish_from_being_written_at_once():
    rig = PartitionRig(sync="interval")
    rig.publish(b"one")
    rig.turn()
    consumer = rig.consume(2)
    rig.finish(consumer)
    rig.pass_time(0.06)
    before = rig.log.end.log_id
    rig.publish(b"two")
    rig.turn()
    assert rig.log.end.log_id == before + 1, "progress is written"
    rig.finish(consumer, 1)
    assert lone(rig, Outcome()), "it is due in 50 ms"


def test_progress_that_is_due_rides_with_a_lone_publish():
    rig = PartitionRig(sync="interval")
    has_progress_to_write(rig)
    before, outcome = rig.log.end, Outcome()
    assert rig.floor == 0 and lone(rig, outcome, b"two") and outcome.answers == ["OK"]
    assert (rig.log.end.log_id, rig.log.end.offset) == (before.log_id + 1, before.offset + 1)
    assert rig.floor == 1 and rig.partition.leader.committed == rig.log.end.log_id
    publishes = rig.partition.batches.publishes
    assert (publishes.message_count, publishes.message_bytes) == (2, 6)
    assert [bytes(rig.log.message(offset))[-3:] for offset in (0, 1)] == [b"one", b"two"]


def test_who_publishes_hears_that_the_progress_beside_it_could_not_be_made(monkeypatch: pytest.MonkeyPatch):
    rig = PartitionRig(sync="interval")
    has_progress_to_write(rig)

    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(rig.partition.cursors), "take_events", fail)
    outcome = Outcome()
    assert lone(rig, outcome, b"two") and rig.partition.life.stopped is not None
    assert len(outcome.answers) == 1 and "outcome unknown" in outcome.answers[0]


def test_where_progress_rides_no_timer_rings_for_it():
    rig = PartitionRig(sync="interval")
    rig.publish(b"one")
    rig.turn()
    consumer = rig.consume(9)
    rig.finish(consumer)
    for n in range(1, 4):
        rig.clock.advance(0.041)
        assert lone(rig, Outcome())
        rig.finish(consumer, n)
        assert min(rig.loop.armed) >= rig.clock.monotonic() + 0.05 - 1e-6, "what was finished now is not due before"
    rig.pass_time(0.06)
    assert rig.floor == 4, "and then it is written alone"


def faulty() -> tuple[PartitionRig, SimStorage]:
    storage = SimStorage(random.Random(1))
    rig = PartitionRig(sync="interval", storage=storage)
    rig.publish(b"one")
    rig.turn()
    return rig, storage


def test_progress_that_was_to_ride_with_a_lone_publish_outlives_a_full_disk():
    rig, storage = faulty()
    consumer = rig.consume(1)
    wrote_progress_alone(rig)
    rig.finish(consumer)
    rig.clock.advance(1.0)
    storage.fail("pwrite", code=errno.ENOSPC, times=1)
    assert not lone(rig, Outcome()) and rig.floor == 0
    rig.publish(b"two")
    rig.pass_time(1.5)
    assert rig.floor == 1


def test_a_lone_publish_that_a_full_disk_refuses_is_left_to_the_queue():
    rig, storage = faulty()
    storage.fail("pwrite", code=errno.ENOSPC, times=1)
    before, outcome = rig.log.end, Outcome()
    assert not lone(rig, outcome) and not outcome.answers and rig.log.end == before
    assert lone(rig, outcome) and outcome.answers == ["OK"], "there is room again"


def test_a_lone_publish_that_a_failing_disk_took_has_no_certain_outcome():
    rig, storage = faulty()
    storage.fail("pwrite", code=errno.EIO, times=1)
    outcome = Outcome()
    assert lone(rig, outcome) and rig.failures
    assert len(outcome.answers) == 1 and outcome.answers[0].startswith(hot.OUTCOME_UNKNOWN)


def test_a_lone_publish_whose_batch_can_not_be_applied_stops_the_partition():
    rig = PartitionRig(sync="interval")
    rig.cursors.state.applied = rig.cursors.state.applied._replace(log_id=99)
    outcome = Outcome()
    assert lone(rig, outcome) and rig.partition.life.stopped
    assert len(outcome.answers) == 1 and outcome.answers[0].startswith(hot.OUTCOME_UNKNOWN)


@pytest.mark.parametrize("by_the_queue", [False, True])
def test_what_fails_between_the_write_and_the_commit_leaves_nobody_unanswered(by_the_queue, monkeypatch):
    def written(end: int) -> bool:
        raise RuntimeError("a bug")

    rig, outcome = PartitionRig(sync="interval"), Outcome()
    monkeypatch.setattr(rig.partition.leader, "written", written)
    if by_the_queue:
        outcome = rig.publish(b"one")
        rig.turn()
    else:
        assert lone(rig, outcome)
    assert rig.partition.life.stopped
    assert len(outcome.answers) == 1 and outcome.answers[0].startswith(hot.OUTCOME_UNKNOWN)


def test_a_lone_publisher_that_can_not_be_answered_harms_nobody():
    class Broken(Outcome):
        def stored(self) -> None:
            raise RuntimeError("the socket is gone")

    rig = PartitionRig(sync="interval")
    assert lone(rig, Broken()) and lone(rig, Outcome()) and not rig.partition.life.stopped


def test_files_roll_behind_a_lone_publish():
    rig = PartitionRig(sync="interval", limits=LogLimits(segment_bytes=100))
    assert lone(rig, Outcome(), b"x" * 100)
    rig.turn()
    assert rig.partition.files.busy


def test_the_partition_writes_at_once_what_a_client_publishes_alone():
    rig = PartitionRig(sync="interval")
    written: list[bytes] = []

    class Client:
        def heed_unread(self) -> None: ...

        def publish_failed(self, command: str, why: str) -> bytes:
            raise AssertionError(why)

        def close(self) -> None: ...

    queue = rig.partition.queue
    assert queue is not None
    replies = hot.Replies(Client(), written.append)
    publisher = hot.Publisher(b"PUB t\n", "t", 100, queue, replies, {"t": 0}, rig.loop.time, lambda: None)
    publisher.take(b"PUB t\n\0\0\0\3one")
    assert not written
    rig.turn()
    publisher.take(b"PUB t\n\0\0\0\3two")
    assert len(written) == 2, "without another turn"
