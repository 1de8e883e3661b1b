"""The controller takes the records of changes that `nsqha cluster` made in the store, each once; then they are gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lookupd import recorded
from lookupd.recorded import RecordedChanges
from nsqha.election.memory import MemoryStore
from nsqha.election.recorded import CHARACTERS_MAX, RecordedChange, recorded_name
from nsqha.errors import Conflict, OutcomeUnknown, Unavailable
from nsqha.server.authorization.audit import AdminAction, Audit
from nsqha.server.runtime.tasks import TaskGroup
from tests.unit.lookupd.nodes_rig import World, controlled

CHANGE = RecordedChange("ada (etcd user root)", "host-1", "cluster move", "topic=t partition=0", False, "done", 0.25)
NAME = recorded_name(7)


class Heard(Audit):
    def __init__(self) -> None:
        super().__init__()
        self.actions: list[AdminAction] = []

    def record(self, action: AdminAction) -> None:
        self.actions.append(action)


class Daemon:
    """What a lookup daemon has of it, beside a store in which a controller has epoch 1."""

    def __init__(self) -> None:
        self.store = MemoryStore(random.Random(1))
        self.audit = Heard()
        self.intents: Any = self.store.intents
        self.remove = self.intents.remove
        self.intents.remove = lambda name, version, controller: self.remove(name, version)
        self.known: set[str] = set()
        self.under_way = 0
        self.tasks = TaskGroup()
        self.changes = RecordedChanges(self.intents, self._run, self.audit)

    async def _run(self, call: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return call()

    async def look(self) -> None:
        """Returns when all that was begun is over, but for what waits for a command that is under way."""
        self.changes.heed(self.intents.all(), 1, self.tasks, self.known)
        await self.until(lambda: len(self.known) == self.under_way)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():
                await asyncio.sleep(0.001)

    @property
    def outcomes(self) -> list[str]:
        return [action.outcome for action in self.audit.actions]


def run(story: Callable[[Daemon], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(Daemon())

    asyncio.run(main())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "AGAIN_S", 0.001)


def test_a_finished_change_is_recorded_once_and_removed() -> None:
    async def story(daemon: Daemon) -> None:
        daemon.intents.put(NAME, CHANGE.intent())
        daemon.intents.put("settings/balance", {"paused": True})
        await daemon.look()
        await daemon.look()
        (action,) = daemon.audit.actions
        fields = action.fields()
        assert fields == {
            "who": "ada (etcd user root)", "role": "etcd", "from": "host-1", "surface": "etcd",
            "method": "cluster move", "target": "topic=t partition=0", "plan": False, "outcome": "done", "took": 0.25,
        }  # fmt: skip
        assert list(daemon.intents.all()) == ["settings/balance"] and not daemon.known

    run(story)


def test_what_was_read_before_the_removal_makes_no_second_record() -> None:
    async def story(daemon: Daemon) -> None:
        daemon.intents.put(NAME, CHANGE.intent())
        before = daemon.intents.all()
        await daemon.look()
        daemon.changes.heed(before, 1, daemon.tasks, daemon.known)
        await daemon.look()
        assert daemon.outcomes == ["done"] and not daemon.known

    run(story)


def test_only_the_latest_of_what_was_recorded_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "TAKEN_MAX", 5)

    async def story(daemon: Daemon) -> None:
        before: dict[str, Any] = {}
        for number in range(8):
            daemon.intents.put(recorded_name(number), CHANGE.intent())
            before |= daemon.intents.all()
            await daemon.look()
        daemon.changes.heed(dict(list(before.items())[-5:]), 1, daemon.tasks, daemon.known)
        await daemon.look()
        assert len(daemon.outcomes) == 8
        daemon.changes.heed(before, 1, daemon.tasks, daemon.known)
        await daemon.look()
        assert len(daemon.outcomes) > 8

    run(story)


def test_a_change_under_way_waits_for_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(daemon: Daemon) -> None:
        waited_long_enough = asyncio.Event()

        async def sleep(seconds: float) -> None:
            await (waited_long_enough.wait() if seconds == recorded.UNFINISHED_S else asyncio.sleep(seconds))

        monkeypatch.setattr(recorded, "asyncio", SimpleNamespace(sleep=sleep))
        begun = daemon.intents.put(NAME, {**CHANGE.intent(), "outcome": ""})
        daemon.under_way = 1
        await daemon.look()
        assert daemon.outcomes == []
        daemon.intents.put(NAME, CHANGE.intent(), expected_version=begun.version)
        await daemon.look()
        assert daemon.outcomes == ["done"]
        waited_long_enough.set()
        await daemon.until(lambda: not daemon.known)
        assert daemon.outcomes == ["done"], "the one that waited for a dead command finds it gone"

    run(story)


def test_a_command_that_died_is_recorded_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "UNFINISHED_S", 0.001)

    async def story(daemon: Daemon) -> None:
        daemon.intents.put(NAME, {**CHANGE.intent(), "outcome": ""})
        await daemon.look()
        assert daemon.outcomes == ["unknown: INTERRUPTED"] and not daemon.intents.all()

    run(story)


@pytest.mark.parametrize("done", [True, False])
def test_a_store_that_does_not_answer_makes_no_second_record(done: bool) -> None:
    async def story(daemon: Daemon) -> None:
        daemon.intents.put(NAME, CHANGE.intent())
        remove, failed = daemon.remove, []

        def unsure(name: str, version: int) -> None:
            if len(failed) < 3:
                if done and not failed:
                    remove(name, version)
                failed.append(name)
                raise OutcomeUnknown("x") if len(failed) == 1 else Unavailable("x")
            remove(name, version)

        daemon.remove = unsure
        for _ in range(5):
            await daemon.look()
        assert daemon.outcomes == ["done"] and not daemon.intents.all() and not daemon.known

    run(story)


def test_what_another_controller_removed_is_left_alone() -> None:
    async def story(daemon: Daemon) -> None:
        daemon.intents.put(NAME, CHANGE.intent())

        def refused(name: str, version: int) -> None:
            raise Conflict("another controller")

        daemon.remove = refused
        await daemon.look()
        assert daemon.outcomes == ["done"] and not daemon.known

    run(story)


@pytest.mark.parametrize(
    "intent",
    [
        {},
        {"who": 7, "outcome": ["x"], "took": "long"},
        {"outcome": "x" * 10**6, "took": 10**400},
        {"outcome": "done", "took": float("nan"), "plan": "?"},
    ],
)
def test_anything_may_be_in_the_store(intent: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "UNFINISHED_S", 0.001)

    async def story(daemon: Daemon) -> None:
        daemon.intents.put(NAME, intent)
        await daemon.look()
        assert len(daemon.outcomes) == 1 and len(daemon.outcomes[0]) <= CHARACTERS_MAX

    run(story)


def test_the_controller_takes_them_when_it_begins_and_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with controlled(1) as (world, shell):
            audit = Heard()
            monkeypatch.setattr(shell.recorded, "_audit", audit)
            await _both(world, audit)

    async def _both(world: World, audit: Heard) -> None:
        for number in (1, 2):
            world.store.intents.put(recorded_name(number), CHANGE.intent())
            await world.until(lambda n=number: len(audit.actions) == n and not world.store.intents.all())

    asyncio.run(main())
