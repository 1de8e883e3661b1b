"""A small file of records, each on disk before its writer goes on; the node journal and the metadata file are such.

    file    record 1, record 2, ...      every record begins at a multiple of 512; zeros up to the next
    record  [magic 4 = "nqr1"][size u32][sequence u64][crc u32][header crc u32] payload: `size` bytes of text

The header crc covers the 20 bytes before it, the crc the payload; both are zlib.crc32, numbers are big endian. The
payload has no zero byte. Sequences count from 1 without a gap. Space behind the last record is absent or zero (it may
be preallocated).

A file is born complete, by temporary file, sync, rename and directory sync, and is replaced in the same way when it
has grown, so record 1 is never torn. Records are appended one at a time, each synced before the next is written. A
crash can therefore hurt only the last one: some of its 512-byte sectors are there, others are zero, and one at which a
write broke off is zero from there on. From this follows what a record that does not verify means:

    nothing valid after it, and a sector of it is missing or breaks off: **torn**; it was never acknowledged
    anything else, also a sector that cannot be read: **damaged**; a header lies in one sector, so one that is
    followed by text is never torn

A torn tail is not appended to: a process that finds one replaces the file first. A failed write is cut off again and
nothing was stored (`AppendFailed`); if that fails, or any sync does, the file is closed for good (`Poisoned`).
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from zlib import crc32

from nsqha.commitlog.storage import parent, read_around
from nsqha.errors import AppendFailed, Poisoned, StorageError

if TYPE_CHECKING:
    from nsqha.commitlog.storage import File, Storage

SECTOR = 512
MAGIC = b"nqr1"
_HEADER = struct.Struct(">4sIQI")
_CRC = struct.Struct(">I")
HEADER_BYTES = _HEADER.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file was found to hold: the valid records in order, and what is wrong with the rest."""

    payloads: tuple[bytes, ...]
    end: int  # where the next record would begin
    torn: bool  # the last record was being written when the writer died
    damaged: bool  # stored bytes were altered or lost; records in the middle may be missing


def encode(payload: bytes, sequence: int) -> bytes:
    """One record, padded to whole sectors."""
    assert payload and b"\0" not in payload, "a record is text: an all-zero sector must mean that it was never written"
    header = _HEADER.pack(MAGIC, len(payload), sequence, crc32(payload))
    record = header + _CRC.pack(crc32(header)) + payload
    return record + bytes(-len(record) % SECTOR)


def scan(data: bytes) -> Contents:
    """Read a whole file; never raises, whatever the bytes are."""
    payloads: list[bytes] = []
    position = 0
    sequence = 1
    damaged = False
    while True:
        found = _valid_record(data, position, sequence) or _next_valid_record(data, position, sequence)
        if found is None:
            break
        first, got, payload = found
        damaged |= first != position or got != sequence
        payloads.append(payload)
        position = first + _padded(HEADER_BYTES + len(payload))
        sequence = got + 1
    tail = data[position:]
    torn = _is_torn(tail)
    if not payloads or (not torn and tail.strip(b"\0")):
        damaged = True
    return Contents(tuple(payloads), position, torn, damaged)


def _padded(size: int) -> int:
    return size + -size % SECTOR


def _header(data: bytes, position: int) -> tuple[int, int, int] | None:
    """(size, sequence, crc) of a record that begins at `position`; None if no valid header is there."""
    header = data[position : position + HEADER_BYTES]
    if len(header) < HEADER_BYTES or header[:4] != MAGIC or crc32(header[:-4]) != _CRC.unpack(header[-4:])[0]:
        return None
    _, size, sequence, crc = _HEADER.unpack_from(header)
    return size, sequence, crc


def _valid_record(data: bytes, position: int, sequence: int) -> tuple[int, int, bytes] | None:
    header = _header(data, position)
    if header is None or header[1] < sequence:
        return None
    size, got, crc = header
    payload = data[position + HEADER_BYTES : position + HEADER_BYTES + size]
    return (position, got, payload) if len(payload) == size and crc32(payload) == crc else None


def _next_valid_record(data: bytes, position: int, sequence: int) -> tuple[int, int, bytes] | None:
    """The first valid record behind a place where none is."""
    while (position := data.find(MAGIC, position + 1)) >= 0:
        if position % SECTOR == 0 and (found := _valid_record(data, position, sequence)):
            return found
    return None


def _is_torn(tail: bytes) -> bool:
    """Whether what follows the last valid record is one that was never completely written (see the module)."""
    if not tail.strip(b"\0"):
        return False
    first = tail[:SECTOR]
    # Without text behind the header's place no record was ever acknowledged here: zeros, or zeros that were hit.
    if not first[:HEADER_BYTES].strip(b"\0") or not first[HEADER_BYTES:].strip(b"\0"):
        return True
    header = _header(tail, 0)
    if header is None:
        return False
    end = HEADER_BYTES + header[0]
    # Text has no zero byte, so a sector whose part of the record ends in one was not written, or not to its end.
    ends = (*range(SECTOR, end, SECTOR), end)
    return any(at > len(tail) or tail[at - 1] == 0 for at in ends)


def _contents(file: File) -> Contents:
    """What a file holds; sectors that cannot be read are damage, wherever they are."""
    try:
        return scan(file.pread(file.size(), 0))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    return replace(scan(read_around(file, file.size(), 0)), torn=False, damaged=True)


def _preallocate(file: File, size: int) -> None:
    try:
        file.allocate(size)
    except (OSError, StorageError):
        # A node must be able to start on a full disk, to let its consumers empty it.
        file.truncate(0)


class RecordFile:
    """The file, open for appending. One thread at a time."""

    def __init__(self, storage: Storage, path: str, file: File, end: int, sequence: int) -> None:
        """Use `create` or `load`."""
        self.end = end
        self.path = path
        self._storage = storage
        self._file = file
        self._sequence = sequence  # of the next record
        self._poisoned = False

    @classmethod
    def create(cls, storage: Storage, path: str, payload: bytes, *, allocate: int = 0) -> RecordFile:
        """A file with one record, durable when this returns; takes the place of an older one at `path`."""
        record = encode(payload, 1)
        temporary = path + ".new"
        try:
            names = storage.open_dir(parent(path) or ".")
            try:
                file = cls._write_new(storage, temporary, record, allocate)
            except (OSError, StorageError):
                names.close()
                raise
        except (OSError, StorageError) as error:
            raise AppendFailed(f"{temporary}: {error}") from error
        try:
            file.sync()
            storage.rename(temporary, path)
            names.sync()
        except (OSError, StorageError) as error:
            file.close()
            raise Poisoned(f"{path}: {error}") from error
        finally:
            names.close()
        return cls(storage, path, file, len(record), 2)

    @staticmethod
    def _write_new(storage: Storage, temporary: str, record: bytes, allocate: int) -> File:
        if storage.exists(temporary):
            storage.remove(temporary)
        file = storage.open(temporary, create=True)
        try:
            if allocate:
                _preallocate(file, allocate)
            file.pwrite(record, 0)
        except (OSError, StorageError):
            file.close()
            storage.remove(temporary)  # a full disk needs the room
            raise
        return file

    @staticmethod
    def inspect(storage: Storage, path: str) -> Contents:
        """What an existing file holds, without touching it."""
        file = storage.open(path, read_only=True)
        try:
            return _contents(file)
        finally:
            file.close()

    @classmethod
    def load(cls, storage: Storage, path: str) -> tuple[RecordFile, Contents]:
        """An existing file and what it holds. Append only if it is neither torn nor damaged."""
        file = storage.open(path)
        # A writer that was killed may have left bytes, and a name, that only the page cache has: what is read must be
        # what stays.
        try:
            file.sync()
            file.drop_cache()
            storage.sync_dir(parent(path) or ".")
        except (OSError, StorageError) as error:
            file.close()
            raise Poisoned(f"{path}: {error}") from error
        contents = _contents(file)
        return cls(storage, path, file, contents.end, len(contents.payloads) + 1), contents

    @classmethod
    def give_back(cls, storage: Storage, path: str) -> bool:
        """Free what is preallocated behind the last record. False: the tail says that the file is torn or damaged."""
        file, contents = cls.load(storage, path)
        try:
            if contents.torn or contents.damaged:
                return False
            file._file.truncate(contents.end)
            file._file.sync()  # a file system may hold on to blocks until then
        except (OSError, StorageError) as error:
            raise Poisoned(f"{path}: {error}") from error
        finally:
            file.close()
        return True

    def append(self, payload: bytes) -> None:
        """Add a record; it is on disk when this returns."""
        self._check()
        record = encode(payload, self._sequence)
        try:
            self._file.pwrite(record, self.end)
        except (OSError, StorageError) as error:
            self._cut_back(error)
            raise AppendFailed(f"{self.path}: {error}") from error
        self._sync()
        self.end += len(record)
        self._sequence += 1

    def replace(self, payload: bytes, *, allocate: int = 0) -> None:
        """Replace the file by one with one record. On `AppendFailed` the old file stands and can be appended to."""
        self._check()
        try:
            new = RecordFile.create(self._storage, self.path, payload, allocate=allocate)
        except Poisoned:
            self._poisoned = True
            raise
        self._file.close()
        self._file, self.end, self._sequence = new._file, new.end, new._sequence

    def close(self) -> None:
        self._file.close()

    def _check(self) -> None:
        if self._poisoned:
            raise Poisoned(f"{self.path}: closed after a failed write or sync; restart the node to verify the disk")

    def _cut_back(self, cause: Exception) -> None:
        # Synced as well: else sectors of this attempt could come back mixed with those of the next.
        try:
            self._file.truncate(self.end)
        except (OSError, StorageError) as error:
            self._poisoned = True
            raise Poisoned(f"{self.path}: {cause}, and it could not be cut back: {error}") from error
        self._sync()

    def _sync(self) -> None:
        try:
            self._file.sync()
        except (OSError, StorageError) as error:
            self._poisoned = True
            raise Poisoned(f"{self.path}: {error}") from error
