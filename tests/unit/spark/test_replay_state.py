"""What a replay notes: what is left, waves, and the file that a later run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_nsqha.writing.replay_state import BadState, Order, ReplaySpan, ReplayState

ORDER = Order("orders", 0xABC, "again", {"--from": "-2h"})


def done(state: ReplayState, *spans: ReplaySpan) -> None:
    state.end(spans, sent=sum(span.messages for span in spans), possible_duplicates=0)


def test_what_is_left_is_planned_and_not_done() -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, 0, 100), ReplaySpan(2, 5, 10)])
    done(state, ReplaySpan(0, 20, 30), ReplaySpan(2, 0, 7))
    assert state.remaining() == [ReplaySpan(0, 0, 20), ReplaySpan(0, 30, 100), ReplaySpan(2, 7, 10)]
    assert (state.total, state.left) == (105, 93)


def test_a_wave_takes_of_each_partition_in_proportion_to_what_is_left() -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, 0, 900), ReplaySpan(1, 100, 200)])
    assert state.next_wave(100, single=True) == [ReplaySpan(0, 0, 90), ReplaySpan(1, 100, 110)]


def test_a_small_partition_is_not_starved() -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, 0, 1_000_000), ReplaySpan(1, 0, 1)])
    assert ReplaySpan(1, 0, 1) in state.next_wave(10, single=True)


def test_a_wave_of_single_messages_takes_many_spans() -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, offset, offset + 1) for offset in (3, 5, 6, 9)])
    assert state.next_wave(3, single=False) == [ReplaySpan(0, 3, 4), ReplaySpan(0, 5, 7)]
    assert state.next_wave(3, single=True) == [ReplaySpan(0, 3, 4)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 30)), max_size=8), st.integers(1, 40))
def test_waves_cover_what_is_planned_exactly_once_and_end(parts: list[tuple[int, int, int]], size: int) -> None:
    state = ReplayState(ORDER, [ReplaySpan(number, first, first + count) for number, first, count in parts])
    wanted = {(number, offset) for number, first, count in parts for offset in range(first, first + count)}
    seen: list[tuple[int, int]] = []
    for _ in range(len(wanted) + 1):
        wave = state.next_wave(size, single=True)
        if not wave:
            break
        seen += [(span.partition, offset) for span in wave for offset in range(span.first, span.end)]
        done(state, *wave)
    assert sorted(seen) == sorted(wanted)


def test_a_later_run_goes_on_where_the_file_says(tmp_path: Path) -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, 0, 100)], tmp_path / "state")
    wave = state.next_wave(40, single=True)
    state.begin(wave)
    state.end(wave, sent=40, possible_duplicates=3, missing=1)
    found = ReplayState.load(tmp_path / "state")
    assert found is not None
    found.check(ORDER)
    assert found.remaining() == [ReplaySpan(0, 40, 100)]
    assert (found.sent, found.possible_duplicates, found.missing) == (40, 3, 1)


def test_what_was_being_sent_when_a_run_was_killed_is_left_and_perhaps_stored(tmp_path: Path) -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, 0, 100)], tmp_path / "state")
    done(state, ReplaySpan(0, 0, 10))
    state.begin([ReplaySpan(0, 10, 30)])
    found = ReplayState.load(tmp_path / "state")
    assert found is not None
    assert found.remaining() == [ReplaySpan(0, 10, 100)]
    assert (found.sent, found.possible_duplicates) == (10, 20)


def test_without_a_file_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert ReplayState.load(tmp_path / "state") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        json.dumps({"nsqha_replay": 2}),
        "[" * 100_000,
        json.dumps({"nsqha_replay": 1, "topic": "t", "topic_uid": "1", "into": "u", "asked": {}, "partitions": {
            "0": {"planned": [[5, 3]], "done": []}}, "running": [], "sent": 0, "possible_duplicates": 0, "missing": 0}),
        json.dumps({"nsqha_replay": 1, "topic": "t", "topic_uid": "1", "into": "u", "asked": {}, "partitions": {},
                    "running": [[0, 1]], "sent": 0, "possible_duplicates": 0, "missing": 0}),
        json.dumps({"nsqha_replay": 1, "topic": "t", "topic_uid": "1", "into": "u", "asked": {}, "partitions": {},
                    "running": [], "sent": -1, "possible_duplicates": 0, "missing": 0}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_state_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state"
    path.write_text(text)
    with pytest.raises(BadState, match=r"is not the state of a replay: name another file, or remove it") as said:
        ReplayState.load(path)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Order("orders", 0xABC, "elsewhere", {"--from": "-2h"}), "into again"),
        (Order("orders", 0xABC, "again", {"--from": "-3h"}), "--from -2h"),
        (Order("orders", 0xABC, "again", {"--from": "-2h", "--where": "true"}), "--where not given"),
        (Order("orders", 0xABD, "again", {"--from": "-2h"}), "created again since"),
    ],
)
def test_a_state_of_another_replay_is_refused_and_says_of_which(tmp_path: Path, other: Order, why: str) -> None:
    ReplayState(ORDER, [], tmp_path / "state").save()
    found = ReplayState.load(tmp_path / "state")
    assert found is not None
    with pytest.raises(BadState, match=why):
        found.check(other)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    state = ReplayState(ORDER, [ReplaySpan(0, 0, 1)], tmp_path / "no folder" / "state")
    with pytest.raises(BadState, match="cannot be written: No such file"):
        state.begin([ReplaySpan(0, 0, 1)])
