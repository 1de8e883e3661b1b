"""What every set of deferred messages promises: in memory, over a database, and with changes on their way there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nsqha.cursor.cache.lmdb_cache import LmdbCache
from nsqha.cursor.cache.lmdb_tables import Tables
from nsqha.cursor.committed.state import ChannelState
from nsqha.cursor.deferred.deferred_set import Deferred, DeferredSet, DueKey, MemoryDeferred
from nsqha.cursor.deferred.store import DeferredStore
from tests.unit.cursor.cache_rig import flush
from tests.unit.cursor.tiny import TinyLog

FIRST: DueKey = (-(1 << 63), -1)


class Made:
    """A set, and what happens below it now and then."""

    def __init__(self, held: DeferredSet, step: Callable[[random.Random], None]) -> None:
        self.held = held
        self.step = step


KINDS = ["memory", "overlay", "written", "writing", "mixed"]


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    if request.param == "memory":
        yield Made(MemoryDeferred(), lambda rng: None)
        return
    monkeypatch.setattr(Tables, "sync", lambda tables: None)  # nothing here survives a restart
    cache = LmdbCache.open(str(tmp_path / "cursors.lmdb"), map_bytes=64 << 20)
    state = cache.load((1, 0), TinyLog(), lambda entry: b"").state
    held = state.new_deferred(7)
    assert isinstance(held, DeferredStore)
    state.channels["c"] = ChannelState("c", 7, 0, held)
    taken = None

    def touch() -> None:
        state.applied = state.applied._replace(log_id=state.applied.log_id + 1)  # something was applied

    def begin() -> None:
        nonlocal taken
        touch()
        taken = cache.take(0.0, force=True)

    def end() -> None:
        nonlocal taken
        if taken is not None:
            cache.write(taken)
            cache.written(taken, 0.0)
            assert taken.error is None
            taken = None

    def step(rng: random.Random) -> None:
        match request.param:
            case "written":
                touch()
                assert flush(cache)
            case "writing":
                end()
                begin()
            case "mixed" if rng.random() < 0.1:
                end() if taken is not None else begin()
            case "mixed" if taken is not None and rng.random() < 0.1:
                cache.write(taken)  # written, but not let go of

    yield Made(held, step)
    cache.close()


def put(made: Made, *refs: Deferred) -> None:
    rng = random.Random(0)
    for ref in refs:
        made.held.put(ref)
        made.step(rng)


def test_an_empty_set_has_nothing(made: Made) -> None:
    held = made.held
    made.step(random.Random(0))
    assert len(held) == 0 and not list(held.items())
    assert held.get(3) is None and not held.remove(3)
    assert held.next_offset(0) is None and held.next_due(FIRST) is None
    assert held.due(FIRST, 1 << 62, 10) == [] and held.count_from(0) == 0
    assert list(held.below(100, 100)) == []


def test_a_row_is_found_by_offset_and_by_due_time(made: Made) -> None:
    put(made, Deferred(5, 300, 2), Deferred(3, 400, 1, 77))
    held = made.held
    assert held.get(5) == Deferred(5, 300, 2) and held.get(3) == Deferred(3, 400, 1, 77) and held.get(4) is None
    assert list(held.items()) == [Deferred(3, 400, 1, 77), Deferred(5, 300, 2)]
    assert list(held.items(4)) == [Deferred(5, 300, 2)]
    assert held.due(FIRST, 350, 10) == [Deferred(5, 300, 2)]
    assert held.due(FIRST, 400, 10) == [Deferred(5, 300, 2), Deferred(3, 400, 1, 77)]
    assert held.due((300, 5), 400, 10) == [Deferred(3, 400, 1, 77)]
    assert held.next_due(FIRST) == 300 and held.next_due((300, 5)) == 400 and held.next_due((400, 3)) is None
    assert [held.next_offset(n) for n in (0, 3, 4, 5, 6)] == [3, 3, 5, 5, None]
    assert [held.count_from(n) for n in (0, 3, 4, 5, 6)] == [2, 2, 1, 1, 0]


def test_a_row_is_replaced(made: Made) -> None:
    put(made, Deferred(5, 300, 2), Deferred(5, 200, 3), Deferred(5, 200, 4))
    assert len(made.held) == 1
    assert made.held.due(FIRST, 1000, 10) == [Deferred(5, 200, 4)]
    assert list(made.held.items()) == [Deferred(5, 200, 4)]


def test_a_row_is_removed_once(made: Made) -> None:
    put(made, Deferred(5, 300, 2), Deferred(6, 300, 2))
    assert made.held.remove(5)
    assert not made.held.remove(5)
    made.step(random.Random(0))
    assert not made.held.remove(5)
    assert list(made.held.items()) == [Deferred(6, 300, 2)] and len(made.held) == 1
    assert made.held.due(FIRST, 1000, 10) == [Deferred(6, 300, 2)]
    put(made, Deferred(5, 100, 9))
    assert made.held.due(FIRST, 1000, 10) == [Deferred(5, 100, 9), Deferred(6, 300, 2)]


def test_a_cleared_set_is_empty_and_can_be_filled_again(made: Made) -> None:
    put(made, *(Deferred(n, 1000 - n, 1) for n in range(50)))
    made.held.clear()
    assert len(made.held) == 0 and list(made.held.items()) == [] and made.held.get(7) is None
    made.step(random.Random(0))
    assert made.held.next_due(FIRST) is None
    put(made, Deferred(7, 5, 5))
    assert list(made.held.items()) == [Deferred(7, 5, 5)] == made.held.due(FIRST, 5, 5)


def test_below_names_what_a_log_start_would_lose(made: Made) -> None:
    put(made, Deferred(1, 9, 1), Deferred(2, 9, 1, 500), Deferred(3, 9, 1), Deferred(8, 9, 1, 100), Deferred(9, 9, 1))
    assert [ref.offset for ref in made.held.below(3, 200)] == [1, 8]
    assert [ref.offset for ref in made.held.below(4, 501)] == [1, 2, 3, 8]
    made.held.remove(2), made.held.remove(8)
    assert [ref.offset for ref in made.held.below(4, 501)] == [1, 3]


def test_extreme_values(made: Made) -> None:
    refs = [
        Deferred(0, -(1 << 63), 0),
        Deferred((1 << 63) - 1, (1 << 63) - 1, 65535, (1 << 63) - 1),
        Deferred(1, 0, 1, 1),
    ]
    put(made, *refs)
    assert list(made.held.items()) == sorted(refs)
    assert made.held.due(FIRST, (1 << 63) - 1, 10) == sorted(refs, key=lambda ref: ref.due_ns)


def test_a_snapshot_stays_as_it_was(made: Made) -> None:
    put(made, *(Deferred(n, n * 7 % 50, 1) for n in range(50)))
    made.held.remove(10)
    before = list(made.held.items())
    snapshot = made.held.snapshot()
    put(made, Deferred(3, 1, 99), Deferred(60, 1, 1))
    made.held.remove(20)
    made.step(random.Random(0))
    made.held.clear()
    put(made, Deferred(1, 1, 1))
    assert list(snapshot.items()) == before and len(snapshot) == 49
    assert snapshot.get(3) == Deferred(3, 21, 1)
    assert list(snapshot.snapshot().items()) == before


@pytest.mark.parametrize("seed", range(6))
def test_any_history_is_as_a_dictionary_says(made: Made, seed: int) -> None:
    rng = random.Random(seed)
    span = rng.choice([20, 300])
    model: dict[int, Deferred] = {}
    held = made.held
    snapshots: list[tuple[DeferredSet, list[Deferred]]] = []
    for n in range(400):
        offset = rng.randrange(span)
        match rng.choices(["put", "remove", "clear", "snapshot", "ask"], [50, 25, 0.5, 2, 30])[0]:
            case "put":
                ref = Deferred(offset, rng.randrange(100), rng.randrange(9), rng.choice([0, 0, rng.randrange(1, 999)]))
                held.put(ref)
                model[offset] = ref
            case "remove":
                assert held.remove(offset) == (model.pop(offset, None) is not None)
            case "clear":
                held.clear()
                model.clear()
            case "snapshot":
                snapshots = [*snapshots[-2:], (held.snapshot(), sorted(model.values()))]
            case "ask":
                check(held, model, rng, span)
        made.step(rng)
        assert len(held) == len(model), n
        if isinstance(held, DeferredStore):
            assert held.carried == sum(ref.position != 0 for ref in model.values()), n
    check(held, model, rng, span)
    for snapshot, rows in snapshots:
        assert list(snapshot.items()) == rows
        check(snapshot, {ref.offset: ref for ref in rows}, rng, span)


def check(held: DeferredSet, model: dict[int, Deferred], rng: random.Random, span: int) -> None:
    rows = sorted(model.values())
    offset, position, limit = rng.randrange(span), rng.randrange(1000), rng.randrange(1, 30)
    assert held.get(offset) == model.get(offset)
    assert list(held.items(offset)) == [ref for ref in rows if ref.offset >= offset]
    assert held.next_offset(offset) == next((ref.offset for ref in rows if ref.offset >= offset), None)
    assert held.count_from(offset) == sum(ref.offset >= offset for ref in rows)
    by_due = sorted(rows, key=lambda ref: (ref.due_ns, ref.offset))
    after, until = (rng.randrange(-1, 100), rng.randrange(-1, span)), rng.randrange(110)
    behind = [ref for ref in by_due if (ref.due_ns, ref.offset) > after]
    assert held.due(after, until, limit) == [ref for ref in behind if ref.due_ns <= until][:limit]
    assert held.next_due(after) == (behind[0].due_ns if behind else None)
    assert held.count_due_from(until) == sum(ref.due_ns >= until for ref in rows)
    lost = [ref for ref in rows if (ref.position < position if ref.position else ref.offset < offset)]
    assert list(held.below(offset, position)) == lost
    assert next(iter(held.below(offset, position)), None) == next(iter(lost), None)
