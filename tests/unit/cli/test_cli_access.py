"""`nsqha access`: a token is shown once, and its lines are what a daemon reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nsqha.access.roles import Role
from nsqha.access.tokens import PREFIX, parse
from nsqha.cli import build_parser
from nsqha.cli.brokers import token as shown_token
from nsqha.cli.terminal import exits
from nsqha.clock import SystemClock
from nsqha.errors import ConfigError
from nsqha.server.authorization.access_file import AccessFile


def run(*words: str) -> int:
    args = build_parser("access").parse_args(["access", *words])
    status: int = args.run(args)
    return status


def made(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    assert run("token", *words, "--json") == exits.OK
    found: dict[str, str] = json.loads(capsys.readouterr().out)
    return found


def test_a_token_is_made_and_its_lines_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = made(
        capsys, "billing", "--role", "publisher", "--role", "viewer", "--topics", "a.*", "--expires", "2027-01-31"
    )
    assert found["token"].startswith(PREFIX) and len(found["token"]) > 45 and found["token"] not in found["entry"]
    token = parse(found["entry"].encode()).find(found["token"].encode())
    assert token is not None and token.name == "billing"
    assert token.grant.roles == {Role.PUBLISHER, Role.VIEWER} and token.grant.topics.patterns == ("a.*",)
    assert made(capsys, "billing", "--role", "viewer")["token"] != found["token"]


def test_it_is_added_to_a_file_that_others_never_see_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "access.toml"
    first = made(capsys, "a", "--role", "viewer", "--file", str(path))
    assert os.stat(path).st_mode & 0o777 == 0o600
    path.chmod(0o640)
    second = made(capsys, "b.c", "--role", "admin", "--file", str(path), "--expires", "90d")
    assert os.stat(path).st_mode & 0o777 == 0o640
    table = parse(path.read_bytes())
    assert [table.find(each["token"].encode()).name for each in (first, second)] == ["a", "b.c"]  # type: ignore[union-attr]
    assert os.listdir(tmp_path) == ["access.toml"]
    with pytest.raises(exits.Exit, match="has a token a already"):
        run("token", "a", "--role", "viewer", "--file", str(path))
    assert run("check", str(path)) == exits.OK
    out = capsys.readouterr().out
    assert out.startswith("anonymous: nothing\na: viewer (*)\nb.c: viewer, reader, operator, admin (*), until 20")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("token", "x", "--role", "publsher"), "did you mean publisher"),
        (("token", "a b", "--role", "viewer"), "'a b' is no name"),
        (("token", "x", "--role", "viewer", "--expires", "soon"), "'soon' is neither a date"),
        (("token", "x"), "--role"),
        (("token", "x", "--role", "viewer", "--expires", "2020-01-31"), "2020-01-31 has begun already"),
        (("token", "x", "--role", "viewer", "--expires", "0d"), "'0d' would have expired at once"),
    ],
)
def test_what_can_not_be_is_one_line(words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words)
    said = capsys.readouterr().err
    assert ended.value.code == exits.USAGE and why in said and said.count("\n") == 1


def test_a_broken_file_is_not_made_worse(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text("anonymous = [")
    path.chmod(0o600)
    for words in (("token", "x", "--role", "viewer", "--file", str(path)), ("check", str(path))):
        with pytest.raises(exits.Exit, match="not a TOML file"):
            run(*words)
    assert path.read_text() == "anonymous = ["
    with pytest.raises(exits.Exit, match="give admin to a token of its own"):
        run("token", "x", "--role", "admin", "--topics", "a")


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ('anonymous = ["viewer"]', 0o644, "every user of this host may use it"),
        ("", 0o600, "it has no tokens"),
        ('anonymous = ["viwer"]', 0o600, "did you mean viewer"),
    ],
)
def test_check_refuses_what_a_daemon_refuses(tmp_path: Path, text: str, mode: int, why: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(exits.Exit, match=why) as refused:
        run("check", str(path))
    with pytest.raises(ConfigError) as too:
        AccessFile(str(path), SystemClock())
    assert str(refused.value) == str(too.value) and refused.value.status == exits.USAGE


def test_a_file_behind_a_link_gets_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link, path = tmp_path / "link.toml", tmp_path / "access.toml"
    link.symlink_to(path)
    made(capsys, "a", "--role", "viewer", "--file", str(link))
    assert link.is_symlink() and b"[tokens.a]" in path.read_bytes()


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSQHA_TOKEN", "of the environment")
    monkeypatch.setenv("NSQHA_TOKEN_FILE", str(tmp_path / "none"))
    assert shown_token.headers() == {"Authorization": "Bearer of the environment"}
    path = tmp_path / "token"
    path.write_text("of-the-file\n")
    build_parser("topic").parse_args(["topic", "list", "--token-file", str(path)])
    assert shown_token.token() == "of-the-file"
    path.write_text("zwei\nZeilen")
    with pytest.raises(exits.Exit, match="one line of ASCII"):
        shown_token.token()
    path.unlink()
    with pytest.raises(exits.Exit, match="No such file"):
        shown_token.token()


def test_a_token_in_a_file_is_for_its_owner_and_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, access = tmp_path / "ops.token", tmp_path / "access.toml"
    path.write_text("an old one that everybody reads")
    path.chmod(0o644)
    assert run("token", "ops", "--role", "admin", "--file", str(access), "--output", str(path)) == exits.OK
    said = capsys.readouterr()
    token = path.read_text().removesuffix("\n")
    assert token.startswith(PREFIX) and token not in said.out + said.err and str(path) in said.err
    assert parse(access.read_bytes()).find(token.encode()) is not None
    assert os.stat(path).st_mode & 0o777 == 0o600 and sorted(os.listdir(tmp_path)) == ["access.toml", "ops.token"]


def test_a_command_that_fails_leaves_the_token_of_before(tmp_path: Path) -> None:
    path, access = tmp_path / "ops.token", tmp_path / "access.toml"
    path.write_text("in use")
    access.write_text("anonymous = [")
    for file, why in ((access, "not a TOML"), (tmp_path / "none" / "access.toml", "No such file")):
        with pytest.raises(exits.Exit, match=why):
            run("token", "ops", "--role", "admin", "--file", str(file), "--output", str(path))
    with pytest.raises(SystemExit):
        run("token", "ops", "--role", "amdin", "--output", str(path))
    assert path.read_text() == "in use"
    access.write_text("")
    with pytest.raises(exits.Exit, match=r"--output=.*No such file"):
        run("token", "ops", "--role", "admin", "--file", str(access), "--output", str(tmp_path / "none" / "ops.token"))
    assert access.read_text() == "" and sorted(os.listdir(tmp_path)) == ["access.toml", "ops.token"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--role", "publisher"), True),
        (("--role", "consumer", "--role", "viewer"), True),
        (("--role", "publisher", "--topics", "a"), False),
        (("--role", "viewer"), False),
    ],
)
def test_a_token_for_all_topics_says_so(words: tuple[str, ...], said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run("token", "x", *words)
    assert ("of all topics" in capsys.readouterr().err) is said
