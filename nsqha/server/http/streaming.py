"""JSON answers in parts, for what may be large: they are made as the caller takes them, a part in a turn of the loop.

A generator yields the text in small parts, and empty ones where it works without result; between two of its parts other
work runs, so what it reads may change: it takes a list of names first, and passes over what has gone since.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

import msgspec

AT_ONCE = 500
"""Names that become a part of the text."""
RUN = 5_000
"""Names that are sorted at once, a millisecond of work."""

Parts = Iterator[bytes]


def json_parts(value: object) -> Parts:
    """The text of a value that is small."""
    yield msgspec.json.encode(value)


def json_object(fields: Mapping[str, Parts] | Iterable[tuple[str, Parts]]) -> Parts:
    """An object, of the texts of its values."""
    before = b"{"
    for name, parts in fields.items() if isinstance(fields, Mapping) else fields:
        yield before + msgspec.json.encode(name) + b":"
        yield from parts
        before = b","
    yield b"{}" if before == b"{" else b"}"


def json_list(items: Iterable[Parts]) -> Parts:
    """A list, of the texts of its items."""
    before = b"["
    for parts in items:
        yield before
        yield from parts
        before = b","
    yield b"[]" if before == b"[" else b"]"


def json_values(values: Iterable[object]) -> Parts:
    """A list of small values, many of them in a part. `NOT_YET` among them is none: so much work was done."""
    before, some, seen = b"[", list[object](), 0
    for value in values:
        seen += 1
        if value is not NOT_YET:
            some.append(value)
        if seen >= AT_ONCE or value is NOT_YET:
            seen = 0
            if some:
                yield before + msgspec.json.encode(some)[1:-1]
                before, some = b",", []
            else:
                yield b""
    if some:
        yield before + msgspec.json.encode(some)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


NOT_YET = object()
"""Among values of a generator: work was done, and there is no value yet."""


def in_order(names: list[str]) -> Iterator[str | object]:
    """The names in order, each once, and NOT_YET now and then."""
    runs = []
    for start in range(0, len(names), RUN):
        runs.append(sorted(names[start : start + RUN]))
        yield NOT_YET
    last = None
    for name in runs[0] if len(runs) == 1 else heapq.merge(*runs):
        if name != last:
            yield name
        last = name
