"""The data folder of an nsqd that is not running: its topics, channels and queued messages. Nothing in it is changed.

    nsqd.dat                        JSON: {"topics": [{"name", "paused", "channels": [{"name", "paused"}]}]}
    QUEUE.diskqueue.meta.dat        depth \\n read file, position \\n write file, position
    QUEUE.diskqueue.NNNNNN.dat      records: size i32, then timestamp i64, attempts u16, id 16, body
    QUEUE.diskqueue.NNNNNN.dat.bad  a file that nsqd itself gave up

QUEUE is TOPIC, for what no channel has yet, or TOPIC:CHANNEL. Reading goes from the read position to the end of
the last file: what lies behind the write position was written before a crash and is not in the meta file. A record that
makes no sense ends its file, as there is no telling where the next one begins; reading continues with the next file.

The meta file says where reading begins and where writing ended, and counts the messages between. After a crash there
may be more in the files. Less is lost: files are missing or were cut, by whoever copied or cleaned the folder.

nsqd locks its folder with flock; a shared lock here finds one that runs, and keeps it from being started meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import msgspec

from nsqha.cli.terminal import exits
from nsqha.ids import valid_name
from nsqha.texts import gojson

_FILE = re.compile(r"(?P<queue>.+)\.diskqueue\.(?P<number>\d{6,}|meta)\.dat(?P<bad>\.bad)?")
_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">qH16s")
_RECORD_MAX = 1 << 30
_META_BYTES_MAX = 1 << 10
_METADATA_BYTES_MAX = 256 << 20
_NUMBER_MAX = 1 << 62  # of a file, a position, a depth
METADATA = "nsqd.dat"


class Queued(NamedTuple):
    """A message in a disk queue."""

    id: bytes
    timestamp_ns: int
    body: bytes


@dataclass(frozen=True)
class Damage:
    """Bytes of the folder that hold no readable message, or that are not there."""

    file: str
    position: int
    size: int
    why: str
    lost: bool = False  # nsqd counts messages that are not there

    def __str__(self) -> str:
        if not self.size:
            return f"{self.file}: {self.why}"
        return f"{self.file}: {self.size:,} bytes from {self.position:,} on cannot be read: {self.why}"


class _ChannelEntry(msgspec.Struct):
    name: str = ""
    paused: bool = False


class _TopicEntry(msgspec.Struct):
    name: str = ""
    paused: bool = False
    channels: list[_ChannelEntry] = []


class _Metadata(msgspec.Struct):
    """What `nsqd.dat` holds."""

    topics: list[_TopicEntry] = []


class Extent(NamedTuple):
    """What a queue has by its meta file."""

    depth: int = 0
    first: int = 0  # file and position of the next message
    position: int = 0
    last: int = 0  # file and position behind the last one
    end: int = 0


@dataclass
class SourceChannel:
    name: str
    paused: bool = False


@dataclass
class SourceTopic:
    name: str
    paused: bool = False
    channels: dict[str, SourceChannel] = field(default_factory=dict)


class NsqdFolder:
    """What is in the folder. Use it in a `with`: the lock is held until its end."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.remarks: list[str] = []
        self.topics: dict[str, SourceTopic] = {}
        self._files: dict[str, list[int]] = {}
        self._bad: list[str] = []
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise exits.Exit(exits.NOT_FOUND, f"{path}: {error.strerror}") from None
        try:
            self._take_lock()
            self._list_files()
            self._read_metadata()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> NsqdFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            why = f"a broker is using {self.path}; stop it first with SIGTERM, so that it writes what it has in memory"
            raise exits.Exit(exits.CONFLICT, why) from None

    def _list_files(self) -> None:
        for name in sorted(os.listdir(self.path)):
            match = _FILE.fullmatch(name)
            if match is None or "#ephemeral" in name:
                continue
            if match["bad"]:
                self._bad.append(name)
            else:
                numbers = self._files.setdefault(match["queue"], [])
                numbers += [int(match["number"])] if match["number"] != "meta" else []
        for numbers in self._files.values():
            numbers.sort()

    def _read_metadata(self) -> None:
        path = os.path.join(self.path, METADATA)
        try:
            metadata = gojson.decode(read_file(path, _METADATA_BYTES_MAX), _Metadata)
        except FileNotFoundError:
            if not self._files:
                raise exits.Exit(
                    exits.NOT_FOUND, f"{self.path} has no {METADATA}: it is not a folder of nsqd"
                ) from None
            self.remarks.append(f"{METADATA} is missing: topics and channels are taken from the names of the files")
            metadata = _Metadata()
        except (OSError, ValueError) as error:
            raise exits.Exit(exits.FAILED, f"{path} cannot be read as nsqd's metadata: {error}") from None
        self._take_metadata(metadata)
        for queue in self._files:
            topic_name, _, channel = queue.partition(":")
            topic = self.topics.setdefault(topic_name, SourceTopic(topic_name))
            if channel and channel not in topic.channels:
                self.remarks.append(f"channel {channel} of topic {topic_name} has files and is not in {METADATA}")
                topic.channels[channel] = SourceChannel(channel)

    def _take_metadata(self, metadata: _Metadata) -> None:
        """As nsqd does: names that are not valid are skipped, a name that is there twice is one."""

        def valid(what: str, name: str) -> bool:
            if not valid_name(name):
                self.remarks.append(f"{METADATA} has the {what} {name!r}: the name is not valid; it is skipped")
            return valid_name(name)

        for listed in metadata.topics:
            if not valid("topic", listed.name):
                continue
            topic = self.topics.setdefault(listed.name, SourceTopic(listed.name))
            topic.paused |= listed.paused
            for entry in listed.channels:
                if valid("channel", entry.name):
                    channel = topic.channels.setdefault(entry.name, SourceChannel(entry.name))
                    channel.paused |= entry.paused

    # ---- what identifies it

    def fingerprint(self) -> list[list[object]]:
        """Names, sizes and times of all files that are read: equal as long as nsqd has not run again."""
        names = [METADATA] if os.path.exists(os.path.join(self.path, METADATA)) else []
        names += [name for name in sorted(os.listdir(self.path)) if _FILE.fullmatch(name)]
        found = [(name, os.stat(os.path.join(self.path, name))) for name in names]
        return [[name, seen.st_size, seen.st_mtime_ns] for name, seen in found]

    # ---- queues

    def messages(self, topic: str, channel: str | None, damage: list[Damage]) -> Iterator[Queued]:
        """The messages of a queue, in its order. What cannot be read, or is not there, is added to `damage`."""
        queue = topic if channel is None else f"{topic}:{channel}"
        extent = self._extent(queue, damage)
        wanted = [number for number in self._files.get(queue, []) if number >= extent.first]
        damage += self._missing(queue, wanted, extent)
        found = 0
        for number in wanted:
            name, position = _name(queue, number), extent.position if number == extent.first else 0
            for message in self._records(name, position, extent.end if number == extent.last else 0, damage):
                found += 1
                yield message
        if found < extent.depth:
            why = f"it counts {extent.depth:,} messages, and the files have {found:,}"
            damage.append(Damage(_meta_name(queue), 0, 0, why, lost=True))
        for name in self._bad:
            if name.startswith(f"{queue}.diskqueue."):
                size = os.path.getsize(os.path.join(self.path, name))
                damage.append(Damage(name, 0, size, "nsqd has set this file aside as damaged"))

    def _missing(self, queue: str, wanted: list[int], extent: Extent) -> Iterator[Damage]:
        """One for each gap between the files that are there, and the ends that the meta file names."""
        before = extent.first - 1 if extent.first or extent.end or extent.last else (wanted or [0])[0] - 1
        end = extent.last + (extent.end > 0 and (extent.first, extent.position) != (extent.last, extent.end))
        for number in [*wanted, max(end, wanted[-1] + 1) if wanted else end]:
            if number > before + 1:
                gap = number - before - 1
                more = f", and so are the next {gap - 1:,}" if gap > 1 else ""
                yield Damage(_name(queue, before + 1), 0, 0, f"the file is missing{more}", lost=True)
            before = number

    def _extent(self, queue: str, damage: list[Damage]) -> Extent:
        name = _meta_name(queue)
        try:
            depth, read, write = read_file(os.path.join(self.path, name), _META_BYTES_MAX).split()
            numbers = [int(number) for part in (depth, read, write) for number in part.split(b",")]
            extent = Extent(*numbers)
            if len(numbers) == len(extent) and all(0 <= number < _NUMBER_MAX for number in numbers):
                return extent
            why = "it makes no sense"
        except FileNotFoundError:
            if not self._files.get(queue):
                return Extent()
            why = "the file is missing"
        except (ValueError, TypeError):
            why = "it makes no sense"
        except OSError as error:
            why = error.strerror or str(error)
        damage.append(Damage(name, 0, 0, f"{why}; the queue is read from the beginning of its files"))
        return Extent()

    def _records(self, name: str, position: int, written: int, damage: list[Damage]) -> Iterator[Queued]:
        """The messages of a file from `position` on. nsqd has written at least `written` bytes of it."""
        try:
            with open_file(os.path.join(self.path, name)) as file:
                end = os.fstat(file.fileno()).st_size
                written = max(position, written)
                file.seek(position)
                while position < end:
                    record = _record(file, end - position)
                    if isinstance(record, str):
                        damage.append(Damage(name, position, end - position, record, lost=end < written))
                        return
                    timestamp_ns, _, message_id = _HEAD.unpack_from(record)
                    yield Queued(message_id, timestamp_ns, record[_HEAD.size :])
                    position += _SIZE.size + len(record)
                if end < written:
                    why = f"it has {end:,} bytes, and nsqd was at {written:,}"
                    damage.append(Damage(name, end, 0, why, lost=True))
        except OSError as error:
            damage.append(Damage(name, position, 0, error.strerror or str(error)))


def open_file(path: str) -> BinaryIO:
    """Open a regular file. OSError for anything else: a pipe would be waited for, and a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no regular file")
    return open(descriptor, "rb")


def read_file(path: str, bytes_max: int) -> bytes:
    """All bytes of a regular file. OSError as `open_file`, and for a longer one."""
    with open_file(path) as file:
        found = file.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max:,} bytes")
    return found


def _meta_name(queue: str) -> str:
    return f"{queue}.diskqueue.meta.dat"


def _name(queue: str, number: int) -> str:
    return f"{queue}.diskqueue.{number:06d}.dat"


def _record(file: BinaryIO, left: int) -> bytes | str:
    """The next record, or why there is none."""
    if left < _SIZE.size:
        return "a record is cut off"
    (size,) = _SIZE.unpack(file.read(_SIZE.size))
    if not _HEAD.size < size <= _RECORD_MAX:
        return f"a message cannot have {size} bytes"
    if size > left - _SIZE.size:
        return f"a record of {size:,} bytes is cut off"
    return file.read(size)
