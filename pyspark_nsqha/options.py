"""The options of `.option(..)`, parsed and checked before any request or read.

    ConnectOptions   which brokers, and with which certificate
    TopicSelection   which topics and partitions
    Bounds           where reading begins and ends: a Bound each
    Reading          how ranges become rows

Names are those of Spark's Kafka source where it has them, and are case-insensitive: Spark passes them in lower case. A
name that is not in OPTIONS is refused, and so is one that belongs to another use of the source. All errors are
OptionError with one line that names the option and what to write instead. Values are plain and small: they are pickled
into plans. What must not be shown (the path of a key) is not in any repr.

The precedence is that of Kafka's source, separately for the start and the end: startingTimestamp before
startingOffsetsByTimestamp before startingOffsets.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from nsqha.ids import OFFSET_MAX, PARTITIONS_MAX, is_ephemeral, valid_name

Use = Literal["read", "readStream", "write", "writeStream"]

READS: Final = ("read", "readStream")
WRITES: Final = ("write", "writeStream")
EVERYWHERE: Final = READS + WRITES

OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "brokers": READS,
    "timeoutMs": EVERYWHERE,
    "numRetries": READS,
    "host": READS,
    "nsqha.tls.cert": EVERYWHERE,
    "nsqha.tls.key": EVERYWHERE,
    "nsqha.tls.ca": EVERYWHERE,
    "nsqha.clusterSecretFile": READS,
    "subscribe": READS,
    "subscribePattern": READS,
    "assign": READS,
    "startingOffsets": READS,
    "startingTimestamp": READS,
    "startingOffsetsByTimestamp": READS,
    "startingOffsetsByTimestampStrategy": READS,
    "startingChannel": READS,
    "endingOffsets": ("read",),
    "endingTimestamp": ("read",),
    "endingOffsetsByTimestamp": ("read",),
    "failOnDataLoss": READS,
    "minPartitions": READS,
    "splitBytes": READS,
    "batchBytes": EVERYWHERE,
    "columns": READS,
    "verify": READS,
    "mode": READS,
    "ids": ("read",),
    "holdMs": READS,
    "path": ("read",),
    "pushdown": ("read",),
    "archive": ("read",),
    "maxOffsetsPerTrigger": ("readStream",),
    "maxBytesPerTrigger": ("readStream",),
    "minOffsetsPerTrigger": ("readStream",),
    "maxTriggerDelay": ("readStream",),
    "commitChannel": ("readStream",),
    "nsqd": WRITES,
    "nsqha.tls": WRITES,
    "nsqha.tls.skipVerify": WRITES,
    "nsqha.authSecretFile": WRITES,
    "topic": WRITES,
    "maxMessageBytes": WRITES,
    "ignoreColumns": WRITES,
}
"""Name of each option -> where it may be given."""

KAFKAS: Final = {
    "kafka.bootstrap.servers": "write brokers, with the addresses of --grpc-address",
    "kafka.group.id": "write commitChannel, with the name of a channel, in a stream",
    "groupidprefix": "write commitChannel, with the name of a channel, in a stream",
    "includeheaders": "leave it out, the log has no headers",
}
"""Options of jobs for Kafka -> what to write instead."""

MIB: Final = 1 << 20
EARLIEST: Final = -2
LATEST: Final = -1
IDS_MAX: Final = 100_000
HOLD_MS: Final = 900_000
HOLD_MS_MAX: Final = 6 * 3600 * 1000  # what a broker accepts; reading renews a hold

_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,15})\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:,\[\]/]+):(\d{1,5})")
_ID: Final = re.compile(r"[0-9a-f]{16}")
_INSTANT_MAX_NS: Final = (1 << 63) - 1  # what fits the snapshot's request
_SECONDS: Final = range(10**8, 978_307_200_000)  # as milliseconds before 2001; as seconds from 1973 on


class OptionError(ValueError):
    """An option or its value cannot be used. The message is one line."""


@dataclass(frozen=True)
class Tls:
    """The paths of certificate, key and authority: files on every machine that reads."""

    cert: str = field(repr=False)
    key: str = field(repr=False)
    ca: str = field(repr=False)


@dataclass(frozen=True)
class ConnectOptions:
    """Which brokers to ask, how long to wait for one answer, and how often to retry."""

    brokers: tuple[str, ...]
    tls: Tls | None = None
    timeout_ms: int = 30_000
    retries: int = 3
    host: str = ""  # label of the machine that reads; empty: each machine's own name
    secret_file: str = field(default="", repr=False)  # on the machine of the driver


@dataclass(frozen=True)
class TopicSelection:
    """Selects partitions: of topics by name, of topics that match a pattern, or exactly these. One of them is set."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The topics by name; empty with a pattern."""
        return self.topics or tuple(topic for topic, _ in self.assigned)

    def wants(self, topic: str, partition: int) -> bool:
        """Whether this partition of a selected topic is selected."""
        return not self.assigned or any(topic == name and partition in numbers for name, numbers in self.assigned)


@dataclass(frozen=True)
class Bound:
    """Where to begin, or to end: the same in every partition, or one by one.

    `place` counts unless one of the others is set. `offsets` has a message's offset, EARLIEST or LATEST per (topic,
    partition), `times_ns` the wall clock; `time_ns` is for all partitions.
    """

    option: str  # the option that the user gave, for messages
    place: int = EARLIEST
    offsets: tuple[tuple[tuple[str, int], int], ...] = ()
    time_ns: int | None = None
    times_ns: tuple[tuple[tuple[str, int], int], ...] = ()

    @property
    def instants(self) -> tuple[int, ...]:
        """All times of the bound in nanoseconds, ascending."""
        own = () if self.time_ns is None else (self.time_ns,)
        return tuple(sorted({*own, *(at for _, at in self.times_ns)}))


@dataclass(frozen=True)
class Bounds:
    """Where reading begins and ends."""

    start: Bound
    end: Bound
    after_all: Literal["error", "latest"] = "error"  # a start later than the last message
    channel: str = ""  # begin at the floor of this channel instead


@dataclass(frozen=True)
class Reading:
    """How ranges become tasks and rows."""

    fail_on_data_loss: bool = True
    min_partitions: int = 0
    split_bytes: int = 64 * MIB
    batch_bytes: int = 2 * MIB
    columns: tuple[str, ...] = ()
    verify: Literal["full", "crc", "none"] = "full"
    mode: Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"] = "FAILFAST"


@dataclass(frozen=True)
class BatchOptions:
    """All options of `spark.read.format("nsqha")`, parsed."""

    connection: ConnectOptions | None  # None: files
    subscription: TopicSelection
    bounds: Bounds
    reading: Reading
    ids: tuple[str, ...] = ()
    hold_ms: int = HOLD_MS
    path: str = ""
    pushdown: bool = False
    archive: str = ""  # URI of a lake that is read in front of the log


class Given:
    """The options of one use, by name; names are case-insensitive."""

    def __init__(self, options: Mapping[str, str], use: Use | None) -> None:
        """`use` None: not known yet. OptionError names an option that is not known, or not for this use."""
        self._values = {name.lower(): value for name, value in options.items()}
        known = {name.lower(): (name, uses) for name, uses in OPTIONS.items()}
        for name in sorted(self._values):
            if name not in known:
                raise OptionError(_unknown(name, use))
            spelled, uses = known[name]
            if use is not None and use not in uses:
                raise OptionError(f"option {spelled} is not for {use} but for {' and '.join(uses)}: leave it out")

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name.lower(), default).strip()

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name, str(default)).lower()
        if text not in ("true", "false"):
            raise OptionError(f"{name}: {_short(text)} is neither true nor false")
        return text == "true"

    def choice(self, name: str, default: str, *others: str) -> Any:
        """One of these words, case-insensitive. OptionError for any other."""
        words = (default, *others)
        text = self.text(name, default)
        for word in words:
            if word.lower() == text.lower():
                return word
        raise OptionError(f"{name}: {_short(text)} is not one of {', '.join(words)}")

    def number(self, name: str, default: int, least: int, most: int) -> int:
        text = self.text(name)
        if not self.has(name):
            return default
        if not re.fullmatch(r"\d{1,15}", text) or not least <= int(text) <= most:
            raise OptionError(f"{name}: {_short(text)} is not a whole number from {least} to {most}")
        return int(text)

    def size(self, name: str, default: int, least: int, most: int) -> int:
        """A number of bytes; 64m is 64 MiB."""
        if not self.has(name):
            return default
        text = self.text(name)
        match = _SIZE.fullmatch(text)
        if match is None:
            raise OptionError(f"{name}: {_short(text)} is not a size such as 64m, 1g or 1048576")
        size = int(match[1]) * _UNITS[match[2].lower()]
        if not least <= size <= most:
            raise OptionError(f"{name}: {_short(text)} is not between {show_size(least)} and {show_size(most)}")
        return size

    def words(self, name: str) -> tuple[str, ...]:
        """The words between commas, without duplicates."""
        found = [word.strip() for word in self.text(name).split(",")]
        return tuple(dict.fromkeys(word for word in found if word))


def batch_options(options: Mapping[str, str]) -> BatchOptions:
    """Parse the options of a batch read. OptionError names what cannot be used."""
    given = Given(options, "read")
    path = given.text("path")
    bounds = parse_bounds(given)
    if bounds.start.place == LATEST and bounds.start.option == "startingOffsets" and not bounds.start.offsets:
        raise OptionError("startingOffsets: latest would read nothing in a batch; write earliest or offsets")
    for (topic, partition), offset in bounds.start.offsets:
        if offset == LATEST:
            where = f"{topic}/{partition}"
            raise OptionError(f"startingOffsets: {where} begins at -1 (latest), which would read nothing in a batch")
    if bounds.end.place == EARLIEST:
        raise OptionError("endingOffsets: earliest would read nothing; write latest or offsets")
    for (topic, partition), offset in bounds.end.offsets:
        if offset == EARLIEST:
            raise OptionError(f"endingOffsets: {topic}/{partition} ends at -2 (earliest), which would read nothing")
    _check_times(bounds)
    return BatchOptions(
        connection=None if path else parse_connection(given),
        subscription=parse_subscription(given),
        bounds=bounds,
        reading=parse_reading(given),
        ids=_ids(given),
        hold_ms=given.number("holdMs", HOLD_MS, 0, HOLD_MS_MAX),
        path=path,
        pushdown=given.flag("pushdown", False),
        archive=given.text("archive"),
    )


def _check_times(bounds: Bounds) -> None:
    """OptionError if the given times end before they begin."""
    start, end = bounds.start, bounds.end
    begins, ends = dict(start.times_ns), dict(end.times_ns)
    keys: list[tuple[str, int] | None] = [*sorted({*begins, *ends})]
    for key in keys or [None]:
        first = start.time_ns if start.time_ns is not None else begins.get(key) if key else None
        last = end.time_ns if end.time_ns is not None else ends.get(key) if key else None
        if first is not None and last is not None and first >= last:
            where = f" of {key[0]}/{key[1]}" if key else ""
            raise OptionError(f"{start.option}{where} is not before {end.option}: this would read nothing")


def parse_connection(given: Given) -> ConnectOptions:
    """Parse brokers, nsqha.tls.*, timeoutMs, numRetries and host."""
    brokers = given.words("brokers")
    if not brokers:
        raise OptionError("brokers is missing: the host:port of a broker's --grpc-address, or several with commas")
    for broker in brokers:
        match = _ADDRESS.fullmatch(broker)
        if match is None or not 0 < int(match[2]) < 65536:
            raise OptionError(f"brokers: {_short(broker)} is not host:port; give a broker's --grpc-address")
    places = {name: given.text(f"nsqha.tls.{name}") for name in ("cert", "key", "ca")}
    missing = [f"nsqha.tls.{name}" for name, place in places.items() if not place]
    if 0 < len(missing) < 3:
        raise OptionError(f"TLS needs nsqha.tls.cert, nsqha.tls.key and nsqha.tls.ca; give {' and '.join(missing)} too")
    return ConnectOptions(
        brokers=brokers,
        tls=None if missing else Tls(**places),
        timeout_ms=given.number("timeoutMs", 30_000, 100, 3_600_000),
        retries=given.number("numRetries", 3, 0, 100),
        host=given.text("host"),
        secret_file=given.text("nsqha.clusterSecretFile"),
    )


def parse_subscription(given: Given) -> TopicSelection:
    """Parse subscribe, subscribePattern or assign."""
    asked = [name for name in ("subscribe", "subscribePattern", "assign") if given.has(name)]
    if len(asked) != 1:
        said = f"{' and '.join(asked)} are given" if asked else "none is given"
        raise OptionError(f"give exactly one of subscribe, subscribePattern or assign; {said}")
    if asked == ["subscribePattern"]:
        pattern = given.text("subscribePattern")
        if not pattern:
            raise OptionError("subscribePattern is empty; it matches whole names: orders.* or .*")
        return TopicSelection(pattern=pattern)
    if asked == ["subscribe"]:
        topics = given.words("subscribe")
        if not topics:
            raise OptionError("subscribe is empty; it takes names of topics with commas between them")
        return TopicSelection(topics=tuple(sorted(_topic("subscribe", topic) for topic in topics)))
    numbers: dict[str, tuple[int, ...]] = {}
    for topic, listed in _json_object("assign", given.text("assign"), ASSIGN_EXAMPLE).items():
        if not isinstance(listed, list) or not listed:
            raise OptionError(f"assign: {topic} needs a list of partitions, as in {ASSIGN_EXAMPLE}")
        numbers[_topic("assign", topic)] = tuple(sorted({_partition("assign", topic, number) for number in listed}))
    if not numbers:
        raise OptionError(f"assign is empty; it names partitions, as in {ASSIGN_EXAMPLE}")
    return TopicSelection(assigned=tuple(sorted(numbers.items())))


def parse_bounds(given: Given, *, start: int = EARLIEST) -> Bounds:
    """Parse where to begin and to end, by Kafka's precedence. `start` is the default start."""
    channel = given.text("startingChannel")
    starts = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
    if channel:
        if not valid_name(channel):
            raise OptionError(f"startingChannel: {_short(channel)} is not a channel name")
        if also := [name for name in starts if given.has(name)]:
            raise OptionError(f"startingChannel and {also[0]} both say where to begin: leave one out")
    return Bounds(
        start=_bound(given, *starts, default=start),
        end=_bound(given, "endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets", default=LATEST),
        after_all=given.choice("startingOffsetsByTimestampStrategy", "error", "latest"),
        channel=channel,
    )


def parse_reading(given: Given) -> Reading:
    """Parse the options for tasks, batches, columns and for bytes that do not verify."""
    return Reading(
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        min_partitions=given.number("minPartitions", 0, 1, 100_000),
        split_bytes=given.size("splitBytes", 64 * MIB, MIB // 16, 64 << 30),
        batch_bytes=given.size("batchBytes", 2 * MIB, MIB // 16, 256 * MIB),
        columns=given.words("columns"),
        verify=given.choice("verify", "full", "crc", "none"),
        mode=given.choice("mode", "FAILFAST", "PERMISSIVE", "DROPMALFORMED"),
    )


ASSIGN_EXAMPLE: Final = '{"orders":[0,1]}'
OFFSETS_EXAMPLE: Final = '{"orders":{"0":23,"1":-2}}'
TIMES_EXAMPLE: Final = '{"orders":{"0":1795262005000}}'


def _bound(given: Given, time: str, times: str, offsets: str, *, default: int) -> Bound:
    if given.has(time):
        return Bound(time, time_ns=parse_time(time, given.text(time)), place=default)
    if given.has(times):
        found = _per_partition(times, given.text(times), TIMES_EXAMPLE)
        return Bound(times, times_ns=tuple((key, parse_time(times, str(at))) for key, at in found), place=default)
    text = given.text(offsets)
    if not given.has(offsets) or text.lower() in ("earliest", "latest"):
        place = {"earliest": EARLIEST, "latest": LATEST}.get(text.lower(), default)
        return Bound(offsets, place=place)
    if not text.startswith("{"):
        raise OptionError(f"{offsets}: {_short(text)} is not earliest, latest or JSON such as {OFFSETS_EXAMPLE}")
    places = []
    for (topic, partition), offset in _per_partition(offsets, text, OFFSETS_EXAMPLE):
        if isinstance(offset, bool) or not isinstance(offset, int) or not EARLIEST <= offset <= OFFSET_MAX:
            where = f"{topic}/{partition}"
            raise OptionError(f"{offsets}: {where} has {_short(offset)}; give an offset, -2 (earliest) or -1 (latest)")
        places.append(((topic, partition), offset))
    return Bound(offsets, offsets=tuple(places), place=default)


def parse_time(option: str, text: str) -> int:
    """Parse milliseconds since 1970, or ISO-8601 with a zone, to nanoseconds since 1970. OptionError otherwise."""
    ns = -1
    if re.fullmatch(r"\d{1,16}", text):
        if int(text) in _SECONDS:
            raise OptionError(f"{option}: {_short(text)} looks like seconds: write milliseconds since 1970")
        ns = int(text) * 10**6
    else:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise OptionError(
                f"{option}: {_short(text)} is not a time: give milliseconds since 1970, or 2026-11-20T10:00:00Z"
            ) from None
        if when.tzinfo is None:
            raise OptionError(f"{option}: {_short(text)} has no zone; write {text}Z for UTC, or {text}+01:00")
        whole = when.replace(microsecond=0)
        ns = int(whole.timestamp()) * 10**9 + when.microsecond * 1000
    if not 0 <= ns <= _INSTANT_MAX_NS:
        raise OptionError(f"{option}: {_short(text)} is not between 1970 and 2262; numbers are milliseconds")
    return ns


def is_id(text: object) -> bool:
    """Whether the text has the form of a message id."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def show_size(size: int) -> str:
    """Format a size in the form that options accept: 64m."""
    for letter in ("t", "g", "m", "k"):
        if size and size % _UNITS[letter] == 0:
            return f"{size // _UNITS[letter]}{letter}"
    return str(size)


def _per_partition(option: str, text: str, example: str) -> list[tuple[tuple[str, int], Any]]:
    found = []
    for topic, partitions in _json_object(option, text, example).items():
        if not isinstance(partitions, dict):
            raise OptionError(f"{option}: {_short(topic)} needs partitions, as in {example}")
        for number, value in partitions.items():
            found.append(((_topic(option, topic), _partition(option, topic, number)), value))
    if not found:
        raise OptionError(f"{option} is empty; write it as {example}")
    return sorted(found, key=lambda one: one[0])


def _json_object(option: str, text: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except OptionError as error:
        raise OptionError(f"{option}: {error}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"{option}: {_short(text)} is not JSON such as {example}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise OptionError(f"{_short(name)} is given twice")
        made[name] = value
    return made


def _topic(option: str, name: str) -> str:
    if not valid_name(name):
        raise OptionError(f"{option}: {_short(name)} is not a topic name")
    if is_ephemeral(name):
        raise OptionError(f"{option}: {name} is ephemeral: it has no log to read; consume it instead")
    return name


def _partition(option: str, topic: str, number: object) -> int:
    text = str(number)
    if isinstance(number, bool) or not re.fullmatch(r"\d{1,4}", text) or int(text) >= PARTITIONS_MAX:
        most = PARTITIONS_MAX - 1
        raise OptionError(f"{option}: {_short(number)} is not a partition of {topic}; partitions are 0 to {most}")
    return int(text)


def _ids(given: Given) -> tuple[str, ...]:
    ids = given.words("ids")
    if given.has("ids") and not ids:
        raise OptionError("ids is empty; it takes message ids of 16 hex digits with commas between them")
    if len(ids) > IDS_MAX:
        raise OptionError(f"ids: {len(ids)} are more than {IDS_MAX} at once; read them in parts")
    for one in ids:
        if not is_id(one):
            raise OptionError(f"ids: {_short(one)} is not a message id of 16 hex digits, 0-9 and a-f")
    return ids


def _unknown(name: str, use: Use | None) -> str:
    if name.startswith("option."):  # catalogs pass them so, once; when the table is read, they are missing
        return "Spark drops the options of a table of a Python source: write CREATE TEMPORARY VIEW instead of TABLE"
    if name in KAFKAS:
        return f"option {name} is one of Kafka's connector: {KAFKAS[name]}"
    known = {option.lower(): option for option, uses in OPTIONS.items() if use is None or use in uses}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"there is no option {_short(name)}; did you mean {known[near[0]]}?"
    return f"there is no option {_short(name)}; those of {use or 'this source'} are {', '.join(sorted(known.values()))}"


def _short(value: object) -> str:
    """The value quoted, on one line, and shortened."""
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")
