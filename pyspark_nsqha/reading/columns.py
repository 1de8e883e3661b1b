"""The columns of a row: names, Spark types, Arrow types, in the order of a row.

The columns of Kafka's source come first, under its names. `key` and `headers` are null as NSQ's protocol has nothing
for them. `_corrupt` is there only on request: the frames of a batch that does not verify.

Arrow is imported where it is needed: names and DDL are used before it is known whether Arrow is installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",  # of the batch, in microseconds
    "timestampType": "int",  # 0 as in Kafka: the time at which it was created
    "timestamp_ns": "bigint",
    "id": "string",  # 16 hex digits, the same as for consumers
    "attempts": "int",
    "leader_epoch": "bigint",
    "deliver_at": "timestamp",  # of a deferred publish; else null
    "headers": "array<struct<key:string,value:binary>>",
    "_corrupt": "binary",
}
# In DDL the meaning of `timestamp` depends on the session (spark.sql.timestampType); a source has to say which.
_DDL = {"timestamp": "timestamp_ltz"}
CORRUPT = "_corrupt"
KNOWN = tuple(_TYPES)
DEFAULT = tuple(name for name in KNOWN if name != CORRUPT)


def check(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the names in their order. ValueError names what is not a column, or is given twice."""
    names = tuple(columns)
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
        raise ValueError(f"columns: no column {', '.join(map(repr, unknown))}; there are {', '.join(KNOWN)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"columns: {', '.join(map(repr, twice))} is named twice; name each column once")
    if not names:
        raise ValueError(f"columns: none is named; there are {', '.join(KNOWN)}")
    return names


def ddl(columns: Iterable[str] = DEFAULT) -> str:
    """The schema as Spark's DDL; ValueError as `check`."""
    return ", ".join(f"`{name}` {_DDL.get(_TYPES[name], _TYPES[name])}" for name in check(columns))


def type_of(column: str) -> str:
    """The type of a column in the form of Spark's `simpleString`; ValueError as `check`."""
    return _TYPES[check((column,))[0]]


def arrow_schema(columns: Iterable[str] = DEFAULT) -> Any:
    """The pyarrow.Schema that Spark expects of record batches with these columns; ValueError as `check`.

    It has to be equal to the schema that Spark makes from the DDL, including the names inside of lists.
    """
    import pyarrow as pa

    types = {
        "binary": pa.binary(),
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        _TYPES["headers"]: pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    }
    return pa.schema([(name, types[_TYPES[name]]) for name in check(columns)])
