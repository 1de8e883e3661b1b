"""Records <-> JSON, the form in which every metadata store keeps them.

    {"format": 1, <field>: <value>, ...}

Reading is tolerant in the two ways that upgrades need: a missing field has its default, an unknown one stays in
`StoredRecord.unknown`, at every level, and is written again. A `SparseRecord` is written without the fields that are
None, and not at all when it has no others. Anything else that does not fit is an error. A change
that older versions must not see raises the cluster's feature level, or, if the format itself changes, FORMAT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from nsqha.errors import ConfigError, LogCorrupt

FORMAT = 1


@dataclass(frozen=True)
class StoredRecord:
    """Base of all stored records: fields written by a newer version are kept, not dropped."""

    unknown: Mapping[str, object] = field(default_factory=dict, repr=False, kw_only=True)


@dataclass(frozen=True)
class SparseRecord(StoredRecord):
    """A record most of whose fields are None most of the time: those are not written, nor is one that says nothing."""


R = TypeVar("R", bound=StoredRecord)


def encode(record: StoredRecord) -> bytes:
    return msgspec.json.encode({"format": FORMAT, **to_plain(record)})


def decode(kind: type[R], data: bytes) -> R:
    """Decode a record. `LogCorrupt` if these bytes are not one, `ConfigError` if they are from a newer version."""
    try:
        plain = msgspec.json.decode(data, type=dict[str, Any])
        number = msgspec.convert(plain.pop("format", None), int)
    except msgspec.MsgspecError as error:
        raise LogCorrupt(f"this is not a {kind.__name__}: {error}") from error
    if number > FORMAT:
        raise ConfigError(
            f"{kind.__name__} has format {number}, this version reads up to {FORMAT}; use a newer version"
        )
    return from_plain(kind, plain)


def to_plain(record: StoredRecord) -> dict[str, Any]:
    """Convert a record to JSON types: dicts with string keys, lists, strings, integers, booleans, None."""
    values = {name: getattr(record, name) for name in _hints(type(record))}
    if isinstance(record, SparseRecord):
        values = {name: value for name, value in values.items() if value is not None}
    plain = {name: _plain(value) for name, value in values.items()}
    for name in [name for name, value in values.items() if isinstance(value, SparseRecord) and not plain[name]]:
        del plain[name]
    return {**record.unknown, **plain}


def from_plain(kind: type[R], plain: Mapping[str, Any]) -> R:
    """The inverse of `to_plain`."""
    try:
        return _record(kind, plain)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LogCorrupt(f"this is not a {kind.__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, StoredRecord):
        return to_plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _record(kind: type[R], plain: Mapping[str, Any]) -> R:
    hints = _hints(kind)
    missing = [name for name in _required(kind) if name not in plain]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    known = {name: _typed(hints[name], value) for name, value in plain.items() if name in hints}
    unknown = {name: value for name, value in plain.items() if name not in hints}
    return kind(**known, unknown=unknown)


def _typed(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, StoredRecord):
        return _record(hint, msgspec.convert(value, dict[str, Any]))
    if get_origin(hint) is Mapping:
        key_type, item_type = get_args(hint)
        items = msgspec.convert(value, dict[str, Any])
        return {key_type(key): _typed(item_type, item) for key, item in items.items()}
    return msgspec.convert(value, hint)


def _read_hints(kind: type[StoredRecord]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.name != "unknown"}


def _read_required(kind: type[StoredRecord]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


_hints: Callable[[Any], dict[str, Any]] = cache(_read_hints)
_required: Callable[[Any], tuple[str, ...]] = cache(_read_required)
