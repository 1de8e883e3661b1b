"""The cache of batches: bounded for the node, right for every log."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.commitlog.files.pairs import LogIdentity
from nsqha.commitlog.log import PartitionLog
from nsqha.commitlog.reading.reader import BATCH_OVERHEAD, JOIN_BYTES, RETRIES_SHARE, RETRY_OVERHEAD, BatchCache
from nsqha.commitlog.storage import MemStorage
from tests.unit.commitlog.logs import SMALL, add, event, roll


def logs(cache: BatchCache, n: int) -> list[PartitionLog]:
    storage = MemStorage()
    return [PartitionLog.create(storage, f"d/{i}", LogIdentity(1, i), cache=cache, limits=SMALL) for i in range(n)]


def held(cache: BatchCache) -> int:
    return cache.tail_bytes + cache.runs_bytes + cache.retries_bytes


def test_the_bound_holds_over_all_logs() -> None:
    cache = BatchCache(600_000)
    three = logs(cache, 3)
    rng = random.Random(1)
    for _ in range(2500):
        log = rng.choice(three)
        add(log, b"x" * rng.randrange(1, 2000))
        if rng.random() < 0.3:
            log.batch_at(rng.randrange(log.end.offset))
        log.shelf.keep_retry(rng.randrange(log.end.offset))
        assert held(cache) <= 600_000
        assert cache.retries_bytes <= 600_000 // RETRIES_SHARE


def test_the_newest_batch_stays_even_if_it_is_larger_than_the_cache() -> None:
    cache = BatchCache(1000)
    (log,) = logs(cache, 1)
    add(log, b"small")
    entry = add(log, b"x" * 5000)
    batch = log.shelf.by_log_id(entry.log_id)
    assert batch is not None and log.batch_at(1) is batch
    assert log.shelf.by_log_id(1) is None
    add(log, b"next")
    assert log.shelf.by_log_id(entry.log_id) is None


def test_small_batches_of_the_tail_are_joined_for_a_reader_that_is_behind() -> None:
    cache = BatchCache(1 << 20)
    (log,) = logs(cache, 1)
    for _ in range(1000):
        add(log, b"x" * 100)
    reads = 0
    offset = 0
    while (batch := log.batch_at(offset)) is not None:
        assert batch.locate(offset) == (offset - batch.first_offset) * 134
        offset = batch.end_offset
        reads += 1
    assert reads <= 1000 * 134 // JOIN_BYTES + 2


def test_the_newest_batch_is_given_as_it_is() -> None:
    (log,) = logs(BatchCache(1 << 20), 1)
    add(log, b"a")
    newest = add(log, b"b", b"c")
    for offset in (1, 2):
        batch = log.batch_at(offset)
        assert batch is not None and batch.entry == newest and batch.end_offset == 3


def test_a_message_that_comes_again_soon_is_kept_until_it_is_asked_for() -> None:
    cache = BatchCache(100_000)
    (log,) = logs(cache, 1)
    add(log, *[b"%d" % n for n in range(100)])
    log.shelf.keep_retry(7)
    log.shelf.keep_retry(7)
    for _ in range(100):
        add(log, b"x" * 2000)
    assert log.shelf.by_log_id(1) is None, "the batch itself is in memory no longer"
    log.shelf.keep_retry(8)
    assert cache.retries_bytes == 4 + 30 + 1 + RETRY_OVERHEAD, "nothing is read for it"
    assert log.shelf.take_retry(7) == log.message(7), "once from memory, then from the file"
    assert log.shelf.take_retry(7) is None and cache.retries_bytes == 0


def test_a_message_that_is_kept_is_forgotten_with_what_is_cut() -> None:
    (log,) = logs(BatchCache(100_000), 1)
    add(log, b"a")
    add(log, b"old")
    log.shelf.keep_retry(1)
    log.cutting(2)()
    add(log, b"new")
    assert log.message(1)[34:] == b"new"


def test_a_cut_forgets_what_it_removes() -> None:
    cache = BatchCache(1 << 20)
    (log,) = logs(cache, 1)
    for n in range(10):
        add(log, b"%d" % n)
    assert log.batch_at(2) is not None, "a joined run over everything"
    log.cutting(5)()
    for _ in range(3):
        add(log, b"new", epoch=2)
    batch = log.batch_at(4)
    assert batch is not None
    position = batch.locate(4)
    assert bytes(batch.data[position + 34 : position + 37]) == b"new"
    log.close()
    assert held(cache) == 0


def test_places_are_found_forwards_and_backwards_around_control_frames() -> None:
    (log,) = logs(BatchCache(1 << 20), 1)
    add(log, b"a" * 5, b"b" * 7, b"c", events=event(b"one") + event(b"two"))
    batch = log.batch_at(0)
    assert batch is not None
    first = 2 * 11
    places = {0: first, 1: first + 39, 2: first + 39 + 41}
    for offset in (0, 2, 1, 0, 1, 2, 2):
        assert batch.locate(offset) == places[offset]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3000, 20_000]))
def test_a_cached_log_answers_as_one_that_is_not(seed: int, cache_bytes: int) -> None:
    rng = random.Random(seed)
    cache = BatchCache(cache_bytes)
    two = logs(cache, 2)
    truth: list[list[bytes]] = [[], []]
    for _ in range(60):
        i = rng.randrange(2)
        log = two[i]
        choice = rng.random()
        if choice < 0.5:
            bodies = [rng.randbytes(rng.choice((1, 300, 3000))) for _ in range(rng.randrange(3))]
            add(log, *bodies, events=event() if not bodies else b"", epoch=(log.last.epoch if log.last else 1))
            truth[i] += bodies
        elif choice < 0.6 and log.needs_roll:
            roll(log)
        elif choice < 0.65 and log.end.log_id > log.start.log_id:
            log_id = rng.randrange(log.start.log_id, log.end.log_id)
            log.cutting(log_id)()
            del truth[i][log.end.offset :]
        elif truth[i]:
            offset = rng.randrange(len(truth[i]))
            log.shelf.keep_retry(rng.randrange(len(truth[i])))
            assert log.message(offset)[34:] == truth[i][offset]
            batch = log.batch_at(offset)
            assert batch is not None
            position = batch.locate(offset)
            body = truth[i][offset]
            assert bytes(batch.data[position + 34 : position + 34 + len(body)]) == body
        assert cache.tail_bytes >= 0 and cache.runs_bytes >= 0 and cache.retries_bytes >= 0
    tails = sum(len(shelf._tail) for shelf in (two[0].shelf, two[1].shelf))
    sizes = [len(b.data) for log in two for b in log.shelf._tail.values()]
    assert cache.tail_bytes == sum(sizes) + BATCH_OVERHEAD * tails
    for log in two:
        log.close()
    assert held(cache) == 0
