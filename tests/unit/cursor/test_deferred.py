"""The in-memory deferred set against a dict."""

from __future__ import annotations

import random

import pytest

from nsqha.cursor.deferred.deferred_set import Deferred, MemoryDeferred

START = (-(1 << 63), -1)


@pytest.mark.parametrize("seed", range(6))
def test_a_deferred_set_is_a_dict_in_two_orders(seed):
    rng = random.Random(seed)
    held, plain = MemoryDeferred(), {}
    # A narrow range makes collisions, a wide one many blocks.
    width = rng.choice([50, 20_000])
    for _ in range(6000):
        offset = rng.randrange(width)
        if rng.random() < 0.65:
            ref = Deferred(offset, rng.randrange(200), rng.randrange(9), rng.choice([0, 0, 5000 + offset]))
            held.put(ref)
            plain[offset] = ref
        else:
            assert held.remove(offset) == (plain.pop(offset, None) is not None)
    assert len(held) == len(plain)
    assert list(held.items()) == sorted(plain.values())
    first = rng.randrange(width)
    assert list(held.items(first)) == sorted(ref for ref in plain.values() if ref.offset >= first)
    assert held.count_from(first) == sum(offset >= first for offset in plain)
    assert held.next_offset(first) == min((o for o in plain if o >= first), default=None)
    for offset in rng.sample(range(width), 40):
        assert held.get(offset) == plain.get(offset)
    by_due = sorted(plain.values(), key=lambda ref: (ref.due_ns, ref.offset))
    after = (by_due[len(by_due) // 3].due_ns, by_due[len(by_due) // 3].offset)
    behind = [ref for ref in by_due if (ref.due_ns, ref.offset) > after]
    assert held.due(after, 150, 7) == [ref for ref in behind if ref.due_ns <= 150][:7]
    assert held.next_due(after) == behind[0].due_ns
    assert list(held.below(100, 5100)) == [
        ref for ref in sorted(plain.values()) if (ref.position < 5100 if ref.position else ref.offset < 100)
    ]


def test_an_empty_set_answers():
    held = MemoryDeferred()
    assert (len(held), held.get(1), held.next_offset(0), held.next_due(START)) == (0, None, None, None)
    assert held.due(START, 1 << 62, 5) == [] == list(held.items())
    assert held.count_from(0) == 0
    assert not held.remove(3)


def test_a_snapshot_stays_as_it_was():
    held = MemoryDeferred()
    held.put(Deferred(1, 10, 0))
    copy = held.snapshot()
    held.put(Deferred(2, 5, 0))
    held.remove(1)
    assert list(copy.items()) == [Deferred(1, 10, 0)]
    copy.clear()
    assert list(held.items()) == [Deferred(2, 5, 0)]


def test_a_message_in_the_set_costs_no_objects():
    import tracemalloc

    tracemalloc.start()
    held = MemoryDeferred()
    for offset in range(20_000):
        held.put(Deferred(offset, 1_700_000_000_000_000_000 + offset, 1))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / 20_000 < 70
