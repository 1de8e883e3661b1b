"""The log from files of a node that does not run: what is pinned, and what is read of it."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT
from nsqha.frames import HAS_EVENTS, PROGRESS, control_frame
from pyspark_nsqha.model import Gone, NotVerified, PinnedPartition, ReadFailed
from pyspark_nsqha.reading import fetch
from pyspark_nsqha.reading.files import pins
from tests.unit.spark.stored import ID_BASE, IDENTITY, Stored, joined


@pytest.fixture
def log(tmp_path: Path) -> Stored:
    """30 batches in three pairs."""
    log = Stored(tmp_path)
    for _ in range(3):
        log.write(10)
        if log.log.end.log_id < 30:
            log.roll()
    return log


def pin(log: Stored) -> PinnedPartition:
    (found,) = pins(str(log.data))
    return found


def test_all_of_a_log_is_pinned(log: Stored) -> None:
    found = pin(log)
    last = log.log.entry(30)
    assert found.identity == IDENTITY
    assert (found.start.log_id, found.start.offset) == (1, 0)
    assert (found.end.log_id, found.end.offset, found.end.timestamp_ns) == (31, 60, last.timestamp_ns)
    assert (found.epoch, found.chain) == (last.epoch, last.chain)
    assert found.cuts[0] == found.start and found.cuts[-1] == found.end
    assert found.path == str(log.path)


@pytest.mark.parametrize("run_bytes", [1, 2000, 1 << 20])
def test_ranges_come_as_they_lie_in_the_files_over_all_pairs(log: Stored, run_bytes: int) -> None:
    for first, end in (1, 31), (1, 11), (5, 26), (10, 12), (11, 12), (30, 31):
        split = log.split(first=first, end=end, path=str(log.path))
        assert joined(fetch.runs(split, run_bytes=run_bytes)) == log.content(first, end)


def test_runs_have_whole_batches_of_about_the_bytes_asked_for(log: Stored) -> None:
    size = log.log.entry(1).size
    runs = fetch.runs(log.split(path=str(log.path)), run_bytes=3 * size)
    assert [len(run.entries) // ENTRY_BYTES for run in runs] == [3, 3, 3, 1] * 3


def test_a_lost_batch_comes_without_frames(log: Stored) -> None:
    for lost in 1, 5, 6, 10, 30:
        log.lose(lost)
    entries, frames = joined(fetch.runs(log.split(path=str(log.path)), run_bytes=2000))
    assert (entries, frames) == log.content()
    assert b"\xee\xee\xee" not in frames and len(entries) == 30 * ENTRY_BYTES


def test_a_range_that_does_not_verify_is_read_once_more(log: Stored) -> None:
    runs = fetch.runs(log.split(path=str(log.path)), run_bytes=1)
    assert next(runs).first_log_id == 1
    assert runs.retry_other("it does not verify")
    assert next(runs).first_log_id == 1
    assert not runs.retry_other("it does not verify")
    assert next(runs).first_log_id == 2


def test_a_folder_that_a_process_has_is_refused(log: Stored) -> None:
    path = log.data / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert pins(str(log.data))  # the file alone says nothing
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(ReadFailed, match=r"a broker uses this folder; .* stop it first"):
            pins(str(log.data))
    finally:
        os.close(fd)


def test_a_folder_without_logs_is_refused_and_what_was_meant_is_named(log: Stored) -> None:
    with pytest.raises(ReadFailed, match="its folders data have one: name one of them"):
        pins(str(log.folder))
    with pytest.raises(ReadFailed, match="nothing: No such file or directory"):
        pins(str(log.folder / "nothing"))


def test_only_what_is_wanted_is_looked_at(log: Stored) -> None:
    assert pins(str(log.data), lambda topic, partition: topic == "others") == ()
    assert len(pins(str(log.data), lambda topic, partition: (topic, partition) == ("orders", 3))) == 1


def test_two_lives_of_a_topic_are_refused(log: Stored) -> None:
    shutil.copytree(log.path.parent, log.path.parent.parent / f"orders-{7:016x}")
    with pytest.raises(ReadFailed, match="are of two topics with one name"):
        pins(str(log.data))


def test_a_torn_end_is_left_out(log: Stored) -> None:
    pair = log.log.files.pair_of(30)
    entry = log.log.entry(29)
    pair.segment.pwrite(b"\xee", entry.position - pair.position + 40)
    found = pin(log)
    assert found.end.log_id == 29 and found.chain == log.log.entry(28).chain
    pair.commitlog.truncate(pair.slot(29) - 7)
    assert pin(log).end.log_id == 28


def test_damage_below_what_was_durable_does_not_end_a_log(log: Stored) -> None:
    """Recovery keeps it and so does a reader, who fails where it is."""
    pair = log.log.files.pair_of(30)
    log.log.append(
        bytearray(control_frame(PROGRESS, b"")), count=0, flags=HAS_EVENTS, timestamp_ns=10**12, epoch=1, durable=31
    )
    pair.segment.pwrite(b"\xee", log.log.entry(29).position - pair.position + 40)
    assert pin(log).end.log_id == 32


def test_the_id_of_a_log_without_messages_is_nothing(tmp_path: Path) -> None:
    log = Stored(tmp_path)
    assert pin(log).start == pin(log).end
    log.log.append(
        bytearray(control_frame(PROGRESS, b"")), count=0, flags=HAS_EVENTS, timestamp_ns=10**9, epoch=1, durable=1
    )
    assert pin(log).identity.id_base == 0
    log.write(1)
    assert pin(log).identity.id_base == ID_BASE


def test_what_retention_took_is_gone(log: Stored) -> None:
    pair = log.log.files.pair_of(1)
    for suffix in COMMITLOG, SEGMENT:
        os.unlink(pair.path(suffix))
    with pytest.raises(Gone, match=r"orders/3 offsets \[0, 60\), from log id 1 in .*: the log starts after it"):
        joined(fetch.runs(log.split(path=str(log.path))))
    split = log.split(first=11, path=str(log.path))
    assert joined(fetch.runs(split)) == log.content(11)


def test_entries_that_lie_about_their_place_do_not_verify(log: Stored) -> None:
    pair, entry = log.log.files.pair_of(5), log.log.entry(5)
    pair.commitlog.pwrite(entry._replace(position=1 << 62).encode(), pair.slot(5))
    with pytest.raises(NotVerified, match="from log id 1"):
        joined(fetch.runs(log.split(path=str(log.path))))
    pair.commitlog.pwrite(entry._replace(size=(1 << 32) - 1).encode(), pair.slot(5))
    with pytest.raises(NotVerified, match="its segment ends before it"):
        joined(fetch.runs(log.split(path=str(log.path))))

    pair.commitlog.pwrite(entry.encode(), pair.slot(5))
    pair, entry = log.log.files.pair_of(15), log.log.entry(15)
    pair.commitlog.pwrite(entry._replace(position=0).encode(), pair.slot(15))  # before its file
    with pytest.raises(NotVerified, match="or its entry is damaged"):
        joined(fetch.runs(log.split(path=str(log.path))))


def test_what_is_read_once_more_is_read_from_the_file(log: Stored) -> None:
    pair, entry = log.log.files.pair_of(2), log.log.entry(2)
    split = log.split(first=2, end=3, path=str(log.path))
    pair.commitlog.pwrite(b"\xee", pair.slot(2) + 60)
    runs = fetch.runs(split)
    assert bytes(next(runs).entries) != entry.encode()
    pair.commitlog.pwrite(entry.encode(), pair.slot(2))  # mended
    assert runs.retry_other("its CRC is wrong")
    assert bytes(next(runs).entries) == entry.encode()


def test_a_short_file_does_not_verify(log: Stored) -> None:
    pair = log.log.files.pair_of(30)
    pair.segment.truncate(pair.segment.size() - 1)
    with pytest.raises(NotVerified, match="its segment ends before it"):
        joined(fetch.runs(log.split(path=str(log.path)), run_bytes=1000))
    pair.commitlog.truncate(pair.slot(30))
    with pytest.raises(NotVerified, match="its commitlog ends before it"):
        joined(fetch.runs(log.split(path=str(log.path)), run_bytes=1000))
