"""What checkers say of messages: lost, forked, repeated, out of order. Each rule has a good history and spoilt ones."""

from __future__ import annotations

import pytest

from tests.jepsen.checkers.duplicates import COMMIT_SECONDS
from tests.jepsen.checkers.judgement import Report
from tests.jepsen.history import Answered, ChannelMade, Message, Refused, Stored
from tests.jepsen.story import Story, again, changed


def figures(report: Report) -> dict[str, float]:
    return {name: value for each in report.findings for name, value in each.figures.items()}


# ---- total queue


def test_what_is_lost_is_told_as_prefix_middle_or_postfix() -> None:
    story = Story()
    story.sub(1)
    messages = [story.pub()[0] for _ in range(6)]
    story.take(1, messages[1], messages[3], messages[4])
    report = story.judged()
    assert report.problems == {"lost": 3}
    found = figures(report)
    assert (found["lost prefix"], found["lost middle"], found["lost postfix"]) == (1, 1, 1)


def test_an_empty_excuses_what_was_sent_before_it_and_nothing_after() -> None:
    story = Story()
    story.sub(1)
    story.pub()
    story.admin("empty")
    assert story.problems() == {}
    story = Story()
    story.sub(1)
    story.admin("empty")
    story.pub()
    assert story.problems() == {"lost": 1}


def test_an_empty_that_was_refused_or_undone_excuses_nothing() -> None:
    for refused in (True, False):
        story = Story()
        story.sub(1)
        story.pub()
        story.admin("empty", "fail" if refused else "ok")
        if not refused:
            story.seek("undo")
        assert story.problems() == {"lost": 1}, refused


def test_an_undo_of_unknown_outcome_may_have_undone_nothing() -> None:
    story = Story()
    story.sub(1)
    story.pub()
    story.admin("empty")
    story.seek("undo", result="info")
    assert story.problems() == {}


# ---- log agreement


def stored(node: str, *messages: Message, partition: int = 0) -> Stored:
    return Stored(9.0, node, "t", partition, [changed(message, attempts=0) for message in messages])


def test_replicas_that_have_what_came_out_agree() -> None:
    story = Story()
    story.sub(1)
    a, b, c = story.pub(3)
    story.take(1, a, b, c)
    for node in ("n1", "n2"):
        story.add(stored(node, a, b, c))
    story.add(stored("n3", b, c))  # its beginning was unlinked
    report = story.judged()
    assert report.ok, str(report)
    assert figures(report)["replicas read"] == 3


@pytest.mark.parametrize("field", ["crc", "counter", "timestamp", "id"])
def test_a_replica_with_another_value_at_a_place_is_a_fork(field: str) -> None:
    story = Story()
    story.sub(1)
    a, b = story.pub(2)
    story.take(1, a, b)
    value = {"crc": 5, "counter": 1, "timestamp": 5, "id": f"{int(a.id, 16) - 1:016x}"}[field]
    story.add(stored("n1", changed(a, **{field: value}), b))
    problems = story.problems()
    assert problems.pop("forked") >= 1
    assert not problems.keys() - {"missing", "disorder"}


def test_a_replica_that_lacks_something_in_between_or_at_the_end_is_told() -> None:
    for kept in ((0, 2), (0, 1)):
        story = Story()
        story.sub(1)
        messages = story.pub(3)
        story.take(1, *messages)
        story.add(stored("n1", *(messages[n] for n in kept)))
        assert story.problems() == {"missing": 1}


def test_what_never_came_out_stands_at_no_place_of_another_message() -> None:
    story = Story()
    story.sub(1)
    (a,), (b,) = story.pub(), story.pub(result="info")
    story.take(1, a)
    story.add(stored("n1", changed(b, id=a.id)))
    assert story.problems()["forked"] >= 1


def test_replicas_are_compared_in_what_never_came_out() -> None:
    story = Story()
    a, b = story.pub(2)
    story.add(stored("n1", a, b))
    story.add(stored("n2", a, changed(b, id=a.id)))
    assert story.problems()["forked"] >= 1


# ---- duplicates in a cluster


def repeated_in_cluster(
    *,
    beat: bool = True,
    later: bool = True,
    epoch: int = 1,
    node: str = "n1",
    samples: bool = True,
    ordered: bool = False,
    sync: str = "always",
) -> Story:
    """A FIN, all that settles it, and the message again."""
    story = Story(cluster=True, sync=sync)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    if samples:
        story.sample()
    story.sub(1, node=node, ordered=ordered)
    (a,) = story.pub(partition=0)
    story.take(1, a)
    if beat:
        story.take(1, *story.pub(conn=1, partition=0))
    if later:
        story.pass_time(COMMIT_SECONDS["always"] + 0.1)
        (c,) = story.pub(partition=0)
        story.take(1, c)
    if samples:
        story.sample(epoch=epoch)
    story.sub(2, ordered=ordered)
    story.take(2, again(a, 1))
    return story


def test_a_settled_fin_of_a_cluster_is_not_forgotten() -> None:
    report = repeated_in_cluster().judged()
    assert report.problems["unneeded"] == 1, str(report)
    assert not all(promise.kept for promise in report.promises)
    assert repeated_in_cluster(ordered=True).problems()["backwards"] == 1


@pytest.mark.parametrize(
    "lack",
    [{"beat": False}, {"later": False}, {"epoch": 2}, {"node": "n2"}, {"samples": False}, {"sync": "none"}],
    ids=lambda lack: next(iter(lack)),
)
def test_a_fin_that_another_leader_may_not_have_may_be_forgotten(lack: dict[str, object]) -> None:
    story = repeated_in_cluster(**lack)  # type: ignore[arg-type]
    assert story.problems() == {}


def test_a_share_of_unneeded_duplicates_is_borne_in_a_cluster() -> None:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    story.sample()
    story.sub(1)
    many = story.pub(2000, partition=0)
    story.take(1, *many)
    story.take(1, *story.pub(conn=1, partition=0))
    story.pass_time(COMMIT_SECONDS["always"] + 0.1)
    story.take(1, *story.pub(partition=0))
    story.sample()
    story.take(1, again(many[0]))
    report = story.judged()
    assert report.ok, str(report)
    assert figures(report)["again after a settled FIN"] == 1


@pytest.mark.parametrize(
    ("kind", "seconds", "problems"),
    [("P2", 0.5, {}), ("P2", 3.0, {"unneeded": 1}), ("N1", 0.5, {"unneeded": 1})],
)
def test_a_leader_that_stood_still_delivers_until_it_knows_of_the_next(
    kind: str, seconds: float, problems: dict[str, int]
) -> None:
    story = repeated_in_cluster()
    story.events[-2:] = []  # it comes later
    story.fault(kind, 5.0)
    story.pass_time(seconds)
    story.take(2, Message(7, 0, 1000, f"{0x1A73C0000000:016x}", 2, 10**18))
    assert {name: number for name, number in story.problems().items() if name == "unneeded"} == problems


def test_a_seek_excuses_what_comes_again_after_it() -> None:
    story = repeated_in_cluster()
    story.events[-2:] = []
    story.seek("start")
    story.take(2, again(Message(7, 0, 1000, f"{0x1A73C0000000:016x}", 1, 10**18), 2))
    assert story.problems() == {}


def test_the_age_of_forgotten_fins_is_compared_with_the_window() -> None:
    for age, expected in ((0.03, True), (1.5, False)):
        story = Story(cluster=True)
        story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
        story.sub(1)
        (a,) = story.pub()
        story.take(1, a)
        story.pass_time(age)
        story.fault("P1", 1.0)
        story.sub(2)
        story.take(2, a)
        report = story.judged()
        assert figures(report)["P1 forgotten FINs, age worst s"] == pytest.approx(age, abs=0.01)
        (kept,) = [promise.kept for promise in report.promises if "takes FINs" in promise.text]
        assert kept is expected


# ---- attempts


def led_for_long(story: Story, seconds: float = 5.0) -> None:
    """So that nothing can come from the leader before."""
    story.sample()
    story.pass_time(seconds)


def attempts_in_cluster(*, epoch: int = 1, node: str = "n1", leads_for: float = 5.0) -> Story:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    led_for_long(story, leads_for)
    story.sub(1)
    story.sub(2, node=node)
    (a,) = story.pub()
    story.recv(1, again(a, 2))
    story.recv(2, again(a, 7))
    story.take(2, again(a, 2))
    story.sample(epoch=epoch)
    return story


def test_attempts_grow_as_long_as_one_node_leads() -> None:
    assert attempts_in_cluster().problems() == {"attempts": 1}
    assert attempts_in_cluster(epoch=2).problems() == {}
    assert attempts_in_cluster(node="n2").problems() == {}
    assert attempts_in_cluster(leads_for=1.0).problems() == {}, "the first may have come from the leader before"


@pytest.mark.parametrize(("cut_seconds", "problems"), [(5.0, {}), (0.0, {"attempts": 1})])
def test_what_waited_behind_a_cut_may_be_older_than_what_another_client_read(
    cut_seconds: float, problems: dict[str, int]
) -> None:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    led_for_long(story)
    story.sub(1)
    story.sub(2)
    a, b, c = story.pub(3)
    story.take(1, c)
    story.pass_time(cut_seconds)
    story.take(2, again(a, 2))
    story.take(1, b)
    story.take(1, a)  # of the same backlog, in another read
    story.sample()
    assert story.problems() == problems


def test_dead_letters_that_are_requeued_begin_anew() -> None:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    led_for_long(story)
    story.sub(1)
    (a,) = story.pub()
    story.recv(1, again(a, 3))
    story.admin("requeue")
    story.take(1, a)
    story.sample()
    assert story.problems() == {}


@pytest.mark.parametrize(("cut_seconds", "problems"), [(3.0, {}), (0.0, {"attempts": 2})])
def test_what_waited_behind_a_cut_may_be_older_than_a_move(cut_seconds: float, problems: dict[str, int]) -> None:
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    led_for_long(story)
    story.sub(1)
    a, b, c = story.pub(3)
    story.take(1, c)
    story.pass_time(cut_seconds)
    story.seek("start")
    if not cut_seconds:
        story.take(1, c)
    story.recv(1, a)
    story.recv(1, b)  # of the same backlog, in another read
    story.take(1, a, b)
    story.sample()
    assert story.problems() == problems


# ---- ordered channels


def ordered(*, cluster: bool = True, sync: str = "always") -> tuple[Story, list[Message]]:
    story = Story(cluster=cluster, sync=sync)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok", "", True))
    story.sub(1, ordered=True)
    return story, story.pub(4)


def test_one_after_the_other_in_order_is_fine_with_repeats() -> None:
    story, (a, b, c, d) = ordered()
    story.take(1, a)
    story.recv(1, b)
    story.add(Answered(story.t, 1, "REQ", [b.id], 0.0))
    story.take(1, again(b))
    story.take(1, c)
    story.take(1, d)
    assert story.problems() == {}


def test_a_message_before_the_one_before_is_finished_is_told() -> None:
    story, (a, b, c, d) = ordered()
    story.recv(1, a)
    story.recv(1, b)
    story.fin(1, a, b)
    story.take(1, c)
    story.take(1, d)
    assert story.problems() == {"overlap": 1}


def test_an_ordered_channel_does_not_go_back() -> None:
    story, (a, b, c, d) = ordered()
    for message in (a, b, c, d):
        story.take(1, message)
    story.take(1, again(b))
    assert story.problems() == {"order": 1}


def test_an_ordered_channel_goes_back_by_a_seek_only() -> None:
    story, (a, b, c, d) = ordered()
    for message in (a, b, c, d):
        story.take(1, message)
    story.seek("start")
    story.take(1, again(b))
    assert story.problems() == {}


def test_an_older_message_may_have_waited_in_another_socket() -> None:
    story, (a, b, c, d) = ordered()
    story.sub(2, ordered=True)
    story.recv(1, again(a))
    story.fin(1, a)
    story.take(1, b)
    story.take(2, a)
    story.take(1, c)
    story.take(1, d)
    assert story.problems() == {}


def test_a_power_loss_without_sync_may_take_an_ordered_channel_back() -> None:
    for sync, expected in (("interval", {}), ("always", {"order": 1})):
        story, (a, b, c, d) = ordered(sync=sync)
        for message in (a, b, c, d):
            story.take(1, message)
        story.fault("D2", 1.0)
        story.take(1, again(a))
        assert story.problems() == expected


# ---- unseen


def test_what_piled_up_comes_out_in_time_after_the_healing() -> None:
    for seconds, expected in ((25, {}), (35, {"unseen": 1})):
        story = Story(cluster=True)
        story.sub(1)
        (a,) = story.pub()
        story.heal(10.0)
        story.pass_time(seconds)
        story.take(1, a)
        report = story.judged()
        assert report.problems == expected
        assert figures(report)["most unseen"] == 1


def test_the_number_of_unseen_messages_over_time_is_kept() -> None:
    story = Story(cluster=True)
    story.sub(1)
    messages = story.pub(5)
    story.pass_time(3)
    story.take(1, *messages)
    series = next(each.series for each in story.judged().findings if each.name == "unseen")
    assert series == {"t/ch": [(0.0, 5.0), (3.0, 0.0)]}


def test_a_fin_may_be_refused_late_only_where_another_node_may_lead() -> None:
    for cluster, problems in ((True, {}), (False, {"unexpected": 1, "backwards": 1})):
        story = Story(cluster=cluster)
        story.sub(1, node="n2")
        (a,) = story.pub()
        story.take(1, a)
        (beat,) = story.pub(conn=1, process=8)  # its OK says that n2 has read the FIN
        story.add(Refused(story.t, 1, "FIN", a.id))
        story.take(1, again(a), beat)
        assert story.problems() == problems, cluster
