"""Times and places of a log as people write them.

    duration   2d  1d12h  1h30m  250ms  0           Go's durations, and days
    instant    -2h                                  two hours ago
               @2026-11-20T10:00  @2026-11-20       local time, unless it ends with Z or +01:00
               @1795262005                          seconds since 1970; 13, 16, 19 digits: ms, µs, ns
               @-2h                                 as -2h
    place      an instant, start, end, an offset (digits), a message id (16 hex digits)

No offset has 16 digits, so an offset is never mistaken for an id.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal, NamedTuple

from nsqha.ids import OFFSET_MAX

DAY_NS = 24 * 3600 * 10**9
INSTANT_MAX_NS = (1 << 63) - 1  # fits an int64 on the wire
_DAYS = re.compile(r"(\d{1,7}(?:\.\d{1,9})?)d")
_DIGITS_NS = {10: 10**9, 13: 10**6, 16: 10**3, 19: 1}  # digits of a number -> its unit in nanoseconds


def parse_duration(text: str) -> int:
    """Parse a duration to nanoseconds. ValueError says what is wrong."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text)
    total = 0
    days = _DAYS.match(rest)
    if days is not None:
        whole, _, fraction = days[1].partition(".")
        total = int(whole) * DAY_NS + (int(fraction) * DAY_NS // 10 ** len(fraction) if fraction else 0)
        rest = rest[days.end() :]
    if rest or days is None:
        # Imported here: it would take much of the time of `nsqha --help`.
        from nsqha import goflags

        try:
            if rest[:1] in ("-", "+"):
                raise ValueError
            total += goflags.parse_duration(rest)
        except ValueError:
            raise ValueError(f"{text!r} is not a duration such as 250ms, 1h30m or 2d") from None
    return sign * total


class LogTarget(NamedTuple):
    """A place in a log; `value` is the time in nanoseconds, or the offset; `id` the message id."""

    kind: Literal["time", "start", "end", "offset", "id"]
    value: int = 0
    id: str = ""


def parse_place(text: str, now_ns: int) -> LogTarget:
    """Parse a place. ValueError says what is wrong."""
    if text in ("start", "end"):
        return LogTarget("start" if text == "start" else "end")
    if text.startswith("@"):
        return LogTarget("time", parse_instant(text[1:], now_ns))
    if text.startswith("-"):
        return LogTarget("time", parse_instant(text, now_ns))
    if re.fullmatch(r"[0-9a-f]{16}", text):
        return LogTarget("id", id=text)
    if re.fullmatch(r"[0-9]{1,15}", text) and int(text) <= OFFSET_MAX:
        return LogTarget("offset", int(text))
    raise ValueError(
        f"{text!r} is not a place: -2h, @2026-11-20T10:00, start, end, an offset, or a message id of 16 hex digits"
    )


def parse_instant(text: str, now_ns: int) -> int:
    """Parse an instant to nanoseconds since 1970."""
    if text.startswith("-"):
        return max(now_ns + parse_duration(text), 0)
    unit = _DIGITS_NS.get(len(text)) if re.fullmatch(r"[0-9]+", text) else None
    ns = int(text) * unit if unit is not None else _parse_date(text)
    if not 0 <= ns <= INSTANT_MAX_NS:
        raise ValueError(f"@{text} is {'before 1970' if ns < 0 else 'after 2262-04-11'}")
    return ns


def _parse_date(text: str) -> int:
    try:
        when = datetime.fromisoformat(text)
        seconds = int(when.replace(microsecond=0).timestamp())
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"@{text} is not a time such as @2026-11-20T10:00, @1795262005 or -2h") from None
    return seconds * 10**9 + when.microsecond * 1000


def show_time(ns: int) -> str:
    """Format local time, to the millisecond."""
    return datetime.fromtimestamp(ns // 10**9).strftime("%Y-%m-%d %H:%M:%S") + f".{ns // 10**6 % 1000:03d}"


def show_duration(seconds: float) -> str:
    """Format with at most two units: `850ms`, `12s`, `3m05s`, `2h10m`, `4d3h`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"
