"""What a round that was refused leaves to the next one."""

from __future__ import annotations

import pytest

from nsqha.commitlog.journal import JournalFile, JournalRound
from nsqha.commitlog.journal_record import NodeIdentity, NodeState, PartitionRecord, decode
from nsqha.commitlog.recordfile import SECTOR, RecordFile
from nsqha.commitlog.storage import MemStorage
from nsqha.errors import AppendFailed

NODE = NodeState(NodeIdentity(7), "boot", False, "")
ONE, TWO = (1, 0), (2, 0)


class RefusingFile:
    """A record file on a disk that may be full."""

    end = 0

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.full = False

    def append(self, payload: bytes) -> None:
        if self.full:
            raise AppendFailed("no space left")
        self.payloads.append(payload)


def written_to(file: RefusingFile | RecordFile) -> JournalFile:
    """A journal that has begun."""
    writer = JournalFile(lambda payload: file, NODE, {})  # type: ignore[arg-type, return-value]
    assert not writer.begun
    writer.write([])
    assert writer.begun
    return writer


def test_a_refused_round_is_part_of_the_next_one():
    file = RefusingFile()
    writer = written_to(file)
    file.full = True
    with pytest.raises(AppendFailed):
        writer.write([JournalRound({ONE: PartitionRecord(promise=3)}, NODE)])
    assert not writer.written
    file.full = False
    writer.write([JournalRound({TWO: PartitionRecord(promise=4)}, NODE)])
    assert {key: record.promise for key, record in writer.written.items()} == {ONE: 3, TWO: 4}
    assert len(file.payloads) == 1 and b"0000000000000001-0" in file.payloads[0]


def test_what_changes_nothing_is_not_written():
    file = RefusingFile()
    writer = written_to(file)
    writer.write([JournalRound({}, NODE)])
    writer.write([])
    assert not file.payloads


def test_a_file_that_has_grown_is_made_anew_of_what_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nsqha.commitlog.journal.REWRITE_BYTES", 8 * SECTOR)
    storage = MemStorage()
    storage.make_dirs("data")
    file = RecordFile.create(storage, "data/journal", b'{"format": 1}')
    writer = written_to(file)
    ends = []
    for promise in range(60):
        writer.write([JournalRound({ONE: PartitionRecord(promise=promise), TWO: PartitionRecord(promise=1)}, NODE)])
        writer.write([JournalRound({TWO: None}, NODE)])
        ends.append(file.end)
    assert max(ends) <= 8 * SECTOR and sorted(ends) != ends, "it was made anew"
    found = decode(RecordFile.inspect(storage, "data/journal"), "journal")
    assert found.partitions == writer.written == {ONE: PartitionRecord(promise=59)}
