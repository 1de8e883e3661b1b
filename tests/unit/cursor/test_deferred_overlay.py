"""The overlay of deferred messages against a dict, whenever its parts are committed."""

from __future__ import annotations

import random

import pytest

from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred
from nsqha.cursor.deferred.overlay import DeferredOverlay


def commit(held: DeferredOverlay, sent: dict) -> None:
    """What applying the progress does to the committed set."""
    for offset, change in sent.items():
        if change.ref is None:
            held.committed.remove(offset)
        else:
            held.committed.put(change.ref)
    held.settled(sent)


@pytest.mark.parametrize("seed", range(20))
def test_the_overlay_is_a_dict_and_hands_out_everything_when_due(seed):
    rng = random.Random(seed)
    held, plain, sent = DeferredOverlay(MemoryDeferred()), {}, []
    now, in_flight = 0, {}
    for _ in range(400):
        offset = rng.randrange(30)
        match rng.randrange(7):
            case 0 | 1:
                if offset not in in_flight:
                    plain[offset] = Deferred(offset, now + rng.randrange(40), rng.randrange(3))
                    held.put(plain[offset])
            case 2:
                if in_flight:
                    offset = rng.choice(list(in_flight))
                    del in_flight[offset]
                    plain[offset] = plain[offset]._replace(due_ns=now + rng.randrange(40))
                    held.put(plain[offset])
            case 3:
                if in_flight:
                    offset = rng.choice(list(in_flight))
                    del in_flight[offset], plain[offset]
                    held.finish(offset)
            case 4:
                sent.append(held.take_unsent(rng.choice([1, 3, 100])))
            case 5:
                if sent:
                    commit(held, sent.pop(0))
            case 6:
                now += rng.randrange(20)
                ref = held.due(now, in_flight)
                due = [o for o, r in plain.items() if r.due_ns <= now and o not in in_flight]
                assert (ref is None) == (not due)
                if ref is not None:
                    assert ref == plain[ref.offset]
                    assert held.due(now, in_flight) == ref
                    in_flight[ref.offset] = True
        assert len(held) == len(plain)
        assert held.lowest() == min(plain, default=None)
        assert held.offsets(5, 20) == sorted(o for o in plain if 5 <= o < 20)
        assert all(held.get(o) == plain.get(o) for o in range(30))
        later = [r.due_ns for o, r in plain.items() if o not in in_flight and r.due_ns > now]
        if later and not held._ready:
            assert held.next_due() <= min(later)
    for changes in [*sent, held.take_unsent(100)]:
        commit(held, changes)
    assert {ref.offset: ref for ref in held.committed.items()} == plain
    assert (held.uncommitted, held.unsent) == (0, 0)


def test_a_carried_position_is_seen_through_the_overlay():
    committed = MemoryDeferred()
    committed.put(Deferred(1, 5, 0))
    held = DeferredOverlay(committed)
    held.put(Deferred(1, 9, 1))
    committed.put(Deferred(1, 5, 0, 777))
    assert held.get(1) == Deferred(1, 9, 1, 777)


def test_after_a_seek_only_changes_of_committed_messages_stay():
    committed = MemoryDeferred()
    committed.put(Deferred(1, 5, 0))
    committed.put(Deferred(2, 5, 0))
    held = DeferredOverlay(committed)
    held.put(Deferred(1, 9, 1))
    held.finish(2)
    held.put(Deferred(3, 9, 1))
    held.keep_committed()
    assert held.offsets(0, 10) == [1]
    assert held.finished(0) == [2]
    assert len(held) == 1


def test_the_heap_of_due_times_is_bounded_by_what_is_uncommitted():
    held = DeferredOverlay(MemoryDeferred())
    for n in range(5000):
        held.put(Deferred(n % 10, 1_000_000 + n, 1))
    assert len(held._heap) < 1000
