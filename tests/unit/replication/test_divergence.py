"""Where two logs part, found by epochs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.commitlog.entry import Entry, genesis, next_entry
from nsqha.replication.divergence import Divergence, EpochEndAnswer, InSync, Outcome, RangeGone, Truncate


@dataclass
class Log:
    """A whole history, of which what lies below `start` has been removed but for the anchor."""

    entries: list[Entry]
    start: int = 1

    @classmethod
    def of(cls, batches: str, start: int = 1) -> Log:
        """`"1a 1b 2c"`: epoch and content of each batch."""
        entries = [genesis(1, 0)]
        for word in batches.split():
            entries.append(
                next_entry(
                    entries[-1],
                    word[1:].encode(),
                    count=1,
                    flags=0,
                    timestamp_ns=len(entries),
                    epoch=int(word[0]),
                    durable=0,
                )[0]
            )
        return cls(entries, start)

    @property
    def end(self) -> int:
        return len(self.entries)

    def epoch_end(self, epoch: int) -> EpochEndAnswer:
        for entry in reversed(self.entries[self.start - 1 :]):
            if entry.epoch <= epoch:
                return EpochEndAnswer(entry.epoch, entry.log_id + 1, entry.chain, self.start)
        return EpochEndAnswer(0, self.start, 0, self.start)

    def chain_before(self, log_id: int) -> int:
        assert self.start <= log_id <= self.end, f"nobody has entry {log_id - 1}"
        return self.entries[log_id - 1].chain


def search(ours: Log, leaders: Log, differs_at: int | None = None) -> tuple[Outcome, list[int]]:
    """What is found, and the epochs that were asked about."""
    found = Divergence(own=ours.epoch_end, chain_before=ours.chain_before, differs_at=differs_at)
    asked = []
    while found.outcome is None:
        asked.append(found.asked)
        found.answered(leaders.epoch_end(found.asked))
    assert asked == sorted(set(asked), reverse=True), "each epoch is asked about once, downward"
    return found.outcome, asked


@pytest.mark.parametrize(
    ("ours", "leaders", "outcome"),
    [
        ("1a 1b", "1a 1b", InSync(3)),
        ("1a", "1a 1b", InSync(2)),
        ("1a", "1a 2b 3c", InSync(2)),
        ("1a 1b 1c", "1a 2x", Truncate(2)),
        ("1a 1b", "1a", Truncate(2)),
        ("1a 2b 2c", "1a 2b 3x 3y", Truncate(3)),
        ("", "1a", InSync(1)),
        ("1a", "", Truncate(1)),
        ("", "", InSync(1)),
        ("2a", "1x 1y", Truncate(1)),
        ("1x", "2a", Truncate(1)),
    ],
)
def test_one_failover(ours: str, leaders: str, outcome: Outcome) -> None:
    assert search(Log.of(ours), Log.of(leaders))[0] == outcome


@pytest.mark.parametrize(
    ("ours", "leaders", "outcome", "asked"),
    [
        # Ours led epoch 3 for a moment and nobody heard; the leader is of epoch 4 and has more of epoch 2 than we.
        ("1a 1b 1c 2d 3e 3f", "1a 1b 1c 2d 2e 4g", Truncate(5), [3]),
        # We have 1 and 3, the leader has 1, 2 and 4: an answer about 2, which we never had, is no place to cut.
        ("1a 1b 3c", "1a 2x 2y 4z", Truncate(2), [3, 1]),
        ("1a 1b 1c 1d 3e", "1a 1b 2x 2y 2z 2w 4v", Truncate(3), [3, 1]),
        ("1a 2b 4c 6d", "1a 3x 5y 7z", Truncate(2), [6, 4, 2]),
    ],
)
def test_two_failovers_in_a_row(ours: str, leaders: str, outcome: Outcome, asked: list[int]) -> None:
    """The case of KIP-279: each of the two has an epoch that the other one has never seen."""
    assert search(Log.of(ours), Log.of(leaders)) == (outcome, asked)


def test_equal_numbers_with_another_chain_go_on_downward() -> None:
    assert search(Log.of("1a 2b 2c"), Log.of("1a 2x 2y")) == (Truncate(2), [2, 1])
    assert search(Log.of("1a 1b 2c"), Log.of("1x 1b 2c 2d 3e"), differs_at=3) == (Truncate(1), [1, 0])


def test_what_the_first_batch_showed_to_differ_is_not_taken_for_common_again() -> None:
    # Of epoch 2 ours is the shorter part: the answer can not show that it is another one.
    ours, leaders = Log.of("1a 2b"), Log.of("1a 2x 2y")
    assert search(ours, leaders)[0] == InSync(3)
    assert search(ours, leaders, differs_at=2)[0] == Truncate(2)


def test_a_range_that_is_gone_is_begun_anew() -> None:
    history = "1a 1b 1c 2d 2e"
    assert search(Log.of("1a"), Log.of(history, start=4))[0] == RangeGone(4)
    assert search(Log.of(""), Log.of(history, start=4))[0] == RangeGone(4)
    assert search(Log.of("1a 1b 1c"), Log.of(history, start=4))[0] == InSync(4), "the anchor proves it"
    assert search(Log.of("1a 1b 1c 1d"), Log.of(history, start=4))[0] == Truncate(4)
    assert search(Log.of("1x 1y 1z"), Log.of(history, start=4))[0] == RangeGone(4)


def test_a_log_that_lost_its_beginning_is_compared_by_its_anchor() -> None:
    ours = Log.of("1a 1b 1c", start=3)
    assert search(ours, Log.of("1a 1b 1c 2d"))[0] == InSync(4)
    assert search(ours, Log.of("1a 1b 2x"))[0] == Truncate(3)
    assert search(ours, Log.of("1a 2x 2y"))[0] == RangeGone(1)


@st.composite
def pair_of_logs(draw: st.DrawFn) -> tuple[Log, Log]:
    """Two histories that a chain of leaders could have left: an epoch has one content, of which each has a part."""
    common = draw(st.lists(st.integers(1, 3), max_size=5).map(sorted))
    last = common[-1] if common else 0
    ours = draw(st.lists(st.integers(0, 5), max_size=5).map(sorted))
    leaders = draw(st.lists(st.integers(0, 5), max_size=5).map(sorted))
    # After they part, odd epochs above are ours, even ones the leader's: nobody shares a leader after that.
    mine = [last + 1 + 2 * n for n in ours]
    theirs = [last + 2 + 2 * n for n in leaders]
    words = [f"{epoch}c" for epoch in common]
    own = Log.of(" ".join(words + [f"{min(e, 9)}o" for e in mine if e <= 9]))
    led = Log.of(" ".join(words + [f"{min(e, 9)}l" for e in theirs if e <= 9]))
    own.start = draw(st.integers(1, own.end))
    led.start = draw(st.integers(1, led.end))
    return own, led


@given(pair_of_logs())
def test_the_common_end_is_found(logs: tuple[Log, Log]) -> None:
    ours, leaders = logs
    common = 1
    while common < min(ours.end, leaders.end) and ours.entries[common] == leaders.entries[common]:
        common += 1
    outcome, _ = search(ours, leaders)
    if common < leaders.start or common < ours.start:
        assert outcome == RangeGone(leaders.start)
    else:
        assert outcome == (InSync(common) if common == ours.end else Truncate(common))
