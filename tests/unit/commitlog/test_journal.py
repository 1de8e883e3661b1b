"""The node journal: what is on the disk when, and what is believed of it after a crash."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import pytest

from nsqha.commitlog import journal as journal_module
from nsqha.commitlog import journal_record
from nsqha.commitlog.journal import CutIntent, NodeJournal, PartitionRecord, inspect
from nsqha.commitlog.recordfile import SECTOR, RecordFile
from nsqha.commitlog.storage import MemStorage, OsStorage, Storage
from nsqha.errors import AppendFailed, ConfigError

A = (7, 0)
B = (7, 1)
CUT = CutIntent(log_id=40, offset=900, position=90_000, epoch=3, chain=1 << 63)


def opened(storage: Storage, page_cache: str = "boot-1", seed: int = 1) -> NodeJournal:
    return NodeJournal.open(storage, "data", random.Random(seed), page_cache=page_cache)


def killed(journal: NodeJournal) -> None:
    """The process ends; whatever was not written is gone."""
    journal.close()


def image(storage: Storage) -> bytes:
    file = storage.open("data/journal")
    return file.pread(file.size(), 0)


def put_image(storage: Storage, data: bytes) -> None:
    file = storage.open("data/journal")
    file.truncate(0)
    file.pwrite(data, 0)


def names_trusted(journal: NodeJournal) -> bool:
    return all(record.log_uid_trusted for record in journal.records().values())


def promises_trusted(journal: NodeJournal) -> bool:
    return all(record.promise_trusted for record in journal.records().values())


def test_a_round_that_is_written_late_takes_back_nothing_that_was_taken_after_it() -> None:
    """A recovery on the disk thread takes and writes while an earlier round of the loop waits for that thread."""
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=5, log_uid=11)
    journal.stage(B, promise=1)
    journal.node.stage_revision(50)
    journal.take()
    journal.stage(A, promise=6)
    journal.node.stage_revision(60)
    journal.commit()
    journal.write()
    killed(journal)

    journal = opened(storage)
    first, second = journal.record(A), journal.record(B)
    assert first is not None and first.promise == 6
    assert second is not None and second.promise == 1
    assert journal.identity.revision_seen == 60


def test_a_write_makes_durable_what_another_thread_took_before_it() -> None:
    """A recovery has taken the loop's promise with its own cut and is not writing yet: the loop counts on its write."""
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=5, log_uid=11)
    journal.take()  # the recovery's
    assert journal.dirty, "it is on no disk yet"
    journal.take()  # the loop's, which finds nothing
    journal.write()
    assert inspect(storage, "data").partitions == {A: PartitionRecord(promise=5, log_uid=11)}
    assert not journal.dirty


def test_threads_that_stage_and_write_at_once_lose_nothing() -> None:
    """Each thread has partitions of its own, and finds on the disk what it has just written, whoever took it."""
    storage = MemStorage()
    journal = NodeJournal.open(storage, "data", random.Random(1), page_cache="boot", new_lock=threading.Lock)
    lost: list[tuple[int, int]] = []

    def live(topic: int) -> None:
        for epoch in range(1, 60):
            key = (topic, epoch % 3)
            journal.stage(key, promise=epoch)
            if journal.record(key) == PartitionRecord(promise=epoch):
                journal.stage_cut(key, CUT)
                journal.stage_cut_done(key)
            journal.commit()
            with journal._writing:  # no read of a record that is being written
                found = inspect(storage, "data").partitions.get(key)
            if found is None or found.promise != epoch:
                lost.append((topic, epoch))

    threads = [threading.Thread(target=live, args=(topic,)) for topic in (1, 2, 3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not lost
    assert {key: record.promise for key, record in inspect(storage, "data").partitions.items()} == {
        (topic, n): 57 + n for topic in (1, 2, 3) for n in range(3)
    }


def test_what_was_written_is_there_after_a_kill() -> None:
    storage = MemStorage()
    journal = opened(storage)
    node = journal.identity.node_uid
    journal.stage(A, promise=3, log_uid=11)
    journal.stage(A, local_durable=100)
    journal.stage_cut(A, CUT)
    journal.node.stage_revision(55)
    journal.commit()
    journal.stage(B, promise=9)
    killed(journal)

    journal = opened(storage)
    assert journal.records() == {A: PartitionRecord(promise=3, log_uid=11, local_durable=100, cut=CUT)}
    assert journal.record(B) is None
    assert journal.identity.node_uid == node
    assert journal.identity.revision_seen == 55
    assert not journal.created
    assert promises_trusted(journal)
    assert names_trusted(journal)


def test_what_is_staged_while_a_round_is_written_is_in_the_next_one() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=1)
    journal.take()
    journal.stage(A, promise=2)
    journal.stage(B, promise=5)
    assert journal.dirty
    journal.write()
    assert inspect(storage, "data").partitions == {A: PartitionRecord(promise=1)}
    journal.commit()
    assert not journal.dirty
    assert inspect(storage, "data").partitions == {A: PartitionRecord(promise=2), B: PartitionRecord(promise=5)}


def test_a_round_without_changes_writes_nothing() -> None:
    storage = MemStorage()
    journal = opened(storage)
    before = image(storage)
    journal.commit()
    journal.stage(A, promise=1)
    journal.commit()
    journal.stage(A, promise=1)
    assert not journal.dirty
    journal.node.stage_revision(0)
    assert not journal.dirty
    assert len(image(storage).rstrip(b"\0")) - len(before.rstrip(b"\0")) <= 2 * SECTOR


def test_a_partition_that_is_forgotten_stays_forgotten() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, log_uid=1)
    journal.commit()
    journal.forget(A)
    journal.forget(B)
    journal.commit()
    killed(journal)
    assert opened(storage).records() == {}


def test_a_partition_that_comes_back_after_it_was_forgotten_is_written_whole() -> None:
    storage = MemStorage()
    journal = opened(storage)
    for _ in range(2):
        journal.stage(A, log_uid=1, promise=3)
        journal.commit()
        assert inspect(storage, "data").partitions == {A: PartitionRecord(promise=3, log_uid=1)}
        journal.forget(A)
        journal.commit()


def test_a_promise_never_falls() -> None:
    journal = opened(MemStorage())
    journal.stage(A, promise=5)
    with pytest.raises(AssertionError):
        journal.stage(A, promise=4)


def test_only_a_cut_or_a_new_log_lowers_local_durable() -> None:
    journal = opened(MemStorage())
    journal.stage(A, log_uid=1, local_durable=100)
    with pytest.raises(AssertionError):
        journal.stage(A, local_durable=99)
    journal.stage_cut(A, CUT)
    journal.stage_cut_done(A)
    assert journal.record(A) == PartitionRecord(log_uid=1, local_durable=40)
    journal.stage(A, log_uid=2, local_durable=0)
    assert journal.record(A) == PartitionRecord(log_uid=2, local_durable=0)


def test_a_cut_above_what_is_durable_leaves_local_durable_alone() -> None:
    journal = opened(MemStorage())
    journal.stage(A, log_uid=1, local_durable=30)
    journal.stage_cut(A, CUT)
    journal.stage_cut_done(A)
    assert journal.record(A) == PartitionRecord(log_uid=1, local_durable=30)


def refuse(*_: object, **__: object) -> None:
    raise AppendFailed("no space left on device")


def test_a_round_that_the_disk_refuses_is_part_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=1, log_uid=5)
    with monkeypatch.context() as disk:
        disk.setattr(RecordFile, "append", refuse)
        with pytest.raises(AppendFailed):
            journal.commit()
    assert inspect(storage, "data").partitions == {}
    assert journal.dirty
    journal.stage(B, promise=2)
    journal.stage(A, promise=3)
    journal.commit()
    assert not journal.dirty
    assert inspect(storage, "data").partitions == journal.records()
    assert inspect(storage, "data").partitions[A] == PartitionRecord(promise=3, log_uid=5)


def test_without_room_for_a_new_file_the_old_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 8 * SECTOR)
    storage = MemStorage()
    journal = opened(storage)
    with monkeypatch.context() as disk:
        disk.setattr(RecordFile, "replace", refuse)
        for n in range(30):
            journal.stage(A, promise=n)
            journal.commit()
    assert inspect(storage, "data").partitions == {A: PartitionRecord(promise=29)}
    journal.stage(A, promise=30)
    journal.commit()
    assert RecordFile.inspect(storage, "data/journal").end == SECTOR
    assert inspect(storage, "data").partitions == {A: PartitionRecord(promise=30)}


# How the last life ended


def test_a_clean_stop_is_no_loss_under_whatever_boot() -> None:
    storage = MemStorage()
    opened(storage).stop()
    journal = opened(storage, "boot-2")
    assert journal.found is not None
    assert journal.found.node.clean
    assert not journal.page_cache_lost(A)


def test_a_kill_under_the_same_boot_loses_nothing_that_was_written() -> None:
    storage = MemStorage()
    killed(opened(storage))
    assert not opened(storage).page_cache_lost(A)


@pytest.mark.parametrize("page_cache", ["boot-2", ""])
def test_after_another_page_cache_every_log_is_distrusted_until_recovered(page_cache: str) -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=1, log_uid=11)
    journal.stage(B, promise=1, log_uid=12)
    journal.commit()
    killed(journal)
    journal = opened(storage, page_cache)
    assert journal.page_cache_lost(A) and journal.page_cache_lost(B)
    assert journal.page_cache_lost((99, 0))  # of which nothing is known
    killed(journal)
    # Killed before recovery was done, and now the page cache is the same.
    journal = opened(storage, page_cache)
    assert journal.page_cache_lost(A) and journal.page_cache_lost(B)
    journal.stage(A, recovered=True)
    journal.commit()
    killed(journal)
    # The other log was not opened by that life: its record of the metadata may come only now.
    journal = opened(storage, page_cache)
    assert journal.page_cache_lost(A) == (page_cache == "")
    assert journal.page_cache_lost(B)


def test_a_torn_last_record_costs_trust_in_promises_only_until_they_are_given_again() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=3, log_uid=11)
    journal.stage(B, promise=4, log_uid=12)
    journal.commit()
    kept = len(image(storage).rstrip(b"\0")) // SECTOR + 1
    for n in range(20):
        journal.stage((100 + n, 0), promise=8, log_uid=99)
    journal.commit()
    killed(journal)
    data = bytearray(image(storage))
    data[(kept + 1) * SECTOR : (kept + 2) * SECTOR] = bytes(SECTOR)
    put_image(storage, bytes(data))

    journal = opened(storage)
    assert journal.records() == {
        A: PartitionRecord(promise=3, log_uid=11, promise_trusted=False),
        B: PartitionRecord(promise=4, log_uid=12, promise_trusted=False),
    }
    assert not promises_trusted(journal)
    assert names_trusted(journal)
    journal.stage(A, promise=8)
    journal.commit()
    killed(journal)
    # The doubt about B outlives another crash.
    journal = opened(storage)
    assert journal.record(A) == PartitionRecord(promise=8, log_uid=11)
    assert not promises_trusted(journal)
    journal.stage(B, promise=8)
    assert promises_trusted(journal)


def test_damage_costs_trust_in_log_uids_until_they_are_new() -> None:
    storage = MemStorage()
    journal = opened(storage)
    for n in range(3):
        journal.stage((n + 1, 0), promise=n, log_uid=n + 1)
        journal.commit()
    killed(journal)
    data = bytearray(image(storage))
    data[2 * SECTOR + 100] ^= 4
    put_image(storage, bytes(data))

    journal = opened(storage)
    assert set(journal.records()) == {(1, 0), (3, 0)}
    assert not names_trusted(journal)
    assert not promises_trusted(journal)
    killed(journal)
    journal = opened(storage)
    assert not names_trusted(journal)
    for key in journal.records():
        journal.stage(key, log_uid=50, promise=9)
    journal.commit()
    killed(journal)
    journal = opened(storage)
    assert names_trusted(journal)
    assert promises_trusted(journal)


def test_a_lost_first_record_leaves_the_name_and_a_partition_without_log_uid() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.node.join(5)
    journal.stage(A, promise=2, log_uid=11)
    journal.commit()
    journal.stop()
    journal = opened(storage)
    journal.stage(A, local_durable=70)
    journal.commit()
    killed(journal)
    put_image(storage, bytes(SECTOR) + image(storage)[SECTOR:])
    again = opened(storage)
    assert again.identity == journal.identity
    assert again.record(A) == PartitionRecord(local_durable=70, promise_trusted=False, log_uid_trusted=False)
    assert not names_trusted(again)


def test_an_unreadable_journal_is_refused_and_left_as_it_is() -> None:
    storage = MemStorage()
    killed(opened(storage))
    put_image(storage, b"\xff" * 5000)
    for _ in range(2):
        with pytest.raises(ConfigError, match="data/journal is unreadable"):
            opened(storage)
    assert image(storage) == b"\xff" * 5000


def test_a_journal_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemStorage()
    monkeypatch.setattr(journal_record, "FORMAT", 2)
    killed(opened(storage))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="newer version"):
        opened(storage)


# Poison


def test_poison_stays_until_a_recovery_clears_it() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.node.poison("fdatasync of x failed:\n EIO")
    journal.node.poison("and then something else")
    journal.commit()
    killed(journal)
    journal = opened(storage)
    assert journal.node.poisoned == "fdatasync of x failed: EIO"
    journal.stop()
    journal = opened(storage)
    assert journal.node.poisoned
    journal.node.clear_poison()
    journal.stop()
    assert not opened(storage).node.poisoned


def test_after_a_failed_sync_what_was_not_synced_may_be_gone_under_the_same_boot_too() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=1, log_uid=11)
    journal.node.poison("fsync failed")
    journal.commit()
    journal.close()
    journal = opened(storage)
    assert journal.page_cache_lost(A)
    journal.node.clear_poison()
    journal.commit()
    journal.close()  # and dies before recovery has dealt with it
    journal = opened(storage)
    assert journal.page_cache_lost(A)
    journal.stage(A, recovered=True)
    journal.commit()
    journal.close()
    assert not opened(storage).page_cache_lost(A)


def test_poison_that_is_cleared_is_cleared_on_disk() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.node.poison("why")
    journal.commit()
    journal.node.clear_poison()
    journal.commit()
    assert not inspect(storage, "data").node.poison


# Who may use the directory


def test_a_second_process_is_kept_out_and_told_which_folder(tmp_path: Path) -> None:
    storage = OsStorage()
    folder = str(tmp_path / "data")
    journal = NodeJournal.open(storage, folder, random.Random(1))
    with pytest.raises(ConfigError, match="is in use by another process; stop that one, or choose another") as error:
        NodeJournal.open(storage, folder, random.Random(2))
    assert folder in str(error.value)
    journal.close()
    NodeJournal.open(storage, folder, random.Random(2)).close()


def test_a_refused_journal_lets_go_of_the_lock() -> None:
    storage = MemStorage()
    killed(opened(storage))
    good = image(storage)
    put_image(storage, b"nonsense")
    with pytest.raises(ConfigError):
        opened(storage)
    put_image(storage, good)
    opened(storage).close()


def test_a_data_directory_refuses_another_cluster() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.node.join(0xABC)
    journal.stop()
    journal = opened(storage)
    journal.node.join(0xABC, etcd_cluster_id=5)
    with pytest.raises(ConfigError, match="belongs to cluster 0000000000000abc"):
        journal.node.join(0xABD)
    with pytest.raises(ConfigError):
        journal.node.join(0xABC, etcd_cluster_id=6)
    journal.node.accept_metadata(cluster_id=0xABD, etcd_cluster_id=6, revision_seen=2)
    journal.stop()
    assert opened(storage).identity.cluster_id == 0xABD


def test_a_doubt_about_the_metadata_is_kept_until_they_are_accepted() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.node.join(0xABC, etcd_cluster_id=5)
    journal.node.follow_generation(3)
    journal.node.stage_revision(90)
    journal.node.doubt_metadata()
    journal.commit()
    journal.close()
    journal = opened(storage)
    journal.node.stage_revision(200)  # they look newer by now
    assert journal.identity.in_doubt and journal.identity.generation == 3
    journal.node.accept_metadata(cluster_id=0xABC, etcd_cluster_id=5, revision_seen=40, generation=4)
    journal.commit()
    journal.close()
    identity = opened(storage).identity
    assert (identity.in_doubt, identity.generation, identity.revision_seen) == (False, 4, 40)


# Size


def test_it_is_made_anew_when_it_has_grown_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 8 * SECTOR)
    monkeypatch.setattr(journal_module, "SLACK_BYTES", 2 * SECTOR)
    storage = MemStorage()
    journal = opened(storage)
    for n in range(1, 101):
        journal.stage(A, promise=n)
        journal.stage((n % 5, 3), local_durable=n)
        journal.commit()
        assert len(image(storage)) <= 20 * SECTOR
    expected = journal.records()
    assert inspect(storage, "data").partitions == expected
    killed(journal)
    assert opened(storage).records() == expected


def test_a_large_state_is_not_written_again_with_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 8 * SECTOR)
    storage = MemStorage()
    journal = opened(storage)
    for n in range(100):
        journal.stage((n + 1, 0), promise=1, log_uid=n + 1)
    journal.commit()
    names: list[str] = []
    monkeypatch.setattr(storage, "sync_dir", names.append)
    for n in range(40):
        journal.stage(A, promise=n + 1)
        journal.commit()
    assert len(names) <= 2


def test_a_round_of_many_partitions_writes_only_what_changed() -> None:
    storage = MemStorage()
    journal = opened(storage)
    for n in range(1000):
        journal.stage((n + 1, 0), promise=1, log_uid=(1 << 63) + n, local_durable=5)
    journal.commit()
    before = len(image(storage).rstrip(b"\0"))
    for n in range(1000):
        journal.stage((n + 1, 0), local_durable=1_000_000)
    journal.commit()
    assert len(image(storage).rstrip(b"\0")) - before < 60_000


# A start that may be refused


def test_a_start_that_is_refused_leaves_the_journal_as_it_was() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=4, log_uid=9)
    journal.commit()
    journal.stop()
    before = image(storage)
    refused = NodeJournal.look(storage, "data", random.Random(2), page_cache="boot-2")
    refused.node.join(0xC1)
    refused.close()
    assert image(storage) == before
    # The host is started again, too: a clean stop stays one, so nothing is doubted.
    journal = opened(storage, "boot-3")
    assert journal.found is not None and journal.found.node.clean
    assert not journal.page_cache_lost(A) and names_trusted(journal)


def test_a_refused_first_start_leaves_no_journal() -> None:
    storage = MemStorage()
    NodeJournal.look(storage, "data", random.Random(1)).close()
    assert not storage.exists("data/journal")
    assert opened(storage).created


def test_the_first_write_of_a_start_says_what_it_doubts() -> None:
    storage = MemStorage()
    journal = opened(storage)
    journal.stage(A, promise=4, log_uid=9)
    journal.commit()
    killed(journal)
    journal = NodeJournal.look(storage, "data", random.Random(2), page_cache="boot-2")
    assert journal.dirty
    journal.commit()
    assert not journal.dirty
    record = inspect(storage, "data").partitions[A]
    assert record.page_cache_lost and record.promise == 4
