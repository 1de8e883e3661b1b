"""Errors are one line with a way out; arguments are checked before anything is asked of a broker."""

from __future__ import annotations

import argparse

import pytest

from nsqha.admin import peeking
from nsqha.cli import build_parser, peek
from nsqha.cli.brokers.admin import credentials
from nsqha.cli.terminal import exits
from nsqha.cli.terminal.parser import count, did_you_mean, duration, timeout, topic_and_partition
from nsqha.cli.topic import replicas, size, span
from nsqha.cli.verbs import VERBS
from nsqha.errors import ConfigError, Conflict, LogCorrupt, NotFound, OutcomeUnknown, Unavailable


def fails(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as raised:
        build_parser().parse_args(list(words))
    assert raised.value.code == exits.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_near_misses_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean seek?" in fails("sek", capsys=capsys)
    assert "did you mean create?" in fails("topic", "creat", capsys=capsys)
    assert "did you mean --plan?" in fails("seek", "a", "b", "start", "--plam=1", capsys=capsys)
    assert "nsqha seek --help" in fails("seek", "a", capsys=capsys)
    assert "COMMAND" in fails(capsys=capsys)


def test_a_flag_before_its_verb_is_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --json; flags of a verb come after it" in fails("--json", "stats", capsys=capsys)
    said = fails("cluster", "--etcd-endpoint", "127.0.0.1:2379", "status", capsys=capsys)
    assert "unknown flag --etcd-endpoint; flags of a verb come after it; see nsqha cluster --help" in said


def test_a_relative_time_is_no_flag_where_times_are_expected() -> None:
    assert build_parser("seek").parse_args(["seek", "t", "c", "-1h30m"]).to == "@-1h30m"
    assert build_parser("peek").parse_args(["peek", "t", "-2d", "-n", "5"]).place == "@-2d"


def test_what_follows_a_flag_is_its_value_as_it_was_written() -> None:
    """A URI is no time: it would become a folder of another name."""
    backfill = build_parser("spark").parse_args
    found = backfill(["spark", "backfill", "orders", "--from", "-2d", "--to", "-1h", "--broker", "-1"])
    assert (found.since, found.to, found.broker) == ("-2d", "-1h", ["-1"])
    found = backfill(["spark", "replay", "orders", "--from", "-2d", "--until", "-1h", "--plan", "--into", "x"])
    assert (found.since, found.until, found.plan) == ("-2d", "-1h", True)


def test_flags_may_stand_anywhere() -> None:
    """Also between arguments of which the last may be left out."""
    for words in ("t c --plan -2h", "t --plan c -2h", "--plan t c -2h", "t c --plan -- -2h"):
        found = build_parser("seek").parse_args(["seek", *words.split()])
        assert (found.topic, found.channel, found.to, found.plan) == (("t", None), "c", "@-2h", True)
    assert build_parser("peek").parse_args(["peek", "t", "-n", "5"]).place == "end"
    assert build_parser("pub").parse_args(["pub", "t", "a", "--json", "b"]).messages == ["a", "b"]


def test_a_word_that_is_wrong_is_told_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'-1' is not a whole number above zero" in fails("peek", "t", "-n", "-1", capsys=capsys)
    assert "'-1s' is negative" in fails("seek", "t", "c", "start", "--clock-skew", "-1s", capsys=capsys)


def test_no_more_is_peeked_at_than_a_broker_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert peek.PEEK_MAX == peeking.PEEK_MAX
    assert build_parser("peek").parse_args(["peek", "t", "-n", "10000"]).count == 10_000
    for number in ("10001", "4294967296", "9" * 18):
        assert f"{number} is more than 10000" in fails("peek", "t", "-n", number, capsys=capsys)


def test_a_message_is_left_as_it_is() -> None:
    assert build_parser("pub").parse_args(["pub", "t", "--", "-2h"]).messages == ["-2h"]
    assert build_parser("pub").parse_args(["pub", "t", "-5"]).messages == ["-5"]


def test_only_the_verb_that_is_called_is_built() -> None:
    seek = build_parser("seek").verbs()
    assert list(seek) == list(VERBS)
    assert seek["seek"].positionals()
    assert not seek["topic"].verbs()


def test_help_has_no_line_that_a_terminal_would_break() -> None:
    """What has spaces; examples and argv are for copying."""
    waiting = list(build_parser().verbs().values())
    while waiting:
        verb = waiting.pop()
        waiting += verb.verbs().values()
        lines = f"{verb.description}\n{verb.epilog or ''}".splitlines()
        long = [line for line in lines if len(line) > 120 and line.strip() not in verb.examples]
        assert not long, (verb.prog, long)


def test_exit_statuses_are_in_order_and_stay_with_their_meaning() -> None:
    elect = build_parser("cluster").verbs()["cluster"].verbs()["elect"]
    last = (elect.epilog or "").rpartition("\n\n")[2]
    assert "4 exists already or was changed meanwhile, 5 not allowed,\n6 unreachable or timed out, 8 not" in last


def test_topics_may_name_a_partition() -> None:
    assert topic_and_partition("orders") == ("orders", None)
    assert topic_and_partition("orders/12") == ("orders", 12)
    other = "orders/\N{FULLWIDTH DIGIT ONE}"
    for bad in ("orders/", "orders/x", "orders/-1", "orders/1024", other, "or ders", "/1", "orders/1/2"):
        with pytest.raises(argparse.ArgumentTypeError):
            topic_and_partition(bad)


def test_numbers_are_bounded() -> None:
    assert count("12") == 12
    for bad in ("0", "-1", "x", "", "9" * 30, "1.5"):
        with pytest.raises(argparse.ArgumentTypeError):
            count(bad)
    with pytest.raises(argparse.ArgumentTypeError, match="negative"):
        duration("-1s")
    assert timeout("1s") == 10**9
    with pytest.raises(argparse.ArgumentTypeError, match="not above zero"):
        timeout("0s")


def test_retention_in_words() -> None:
    assert (span("7d"), span("forever"), span("never"), span("default")) == (7 * 86_400_000, -1, -1, 0)
    assert (size("10GB"), size("500k"), size("7"), size("unlimited"), size("default")) == (10**10, 500_000, 7, -1, 0)
    for bad in ("0s", "1us", "soon"):
        with pytest.raises(argparse.ArgumentTypeError):
            span(bad)
    for bad in ("0", "ten", "-1GB", "9" * 18 + "TB", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            size(bad)


def test_suggestions_need_some_likeness() -> None:
    assert did_you_mean("ordesr", ["payments", "orders"]) == " (did you mean orders?)"
    assert did_you_mean("xyz", ["payments", "orders"]) == ""


def test_every_error_has_its_status() -> None:
    assert exits.status_of(exits.Exit(8, "no")) == 8
    for error, status in (
        (ConfigError("x"), 2),
        (NotFound("x"), 3),
        (Conflict("x"), 4),
        (Unavailable("x"), 6),
        (OutcomeUnknown("x"), 1),
        (LogCorrupt("x"), 1),
    ):
        assert exits.status_of(error) == status


def test_replicas_are_a_number_or_the_default() -> None:
    assert [replicas(text) for text in ("1", "15", "default")] == [1, 15, 0]
    for bad in ("0", "16", "-1", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="1 to 15"):
            replicas(bad)


def test_a_certificate_needs_all_its_files() -> None:
    args = build_parser("topic").parse_args(["topic", "list"])
    assert credentials(args) is None
    args = build_parser("topic").parse_args(["topic", "list", "--cluster-tls-cert", "me.pem"])
    with pytest.raises(exits.Exit, match="go together"):
        credentials(args)


def test_nothing_to_change_is_said_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser("topic").parse_args(["topic", "set", "t", "--grpc-address", "127.0.0.1:1"])
    with pytest.raises(SystemExit) as raised:
        args.run(args)
    assert raised.value.code == exits.USAGE
    assert "--partitions" in capsys.readouterr().err
