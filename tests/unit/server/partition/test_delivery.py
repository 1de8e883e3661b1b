"""Handing out: windows, timers that must fire and ones that must not, and counts that must not drift."""

from __future__ import annotations

import errno
import random

import pytest

from nsqha.clock import Now
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.followed import APART_SECONDS
from nsqha.errors import LogCorrupt, NotInLog
from tests.unit.server.shell_rig import NODE, Consumer, PartitionRig


def stored(rig: PartitionRig, *bodies: bytes) -> None:
    outcome = rig.store(*bodies)
    assert outcome.answers == ["OK"]


def req(rig: PartitionRig, consumer: Consumer, message_id: bytes, delay_ms: int) -> str | None:
    """REQ as the connection does it."""
    subscription = consumer.subscriptions[0]
    why = subscription.channel.req(
        int(message_id, 16) - subscription.id_base, subscription.owner, delay_ms, rig.partition.now()
    )
    if why is None:
        consumer.in_flight -= 1
        consumer.wake()
        rig.turn()
    return why


def touch(rig: PartitionRig, consumer: Consumer, message_id: bytes) -> str | None:
    subscription = consumer.subscriptions[0]
    return subscription.channel.touch(
        int(message_id, 16) - subscription.id_base, subscription.owner, rig.partition.now(), consumer.msg_timeout
    )


# ---- windows


def test_what_is_committed_is_delivered_and_what_is_written_behind_it_is_not():
    rig = PartitionRig()
    stored(rig, b"committed")
    rig.publish(b"written")
    rig.turn()
    assert rig.log.end.offset == 2
    consumer = rig.consume(10)
    assert consumer.wire.bodies == [b"committed"]
    rig.disk.sync()
    assert consumer.wire.bodies == [b"committed", b"written"]


def test_nothing_is_delivered_before_it_is_committed():
    rig = PartitionRig()
    consumer = rig.consume(10)
    rig.publish(b"one")
    rig.turn()
    rig.disk.begin()
    rig.pass_time(1)
    assert consumer.wire.bodies == []
    rig.disk.end()
    assert consumer.wire.bodies == [b"one"]


def test_delivery_pauses_at_the_window_while_no_progress_commits():
    """The ISR is below min_isr: what is finished meanwhile would come again after a crash, and that is bounded."""
    rig = PartitionRig(cursor_limits=ChannelLimits(window=10))
    stored(rig, *[b"%d" % n for n in range(30)])
    leader, channel = rig.partition.leader, rig.cursors.channels["c"]
    leader.set_isr({NODE}, {NODE}, min_isr=2)
    consumer = rig.consume(100)

    def finish_all(rounds: int) -> None:
        for _ in range(rounds):
            rig.fin(consumer, *[message_id for message_id, *_ in consumer.wire.messages[-consumer.in_flight :]])
            rig.disk.sync()
            rig.pass_time(1.0)

    finish_all(5)
    assert len(consumer.wire.bodies) == channel.cursor.uncommitted_progress == 10
    assert leader.set_isr({NODE}, {NODE}, min_isr=1)
    rig.partition.committed_moved()
    finish_all(5)
    assert len(consumer.wire.bodies) == 30 and channel.cursor.uncommitted_progress == 0


def test_a_consumer_whose_socket_is_full_gets_nothing_until_it_is_not():
    rig = PartitionRig()
    stored(rig, b"one", b"two")
    consumer = rig.consume(1)
    consumer.wire.writable = False
    rig.finish(consumer)
    assert consumer.wire.bodies == [b"one"]
    consumer.wire.writable = True
    consumer.wake()  # as the connection does when its socket has room
    rig.turn()
    assert consumer.wire.bodies == [b"one", b"two"]


def test_channels_that_are_woken_in_one_turn_are_looked_at_once_at_one_moment():
    rig = PartitionRig(sync="interval", channel=False)
    rig.channels("c", "d")
    readers = [rig.consume(0, "c"), rig.consume(0, "d")]
    rig.publish(b"one")
    rig.turn()
    moments: list[Now] = []
    now = rig.partition.now
    rig.partition.now = lambda: moments.append(now()) or moments[-1]  # type: ignore[func-returns-value, method-assign]
    for reader in readers * 2:
        reader.ready(1)
    rig.turn()
    assert [reader.wire.bodies for reader in readers] == [[b"one"], [b"one"]]
    assert len(moments) == 1


def test_a_little_backlog_is_dealt_out_to_all_who_are_ready():
    rig = PartitionRig()
    consumers = [rig.consume(10) for _ in range(3)]
    stored(rig, *[b"m"] * 6)
    assert min(len(c.wire.bodies) for c in consumers) >= 1
    assert sum(len(c.wire.bodies) for c in consumers) == 6


def test_what_a_lost_consumer_had_goes_to_the_next():
    rig = PartitionRig()
    stored(rig, b"one")
    first, second = rig.consume(1), rig.consume(1)
    subscription = first.subscriptions[0]
    subscription.delivery.detach(subscription, rig.partition.now())
    rig.turn()
    assert [(attempts, body) for _, attempts, body in second.wire.messages] == [(2, b"one")]
    assert first.in_flight == 0


def test_files_that_can_not_be_opened_delay_a_channel_and_do_not_stop_it():
    """Too many connections, for a while: the next read may go well, and nobody is there to start the node again."""
    rig = PartitionRig()
    stored(rig, b"one")
    rig.log.shelf.clear()
    reads = []

    def too_many(offset: int) -> None:
        reads.append(offset)
        raise OSError(errno.EMFILE, "Too many open files")

    batch_at, rig.log.batch_at = rig.log.batch_at, too_many  # type: ignore[assignment, method-assign]
    consumer = rig.consume(10)
    rig.pass_time(3)
    delivery = rig.partition.deliveries["c"]
    assert delivery.stuck is None and consumer.wire.bodies == [] and 2 <= len(reads) <= 5
    rig.log.batch_at = batch_at  # type: ignore[method-assign]
    rig.pass_time(1.1)
    assert consumer.wire.bodies == [b"one"]
    assert not rig.loop.armed or rig.loop.armed[0] > rig.loop.time() + 10, "nothing is tried any more"


# ---- timers


def test_a_time_out_fires_although_nothing_else_happens():
    rig = PartitionRig()
    stored(rig, b"one")
    consumer = rig.consume(1, timeout=3.0)
    rig.pass_time(2.9)
    assert len(consumer.wire.messages) == 1
    rig.pass_time(0.3)
    assert [attempts for _, attempts, _ in consumer.wire.messages] == [1, 2]


def test_a_process_that_stood_still_hands_out_nothing_before_it_has_heard_what_came():
    rig = PartitionRig()
    stored(rig, b"one")
    consumer = rig.consume(2, timeout=3.0)
    rig.pause.tick(rig.clock.monotonic())
    rig.pass_time(3.5)
    stored(rig, b"two")
    assert [attempts for _, attempts, _ in consumer.wire.messages] == [1], "it timed out, and another may lead by now"
    delivery = rig.partition.deliveries["c"]
    assert not delivery.has_backlog(rig.partition.now())
    while not rig.pause.tick(rig.clock.monotonic()):
        rig.pass_time(0.1)
    assert len(consumer.wire.messages) == 1
    rig.partition.deliveries.wake_all()
    rig.turn()
    assert [attempts for _, attempts, _ in consumer.wire.messages] == [1, 2, 1]


def test_a_touch_moves_the_time_out():
    rig = PartitionRig()
    stored(rig, b"one")
    consumer = rig.consume(1, timeout=3.0)
    rig.pass_time(2)
    assert touch(rig, consumer, consumer.wire.messages[0][0]) is None
    rig.pass_time(2)
    assert len(consumer.wire.messages) == 1
    rig.pass_time(1.2)
    assert len(consumer.wire.messages) == 2


@pytest.mark.parametrize("delay_ms", [100, 4_000, 60_000])
def test_a_requeued_message_comes_when_it_is_due(delay_ms: int):
    rig = PartitionRig(sync="interval")
    stored(rig, b"one")
    consumer = rig.consume(1, timeout=900)
    assert req(rig, consumer, consumer.wire.messages[0][0], delay_ms) is None
    rig.pass_time(delay_ms / 1000 - 0.05)
    assert len(consumer.wire.messages) == 1
    rig.pass_time(0.2)
    assert len(consumer.wire.messages) == 2


def test_what_is_due_comes_when_the_wall_clock_is_set_forward():
    """Or the host slept: due times are of the wall clock, and timers of one that stood still."""
    rig = PartitionRig(sync="interval")
    rig.publish(b"later", defer_ms=3_600_000)
    rig.turn()
    consumer = rig.consume(1)

    def keep_house() -> None:
        rig.pass_time(1)
        rig.partition.keep_house(rig.partition.now())
        rig.disk.work()

    for _ in range(5):
        keep_house()  # nothing else is due then
    rig.clock.wall += 3_600_000_000_000
    keep_house()
    assert consumer.wire.bodies == [b"later"]
    rig.publish(b"again", defer_ms=10_000)
    rig.turn()
    consumer.ready(2)
    rig.clock.wall -= 3_600_000_000_000
    for _ in range(12):
        keep_house()
    assert consumer.wire.bodies == [b"later"], "due when the clock says so"
    rig.pass_time(3_600)
    assert consumer.wire.bodies.count(b"again") == 1


def test_a_deferred_publish_comes_when_it_is_due_although_nobody_publishes():
    rig = PartitionRig()
    consumer = rig.consume(1)
    rig.store(b"later", defer_ms=5_000)
    rig.pass_time(4.9)
    assert consumer.wire.bodies == []
    rig.pass_time(0.3)
    assert consumer.wire.bodies == [b"later"]


def test_a_deferred_publish_that_is_read_again_before_its_time_waits_once_more() -> None:
    """An empty drops what is deferred, and going back from it meets the message in its place."""
    rig = PartitionRig()
    rig.publish(b"first")
    rig.publish(b"later", defer_ms=60_000)
    rig.store(b"last")
    rig.cursors.requests.empty("c")
    rig.cursors.requests.seek("c", 0)
    rig.partition.commit_events()
    rig.disk.sync()
    consumer = rig.consume(10, timeout=600.0)
    assert consumer.wire.bodies == [b"first", b"last"]
    rig.disk.sync()
    rig.pass_time(61)
    assert consumer.wire.bodies == [b"first", b"last", b"later"]


def test_progress_is_written_although_nobody_publishes():
    rig = PartitionRig()
    stored(rig, b"one")
    consumer = rig.consume(1)
    rig.finish(consumer)
    rig.pass_time(1.1)
    rig.disk.sync()
    assert rig.floor == 1


@pytest.mark.parametrize("paused", [False, True])
def test_what_is_due_and_nobody_takes_costs_no_timers(paused: bool):
    rig = PartitionRig(sync="interval")
    stored(rig, *[b"m"] * 3)
    rig.publish(b"later", defer_ms=1_000)
    rig.turn()
    consumer = rig.consume(3, timeout=1.0)
    ids = [message_id for message_id, _, _ in consumer.wire.messages]
    req(rig, consumer, ids[0], 500)
    rig.cursors.channels["c"].paused = paused
    if not paused:
        consumer.rdy = 0
    rig.pass_time(10)
    rig.loop.pass_time(1000, most=50)


def test_a_disk_that_stalls_does_not_make_timers_spin():
    rig = PartitionRig()
    stored(rig, b"one")
    consumer = rig.consume(1)
    rig.finish(consumer)
    rig.loop.pass_time(100, most=500)


# ---- damage


def test_a_channel_stops_at_what_can_not_be_read_and_the_others_go_on():
    rig = PartitionRig(channel=False)
    rig.channels("c", "d")
    consumer, other = rig.consume(10, "c"), rig.consume(10, "d")
    delivery = rig.partition.deliveries["c"]

    def broken(offset: int) -> None:
        raise LogCorrupt("the bytes do not verify")

    delivery._batch_of = broken  # type: ignore[method-assign, assignment]
    stored(rig, b"one")
    assert delivery.stuck == "the bytes do not verify" and consumer.wire.bodies == []
    assert other.wire.bodies == [b"one"]


def test_what_comes_again_is_for_clients_of_other_nodes_too():
    """With nothing unread left, and a client here that takes one message at a time."""
    rig = PartitionRig()
    stored(rig, b"one", b"two", b"three")
    first = rig.consume(3)
    asked: list[str] = []
    other = rig.consume(0)
    other.starved = lambda: asked.append("starved")  # type: ignore[method-assign]
    rig.partition.deliveries["c"]._standing_by[other] = None
    last = rig.consume(0)
    first.ready(0)
    for message_id, *_ in first.wire.messages[:2]:
        assert req(rig, first, message_id, 0) is None
    asked.clear()
    last.rdy = 1
    rig.partition.deliveries["c"].pump(rig.partition.now())
    assert last.wire.bodies == [b"one"] and asked == ["starved"]


def beyond_the_log(rig: PartitionRig) -> None:
    """The channels may read three messages more than the log has."""
    rig.cursors.state.pump += 3
    rig.partition.deliveries["c"].wake()
    rig.turn()


def test_a_state_that_names_what_the_log_lacks_is_made_anew_once():
    rig = PartitionRig()
    asked: list[str] = []
    rig.partition.life.on_wrong_state = lambda: asked.append("anew")
    stored(rig, b"one")
    rig.consume(10)
    beyond_the_log(rig)
    beyond_the_log(rig)
    assert rig.partition.life.wrong_state(rig.partition, NotInLog(1, "retention meets it, too"))
    assert asked == ["anew"] and rig.partition.deliveries["c"].stuck == "offset 1 is not in the log"


def test_what_a_state_made_anew_still_names_can_be_skipped():
    rig = PartitionRig()
    rig.partition.life.on_wrong_state = lambda: pytest.fail("it was made anew already")
    stored(rig, b"one", b"two")
    consumer = rig.consume(10)
    rig.cursors.state.rebuilt = 1
    rig.log.batch_at, batch_at = (lambda offset: batch_at(offset) if offset != 2 else None), rig.log.batch_at  # type: ignore[method-assign]
    stored(rig, b"gone", b"four")
    delivery = rig.partition.deliveries["c"]
    assert delivery.stuck is not None and delivery.damage == (2, 3)
    assert delivery.skip_damage() == (2, 3, 1)
    rig.turn()
    assert delivery.stuck is None and consumer.wire.bodies == [b"one", b"two", b"four"]


def test_a_deferred_message_without_its_carried_copy_can_be_skipped():
    rig = PartitionRig()
    stored(rig, b"one")
    consumer = rig.consume(10)
    assert req(rig, consumer, consumer.wire.messages[0][0], 3_600_000) is None
    rig.pass_time(1)
    rig.disk.sync()
    rig.cursors.state.rebuilt = 1
    deferred = rig.cursors.channels["c"].committed.deferred
    (held,) = deferred.items()
    deferred.put(held._replace(position=1 << 40))
    rig.pass_time(3600)
    delivery = rig.partition.deliveries["c"]
    assert "carried message 0" in (delivery.stuck or "") and delivery.damage == (0, 1)
    assert delivery.skip_damage() == (0, 1, 1)
    rig.pass_time(1)
    rig.disk.sync()
    assert delivery.stuck is None and not list(deferred.items())


def test_a_broken_invariant_stops_the_channel_and_not_the_partition():
    rig = PartitionRig(channel=False)
    rig.channels("c", "d")
    rig.consume(10, "c")
    other = rig.consume(10, "d")

    def broken(*args: object) -> None:
        raise AssertionError("cannot be")

    rig.cursors.channels["c"].next_run = broken  # type: ignore[method-assign, assignment]
    stored(rig, b"one")
    stored(rig, b"two")
    assert "cannot be" in (rig.partition.deliveries["c"].stuck or "")
    assert other.wire.bodies == [b"one", b"two"]
    assert not rig.partition.closed


# ---- counts


@pytest.mark.parametrize("seed", range(12))
def test_in_flight_counts_never_drift(seed: int):
    """Whatever happens to messages: what consumers count as in flight is what the channel does; windows hold."""
    rng = random.Random(seed)
    rig = PartitionRig(sync="interval")
    channel = rig.cursors.channels["c"]
    delivery = rig.partition.deliveries["c"]
    consumers: list[Consumer] = []

    def some_id(consumer: Consumer) -> bytes | None:
        return rng.choice(consumer.wire.messages)[0] if consumer.wire.messages else None

    for _ in range(150):
        step = rng.randrange(12)
        if step == 0 and len(consumers) < 4:
            timeout, sample_rate = rng.choice((1.0, 3.0)), rng.choice((0, 0, 50))
            consumers.append(rig.consume(rng.randrange(5), timeout=timeout, sample_rate=sample_rate))
        elif step == 1 and consumers:
            subscription = consumers.pop(rng.randrange(len(consumers))).subscriptions[0]
            delivery.detach(subscription, rig.partition.now())
        elif step in (2, 3):
            rig.publish(*[b"m"] * rng.randrange(1, 6), defer_ms=rng.choice((None, None, None, 700)))
        elif step in (4, 5, 6) and consumers:
            consumer = rng.choice(consumers)
            ids = sorted({i for i in (some_id(rng.choice(consumers)) for _ in range(3)) if i})
            subscription = consumer.subscriptions[0]
            for message_id in ids:
                if rig.fin(consumer, message_id) == 0:
                    assert (
                        subscription.channel.fin(int(message_id, 16) - subscription.id_base, subscription.owner)
                        is not None
                    )
        elif step == 7 and consumers and (message_id := some_id(consumer := rng.choice(consumers))):
            req(rig, consumer, message_id, rng.choice((0, 300, 20_000)))
        elif step == 8 and consumers and (message_id := some_id(consumer := rng.choice(consumers))):
            touch(rig, consumer, message_id)
        elif step == 9:
            rig.pass_time(rng.choice((0.1, 0.9, 3.5)))
        elif step == 10 and rng.random() < 0.4:
            rig.cursors.requests.seek("c", rng.choice((0, rig.log.end.offset // 2, TARGET_END)))
            rig.partition.commit_events()
        elif step == 11 and rng.random() < 0.2:
            rig.cursors.requests.empty("c")
            rig.partition.commit_events()
        for consumer in consumers:
            if rng.random() < 0.2:
                consumer.rdy = rng.randrange(6)
                consumer.wake()
        rig.turn()
        assert sum(c.in_flight for c in consumers) == channel.in_flight
        assert all(c.in_flight >= 0 for c in consumers)
        assert delivery.stuck is None and not rig.partition.closed


# ---- figures


def test_one_message_at_a_time_is_followed_to_its_fin() -> None:
    rig = PartitionRig()
    stored(rig, *[b"m"] * 5)
    rig.pass_time(2)
    consumer = rig.consume(10)
    followed = rig.partition.deliveries["c"].channel.answers.followed
    assert followed.offset == 2, "the one in the middle"
    assert followed.handed_out.data().sum == pytest.approx(2, abs=0.1)
    rig.finish(consumer)
    rig.finish(consumer, 1)
    rig.pass_time(3)
    rig.finish(consumer, 2)
    rig.turn()
    data = followed.processed.data()
    assert sum(data.counts) == 1 and data.sum == pytest.approx(3, abs=0.1)
    stored(rig, b"next")
    assert followed.offset == 5


def test_messages_that_follow_each_other_at_once_are_not_all_followed() -> None:
    rig = PartitionRig()
    stored(rig, *[b"m"] * 50)
    looked_up: list[int] = []
    rig.log.entry_for_offset = looked_up.append  # type: ignore[assignment, method-assign, return-value]
    consumer = rig.consume(1)
    followed = rig.partition.deliveries["c"].channel.answers.followed
    for n in range(20):
        rig.finish(consumer, n)
    assert sum(followed.handed_out.data().counts) == 1
    rig.pass_time(2 * APART_SECONDS)
    for n in range(20, 40):
        rig.finish(consumer, n)
    assert sum(followed.handed_out.data().counts) == 2
    assert not looked_up, "the frame says when it was published"


def test_attempts_are_counted_at_fin() -> None:
    rig = PartitionRig()
    stored(rig, b"one", b"two")
    consumer = rig.consume(10)
    assert req(rig, consumer, consumer.wire.messages[0][0], 0) is None
    rig.finish(consumer, 1)
    rig.finish(consumer, 2)
    attempts = rig.partition.deliveries["c"].channel.answers.times().attempts
    assert attempts.counts[:3] == (1, 1, 0) and attempts.sum == 3
