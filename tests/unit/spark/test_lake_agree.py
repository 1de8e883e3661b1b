"""Agreement on objects: whatever the order of steps, and whoever stops, all who finish have one content."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from pyspark_nsqha.lake import agree as module
from pyspark_nsqha.lake.agree import FINAL, Step, agree

Objects = dict[str, bytes]


class Disagreed(AssertionError):
    """`final` was given another content, or somebody finished with one that is not in it."""


def carry_out(step: Step, objects: Objects) -> Any:
    """One step; objects that are there are never given another content."""
    if step.kind == "list":
        return sorted(set(objects) - {FINAL})
    if step.kind == "read":
        return objects.get(step.name)
    if step.kind == "write":
        if objects.setdefault(step.name, step.data) != step.data:
            raise Disagreed(step)
    elif step.kind == "remove":
        objects.pop(step.name, None)
    return None


class Voter:
    """A generator that can be put back to where it was: its answers are given to it again."""

    def __init__(self, name: str, answers: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.answers = answers
        self.next: Step | None = None
        self.result: bytes | None = None
        self.running: Generator[Step, Any, bytes] = agree(name.encode(), name)
        try:
            self.next = next(self.running)
            for answer in answers:
                self.next = self.running.send(answer)
        except StopIteration as end:
            self.next, self.result = None, end.value

    def after(self, answer: Any) -> Voter:
        return Voter(self.name, (*self.answers, tuple(answer) if isinstance(answer, list) else answer))


def explore(names: str, *, pauses_max: int, states_max: int = 1 << 30) -> int:
    """Every order of the steps of these voters, each with so many ballots; how many states there are.

    A voter that stops for good is an order in which it never goes on, so crashes are among them."""
    stack: list[tuple[Objects, tuple[Voter, ...]]] = [({}, tuple(map(Voter, names)))]
    known: set[Any] = set()
    while stack:
        objects, voters = stack.pop()
        for index, voter in enumerate(voters):
            step = voter.next
            if step is None or (step.kind == "pause" and voter.answers.count("paused") >= pauses_max):
                continue
            after = dict(objects)
            answer = "paused" if step.kind == "pause" else carry_out(step, after)
            moved = voter.after(answer)
            if moved.result is not None and after.get(FINAL) != moved.result:
                raise Disagreed(f"{moved.name} finished with {moved.result!r}, final is {after.get(FINAL)!r}")
            state = (*voters[:index], moved, *voters[index + 1 :])
            key = (tuple(sorted(after.items())), tuple(one.answers for one in state))
            if key not in known and len(known) < states_max:
                known.add(key)
                stack.append((after, state))
    return len(known)


def test_two_agree_in_every_order() -> None:
    assert explore("ab", pauses_max=1) > 1000


def test_three_agree_in_many_orders_of_their_first_ballots() -> None:
    """All of them are 800,000 states, half a minute."""
    assert explore("abc", pauses_max=0, states_max=60_000) > 10_000


def walk(rng: random.Random, names: str) -> bytes:
    """One order by lot, with voters that stop for good; what was agreed on."""
    objects: Objects = {}
    waiting = {name: Voter(name) for name in names}
    while waiting:
        name = rng.choice(sorted(waiting))
        voter = waiting[name]
        assert voter.next is not None
        if rng.random() < 0.01 and len(waiting) > 1:
            del waiting[name]
            continue
        # One that was overtaken lets the others go on for a while.
        if voter.next.kind == "pause" and rng.random() < 0.7:
            continue
        answer = carry_out(voter.next, objects)
        moved = voter.after(answer)
        if moved.next is None:
            assert objects[FINAL] == moved.result
            del waiting[name]
        else:
            waiting[name] = moved
    return objects.get(FINAL, b"")


def test_many_agree_whoever_stops() -> None:
    rng = random.Random(5)
    seen = [walk(rng, "abcde"[: rng.randrange(2, 6)]) for _ in range(400)]
    assert len({*seen} - {b""}) > 2


def test_what_a_dead_voter_had_proposed_is_completed() -> None:
    objects: Objects = {}
    dead = Voter("a")
    while not (dead.next and dead.next.kind == "write" and dead.next.name == FINAL):
        assert dead.next is not None
        dead = dead.after(carry_out(dead.next, objects))
    other = Voter("b")
    while other.next:
        other = other.after(carry_out(other.next, objects))
    assert other.result == b"a" == objects[FINAL]


@pytest.mark.parametrize("broken", ["votes are not looked at", "accepted contents are not taken over"])
def test_the_search_finds_a_protocol_that_is_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "votes are not looked at":
        monkeypatch.setattr(module, "_overtaken", lambda *_: False)
    else:
        real = module.votes
        monkeypatch.setattr(module, "votes", lambda names: [v for v in real(names) if not v.accepted])
    with pytest.raises(Disagreed):
        explore("ab", pauses_max=1)
