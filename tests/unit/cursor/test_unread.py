"""What lies in front of a reader, and how it passes over what is settled."""

from __future__ import annotations

from nsqha.cursor.committed.state import ChannelState
from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred
from nsqha.cursor.limits import ChannelLimits
from nsqha.cursor.live.unread import UnreadLog
from nsqha.hot import Ring
from nsqha.ranges import RangeSet

PASSED: list[bool] = []


def unread_of(
    *,
    floor: int = 0,
    finished: tuple[tuple[int, int], ...] = (),
    deferred: tuple[int, ...] = (),
    attempts: tuple[tuple[int, int, int], ...] = (),
    window: int = 100,
    waits: bool = False,
    name: str = "c",
) -> tuple[UnreadLog, Ring]:
    held = MemoryDeferred()
    for offset in deferred:
        held.put(Deferred(offset, 1000, 1))
    state = ChannelState(name, 1, floor, held, ranges=RangeSet(finished), attempts=list(attempts))
    ring = Ring(floor)
    PASSED.clear()
    limits = ChannelLimits(window=window)
    return UnreadLog(ring, state, held, limits, waits=waits, moved=lambda: PASSED.append(True)), ring


def test_nothing_special_stops_the_reader_nowhere():
    unread, _ = unread_of()
    assert unread.stop > 1 << 62
    assert unread.count(10) == 10
    assert unread.skip() == 0 and not PASSED


def test_the_reader_passes_over_what_is_finished_and_deferred():
    unread, ring = unread_of(finished=((0, 2), (4, 5)), deferred=(2, 3, 7))
    assert unread.stop == 0
    assert unread.count(10) == 4
    assert unread.skip() == ring.next == ring.low == 5
    assert PASSED
    assert unread.stop == 7


def test_a_reader_that_waits_stands_still_at_a_deferred_message():
    unread, ring = unread_of(finished=((0, 2),), deferred=(2, 3), waits=True)
    assert unread.skip() == ring.next == 2
    assert unread.stop == 2


def test_the_reader_does_not_pass_the_end_of_the_window():
    unread, ring = unread_of(finished=((0, 50),), window=10)
    assert unread.skip() == ring.next == 10 == unread.window_end()


def test_the_window_of_a_channel_in_memory_goes_with_its_own_floor():
    durable, ring = unread_of(finished=((0, 5),), window=10)
    durable.skip()
    assert (ring.low, durable.window_end()) == (5, 10)
    ephemeral, ring = unread_of(finished=((0, 5),), window=10, name="c#ephemeral")
    ephemeral.skip()
    assert (ring.low, ephemeral.window_end()) == (5, 15)


def test_what_was_handed_out_before_comes_with_its_deliveries():
    unread, ring = unread_of(finished=((1, 2),), attempts=((0, 1, 3), (4, 6, 1)))
    assert unread.handed_out_before() == (0, 3)
    ring.deliver(0, 1, 1)
    unread.look()
    assert unread.handed_out_before() is None, "the reader is not there yet"
    assert unread.stop == 4 and ring.next == 2
    ring.deliver(2, 4, 1)
    assert unread.handed_out_before() == (4, 1)


def test_a_seek_forgets_what_was_handed_out_before():
    unread, _ = unread_of(finished=((3, 4),), attempts=((0, 1, 3),))
    unread.passed.add(8, 9)
    unread.moved_back([5])
    assert unread.handed_out_before() is None
    assert list(unread.passed) == [(3, 4), (5, 6)]
    assert unread.stop == 3
