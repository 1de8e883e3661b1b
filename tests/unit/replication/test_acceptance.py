"""What a follower takes, and from whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.commitlog.entry import Entry, genesis, next_entry
from nsqha.election.model import PartitionMeta
from nsqha.replication.acceptance import (
    Accepted,
    Append,
    Duplicate,
    Fenced,
    Gap,
    Mismatch,
    NotConfirmed,
    NotOpened,
    PromiseNeeded,
    Verdict,
    check_cut,
    check_replacement,
    decide_append,
    decide_open,
    first_difference,
    same_past,
)


def log_of(*batches: tuple[int, str]) -> list[Entry]:
    """Genesis and an entry per (epoch, content)."""
    log = [genesis(1, 0)]
    for epoch, content in batches:
        data = content.encode()
        log.append(next_entry(log[-1], data, count=1, flags=0, timestamp_ns=len(log), epoch=epoch, durable=0)[0])
    return log


OURS = log_of((1, "a"), (1, "b"), (2, "c"))


def decide(
    entries: Sequence[Entry], *, epoch: int = 2, promise: int = 2, log: Sequence[Entry] = OURS, start: int = 1
) -> Verdict:
    return decide_append(
        entries, epoch=epoch, promise=promise, last=log[-1], own=lambda i: log[i] if i >= start else None
    )


# ---- Open


def meta(leader: int, epoch: int) -> PartitionMeta:
    return PartitionMeta(leader=leader, epoch=epoch)


@pytest.mark.parametrize(
    ("epoch", "promise", "record", "expected"),
    [
        (5, 5, meta(1, 5), Accepted()),
        (5, 5, meta(1, 4), Accepted()),
        (5, 5, None, Accepted()),
        (5, 4, meta(1, 5), PromiseNeeded(5)),
        (5, 6, meta(1, 5), Fenced(6)),
        (5, 4, meta(9, 6), Fenced(6)),
        (5, 5, meta(9, 6), Fenced(6)),
    ],
)
def test_an_epoch_is_accepted_promised_or_fenced(
    epoch: int, promise: int, record: PartitionMeta | None, expected: object
) -> None:
    assert decide_open(epoch=epoch, leader=1, promise=promise, meta=record) == expected


@pytest.mark.parametrize(
    ("promise", "record"), [(4, None), (4, meta(1, 4)), (4, meta(9, 5)), (5, meta(9, 5)), (4, meta(1, 3))]
)
def test_nobody_is_promised_an_epoch_on_his_own_word(promise: int, record: PartitionMeta | None) -> None:
    assert isinstance(decide_open(epoch=5, leader=1, promise=promise, meta=record), NotConfirmed)


def test_two_do_not_lead_in_one_epoch() -> None:
    assert isinstance(decide_open(epoch=5, leader=1, promise=5, meta=None, leading=5), NotConfirmed)
    assert decide_open(epoch=6, leader=1, promise=5, meta=meta(1, 6), leading=5) == PromiseNeeded(6)


# ---- Append


def test_what_follows_is_appended() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "c"), (2, "d"), (2, "e"))
    assert decide(theirs[4:]) == Append(0)
    assert decide(theirs[2:]) == Append(2)
    assert decide(theirs[1:]) == Append(3)


def test_what_is_here_is_a_duplicate() -> None:
    assert decide(OURS[1:]) == Duplicate()
    assert decide(OURS[2:3]) == Duplicate()
    assert decide([]) == Duplicate()


def test_an_empty_log_takes_the_first_batch() -> None:
    assert decide(OURS[1:], log=OURS[:1]) == Append(0)


def test_the_same_numbers_with_another_content_are_no_duplicate() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "x"), (2, "y"))
    verdict = decide(theirs[3:])
    assert isinstance(verdict, Mismatch)
    assert verdict.log_id == 3


def test_the_same_content_behind_another_past_is_no_duplicate() -> None:
    theirs = log_of((1, "a"), (1, "x"), (2, "c"))
    assert isinstance(decide(theirs[3:]), Mismatch)


def test_what_goes_on_from_another_entry_is_a_mismatch() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "x"), (2, "y"))
    verdict = decide(theirs[4:])
    assert isinstance(verdict, Mismatch)
    assert "another 3" in verdict.why


def test_a_hole_is_not_jumped() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "c"), (2, "d"), (2, "e"))
    assert decide(theirs[5:]) == Gap(4)
    assert isinstance(decide([theirs[3], theirs[5]]), Mismatch)
    assert isinstance(decide([theirs[4], theirs[4]]), Mismatch)


def test_an_entry_of_an_epoch_above_the_senders_is_refused() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "c"), (3, "d"))
    assert isinstance(decide(theirs[4:]), Mismatch)
    assert isinstance(decide(theirs[1:], log=theirs), Mismatch)


def test_the_epoch_is_compared_before_anything_else() -> None:
    assert decide(OURS[1:], epoch=1, promise=2) == Fenced(2)
    assert decide(OURS[1:], epoch=3, promise=2) == NotOpened(2)


def test_what_retention_removed_is_not_compared() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "c"), (2, "d"))
    assert decide(theirs[1:], start=3) == Append(3)


@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("ab"), max_size=6), st.data())
def test_a_run_is_taken_only_if_the_logs_become_equal(ours: list[str], theirs: list[str], data: st.DataObject) -> None:
    log = log_of(*((1, content) for content in ours))
    other = log_of(*((1, content) for content in theirs))
    first = data.draw(st.integers(1, len(other)))
    run = other[first:]
    match decide(run, log=log):
        case Append(index):
            assert (log + run[index:])[: len(other)] == other
            assert run[index].log_id == len(log)
        case Duplicate():
            assert all(log[entry.log_id] == entry for entry in run)
        case Gap(end):
            assert end == len(log) < first
        case Mismatch(log_id):
            assert log[: log_id + 1] != other[: log_id + 1]
        case other_verdict:
            pytest.fail(f"{other_verdict}")


def differs(entries: Sequence[Entry], *, log: Sequence[Entry] = OURS, start: int = 1) -> int | None:
    return first_difference(entries, last=log[-1], own=lambda i: log[i] if i >= start else None)


def test_where_our_log_is_another_one_is_known_from_what_did_not_fit() -> None:
    theirs = log_of((1, "a"), (1, "x"), (2, "c"), (2, "d"))
    assert differs(theirs[1:]) == 2
    assert differs(theirs[3:]) == 3, "the chain tells of what came before"
    assert differs(theirs[4:]) == 3
    assert differs(theirs[1:], start=3) == 3, "what retention removed is not compared"


def test_a_run_that_is_wrong_in_itself_says_nothing_about_our_log() -> None:
    theirs = log_of((1, "a"), (1, "b"), (2, "c"), (2, "d"), (2, "e"))
    assert differs(theirs[5:]) is None, "a hole"
    assert differs([theirs[4], theirs[4]]) is None
    assert differs(OURS[1:]) is None


# ---- the leader's side


def leader_says(end: int, chain: int, start: int = 1) -> bool:
    return same_past(end=end, chain=chain, own_start=start, own_end=len(OURS), before=lambda log_id: OURS[log_id - 1])


def test_a_follower_with_a_beginning_of_our_log_is_told_from_others() -> None:
    for end in range(1, 5):
        assert leader_says(end, OURS[end - 1].chain)
        assert not leader_says(end, OURS[end - 1].chain ^ 1)
    assert not leader_says(5, OURS[3].chain), "it has more than we do"


def test_before_our_start_nobody_can_tell() -> None:
    assert leader_says(3, OURS[2].chain, start=3)
    assert not leader_says(2, OURS[1].chain, start=3)


# ---- cutting


def test_what_is_committed_is_never_cut() -> None:
    check_cut(7, committed=7)
    check_replacement(7, committed=7)
    with pytest.raises(AssertionError, match="below 8 is committed"):
        check_cut(7, committed=8)
    with pytest.raises(AssertionError, match="below 8 is committed"):
        check_replacement(7, committed=8)
