"""What `nsqha spark replay` and `nsqha spark lag` take, before anybody is asked."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from nsqha.cli import build_parser
from nsqha.cli.spark import replay
from nsqha.cli.spark.flags import Within, place, say_range, time_range
from nsqha.cli.spark.lag import limit
from nsqha.cli.spark.replay import progress_line, words_of
from nsqha.cli.terminal import exits
from nsqha.pb.v1 import admin_pb2 as pb
from pyspark_nsqha.writing.replay_state import Order, ReplaySpan, ReplayState


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of it, as one line."""
    with pytest.raises(SystemExit) as ended:
        args = build_parser("spark").parse_args(["spark", *words])
        args.run(args)
    assert ended.value.code == exits.USAGE
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("orders --from -2h", "give either --into TOPIC or --channel NAME"),
        ("orders --from -2h --into x --channel y", "give either --into TOPIC or --channel NAME"),
        ("orders --into x", "say which messages: --from TIME"),
        ("orders --to -2h --into x", "say which messages: --from TIME"),
        ("orders --from -2h --offsets 0:1-2 --into x", "--offsets says where a range begins"),
        ("orders --ids f --where true --into x", "--ids selects messages by itself"),
        ("orders --ids f --from -2h --into x", "--ids selects messages by itself"),
        ("orders --offsets 0:1-2 --offsets 0:5-6 --into x", "names a partition twice"),
        ("orders --offsets 0:5-2 --into x", "ends before it begins"),
        ("orders --offsets 5-2 --into x", "is not PARTITION:FIRST-END"),
        ("orders --from 17 --into x", "--from '17' is not a time: -2h, 2026-11-20T10:00Z, @1795262005, start or end;"),
        ("orders --from yesterday --into x", "--from 'yesterday' is not a time: -2h, 2026-11-20T10:00Z, @1795262005,"),
        ("orders --from 2026-13-01 --into x", "--from: 2026-13-01 is not a time"),
        ("orders --from 1960-01-01 --into x", "is before 1970"),
        ("orders --from -1h --until -2h --into x", "--from -1h is not before --until -2h"),
        ("orders --from -1h --to -1h --into x", "--from -1h is not before --until -1h"),
        ("orders --from end --into x", "--from end leaves nothing to read"),
        ("orders --from start --until start --into x", "--until start leaves nothing to read"),
        ("orders --from 17 --channel billing", "--from '17' is not a time"),
        ("orders --from -2h --into orders", "--allow-same"),
        ("live#ephemeral --from -2h --into x", "is ephemeral"),
        ("orders --where true --channel billing", "leave out --where"),
        ("orders --ids f --channel billing", "leave out --ids"),
        ("orders --from -2h --to -1h --channel billing", "leave out --until"),
        ("orders --from -2h --rate 5 --channel billing", "leave out --rate"),
        ("orders --offsets 0:1-2 --channel billing", "leave out END of --offsets"),
        ("orders --from -2h --rate 0 --into x", "is not a whole number above zero"),
    ],
)
def test_what_makes_no_sense_is_one_line(capsys: pytest.CaptureFixture[str], words: str, why: str) -> None:
    assert why in refused(capsys, "replay", *words.split())


def test_a_file_of_ids_is_checked_before_anybody_is_asked(tmp_path: Path) -> None:
    def said(text: str) -> str:
        (tmp_path / "ids").write_text(text)
        args = build_parser("spark").parse_args(
            ["spark", "replay", "orders", "--ids", str(tmp_path / "ids"), "--into", "x"]
        )
        with pytest.raises(exits.Exit) as ended:
            args.run(args)
        return str(ended.value)

    assert "is empty" in said("\n")
    assert "'ABCD', number 2, is not 16 hex digits" in said("0000000000000001\nABCD\n")
    assert "has more than 100,000 ids" in said("".join(f"{n:016x}\n" for n in range(100_001)))


def test_a_channel_is_told_which_time_is_meant_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "orders", "--from", "2026-11-20T10:00Z", "--channel", "billing", "--broker", "127.0.0.1:1"]
    args = build_parser("spark").parse_args(["spark", *words])
    with pytest.raises(exits.Exit):
        args.run(args)
    assert capsys.readouterr().err.startswith("from 2026-11-20 ")


def test_a_range_of_a_backfill_is_looked_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("backfill", "orders", "--to", "lake", "--broker", "127.0.0.1:1")
    assert "--from -1h is not before --until -2h" in refused(capsys, *words, "--from", "-1h", "--until", "-2h")
    assert "--from '17' is not a time: -2h, 2026-11-20T10:00Z," in refused(capsys, *words, "--from", "17")
    assert "--until start leaves nothing to read" in refused(capsys, *words, "--until", "start")


@pytest.mark.parametrize("verb", ["replay", "backfill"])
def test_times_are_as_seek_takes_them_and_as_iso_8601(verb: str) -> None:
    parser, now = build_parser("spark").verbs()["spark"].verbs()[verb], time.time_ns()

    def at(text: str) -> int:
        return place(parser, "--from", text, now).value

    assert at("-2h") == at("@-2h") == now - 2 * 3600 * 10**9
    assert at("2026-11-20T10:00:00Z") == at("@2026-11-20T10:00Z") == at("@1795168800") == 1_795_168_800 * 10**9
    assert at("2026-11-20T11:00:00+01:00") == at("@1795168800")
    assert at("2026-11-20") == at("@2026-11-20")
    assert place(parser, "--from", "start", now).kind == "start"
    assert time_range(parser, "start", "end", now) == time_range(parser, None, None, now) == (None, None)


def test_which_times_are_meant_is_said_with_their_zone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Paris")
    time.tzset()
    try:
        parser = build_parser("spark").verbs()["spark"].verbs()["backfill"]
        say_range(time_range(parser, "2026-11-20", "2026-11-20T10:00Z", 0))
        say_range(Within(None, None))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert capsys.readouterr().err == "from 2026-11-20 00:00:00.000+01:00 until 2026-11-20 11:00:00.000+01:00\n"


def test_a_limit_is_a_number_of_messages_or_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert limit("100") == (100, None)
    assert limit("10m") == (None, 600.0)
    assert "neither a time such as 10m nor a number of messages" in refused(capsys, "lag", "--fail-above", "ten")
    assert "is negative" in refused(capsys, "lag", "--fail-above=-10m")
    assert "--interval needs a time above zero" in refused(capsys, "lag", "--interval", "0")
    assert "give topics by name, or --pattern" in refused(capsys, "lag", "orders", "--pattern", "o.*")


def test_what_earlier_runs_sent_is_told_apart(tmp_path: Path) -> None:
    def ended() -> ReplayState:
        return ReplayState.load(tmp_path / "state") or ReplayState(
            Order("orders", 1, "again"), [ReplaySpan(0, 0, 9)], tmp_path / "state"
        )

    first = ended()
    first.end([ReplaySpan(0, 0, 7)], sent=7, possible_duplicates=0)
    assert words_of(first, 1.0) == "7 messages sent in 1s"
    assert words_of(ended(), 0.0) == "0 messages sent in 0ms, 7 by earlier runs"
    second = ended()
    second.end([ReplaySpan(0, 7, 9)], sent=2, possible_duplicates=0)
    assert words_of(second, 2.0) == "2 messages sent in 2s, 7 by earlier runs"


def test_progress_is_in_messages() -> None:
    assert progress_line("replay", 500, 2000, 5.0) == "replay  25%  500 of 2,000 messages  100/s  15s left"


def test_a_channel_that_is_not_that_far_is_never_moved_forward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where more would come again than be skipped: what was finished out of order."""
    asked: list[bool] = []

    class Answers:
        def call(self, rpc: str, *, plan_only: bool, **_: Any) -> Any:
            asked.append(plan_only)
            ahead = pb.SeekPartition(from_offset=1, to_offset=3, again=3, skipped=1, messages=2)
            return pb.SeekResponse(partitions=[ahead])

    monkeypatch.setattr(replay, "administration", lambda args, *brokers: nullcontext(Answers()))
    words = ["spark", "replay", "orders", "--offsets", "0:3-", "--channel", "c", "--yes", "--broker", "127.0.0.1:1"]
    args = build_parser("spark").parse_args(words)
    assert args.run(args) == exits.OK
    assert asked == [True]
    assert "not moved, because the channel is not that far yet: partition 0" in capsys.readouterr().err
