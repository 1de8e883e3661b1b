"""What people see: tables, numbers, progress, questions. Data goes to stdout, remarks to stderr; colour only on a
terminal.

NO_COLOR (any value) or TERM=dumb turns colour off.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from nsqha.cli.terminal import exits
from nsqha.cli.terminal.times import show_duration

Cell = str | int | float
NAMES_SHOWN = 10
PROGRESS_SECONDS = 0.2  # between two updates of a progress line


def say(text: str) -> None:
    """Talk."""
    print(text, file=sys.stderr, flush=True)


def coloured(out: IO[str]) -> bool:
    return out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def bold(text: str, out: IO[str]) -> str:
    return f"\x1b[1m{text}\x1b[0m" if coloured(out) else text


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    import json

    print(json.dumps(value, ensure_ascii=False), flush=True)


def body_json(body: bytes) -> dict[str, str]:
    """The body as text if it is UTF-8, else in base64."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], out: IO[str] | None = None) -> None:
    """Print columns; numbers are aligned to the right."""
    out = out if out is not None else sys.stdout
    body = [list(row) for row in rows]
    cells = [[show(cell) for cell in row] for row in body]
    right = [bool(body) and all(isinstance(row[n], (int, float)) for row in body) for n in range(len(headers))]
    widths = [max(len(line[n]) for line in [list(headers), *cells]) for n in range(len(headers))]

    def line(texts: Sequence[str]) -> str:
        padded = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    print(bold(line(headers), out), file=out)
    for texts in cells:
        print(line(texts), file=out)
    out.flush()


def show(cell: Cell) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else ""
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.1f}" if isinstance(cell, float) else printable(cell)


def printable(text: str) -> str:
    """Remove characters that would move the cursor or change colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_count(count: int, what: str = "message") -> str:
    """`1 message`, `1,000 messages`."""
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def show_bytes(n: int) -> str:
    """`512 B`, `1.2 MB`."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def confirm(question: str, *, yes: bool, skips: int = 0) -> None:
    """Return if the user answers y. Raises Exit for another answer, or if stdin is not a terminal.

    `skips`: messages that were never finished, and would not be delivered; then the answer is `skip`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise exits.Exit(exits.NOT_CONFIRMED, "not confirmed: stdin is not a terminal; add --yes")
    if skips:
        question = f"{question} It skips {never_finished(skips)}: type skip to do it"
    sys.stderr.write(f"{question}: " if skips else f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in (("skip",) if skips else ("y", "yes")):
        raise exits.Exit(exits.NOT_CONFIRMED, "not confirmed: nothing was changed")


def never_finished(count: int) -> str:
    """`2 messages that were never finished`."""
    return f"{show_count(count)} that {'were' if count != 1 else 'was'} never finished"


class ProgressLine:
    """One line on stderr with share, speed and time left; nothing is printed if stderr is not a terminal."""

    def __init__(
        self, what: str, out: IO[str] | None = None, line: Callable[[str, int, int, float], str] | None = None
    ) -> None:
        """`line` formats progress in other units than bytes, as `progress_line` does for bytes."""
        self._what = what
        self._line = line or progress_line
        self._out = out if out is not None else sys.stderr
        self._live = self._out.isatty()
        self._written = False
        self._started = self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes, or of the units of `line`, are done."""
        now = time.monotonic()
        if not self._live or (now - self._shown < PROGRESS_SECONDS and done < total):
            return
        self._shown = now
        self._written = True
        self._out.write(f"\r\x1b[K{self._line(self._what, done, total, now - self._started)}")
        self._out.flush()

    def close(self) -> None:
        """Remove the line from the screen."""
        if self._written:
            self._out.write("\r\x1b[K")
            self._out.flush()


def progress_line(what: str, done: int, total: int, seconds: float) -> str:
    rate = done / seconds if seconds > 0 else 0.0
    left = show_duration((total - done) / rate) if rate else "?"
    share = 100 * done // total if total else 100
    return f"{what}  {share}%  {show_bytes(done)} of {show_bytes(total)}  {show_bytes(int(rate))}/s  {left} left"
