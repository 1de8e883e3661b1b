"""Tables, colour, progress: plain where nobody looks."""

from __future__ import annotations

import io

import pytest

from nsqha.cli.peek import body_line
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.screen import (
    ProgressLine,
    body_json,
    coloured,
    confirm,
    printable,
    progress_line,
    show_bytes,
    table,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_numbers_stand_to_the_right() -> None:
    out = io.StringIO()
    table(("NAME", "DEPTH", ""), [("a", 5, "x"), ("longer", 12345, "")], out)
    assert out.getvalue() == "NAME     DEPTH\na            5  x\nlonger  12,345\n"


def test_an_empty_table_is_its_headers() -> None:
    out = io.StringIO()
    table(("A", "B"), [], out)
    assert out.getvalue() == "A  B\n"


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(Terminal())
    assert not coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "")
    assert not coloured(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured(Terminal())


def test_bytes_have_units() -> None:
    assert [show_bytes(n) for n in (0, 999, 1500, 2_500_000, 3 * 10**9, 4 * 10**12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]


def test_progress_says_rate_and_time_left() -> None:
    line = progress_line("verify orders/0", 250_000_000, 1_000_000_000, 2.0)
    assert line == "verify orders/0  25%  250.0 MB of 1.0 GB  125.0 MB/s  6s left"
    assert "?" in progress_line("x", 0, 10, 0.0)
    assert "100%" in progress_line("x", 0, 0, 1.0)


def test_progress_is_silent_where_nobody_looks() -> None:
    out, terminal = io.StringIO(), Terminal()
    for stream in (out, terminal):
        progress = ProgressLine("verify", stream)
        progress(10, 10)
        progress.close()
    assert out.getvalue() == ""
    assert "100%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_what_is_shown_can_not_drive_a_terminal() -> None:
    assert printable("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"
    assert body_line(b"x" * 300) == "x" * 200 + "… 300 bytes"
    assert body_line(b"\xff") == "\ufffd"


def test_bodies_in_json() -> None:
    assert body_json("grün".encode()) == {"body": "grün"}
    assert body_json(b"\xff\x00") == {"body_base64": "/wA="}


def test_nobody_to_ask_means_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(exits.Exit) as raised:
        confirm("sure?", yes=False)
    assert raised.value.status == exits.NOT_CONFIRMED
    confirm("sure?", yes=True)
