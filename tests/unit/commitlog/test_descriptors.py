"""Too few descriptors at any step: that passes, so nothing is lost by it and nothing is closed for good."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from nsqha.commitlog.entry import ENTRY_BYTES
from nsqha.commitlog.journal import NodeJournal
from nsqha.commitlog.log import LogLimits, PartitionLog
from nsqha.commitlog.recordfile import RecordFile
from nsqha.errors import AppendFailed
from tests.sim.storage import SimStorage
from tests.unit.commitlog.logs import DIRECTORY, add, contents, new_log, reopen, roll, sync

LIMITS = LogLimits(segment_bytes=200)
MANY = 1000


def built(storage: SimStorage) -> PartitionLog:
    """Three pairs, the files of the last one open."""
    log = new_log(storage, limits=LIMITS, cache_bytes=1)
    for n in range(12):
        add(log, b"%d" % n * 20)
        if log.needs_roll:
            roll(log)
    sync(log)
    assert len(log.pairs) > 2
    for pair in log.files.pairs[:-1]:
        pair.close()
    log.files._open_old.clear()
    return log


@pytest.mark.parametrize("left", range(4))
def test_a_roll_leaves_the_old_files_in_use_and_no_names_behind(left: int) -> None:
    """A start must not find the log going on in files that nobody uses."""
    storage = SimStorage()
    log = new_log(storage)
    add(log, b"a")
    names = storage.list_dir(DIRECTORY)
    storage.descriptors = left
    if left < 3:
        with pytest.raises(AppendFailed, match="too many open files"):
            roll(log)
        assert storage.list_dir(DIRECTORY) == names
    else:
        roll(log)
    storage.descriptors = MANY
    add(log, b"b")
    sync(log)
    image = storage.crash(random.Random(left))
    assert [entry.log_id for entry, _ in contents(reopen(image, local_durable=3).log)] == [1, 2]


@pytest.mark.parametrize("left", range(6))
def test_a_cut_is_made_or_the_log_is_as_it_was(left: int) -> None:
    storage = SimStorage()
    log = built(storage)
    before, files = contents(log), storage.contents()
    for pair in log.files.pairs[:-1]:
        pair.close()
    log.files._open_old.clear()
    storage.descriptors = left
    try:
        log.cutting(log.files.pairs[0].first.log_id + 1)()
    except OSError as error:
        assert error.errno == errno.EMFILE and left < 3
        storage.descriptors = MANY
        assert contents(log) == before and storage.contents() == files
        add(log, b"on")
    else:
        storage.descriptors = MANY
        assert left >= 3 and contents(log) == before[:1]
        add(log, b"on")
    sync(log)
    end = log.end.log_id
    image = storage.crash(random.Random(left))
    assert contents(reopen(image, local_durable=end, limits=LIMITS).log) == contents(log)


@pytest.mark.parametrize("left", range(3))
def test_files_that_could_not_be_unlinked_go_later(left: int) -> None:
    storage = SimStorage()
    log = built(storage)
    log.forget_pairs(log.end)
    storage.descriptors = left
    try:
        log.unlink_some()
    except OSError as error:
        assert error.errno == errno.EMFILE
    storage.descriptors = MANY
    while log.unlink_some():
        pass
    assert len(storage.list_dir(DIRECTORY)) == 2


def test_what_rebuilds_entries_opens_its_files_before_it_is_handed_to_another_thread() -> None:
    storage = SimStorage()
    log = built(storage)
    before = contents(log)
    pair = log.files.pairs[0]
    pair.commitlog.pwrite(bytes(ENTRY_BYTES), ENTRY_BYTES)
    assert log.repair.rebuilding(2, 3) is None
    for left in range(2):
        storage.descriptors = left
        with pytest.raises(OSError, match="too many open files"):
            log.repair.rebuilding(1, 3)
        assert storage.descriptors == left
    storage.descriptors = 2
    rebuild = log.repair.rebuilding(1, 3)
    assert rebuild is not None
    storage.descriptors = 0
    assert (done := rebuild.run()) is not None and done.what == "proven" and storage.descriptors == 2
    storage.descriptors = MANY
    assert [(entry._replace(durable=0), data) for entry, data in contents(log)] == [
        (entry._replace(durable=0), data) for entry, data in before
    ]


@pytest.mark.parametrize("left", range(3))
def test_a_record_file_is_made_anew_or_goes_on(left: int) -> None:
    storage = SimStorage()
    storage.make_dirs("d")
    file = RecordFile.create(storage, "d/f", b"one")
    storage.descriptors = left
    if left < 2:
        with pytest.raises(AppendFailed):
            file.replace(b"two")
    else:
        file.replace(b"two")
    assert storage.list_dir("d") == ["f"]
    storage.descriptors = MANY
    file.append(b"three")
    image = storage.crash(random.Random(left))
    assert RecordFile.inspect(image, "d/f").payloads == (b"one" if left < 2 else b"two", b"three")


@pytest.mark.parametrize("write", [NodeJournal.commit, NodeJournal.stop])
def test_the_journal_goes_on_in_its_old_file(write: Callable[[NodeJournal], None]) -> None:
    storage = SimStorage()
    journal = NodeJournal.open(storage, "data", random.Random(1))
    journal._file._rewrite_at = 0
    journal.stage((1, 0), promise=7, log_uid=5)
    storage.descriptors = 0
    write(journal)
    image = storage.crash(random.Random(2))
    record = NodeJournal.open(image, "data", random.Random(3)).record((1, 0))
    assert record is not None and record.promise == 7 and record.promise_trusted
