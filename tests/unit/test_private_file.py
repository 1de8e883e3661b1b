"""The one reader of files with secrets: what it refuses, in one line that names the flag and shows no byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nsqha.errors import ConfigError
from nsqha.private_file import read_private
from tests.open_files import open_below

SECRET = "s3cret"


def written(path: Path, mode: int, text: str = SECRET) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_of_its_owner_and_its_group_is_read_whole(tmp_path: Path, mode: int) -> None:
    assert read_private("--flag", str(written(tmp_path / "file", mode)), len(SECRET)) == SECRET.encode()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda path: written(path, 0o604), "every user of this host may use it; do `chmod o= "),
        (lambda path: written(path, 0o602), "every user of this host may use it"),
        (lambda path: written(path, 0o600, SECRET * 2), "it has more than 6 bytes"),
        (lambda path: path.mkdir(), "this is no file"),
        (lambda path: os.mkfifo(path, 0o600), "this is no file"),
        (lambda path: path.symlink_to("nowhere"), "No such file or directory; name a file that this user can read"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_private_file_is_refused(tmp_path: Path, made: Callable[[Path], object], why: str) -> None:
    path = tmp_path / "file"
    made(path)
    with pytest.raises(ConfigError) as refused:
        read_private("--flag", str(path), len(SECRET))
    text = str(refused.value)
    assert text.startswith(f"--flag={path}: {why}") and SECRET not in text and "\n" not in text
    assert not open_below(tmp_path), "no descriptor stays open"


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="this is no name of a file"):
        read_private("--flag", "a\0b", 10)
