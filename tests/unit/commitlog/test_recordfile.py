from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqha.commitlog.recordfile import SECTOR, RecordFile, encode, scan
from nsqha.commitlog.storage import Data, File, MemFile, MemStorage
from nsqha.errors import AppendFailed, Poisoned
from tests.sim.storage import SimStorage

TEXT = [b'{"a":1}', b"x" * 600, b"y" * 2000]


def file_of(*payloads: bytes) -> bytes:
    return b"".join(encode(payload, n) for n, payload in enumerate(payloads, 1))


def without_sector(data: bytes, number: int) -> bytes:
    return data[: number * SECTOR] + bytes(SECTOR) + data[(number + 1) * SECTOR :]


def flipped(data: bytes, bit: int) -> bytes:
    image = bytearray(data)
    image[bit >> 3] ^= 1 << (bit & 7)
    return bytes(image)


def test_records_are_read_back_in_order() -> None:
    found = scan(file_of(*TEXT))
    assert found.payloads == tuple(TEXT)
    assert (found.torn, found.damaged) == (False, False)
    assert found.end == len(file_of(*TEXT))


def test_preallocated_zeros_are_an_end_and_nothing_else() -> None:
    data = file_of(*TEXT)
    assert scan(data + bytes(9000)) == scan(data)


@pytest.mark.parametrize("sector", [0, 1, 3])
def test_a_last_record_that_misses_a_sector_is_torn(sector: int) -> None:
    data = file_of(*TEXT[:2])
    found = scan(data + without_sector(encode(TEXT[2], 3), sector) + bytes(4096))
    assert (found.payloads, found.torn, found.damaged, found.end) == (tuple(TEXT[:2]), True, False, len(data))


@pytest.mark.parametrize("size", [1, 100, 513, 1500])
def test_a_last_record_that_the_file_ends_in_is_torn(size: int) -> None:
    data = file_of(*TEXT[:2])
    found = scan(data + encode(TEXT[2], 3)[: size + -size % SECTOR])
    assert (found.payloads, found.torn, found.damaged) == (tuple(TEXT[:2]), True, False)


@pytest.mark.parametrize("size", [1, 10, 24, 25, 300, 511, 600, 1500, 2023])
def test_a_last_record_at_which_the_write_broke_off_is_torn(size: int) -> None:
    data = file_of(*TEXT[:2])
    found = scan(data + encode(TEXT[2], 3)[:size] + bytes(4096 - size))
    assert (found.payloads, found.torn, found.damaged) == (tuple(TEXT[:2]), True, False)


def test_a_whole_last_record_with_a_wrong_bit_is_damage() -> None:
    data = file_of(*TEXT)
    last = len(file_of(*TEXT[:2]))
    for bit in (8 * last, 8 * (last + 20), 8 * (last + 30), 8 * (last + 1999)):
        found = scan(flipped(data, bit))
        assert (found.payloads, found.torn, found.damaged) == (tuple(TEXT[:2]), False, True)


def test_a_bad_record_before_the_last_is_damage_and_the_rest_is_read() -> None:
    found = scan(without_sector(file_of(*TEXT), 1))
    assert (found.payloads, found.torn, found.damaged) == ((TEXT[0], TEXT[2]), False, True)


def test_a_record_that_vanished_in_the_middle_is_damage() -> None:
    found = scan(encode(TEXT[0], 1) + encode(TEXT[2], 3))
    assert (found.payloads, found.damaged) == ((TEXT[0], TEXT[2]), True)


def test_a_file_without_its_first_record_is_damaged() -> None:
    assert scan(b"").damaged
    assert scan(bytes(4096)).damaged
    assert scan(b"some other file\n" * 100).damaged


def test_a_flip_in_the_zeros_behind_the_last_record_is_never_called_damage() -> None:
    data = file_of(*TEXT)
    for at in (0, 3, 10, 23, 24, 300, 511, 512, 1500):
        found = scan(flipped(data + bytes(2048), 8 * (len(data) + at)))
        assert (found.payloads, found.torn, found.damaged) == (tuple(TEXT), True, False)


@settings(max_examples=300)
@given(st.binary(max_size=3000), st.integers(0, 3), st.randoms(use_true_random=False))
def test_scanning_never_fails_whatever_the_bytes_are(noise: bytes, records: int, rng: random.Random) -> None:
    data = bytearray(file_of(*(rng.choice(TEXT) for _ in range(records))) + noise)
    for _ in range(rng.randrange(4)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    found = scan(bytes(data))
    assert all(payload in TEXT for payload in found.payloads)
    assert found.end <= len(data) + SECTOR


class Moody(MemStorage):
    """Refuses what it is told to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: set[str] = set()
        self.calls: list[str] = []
        self.make_dirs("d")

    def check(self, call: str) -> None:
        self.calls.append(call)
        if call in self.refuse:
            raise Poisoned(call) if call.startswith("sync") else OSError(28, call)

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        file = super().open(path, create=create, read_only=read_only)
        assert isinstance(file, MemFile)
        return MoodyFile(file, self)

    def rename(self, old: str, new: str) -> None:
        self.check("rename")
        super().rename(old, new)

    def sync_dir(self, path: str) -> None:
        self.check("sync_dir")


class MoodyFile(MemFile):
    def __init__(self, file: MemFile, storage: Moody) -> None:
        super().__init__(file._data)
        self._storage = storage

    def pwrite(self, data: Data, position: int) -> None:
        try:
            self._storage.check("pwrite")
        except OSError:
            super().pwrite(bytes(data[: len(data) // 2]), position)
            raise
        super().pwrite(data, position)

    def truncate(self, n: int) -> None:
        self._storage.check("truncate")
        super().truncate(n)

    def allocate(self, n: int) -> None:
        self._storage.check("allocate")
        super().allocate(n)

    def sync(self) -> None:
        self._storage.check("sync")


def contents(storage: Moody) -> tuple[bytes, ...]:
    found = RecordFile.inspect(storage, "d/f")
    assert not found.torn
    assert not found.damaged
    return found.payloads


@pytest.mark.parametrize("sector", [0, 2, 5, 7])
def test_a_sector_that_can_not_be_read_is_damage_wherever_it_is(sector: int) -> None:
    """As zeros it would pass for the sector of a torn last record, or for the end: what was acknowledged would go."""
    storage = SimStorage()
    storage.make_dirs("d")
    file = RecordFile.create(storage, "d/f", TEXT[0], allocate=4096)
    file.append(TEXT[1])
    file.append(TEXT[2])
    storage.spoil("d/f", sector)
    for found in (RecordFile.inspect(storage, "d/f"), RecordFile.load(storage, "d/f")[1]):
        assert (found.torn, found.damaged) == (False, True)
        assert found.payloads == {0: (TEXT[1], TEXT[2]), 2: (TEXT[0], TEXT[2])}.get(sector, tuple(TEXT[: sector - 3]))
    assert not RecordFile.give_back(storage, "d/f")


def test_any_other_error_of_a_read_says_nothing_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MemFile, n: int, position: int) -> bytes:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    storage = Moody()
    RecordFile.create(storage, "d/f", TEXT[0])
    monkeypatch.setattr(MemFile, "pread", refuse)
    with pytest.raises(OSError, match="allocate"):
        RecordFile.load(storage, "d/f")


def test_a_refused_write_leaves_nothing_and_can_be_repeated() -> None:
    storage = Moody()
    file = RecordFile.create(storage, "d/f", TEXT[0], allocate=4096)
    storage.refuse = {"pwrite"}
    with pytest.raises(AppendFailed):
        file.append(TEXT[2])
    assert contents(storage) == (TEXT[0],)
    storage.refuse = set()
    file.append(TEXT[1])
    assert contents(storage) == (TEXT[0], TEXT[1])


def test_what_can_not_be_cut_back_poisons() -> None:
    storage = Moody()
    file = RecordFile.create(storage, "d/f", TEXT[0])
    storage.refuse = {"pwrite", "truncate"}
    with pytest.raises(Poisoned):
        file.append(TEXT[1])
    storage.refuse = set()
    with pytest.raises(Poisoned):
        file.append(TEXT[1])


def test_a_failed_sync_is_final() -> None:
    storage = Moody()
    file = RecordFile.create(storage, "d/f", TEXT[0])
    storage.refuse = {"sync"}
    with pytest.raises(Poisoned):
        file.append(TEXT[1])
    storage.refuse = set()
    storage.calls.clear()
    for again in (file.append, file.replace):
        with pytest.raises(Poisoned):
            again(TEXT[1])
    assert storage.calls == []


@pytest.mark.parametrize("step", ["sync", "rename", "sync_dir"])
def test_a_new_file_that_may_or_may_not_be_there_poisons(step: str) -> None:
    storage = Moody()
    file = RecordFile.create(storage, "d/f", TEXT[0])
    storage.refuse = {step}
    with pytest.raises(Poisoned):
        file.replace(TEXT[1])
    with pytest.raises(Poisoned):
        file.append(TEXT[1])


def test_without_room_for_a_new_file_the_old_one_goes_on() -> None:
    storage = Moody()
    file = RecordFile.create(storage, "d/f", TEXT[0])
    storage.refuse = {"pwrite"}
    with pytest.raises(AppendFailed):
        file.replace(TEXT[1])
    storage.refuse = set()
    assert storage.list_dir("d") == ["f"]
    file.append(TEXT[2])
    assert contents(storage) == (TEXT[0], TEXT[2])


def test_a_full_disk_costs_only_the_preallocation() -> None:
    storage = Moody()
    storage.refuse = {"allocate"}
    RecordFile.create(storage, "d/f", TEXT[0], allocate=1 << 20).append(TEXT[1])
    assert contents(storage) == (TEXT[0], TEXT[1])


def test_a_new_file_is_synced_before_its_name_and_the_name_before_its_use() -> None:
    storage = Moody()
    RecordFile.create(storage, "d/f", TEXT[0], allocate=1 << 20)
    assert storage.calls == ["allocate", "pwrite", "sync", "rename", "sync_dir"]
