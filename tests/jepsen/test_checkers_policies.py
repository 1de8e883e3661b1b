"""A channel may lack what its policy, or retention, explains; and nothing else."""

from __future__ import annotations

import json

import pytest

from tests.jepsen.checkers.judgement import judge
from tests.jepsen.history import (
    AdminEnded,
    AdminSent,
    ChannelMade,
    Drained,
    FaultBegun,
    Message,
    Settled,
    Settling,
    Stored,
)
from tests.jepsen.story import FIRST_NS, Story, changed


def told(story: Story, said: dict[str, object], *, channel: str = "ch") -> None:
    """An operator says it, and is answered."""
    asked(story, said, channel=channel)
    story.add(AdminEnded(story.t, story.ops, "ok"))


def asked(story: Story, said: dict[str, object], *, channel: str = "ch") -> None:
    story.pass_time(0.01)
    story.ops += 1
    story.add(AdminSent(story.t, story.ops, "policy", "t", channel, json.dumps(said)))


def begun(said: dict[str, object]) -> Story:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 1, 0, "t", "ch", "ok"))
    story.sub(1)
    if said:
        told(story, said)
    return story


@pytest.mark.parametrize(("seconds", "problems"), [(4, {}), (3, {"lost": 2})])
def test_what_is_older_than_the_ttl_may_be_missing_and_what_is_younger_not(
    seconds: float, problems: dict[str, int]
) -> None:
    story = begun({"ttl_ms": 4000})
    story.pub(2)
    story.pass_time(seconds)
    assert story.problems() == problems


@pytest.mark.parametrize(("seconds", "problems"), [(2, {}), (1, {"lost": 1})])
def test_a_wrong_clock_makes_messages_older_than_they_are(seconds: float, problems: dict[str, int]) -> None:
    story = begun({"ttl_ms": 12_000})
    story.add(FaultBegun(story.t, 99, "C1", "n1 is off"))
    story.pub()
    story.pass_time(seconds)
    assert story.problems() == problems


@pytest.mark.parametrize(("taken", "problems"), [(0, {"lost": 2}), (2, {})])
def test_beyond_the_depth_is_what_has_so_many_behind_it(taken: int, problems: dict[str, int]) -> None:
    story = begun({"max_depth": 2})
    story.add(ChannelMade(0.0, 0.0, 1, 0, "t", "all", "ok"))
    story.sub(2, "all")
    messages = [changed(message, id=f"{n:016x}") for n, message in enumerate(story.pub(4))]
    story.take(2, *messages)
    if taken:
        story.take(1, *messages[2:])
    assert story.problems() == problems


@pytest.mark.parametrize(("off", "late", "problems"), [(False, True, {}), (True, False, {}), (True, True, {"lost": 1})])
def test_what_was_published_while_skip_may_have_been_on_may_be_missing(
    off: bool, late: bool, problems: dict[str, int]
) -> None:
    """`off`: it was answered that it is off. `late`: something is published after that."""
    story = begun({})
    asked(story, {"skip": True})
    on = story.ops
    story.pub()
    story.add(AdminEnded(story.t, on, "info"))
    asked(story, {"skip": False})
    story.add(AdminEnded(story.t, story.ops, "info"))
    story.pub()
    if off:
        told(story, {"skip": False})
    if late:
        story.pub()
    assert story.problems() == problems


@pytest.mark.parametrize(("moved", "problems"), [(False, {"dropped": 1}), (True, {})])
def test_a_dead_letter_has_to_come_out_where_it_goes_to(moved: bool, problems: dict[str, int]) -> None:
    story = begun({"max_attempts": 1, "dead_letter": "topic:dead"})
    story.sub(2, topic="dead")
    (message,) = story.pub()
    story.recv(1, message)
    story.req(1, message, 0)
    if moved:
        story.take(2, changed(message, id="00000000000000aa", timestamp=message.timestamp + 5))
    assert story.problems("t", "dead") == problems


def test_a_dead_letter_has_the_same_body_and_is_of_a_channel_that_sends_it_there() -> None:
    story = begun({"max_attempts": 1, "dead_letter": "topic:dead"})
    story.sub(2, topic="dead")
    (message,) = story.pub()
    story.recv(1, message)
    story.take(2, changed(message, crc=1, id="00000000000000aa"))
    assert story.problems("t", "dead") == {"altered": 1}
    story = begun({"max_attempts": 1, "dead_letter": "topic:dead"})
    story.sub(2, topic="dead")
    story.sub(3, topic="u")
    (message,) = story.pub(topic="u")
    story.take(3, message)
    story.take(2, changed(message, id="00000000000000aa"))
    assert story.problems("t", "u", "dead") == {"unexpected": 1}


@pytest.mark.parametrize(("left", "problems"), [((2, 3), {}), ((1, 2, 3), {"kept back": 1})])
def test_an_abandoned_channel_lacks_what_is_in_no_file_any_more(
    left: tuple[int, ...], problems: dict[str, int]
) -> None:
    story = begun({"abandoned_after_ms": 1000})
    messages = [*story.pub(), *story.pub(), *story.pub(), *story.pub()]
    story.take(1, *messages[2:])
    story.add(Drained(story.t, "t"))
    for node in ("n1", "n2"):
        story.add(Stored(story.t, node, "t", 0, [messages[n] for n in left]))
    assert judge(story.events).problems == problems


def test_a_history_without_files_says_nothing_of_what_was_removed() -> None:
    story = begun({"abandoned_after_ms": 1000})
    story.pub(4)
    assert story.problems() == {}


# ---- judged for the moment at which the channel was done with it


def numbered(messages: list[Message], start: int = 0) -> list[Message]:
    """With ids that say their offsets."""
    return [changed(message, id=f"{n:016x}") for n, message in enumerate(messages, start)]


def done(story: Story, *rows: Settling, channel: str = "ch", abandoned: tuple[Settling, ...] = ()) -> None:
    for node in ("n1", "n2"):
        story.add(Settled(story.t, node, "t", 0, channel, [*rows], [*abandoned]))


def drained(story: Story, *topics: str) -> None:
    for topic in topics or ("t",):
        story.add(Drained(story.t, topic))


def ns(seconds: float) -> int:
    """So long after the messages of a story were published: their timestamps are all about the same."""
    return FIRST_NS + round(seconds * 1e9)


@pytest.mark.parametrize(
    ("after", "fault", "problems"),
    [
        (4.1, "", {}),
        (0.04, "", {"too early": 2}),
        (3.9, "", {"too early": 2}),
        (0.04, "C1", {}),
        (0.04, "N1", {"too early": 2}),
    ],
)
def test_what_expired_was_too_old_when_the_channel_passed_it_over(
    after: float, fault: str, problems: dict[str, int]
) -> None:
    """At the end of the run everything is old: a policy that drops all at once would be right."""
    story = begun({"ttl_ms": 4000})
    if fault:
        story.add(FaultBegun(story.t, 99, fault, "n1 is off"))
    messages = numbered(story.pub(2))
    story.pass_time(20)
    drained(story)
    story.add(Stored(story.t, "n1", "t", 0, messages))
    done(story, Settling(0, 2, ns(after), 2))
    assert judge(story.events).problems == problems


def test_a_policy_excuses_nothing_from_before_it_was_asked_for() -> None:
    story = begun({})
    messages = numbered(story.pub())
    story.pass_time(30)
    told(story, {"ttl_ms": 4000})
    story.pass_time(1)
    drained(story)
    story.add(Stored(story.t, "n1", "t", 0, messages))
    done(story, Settling(0, 1, ns(10), 1))
    assert judge(story.events).problems == {"too early": 1}


@pytest.mark.parametrize(("log_end", "problems"), [(3, {}), (2, {"too early": 1})])
def test_what_is_beyond_the_depth_had_so_many_behind_it_then(log_end: int, problems: dict[str, int]) -> None:
    story = begun({"max_depth": 2})
    story.add(ChannelMade(0.0, 0.0, 1, 0, "t", "all", "ok"))
    story.sub(2, "all")
    messages = numbered(story.pub(4))
    story.take(2, *messages)
    story.take(1, *messages[1:])
    drained(story)
    done(story, Settling(0, 1, ns(0.1), log_end), Settling(1, 4, ns(0.5), 4))
    assert judge(story.events).problems == problems


@pytest.mark.parametrize(("after", "problems"), [(5.5, {}), (4.0, {"too early": 1})])
def test_what_was_skipped_was_passed_over_while_skip_may_have_been_on(after: float, problems: dict[str, int]) -> None:
    story = begun({})
    messages = numbered(story.pub())
    story.pass_time(5)
    told(story, {"skip": True})
    story.pass_time(5)
    told(story, {"skip": False})
    drained(story)
    story.add(Stored(story.t, "n1", "t", 0, messages))
    done(story, Settling(0, 1, ns(after), 1))
    assert judge(story.events).problems == problems


@pytest.mark.parametrize(("attempts", "problems"), [(3, {}), (2, {"too early": 1}), (0, {"too early": 1})])
def test_what_was_moved_had_died_at_the_last_attempt(attempts: int, problems: dict[str, int]) -> None:
    """`attempts` 0: the log has the message as finished, and never as a dead letter."""
    story = begun({"max_attempts": 3, "dead_letter": "topic:dead"})
    story.sub(2, topic="dead")
    (message,) = numbered(story.pub())
    story.recv(1, changed(message, attempts=1))
    story.req(1, message, 0)
    story.take(2, changed(message, id="00000000000000aa", timestamp=message.timestamp + 5))
    drained(story, "t", "dead")
    done(story, Settling(0, 1, ns(1), 1, attempts))
    assert judge(story.events).problems == problems


def test_a_log_that_does_not_say_when_leaves_the_end_of_the_run() -> None:
    story = begun({"ttl_ms": 4000})
    messages = numbered(story.pub(2))
    story.pass_time(20)
    drained(story)
    story.add(Stored(story.t, "n1", "t", 0, messages))
    done(story, Settling(7, 9, ns(0.1), 9))
    assert judge(story.events).problems == {}


@pytest.mark.parametrize(("after", "problems"), [(1.0, {}), (0.5, {"too early": 1})])
def test_an_abandoned_channel_loses_nothing_before_its_time(after: float, problems: dict[str, int]) -> None:
    story = begun({"abandoned_after_ms": 1000})
    story.add(ChannelMade(0.0, 0.0, 1, 0, "t", "all", "ok"))
    story.sub(2, "all")
    messages = numbered(story.pub(4))
    story.take(2, *messages)
    story.take(1, *messages[2:])
    drained(story)
    story.add(Stored(story.t, "n1", "t", 0, messages[2:]))
    done(story, abandoned=(Settling(0, 2, ns(after), 4),))
    assert judge(story.events).problems == problems
