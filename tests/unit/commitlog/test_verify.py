"""Verifying and dumping a whole log."""

from __future__ import annotations

import pytest

from nsqha import hot
from nsqha.commitlog.corruption.verify import Verification, checks, verify
from nsqha.commitlog.entry import ENTRY_BYTES, Place, next_entry
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.reading.dump import dump
from nsqha.frames import CHANNELS, PROGRESS, control_frame
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import SECOND, add, event, new_log, roll

TINY = LogLimits(segment_bytes=600, commitlog_bytes=1 << 20)


def built() -> tuple[SimStorage, PartitionLog]:
    storage = SimStorage()
    log = new_log(storage, limits=TINY)
    for n in range(20):
        add(log, b"a" * n or b"0", b"bb", events=event() if n % 4 == 0 else b"")
        if n % 5 == 0:
            add(log, events=event(b"alone"))
        if log.needs_roll:
            roll(log)
    log.shelf.clear()
    return storage, log


def ranges(found: Verification) -> list[tuple[int, int]]:
    return [(problem.first.log_id, problem.end.log_id) for problem in found.problems]


def test_a_good_log() -> None:
    _, log = built()
    seen: list[tuple[int, int]] = []
    found = verify(log, lambda done, total: seen.append((done, total)))
    assert (found.start, found.end) == (log.start, log.end)
    assert (found.batches, found.messages, found.size) == (24, 40, log.end.position)
    assert not found.problems
    assert seen[-1] == (log.end.position, log.end.position) and seen == sorted(seen)


def test_an_empty_log() -> None:
    assert verify(new_log(SimStorage())) == Verification(Place(1, 0, 0), Place(1, 0, 0), 0, 0, 0, ())


def test_one_wrong_bit_anywhere_is_found() -> None:
    storage, log = built()
    for path, data in storage.contents().items():
        for byte in range(0, len(data), 7):
            storage.flip(path, byte * 8 + byte % 8)
            assert verify(log).problems, f"bit flipped in byte {byte} of {path}"
            storage.flip(path, byte * 8 + byte % 8)
    assert not verify(log).problems


def test_every_problem_is_told_and_the_rest_is_still_checked() -> None:
    storage, log = built()
    pair = log.files.pair_of(3)
    storage.flip(pair.path(".segment"), (log.entry(3).position - pair.position + 20) * 8)
    pair = log.files.pair_of(9)
    for log_id in (9, 10):
        assert log.files.pair_of(log_id) is pair
        storage.flip(pair.path(".commitlog"), pair.slot(log_id) * 8)
    found = verify(log)
    assert ranges(found) == [(3, 4), (9, 11)]
    assert found.batches == 24 - 3


def test_a_lost_commitlog_is_one_problem() -> None:
    storage, log = built()
    pair = log.files.pairs[1]
    file = storage.open(pair.path(".commitlog"))
    file.truncate(ENTRY_BYTES)
    end = log.pairs[1].end.log_id
    assert ranges(verify(log)) == [(pair.first.log_id, end)]


def test_an_entry_that_was_replaced_breaks_the_chain() -> None:
    storage, log = built()
    pair = log.files.pair_of(4)
    forged = log.entry(4)._replace(timestamp_ns=log.entry(4).timestamp_ns + 1)
    storage.open(pair.path(".commitlog")).pwrite(forged.encode(), pair.slot(4))
    assert (4, 5) in ranges(verify(log))


def test_a_last_entry_that_was_replaced() -> None:
    storage, log = built()
    last = log.last
    assert last is not None
    forged = last._replace(durable=last.durable - 1)  # neither its chain nor anything behind it tells
    pair = log.files.pair_of(last.log_id)
    storage.open(pair.path(".commitlog")).pwrite(forged.encode(), pair.slot(last.log_id))
    assert ranges(verify(log)) == [(last.log_id, last.log_id + 1)]


@pytest.mark.parametrize("data", [hot.frame(b"x") + b"abc", hot.frame(b"x") * 2, event(), b"\0\0\0\1\0\0\0\2x"])
def test_frames_that_are_not_what_the_entry_says(data: bytes) -> None:
    storage = SimStorage()
    log = new_log(storage)
    log.append(data, count=1, flags=0, timestamp_ns=1, epoch=1, durable=1)
    (problem,) = verify(log).problems
    assert "frames" in problem.why


def test_a_scrub_can_pause() -> None:
    _, log = built()
    steps = checks(log, 1, log.end.log_id)
    assert next(steps).end.log_id == 2
    assert sum(step.messages for step in steps) == 38


def test_a_log_in_words() -> None:
    log = new_log(SimStorage())
    add(log, b"hello", b"you", events=control_frame(CHANNELS, b"c") + control_frame(40, b"later"))
    add(log, events=control_frame(PROGRESS, b"p"))
    first, second = dump(log, 1, 10)
    assert [(f.type, f.position, f.payload) for f in first.frames[:2]] == [
        ("channels", 0, b"c"),
        ("type 40", 9, b"later"),
    ]
    message = first.frames[3]
    assert (message.type, message.offset, message.payload) == ("message", 1, b"you")
    assert (message.message_id, message.timestamp_ns, message.attempts) == ("000c000000000001", SECOND, 1)
    assert message.position + message.size == second.entry.position if second.entry else False
    assert [f.type for f in second.frames] == ["progress"]
    assert [batch.frames for batch in dump(log, 1, 10, frames=False)] == [(), ()]


def test_a_dump_steps_over_what_can_not_be_read() -> None:
    storage, log = built()
    pair = log.files.pair_of(9)
    storage.flip(pair.path(".commitlog"), pair.slot(9) * 8)
    storage.flip(log.files.pair_of(3).path(".segment"), (log.entry(3).position - log.files.pair_of(3).position) * 8)
    batches = list(dump(log, 1, log.end.log_id))
    assert len(batches) == 24
    assert [n + 1 for n, batch in enumerate(batches) if batch.problem] == [3, 9]
    assert batches[2].entry is not None and batches[8].entry is None


def test_an_entry_of_another_log_does_not_fit() -> None:
    storage, log = built()
    pair = log.files.pair_of(6)
    entry = log.entry(6)
    data = bytes(log.read(entry))
    other, raw = next_entry(
        log.entry(5)._replace(chain=1),
        data,
        count=entry.count,
        flags=entry.flags,
        timestamp_ns=entry.timestamp_ns,
        epoch=entry.epoch,
        durable=1,
    )
    assert other.log_id == 6
    storage.open(pair.path(".commitlog")).pwrite(raw, pair.slot(6))
    assert (6, 7) in ranges(verify(log))
