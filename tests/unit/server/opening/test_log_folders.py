"""Where logs lie, and how their files go: some at a time, and the folder last."""

from __future__ import annotations

from nsqha.commitlog.files.pairs import COMMITLOG, SEGMENT, file_name
from nsqha.commitlog.storage import MemStorage
from nsqha.election.model import TopicRecord
from nsqha.server.opening.log_folders import UNLINKED_AT_ONCE, LogFolders

RECORD = TopicRecord("..", 0x51, 3)


def test_a_name_that_means_another_folder_is_made_harmless_by_the_uid() -> None:
    assert LogFolders("data", MemStorage()).partition(RECORD, 2) == "data/topics/..-0000000000000051/2"


def test_the_log_of_an_ephemeral_topic_is_not_on_the_disk() -> None:
    storage = MemStorage()
    folders = LogFolders("data", storage)
    assert folders.storage_of(RECORD) is storage
    assert folders.storage_of(TopicRecord("t#ephemeral", 0x52, 3)) is not storage


def test_files_go_some_at_a_time_and_it_is_safe_to_repeat() -> None:
    storage = MemStorage()
    folders = LogFolders("data", storage)
    directory = folders.partition(RECORD, 0)
    storage.make_dirs(directory)
    for n in range(UNLINKED_AT_ONCE):
        for suffix in (SEGMENT, COMMITLOG):
            storage.open(f"{directory}/{file_name(n, suffix)}", create=True).close()
    assert folders.exists(RECORD, 0)
    steps = 0
    while folders.remove_partition(RECORD, 0):
        steps += 1
        assert folders.exists(RECORD, 0)
    assert steps == 3, "what marks a log that goes is the last of its files"
    assert not folders.exists(RECORD, 0)
    assert not folders.remove_partition(RECORD, 0) and not folders.remove("..", 0x51)
