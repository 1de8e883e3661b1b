"""Makes and reads a Parquet file of the lake.

    footer, key `nsqha`   {"topic", "topic_uid", "partition", "first", "end", "id_base", "groups": [[rows, crc, crc]..]}
    row group             ends after the message that makes it GROUP_ROWS long or its values GROUP_BYTES large
    group                 rows; crc32 of the concatenated values; crc32 of their lengths, u32 little endian

The bytes of a file depend on its messages only, not on how they were read. So a second write gives the same file.
`LakeFile.crc` is the crc32 of all groups, three u32 little endian each: it verifies the footer's list, and the list
shows which row group is damaged. Data pages have checksums of their own.

A file is made in memory and written to the store as a whole: half a file never has its name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_nsqha.model import PartitionLife
from pyspark_nsqha.reading import columns as row
from pyspark_nsqha.reading.entries import crc32

GROUP_ROWS = 1 << 17
GROUP_BYTES = 16 << 20
ROWS_MAX = 16384  # of a record batch that is read, as Spark's JVM holds it at once
BYTES_MAX = 8 << 20
FOOTER_KEY = b"nsqha"
FOOTER_BYTES_MAX = 16 << 20
_DELTA = ("offset", "timestamp", "timestamp_ns")
_UNIQUE = ("value", "id", "deliver_at", *_DELTA)
_GROUP = struct.Struct("<III")

SCHEMA = row.arrow_schema(row.DEFAULT)


class BadFile(Exception):
    """A file of the lake does not verify; the message does not have its name."""


class RowGroup(NamedTuple):
    """The footer's record of one row group."""

    rows: int
    crc: int
    lengths_crc: int


class Made(NamedTuple):
    """A finished file."""

    data: pa.Buffer
    rows: int
    crc: int
    file_crc: int


class Footer(NamedTuple):
    """The parsed footer of a file."""

    identity: PartitionLife
    first: int
    end: int
    groups: tuple[RowGroup, ...]

    @property
    def crc(self) -> int:
        return crc_of(self.groups)


class FileMaker:
    """Makes one file in memory."""

    def __init__(self, identity: PartitionLife, first: int) -> None:
        self._identity = identity
        self._first = first
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(
            self._sink,
            SCHEMA,
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in SCHEMA.names if name not in (*_UNIQUE, "headers")],
            column_encoding=dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED"),
            write_statistics=[name for name in SCHEMA.names if name not in ("key", "value", "id", "headers")],
            write_page_checksum=True,
        )
        self._groups: list[RowGroup] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append messages, in the columns of SCHEMA and in order of offsets."""
        self.rows += batch.num_rows
        while batch.num_rows:
            taken = self._take(batch)
            part = batch.slice(0, taken)
            self._waiting.append(part)
            self._waiting_rows += taken
            self._waiting_bytes += _value_bytes(part)
            if self._waiting_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
                self._write_group()
            batch = batch.slice(taken)

    def finish(self) -> Made:
        """Finish the file and return it; nothing can be added any more."""
        if self._waiting_rows:
            self._write_group()
        about = {
            "topic": self._identity.topic,
            "topic_uid": f"{self._identity.topic_uid:016x}",
            "partition": self._identity.partition,
            "first": self._first,
            "end": self._first + self.rows,
            "id_base": self._identity.id_base,
            "groups": self._groups,
        }
        self._writer.add_key_value_metadata({FOOTER_KEY: json.dumps(about, separators=(",", ":"))})
        self._writer.close()
        data = self._sink.getvalue()
        return Made(data, self.rows, crc_of(self._groups), crc32(data))

    def _take(self, batch: pa.RecordBatch) -> int:
        """How many rows of the batch still belong to the current row group."""
        most: int = min(GROUP_ROWS - self._waiting_rows, int(batch.num_rows))
        if self._waiting_bytes + _value_bytes(batch) < GROUP_BYTES:
            return most
        ends = _value_offsets(batch)[1 : most + 1].astype(np.int64)
        ends += self._waiting_bytes - int(_value_offsets(batch)[0])
        behind: int = int(np.searchsorted(ends, GROUP_BYTES)) + 1
        return min(behind, most)

    def _write_group(self) -> None:
        # In one chunk: where pages end depends on the chunks that the writer gets.
        table = pa.Table.from_batches(self._waiting, SCHEMA).combine_chunks()
        self._groups.append(group_of(table))
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0


def group_of(table: pa.Table) -> RowGroup:
    """The footer's record for these rows."""
    values = table.column("value").combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], pa.binary())
    offsets = _offsets(values)
    data = memoryview(values.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])]
    lengths = np.ascontiguousarray(np.diff(offsets).astype("<u4"))
    return RowGroup(table.num_rows, crc32(data), crc32(lengths.view(np.uint8)))


def crc_of(groups: Sequence[RowGroup]) -> int:
    """The checksum of a file's values."""
    return crc32(b"".join(_GROUP.pack(*group) for group in groups))


def _offsets(values: Any) -> npt.NDArray[np.int32]:
    """Where the values of a binary array begin in its data, and where the last one ends."""
    if not len(values):
        return np.zeros(1, np.int32)
    return np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]


def _value_offsets(batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
    return _offsets(batch.column("value"))


def _value_bytes(batch: pa.RecordBatch) -> int:
    offsets = _value_offsets(batch)
    return int(offsets[-1]) - int(offsets[0])


# ---- reading


def open_file(source: Any) -> pq.ParquetFile:
    """Open a seekable pyarrow source. BadFile if its footer cannot be read."""
    try:
        return pq.ParquetFile(
            source,
            page_checksum_verification=True,
            thrift_string_size_limit=FOOTER_BYTES_MAX,
            thrift_container_size_limit=FOOTER_BYTES_MAX,
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadFile(f"its footer cannot be read: {_line(error)}") from None


def footer_of(file: pq.ParquetFile) -> Footer:
    """Parse the footer. BadFile if it is not that of a lake's file, or contradicts itself."""
    try:
        about = json.loads((file.metadata.metadata or {})[FOOTER_KEY])
        groups = tuple(RowGroup(*map(int, group)) for group in about["groups"])
        identity = PartitionLife(
            str(about["topic"]), int(about["topic_uid"], 16), int(about["partition"]), int(about["id_base"])
        )
        found = Footer(identity, int(about["first"]), int(about["end"]), groups)
    except (KeyError, ValueError, TypeError) as error:
        raise BadFile(f"its footer was not written by nsqha: {_line(error)}") from None
    rows = [file.metadata.row_group(n).num_rows for n in range(file.metadata.num_row_groups)]
    if rows != [group.rows for group in groups] or sum(rows) != found.end - found.first:
        raise BadFile("its footer contradicts itself")
    return found


def read_rows(
    file: pq.ParquetFile, footer: Footer, *, first: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Messages [first, end) in these columns, in batches of at most ROWS_MAX rows and BYTES_MAX of values, but one
    message at least. BadFile if they do not verify."""
    names = [*dict.fromkeys(("offset", "value", *columns))]
    schema = row.arrow_schema(columns)
    at = footer.first
    for number, group in enumerate(footer.groups):
        group_end = at + group.rows
        if at < end and group_end > first:
            table = _read_group(file, number, names, at, group)
            low, high = max(first - at, 0), min(end - at, group.rows)
            yield from _in_pieces(table.slice(low, high - low), columns, schema)
        at = group_end


def _read_group(file: pq.ParquetFile, number: int, names: Sequence[str], at: int, group: RowGroup) -> pa.Table:
    where = f"row group {number}, offsets [{at}, {at + group.rows})"
    try:
        table = file.read_row_group(number, columns=list(names), use_threads=False).combine_chunks()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadFile(f"{where}: {_line(error)}") from None
    if group_of(table) != group:
        raise BadFile(f"{where}: the checksum of the values is wrong")
    offsets = table.column("offset").to_numpy()
    if not np.array_equal(offsets, np.arange(at, at + group.rows)):
        raise BadFile(f"{where}: the offsets are wrong")
    return table.select(list(names))


def _in_pieces(table: pa.Table, columns: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Divide a table into batches of the size that Spark needs."""
    for chunk in table.to_batches(max_chunksize=ROWS_MAX):
        while chunk.num_rows:
            ends = _value_offsets(chunk)[1:].astype(np.int64) - int(_value_offsets(chunk)[0])
            rows = max(int(np.searchsorted(ends, BYTES_MAX, "right")), 1)
            part = chunk.slice(0, rows)
            yield pa.RecordBatch.from_arrays([part.column(name) for name in columns], schema=schema)
            chunk = chunk.slice(rows)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
