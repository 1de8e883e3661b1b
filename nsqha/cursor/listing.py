"""The channels of a topic as a CHANNELS frame has them: compared and changed where they differ, not walked over.

    entries   [uid u64, flags u8 (1 paused, 2 a reader's), length of the name u8, name]*n     the bytes of the frame
    sizes     [length of the name u8]*n                                                       where entries begin

Each change of the list is in the log with the whole list, so that a log says all by itself. A topic may have a thousand
channels, and mostly one of them is new: what lies in front of it and behind it is the same bytes as before, which costs
a comparison of memory. Listings never change; what of them is the same bytes was read, and found to fit, before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

CHANNEL_PAUSED, CHANNEL_READER = 1, 2  # flags of a channel

_CHANNEL = struct.Struct(">QBB")
_HEAD = _CHANNEL.size


class ChannelEntry(NamedTuple):
    """One channel of the record."""

    name: str
    uid: int
    paused: bool = False
    reader: bool = False

    @property
    def flags(self) -> int:
        return self.paused * CHANNEL_PAUSED | self.reader * CHANNEL_READER


class Differences(NamedTuple):
    """What a listing does not have of an older one, and the other way round; a channel that changed is in both."""

    gone: list[ChannelEntry]
    came: list[ChannelEntry]


class _Between(NamedTuple):
    """Where two listings differ: entries [first, last) of the older one, at [start, end) of its bytes, became those
    with names of these sizes, at [start, new_end)."""

    first: int
    last: int
    start: int
    end: int
    new_end: int
    sizes: bytes


class Listing:
    """Channels in the order of their entries; `changed` needs that of names."""

    __slots__ = ("_sizes", "entries")

    def __init__(self, entries: bytes = b"", sizes: bytes = b"") -> None:
        """`of` and `read` make one; these bytes have to fit."""
        self.entries = entries
        self._sizes = sizes

    @classmethod
    def of(cls, channels: Iterable[ChannelEntry]) -> Listing:
        """These channels, in this order."""
        parts, sizes = [], bytearray()
        for channel in channels:
            name = channel.name.encode()
            parts.append(_CHANNEL.pack(channel.uid, channel.flags, len(name)) + name)
            sizes.append(len(name))
        return cls(b"".join(parts), bytes(sizes))

    @classmethod
    def read(cls, entries: bytes, count: int, known: Listing) -> Listing:
        """From a frame; what `known` has, too, is not looked at again. struct.error, UnicodeDecodeError: the bytes are
        not those of so many channels."""
        at = known._compared(entries)
        for _ in _entries(entries[at.start : at.new_end]):
            pass  # names that do not decode
        listing = cls(entries, known._sizes[: at.first] + at.sizes + known._sizes[at.last :])
        if len(listing) != count:
            raise struct.error(f"{count} channels announced, {len(listing)} there")
        return listing

    # ---- asking

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[ChannelEntry]:
        return _entries(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listing) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return f"Listing({[*self]})"

    def since(self, older: Listing) -> Differences:
        """What has changed since `older`."""
        at = older._compared(self.entries)
        gone, came = [*_entries(older.entries[at.start : at.end])], [*_entries(self.entries[at.start : at.new_end])]
        if gone and came:  # changes that lie apart have what did not change between them
            same = {*gone} & {*came}
            gone, came = [entry for entry in gone if entry not in same], [entry for entry in came if entry not in same]
        return Differences(gone, came)

    # ---- another one

    def changed(self, changes: Mapping[str, ChannelEntry | None]) -> Listing:
        """With these channels by name, None: without it. The entries are in the order of names, and stay so."""
        entries, sizes = self.entries, self._sizes
        for name, channel in changes.items():
            key = name.encode()
            index, start = Listing(entries, sizes)._place(key)
            there = index < len(sizes) and entries[start + _HEAD : start + _HEAD + sizes[index]] == key
            new = Listing.of([] if channel is None else [channel])
            entries = entries[:start] + new.entries + entries[start + there * (_HEAD + len(key)) :]
            sizes = sizes[:index] + new._sizes + sizes[index + there :]
        return Listing(entries, sizes)

    # ---- where

    def _place(self, name: bytes) -> tuple[int, int]:
        """The first entry whose name is not below this one: its index, and where it begins."""
        entries, sizes = self.entries, self._sizes
        low, start, high = 0, 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            at = start + _HEAD * (middle - low) + sum(sizes[low:middle])
            end = at + _HEAD + sizes[middle]
            if entries[at + _HEAD : end] < name:
                low, start = middle + 1, end
            else:
                high = middle
        return low, start

    def _entry_at(self, place: int) -> tuple[int, int]:
        """The last entry, or the end, that begins at `place` or before: its index, and where it begins."""
        sizes = self._sizes
        low, start, high = 0, 0, len(sizes)
        while low < high:
            middle = (low + high + 1) // 2
            at = start + _HEAD * (middle - low) + sum(sizes[low:middle])
            if at <= place:
                low, start = middle, at
            else:
                high = middle - 1
        return low, start

    def _compared(self, entries: bytes) -> _Between:
        """Where newer entries differ. struct.error: they do not fit."""
        old, old_sizes = self.entries, self._sizes
        first, start = self._entry_at(_common_start(old, entries))
        common = len(old) - _common_end(old, entries, min(len(old), len(entries)) - start)
        grown = len(entries) - len(old)
        last, end, at, sizes = first, start, start, bytearray()
        while end < common or at != end + grown:  # until an entry begins at the same bytes in both
            if end < common or end + grown < at:
                if last == len(old_sizes):
                    raise struct.error(f"the last channel ends {at - len(entries)} bytes too late")
                end += _HEAD + old_sizes[last]
                last += 1
            else:
                _, _, size = _CHANNEL.unpack_from(entries, at)
                at += _HEAD + size
                sizes.append(size)
        return _Between(first, last, start, end, at, bytes(sizes))


NO_CHANNELS = Listing()


def _entries(data: bytes) -> Iterator[ChannelEntry]:
    at = 0
    while at < len(data):
        uid, flags, size = _CHANNEL.unpack_from(data, at)
        name = data[at + _HEAD : at + _HEAD + size].decode()
        yield ChannelEntry(name, uid, flags & CHANNEL_PAUSED != 0, flags & CHANNEL_READER != 0)
        at += _HEAD + size


def _common_start(one: bytes, other: bytes) -> int:
    """How many bytes are the same from the start on."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(one: bytes, other: bytes, most: int) -> int:
    """How many bytes are the same from the end on, `most` at most."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low
