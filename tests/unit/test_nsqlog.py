"""The log line that people's tools parse, and its JSON twin."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from nsqha import nsqlog
from nsqha.nsqlog import Logger, configure, one_line, set_level, together


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
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def said(stream: io.StringIO) -> list[str]:
    return [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()]


def test_lines_of_one_piece_of_work_are_one_write_and_an_error_does_not_wait() -> None:
    stream, log = CountedWrites(), Logger()
    configure(prefix="", level="info", stream=stream)
    with together():
        for word in ("a", "b"):
            log.info("event", word)
        with together():
            log.info("event", "c")
        assert stream.writes == 0
        log.error("event", "d")
        assert stream.writes == 1 and said(stream) == ["a", "b", "c", "d"]
        log.info("event", "e")
    assert stream.writes == 2
    log.info("event", "f")
    assert stream.writes == 3 and said(stream) == ["a", "b", "c", "d", "e", "f"]


def test_what_was_said_before_work_failed_is_written() -> None:
    stream, log = CountedWrites(), Logger()
    configure(prefix="", level="info", stream=stream)
    with pytest.raises(ValueError), together():
        log.info("event", "a")
        raise ValueError
    assert said(stream) == ["a"]


def test_a_stderr_that_closes_during_work_is_survived() -> None:
    stream, log = CountedWrites(), Logger()
    configure(prefix="", level="info", stream=stream)
    with together():
        log.info("event", "a")
        stream.close()
    configure(prefix="", level="info", stream=(after := CountedWrites()))
    log.info("event", "b")
    assert said(after) == ["b"]
