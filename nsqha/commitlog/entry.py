"""The commitlog entry: what one batch is, where it lies and how it follows from the batch before.

Big endian, 80 bytes:

     0  log_id        u64   dense ordinal of entries; the first batch of a partition has 1
     8  epoch         u64   leader epoch that wrote it
    16  first_offset  u64   offset of its first message
    24  position      u64   of its first byte, counted since the partition began
    32  timestamp_ns  u64   one per batch; never falls, also across epochs
    40  count         u32   messages
    44  size          u32   bytes of frames
    48  crc           u32   of the frames
    52  flags         u32   HAS_..., LOST, REBUILT, FAULTY
    56  version       u16   of this layout: 1
    58  crc_kind      u16   how `crc` is computed: 1 = zlib.crc32
    60  chain         u64   BLAKE2b-64 of the previous entry's chain and bytes 0..59, without LOST
    68  durable       u64   end of the log ids that were durable on every in-sync replica when this was written
    76  entry_crc     u32   zlib.crc32 of bytes 0..75

Ordinals, offsets and positions are below 2^62, and times below 2^63: file systems and the code of others count with
signed numbers. Bytes that say otherwise are no entry, whatever their checksum is.

The chain makes an entry name its whole past: two logs that agree on (log_id, chain) agree on everything before. It
begins with a hash of topic uid, partition and version, so entries of another partition never fit. It leaves out
`durable` and LOST, which say something about replicas and nothing about the batch: so a lost entry that is rebuilt
from its neighbours and frames is proven, or refuted, by the chain of the entry that follows; and a log whose operator
gave up some frames is still the same log, into which a replica that has them can write them back.

Entry 0, the *genesis*, is computed, describes nothing and begins the chain.
"""

from __future__ import annotations

import hashlib
import struct
from operator import add, le
from typing import NamedTuple

from nsqha import hot
from nsqha.errors import LogCorrupt
from nsqha.frames import LOST
from nsqha.hot import crc32

VERSION = 1
CRC_ZLIB = 1

# The low bits of `flags` are HAS_... of `nsqha.frames`: what is in the batch beside messages.
# LOST, of `frames`: everything in the entry is as it was written, and its frames cannot be read here. An operator has
# given them up, so replicas are made without them; where they are still found, they are written back and it is cleared.
# Set by recovery on an entry that it had to write again; the chain of the entry behind one is not expected to fit.
REBUILT = 1 << 30  # from the frames, and no successor's chain could prove it
FAULTY = 1 << 31  # stands for messages that cannot be read
BROKEN_CHAIN = REBUILT | FAULTY
UNREADABLE = FAULTY | LOST

_LINKED = struct.Struct(">QQQQQQIIIIHH")  # the chain before, and what the chain covers
_WHOLE = struct.Struct(">QQQQQIIIIHHQQI")
_CRC = struct.Struct(">I")
ENTRY_BYTES = _WHOLE.size
CRC_AT = ENTRY_BYTES - 4
VERSION_AT = 56

PLACE_END = 1 << 62
TIME_END = 1 << 63

_blake2b = hashlib.blake2b


class Entry(NamedTuple):
    """One batch of the log, in the order of the bytes on disk."""

    log_id: int
    epoch: int
    first_offset: int
    position: int
    timestamp_ns: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which is not needed here
    size: int
    crc: int
    flags: int
    version: int
    crc_kind: int
    chain: int
    durable: int

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.count

    @property
    def end_position(self) -> int:
        return self.position + self.size

    def encode(self) -> bytes:
        """The 80 bytes on disk."""
        raw = _WHOLE.pack(*self, 0)
        return raw[:CRC_AT] + _CRC.pack(crc32(raw[:CRC_AT]))

    def follows(self, previous: Entry) -> bool:
        """Whether ordinals and positions go on where `previous` ends (the chain is another question)."""
        return (
            self.log_id == previous.log_id + 1
            and self.first_offset == previous.first_offset + previous.count
            and self.position == previous.position + previous.size
            and self.timestamp_ns >= previous.timestamp_ns
            and self.epoch >= previous.epoch
        )

    @property
    def lost(self) -> bool:
        """Whether an operator gave its frames up."""
        return bool(self.flags & LOST)

    @property
    def named(self) -> Entry:
        """The entry as it was written, whether or not its frames were given up since."""
        return self._replace(flags=self.flags & ~LOST) if self.flags & LOST else self

    @property
    def stands_in(self) -> bool:
        """Whether it only fills a log id of a run that one FAULTY entry before it stands for."""
        return bool(self.flags & REBUILT) and not self.size and not self.flags & FAULTY

    def chained_to(self, previous: Entry) -> bool:
        """Whether the chain says that this is what came after `previous`."""
        return bool(previous.flags & BROKEN_CHAIN) or self.chain == next_chain(previous.chain, self)


class Place(NamedTuple):
    """A border between two batches: where the log starts, or where it ends."""

    log_id: int
    offset: int
    position: int


class BatchCorrupt(LogCorrupt):
    """A range of the log cannot be read; reading may go on at `end_log_id` and `end_offset`."""

    def __init__(self, first: Place, end: Place, why: str) -> None:
        super().__init__(
            f"log ids [{first.log_id}, {end.log_id}), offsets [{first.offset}, {end.offset}), "
            f"positions [{first.position}, {end.position}) cannot be read: {why}"
        )
        self.first = first
        self.end = end
        self.why = why

    @property
    def end_log_id(self) -> int:
        return self.end.log_id

    @property
    def first_offset(self) -> int:
        return self.first.offset

    @property
    def end_offset(self) -> int:
        return self.end.offset


def crc_of(data: bytes | bytearray | memoryview) -> int:
    """The checksum of a batch's frames, of kind CRC_ZLIB."""
    return crc32(data)


def next_entry(
    previous: Entry, data: bytes | bytearray, *, count: int, flags: int, timestamp_ns: int, epoch: int, durable: int
) -> tuple[Entry, bytes]:
    """The entry of a batch that follows `previous`, and its bytes on disk."""
    return hot.next_entry(Entry, previous, data, count, flags, timestamp_ns, epoch, durable)


def next_chain(chain: int, entry: Entry) -> int:
    """The chain of `entry` behind one whose chain is `chain`."""
    digest = _blake2b(_LINKED.pack(chain, *entry.named[:11]), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def genesis(topic_uid: int, partition: int) -> Entry:
    """Entry 0: what the first batch of a partition follows."""
    seed = struct.pack(">QIH", topic_uid, partition, VERSION)
    chain = int.from_bytes(_blake2b(seed, digest_size=8, person=b"nsqha log").digest(), "big")
    return Entry(0, 0, 0, 0, 0, 0, 0, 0, 0, VERSION, CRC_ZLIB, chain, 0)


def decode(raw: bytes | memoryview) -> Entry | None:
    """The entry in these 80 bytes; None if they do not verify."""
    if len(raw) != ENTRY_BYTES:
        return None
    fields = _WHOLE.unpack(raw)
    if fields[-1] != crc32(raw[:CRC_AT]) or not _makes_sense(fields):
        return None
    return tuple.__new__(Entry, fields[:-1])


def _makes_sense(fields: tuple[int, ...]) -> bool:
    log_id, _, first_offset, position, timestamp_ns, *_ = fields
    return log_id < PLACE_END and first_offset < PLACE_END and position < PLACE_END and timestamp_ns < TIME_END


def decode_flipped(raw: bytes) -> Entry | None:
    """The entry in these 80 bytes if exactly one of their bits is wrong.

    CRC-32 differs for words of this length that differ in up to four bits, so there is at most one such entry, and it
    is the one that was written unless three or more bits changed.
    """
    for bit in range(ENTRY_BYTES * 8 if len(raw) == ENTRY_BYTES else 0):
        candidate = bytearray(raw)
        candidate[bit // 8] ^= 1 << bit % 8
        entry = decode(bytes(candidate))
        if entry is not None:
            return entry
    return None


def columns(raw: bytes) -> list[tuple[int, ...]] | None:
    """The entries in whole slots, field by field in the order of `Entry`; None unless every one verifies.

    For blocks of many entries where an object for each would cost more than everything else.
    """
    if not raw or len(raw) % ENTRY_BYTES:
        return None
    fields = list(zip(*_WHOLE.iter_unpack(raw), strict=True))
    with memoryview(raw) as view:
        crcs = tuple([crc32(view[at : at + CRC_AT]) for at in range(0, len(raw), ENTRY_BYTES)])
    return fields[:-1] if fields[-1] == crcs else None


def follow_each_other(fields: list[tuple[int, ...]], previous: Entry) -> bool:
    """`Entry.follows` for a whole block behind `previous`."""
    log_ids, epochs, offsets, positions, timestamps, counts, sizes, *_ = fields
    if not log_ids:
        return True
    return (
        log_ids == tuple(range(previous.log_id + 1, previous.log_id + 1 + len(log_ids)))
        and offsets[0] == previous.end_offset
        and offsets[1:] == tuple(map(add, offsets, counts))[:-1]
        and positions[0] == previous.end_position
        and positions[1:] == tuple(map(add, positions, sizes))[:-1]
        and epochs[0] >= previous.epoch
        and all(map(le, epochs, epochs[1:]))
        and timestamps[0] >= previous.timestamp_ns
        and all(map(le, timestamps, timestamps[1:]))
        and timestamps[-1] < TIME_END
    )


def decode_all(raw: bytes) -> list[Entry | None]:
    """Every whole slot of `raw`; None for one that does not verify."""
    whole = len(raw) - len(raw) % ENTRY_BYTES
    new = tuple.__new__
    with memoryview(raw)[:whole] as view:
        crcs = [crc32(view[at : at + CRC_AT]) for at in range(0, whole, ENTRY_BYTES)]
        slots = zip(_WHOLE.iter_unpack(view), crcs, strict=True)
        return [
            new(Entry, fields[:-1]) if fields[-1] == crc and _makes_sense(fields) else None for fields, crc in slots
        ]
