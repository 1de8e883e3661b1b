"""What may be dead: what failed at each delivery; also what nobody answered, if something was broken then."""

from __future__ import annotations

import pytest

from tests.jepsen.checkers.duplicates import COMMIT_SECONDS
from tests.jepsen.history import ChannelMade, Died, Letter, Message, Refused
from tests.jepsen.load.dead_letters import MAX_ATTEMPTS, FailingMessages, fails
from tests.jepsen.story import Story, again, changed


def begun() -> tuple[Story, Message]:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 1, 0, "t", "ch", "ok"))
    story.sample()
    story.sub(1)
    (message,) = story.pub(partition=0)
    return story, changed(message, id=f"{0:016x}")


def dies(story: Story, message: Message, reason: str, lived: float = 9.0) -> Story:
    """It is in the list, is raised, and is finished."""
    story.add(Died(story.t, "t", "ch", [Letter(message.id, reason, lived)]))
    story.admin("requeue")
    story.take(1, message)
    return story


def test_what_is_answered_by_req_each_time_may_die() -> None:
    story, message = begun()
    for attempt in range(1, 4):
        story.recv(1, again(message, attempt))
        story.req(1, message, 0)
    report = dies(story, message, "requeued").judged()
    assert report.ok, str(report)
    assert [promise.kept for promise in report.promises if "dies" in promise.text] == [True]


@pytest.mark.parametrize("reason", ["requeued", "operator", "expired", "unspecified"])
def test_nothing_dies_of_a_req_that_nobody_sent_or_of_what_nobody_asked_for(reason: str) -> None:
    story, message = begun()
    story.fault("D7", 9.0)
    assert dies(story, message, reason).problems() == {"not failed": 1}


@pytest.mark.parametrize("reason", ["timed_out", "disconnected"])
@pytest.mark.parametrize("read", [True, False])
def test_what_waits_in_a_node_that_stands_still_may_die(
    reason: str, read: bool
) -> None:
    """Read late: all deliveries at once, and their FINs are refused, as it is dead by then."""
    story, message = begun()
    story.fault("D7", 9.0)
    if read:
        story.take(1, *(again(message, attempt) for attempt in range(1, 4)))
        for _ in range(3):
            story.add(Refused(story.t, 1, "FIN", message.id))
    assert dies(story, message, reason).problems() == {}


@pytest.mark.parametrize(("lived", "problems"), [(9.0, {"unbroken": 1}), (30.0, {})])
def test_where_nothing_is_broken_nobody_is_late(lived: float, problems: dict[str, int]) -> None:
    """The fault comes 20 s after the publish."""
    story, message = begun()
    story.pass_time(20.0)
    story.fault("D7", 9.0)
    assert dies(story, message, "timed_out", lived).problems() == problems


def test_a_fault_of_long_ago_explains_nothing() -> None:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 1, 0, "t", "ch", "ok"))
    story.sub(1)
    story.fault("D7", 9.0)
    story.pass_time(60.0)
    (message,) = story.pub()
    assert dies(story, message, "timed_out").problems() == {"unbroken": 1}


@pytest.mark.parametrize(("refused", "problems"), [(False, {"finished": 1}), (True, {})])
def test_what_was_finished_for_certain_is_not_dead(refused: bool, problems: dict[str, int]) -> None:
    """Its leader read the FIN, and OK'd publishes until its progress was committed."""
    story, message = begun()
    story.take(1, message)
    if refused:
        story.add(Refused(story.t, 1, "FIN", message.id))
    story.take(1, *story.pub(conn=1, partition=0))
    story.pass_time(COMMIT_SECONDS["always"] + 0.1)
    story.take(1, *story.pub(partition=0))
    story.sample()
    story.fault("D7", 9.0)
    story.sample()
    assert dies(story, message, "timed_out").problems() == problems


# ---- what the clients of the load ask for


def key_that(failing: bool) -> tuple[int, int]:
    return next((3, n) for n in range(99) if fails((3, n)) == failing)


def of(key: tuple[int, int], attempts: int = MAX_ATTEMPTS) -> Message:
    return Message(*key, 0, f"{key[1]:016x}", attempts, 0)


@pytest.mark.parametrize("reason", ["timed_out", "disconnected", "requeued"])
def test_of_letters_that_nobody_answered_the_history_judges(reason: str) -> None:
    load = FailingMessages(lambda: "", "t")
    failed, other = of(key_that(failing=True)), of(key_that(failing=False))
    assert load.received([failed, other]) == {failed.id}
    letters = [Letter(failed.id, "requeued", 1.0), Letter(other.id, reason, 9.0)]
    told = load.judged(letters)
    assert told == ([] if reason != "requeued" else [f"1 are dead and did not fail: ['{other.id}']"])


def test_what_failed_and_is_not_dead_and_what_is_dead_twice_is_found() -> None:
    load = FailingMessages(lambda: "", "t")
    failed, other = of(key_that(failing=True)), of(key_that(failing=False))
    load.received([failed])
    letter = Letter(other.id, "timed_out", 9.0)
    assert load.judged([letter, letter]) == [
        f"1 failed and are not dead: ['{failed.id}']",
        f"1 are dead letters twice: ['{other.id}']",
    ]


def test_all_that_were_dead_have_to_come_again_at_attempt_1() -> None:
    load = FailingMessages(lambda: "", "t")
    failed, other = of(key_that(failing=True)), of(key_that(failing=False))
    load.received([failed])
    load.judged([Letter(failed.id, "requeued", 1.0), Letter(other.id, "timed_out", 9.0)])
    load.failing = False
    load.received([changed(failed, attempts=1)])
    before = load.all_raised
    assert "1 requeued dead letters never came" in " ".join(load.end())
    load.received([other])
    assert (before, load.all_raised) == (False, True)
    assert f"did not begin at attempt 1: ['{other.id}']" in " ".join(load.end())
