"""What a log says of when channels were done with messages."""

from __future__ import annotations

from nsqha import hot
from nsqha.commitlog.entry import Entry
from nsqha.cursor import events
from nsqha.cursor.deferred.dead import DEAD_FROM
from nsqha.frames import HAS_ATTRIBUTES, HAS_EVENTS
from tests.jepsen.checkers.settling import ChannelRows, rows_of
from tests.jepsen.history import Settling

UID = 7


class Batches:
    """A log: each batch a second after the one before."""

    def __init__(self) -> None:
        self.all: list[tuple[Entry, bytes]] = []
        self._offset = 0

    def add(self, *said: events.Event, count: int = 0) -> None:
        n = len(self.all) + 1
        data = b"".join(event.encode() for event in said) + count * hot.frame(b"x")
        flags = HAS_ATTRIBUTES if any(isinstance(event, events.Attributes) for event in said) else HAS_EVENTS
        self.all.append((Entry(n, 1, self._offset, 0, n, count, len(data), 0, flags, 1, 1, 0, 0), data))
        self._offset += count

    def progress(self, uid: int = UID, **said: object) -> None:
        self.add(events.ProgressEvent((events.ChannelProgress(uid, 0, **said),)))  # type: ignore[arg-type]

    @property
    def rows(self) -> ChannelRows:
        return rows_of(iter(self.all), {UID})[UID]


def test_the_floor_and_ranges_say_what_is_done_each_once() -> None:
    log = Batches()
    log.add(count=6)
    log.progress(floor=2, ranges=((3, 5),))
    log.progress(uid=8, floor=6)
    log.progress(floor=6)
    assert log.rows.rows == [
        Settling(0, 2, 2, 6),
        Settling(3, 5, 2, 6),
        Settling(2, 3, 4, 6),
        Settling(5, 6, 4, 6),
    ]


def test_what_is_deferred_is_done_when_it_is_finished() -> None:
    log = Batches()
    log.add(count=3)
    log.progress(floor=3, puts=((1, 50, 2),))
    log.add(count=4)
    log.progress(floor=3, finished=(1,))
    assert log.rows.rows == [Settling(0, 1, 2, 3), Settling(2, 3, 2, 3), Settling(1, 2, 4, 7)]


def test_what_has_a_time_of_its_own_is_deferred_from_the_beginning() -> None:
    log = Batches()
    log.add(events.Attributes(covers=1, deliver_at_ns=99), count=1)
    log.progress(floor=1)
    log.progress(floor=1, finished=(0,))
    assert log.rows.rows == [Settling(0, 1, 3, 1)]


def test_a_dead_letter_says_at_which_attempt_it_died() -> None:
    log = Batches()
    log.add(count=2)
    log.progress(floor=2, puts=((0, DEAD_FROM + 8, 3), (1, 5, 2)))
    log.progress(floor=2, finished=(0, 1))
    assert log.rows.rows == [Settling(0, 1, 3, 2, 3), Settling(1, 2, 3, 2)]


def test_a_channel_that_was_moved_says_nothing_and_what_retention_took_is_told() -> None:
    log = Batches()
    log.add(count=2)
    log.progress(floor=1)
    log.add(events.LogStart(2, 99, (events.Abandoned(UID, 0, 2), events.Abandoned(8, 0, 1))))
    log.add(events.Seek(UID, 0, 2))
    assert log.rows.moved
    assert log.rows.abandoned == [Settling(0, 2, 3, 2)]
