"""Proof that the cache's database file is what was last written completely.

LMDB trusts its file: a page that is wrong (a lost sector, a flipped bit, pages of different commits) is not an error
there but a wild pointer that ends the process, and no check by means of LMDB comes early enough. So the file is never
opened before all its bytes are proven: after the last transaction of a write it is synced, and size and CRC of the
whole file go into `proof`, which is synced too. That is one pass of some GB/s. It proves more than LMDB's commits do,
and makes a write of many transactions one atomic step: in the middle of it the proof is wrong, and a crash just then
costs a rebuild from the log.

(The other way, digests of contents that are checked by reading them, needs the damaged tree for reading, misses the
free list, whose damage overwrites good pages later, and takes a second per million rows.)

    proof     magic 8 bytes, format u32, size u64, crc u32 of data.mdb; crc u32 of these
"""

from __future__ import annotations

import os
import struct
import zlib

FORMAT = 1  # of everything in the folder
NOTHING_LOST = ""

_MAGIC = b"nsqhaLMC"
_PROOF = struct.Struct(">8sIQI")
_CRC = struct.Struct(">I")
_BUFFER_BYTES = 1 << 20
_FILES = ("proof", "data.mdb", "lock.mdb")


def unproven(path: str) -> str | None:
    """Why what is at `path` must not be opened (NOTHING_LOST: it holds nothing yet); None if it may be."""
    try:
        if not os.path.exists(f"{path}/data.mdb") or not os.path.exists(f"{path}/proof"):
            return NOTHING_LOST  # new, or its first write has not ended
        with open(f"{path}/proof", "rb") as file:
            proof = file.read(_PROOF.size + _CRC.size + 1)
        body = proof[: _PROOF.size]
        if proof[_PROOF.size :] != _CRC.pack(zlib.crc32(body)) or len(body) != _PROOF.size:
            return "its proof cannot be read"
        magic, version, *expected = _PROOF.unpack(body)
        if (magic, version) != (_MAGIC, FORMAT):
            return "another version wrote it"
        return None if _sum(path) == tuple(expected) else "it is not what was last written completely"
    except OSError as error:
        return str(error)


def prove(path: str) -> None:
    """Write down, durably, what the file is now. It must be synced."""
    body = _PROOF.pack(_MAGIC, FORMAT, *_sum(path))
    fd = os.open(f"{path}/proof", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        os.pwrite(fd, body + _CRC.pack(zlib.crc32(body)), 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _sum(path: str) -> tuple[int, int]:
    """Size and CRC of the whole file."""
    fd = os.open(f"{path}/data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = crc = 0
        buffer = bytearray(_BUFFER_BYTES)
        with memoryview(buffer) as view:
            while n := os.preadv(fd, [buffer], size):
                crc = zlib.crc32(view[:n], crc)
                size += n
        return size, crc
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Take away what this cache made, and nothing else: the folder may be a mount or a link."""
    if not os.path.isdir(path):
        if os.path.lexists(path):
            os.remove(path)
        return
    for name in _FILES:
        if os.path.lexists(f"{path}/{name}"):
            os.remove(f"{path}/{name}")
