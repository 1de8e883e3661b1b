"""The log line that people's tools parse, and its JSON twin."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from nsqha import nsqlog
from nsqha.nsqlog import KEPT_CHARS_MAX, Logger, by_turns, configure, one_line, set_level


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, ours = root.handlers[:], root.level, logging.getLogger("nsqha").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("nsqha").setLevel(ours)


def written(format: str = "text", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure(prefix="[nsqd] ", level=level, format=format, stream=stream)
    return stream


def test_a_line_has_nsqds_shape() -> None:
    stream = written()
    Logger("tcp").info("tcp_listening", "TCP: listening on %s", "[::]:4150", address="[::]:4150")
    assert re.fullmatch(
        r"\[nsqd\] \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} INFO: TCP: listening on \[::\]:4150\n", stream.getvalue()
    )


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_is_the_same_beside_another_handler(format: str) -> None:
    """Alone, a handler of ours gets no record of `logging`; a second one, of a test or a tracer, needs it."""
    stream, records = written(format), list[logging.LogRecord]()
    other = logging.Handler()
    other.emit = records.append  # type: ignore[method-assign]
    for handlers in ([], [other]):
        logging.getLogger().handlers[1:] = handlers
        Logger("part").info("event", "%s is %d", "it", 3, number=3)
    alone, beside = (re.sub(r"[\d:/.T-]+\d{6}Z?", "TIME", line) for line in stream.getvalue().splitlines())
    assert alone == beside and "it is 3" in alone
    assert [record.getMessage() for record in records] == ["it is 3"]


def test_a_line_that_can_not_be_made_costs_the_line_and_nothing_else() -> None:
    stream = written()
    Logger().info("event", "%d", "no number")
    Logger().info("event", "next")
    assert stream.getvalue().endswith("next\n") and stream.getvalue().count("\n") == 1


def test_levels_have_nsqds_names_and_filter() -> None:
    stream = written(level="warn")
    log = Logger()
    for say in (log.debug, log.info, log.warning, log.error, log.fatal):
        say("event", "text")
    assert re.findall(r" ([A-Z]+): text", stream.getvalue()) == ["WARNING", "ERROR", "FATAL"]
    set_level("DEBUG")
    log.debug("event", "now")
    assert "DEBUG: now" in stream.getvalue()
    with pytest.raises(KeyError):
        set_level("loud")


def test_what_a_peer_sends_can_not_forge_a_line() -> None:
    stream = written()
    Logger().info("event", "name %s", "a\n[nsqd] FATAL: \x1b[2J\t\x7f")
    assert stream.getvalue().count("\n") == 1
    assert "a\\n[nsqd] FATAL: \\x1b[2J\\t\\x7f" in stream.getvalue()
    assert one_line("plain ü") == "plain ü"
    # C1 controls, line separators and marks that turn the direction of text around move the terminal, too.
    assert one_line("\x9b2J\u2028\u202e") == "\\x9b2J\\u2028\\u202e"


def test_a_traceback_follows_an_error() -> None:
    stream = written()
    try:
        raise ValueError("broken")
    except ValueError as error:
        Logger().error("failed", "it failed", error=error)
    assert "ERROR: it failed\nTraceback" in stream.getvalue()


def test_json_has_the_event_and_its_fields_and_can_not_be_overridden() -> None:
    stream = written("json")
    Logger().warning("lookup_silent", "silent for %d s\n", 5, client="1.2.3.4:5", level="x", odd={1, 2} - {2})
    line = json.loads(stream.getvalue())
    assert line["event"] == "lookup_silent"
    assert (line["level"], line["program"]) == ("warning", "nsqd")
    assert (line["message"], line["client"]) == ("silent for 5 s\n", "1.2.3.4:5")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])
    assert stream.getvalue().count("\n") == 1


def test_libraries_are_heard_from_warnings_on() -> None:
    stream = written()
    logging.getLogger("somebody").info("chatter")
    logging.getLogger("somebody").warning("trouble")
    assert "chatter" not in stream.getvalue()
    assert "WARNING: trouble" in stream.getvalue()
    assert nsqlog.LEVELS["warn"] == logging.WARNING


def test_a_closed_stderr_is_survived() -> None:
    stream = written()
    stream.close()
    Logger().info("event", "into the void")


class CountedWrites(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    @property
    def writes(self) -> int:
        return len(self.sizes)

    def write(self, text: str) -> int:
        self.sizes.append(len(text))
        return super().write(text)


def said(stream: io.StringIO) -> list[str]:
    return [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()]


class Turns:
    """A loop whose turns end when the test says so."""

    def __init__(self) -> None:
        self._called: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._called.append(callback)

    def end(self) -> None:
        called, self._called = self._called, []
        assert len(called) < 2, "one callback a turn"
        for callback in called:
            callback()


def counted() -> CountedWrites:
    stream = CountedWrites()
    configure(prefix="", level="info", stream=stream)
    return stream


def test_lines_of_one_turn_are_one_write() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with by_turns(turns.call_soon, threading.get_ident):
        log.info("event", "a")
        log.info("event", "b")
        assert stream.writes == 0
        turns.end()
        assert stream.writes == 1 and said(stream) == ["a", "b"]
        turns.end()
        log.info("event", "c")
        turns.end()
        assert stream.writes == 2 and said(stream) == ["a", "b", "c"]
        log.info("event", "d")
    assert stream.writes == 3, "the loop ends"
    log.info("event", "e")
    assert stream.writes == 4 and said(stream) == ["a", "b", "c", "d", "e"]
    turns.end()


def test_a_line_that_may_belong_to_an_answer_is_there_before_it() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with by_turns(turns.call_soon, threading.get_ident):
        log.info("event", "a")
        Logger("audit").info("event", "b")
        assert stream.writes == 1 and said(stream) == ["a", "b"]
        turns.end()
    assert stream.writes == 1


def test_an_error_does_not_wait_nor_does_what_was_said_before() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with by_turns(turns.call_soon, threading.get_ident):
        log.info("event", "a")
        log.warning("event", "b")
        log.error("event", "c")
        assert stream.writes == 1 and said(stream) == ["a", "b", "c"]
        turns.end()
        log.info("event", "d")
        turns.end()
    assert said(stream) == ["a", "b", "c", "d"]


def test_a_line_of_another_thread_does_not_wait_for_a_turn() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with by_turns(turns.call_soon, threading.get_ident):
        log.info("event", "a")
        other = threading.Thread(target=log.info, args=("event", "b"))
        other.start()
        other.join()
        assert said(stream) == ["a", "b"]


def test_a_long_turn_keeps_no_more_than_a_pipe_takes_whole() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with by_turns(turns.call_soon, threading.get_ident):
        for _ in range(100):
            log.info("event", "x" * 200)
        writes = stream.sizes
        assert len(writes) > 3 and max(writes) <= KEPT_CHARS_MAX
        assert sum(writes) > 100 * 200 - KEPT_CHARS_MAX


def test_what_was_said_before_the_loop_failed_is_written() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with pytest.raises(ValueError), by_turns(turns.call_soon, threading.get_ident):
        log.info("event", "a")
        raise ValueError
    assert said(stream) == ["a"]


def test_a_stderr_that_closes_during_a_turn_is_survived() -> None:
    stream, log, turns = counted(), Logger(waits=True), Turns()
    with by_turns(turns.call_soon, threading.get_ident):
        log.info("event", "a")
        stream.close()
        turns.end()
        log.info("event", "b")
    after = counted()
    log.info("event", "c")
    assert said(after) == ["c"]
