"""What is deferred is counted some rows at a time, and right whatever happens to the set between two steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from nsqha.cursor.committed.state import Undo
from nsqha.cursor.deferred import store
from nsqha.cursor.deferred.dead import DEAD_FROM
from nsqha.cursor.deferred.deferred_set import Deferred
from nsqha.cursor.deferred.overlay import DeferredOverlay, overdue
from nsqha.cursor.deferred.store import DeferredStore
from nsqha.cursor.events import TARGET_END
from nsqha.cursor.live import counts
from nsqha.cursor.live.cursor import ChannelCursor
from nsqha.cursor.requests import Planning
from nsqha.cursor.seek import SeekPlan
from tests.unit.cursor.counted_table import ENOUGH, ROWS, CountedTable, Owner, store_of
from tests.unit.cursor.tiny import Leader

MANY = 50 * ROWS


def steps(held: DeferredStore, table: CountedTable, offset: int) -> Iterator[int]:
    """Rows that each step reads."""
    ready = False
    while not ready:
        ready = held.counted_from(offset) is not None
        yield table.take_read()


@pytest.mark.parametrize(("place", "fewer"), [(MANY // 2, MANY // 2), (9 * MANY // 10, MANY // 10), (MANY // 10,) * 2])
def test_a_count_reads_few_rows_in_each_step_and_begins_at_the_near_end(place: int, fewer: int) -> None:
    held, table = store_of([Deferred(10**9 + n, 5, 1) for n in range(MANY)])
    read = [*steps(held, table, 10**9 + place)]
    assert max(read) <= ENOUGH
    assert sum(read) <= 1.1 * fewer
    assert held.count_from(10**9 + place) == MANY - place
    assert table.take_read() <= 10, "it was prepared"
    assert held.count_from(10**9 + place + 7) == MANY - place - 7
    assert table.take_read() <= 30, "it is nearby"


def test_a_count_under_way_is_not_begun_again_when_the_reader_moves() -> None:
    held, table = store_of([Deferred(n, 5, 1) for n in range(MANY)])
    place, read = MANY // 2, 0
    while held.counted_from(place) is None:
        place += 10
        read += table.take_read()
        assert read <= MANY
    assert held.count_from(place) == MANY - place


def test_changes_in_memory_are_counted_a_few_at_a_time() -> None:
    held, table = store_of([Deferred(n, 5, 1) for n in range(0, 2 * MANY, 2)])
    for n in range(0, 2 * MANY, 20):
        held.remove(n)
        held.put(Deferred(n + 1, 5, 1))
    layer = held.freeze()
    for n in range(0, 2 * MANY, 40):
        held.put(Deferred(n, 5, 1))
        held.remove(n + 1)
    assert layer is not None
    table.take_read()
    assert max(steps(held, table, MANY)) <= ENOUGH
    assert held.count_from(MANY) == sum(ref.offset >= MANY for ref in held.items())


@pytest.mark.parametrize("seed", range(150))
def test_a_count_in_steps_is_right_whatever_happens_in_between(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "COUNT_ROWS", 4)
    rng = random.Random(seed)
    span = rng.choice([30, 200])
    model = {o: Deferred(o, rng.randrange(40), 1) for o in sorted(rng.sample(range(span), span // 2))}
    owner, table = Owner(model), CountedTable([*model.values()])
    held = DeferredStore(owner, table, count=len(model), bounds=(min(model), max(model)))
    place, due, layer, counted = span // 2, 20, None, 0
    for n in range(600):
        offset = rng.randrange(span)
        match rng.choices(
            ["put", "remove", "freeze", "thaw", "move", "seek", "lost", "clear"], [30, 25, 5, 5, 15, 1, 0.1, 0.1]
        )[0]:
            case "put":
                model[offset] = Deferred(offset, rng.randrange(40), 1)
                held.put(model[offset])
            case "remove":
                assert held.remove(offset) == (model.pop(offset, None) is not None)
            case "freeze" if held.table is table and not table.lost and layer is None:
                layer = held.freeze()
            case "thaw" if held.table is table and not table.lost and layer is not None:
                owner.at_rest.update({o: ref for o, ref in layer.rows.items() if ref is not None})
                for gone in [o for o, ref in layer.rows.items() if ref is None]:
                    owner.at_rest.pop(gone, None)
                table = held.table = CountedTable([*owner.at_rest.values()])
                held.thaw(layer, len(owner.at_rest))
                layer = None
            case "move":
                place = min(place + rng.randrange(4), span)
            case "seek":
                place, due = rng.randrange(span), rng.randrange(40)
            case "lost":
                table.lost = True  # who reads next has all in memory
            case "clear":
                held.clear()
                model, owner.at_rest, layer = {}, {}, None
                table = CountedTable([])
        if rng.random() < 0.5 and (count := held.counted_from(place)) is not None:
            counted += 1
            assert count == sum(o >= place for o in model), n
        if rng.random() < 0.5 and (count := held.counted_due_from(due)) is not None:
            assert count == sum(ref.due_ns >= due for ref in model.values()), n
    assert counted > 10
    assert held.count_from(place) == sum(o >= place for o in model)


def dead_and_alive(count: int) -> list[Deferred]:
    return [Deferred(n, DEAD_FROM + n if n < count // 2 else n, 1) for n in range(count)]


def test_dead_letters_are_counted_in_steps_and_known_from_then_on() -> None:
    held, table = store_of(dead_and_alive(MANY))
    view, read = DeferredOverlay(held), []
    table.take_read()
    while not view.prepare_figures():
        read.append(table.take_read())
    assert len(read) > 10 and max(read) <= ENOUGH
    assert (view.dead, view.lowest_waiting()) == (MANY // 2, MANY // 2)
    held.remove(0)
    held.put(Deferred(MANY, DEAD_FROM, 1))
    held.put(Deferred(1, 7, 1))
    table.take_read()
    assert DeferredOverlay(held).dead == MANY // 2 - 1
    assert table.take_read() <= 10


def test_what_is_due_is_counted_in_steps_and_then_only_what_became_due_since() -> None:
    held, table = store_of([Deferred(n, n // 7, 1) for n in range(MANY)])
    view, read, half = DeferredOverlay(held), [], MANY // 14
    table.take_read()
    while not view.prepare_figures(half):
        read.append(table.take_read())
    assert len(read) > 10 and max(read) <= ENOUGH
    assert overdue(view, half) == 7 * half + 7
    for later in (half + 3, half + 9, half + 5):  # the clock may be set back
        table.take_read()
        assert overdue(view, later) == 7 * later + 7
        assert table.take_read() <= ENOUGH, "a page from each end"
        view.dead  # noqa: B018  # another time is asked for in between
    view.finish(0)
    view.put(Deferred(1, MANY, 2))
    view.put(Deferred(MANY - 1, half, 2))
    assert overdue(view, later) == 7 * later + 7 - 2 + 1, "what is not written yet counts"


def test_millions_that_become_due_at_once_are_known_at_once() -> None:
    held, table = store_of([Deferred(n, 10, 1) for n in range(MANY)])
    view = DeferredOverlay(held)
    assert [overdue(view, 9), overdue(view, 10)] == [0, MANY]
    assert table.take_read() <= 4 * ENOUGH


def leader_with_many_deferred() -> tuple[Leader, ChannelCursor, CountedTable]:
    """Its reader was moved into the middle of them; the last ten are unread."""
    leader = Leader()
    channel = leader.create("c")
    leader.publish(40 * ROWS + 10)
    held, table = store_of([Deferred(n, 1 << 61, 1) for n in range(20 * ROWS, 40 * ROWS)])
    channel.committed.deferred = held
    channel.committed.floor = 30 * ROWS
    channel.cursor.reload()
    table.take_read()
    return leader, channel.cursor, table


def test_no_figure_of_a_channel_reads_many_rows_once_it_is_prepared() -> None:
    leader, cursor, table = leader_with_many_deferred()
    end, read = leader.cursors.state.pump, []
    while not (counts.prepare(cursor, leader.now.wall_ns)):
        read.append(table.take_read())
    assert len(read) >= 9 and max(read) <= ENOUGH
    table.take_read()
    assert (cursor.depth(end), cursor.deferred_count) == (10, 20 * ROWS)
    assert cursor.oldest_unfinished(end) == 20 * ROWS
    assert table.take_read() <= ENOUGH


def test_a_depth_is_kept_after_a_few_looks_none_of_which_counts_much() -> None:
    leader, cursor, table = leader_with_many_deferred()
    leader.ask(max_depth=1000 * ROWS)
    assert not cursor.passing.counting, "there is no message too many, whatever is deferred"
    leader.ask(max_depth=3)
    looks = 0
    while cursor.passing.counting:
        assert cursor.passing.dropped == 0
        assert table.take_read() <= 10 * ENOUGH
        assert leader.cursors.passing.expire(leader.now.wall_ns, lambda time_ns: 0), "no batch comes"
        looks += 1
    assert looks > 2
    leader.cursors.passing.look()
    assert cursor.depth(leader.cursors.state.pump) == 10 - cursor.passing.dropped


def test_without_a_depth_to_keep_nothing_is_counted_on() -> None:
    leader, cursor, _ = leader_with_many_deferred()
    leader.ask(max_depth=3)
    assert cursor.passing.counting
    leader.ask(skip=True)
    assert not cursor.passing.counting


def in_small_steps(planning: Planning, table: CountedTable) -> tuple[SeekPlan, int]:
    """The plan, and how many steps it took."""
    steps = 0
    while True:
        try:
            next(planning)
        except StopIteration as end:
            assert table.take_read() <= ENOUGH
            return end.value, steps
        steps += 1
        assert table.take_read() <= ENOUGH


def test_the_plan_of_a_seek_reads_few_rows_in_each_step() -> None:
    leader, cursor, table = leader_with_many_deferred()
    planning = leader.cursors.requests.planning_seek("c", 25 * ROWS + 7)
    for gone in (21 * ROWS, 29 * ROWS):  # before the target, and behind it
        next(planning)
        cursor.committed.deferred.remove(gone)
    table.take_read()
    plan, steps = in_small_steps(planning, table)
    assert steps >= 3
    assert (plan.again, plan.skipped, plan.deferred) == (1, 0, 20 * ROWS - 2)
    plan, _ = in_small_steps(leader.cursors.requests.planning_seek("c", 5 * ROWS), table)
    assert (plan.again, plan.skipped) == (15 * ROWS + 2, 0)
    plan, _ = in_small_steps(leader.cursors.requests.planning_seek("c", TARGET_END), table)
    assert (plan.again, plan.skipped) == (0, 10)


def test_the_plan_of_an_undo_reads_few_rows_in_each_step() -> None:
    leader, cursor, table = leader_with_many_deferred()
    cursor.committed.undo = Undo(5 * ROWS, ((6 * ROWS, 7 * ROWS), (21 * ROWS, 35 * ROWS)))
    plan, steps = in_small_steps(leader.cursors.requests.planning_undo("c"), table)
    assert steps >= 14
    assert (plan.target, plan.again, plan.skipped, plan.deferred) == (5 * ROWS, 14 * ROWS, 0, 20 * ROWS)
