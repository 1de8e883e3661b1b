"""Entries of the commitlog, a run at a time: one numpy table, verified before a frame is read.

An entry describes a batch in 80 bytes, big endian, as drawn in docs/disk-format.md and `nsqha.commitlog.entry`; `ENTRY`
is the same as a numpy type. This module needs numpy and nothing of the broker: it also runs in Spark's workers.

These are checked, in this order; the first that does not fit raises NotVerified:

    each entry's own CRC                                             levels full, crc
    version and kind of CRC: newer ones are another ReadFailed       always
    log ids are dense; offsets, positions, times, epochs follow      always
    the chain: BLAKE2b-64 of the chain before and bytes 0 to 59,
      the flag LOST taken off; not behind REBUILT or FAULTY          level full
    sizes add up to the frames received; LOST and FAULTY have none   always
    each batch's frames have the CRC of its entry                    levels full, crc

By the chain (log id, chain) identifies the whole log before. A comparison with the chain of the snapshot's entry, the
one before the committed end, proves everything that is chained to it.

An object per batch is made in two places only, CRCs and chain: with batches of two messages they are the cost of a
scan.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from pyspark_nsqha.model import ENTRY_BYTES, FetchedRun, NotVerified, PartitionLife, ReadFailed

__all__ = ["ENTRY", "FAULTY", "LOST", "REBUILT", "Entries", "Level", "describe", "verify"]

Level = Literal["full", "crc", "none"]
Integers = npt.NDArray[np.int64]

ENTRY = np.dtype(
    [
        ("log_id", ">u8"),
        ("epoch", ">u8"),
        ("first_offset", ">u8"),
        ("position", ">u8"),
        ("timestamp_ns", ">u8"),
        ("count", ">u4"),
        ("size", ">u4"),
        ("crc", ">u4"),
        ("flags", ">u4"),
        ("version", ">u2"),
        ("crc_kind", ">u2"),
        ("chain", ">u8"),
        ("durable", ">u8"),
        ("entry_crc", ">u4"),
    ]
)
assert ENTRY.itemsize == ENTRY_BYTES

VERSION = 1
CRC_ZLIB = 1
LOST = 1 << 29
REBUILT = 1 << 30
FAULTY = 1 << 31

_LINKED_BYTES = 60  # of an entry, what the chain covers
_CHAIN = slice(60, 68)
_CRC_AT = ENTRY_BYTES - 4
_FLAGS_AT = 52
_LOST_IN_BYTE = LOST >> 24


def _fastest_crc32() -> Callable[[Any], int]:
    """The broker's CRC-32 if it is installed and compiled, four times as fast as zlib's; else zlib's."""
    try:
        from nsqha import hot
    except ImportError:
        return zlib.crc32
    return hot.crc32 if hot.ACTIVE == "compiled" else zlib.crc32


crc32 = _fastest_crc32()


@dataclass(frozen=True)
class Entries:
    """The verified entries of a run; numbers are native and fit 63 bits."""

    table: npt.NDArray[np.void]  # of ENTRY, over the run's own bytes
    first_offsets: Integers
    counts: Integers
    timestamps: Integers
    flags: Integers
    starts: Integers  # of each batch's frames within the run's frames, and their end
    bad: npt.NDArray[np.bool_]  # batches whose frames do not verify: only with `mark_bad` of `verify`
    last: bytes  # the last entry as received, against which the next run is verified; without entries the one before

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def end_offset(self) -> int:
        """One past the last message; 0 for a run without entries."""
        return int(self.first_offsets[-1] + self.counts[-1]) if len(self) else 0

    def log_id(self, index: int) -> int:
        """The log id of a batch of the run."""
        return int(self.table["log_id"][index])


def describe(identity: PartitionLife, log_ids: tuple[int, int], offsets: tuple[int, int], why: str) -> str:
    """A line that names batches [first, end) and their messages, says what is wrong, and what to do."""
    first, end = log_ids
    batches = f"log id {first}" if end == first + 1 else f"log ids [{first}, {end})"
    return (
        f"{identity.topic}/{identity.partition}: {batches}, offsets [{offsets[0]}, {offsets[1]}): {why}; "
        "read it from another replica, and run `nsqha log verify` on this one"
    )


def verify(
    run: FetchedRun,
    identity: PartitionLife,
    before: bytes | None,
    *,
    level: Level = "full",
    at: tuple[int, int] | None = None,
    mark_bad: bool = False,
) -> Entries:
    """Verify the entries and frames of `run`, and return its entries.

    `before` is the entry before the run, 80 bytes; None if it is not known, and then the first link of the chain is not
    checked. `at` is (log id, chain) of the snapshot's entry, compared if it is in the run. NotVerified says what does
    not fit, with the offsets in `planned`. With `mark_bad`, batches of which only the frames do not verify are marked
    in the result instead. ReadFailed: a newer broker wrote it.
    """
    return _Verification(run, identity, before).entries(level, at, mark_bad)


class _Verification:
    """Verifies one run."""

    def __init__(self, run: FetchedRun, identity: PartitionLife, before: bytes | None) -> None:
        self.run = run
        self.identity = identity
        whole = len(run.entries) // ENTRY_BYTES
        self.table = np.frombuffer(run.entries, ENTRY, whole)
        if run.first_log_id == 1:
            before = _genesis(identity)
        self.last_before = before or b""
        self.before = np.frombuffer(before, ENTRY) if before else None

    def entries(self, level: Level, at: tuple[int, int] | None, mark_bad: bool) -> Entries:
        run, table = self.run, self.table
        if len(run.entries) % ENTRY_BYTES:
            self.fail(len(table), f"the entries end in the middle of one, after {len(run.entries)} bytes")
        if level != "none":
            self.check_entry_crcs()
        self.check_versions()
        self.check_order()
        if level == "full":
            self.check_chain()
        if at is not None:
            self.check_end(*at)
        starts = self.frame_starts()
        bad = np.zeros(len(table), bool) if level == "none" else self.wrong_frames(starts)
        if not mark_bad:
            self.fail_at(~bad, "the frames do not have the CRC of their entry")
        return Entries(
            table,
            table["first_offset"].astype(np.int64),
            table["count"].astype(np.int64),
            table["timestamp_ns"].astype(np.int64),
            table["flags"].astype(np.int64),
            starts,
            bad,
            bytes(memoryview(run.entries)[-ENTRY_BYTES:]) if len(table) else self.last_before,
        )

    # ---- failing

    def fail_at(self, fits: npt.NDArray[np.bool_], why: str) -> None:
        """Raise NotVerified for the first entry that does not fit, if there is one."""
        if not fits.all():
            self.fail(int(fits.argmin()), why)

    def fail(self, index: int, why: str) -> NoReturn:
        first_log_id = self.run.first_log_id + index
        offsets = self.offsets_of(index)
        raise NotVerified(describe(self.identity, (first_log_id, first_log_id + 1), offsets, why), planned=offsets)

    def offsets_of(self, index: int) -> tuple[int, int]:
        """The messages of an entry, by its neighbours' offsets where these are known."""
        table = self.table
        if index:
            first = int(table["first_offset"][index - 1]) + int(table["count"][index - 1])
        elif self.before is not None:
            first = int(self.before["first_offset"][0]) + int(self.before["count"][0])
        else:
            first = int(table["first_offset"][0]) if len(table) else 0
        if index + 1 < len(table):
            return first, int(table["first_offset"][index + 1])
        return first, first + (int(table["count"][index]) if index < len(table) else 0)

    # ---- checks

    def check_entry_crcs(self) -> None:
        self.fail_at(_entry_crcs(self.table) == self.table["entry_crc"], "the entry does not have its own CRC")
        if self.before is not None and _entry_crcs(self.before)[0] != self.before["entry_crc"][0]:
            self.fail(0, "the entry before does not have its own CRC")

    def check_versions(self) -> None:
        table = self.table
        known = (table["version"] == VERSION) & (table["crc_kind"] == CRC_ZLIB)
        if not known.all():
            index = int(known.argmin())
            raise ReadFailed(
                f"{self.identity.topic}/{self.identity.partition}: log id {self.run.first_log_id + index} has version "
                f"{table['version'][index]} and CRC kind {table['crc_kind'][index]}, this reader knows {VERSION} and "
                f"{CRC_ZLIB}: a newer broker wrote it; update pyspark_nsqha"
            )

    def check_order(self) -> None:
        """Check what `Entry.follows` checks, for each pair of neighbours."""
        table = self.table
        if not len(table):
            return
        ids = table["log_id"]
        self.fail_at(ids == np.arange(self.run.first_log_id, self.run.first_log_id + len(ids)), "log ids are not dense")
        ends = {"first_offset": table["first_offset"] + table["count"], "position": table["position"] + table["size"]}
        before = self.before
        if before is not None and before["log_id"][0] + 1 != ids[0]:
            self.fail(0, f"it does not follow the entry before, whose log id is {before['log_id'][0]}")
        for name, length in (("first_offset", "count"), ("position", "size")):
            expected = np.empty(len(table), np.uint64)
            expected[1:] = ends[name][:-1]
            expected[0] = table[name][0] if before is None else before[name][0] + before[length][0]
            self.fail_at(table[name] == expected, f"its {name} is not where the entry before ends")
            if int(ends[name][-1]) >> 63:
                self.fail(len(table) - 1, f"its {name} is beyond 2^63")
        for name in ("timestamp_ns", "epoch"):
            earlier = np.empty(len(table), np.uint64)
            earlier[1:] = table[name][:-1]
            earlier[0] = 0 if before is None else before[name][0]
            self.fail_at(table[name] >= earlier, f"its {name} is lower than that of the entry before")
            if int(table[name][-1]) >> 63:
                self.fail(len(table) - 1, f"its {name} is beyond 2^63")

    def check_chain(self) -> None:
        table, before = self.table, self.before
        if not len(table):
            return
        fits = np.empty(len(table), bool)
        fits[1:] = (table["flags"][:-1] & (REBUILT | FAULTY)) != 0
        fits[0] = before is None or before["flags"][0] & (REBUILT | FAULTY) != 0
        chain_before = np.zeros(1, ">u8") if before is None else before["chain"]
        fits |= _chains(table, chain_before) == table["chain"]
        self.fail_at(fits, "the chain does not match: the entry, or the one before, belongs to another log")

    def check_end(self, log_id: int, chain: int) -> None:
        """Check that the snapshot's entry has the chain of the snapshot."""
        index = log_id - self.run.first_log_id
        if 0 <= index < len(self.table) and int(self.table["chain"][index]) != chain:
            there = int(self.table["chain"][index])
            self.fail(index, f"its chain is {there:016x}, but the snapshot has {chain:016x}: this is another log")

    def frame_starts(self) -> Integers:
        table = self.table
        sizes = np.where(table["flags"] & (LOST | FAULTY), 0, table["size"]).astype(np.int64)
        starts = np.zeros(len(table) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        if starts[-1] != len(self.run.frames):
            if not len(table):
                self.fail(0, f"{len(self.run.frames)} bytes of frames were sent without an entry")
            index = min(int(np.searchsorted(starts[1:], len(self.run.frames), "right")), len(table) - 1)
            self.fail(index, f"the entries announce {starts[-1]} bytes of frames, {len(self.run.frames)} were sent")
        return starts

    def wrong_frames(self, starts: Integers) -> npt.NDArray[np.bool_]:
        """Which batches have frames whose CRC is not that of the entry."""
        borders = starts.tolist()
        with memoryview(self.run.frames) as frames:
            crcs = [crc32(frames[first:end]) for first, end in pairwise(borders)]
        wrong: npt.NDArray[np.bool_] = (np.array(crcs, np.uint32) != self.table["crc"]) & (starts[1:] > starts[:-1])
        return wrong


def _entry_crcs(table: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
    """The CRC of each entry, computed from its bytes."""
    heads = np.ndarray((len(table),), f"V{_CRC_AT}", table, strides=(ENTRY_BYTES,))
    return np.array(list(map(crc32, heads.tolist())), np.uint32)


def _chains(table: npt.NDArray[np.void], before: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """The chain that each entry must have after the one before; `before` is the chain before the first entry."""
    raw = np.ndarray((len(table), ENTRY_BYTES), np.uint8, table)
    linked = np.empty((len(table), 8 + _LINKED_BYTES), np.uint8)
    linked[0, :8] = np.frombuffer(before.tobytes(), np.uint8)
    linked[1:, :8] = raw[:-1, _CHAIN]
    linked[:, 8:] = raw[:, :_LINKED_BYTES]
    linked[:, 8 + _FLAGS_AT] &= 0xFF ^ _LOST_IN_BYTE
    digests = []
    fresh = hashlib.blake2b(digest_size=8).copy  # a quarter cheaper than a call with arguments
    for one in linked.view(f"V{8 + _LINKED_BYTES}").ravel().tolist():
        link = fresh()
        link.update(one)
        digests.append(link.digest())
    return np.frombuffer(b"".join(digests), ">u8")


def _genesis(identity: PartitionLife) -> bytes:
    """Entry 0, which the first batch of a partition follows."""
    seed = struct.pack(">QIH", identity.topic_uid, identity.partition, VERSION)
    entry = np.zeros(1, ENTRY)
    entry["version"], entry["crc_kind"] = VERSION, CRC_ZLIB
    entry["chain"] = int.from_bytes(hashlib.blake2b(seed, digest_size=8, person=b"nsqha log").digest(), "big")
    entry["entry_crc"] = zlib.crc32(entry.tobytes()[:_CRC_AT])
    return entry.tobytes()
