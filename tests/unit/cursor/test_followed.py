"""One message at a time is followed from its delivery to its FIN, and what comes back is not counted."""

from __future__ import annotations

from nsqha.cursor.live.followed import NO_TIMES, ChannelTimes, FollowedMessage
from nsqha.hot import FINISHED, WAITING, Ring


def delivered(count: int) -> Ring:
    ring = Ring(0)
    ring.deliver(0, count, 1)
    return ring


def seconds(followed: FollowedMessage) -> tuple[int, float]:
    data = followed.processed.data()
    return sum(data.counts), data.sum


def test_the_time_from_delivery_to_fin_is_observed_once() -> None:
    ring, followed = delivered(3), FollowedMessage()
    followed.begin(1, 0.5, now=10.0)
    assert followed.handed_out.data().sum == 0.5
    ring.set(0, FINISHED)
    followed.look(ring, 11.0)
    assert (followed.offset, seconds(followed)) == (1, (0, 0.0))
    ring.set(1, FINISHED)
    followed.look(ring, 12.0)
    assert (followed.offset, seconds(followed)) == (-1, (1, 2.0))


def test_a_message_below_the_floor_is_finished() -> None:
    ring, followed = delivered(3), FollowedMessage()
    followed.begin(0, 0.0, now=10.0)
    ring.set(0, FINISHED)
    assert ring.low == 1
    followed.look(ring, 10.5)
    assert seconds(followed) == (1, 0.5)


def test_what_comes_back_or_was_forgotten_is_not_counted() -> None:
    ring, followed = delivered(3), FollowedMessage()
    followed.begin(2, 0.0, now=10.0)
    ring.set(2, WAITING)
    followed.look(ring, 11.0)
    assert (followed.offset, seconds(followed)) == (-1, (0, 0.0))
    followed.begin(2, 0.0, now=10.0)
    followed.forget()
    assert followed.offset == -1 and seconds(followed) == (0, 0.0)
    followed.begin(2, 0.0, now=10.0)
    followed.look(Ring(0), 11.0)  # a seek went back
    assert (followed.offset, seconds(followed)) == (-1, (0, 0.0))


def test_times_of_several_partitions_add_up() -> None:
    ring, followed = delivered(1), FollowedMessage()
    followed.begin(0, 3.0, now=1.0)
    ring.set(0, FINISHED)
    followed.look(ring, 2.0)
    times = ChannelTimes(followed.handed_out.data(), followed.processed.data(), NO_TIMES.attempts)
    both = ChannelTimes.sum((times, NO_TIMES, times))
    assert (both.handed_out.sum, both.processed.sum) == (6.0, 2.0)
    assert sum(both.handed_out.counts) == sum(both.processed.counts) == 2
