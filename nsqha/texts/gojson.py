"""JSON from other programs, decoded as Go's encoding/json decodes it into a struct.

    null        leaves a field as it is; null as an item of a list is the zero value; a null list is empty
    keys        match in any case; unknown keys are skipped; of several equal keys the last one wins
    types       a value of another type anywhere fails the whole text; 1.0 and 1e3 are not integers
    strings     each byte that is not UTF-8, and each half of a surrogate pair, becomes U+FFFD

Different from Go: nesting beyond about a thousand levels is refused (Go: 10,000), and a list or struct that a text has
twice is replaced by the last one, not merged with it.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache
from typing import Annotated, Any, Final, NoReturn, TypeVar, get_args, get_origin

import msgspec

Int32 = Annotated[int, 32]
"""`int` alone has 64 bits."""

Given = Annotated[bool, "given"]
"""True if the field is there, whatever it is."""

_T = TypeVar("_T")
_INVALID_UTF8: Final = "nsqha.gojson"
_HALF_PAIRS: Final = re.compile("[\ud800-\udfff]")
# Letters outside ASCII that Go takes for k and s when it compares keys.
_FOLDS: Final = {0x212A: "k", 0x17F: "s"}


def decode(text: bytes, kind: type[_T]) -> _T:
    """Decode `text` as `kind`: str, bool, int, `list[..]` of these, or a msgspec.Struct whose fields are such kinds and
    have defaults. ValueError: Go would refuse it, too."""
    try:
        value = _DECODER.decode(text.decode("utf-8", _INVALID_UTF8))
    except RecursionError:
        raise ValueError("nested too deep") from None
    found: _T = _zero(kind) if value is None else _typed(kind, value)
    return found


class _Object(list[tuple[str, Any]]):
    """A JSON object as the pairs it was written in, so that a repeated key is seen."""


def _typed(kind: Any, value: Any) -> Any:
    """A value that is not null, as `kind`."""
    if kind is str:
        if isinstance(value, str):
            return value if value.isascii() else _HALF_PAIRS.sub("\ufffd", value)
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if isinstance(value, _Object):
            return kind(**_fields(kind, value))
    elif get_origin(kind) is list:
        if isinstance(value, list) and not isinstance(value, _Object):
            (item,) = get_args(kind)
            return [_zero(item) if one is None else _typed(item, one) for one in value]
    elif type(value) is int:
        bits = 64 if kind is int else get_args(kind)[1]
        if -(1 << bits - 1) <= value < 1 << bits - 1:
            return value
    raise ValueError(f"{_shown(value)} is no {_name(kind)}")


def _fields(kind: type[msgspec.Struct], pairs: _Object) -> dict[str, Any]:
    kinds = _kinds(kind)
    found: dict[str, Any] = {}
    for key, value in pairs:
        name = key.translate(_FOLDS).lower()
        wanted = kinds.get(name)
        if wanted is None:
            continue
        if wanted is Given:
            found[name] = True
        elif value is not None:
            try:
                found[name] = _typed(wanted, value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif get_origin(wanted) is list:
            found[name] = []
    return found


@lru_cache
def _kinds(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _zero(kind: Any) -> Any:
    origin = get_origin(kind)
    return 0 if origin is Annotated else (origin or kind)()


def _name(kind: Any) -> str:
    if get_origin(kind) is list:
        return "list"
    names = {str: "string", bool: "boolean"}
    return names.get(kind) or ("object" if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else "integer")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "an object" if isinstance(value, _Object) else "a list"
    return json.dumps(value)[:40]


def _integer(digits: str) -> int:
    # Beyond 64 bits the value can only be refused or skipped; int() refuses thousands of digits.
    return int(digits) if len(digits) <= 20 else 1 << 64


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _replace_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_INVALID_UTF8, _replace_bytes)
# Made once: to make one takes longer than to read a short text.
_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_constant=_no_number, parse_int=_integer)
