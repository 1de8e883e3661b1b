"""Records <-> JSON, the form in which every metadata store keeps them.

    {"format": 1, <field>: <value>, ...}

Reading is tolerant in the two ways that upgrades need: a missing field has its default, an unknown one stays in
`StoredRecord.unknown`, at every level, and is written again. A `SparseRecord` is written without the fields that are
None, and not at all when it has no others. Anything else that does not fit is an error. A change
that older versions must not see raises the cluster's feature level, or, if the format itself changes, FORMAT.

A topic may have a thousand channels and its record is written whole, so a record in a mapping is converted once: its
text stays with it (`with_texts`), and of equal texts that are read one record is made (`decode`). Records never change.
Nor do mappings, so one whose text was read a moment ago is not read again (`_Items`).
Those without others in them, as a partition's, have a shorter way (`_Flat`), which must not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, lru_cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from nsqha.errors import ConfigError, LogCorrupt

FORMAT = 1
ITEMS_MAX = 16_384  # records in mappings that are remembered by their texts; some 500 bytes each
MAPPINGS_MAX = 16  # mappings of one type that are remembered by their texts, if those are
MAPPING_BYTES = 2048  # or more; some 100 KB each for a thousand channels


@dataclass(frozen=True)
class StoredRecord:
    """Base of all stored records: fields written by a newer version are kept, not dropped."""

    unknown: Mapping[str, object] = field(default_factory=dict, repr=False, kw_only=True)


@dataclass(frozen=True)
class SparseRecord(StoredRecord):
    """A record most of whose fields are None most of the time: those are not written, nor is one that says nothing."""


R = TypeVar("R", bound=StoredRecord)
_Item = Callable[[StoredRecord], Any]
_Reader = Callable[[Any], Any]
_texts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_number = msgspec.json.Decoder(int).decode
_TEXT = "text"  # where the text of a record in a mapping is, beside its fields
_kept_text = attrgetter(_TEXT)


def encode(record: StoredRecord, **set_by_store: object) -> bytes:
    """The bytes of a record; these fields are as given, whatever the record has."""
    flat: _Flat[Any] | None = _flat(type(record))
    if flat is not None:
        return flat.encode(record, set_by_store)
    return msgspec.json.encode({"format": FORMAT, **with_texts(record), **set_by_store})


def decode(kind: type[R], data: bytes, **set_by_store: object) -> R:
    """Decode a record; these fields are as the store says, whatever the bytes do. `LogCorrupt` if they are not one,
    `ConfigError` if they are from a newer version."""
    flat: _Flat[R] | None = _flat(kind)
    if flat is not None and (record := flat.decode(data, set_by_store)) is not None:
        return record
    try:
        texts = _texts(data)
        number = _number(texts.pop("format", b"null"))
    except msgspec.MsgspecError as error:
        raise LogCorrupt(f"this is not a {kind.__name__}: {error}") from error
    if number > FORMAT:
        raise ConfigError(
            f"{kind.__name__} has format {number}, this version reads up to {FORMAT}; use a newer version"
        )
    try:
        return _of_texts(kind, texts, set_by_store)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LogCorrupt(f"this is not a {kind.__name__}: {error}") from error


def to_plain(record: StoredRecord) -> dict[str, Any]:
    """Convert a record to JSON types: dicts with string keys, lists, strings, integers, booleans, None."""
    return _converted(record, to_plain)


def with_texts(record: StoredRecord) -> dict[str, Any]:
    """As `to_plain`, but records in mappings are JSON texts."""
    return _converted(record, keep_text)


def _converted(record: StoredRecord, item: _Item) -> dict[str, Any]:
    """`item` converts records that are in a mapping."""
    values = {name: getattr(record, name) for name in _hints(type(record))}
    if isinstance(record, SparseRecord):
        values = {name: value for name, value in values.items() if value is not None}
    plain = {name: _plain(value, item) for name, value in values.items()}
    for name in [name for name, value in values.items() if isinstance(value, SparseRecord) and not plain[name]]:
        del plain[name]
    return {**record.unknown, **plain}


def from_plain(kind: type[R], plain: Mapping[str, Any]) -> R:
    """The inverse of `to_plain`."""
    try:
        return _record(kind, plain)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LogCorrupt(f"this is not a {kind.__name__}: {error}") from error


def _plain(value: Any, item: _Item) -> Any:
    if isinstance(value, StoredRecord):
        return _converted(value, item)
    if isinstance(value, Mapping):
        if item is keep_text:
            try:
                return dict(zip(value, map(_kept_text, value.values()), strict=True))  # no step of Python for each
            except AttributeError:
                pass  # a record that was never written, or no records
        return {str(key): item(v) if isinstance(v, StoredRecord) else _plain(v, item) for key, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(one, item) for one in value]
    return value


def keep_text(record: StoredRecord) -> msgspec.Raw:
    """The JSON text of a record, which stays with it: whoever puts one more into a large mapping has it made before."""
    text = record.__dict__.get(_TEXT)
    if text is None:
        text = record.__dict__[_TEXT] = msgspec.Raw(msgspec.json.encode(to_plain(record)))
    return text


def _reader(hint: Any) -> _Reader:
    """Makes the value of a field of its JSON text. What the type asks for is found out once, not for each record: when
    a node that led thousands is gone, each other node reads as many."""
    if isinstance(hint, type) and issubclass(hint, StoredRecord):
        return lambda text: _of_texts(hint, _texts(text), {})
    if get_origin(hint) is not Mapping:
        return msgspec.json.Decoder(hint).decode
    key_type, item = get_args(hint)
    if isinstance(item, type) and issubclass(item, StoredRecord):
        return _Items(key_type, item)
    if get_origin(item) is Mapping:
        return lambda text: _typed(hint, msgspec.json.decode(text))
    items = msgspec.json.Decoder(dict[str, item]).decode  # type: ignore[valid-type]
    return lambda text: {key_type(key): one for key, one in items(text).items()}


def _of_texts(kind: type[R], texts: Mapping[str, msgspec.Raw], set_by_store: Mapping[str, object]) -> R:
    _check_required(kind, texts)
    readers = _readers(kind)
    known = {name: read(texts[name]) for name, read in readers.items() if name in texts}
    unknown = {}
    if len(known) < len(texts):
        unknown = {name: msgspec.json.decode(text) for name, text in texts.items() if name not in readers}
    return kind(**{**known, **set_by_store}, unknown=unknown)


class _Items:
    """Reads a mapping of records. A large one is read many times, by the watch and by whoever has to be sure, and
    mostly it is one that was read before with one more at its end: of that only the end is read."""

    def __init__(self, key_type: _Reader, kind: type[StoredRecord]) -> None:
        self._key_type = key_type
        self._kind = kind
        # Texts without the last brace, and what was read of them; replaced, never changed, by any thread.
        self._recent: tuple[tuple[bytes, dict[Any, Any]], ...] = ()

    def __call__(self, text: msgspec.Raw) -> dict[Any, Any]:
        data = bytes(text)
        if len(data) < MAPPING_BYTES:
            return self._read(data)
        known = self._recent
        for index, (begin, items) in enumerate(known):
            if data.startswith(begin):
                more = data[len(begin) :]
                if more == b"}":
                    return items
                if more.startswith(b","):  # `begin` and a brace were read, so this is behind a record, and in no string
                    known, items = known[:index] + known[index + 1 :], items | self._read(b"{" + more[1:])
                    break
        else:
            items = self._read(data)
        self._recent = ((data[:-1], items), *known[: MAPPINGS_MAX - 1])
        return items

    def _read(self, text: bytes) -> dict[Any, Any]:
        return {
            self._key_type(key): _item(self._kind, bytes(one))  # type: ignore[arg-type]
            for key, one in _texts(text).items()
        }


@lru_cache(ITEMS_MAX)
def _item(kind: type[R], text: bytes) -> R:
    return _record(kind, msgspec.json.decode(text, type=dict[str, Any]))


def _record(kind: type[R], plain: Mapping[str, Any]) -> R:
    hints = _hints(kind)
    _check_required(kind, plain)
    known = {name: _typed(hints[name], value) for name, value in plain.items() if name in hints}
    unknown = {name: value for name, value in plain.items() if name not in hints}
    return kind(**known, unknown=unknown)


def _check_required(kind: type[StoredRecord], given: Mapping[str, object]) -> None:
    missing = [name for name in _required(kind) if name not in given]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")


def _typed(hint: Any, value: Any) -> Any:
    if type(value) in _kept_types(hint):
        return value
    if isinstance(hint, type) and issubclass(hint, StoredRecord):
        return value if isinstance(value, hint) else _record(hint, msgspec.convert(value, dict[str, Any]))
    if get_origin(hint) is Mapping:
        key_type, item_type = get_args(hint)
        items = value if isinstance(value, dict) else msgspec.convert(value, dict[str, Any])
        return {key_type(key): _typed(item_type, item) for key, item in items.items()}
    return msgspec.convert(value, hint)


@cache
def _kept_types(hint: Any) -> frozenset[type]:
    """Types whose values are in JSON what a field of this type has. Nearly all are: a start reads thousands of records,
    most of whose fields are None."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return frozenset(choice for choice in choices if choice in (str, int, bool, NoneType))


def _read_hints(kind: type[StoredRecord]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.name != "unknown"}


def _read_required(kind: type[StoredRecord]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


def _make_readers(kind: type[StoredRecord]) -> dict[str, _Reader]:
    return {name: _reader(hint) for name, hint in _hints(kind).items()}


class _Flat(Generic[R]):
    """Records that have no others in them, such as a partition's, as this version writes them: a failover of thousands
    reads and writes as many. What is not exactly so (other fields, another format, damage) is not decoded here."""

    def __init__(self, kind: type[R]) -> None:
        self._kind = kind
        self._names = tuple(_hints(kind))
        self._mappings = tuple(name for name, hint in _hints(kind).items() if get_origin(hint) is Mapping)
        self._values = attrgetter(*self._names)
        form = msgspec.defstruct(kind.__name__, [("format", int), *_struct_fields(kind)], forbid_unknown_fields=True)
        self._decode = msgspec.json.Decoder(form).decode

    def encode(self, record: R, set_by_store: Mapping[str, object]) -> bytes:
        values = dict(zip(self._names, self._values(record), strict=True))
        for name in self._mappings:
            values[name] = dict(values[name])
        return msgspec.json.encode({"format": FORMAT, **record.unknown, **values, **set_by_store})

    def decode(self, data: bytes, set_by_store: Mapping[str, object]) -> R | None:
        try:
            form = self._decode(data)
            values = msgspec.structs.asdict(form)
            if values.pop("format") != FORMAT:
                return None
            values.update(set_by_store)
            return self._kind(**values)
        except (msgspec.MsgspecError, ValueError):
            return None


def _struct_fields(kind: type[StoredRecord]) -> list[tuple[str, Any] | tuple[str, Any, Any]]:
    found: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for each in fields(kind):
        if each.name in (hints := _hints(kind)):
            hint = dict[get_args(hints[each.name])] if get_origin(hints[each.name]) is Mapping else hints[each.name]  # type: ignore[misc]
            if each.default is not MISSING:
                found.append((each.name, hint, each.default))
            elif each.default_factory is not MISSING:
                found.append((each.name, hint, msgspec.field(default_factory=each.default_factory)))
            else:
                found.append((each.name, hint))
    return found


def _make_flat(kind: type[R]) -> _Flat[R] | None:
    """None: it has other records in it, or leaves fields out, or something that only Python code checks."""
    if issubclass(kind, SparseRecord) or "format" in _hints(kind) or len(_hints(kind)) < 2:
        return None
    for hint in _hints(kind).values():
        parts = get_args(hint) if get_origin(hint) in (Mapping, tuple) else (hint,)
        if not all(part is ... or _is_scalar(part) for part in parts):
            return None
    return _Flat(kind)


def _is_scalar(hint: Any) -> bool:
    """Whether a type is a number, a text, a truth value, or None, or one of some of them."""
    if get_origin(hint) in (Union, UnionType):
        return all(_is_scalar(part) for part in get_args(hint))
    return get_origin(hint) is Literal or hint in (int, str, bool, float, NoneType)


_flat: Callable[[Any], Any] = cache(_make_flat)
_hints: Callable[[Any], dict[str, Any]] = cache(_read_hints)
_required: Callable[[Any], tuple[str, ...]] = cache(_read_required)
_readers: Callable[[Any], dict[str, _Reader]] = cache(_make_readers)
