"""What checkers say of channels that are moved, of time without service, and of the end."""

from __future__ import annotations

import pytest

from tests.jepsen.checkers.liveness import DESCRIPTORS_FREE, FLAT_SAMPLES, LOG_DESCRIPTORS, most_within
from tests.jepsen.history import ChannelMade, Message, Outcome, Place
from tests.jepsen.story import FIRST_NS, Story, again
from tests.jepsen.test_checkers_messages import figures


def moved(count: int = 10) -> tuple[Story, list[Message]]:
    """A channel that has had and finished everything."""
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    story.sub(1)
    messages = story.pub(count)
    story.take(1, *messages)
    return story, messages


def finished_above_the_floor() -> tuple[Story, list[Message]]:
    """Of ten messages, 3 to 5 are in flight."""
    story = Story(cluster=True)
    story.add(ChannelMade(0.0, 0.0, 0, 0, "t", "ch", "ok"))
    story.sub(1)
    messages = story.pub(10)
    story.recv(1, *messages)
    story.fin(1, *messages[:3], *messages[6:])
    return story, messages


# ---- cursors


def test_seeks_and_undo_that_do_what_they_say_are_fine() -> None:
    story, messages = moved()
    story.seek("offset", Place(0, 10, 4), value=4)
    story.take(1, *map(again, messages[4:]))
    story.seek("start", Place(0, 10, 0))
    story.take(1, *map(again, messages[:3]))
    story.seek("undo", Place(0, 3, 10))
    report = story.judged()
    assert report.ok, str(report)
    assert figures(report)["moves answered"] == 3
    assert figures(report)["repeated as asked"] == 6 + 3


def test_a_floor_that_went_back_by_itself_is_found() -> None:
    story, messages = moved()
    story.seek("offset", Place(0, 10, 4), value=4)
    story.take(1, *map(again, messages[4:]))
    story.seek("start", Place(0, 3, 0))
    story.take(1, *map(again, messages[:3]))
    assert story.problems() == {"floor": 1}


def test_a_seek_backwards_hides_no_earlier_loss() -> None:
    for delay, floor, expected in ((0.0, 3, {"passed over": 1}), (0.0, 1, {}), (9.0, 3, {})):
        story = Story()
        story.sub(1)
        (a,), (b,), (c,) = story.pub(), story.pub(delay=delay), story.pub()
        story.take(1, a, c)
        story.seek("start", Place(0, floor, 0))
        story.pass_time(10)
        story.take(1, again(a), b, again(c))
        assert {kind: n for kind, n in story.problems().items() if kind == "passed over"} == expected, (delay, floor)


def test_an_undo_goes_to_where_the_last_move_began() -> None:
    for place, expected in ((Place(0, 6, 10), {}), (Place(0, 6, 8), {"undo": 1}), (Place(0, 6, 8, 0, True), {})):
        story, messages = moved()
        story.seek("offset", Place(0, 10, 4), value=4)
        story.take(1, *map(again, messages[4:]))
        story.seek("undo", place)
        assert story.problems() == expected, place


def test_after_a_move_of_unknown_outcome_nothing_is_known_until_the_next() -> None:
    story, messages = moved()
    story.seek("offset", Place(0, 10, 4), value=4)
    story.take(1, *map(again, messages[4:]))
    story.seek("offset", value=2, result="info")
    story.seek("undo", Place(0, 2, 10))
    assert story.problems() == {}


def test_what_a_seek_should_have_repeated_and_did_not_is_found() -> None:
    story, messages = moved()
    story.seek("offset", Place(0, 10, 4), value=4)
    story.take(1, *map(again, messages[4:8]))
    story.seek("start", Place(0, 9, 0))
    story.take(1, *map(again, messages))
    assert story.problems() == {"not again": 1}, "offset 8 lies below the floor that the second one found"


def test_what_should_have_been_repeated_by_the_end_is_asked_for() -> None:
    story, messages = moved()
    story.seek("start", Place(0, 10, 0))
    story.take(1, *map(again, messages[:9]))
    assert story.problems() == {"not again": 1}


def test_an_undo_repeats_what_had_not_been_finished_above_the_floor() -> None:
    for taken, expected in ((slice(3, 6), {}), (slice(3, 5), {"not again": 1})):
        story, messages = finished_above_the_floor()
        story.seek("start", Place(0, 3, 0))
        story.take(1, *map(again, messages))
        story.seek("undo", Place(0, 10, 3))
        story.take(1, *map(again, messages[taken]))
        assert story.problems() == expected


def test_an_undo_of_an_empty_repeats_what_had_not_been_finished() -> None:
    story, messages = finished_above_the_floor()
    story.admin("empty")
    story.seek("undo", Place(0, 10, 3))
    story.take(1, *map(again, messages[3:6]))
    assert story.problems() == {}


# ---- replay from a time


@pytest.mark.parametrize(
    ("offset", "expected"), [(5, {}), (6, {"too late": 1}), (4, {"too early": 1}), (10, {"too late": 1})]
)
def test_a_time_means_the_first_message_at_or_after_it(offset: int, expected: dict[str, int]) -> None:
    story, messages = moved()
    story.seek("time", Place(0, 10, offset, FIRST_NS + offset), value=FIRST_NS + 5)
    story.take(1, *map(again, messages[offset:]))
    assert story.problems() == expected


def test_what_is_written_after_a_seek_may_be_older_than_its_time() -> None:
    """As where the leader's clock is behind: its stamps do not go on until it has caught up."""
    for later, expected in ((False, {"too early": 1}), (True, {})):
        story, messages = moved()
        if not later:
            messages += story.pub(1)
        story.seek("time", Place(0, 10, 10, 0), value=FIRST_NS + 500)
        if later:
            messages += story.pub(1)
        story.take(1, messages[10])
        assert story.problems() == expected


def test_a_time_before_a_log_that_was_shortened_says_nothing() -> None:
    story, messages = moved()
    story.seek("time", Place(0, 10, 7, FIRST_NS + 7, True), value=FIRST_NS + 5)
    story.take(1, *map(again, messages[7:]))
    assert story.problems() == {}


def test_one_time_is_one_place() -> None:
    story, messages = moved()
    story.take(1, *story.pub(3))
    for offset in (10, 11):
        story.seek("time", Place(0, 13, offset, FIRST_NS + offset), value=FIRST_NS + 10)
        story.take(1, *(Message(7, n, 1000 + n, f"{n + 0x1A73C0000000:016x}", 2, FIRST_NS + n) for n in range(10, 13)))
    assert story.problems() == {"too late": 1, "unstable": 1}
    assert messages


# ---- availability


def test_the_longest_gap_of_a_fault_is_measured_in_each_partition() -> None:
    story = Story(cluster=True)
    for _ in range(10):
        story.pub(partition=0)
        story.pub(partition=1, process=8)
    story.fault("N1", 0.0)
    story.pub(partition=0)
    story.pass_time(2.0)
    story.pub(partition=1, process=8)
    story.pub(partition=0)
    found = figures(story.judged())
    assert found["N1 gap worst s"] == pytest.approx(2.0, abs=0.1)
    (kept,) = [promise.kept for promise in story.judged().promises if promise.text.startswith("N1")]
    assert not kept, "another leader was to be there after 1.2 s"


def test_a_gap_that_began_before_a_fault_counts_from_the_fault_on() -> None:
    story = Story(cluster=True)
    story.pub(partition=0)
    story.pass_time(5.0)
    story.fault("P1", 0.5)
    story.pub(partition=0)
    assert figures(story.judged())["P1 gap worst s"] == pytest.approx(0.5, abs=0.05)


def test_a_failover_is_measured_from_the_first_attempt_to_the_ok() -> None:
    story = Story(cluster=True)
    story.pub(probe=True, process=1)
    story.fault("P1", 0.0)
    story.pub(probe=True, result="info", process=2)
    story.pass_time(0.4)
    story.pub(probe=True, result="info", process=3)
    story.pass_time(0.4)
    story.pub(probe=True, process=4)
    found = figures(story.judged())
    assert found["P1 failover worst s"] == pytest.approx(0.8, abs=0.1)


def test_a_publish_that_an_earlier_fault_held_up_is_no_failover_of_the_next_one() -> None:
    story = Story(cluster=True)
    story.pub(probe=True, process=1)
    story.pub(probe=True, result=None, process=2)
    held = story.ops
    story.fault("D2", 5.0)
    story.pass_time(1.0)
    story.fault("D5", 1.0)
    story.add(Outcome(story.t, held, "ok"))
    found = figures(story.judged())
    assert found["D2 failover worst s"] == pytest.approx(7.0, abs=0.1)
    assert found["D5 failover worst s"] == 0


# ---- liveness


def test_every_isr_is_full_in_time_after_the_healing() -> None:
    for seconds, isr, expected in ((3.0, 3, {}), (30.0, 3, {"not healed": 1}), (3.0, 2, {"not healed": 1})):
        story = Story(cluster=True)
        story.sample()
        story.fault("N1", 1.0)
        story.sample(isr=2)
        story.heal(10.0)
        story.pass_time(seconds)
        story.sample(isr=isr)
        assert story.problems() == expected, (seconds, isr)


def test_a_sample_from_before_the_healing_proves_nothing() -> None:
    story = Story(cluster=True)
    story.sample()
    story.heal(10.0)
    assert story.problems() == {"not healed": 1}


def test_a_topic_that_was_deleted_need_not_be_in_sync_and_one_that_nobody_leads_must() -> None:
    for deleted, expected in ((("doomed",), {}), ((), {"not healed": 1})):
        story = Story(cluster=True)
        story.sample()
        story.sample(topic="doomed")
        story.pass_time(1.0)
        story.heal(10.0)
        story.sample(deleted=deleted)
        story.sample(deleted=deleted)
        assert story.problems() == expected, deleted


def test_an_isr_below_its_floor_is_found_where_something_was_acknowledged() -> None:
    for isr, floor, expected in ((2, 2, {}), (1, 2, {"below floor": 1}), (1, 0, {})):
        story = Story(cluster=True)
        story.sample()
        story.sample(isr=isr, floor=floor)
        story.sample()
        assert story.problems() == expected, (isr, floor)
    story = Story(cluster=True)
    story.sample(isr=1, floor=2)  # a partition that is being made
    story.sample()
    assert story.problems() == {}


def test_the_time_to_a_full_isr_after_each_fault_is_a_figure() -> None:
    story = Story(cluster=True)
    story.fault("P1", 1.0)
    story.pass_time(2.0)
    story.sample(isr=2)
    story.pass_time(2.0)
    story.sample(isr=3, epoch=2)
    found = figures(story.judged())
    assert found["P1 to full ISR worst s"] == pytest.approx(4.0, abs=0.1)
    assert found["changes of leader"] == 1


def test_a_fault_without_effect_makes_a_run_void() -> None:
    story = Story(cluster=True)
    story.fault("D4", 1.0, bit=False)
    assert story.problems() == {"did not bite": 1}


@pytest.mark.parametrize("seconds", [4, 2 * FLAT_SAMPLES])
def test_a_node_that_was_started_again_has_not_grown_since(seconds: int) -> None:
    """`seconds`: until it has anything; on a busy machine that is long."""
    mib = 1 << 20
    story = Story(cluster=True)
    for pid in range(1, 4):
        for n in range(4 * FLAT_SAMPLES):
            young = n < seconds
            story.sample(rss=mib * (10 if young else 300), fds=3 if young else 200, pid=pid)
    assert story.problems() == {}


def test_partitions_that_nobody_probes_have_no_gaps_where_others_are_probed() -> None:
    story = Story(cluster=True)
    story.pub(partition=0, process=1)
    story.pub(partition=1, process=2, probe=True)
    story.fault("N1", 2.0)
    story.pub(partition=0, process=1)
    story.pub(partition=1, process=2, probe=True)
    series = next(each.series for each in story.judged().findings if each.name == "availability")
    assert series.keys() == {"t/1"}


def test_what_grows_is_told_and_what_has_a_peak_is_not() -> None:
    mib = 1 << 20
    for end_rss, end_fds, expected in (
        (400, 20, {"memory": 1}),
        (110, 20 + DESCRIPTORS_FREE + LOG_DESCRIPTORS + 1, {"descriptors": 1}),
        (110, 25, {}),
    ):
        story = Story(cluster=True)
        for n in range(4 * FLAT_SAMPLES):
            end = n >= 3 * FLAT_SAMPLES
            peak = n == 2 * FLAT_SAMPLES + 5
            story.sample(rss=mib * (900 if peak else end_rss if end else 100), fds=end_fds if end else 20)
        assert story.problems() == expected


def test_changes_of_a_leader_are_counted_by_the_minute() -> None:
    assert most_within([0.0, 10.0, 59.0, 61.0, 130.0], 60.0) == 3
    story = Story(cluster=True)
    story.fault("N10", 1.0)
    for epoch in range(1, 6):
        story.sample(epoch=epoch)
        story.pass_time(5)
    (kept,) = [promise.kept for promise in story.judged().promises if "changes at most" in promise.text]
    assert not kept
