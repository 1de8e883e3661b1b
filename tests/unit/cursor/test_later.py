"""Messages that wait for the pump."""

from __future__ import annotations

from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.deferred.later import LaterMessages


def later_messages() -> LaterMessages:
    later = LaterMessages()
    for offset, due_ns in ((3, 900), (5, 100), (9, 500)):
        later.add(offset, due_ns)
    return later


def test_those_below_an_end_leave():
    later = later_messages()
    assert later.cut(3) == ()
    assert later.cut(9) == (Deferred(3, 900, 0), Deferred(5, 100, 0))
    assert later.rows() == [(9, 500)] and len(later) == 1
    assert later.cut(1 << 60) == (Deferred(9, 500, 0),)
    assert not later


def test_a_copy_stays_as_it_is():
    later = later_messages()
    copy = later.copy()
    later.cut(100)
    later.add(200, 1)
    assert copy.rows() == [(3, 900), (5, 100), (9, 500)]
