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

from nsqha.log_writer import LogWriter

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""What --log-level accepts."""

SETTLE_SECONDS = 0.02
"""How long an error, and a line of a `Logger` that answers, may wait until it is written. A pipe or a socket takes it
at once; a file's disk may be late, and is not waited for again until it has caught up."""
FATAL_SECONDS = 1.0
"""The same for a line after which the process ends."""
DRAIN_SECONDS, DRAIN_STALLED_SECONDS = 10.0, 2.0
"""How long the end of a process waits for what was said, and how long without progress."""

KEPT_CHARS_MAX = 4096  # of lines that wait to be written together: a pipe takes so many bytes whole (PIPE_BUF)

_NSQ_NAME = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "FATAL"}
_ROOT = "nsqha"
LINES_LOST = "log_lines_lost"
"""The event of the line that stands for others."""


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


class LineHandler(logging.Handler):
    """Writes each line at once; within `by_turns`, of a `Logger` that may wait, those of one turn of the thread's loop
    with one write."""

    def __init__(self, sink: TextIO | LogWriter, lines: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(lines)
        self._writer = sink if isinstance(sink, LogWriter) else None
        self._stream = None if isinstance(sink, LogWriter) else sink
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

    def say(self, said: Said, *, waits: bool, answers: bool = False) -> None:
        """Write a line without a record of `logging`, which costs several times what the line does."""
        self.acquire()
        try:
            self._take(self._lines.line(said), said.level, waits=waits)
            if answers and self._writer is not None:
                self._writer.settle(SETTLE_SECONDS)
        except Exception:
            pass  # as `logging` does with what goes wrong in `emit`
        finally:
            self.release()

    def _take(self, text: str, level: int, *, waits: bool) -> None:
        line = f"{text}\n"
        if self._chars + len(line) > KEPT_CHARS_MAX:
            self._write_kept()
        self._kept.append(line)
        self._chars += len(line)
        # A warning waits, too: a failover may have one for each of thousands of partitions.
        if not waits or level >= logging.ERROR or self._at_end is None or self._thread() != self._looping:
            self._write_kept(level)
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

    def _write_kept(self, level: int = logging.INFO) -> None:
        lines, self._kept, self._chars = self._kept, [], 0
        if not lines:
            return
        if self._writer is not None:
            self._writer.write("".join(lines), urgent=level >= logging.ERROR)
            self._settle(self._writer, level)
        elif self._stream is not None:
            self._stream.write("".join(lines))
            self._stream.flush()

    def _settle(self, writer: LogWriter, level: int) -> None:
        if level >= logging.CRITICAL:
            writer.drain(FATAL_SECONDS, stalled=FATAL_SECONDS)
        elif level >= logging.ERROR:
            writer.settle(SETTLE_SECONDS)

    def flush(self) -> None:
        """Write all that was said: at the end of the process, by `logging.shutdown`."""
        with self.lock or nullcontext(), suppress(Exception):
            self._write_kept()
        if self._writer is not None:
            self._writer.drain(DRAIN_SECONDS, stalled=DRAIN_STALLED_SECONDS)


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

    __slots__ = ("_answers", "_logger", "_waits")

    def __init__(self, part: str = "", *, waits: bool = False, answers: bool = False) -> None:
        """`waits`: of a part that may have thousands of lines at once, and none that belongs to an answer: who has its
        answer may look for the line. `answers`: its lines are to be written before the answer that they belong to, as
        those of an audit."""
        self._logger = logging.getLogger(f"{_ROOT}.{part}" if part else _ROOT)
        self._waits = waits
        self._answers = answers

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
            said = Said(time.time(), level, text, args, event, fields)
            handlers[0].say(said, waits=self._waits, answers=self._answers)
            return
        trace = None if error is None else (type(error), error, error.__traceback__)
        # Not by `log`, which looks for the caller's file and line: no format shows them.
        extra = {"event": event, "fields": fields, "waits": self._waits}
        log.handle(log.makeRecord(log.name, level, "", 0, text, args, trace, extra=extra))


def configure(*, prefix: str, level: str, format: str = "text", stream: TextIO | None = None) -> None:
    """Send every event of this process to standard error, which is not waited for (`log_writer`), or to `stream`.
    Replaces an earlier configuration."""
    make = JsonFormatter if format == "json" else NsqFormatter
    handler = LineHandler(stream or _stderr(make(prefix)), make(prefix))
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no format shows them
    logging.raiseExceptions = False  # a closed stderr must not become a traceback per line
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # for lines of libraries
    set_level(level)


def _stderr(lines: LineFormatter) -> TextIO | LogWriter:
    """`lines` formats the one line that the writer says itself, in its own thread."""

    def lost(n: int) -> str:
        text = "%d log lines were lost: standard error takes less than this process writes"
        return f"{lines.line(Said(time.time(), logging.WARNING, text, (n,), LINES_LOST, {'lines': n}))}\n"

    try:
        return LogWriter(sys.stderr.fileno(), lost)
    except (AttributeError, OSError, ValueError):  # it is closed, or a test has replaced it
        return sys.stderr


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
