"""The data folder of an nsqd that is not running: its topics, channels and queued messages. Nothing in it is changed.

    nsqd.dat                        JSON: {"topics": [{"name", "paused", "channels": [{"name", "paused"}]}]}
    QUEUE.diskqueue.meta.dat        depth \\n read file, position \\n write file, position
    QUEUE.diskqueue.NNNNNN.dat      records: size i32, then timestamp i64, attempts u16, id 16, body
    QUEUE.diskqueue.NNNNNN.dat.bad  a file that nsqd itself gave up

QUEUE is TOPIC, for what no channel has yet, or TOPIC:CHANNEL. Reading goes from the read position to the end of
the last file: what lies behind the write position was written before a crash and is not in the meta file. A record that
makes no sense ends its file, as there is no telling where the next one begins; reading continues with the next file.

nsqd locks its folder with flock; a shared lock here finds one that runs, and keeps it from being started meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import msgspec

from nsqha import gojson
from nsqha.cli.terminal import exits
from nsqha.ids import valid_name

_FILE = re.compile(r"(?P<queue>.+)\.diskqueue\.(?P<number>\d{6,}|meta)\.dat(?P<bad>\.bad)?")
_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">qH16s")
_RECORD_MAX = 1 << 30
METADATA = "nsqd.dat"


class Queued(NamedTuple):
    """A message in a disk queue."""

    id: bytes
    timestamp_ns: int
    body: bytes


@dataclass(frozen=True)
class Damage:
    """Bytes of the folder that hold no readable message."""

    file: str
    position: int
    size: int
    why: str

    def __str__(self) -> str:
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
            elif match["number"] != "meta":
                self._files.setdefault(match["queue"], []).append(int(match["number"]))
        for numbers in self._files.values():
            numbers.sort()

    def _read_metadata(self) -> None:
        path = os.path.join(self.path, METADATA)
        try:
            with open(path, "rb") as file:
                metadata = gojson.decode(file.read(), _Metadata)
        except FileNotFoundError:
            if not self._files:
                raise exits.Exit(
                    exits.NOT_FOUND, f"{self.path} has no {METADATA}: it is not a folder of nsqd"
                ) from None
            self.remarks.append(f"{METADATA} is missing: topics and channels are taken from the names of the files")
            metadata = _Metadata()
        except ValueError as error:
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
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]

    # ---- queues

    def messages(self, topic: str, channel: str | None, damage: list[Damage]) -> Iterator[Queued]:
        """The messages of a queue, in its order. What cannot be read is added to `damage`."""
        queue = topic if channel is None else f"{topic}:{channel}"
        numbers = self._files.get(queue, [])
        first, position = self._read_position(queue, damage)
        wanted = [number for number in numbers if number >= first]
        if wanted:
            for missing in sorted(set(range(first or wanted[0], wanted[-1])) - set(wanted)):
                damage.append(Damage(_name(queue, missing), 0, 0, "the file is missing"))
        for number in wanted:
            yield from self._records(_name(queue, number), position if number == first else 0, damage)
        for name in self._bad:
            if name.startswith(f"{queue}.diskqueue."):
                size = os.path.getsize(os.path.join(self.path, name))
                damage.append(Damage(name, 0, size, "nsqd has set this file aside as damaged"))

    def _read_position(self, queue: str, damage: list[Damage]) -> tuple[int, int]:
        name = f"{queue}.diskqueue.meta.dat"
        try:
            with open(os.path.join(self.path, name), encoding="ascii") as file:
                _, read, _ = file.read().split()
                number, position = read.split(",")
                return int(number), int(position)
        except FileNotFoundError:
            if self._files.get(queue):
                damage.append(
                    Damage(name, 0, 0, "the file is missing; the queue is read from the beginning of its files")
                )
        except ValueError:
            damage.append(Damage(name, 0, 0, "it makes no sense; the queue is read from the beginning of its files"))
        return 0, 0

    def _records(self, name: str, position: int, damage: list[Damage]) -> Iterator[Queued]:
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(position)
                while position < end:
                    record = _record(file, end - position)
                    if isinstance(record, str):
                        damage.append(Damage(name, position, end - position, record))
                        return
                    timestamp_ns, _, message_id = _HEAD.unpack_from(record)
                    yield Queued(message_id, timestamp_ns, record[_HEAD.size :])
                    position += _SIZE.size + len(record)
        except OSError as error:
            damage.append(Damage(name, position, 0, error.strerror or str(error)))


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
