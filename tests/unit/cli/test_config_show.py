"""`nsqha config show` says what a daemon would use and where it comes from; what it would refuse is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsqha.cli import build_parser
from nsqha.errors import ConfigError


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, str]]:
    """setting -> (value, where it comes from)."""
    args = build_parser("config").parse_args(["config", "show", words[0], "--json", *words[1:]])
    assert args.run(args) == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    return {row["setting"]: (row["value"], row["from"]) for row in rows}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "broker.toml"
    path.write_text('sync = "interval"\nsync_every = 7\nmsg_timeout = "90s"\n')
    return path


def test_each_value_has_its_origin(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSQD_MSG_TIMEOUT", "2m")
    found = shown(capsys, "broker", "--config", str(file), "--", "--sync=always", "--snappy=false")
    assert found == {
        "config": (str(file), "flag"),
        "sync": ("always", "flag"),
        "snappy": ("false", "flag"),
        "msg_timeout": ("2m0s", "env"),
        "sync_every": ("7", "file"),
    }


@pytest.mark.parametrize("before", [(), ("broker",), ("--json",), ("broker", "--json")])
def test_flags_of_the_daemon_follow_dashes_wherever_they_are(
    before: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    args = build_parser("config").parse_args(["config", "show", *before, "--", "--sync=interval", "--snappy=false"])
    assert (args.daemon, args.flags) == ("broker", ["--sync=interval", "--snappy=false"])
    assert args.run(args) == 0 and "interval" in capsys.readouterr().out


def test_all_shows_defaults_but_not_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "lookupd", "--all")
    assert found["tombstone_lifetime"] == ("45s", "default")
    assert "verbose" not in found


def test_an_unknown_variable_is_named_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NSQHA_DATAPATH", "NSQD_PORT", "NSQHA_TOKE", "NSQHA_TOKEN"):
        monkeypatch.setenv(variable, "a secret perhaps")
    args = build_parser("config").parse_args(["config", "show"])
    assert args.run(args) == 0
    said = capsys.readouterr()
    rows = {line.split()[0]: line for line in said.out.splitlines()}
    assert rows["NSQHA_DATAPATH"].endswith("unknown: did you mean NSQD_DATA_PATH?")
    assert rows["NSQD_PORT"].endswith("unknown") and "NSQHA_TOKEN" not in rows
    assert "a secret" not in said.out + said.err and "DATAPATH" not in said.err, "it is said once"
    args = build_parser("config").parse_args(["config", "show", "--json"])
    assert args.run(args) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"unknown": "NSQHA_DATAPATH", "nearest": "NSQD_DATA_PATH"} in found


def test_what_the_daemon_would_refuse_is_an_error(file: Path) -> None:
    file.write_text("sync_evry = 7\n")
    args = build_parser("config").parse_args(["config", "show", "broker", "--config", str(file)])
    with pytest.raises(ConfigError, match=r"there is no setting sync_evry \(did you mean sync_every\?\)"):
        args.run(args)
    args = build_parser("config").parse_args(["config", "show", "broker", "--", "--max-deflate-level=10"])
    with pytest.raises(ConfigError, match="--max-deflate-level=10: must be at most 9"):
        args.run(args)


def test_a_flag_without_effect_is_shown_if_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser("config").parse_args(["config", "show", "broker", "--", "--worker-id"])
    assert args.run(args) == 0
    captured = capsys.readouterr()
    assert "worker_id  true   flag" in captured.out
    assert "--worker-id has no effect" in captured.err
