"""Go's flag syntax, durations, config file and environment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqha.errors import ConfigError
from nsqha.goflags import (
    BOOL,
    DURATION,
    FLOATS,
    INT,
    STRING,
    STRINGS,
    Flag,
    FlagValues,
    HelpWanted,
    UsageError,
    VersionWanted,
    choice,
    format_duration,
    load,
    parse_arguments,
    parse_duration,
    usage,
)

TABLE = [
    Flag("version", BOOL, False, "print the version", ""),
    Flag("config", STRING, "", "a file", "config"),
    Flag("tcp-address", STRING, "0.0.0.0:1", "an address", "tcp_address"),
    Flag("max-size", INT, 10, "a size", "max_size"),
    Flag("verbose", BOOL, False, "talk", "verbose", inert="there is a level"),
    Flag("snappy", BOOL, True, "allow it", "snappy"),
    Flag("timeout", DURATION, 60 * 10**9, "a time", "timeout"),
    Flag("peer", STRINGS, (), "a peer", "peers"),
    Flag("percentile", FLOATS, (), "a fraction", "percentiles"),
    Flag("sync", choice("always", "none"), "always", "when", "sync"),
]


def read(*argv: str, env: dict[str, str] | None = None, file: dict[str, Any] | None = None) -> FlagValues:
    return load(TABLE, argv, environ=env or {}, env_prefix="X_", read_toml=lambda _: file or {})


@pytest.mark.parametrize("form", [["-max-size", "7"], ["--max-size", "7"], ["-max-size=7"], ["--max-size=7"]])
def test_one_dash_or_two_and_a_blank_or_an_equals_sign(form: list[str]) -> None:
    assert read(*form).values["max-size"] == 7


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--verbose"], "verbose", True),
        (["--snappy=false"], "snappy", False),
        (["--snappy=F"], "snappy", False),
        (["--max-size=-3"], "max-size", -3),
        (["--max-size", "-3"], "max-size", -3),
        (["--max-size=0x10"], "max-size", 16),
        (["--max-size=017"], "max-size", 15),
        (["--max-size=9223372036854775807"], "max-size", (1 << 63) - 1),
        (["--timeout=1m30s"], "timeout", 90 * 10**9),
        (["--tcp-address="], "tcp-address", ""),
        (["--tcp-address=a=b"], "tcp-address", "a=b"),
        (["--peer=a", "-peer", "b,c", "--peer= d , "], "peer", ("a", "b", "c", "d")),
        (["--percentile=0.5,0.99"], "percentile", (0.5, 0.99)),
        (["--sync=None"], "sync", "none"),
        (["--max-size=1", "--max-size=2"], "max-size", 2),
    ],
)
def test_values(argv: list[str], name: str, value: object) -> None:
    settings = read(*argv)
    assert settings.values[name] == value
    assert settings.sources == {name: "flag"}


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--nope"], "flag provided but not defined: -nope"),
        (["--max-sise=1"], "flag provided but not defined: -max-sise (did you mean -max-size?)"),
        (["--timeout=soon"], 'invalid value "soon" for flag -timeout: parse error'),
        (["--verbose=maybe"], 'invalid boolean value "maybe" for flag -verbose: parse error'),
        (["--max-size"], "flag needs an argument: -max-size"),
        (["--max-size="], 'invalid value "" for flag -max-size: parse error'),
        (["--max-size=1.5"], 'invalid value "1.5" for flag -max-size: parse error'),
        (["--max-size=9223372036854775808"], 'invalid value "9223372036854775808" for flag -max-size: value out of'),
        (["--percentile=x"], 'invalid value "x" for flag -percentile: parse error'),
        (["--sync=often"], 'invalid value "often" for flag -sync: must be one of always, none'),
        (["---sync=none"], "bad flag syntax: ---sync=none"),
        (["--=x"], "bad flag syntax: --=x"),
        (["--verbose", "true", "--max-size=1"], 'unexpected argument "true"'),
        (["--"], 'unexpected argument "--"'),
    ],
)
def test_errors_have_gos_words(argv: list[str], error: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(*argv)
    assert str(caught.value).startswith(error)


def test_help_and_version_come_before_anything_that_could_fail_later() -> None:
    with pytest.raises(HelpWanted):
        read("-h")
    with pytest.raises(HelpWanted):
        read("--help", "--nope")
    with pytest.raises(VersionWanted):
        read("-version", env={"X_TIMEOUT": "soon"})
    assert not read("--version=false").values["version"]


def test_flag_before_environment_before_file_before_default() -> None:
    file = {"max_size": 3, "timeout": "3s", "tcp_address": "file:3"}
    settings = read("--config=f", "--max-size=1", env={"X_MAX_SIZE": "2", "X_TIMEOUT": "2s"}, file=file)
    assert (settings.values["max-size"], settings.values["timeout"]) == (1, 2 * 10**9)
    assert (settings.values["tcp-address"], settings.values["sync"]) == ("file:3", "always")
    assert settings.sources == {"config": "flag", "max-size": "flag", "timeout": "env", "tcp-address": "file"}


def test_a_list_from_a_better_source_replaces_the_whole_list() -> None:
    assert read("--peer=a", env={"X_PEER": "b,c"}, file={"peers": ["d"]}).values["peer"] == ("a",)
    assert read(env={"X_PEER": "b,c"}).values["peer"] == ("b", "c")


def test_the_config_file_can_be_named_in_the_environment_but_the_version_can_not() -> None:
    assert read(env={"X_CONFIG": "f", "X_VERSION": "1.2.3"}, file={"max_size": 4}).values["max-size"] == 4


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("timeout", "250ms", 250 * 10**6),
        ("timeout", 250, 250 * 10**6),
        ("peers", ["a", "b"], ("a", "b")),
        ("peers", "a,b", ("a", "b")),
        ("percentiles", [0.5, 1], (0.5, 1.0)),
        ("percentiles", 0.99, (0.99,)),
        ("max_size", "12", 12),
        ("snappy", "false", False),
    ],
)
def test_what_a_file_may_hold(key: str, value: object, expected: object) -> None:
    assert expected in read("--config=f", file={key: value}).values.values()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timeout", 1.5),
        ("timeout", True),
        ("max_size", 1.0),
        ("max_size", True),
        ("max_size", 1 << 63),
        ("snappy", 1),
        ("peers", [1]),
        ("peers", {"a": 1}),
        ("percentiles", ["x"]),
        ("tcp_address", 4150),
        ("sync", "often"),
    ],
)
def test_a_wrong_value_in_a_file_names_file_and_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"f: {key} = "):
        read("--config=f", file={key: value})


def test_a_wrong_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="X_TIMEOUT"):
        read(env={"X_TIMEOUT": "soon"})


def test_what_has_no_effect_is_said_once() -> None:
    settings = read("--config=f", "--verbose", "--verbose=true", file={"verbose": True})
    assert settings.notices == ("--verbose has no effect: there is a level",)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("timeuot", r"--config=f: there is no setting timeuot \(did you mean timeout\?\)$"),
        ("color", "--config=f: there is no setting color$"),
        ("version", "there is no setting version$"),
    ],
)
def test_a_key_of_the_file_that_is_no_setting_is_refused(key: str, said: str) -> None:
    """A mistyped retention would go unnoticed until the messages are gone."""
    with pytest.raises(ConfigError, match=said):
        read("--config=f", file={key: "1s"})


def test_usage_shows_every_flag_with_its_default() -> None:
    text = usage("prog", TABLE)
    assert text.startswith("Usage of prog:\n  -version\n    \tprint the version\n")
    assert "  -timeout duration\n    \ta time (default 1m0s)\n" in text
    assert "  -snappy\n    \tallow it (default true)\n" in text
    assert "accepted, without effect: there is a level" in text


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("0s", 0),
        ("5ns", 5),
        ("1us", 1000),
        ("1µs", 1000),
        ("1.5ms", 1_500_000),
        (".5s", 500_000_000),
        ("1.s", 10**9),
        ("1h30m", 5400 * 10**9),
        ("-1m", -60 * 10**9),
        ("+2s", 2 * 10**9),
        ("8760h", 8760 * 3600 * 10**9),
    ],
)
def test_durations_are_read(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "-", "1", "s", ".s", "1 s", "1d", "soon", "1s ", "-0x1s", "1e3s", "3000000h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="parse error"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_500, "1.5µs"),
        (2_000_000, "2ms"),
        (999_999_999, "999.999999ms"),
        (10**9, "1s"),
        (90 * 10**9, "1m30s"),
        (3600 * 10**9, "1h0m0s"),
        (3600 * 10**9 + 250_000_000, "1h0m0.25s"),
        (-1_500_000_000, "-1.5s"),
    ],
)
def test_durations_are_written_as_go_does(ns: int, text: str) -> None:
    assert format_duration(ns) == text


@given(st.integers(-(1 << 63) + 1, (1 << 63) - 1))
def test_a_written_duration_reads_back(ns: int) -> None:
    assert parse_duration(format_duration(ns)) == ns


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--peer", "-timeout=", "--verbose", "=", "-"]), max_size=6))
def test_no_command_line_raises_anything_else(argv: list[str]) -> None:
    try:
        parse_arguments({flag.name: flag for flag in TABLE}, argv)
    except (UsageError, HelpWanted):
        pass
