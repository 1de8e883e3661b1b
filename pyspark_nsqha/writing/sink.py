"""The sink of batch and stream jobs: publishes rows as messages, at least once.

    DataFrame -> one task per Spark partition -> Arrow batches -> MPUBs and DPUBs, in order, over one connection

Promises. Every row of a successful job is stored. A row may be stored more than once: when a connection was lost and
its outcome is unknown (counted, and logged at the end), and when Spark runs a task or a micro-batch again (not counted:
only Spark knows). Rows of one task keep their order within a topic that has one partition; a task that changes its
broker may get another partition of a topic that has several. What a failed job has published stays published.

Columns: `value` (binary or string; NSQ has no null and no empty body), `topic` (string) unless option topic is given,
which wins as in Kafka's connector, `defer_ms` (an integer; null and 0: at once).

All rows of an Arrow batch are checked before one of them is sent. Values are put into MPUBs without a Python object per
row: Arrow joins each value with its length, and an MPUB is a slice of the result.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, ByteType, IntegerType, LongType, ShortType, StringType, StructType

from pyspark_nsqha.options import MIB, Given, OptionError, Use
from pyspark_nsqha.writing.publisher import (
    IN_FLIGHT_BATCHES_MAX,
    PLAIN,
    Command,
    LinkSecurity,
    PublishRefused,
    TaskPublisher,
    split_address,
)

logger = logging.getLogger(__name__)

JOIN_BYTES_MAX = 16 << 20  # of values that are joined with their lengths at once: memory besides the Arrow batch
SECRET_BYTES_MAX = 4096
SECRET_VARIABLE = "NSQHA_AUTH_SECRET"
SPARKS_OPTIONS = {"checkpointlocation", "queryname", "outputmode"}  # Spark passes its own options on
_TOPIC = re.compile(r"(?=.{1,64}\Z)[.a-zA-Z0-9_-]+(#ephemeral)?\Z")


class SinkRefused(ValueError):
    """The rows or options of the job cannot be written; the message is one line that says what to change."""


@dataclass(frozen=True)
class SinkOptions:
    """The sink's options, checked."""

    nsqd: tuple[str, ...]
    topic: str = ""
    ignore_columns: bool = False
    batch_bytes: int = 1 << 20
    message_bytes_max: int = 1 << 20
    timeout_ms: int = 120_000
    security: LinkSecurity = PLAIN
    auth_secret_file: str = ""

    @classmethod
    def parse(cls, options: Mapping[str, str], use: Use = "write") -> SinkOptions:
        """Parse the user's options; names are case-insensitive. OptionError, SinkRefused."""
        if any(name.lower() == "brokers" for name in options):
            raise OptionError("option brokers is for reading: write nsqd, with --tcp-address of brokers")
        given = Given({name: str(value) for name, value in options.items() if name.lower() not in SPARKS_OPTIONS}, use)
        topic = given.text("topic")
        if topic:
            check_topic(topic, "option topic")
        return cls(
            nsqd=_addresses(given),
            topic=topic,
            ignore_columns=given.flag("ignoreColumns", False),
            batch_bytes=given.size("batchBytes", MIB, 1 << 10, 1 << 30),
            message_bytes_max=given.size("maxMessageBytes", MIB, 1, 1 << 30),
            timeout_ms=given.number("timeoutMs", 120_000, 100, 3_600_000),
            security=_security(given),
            auth_secret_file=given.text("nsqha.authSecretFile"),
        )


class SinkColumns(NamedTuple):
    """The indices of the columns; None: there is no such column."""

    value: int
    topic: int | None
    defer_ms: int | None

    @classmethod
    def of(cls, schema: StructType, options: SinkOptions) -> SinkColumns:
        """Find the columns in a DataFrame's schema. SinkRefused: one is missing, of another type, or not known."""
        found: dict[str, int] = {}
        for index, field in enumerate(schema.fields):
            name = field.name.lower()
            if name not in _TYPES:
                if not options.ignore_columns:
                    raise SinkRefused(
                        f"column {field.name!r} cannot be written: a message has only value, topic and defer_ms; "
                        f"drop it, or set option ignoreColumns to true"
                    )
                continue
            if name in found:
                raise SinkRefused(f"there are two columns {name!r}")
            kinds, wanted = _TYPES[name]
            if not isinstance(field.dataType, kinds):
                raise SinkRefused(f"column {name!r} is {field.dataType.simpleString()}: cast it to {wanted}")
            found[name] = index
        if "value" not in found:
            raise SinkRefused(f"there is no column 'value' among {', '.join(schema.fieldNames()) or 'none'}")
        if not options.topic and "topic" not in found:
            raise SinkRefused("no topic is given: set option topic, or add a column 'topic'")
        return cls(found["value"], None if options.topic else found["topic"], found.get("defer_ms"))


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "value": ((BinaryType, StringType), "binary or string"),
    "topic": ((StringType,), "string"),
    "defer_ms": ((ByteType, ShortType, IntegerType, LongType), "bigint"),
}


@dataclass
class Published(WriterCommitMessage):
    """What one task published, in messages."""

    published: int
    possible_duplicates: int


class SinkWriter:
    """The common part of both writers. It is pickled into tasks, so it has only plain values, and no secret."""

    def __init__(self, schema: StructType, overwrite: bool, options: Mapping[str, str], use: Use) -> None:
        if overwrite:
            raise SinkRefused("a log cannot be overwritten: use mode('append'), or outputMode('append') or ('update')")
        self.options = SinkOptions.parse(options, use)
        self.columns = SinkColumns.of(schema, self.options)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of one task. SinkRefused, PublishRefused and PublishFailed end the task."""
        options = self.options
        publisher = task_publisher(options)
        row = 0
        try:
            for batch in batches:
                for command in commands(batch, self.columns, options, first_row=row):
                    publisher.publish(command)
                row += batch.num_rows
            publisher.flush()
        except (SinkRefused, PublishRefused) as error:
            raise type(error)(f"{error}; this task has published {publisher.tally.published} messages") from None
        finally:
            publisher.close()
        return Published(publisher.tally.published, publisher.tally.possible_duplicates)

    def committed(self, messages: list[WriterCommitMessage | None], what: str) -> None:
        """Log what was published, as a warning if some of it may be stored twice."""
        published, duplicates = _sums(messages)
        if duplicates:
            logger.warning(
                "nsqha: %s published %d messages; up to %d of them may be stored twice: connections were lost before "
                "the broker answered", what, published, duplicates,
            )  # fmt: skip
        else:
            logger.info("nsqha: %s published %d messages", what, published)

    def aborted(self, messages: list[WriterCommitMessage | None], what: str) -> None:
        """Log what stays published."""
        published, _ = _sums(messages)
        tasks = sum(message is not None for message in messages)
        logger.error(
            "nsqha: %s failed, and what is published stays published: %d messages of the %d successful tasks, and "
            "those of the others up to their errors; running it again publishes them again", what, published, tasks,
        )  # fmt: skip


def task_publisher(options: SinkOptions) -> TaskPublisher:
    """The publisher of one task. SinkRefused: the secret cannot be read where it runs."""
    return TaskPublisher(
        options.nsqd,
        first=_task_number(),
        timeout_s=options.timeout_ms / 1000,
        in_flight_bytes_max=IN_FLIGHT_BATCHES_MAX * options.batch_bytes,
        security=replace(options.security, auth_secret=_secret(options.auth_secret_file)),
    )


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> NsqhaWriter:
    """The writer of `df.write`. OptionError, SinkRefused: raised before a task starts."""
    return NsqhaWriter(schema, overwrite, options)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> NsqhaStreamWriter:
    """The writer of `df.writeStream`. OptionError, SinkRefused: as `batch_writer`."""
    return NsqhaStreamWriter(schema, overwrite, options)


class NsqhaWriter(DataSourceArrowWriter):
    """Writes a DataFrame at least once: see the module."""

    def __init__(self, schema: StructType, overwrite: bool, options: Mapping[str, str]) -> None:
        self._publishing = SinkWriter(schema, overwrite, options, "write")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._publishing.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._publishing.committed(messages, "the job")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._publishing.aborted(messages, "the job")


class NsqhaStreamWriter(DataSourceStreamArrowWriter):
    """Writes each micro-batch at least once: one that Spark runs again is published again."""

    def __init__(self, schema: StructType, overwrite: bool, options: Mapping[str, str]) -> None:
        self._publishing = SinkWriter(schema, overwrite, options, "writeStream")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._publishing.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._publishing.committed(messages, f"micro-batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._publishing.aborted(messages, f"micro-batch {batchId}")


def commands(
    batch: pa.RecordBatch, columns: SinkColumns, options: SinkOptions, *, first_row: int = 0
) -> Iterator[Command]:
    """The commands that publish the rows of `batch` in order. All rows are checked before the first command.

    SinkRefused names the row, counted from 1 in the task; `first_row` rows of the task are before this batch.
    """
    if not batch.num_rows:
        return
    value = batch.column(columns.value)
    lengths = _checked_lengths(value, options.message_bytes_max, first_row)
    names, numbers = _topics(batch, columns, options, first_row)
    delays = _delays(batch, columns, first_row)
    # Where another command has to begin: at another topic, and before and after each deferred message.
    begins = np.zeros(batch.num_rows, np.bool_)
    begins[0] = True
    begins[1:] = (numbers[1:] != numbers[:-1]) | (delays[1:] > 0) | (delays[:-1] > 0)
    edges = [*np.flatnonzero(begins).tolist(), batch.num_rows]
    for first, end in pairwise(edges):
        topic = names[int(numbers[first])]
        if delays[first] > 0:
            body = value[first].as_buffer().to_pybytes()
            yield Command(b"DPUB %b %d\n%b" % (topic, delays[first], len(body).to_bytes(4, "big")) + body, 1)
        else:
            yield from _mpubs(topic, value, lengths, first, end, options.batch_bytes)


def _mpubs(
    topic: bytes, value: pa.Array, lengths: np.ndarray[Any, Any], first: int, end: int, batch_bytes: int
) -> Iterator[Command]:
    """MPUB: [body size u32][count u32] count * ([size u32][value]). A single value may exceed `batch_bytes`."""
    ends = np.cumsum(lengths[first:end] + 4)
    at, before = 0, 0  # rows from `first` on that are done, and their bytes
    while at < len(ends):
        joined_end = max(at + 1, int(np.searchsorted(ends, before + JOIN_BYTES_MAX, "right")))
        joined = memoryview(_joined(value.slice(first + at, joined_end - at), lengths[first + at : first + joined_end]))
        start = before
        while at < joined_end:
            next_at = min(joined_end, max(at + 1, int(np.searchsorted(ends, before + batch_bytes - 4, "right"))))
            after = int(ends[next_at - 1])
            sizes = struct.pack(">II", after - before + 4, next_at - at)
            yield Command(b"".join((b"MPUB %b\n" % topic, sizes, joined[before - start : after - start])), next_at - at)
            at, before = next_at, after


def _joined(value: pa.Array, lengths: np.ndarray[Any, Any]) -> pa.Buffer:
    """The concatenation of the values, each after its size."""
    n = len(value)
    offsets = pa.py_buffer(np.arange(0, 4 * n + 1, 4, dtype=np.int32))
    sizes = pa.Array.from_buffers(pa.binary(), n, [None, offsets, pa.py_buffer(lengths.astype(">u4"))])
    framed = pc.binary_join_element_wise(sizes, value.cast(pa.binary()), b"")
    _, ends, data = framed.buffers()
    first, end = np.frombuffer(ends, np.int32, count=2, offset=4 * framed.offset)[0], int(lengths.sum()) + 4 * n
    return data.slice(int(first), end)


def _checked_lengths(value: pa.Array, bytes_max: int, first_row: int) -> np.ndarray[Any, Any]:
    """The length of each value in bytes. SinkRefused: one is null, empty or too large."""
    if value.null_count:
        row = first_row + 1 + int(np.argmax(value.is_null().to_numpy(zero_copy_only=False)))
        raise SinkRefused(f"row {row}: value is null, and NSQ has no null: filter such rows out")
    lengths: np.ndarray[Any, Any] = pc.binary_length(value).to_numpy(zero_copy_only=False).astype(np.int64)
    if (lengths == 0).any():
        row = first_row + 1 + int(np.argmax(lengths == 0))
        raise SinkRefused(f"row {row}: value is empty, and NSQ refuses empty messages: filter such rows out")
    if (lengths > bytes_max).any():
        at = int(np.argmax(lengths > bytes_max))
        raise SinkRefused(
            f"row {first_row + 1 + at}: value has {lengths[at]} bytes, more than {bytes_max} (option maxMessageBytes, "
            f"set it to the broker's --max-msg-size)"
        )
    return lengths


def _topics(
    batch: pa.RecordBatch, columns: SinkColumns, options: SinkOptions, first_row: int
) -> tuple[list[bytes], np.ndarray[Any, Any]]:
    """Names of topics, and for each row the index of its name. SinkRefused: a name is null or not valid."""
    if columns.topic is None:
        return [options.topic.encode()], np.zeros(batch.num_rows, np.int32)
    column = batch.column(columns.topic)
    if column.null_count:
        row = first_row + 1 + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise SinkRefused(f"row {row}: topic is null: fill it, or set option topic")
    encoded = column.dictionary_encode()
    numbers: np.ndarray[Any, Any] = encoded.indices.to_numpy(zero_copy_only=False)
    names = encoded.dictionary.to_pylist()
    for number, name in enumerate(names):
        if not _TOPIC.match(name):
            check_topic(name, f"row {first_row + 1 + int(np.argmax(numbers == number))}")
    return [name.encode() for name in names], numbers


def _delays(batch: pa.RecordBatch, columns: SinkColumns, first_row: int) -> np.ndarray[Any, Any]:
    """Milliseconds for each row; 0: at once. SinkRefused: one is negative."""
    if columns.defer_ms is None:
        return np.zeros(batch.num_rows, np.int64)
    column = batch.column(columns.defer_ms).cast(pa.int64())
    delays: np.ndarray[Any, Any] = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    if (delays < 0).any():
        at = int(np.argmax(delays < 0))
        raise SinkRefused(f"row {first_row + 1 + at}: defer_ms is {delays[at]}: it cannot be negative")
    return delays


def check_topic(name: str, where: str) -> None:
    """SinkRefused if NSQ does not allow the name."""
    if not _TOPIC.match(name):
        raise SinkRefused(
            f"{where}: {name[:80]!r} is not a topic name: 1 to 64 of a-z A-Z 0-9 . _ - and optionally #ephemeral"
        )


def _sums(messages: list[WriterCommitMessage | None]) -> tuple[int, int]:
    done = [message for message in messages if isinstance(message, Published)]
    return sum(m.published for m in done), sum(m.possible_duplicates for m in done)


def _task_number() -> int:
    """A number so that tasks begin with different brokers, and another attempt of a task with another one."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() + context.attemptNumber() if context is not None else 0


def _secret(path: str) -> bytes:
    """The secret for AUTH, from the executor's file or environment: options are shown in plans and event logs."""
    if not path:
        return os.environb.get(SECRET_VARIABLE.encode(), b"")
    try:
        with open(path, "rb") as file:
            found = file.read(SECRET_BYTES_MAX + 1).rstrip(b"\r\n")
    except OSError as error:
        raise SinkRefused(f"option nsqha.authSecretFile: {path}: {error.strerror} (on the executor)") from None
    if not 0 < len(found) <= SECRET_BYTES_MAX:
        raise SinkRefused(f"option nsqha.authSecretFile: {path}: 1 to {SECRET_BYTES_MAX} bytes are expected")
    return found


def _security(given: Given) -> LinkSecurity:
    root_ca, cert, key = (given.text(f"nsqha.tls.{name}") for name in ("ca", "cert", "key"))
    if bool(cert) != bool(key):
        raise OptionError("nsqha.tls.cert and nsqha.tls.key go together: one of them is missing")
    skip = given.flag("nsqha.tls.skipVerify", False)
    return LinkSecurity(given.flag("nsqha.tls", False) or skip or bool(root_ca or cert), root_ca, cert, key, skip)


def _addresses(given: Given) -> tuple[str, ...]:
    addresses = given.words("nsqd")
    if not addresses:
        raise OptionError("nsqd is missing: the host:port of a broker's --tcp-address, or several with commas")
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise OptionError(f"nsqd: {error}; give a broker's --tcp-address") from None
    return addresses
