"""Log lines as NSQ writes them, or the same events as JSON.

    [nsqd] 2026/11/20 22:10:51.812898 INFO: TCP: listening on [::]:4150
    {"time":"2026-11-20T22:10:51.812898Z","level":"info","event":"tcp_listening","message":"TCP: listening on ...",...}

The text form is parsed by people's tools (and by client test suites that look for `TCP: listening on`), so its shape
and NSQ's wording are kept. Each line also has a stable event name: machines read `event` and the fields of the JSON
form, never the wording. One line stays one line: control characters, which may come from a peer, are escaped.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""What --log-level accepts."""

KEPT_CHARS_MAX = 4096  # of lines that wait to be written together: a pipe takes so many bytes whole (PIPE_BUF)

_NSQ_NAME = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "FATAL"}
_ROOT = "nsqha"


class Said(NamedTuple):
    """What becomes a line."""

    created: float  # seconds since 1970
    level: int
    text: str
    args: tuple[object, ...]
    event: str = "library"
    fields: Mapping[str, object] = {}
    trace: str = ""

    @property
    def message(self) -> str:
        return self.text % self.args if self.args else self.text


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes each line at once; within `by_turns`, of a `Logger` that may wait, those of one turn of the thread's loop
    with one write."""

    def __init__(self, stream: TextIO, lines: LineFormatter) -> None:
        super().__init__(stream)
        self.setFormatter(lines)
        self._lines = lines
        self._kept: list[str] = []  # lines of this turn
        self._chars = 0  # of these
        self._thread: Callable[[], int] = int  # names the thread that calls it
        self._looping = 0  # the thread whose turns these are
        self._at_end: Callable[[Callable[[], None]], object] | None = None  # calls back when a turn ends
        self._called = False  # it will, for this turn

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(self.format(record), record.levelno, waits=getattr(record, "waits", False))
        except Exception:
            self.handleError(record)

    def say(self, said: Said, *, waits: bool) -> None:
        """Write a line without a record of `logging`, which costs several times what the line does."""
        self.acquire()
        try:
            self._take(self._lines.line(said), said.level, waits=waits)
        except Exception:
            pass  # as `logging` does with what goes wrong in `emit`
        finally:
            self.release()

    def _take(self, text: str, level: int, *, waits: bool) -> None:
        line = text + self.terminator
        if self._chars + len(line) > KEPT_CHARS_MAX:
            self._write_kept()
        self._kept.append(line)
        self._chars += len(line)
        # A warning waits, too: a failover may have one for each of thousands of partitions.
        if not waits or level >= logging.ERROR or self._at_end is None or self._thread() != self._looping:
            self._write_kept()
        elif not self._called:
            self._called = True
            self._at_end(self._turn_ended)

    def begin_turns(self, at_end: Callable[[Callable[[], None]], object], thread: Callable[[], int]) -> None:
        with self.lock or nullcontext():
            self._thread, self._looping, self._at_end = thread, thread(), at_end

    def end_turns(self) -> None:
        with self.lock or nullcontext():
            self._at_end = None
        self._turn_ended()

    def _turn_ended(self) -> None:
        with self.lock or nullcontext(), suppress(Exception):  # a closed stderr costs the lines, and nothing else
            self._called = False
            self._write_kept()

    def _write_kept(self) -> None:
        lines, self._kept, self._chars = self._kept, [], 0
        if lines:
            self.stream.write("".join(lines))
            self.flush()


@contextmanager
def by_turns(at_end: Callable[[Callable[[], None]], object], thread: Callable[[], int]) -> Iterator[None]:
    """Within, lines of this thread are written when the turn of its loop ends, all of them with one write, if their
    `Logger` may wait; `at_end` (the loop's `call_soon`) calls back then, `thread` (`get_ident`) names the thread that
    calls it. A failover of thousands of partitions has a few lines for each, and with each write another thread may
    take the interpreter.

    Any other line, an error, a line of another thread and one beyond KEPT_CHARS_MAX write at once what is kept, too, so
    lines stay in order. Only what ends the process in the middle of a turn, as SIGKILL does, loses lines that wait."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]
    for handler in handlers:
        handler.begin_turns(at_end, thread)
    try:
        yield
    finally:
        for handler in handlers:
            handler.end_turns()


class Logger:
    """Events of one program. `text` and `args` make the line, `fields` go into the JSON form."""

    __slots__ = ("_logger", "_waits")

    def __init__(self, part: str = "", *, waits: bool = False) -> None:
        """`waits`: of a part that may have thousands of lines at once, and none that belongs to an answer: who has its
        answer may look for the line, and an audit has to be there before it."""
        self._logger = logging.getLogger(f"{_ROOT}.{part}" if part else _ROOT)
        self._waits = waits

    def debug(self, event: str, text: str, *args: object, **fields: object) -> None:
        self._write(logging.DEBUG, event, text, args, fields)

    def info(self, event: str, text: str, *args: object, **fields: object) -> None:
        self._write(logging.INFO, event, text, args, fields)

    def warning(self, event: str, text: str, *args: object, **fields: object) -> None:
        self._write(logging.WARNING, event, text, args, fields)

    def error(self, event: str, text: str, *args: object, error: BaseException | None = None, **fields: object) -> None:
        """`error` adds its traceback."""
        self._write(logging.ERROR, event, text, args, fields, error)

    def fatal(self, event: str, text: str, *args: object, **fields: object) -> None:
        """Only writes the line; the caller ends the process."""
        self._write(logging.CRITICAL, event, text, args, fields)

    def _write(
        self,
        level: int,
        event: str,
        text: str,
        args: tuple[object, ...],
        fields: dict[str, object],
        error: BaseException | None = None,
    ) -> None:
        log, handlers = self._logger, logging.root.handlers
        if not log.isEnabledFor(level):
            return
        # A failover of thousands of partitions writes a few lines for each.
        if error is None and len(handlers) == 1 and isinstance(handlers[0], LineHandler):
            handlers[0].say(Said(time.time(), level, text, args, event, fields), waits=self._waits)
            return
        trace = None if error is None else (type(error), error, error.__traceback__)
        # Not by `log`, which looks for the caller's file and line: no format shows them.
        extra = {"event": event, "fields": fields, "waits": self._waits}
        log.handle(log.makeRecord(log.name, level, "", 0, text, args, trace, extra=extra))


def configure(*, prefix: str, level: str, format: str = "text", stream: TextIO | None = None) -> None:
    """Send every event of this process to `stream` (standard error). Replaces an earlier configuration."""
    lines = JsonFormatter(prefix) if format == "json" else NsqFormatter(prefix)
    handler = LineHandler(stream or sys.stderr, lines)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no format shows them
    logging.raiseExceptions = False  # a closed stderr must not become a traceback per line
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # for lines of libraries
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of our own events while running (PUT /config/log_level). KeyError for an unknown name."""
    logging.getLogger(_ROOT).setLevel(LEVELS[level.lower()])


class LineFormatter(logging.Formatter, ABC):
    """Makes lines, of what our own `Logger` says and of records of libraries."""

    @abstractmethod
    def line(self, said: Said) -> str: ...

    def format(self, record: logging.LogRecord) -> str:
        event, fields = getattr(record, "event", "library"), getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return self.line(Said(record.created, record.levelno, "%s", (record.getMessage(),), event, fields, trace))


class NsqFormatter(LineFormatter):
    """`PREFIXyyyy/mm/dd hh:mm:ss.ffffff LEVEL: text`, local time; a traceback follows on lines of its own."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._second = -1
        self._stamp = ""  # of that second

    def line(self, said: Said) -> str:
        seconds, micros = _whole_and_micros(said.created)
        if seconds != self._second:
            self._second, self._stamp = seconds, time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(seconds))
        line = f"{self._prefix}{self._stamp}.{micros:06d} {_level_name(said.level)}: {one_line(said.message)}"
        return f"{line}\n{said.trace}" if said.trace else line


class JsonFormatter(LineFormatter):
    """One JSON object per line, UTC; fields of the event stand beside `event`, and cannot hide the fixed keys."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._program = prefix.strip(" []")

    def line(self, said: Said) -> str:
        seconds, micros = _whole_and_micros(said.created)
        out: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{micros:06d}Z",
            "level": _level_name(said.level).lower(),
            "program": self._program,
            "event": said.event,
            "message": said.message,
        }
        if said.trace:
            out["traceback"] = said.trace
        for key, value in said.fields.items():
            out.setdefault(key, value)
        return json.dumps(out, separators=(",", ":"), default=str)


def one_line(text: str) -> str:
    """`text` without anything that could end a line, move the cursor of a terminal, or change the direction of text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _level_name(level: int) -> str:
    return _NSQ_NAME.get(level) or logging.getLevelName(level)


def _whole_and_micros(created: float) -> tuple[int, int]:
    micros = int(created * 1e6)
    return micros // 1_000_000, micros % 1_000_000
