"""A process never waits for who reads its log, and loses lines only when it has to, and says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsqha.log_writer import PIECE_BYTES, LogWriter

LINE = "x" * 99 + "\n"
SOON = 30.0  # a bound for a broken writer


def lost(n: int) -> str:
    return f"{n} lines lost\n"


class Pipe:
    """A pipe as standard error."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()

    def read_all(self) -> str:
        """All that was written; the writing end is closed by the caller, or another thread, at some time."""
        with os.fdopen(os.dup(self.reads), "rb") as file:
            return file.read().decode()

    def close(self) -> None:
        os.close(self.writes)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.reads)


def test_what_a_pipe_takes_is_there_when_the_call_returns(pipe: Pipe) -> None:
    threads = threading.active_count()
    writer = LogWriter(pipe.writes, lost)
    writer.write("a\nb\n")
    assert os.read(pipe.reads, 100) == b"a\nb\n"
    assert threading.active_count() == threads, "nothing waits"


def test_who_does_not_read_stops_nobody_and_is_told_what_was_lost(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writes, lost, bytes_max=100_000)
    for number in range(10_000):
        writer.write(f"{number:099d}\n")
    reader = threading.Thread(target=lambda: found.append(pipe.read_all()))
    found: list[str] = []
    reader.start()
    assert writer.drain(SOON, stalled=SOON)
    writer.write("after\n")
    assert writer.drain(SOON, stalled=SOON)
    pipe.close()
    reader.join()
    *lines, said, after = found[0].splitlines()
    assert [int(line) for line in lines] == list(range(len(lines))), "nothing is missing between"
    assert len(lines) >= 1000, "what fits into the buffer, and what the pipe took"
    assert (said, after) == (f"{10_000 - len(lines)} lines lost", "after")


def test_an_urgent_line_has_room_where_others_have_none(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writes, lost, bytes_max=100_000)
    for _ in range(10_000):
        writer.write(LINE)
    writer.write("why it ends\n", urgent=True)
    writer.write(LINE)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_all()))
    reader.start()
    assert writer.drain(SOON, stalled=SOON)
    pipe.close()
    reader.join()
    *_, before, why, after = found[0].splitlines()
    assert (before[-10:], why, after) == ("lines lost", "why it ends", "1 lines lost")


def test_urgent_lines_are_bounded_too(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writes, lost, bytes_max=100_000)
    for _ in range(10_000):
        writer.write(LINE, urgent=True)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_all()))
    reader.start()
    assert writer.drain(SOON, stalled=SOON)
    pipe.close()
    reader.join()
    assert len(found[0]) < 500_000 and found[0].endswith("lines lost\n")


def test_once_lines_are_dropped_they_are_until_half_the_buffer_is_free(pipe: Pipe) -> None:
    """Else a flood would be a note for each line that gets through."""
    writer = LogWriter(pipe.writes, lost, bytes_max=100 * PIECE_BYTES)
    for _ in range(20_000):
        writer.write(LINE)
    said = 0
    for _ in range(300):
        text = os.read(pipe.reads, PIECE_BYTES).decode()
        said += text.count("lost")
        for _ in range(100):
            writer.write(LINE)
    pipe.close()
    assert said <= 10


def test_a_file_has_what_was_said_after_a_short_wait(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        writer = LogWriter(file.fileno(), lost)
        for _ in range(100):
            writer.write(LINE)
        writer.settle(SOON)
        assert (tmp_path / "log").read_text() == LINE * 100


def test_who_has_waited_in_vain_does_not_wait_again_before_the_log_is_written(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writes, lost)
    for _ in range(1000):
        writer.write(LINE)
    writer.settle(0.0)
    writer.settle(1e9)
    reader = threading.Thread(target=pipe.read_all)
    reader.start()
    assert writer.drain(SOON, stalled=SOON)
    pipe.close()
    reader.join()


def test_a_log_that_takes_nothing_is_given_up(pipe: Pipe) -> None:
    writer = LogWriter(pipe.writes, lost)
    for _ in range(1000):
        writer.write(LINE)
    assert not writer.drain(1e9, stalled=0.01)
    assert not writer.drain(0.01, stalled=1e9)


def test_a_descriptor_that_does_not_block_gets_whole_lines(pipe: Pipe) -> None:
    os.set_blocking(pipe.writes, False)
    writer = LogWriter(pipe.writes, lost)
    for _ in range(2000):
        writer.write(LINE)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_all()))
    reader.start()
    assert writer.drain(SOON, stalled=SOON)
    pipe.close()
    reader.join()
    assert found == [LINE * 2000]


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    writer = LogWriter(writes, lost)
    for _ in range(100):
        writer.write(LINE)
    assert writer.drain(SOON, stalled=SOON)
    os.close(writes)


ENDS = """
import sys
from nsqha import nsqlog
from nsqha.cli.terminal import exits
nsqlog.configure(prefix="[it] ", level="info")
for number in range(5000):
    nsqlog.Logger().info("event", "line %d", number)
{}
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("exits.end(0)", 0),
        ("sys.modules['grpc'] = sys; exits.end(3)", 3),
        ("nsqlog.Logger().fatal('event', 'last'); import os; os._exit(4)", 4),
        ("nsqlog.Logger().fatal('event', 'last'); import os; os.kill(os.getpid(), 9)", -9),
    ],
    ids=["exits", "exits beside grpc", "fatal", "fatal and killed"],
)
def test_what_was_said_is_written_before_a_process_ends(end: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDS.format(end)], stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=SOON)
    assert process.returncode == status
    found = [int(number) for number in re.findall(r"line (\d+)$", said, re.MULTILINE)]
    assert found == list(range(5000))
    assert ("FATAL: last" in said) == ("last" in end)
