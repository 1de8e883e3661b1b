"""The judge of crash runs is judged: a good history passes, and each kind of fault put into it is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jepsen import history
from tests.jepsen.checkers.judgement import judge
from tests.jepsen.history import (
    Deleted,
    Drained,
    Message,
    Outcome,
    Paused,
    Refused,
)
from tests.jepsen.story import Story, again, changed


def test_a_good_history_has_no_problems_and_is_counted() -> None:
    story = Story()
    story.sub(1)
    a, b = story.pub(2)
    (c,) = story.pub(result="info")
    story.pub(result="fail")
    story.take(1, a)
    story.recv(1, b)
    story.kill()
    story.sub(2)
    story.take(2, b, c)
    report = story.judged()
    assert report.ok, str(report)
    figures = report.figures
    assert (figures.kills, figures.attempted, figures.ok, figures.unknown, figures.failed) == (1, 4, 2, 1, 1)
    assert (figures.recovered, figures.first, figures.redelivered, figures.repeated) == (1, 3, 1, 0)
    assert figures.finished == 3


def test_a_lost_message_is_found() -> None:
    story = Story()
    story.sub(1)
    a, _b = story.pub()[0], story.pub()
    story.take(1, a)
    assert story.problems() == {"lost": 1}


def test_each_durable_channel_is_owed_every_message() -> None:
    story = Story()
    story.sub(1, "x")
    story.sub(2, "y")
    (a,) = story.pub()
    story.take(1, a)
    assert story.problems() == {"lost": 1}


def test_a_second_channel_is_owed_only_what_came_after_it() -> None:
    story = Story()
    story.sub(1, "x")
    (a,) = story.pub()
    story.sub(2, "y")
    story.take(1, a)
    assert story.problems() == {}


def test_the_first_channel_is_owed_the_backlog() -> None:
    story = Story()
    story.pub()
    story.sub(1, "x")
    assert story.problems() == {"lost": 1}


def test_what_an_ephemeral_channel_misses_is_not_lost() -> None:
    story = Story()
    story.sub(1, "x#ephemeral")
    story.pub()
    assert story.problems() == {}


def test_a_message_of_unknown_outcome_may_vanish_but_not_a_part_of_an_mpub() -> None:
    story = Story()
    story.sub(1)
    story.pub(3, "info")
    assert story.problems() == {}
    story = Story()
    story.sub(1)
    a, _b, c = story.pub(3, "info")
    story.take(1, a, c)
    assert story.problems() == {"torn": 1}


def test_delivered_but_never_finished_and_gone_is_dropped() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.recv(1, a)
    assert story.problems() == {"dropped": 1}


def test_a_refused_fin_finishes_nothing() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.take(1, a)
    story.add(Refused(story.t, 1, "FIN", a.id))
    assert story.problems() == {"dropped": 1}


def test_a_late_fin_that_is_refused_does_not_undo_the_one_that_was_not() -> None:
    story = Story()
    story.sub(1)
    story.sub(2)
    (a,) = story.pub()
    story.recv(1, a)
    story.take(2, again(a))
    story.fin(1, a)
    story.add(Refused(story.t, 1, "FIN", a.id))
    assert story.problems() == {}


def test_a_message_nobody_sent_is_found() -> None:
    story = Story()
    story.sub(1)
    story.take(1, Message(9, 9, 1, "00000000000000ff", 1, 1))
    assert story.problems() == {"unexpected": 1}


def test_a_body_that_does_not_hold_together_is_found() -> None:
    whole = history.body(3, 14, b"padding")
    assert history.parse(whole) == (3, 14)
    for n in range(len(whole)):
        assert history.parse(whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :]) == (-1, -1), n
    assert history.parse(whole[:-1]) == (-1, -1)
    assert history.parse(b"") == (-1, -1)


def test_a_failed_publish_that_comes_out_is_found_before_and_after_its_outcome() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub(result="fail")
    story.take(1, a)
    assert story.problems() == {"unexpected": 1}
    story = Story()
    story.sub(1)
    (a,) = story.pub(result=None)
    story.take(1, a)
    story.add(Outcome(story.t, story.ops, "fail"))
    assert story.problems() == {"unexpected": 1}


def test_a_message_on_another_topic_is_found() -> None:
    story = Story()
    story.sub(1, topic="u")
    (a,) = story.pub(topic="t")
    story.take(1, a)
    assert "unexpected" in story.problems("t", "u")


def test_an_altered_message_is_found() -> None:
    for field, value in (("crc", 5), ("id", "00001a73c000ffff"), ("timestamp", 5)):
        story = Story()
        story.sub(1)
        (a,) = story.pub()
        story.recv(1, a)
        story.take(1, changed(a, **{field: value, "attempts": 2}))
        assert story.problems().get("altered") == 1, field


def test_an_id_used_twice_is_found() -> None:
    story = Story()
    story.sub(1)
    a, b = story.pub(2)
    story.take(1, a)
    story.take(1, changed(b, id=a.id))
    assert story.problems() == {"reused": 1}


def test_ids_and_timestamps_out_of_order_are_found() -> None:
    story = Story()
    story.sub(1)
    a, b = story.pub(2)
    story.take(1, changed(a, id=b.id, timestamp=b.timestamp), changed(b, id=a.id, timestamp=a.timestamp))
    assert story.problems() == {"disorder": 1}
    story = Story()
    story.sub(1)
    a, b = story.pub(2)
    story.take(1, a, changed(b, timestamp=a.timestamp - 1))
    assert story.problems() == {"disorder": 1}


def test_attempts_must_be_positive_and_grow_within_a_life() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.take(1, again(a, 0))
    assert story.problems() == {"attempts": 1}
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.recv(1, a)
    story.kill()
    story.sub(2)
    story.recv(2, a)  # may begin anew after a crash
    story.take(2, a)
    assert story.problems() == {"attempts": 1}


def test_an_older_delivery_may_have_waited_in_the_socket_of_another_consumer() -> None:
    story = Story()
    story.sub(1)
    story.sub(2)
    (a,) = story.pub()
    story.recv(1, again(a))
    story.take(2, a)  # nothing had been read there before
    assert story.problems() == {}
    story = Story()
    story.sub(1)
    story.sub(2)
    (a,), (b,) = story.pub(), story.pub()
    story.recv(1, again(a))
    story.take(2, b)  # everything that had been sent to 2
    story.take(2, a)
    assert story.problems() == {"attempts": 1}


def test_a_fin_that_was_read_holds_for_the_rest_of_this_life() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.take(1, a)
    story.take(1, again(a))  # nothing proves that the FIN had been read
    assert story.problems() == {}
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.take(1, a)
    story.pub(conn=1, topic="beat")
    story.take(1, again(a))
    assert story.problems() == {"backwards": 1}


def test_a_crash_may_forget_a_young_fin_only() -> None:
    for uptime, expected in ((0.9, {}), (1.2, {"backwards": 1})):
        story = Story()
        story.sub(1)
        (a,) = story.pub()
        story.take(1, a)
        story.pub(conn=1, topic="beat")
        story.pass_time(uptime)
        story.pub(topic="beat")
        story.kill()
        story.sub(2)
        story.take(2, a)
        report = story.judged()
        assert report.problems == expected
        assert report.figures.repeated == 1
        assert report.figures.settled == len(expected)


def test_uptime_counts_only_if_the_broker_answered_in_it() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.take(1, a)
    story.pub(conn=1, topic="beat")
    story.pass_time(5)
    story.pub(result="info", topic="beat")
    story.kill()
    story.pub(topic="beat")
    story.sub(2)
    story.take(2, a)
    report = story.judged()
    assert report.ok
    assert report.figures.oldest_forgotten > 5


def test_a_refused_fin_is_never_settled() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.take(1, a)
    story.add(Refused(story.t, 1, "FIN", a.id))
    story.pub(conn=1, topic="beat")
    story.pass_time(2)
    story.pub(topic="beat")
    story.take(1, again(a))
    assert story.problems() == {}


def test_a_deferred_message_must_not_come_early() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub(delay=1.0)
    story.take(1, a)
    assert story.problems() == {"early": 1}
    story = Story()
    story.sub(1)
    (a,) = story.pub(delay=1.0)
    story.pass_time(1)
    story.take(1, a)
    assert story.problems() == {}


@pytest.mark.parametrize(
    ("kind", "delay", "expected"),
    [("C2", 5, {}), ("C2", 12, {"early": 1}), ("C3", 12, {}), ("C3", 22, {"early": 1}), ("P1", 5, {"early": 1})],
)
def test_a_deferred_message_may_come_early_by_what_a_wrong_clock_is_believed(
    kind: str, delay: float, expected: dict[str, int]
) -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub(delay=delay)
    story.fault(kind, 1.0)
    story.take(1, a)
    assert story.problems() == expected


def test_a_clock_that_is_right_again_excuses_nothing() -> None:
    story = Story()
    story.sub(1)
    story.fault("C1", 1.0)
    (a,) = story.pub(delay=5.0)
    story.take(1, a)
    assert story.problems() == {"early": 1}


def test_a_requeued_message_comes_early_only_if_the_requeue_was_refused_or_lost() -> None:
    def requeued() -> tuple[Story, Message]:
        story = Story()
        story.sub(1)
        story.sub(2)
        (a,) = story.pub()
        story.recv(1, a)
        story.req(1, a, 1.0)
        return story, a

    story, a = requeued()
    story.pub(conn=1, topic="beat")
    story.take(2, again(a))
    assert story.problems() == {"early": 1}

    story, a = requeued()
    story.take(2, again(a))
    story.pub(conn=1, topic="beat")
    assert story.problems() == {"early": 1}

    story, a = requeued()
    story.take(2, again(a))
    story.add(Refused(story.t, 1, "REQ", a.id))
    story.pub(conn=1, topic="beat")
    assert story.problems() == {}

    story, a = requeued()
    story.pub(conn=1, topic="beat")
    story.kill()
    story.sub(3)
    story.take(3, a)
    assert story.problems() == {}

    story, a = requeued()
    story.pass_time(1)
    story.take(2, again(a))
    assert story.problems() == {}


def test_a_paused_channel_gives_nothing_to_a_new_connection() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.add(Paused(story.t, story.t, "t", "ch", True, "ok"))
    story.kill()
    story.sub(2)
    story.take(2, a)
    assert story.problems() == {"paused": 1}
    story.add(Paused(story.t, story.t, "t", "ch", False, "info"))
    (b,) = story.pub()
    story.take(2, b)
    assert story.problems() == {"paused": 1}


def test_a_deleted_topic_does_not_rise() -> None:
    story = Story()
    story.sub(1)
    (a,) = story.pub()
    story.add(Deleted(story.t, story.t, "t", "info"))
    story.add(Deleted(story.t, story.t, "t", "ok"))
    (b,) = story.pub()
    story.sub(2)
    story.take(2, b)
    assert story.problems() == {}
    story.take(2, a)
    assert story.problems() == {"risen": 1}


def test_a_new_ephemeral_channel_has_no_past() -> None:
    story = Story()
    story.sub(1, "x")
    (a,) = story.pub()
    story.sub(2, "y#ephemeral")
    story.take(1, a)
    assert story.problems() == {}
    story.take(2, a)
    assert story.problems() == {"stale": 1}


def test_a_topic_that_was_never_empty_is_told() -> None:
    story = Story()
    story.sub(1)
    story.add(Drained(story.t, "elsewhere"))
    assert judge(story.events).problems == {"undrained": 1}


def test_a_history_survives_its_file(tmp_path: Path) -> None:
    story = Story()
    story.sub(1)
    story.take(1, *story.pub(3))
    story.kill()
    story.add(Drained(story.t, "t"))
    path = tmp_path / "history.jsonl"
    history.write(story.events, path)
    assert list(history.read(path)) == story.events
    assert judge(history.read(path)).ok
