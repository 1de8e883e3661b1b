"""What files a partition's directory has, and where each pair starts.

A pair starts where its anchor says. An anchor that does not verify is derived again: it is a copy of the last entry
of the pair before, or the genesis, or one wrong bit away from what was written, or (its chain unknown) it precedes the
first entry that verifies. Nothing is changed here; recovery writes such anchors back and unlinks what is left over:

    X.dropping           every pair up to X was being unlinked: see `pairs.drop_files`
    an unreadable pair   the remains of a roll: goes if its segment is empty and its commitlog has no entry
    an unfinished pair   the last one, with less than an anchor: its creation was cut short, and nothing was lost

An entry that verifies and is of a later version was written by a later build. It is refused before anything is touched:
who does not know what its bytes mean would take them for damage.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nsqha.commitlog.control import iter_frames
from nsqha.commitlog.entry import (
    CRC_ZLIB,
    ENTRY_BYTES,
    FAULTY,
    VERSION,
    VERSION_AT,
    Entry,
    decode,
    decode_all,
    decode_flipped,
    genesis,
)
from nsqha.commitlog.files.pairs import (
    BLOCK_SLOTS,
    COMMITLOG,
    DROPPING,
    SEGMENT,
    LogIdentity,
    Pair,
    file_name,
    parse_name,
)
from nsqha.commitlog.storage import read_around
from nsqha.errors import ConfigError, LogCorrupt
from nsqha.frames import MESSAGE

if TYPE_CHECKING:
    from nsqha.commitlog.storage import Storage


_CHECKED_BYTES = 8192 * ENTRY_BYTES
_KNOWN = tuple(enumerate(struct.pack(">HH", VERSION, CRC_ZLIB), VERSION_AT))  # where in an entry, and which byte


@dataclass
class LogFiles:
    """A directory's files, oldest first."""

    pairs: list[Pair] = field(default_factory=list)
    restored: list[Pair] = field(default_factory=list)  # those of `pairs` whose anchor on disk is wrong
    unfinished: Pair | None = None  # the last of `restored`, if a crash came before it had an anchor
    dropping: list[int] = field(default_factory=list)  # positions of pairs whose removal was begun, or must have been
    leftovers: list[int] = field(default_factory=list)  # positions of pairs that hold nothing
    unreadable: list[int] = field(default_factory=list)  # positions of pairs that nothing can be said about
    strays: list[str] = field(default_factory=list)  # names that do not belong here


def find(storage: Storage, directory: str, identity: LogIdentity, *, read_only: bool = False) -> LogFiles:
    """Look at every file name and every anchor of a directory."""
    found = LogFiles()
    positions: set[int] = set()
    dropping: set[int] = set()
    for name in storage.list_dir(directory):
        parsed = parse_name(name)
        if parsed is None:
            found.strays.append(name)
        else:
            (dropping if parsed[1] == DROPPING else positions).add(parsed[0])
    if dropping:
        dropping |= {position for position in positions if position < max(dropping)}
        found.dropping = sorted(dropping)
    for position in sorted(positions - dropping):
        raw = _slots(storage, directory, position)
        anchor = decode(raw[:ENTRY_BYTES])
        if anchor is not None:
            _check_version(anchor, directory)
        good = anchor is not None and anchor.end_position == position
        if not good:
            anchor = _derived(storage, directory, raw, position, identity, found.pairs)
        if anchor is None:
            found.unreadable.append(position)
            continue
        pair = Pair(storage, directory, anchor, read_only=read_only)
        found.pairs.append(pair)
        if not good:
            found.restored.append(pair)
    if found.pairs:
        _set_aside_leftovers(storage, directory, found)
        last = found.pairs[-1]
        if last in found.restored and _is_unfinished(storage, directory, last.position):
            found.unfinished = last
    return found


def check_versions(storage: Storage, directory: str, pairs: list[Pair]) -> None:
    """ConfigError if an entry of these pairs is of a version that this build does not know."""
    for pair in pairs:
        try:
            file = storage.open(f"{directory}/{file_name(pair.position, COMMITLOG)}", read_only=True)
        except FileNotFoundError:
            continue
        try:
            for at in range(0, file.size(), _CHECKED_BYTES):
                _check_block(read_around(file, _CHECKED_BYTES, at), directory)
        finally:
            file.close()


def _check_block(raw: bytes, directory: str) -> None:
    """Byte by byte of all entries at once: nearly always there is nothing to look at."""
    if all(raw[at::ENTRY_BYTES].count(byte) == len(raw[at::ENTRY_BYTES]) for at, byte in _KNOWN):
        return
    for entry in decode_all(raw):
        if entry is not None:
            _check_version(entry, directory)


def _check_version(entry: Entry, directory: str) -> None:
    if entry.version > VERSION or entry.crc_kind > CRC_ZLIB:
        raise ConfigError(
            f"{directory}: batch {entry.log_id} has version {entry.version} of the log's format (checksum "
            f"{entry.crc_kind}), this version reads up to {VERSION} ({CRC_ZLIB}); start a newer version"
        )


def _slots(storage: Storage, directory: str, position: int) -> bytes:
    """The first block of a commitlog; nothing if there is none."""
    try:
        file = storage.open(f"{directory}/{file_name(position, COMMITLOG)}", read_only=True)
    except FileNotFoundError:
        return b""
    try:
        return read_around(file, (1 + BLOCK_SLOTS) * ENTRY_BYTES, 0)
    finally:
        file.close()


def _derived(
    storage: Storage, directory: str, raw: bytes, position: int, identity: LogIdentity, before: list[Pair]
) -> Entry | None:
    """The anchor of the pair at `position`, from anything but its own valid bytes."""
    if position == 0:
        return genesis(identity.topic_uid, identity.partition)
    candidate = decode_flipped(raw[:ENTRY_BYTES])
    if candidate is not None and candidate.end_position == position:
        return candidate
    if before:
        candidate = _entry_ending_at(before[-1], position)
        if candidate is not None:
            return candidate
    return _before_first_entry(storage, directory, raw, position)


def _before_first_entry(storage: Storage, directory: str, raw: bytes, position: int) -> Entry | None:
    """An anchor in front of the first valid entry, which may not be in slot 1; the frames in between are counted."""
    slot, first = next(((n, entry) for n, entry in enumerate(decode_all(raw)) if n and entry is not None), (0, None))
    if first is None or first.position < position:
        return None
    count = 0
    if first.position > position:
        try:
            file = storage.open(f"{directory}/{file_name(position, SEGMENT)}", read_only=True)
        except FileNotFoundError:
            return None
        try:
            frames = list(iter_frames(read_around(file, first.position - position, 0)))
            count = sum(frame.type == MESSAGE for frame in frames)
        except LogCorrupt:
            pass  # the offsets of those messages are lost with them
        finally:
            file.close()
    # FAULTY: what chain came before is not known any more.
    return Entry(
        log_id=first.log_id - slot,
        epoch=first.epoch,
        first_offset=first.first_offset - count,
        position=position,
        timestamp_ns=0,
        count=0,
        size=0,
        crc=0,
        flags=FAULTY,
        version=VERSION,
        crc_kind=CRC_ZLIB,
        chain=0,
        durable=0,
    )


def _entry_ending_at(pair: Pair, position: int) -> Entry | None:
    """The last entry of `pair`, if it ends at `position`; it may have one wrong bit."""
    try:
        slots = pair.commitlog.size() // ENTRY_BYTES
    except FileNotFoundError:
        return None
    for slot in range(slots - 1, max(slots - BLOCK_SLOTS, -1), -1):
        raw = read_around(pair.commitlog, ENTRY_BYTES, slot * ENTRY_BYTES)
        entry = decode(raw) or decode_flipped(raw)
        if entry is not None:
            return entry if entry.log_id == pair.anchor.log_id + slot and entry.end_position == position else None
    return None


def _set_aside_leftovers(storage: Storage, directory: str, found: LogFiles) -> None:
    """A pair of which nothing can be read and whose segment is empty holds nothing."""
    for position in list(found.unreadable):
        raw = _slots(storage, directory, position)
        if not _segment_size(storage, directory, position) and not any(decode_all(raw)):
            found.unreadable.remove(position)
            found.leftovers.append(position)


def _is_unfinished(storage: Storage, directory: str, position: int) -> bool:
    """Whether a pair without a valid anchor is what a crash leaves of its creation: an anchor is its first bytes."""
    raw = _slots(storage, directory, position)
    return len(raw) <= ENTRY_BYTES and decode_flipped(raw) is None and not _segment_size(storage, directory, position)


def _segment_size(storage: Storage, directory: str, position: int) -> int:
    path = f"{directory}/{file_name(position, SEGMENT)}"
    if not storage.exists(path):
        return 0
    file = storage.open(path, read_only=True)
    try:
        return file.size()
    finally:
        file.close()
