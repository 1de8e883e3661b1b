"""Some of many are looked at each second: each in its turn, and what was busy every time."""

from __future__ import annotations

from nsqha.cursor.turns import LOOKS, LookTurns


def test_few_are_all_looked_at() -> None:
    turns, few = LookTurns[int](), {key: str(key) for key in range(LOOKS)}
    for _ in range(3):
        assert turns.choose(few) == list(few.values())


def test_of_many_each_has_its_turn_and_what_is_busy_is_looked_at_each_time() -> None:
    turns, many = LookTurns[int](), {key: str(key) for key in range(4 * LOOKS)}
    turns.choose(many)
    turns.busy([3])
    seen = set()
    for _ in range(4):
        chosen = turns.choose(many)
        assert "3" in chosen and len(chosen) == len(set(chosen)) <= LOOKS + 1
        seen.update(chosen)
        turns.busy([3])
    assert seen == set(many.values())


def test_what_is_gone_is_passed_over_and_what_is_new_is_found() -> None:
    turns, things = LookTurns[int](), {key: str(key) for key in range(2 * LOOKS)}
    turns.choose(things)
    turns.busy([1, 2])
    things = {2: "2", 7 * LOOKS: "new"}
    assert turns.choose(things) == ["2"], "of those whose turn was to come none is there any more"
    turns.busy([])
    assert sorted(turns.choose(things)) == ["2", "new"]


def test_each_thing_is_looked_up_once() -> None:
    class Counted(dict[int, str]):
        looks = 0

        def get(self, key: int, default: object = None) -> object:  # type: ignore[override]
            self.looks += 1
            return super().get(key)

        def __getitem__(self, key: int) -> str:
            self.looks += 1
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            self.looks += 1
            return super().__contains__(key)

    turns, many = LookTurns[int](), Counted({key: str(key) for key in range(3 * LOOKS)})
    for seconds in (1, 2, 3):
        turns.choose(many)
        assert many.looks == seconds * LOOKS


def test_what_its_owner_was_told_of_is_looked_at_next_time() -> None:
    turns, many = LookTurns[int](2), {key: str(key) for key in range(9)}
    assert turns.choose(many) == ["0", "1"]
    turns.busy([])
    turns.add(7)
    turns.add(99)  # has gone
    assert turns.choose(many) == ["7", "2", "3"]
    turns.busy([])
    assert turns.choose(many) == ["4", "5"]
