"""Where messages come from, and in what pieces they leave."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from nsqha.cli import build_parser
from nsqha.cli.pub import BODY_BYTES_MAX, RUN_BYTES, RUN_MESSAGES, rate, runs, size_of, sources
from nsqha.cli.terminal import exits


def args(*messages: str, file: tuple[str, ...] = (), whole: bool = False) -> argparse.Namespace:
    return argparse.Namespace(messages=list(messages), file=list(file), whole=whole)


def bodies(arguments: argparse.Namespace) -> list[bytes]:
    return [body for found in sources(arguments) for body in found]


def test_arguments_are_messages() -> None:
    assert bodies(args("a", "grün")) == [b"a", "grün".encode()]


def test_lines_of_files_are_messages(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"one\r\ntwo\n\nthree")
    second.write_bytes(b"four\n")
    assert bodies(args(file=(str(first), str(second)))) == [b"one", b"two", b"", b"three", b"four"]


def test_a_whole_file_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\r\n\0two\r")
    assert bodies(args(file=(str(path),), whole=True)) == [b"one\r\n\0two\r"]


@pytest.mark.parametrize("messages", [[""], ["a", "", "b"]])
def test_an_empty_argument_publishes_nothing(messages: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser("pub").parse_args(["pub", "orders", *messages])
    with pytest.raises(SystemExit) as raised:
        args.run(args)
    assert raised.value.code == exits.USAGE
    assert f"message {messages.index('') + 1} is empty" in capsys.readouterr().err


def test_an_empty_file_is_no_message(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"")
    assert bodies(args(file=(str(path),))) == []
    with pytest.raises(exits.Exit, match="a is empty, and brokers refuse") as raised:
        bodies(args(file=(str(path),), whole=True))
    assert raised.value.status == exits.USAGE


def test_lines_longer_than_a_read_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    line = os.urandom(RUN_BYTES * 2).replace(b"\n", b" ").replace(b"\r", b" ")
    path.write_bytes(line + b"\nend\n")
    assert bodies(args(file=(str(path),))) == [line, b"end"]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.read", lambda descriptor, n: b"x" * (BODY_BYTES_MAX // 4))
    with pytest.raises(exits.Exit, match="more than 64 MiB"):
        bodies(args(file=("/dev/null",)))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(exits.Exit, match="No such file") as raised:
        bodies(args(file=("/nowhere/x",)))
    assert raised.value.status == exits.USAGE


def test_runs_are_bounded_by_messages_and_bytes() -> None:
    many = [[b"x"] * (2 * RUN_MESSAGES + 1)]
    assert [len(run) for run in runs(iter(many), None)] == [RUN_MESSAGES, RUN_MESSAGES, 1]
    big = [b"x" * (RUN_BYTES // 2), b"y" * (RUN_BYTES // 2), b"z"]
    assert [len(run) for run in runs(iter([big]), None)] == [2, 1]
    assert [len(run) for run in runs(iter([[b"x" * RUN_BYTES * 2, b"y"]]), None)] == [1, 1]


def test_a_slow_rate_makes_small_runs() -> None:
    assert [len(run) for run in runs(iter([[b"x"] * 3]), 2.0)] == [1, 1, 1]
    assert [len(run) for run in runs(iter([[b"x"] * 100]), 1000.0)] == [50, 50]


def test_rates() -> None:
    assert rate("0.5") == 0.5
    for bad in ("0", "-1", "nan", "inf", "fast", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            rate(bad)


def test_progress_needs_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 7)
    assert size_of([str(path), str(path)]) == 14
    assert size_of([str(path), "-"]) == 0
    assert size_of([]) == 0
