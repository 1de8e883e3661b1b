"""Which pair has what, which files stay open, and which pairs go."""

from __future__ import annotations

from nsqha.commitlog.entry import Place
from nsqha.commitlog.files.pair_list import OPEN_PAIRS, PairList
from nsqha.commitlog.storage import MemStorage
from tests.unit.commitlog.logs import add, new_log, roll


def list_of(pairs: int, batches: int = 2) -> PairList:
    log = new_log(MemStorage())
    for n in range(pairs):
        if n:
            roll(log)
        for _ in range(batches):
            add(log, b"one")
    return log.files


def test_each_log_id_has_its_pair():
    files = list_of(3)
    assert [files.pairs.index(files.pair_of(log_id)) for log_id in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert files.pair_of(7) is files.pairs[-1], "the next one goes into the last pair"
    assert [files.last_of(pair).log_id for pair in files.pairs] == [2, 4, 6]


def test_few_old_pairs_stay_open():
    files = list_of(OPEN_PAIRS + 4)
    for pair in files.pairs:
        files.use(pair)
        assert pair.segment and pair.commitlog
    assert [pair.is_open for pair in files.pairs] == [False] * 3 + [True] * (OPEN_PAIRS + 1)


def test_the_first_entry_that_is_wanted_is_found():
    files = list_of(2, batches=9)
    pair = files.pairs[0]
    for wanted in range(1, 10):
        first, entry = files.first_where(pair, lambda entry: entry.log_id >= wanted)  # noqa: B023
        assert entry is not None and first == entry.log_id == wanted
    assert files.first_where(pair, lambda entry: entry.log_id >= 10) == (10, None)


def test_wherever_it_is_looked_for_first_the_same_one_is_found():
    files = list_of(2, batches=9)
    pair = files.pairs[0]
    for wanted in range(1, 11):
        found = files.first_where(pair, lambda entry: entry.log_id >= wanted)  # noqa: B023
        for guess in range(-3, 25):
            assert files.first_where(pair, lambda entry: entry.log_id >= wanted, guess) == found  # noqa: B023


def test_a_good_guess_needs_few_looks():
    files = list_of(1, batches=1000)
    pair = files.pairs[0]
    for wanted in (1, 2, 500, 999, 1000):
        for off in (-3, 0, 3):
            looks: list[int] = []
            files.first_where(pair, lambda entry: looks.append(entry.log_id) or entry.log_id >= wanted, wanted + off)  # type: ignore[func-returns-value]  # noqa: B023
            assert len(looks) <= 6


def test_pairs_go_that_end_below_both_places_but_never_the_last():
    files = list_of(3)
    second, third = files.pairs[1:]
    assert files.forget(Place(0, second.first.offset, second.first.position - 1)) == []
    assert len(files.forget(second.first)) == 1
    assert files.pairs == [second, third]
    assert files.forget(Place(99, 1 << 40, 1 << 40)) == [second]
    assert files.pairs == [third]


def test_a_cut_takes_the_pairs_behind_out():
    files = list_of(3)
    first, *behind = files.pairs
    last = first.read_entry(1)
    assert last is not None
    assert files.end_with(first, last) == behind
    assert files.pairs == [first] and files.last_of(first) == last
    assert not any(pair.is_open for pair in behind)
