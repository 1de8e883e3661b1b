"""Command line flags, config file and environment, with the habits of Go's flag package.

    -x v   --x v   -x=v   --x=v     one dash or two are the same; a boolean takes a value only after `=`

A value comes from the flag, else from the environment (`PREFIX_X`, `-` becomes `_`), else from the TOML file, else it
is the default. A repeatable flag appends, and each value may be a list with commas. Errors have Go's wording:

    flag provided but not defined: -x              invalid value "soon" for flag -msg-timeout: parse error
    flag needs an argument: -x                     invalid boolean value "maybe" for -tls-required: parse error

Different from Go on purpose: an argument that is no flag is refused. Go stops reading there and silently ignores
every flag behind it, so `nsqd --verbose true --tcp-address=...` listens somewhere else than its owner believes.

Durations are integers of nanoseconds inside, `1m30s` outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nsqha.errors import ConfigError

_UNIT_NS = {"ns": 1, "us": 1000, "µs": 1000, "μs": 1000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)")
_INT64_MAX = (1 << 63) - 1
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_FALSE = ("0", "f", "F", "false", "FALSE", "False")


def parse_duration(text: str) -> int:
    """Nanoseconds of `1h2m3.5s`. ValueError for anything that Go does not take: no unit, a blank, more than 292 years."""
    sign, rest = (-1, text[1:]) if text[:1] == "-" else (1, text[1:] if text[:1] == "+" else text)
    if rest == "0":
        return 0
    total, position = 0, 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None or not (part[1] or part[2]) or len(part[0]) > 40:
            raise ValueError("parse error")
        unit = _UNIT_NS[part[3]]
        fraction = part[2] or ""
        total += int(part[1] or 0) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
        position = part.end()
    if not rest or total > _INT64_MAX:
        raise ValueError("parse error")
    return sign * total


def format_duration(ns: int) -> str:
    """As Go prints it: `0s`, `1.5µs`, `2ms`, `1m30s`, `1h0m0.25s`."""
    if ns == 0:
        return "0s"
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    for unit, size in (("ns", 1), ("µs", 1000), ("ms", 10**6)):
        if ns < size * 1000:
            return f"{sign}{_decimal(ns, size)}{unit}"
    minutes, rest = divmod(ns, 60 * 10**9)
    hours, minutes = divmod(minutes, 60)
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{sign}{head}{_decimal(rest, 10**9)}s"


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    return f"{whole}.{rest:0{len(str(unit)) - 1}d}".rstrip("0") if rest else str(whole)
