"""A publisher keeps the order of its publishes through refusals, changes of leader and lost connections."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.errors import NotFound
from nsqha.server.routing.publisher import NEWS_SECONDS, RETRY_SECONDS, PartitionPublisher, Publish
from nsqha.server.runtime.budget import PublishBudget
from tests.fakes.loop import VirtualLoop
from tests.unit.server.shell_rig import Outcome

WAIT = 5.0
EARLIER = "not stored: an earlier publish of this connection failed"


class HeldTarget:
    """A target: holds what it was given until told what comes of it."""

    counts = False

    def __init__(self, log: list[int]) -> None:
        self.log = log
        self.gone = False
        self.held: list[Publish] = []

    def take(self, publish: Publish) -> None:
        if self.gone:
            publish.refused("no leader")
        else:
            self.held.append(publish)

    def store(self) -> None:
        """The first one."""
        publish = self.held.pop(0)
        self.log.append(int(publish.frames))
        publish.stored()


class World:
    """One publisher, one log, one leader at a time; a Router."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.budget = PublishBudget(self.loop, 1 << 20)  # type: ignore[arg-type]
        self.log: list[int] = []
        self.leader: HeldTarget | None = HeldTarget(self.log)
        self.old: list[HeldTarget] = []
        self.deleted = False
        self.asking = False
        self.outcomes: list[Outcome] = []
        self.publisher = PartitionPublisher("t", 0, self, loop=self.loop, budget=self.budget, wait_seconds=WAIT)  # type: ignore[arg-type]

    def target(self, topic: str, number: int) -> Any:
        if self.deleted:
            raise NotFound("topic t was deleted")
        return self.leader

    def publish(self) -> Outcome:
        outcome = Outcome()
        self.outcomes.append(outcome)
        self.publisher.publish(b"%d" % len(self.outcomes), outcome)
        self.loop.turn()
        return outcome

    def change_leader(self, *, there: bool = True, tell: bool = True) -> None:
        if self.leader is not None:
            self.old.append(self.leader)
        self.leader = HeldTarget(self.log) if there else None
        if tell:
            self.publisher.leaders_changed()

    @property
    def answers(self) -> list[list[str]]:
        return [outcome.answers for outcome in self.outcomes]


def test_what_was_refused_goes_to_the_next_leader_in_order():
    world = World()
    for _ in range(3):
        world.publish()
    first = world.leader
    assert first is not None
    world.change_leader()
    for publish in reversed(first.held):
        publish.refused("not the leader")
    world.publish()
    assert world.leader is not None
    world.loop.pass_time(1)
    assert [publish.frames for publish in world.leader.held] == [b"1", b"2", b"3", b"4"]
    while world.leader.held:
        world.leader.store()
    assert world.log == [1, 2, 3, 4]
    assert world.answers == [["OK"]] * 4
    assert world.budget.used == 0


def test_nothing_goes_to_a_new_leader_while_the_old_one_has_something():
    world = World()
    world.publish()
    first = world.leader
    assert first is not None
    world.change_leader()
    world.publish()
    world.loop.pass_time(1)
    assert world.leader is not None
    assert world.leader.held == []
    first.store()
    assert [publish.frames for publish in world.leader.held] == [b"2"]


def test_a_refused_publish_fails_when_a_later_one_was_stored():
    """Sent again it would come behind the later one."""
    world = World()
    world.publish()
    world.publish()
    leader = world.leader
    assert leader is not None
    refused = leader.held.pop(0)
    refused.refused("disk full")
    world.publish()
    assert world.answers == [[], [], []]
    leader.store()
    assert world.answers == [["not stored: disk full"], ["OK"], ["not stored: disk full"]]
    world.loop.pass_time(10)
    assert world.log == [2]
    assert world.budget.used == 0


def test_after_an_unknown_outcome_nothing_more_is_stored():
    world = World()
    world.publish()
    leader = world.leader
    assert leader is not None
    world.change_leader(there=False)
    world.publish()
    leader.held.pop().failed("outcome unknown: lost")
    assert world.answers == [["outcome unknown: lost"], [EARLIER]]
    assert world.publish().answers == [EARLIER]


def test_a_leader_is_waited_for_and_not_for_ever():
    world = World()
    world.change_leader(there=False)
    world.publish()
    world.publish()
    assert world.budget.used == 2
    world.loop.pass_time(WAIT - 0.5)
    assert world.answers == [[], []]
    world.loop.pass_time(1)
    assert all("waited 5 s for a leader" in answer for (answer,) in world.answers)
    assert world.budget.used == 0


def test_a_new_leader_is_used_as_soon_as_it_is_known():
    world = World()
    world.change_leader(there=False)
    world.publish()
    world.change_leader()
    assert world.leader is not None
    assert len(world.leader.held) == 1
    assert world.loop.armed == []


def test_a_stale_view_is_asked_again_without_a_storm():
    world = World()
    leader = world.leader
    assert leader is not None
    asked = 0
    world.publish()
    for _ in range(100):
        if leader.held:
            asked += 1
            held, leader.held = leader.held, []
            for publish in held:
                publish.refused("not the leader")
        world.publish()
        world.loop.pass_time(0.01)
    assert 5 < asked < 15


def test_a_leader_that_can_not_be_dialled_is_asked_rarely_its_successor_at_once():
    world = World()
    world.publish()
    leader = world.leader
    assert leader is not None
    leader.held.pop().refused("no connection", unreachable=True)
    world.loop.pass_time(NEWS_SECONDS - 0.01)
    assert not leader.held, "thousands may wait for it"
    world.loop.pass_time(0.02)
    assert len(leader.held) == 1
    leader.held.pop().refused("no connection", unreachable=True)
    world.change_leader()
    successor = world.leader
    assert successor is not None and len(successor.held) == 1, "it is news"
    successor.held.pop().refused("no connection", unreachable=True)
    world.asking = True  # what others say is no news
    world.change_leader(there=False)
    world.change_leader(tell=False)
    world.loop.pass_time(2 * RETRY_SECONDS)
    assert world.leader is not None and len(world.leader.held) == 1, "what was true of one is not of the next"


def test_while_no_node_leads_the_next_leader_is_news():
    world = World()
    world.change_leader(there=False)
    world.publish()
    world.change_leader(tell=False)
    world.loop.pass_time(NEWS_SECONDS - 0.01)
    assert world.leader is not None and not world.leader.held, "thousands may wait for it"
    world.loop.pass_time(0.02)
    assert len(world.leader.held) == 1, "news may be lost"


def test_publishes_to_a_deleted_topic_fail_at_once():
    world = World()
    leader = world.leader
    assert leader is not None
    world.publish()
    world.deleted = True
    leader.held.pop().refused("not the leader")
    world.loop.pass_time(0.1)
    assert world.answers == [["not stored: topic t was deleted"]]


ACTIONS = (
    *("publish", "publish", "publish", "store", "store", "old stores", "refuse first", "refuse last", "refuse all"),
    *("lose", "lose stored", "change", "change untold", "none", "fail", "time", "long time"),
)
STEPS = st.tuples(st.integers(0, 80), st.integers(0, 2**32)).map(
    lambda drawn: random.Random(drawn[1]).choices(ACTIONS, k=drawn[0])
)


def step(world: World, what: str) -> None:
    leaders = [*world.old, *([world.leader] if world.leader is not None else [])]
    holding = [leader for leader in leaders if leader.held]
    match what:
        case "publish":
            world.publish()
        case "change":
            world.change_leader()
        case "change untold":
            world.change_leader(tell=False)
        case "none":
            world.change_leader(there=False)
        case "time":
            world.loop.pass_time(0.05)
        case "long time":
            world.loop.pass_time(3)
    if not holding:
        return
    match what:
        case "store":
            holding[-1].store()
        case "old stores":
            holding[0].store()
        case "refuse first":
            holding[0].held.pop(0).refused("r")
        case "refuse last":
            holding[0].held.pop().refused("r")
        case "refuse all":
            held, holding[0].held = holding[0].held, []
            for publish in held:
                publish.refused("r")
        case "fail":
            holding[0].held.pop().failed("not stored: expired")
        case "lose":
            held, holding[0].held = holding[0].held, []
            for publish in held:
                publish.failed("outcome unknown: lost")
        case "lose stored":
            held, holding[0].held = holding[0].held, []
            world.log.extend(int(publish.frames) for publish in held)
            for publish in held:
                publish.failed("outcome unknown: lost")


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_whatever_happens_the_order_is_kept_and_answers_are_true(steps: list[str]):
    world = World()
    for what in steps:
        step(world, what)
        world.loop.turn()
        assert world.log == sorted(set(world.log))
    for leader in [*world.old, world.leader or HeldTarget(world.log)]:
        while leader.held:
            leader.store()
    world.change_leader()
    for _ in range(10):
        world.loop.pass_time(1)
        assert world.leader is not None
        while world.leader.held:
            world.leader.store()
    assert world.log == sorted(set(world.log))
    assert world.budget.used == 0
    for number, answers in enumerate(world.answers, 1):
        assert len(answers) == 1, f"publish {number} was answered {answers}"
        if answers[0] == "OK":
            assert number in world.log
        if answers[0].startswith("not stored"):
            assert number not in world.log
