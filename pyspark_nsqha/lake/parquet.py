"""A Parquet file of the lake: how it is made, and how it is read again.

    footer, key `nsqha`   {"topic", "topic_uid", "partition", "first", "end", "id_base", "groups": [[rows, crc, crc]..]}
    row group             ends behind the message that makes it GROUP_ROWS long or its values GROUP_BYTES large
    group                 rows; crc32 of the values, one behind the other; crc32 of their lengths, u32 little endian

The bytes of a file depend on its messages and on nothing else, however they came here. So what is written twice is the
same file. `LakeFile.crc` is the crc32 of all groups, three u32 little endian each: it vouches for the footer's list,
and the list tells which row group is damaged. Data pages have checksums of their own.

A file is made in memory and given to the store whole: half a file never has a name.
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

from pyspark_nsqha import columns as row
from pyspark_nsqha.entries import crc32
from pyspark_nsqha.model import PartitionLife

GROUP_ROWS = 1 << 17
GROUP_BYTES = 16 << 20
ROWS_MAX = 16384  # of a record batch that is read: what Spark's JVM holds at once
BYTES_MAX = 8 << 20
FOOTER_KEY = b"nsqha"
FOOTER_BYTES_MAX = 16 << 20
_DELTA = ("offset", "timestamp", "timestamp_ns")
_UNIQUE = ("value", "id", "deliver_at", *_DELTA)
_GROUP = struct.Struct("<III")

SCHEMA = row.arrow_schema(row.DEFAULT)


class BadFile(Exception):
    """A file of the lake is not what it was written as; the message is without its name."""


class RowGroup(NamedTuple):
    """What the footer says of one row group."""

    rows: int
    crc: int
    lengths_crc: int


class Made(NamedTuple):
    """A whole file."""

    data: pa.Buffer
    rows: int
    crc: int
    file_crc: int


class Footer(NamedTuple):
    """What a file says of itself."""

    identity: PartitionLife
    first: int
    end: int
    groups: tuple[RowGroup, ...]

    @property
    def crc(self) -> int:
        return crc_of(self.groups)


class FileMaker:
    """One file, row by row, in memory."""

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
        """Messages that follow those before, in the columns of SCHEMA."""
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
        """The file. Nothing can be added behind."""
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
        """How many rows still belong to the row group that waits."""
        most: int = min(GROUP_ROWS - self._waiting_rows, int(batch.num_rows))
        if self._waiting_bytes + _value_bytes(batch) < GROUP_BYTES:
            return most
        ends = _value_offsets(batch)[1 : most + 1].astype(np.int64)
        ends += self._waiting_bytes - int(_value_offsets(batch)[0])
        behind: int = int(np.searchsorted(ends, GROUP_BYTES)) + 1
        return min(behind, most)

    def _write_group(self) -> None:
        # In one piece: where pages end depends on the pieces that the writer is given.
        table = pa.Table.from_batches(self._waiting, SCHEMA).combine_chunks()
        self._groups.append(group_of(table))
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0


def group_of(table: pa.Table) -> RowGroup:
    """What the footer has to say of these rows."""
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
    """`source` is what pyarrow can read anywhere in. BadFile if it has no footer."""
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
    """BadFile if it is of no file of a lake, or contradicts itself."""
    try:
        about = json.loads((file.metadata.metadata or {})[FOOTER_KEY])
        groups = tuple(RowGroup(*map(int, group)) for group in about["groups"])
        identity = PartitionLife(
            str(about["topic"]), int(about["topic_uid"], 16), int(about["partition"]), int(about["id_base"])
        )
        found = Footer(identity, int(about["first"]), int(about["end"]), groups)
    except (KeyError, ValueError, TypeError) as error:
        raise BadFile(f"its footer is not one of nsqha's: {_line(error)}") from None
    rows = [file.metadata.row_group(n).num_rows for n in range(file.metadata.num_row_groups)]
    if rows != [group.rows for group in groups] or sum(rows) != found.end - found.first:
        raise BadFile("its footer contradicts itself")
    return found


def read_rows(
    file: pq.ParquetFile, footer: Footer, *, first: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Messages [first, end) in these columns: at most ROWS_MAX of them and BYTES_MAX of values a batch, but for one
    message. BadFile if they are not what was written."""
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
        raise BadFile(f"{where}: the values do not have their checksum")
    offsets = table.column("offset").to_numpy()
    if not np.array_equal(offsets, np.arange(at, at + group.rows)):
        raise BadFile(f"{where}: the offsets are others")
    return table.select(list(names))


def _in_pieces(table: pa.Table, columns: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """As Spark wants them."""
    for chunk in table.to_batches(max_chunksize=ROWS_MAX):
        while chunk.num_rows:
            ends = _value_offsets(chunk)[1:].astype(np.int64) - int(_value_offsets(chunk)[0])
            rows = max(int(np.searchsorted(ends, BYTES_MAX, "right")), 1)
            part = chunk.slice(0, rows)
            yield pa.RecordBatch.from_arrays([part.column(name) for name in columns], schema=schema)
            chunk = chunk.slice(rows)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
