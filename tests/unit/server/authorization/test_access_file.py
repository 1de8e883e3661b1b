"""The access file on disk: what is not taken, and when a change counts."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest

from nsqha.access.roles import Role
from nsqha.access.tokens import AccessTable, entry
from nsqha.clock import ManualClock
from nsqha.errors import ConfigError
from nsqha.server.authorization import access_file as module
from nsqha.server.authorization.access_file import AccessFile


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    """The file, replaced as editors do, so that it always is another one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)
    return path


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def taken(file: AccessFile) -> bool:
    """Whether a look finds a version that counts; the one before may be the first that sees it."""
    assert file.look() is None
    found = file.look()
    if found is not None:
        file.take(found)
    return found is not None


def test_a_file_that_can_not_be_used_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    for make, why in (
        (lambda: None, "No such file or directory"),
        (lambda: written(path, "", 0o604), f"every user of this host may use it; do `chmod o= {path}`"),
        (lambda: written(path, 'anonymous = ["viwer"]'), r"did you mean viewer\?"),
    ):
        make()
        with pytest.raises(ConfigError, match=f"--access-file={path}: .*{why}"):
            AccessFile(str(path), ManualClock())
    with pytest.raises(ConfigError, match=r"this is no file|Is a directory"):
        AccessFile(str(tmp_path), ManualClock())


def test_a_change_counts_and_a_broken_file_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, heard = tmp_path / "access.toml", []
    file = AccessFile(str(written(path, 'anonymous = ["viewer"]')), ManualClock())
    file.on_change.append(lambda: heard.append(file.table.anonymous.roles))
    assert not taken(file)
    written(path, 'anonymous = ["viewer"')
    assert file.look() is None and "access_unusable" not in events(caplog), "somebody may be writing it"
    assert not taken(file) and not taken(file)
    assert events(caplog).count("access_unusable") == 1
    assert Role.VIEWER in file.table.anonymous.roles, "the last good one stays"
    written(path, 'anonymous = ["consumer"]')
    assert taken(file) and heard == [{Role.CONSUMER}] and file.generation == 2
    path.unlink()
    assert not taken(file) and not taken(file)
    assert file.table.anonymous.roles == {Role.CONSUMER} and events(caplog).count("access_unusable") == 2


def test_half_a_file_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who writes it may be half way through, and a beginning of it is a valid file with fewer tokens."""
    first, second = entry("a", "1", [Role.VIEWER]), entry("b", "2", [Role.VIEWER])
    path = written(tmp_path / "access.toml", first + second)
    file = AccessFile(str(path), ManualClock())
    for half in ("", first):
        written(path, half)
        assert file.look() is None
        written(path, first + second + "# whole\n" * (1 + len(half)))
        assert taken(file) and len(file.table.tokens) == 2
    written(path, "")
    assert not taken(file) and "nobody could do anything" in caplog.text


def test_a_pipe_does_not_hold_up_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "access.toml", 0o600)
    with pytest.raises(ConfigError, match="this is no file"):
        AccessFile(str(tmp_path / "access.toml"), ManualClock())


def test_permissions_that_become_too_wide_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "access.toml", 'anonymous = ["viewer"]')
    file = AccessFile(str(path), ManualClock())
    path.chmod(stat.S_IMODE(os.stat(path).st_mode) | stat.S_IROTH)
    assert not taken(file) and not taken(file)
    assert events(caplog).count("access_unusable") == 1 and Role.VIEWER in file.table.anonymous.roles


def test_a_token_that_expires_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(wall_ns=1_700_000_000 * 10**9)
    text = entry("ci", "a", [Role.VIEWER], expires="2023-11-15") + entry("cd", "b", [Role.VIEWER], expires="2023-11-14")
    file = AccessFile(str(written(tmp_path / "access.toml", text)), clock)
    assert [record.getMessage().split(": ")[1][:19] for record in caplog.records] == ["the token cd has ex"]
    assert not file._say_expired()
    clock.advance(86_400)
    assert file._say_expired() and not file._say_expired()
    assert events(caplog) == ["access_token_expired"] * 2


def test_the_watch_looks_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqha.server.authorization.access_file.LOOK_SECONDS", 0.01)
    path = written(tmp_path / "access.toml", 'anonymous = ["consumer"]')
    file = AccessFile(str(path), ManualClock())

    async def main() -> None:
        changed = asyncio.Event()
        file.on_change.append(changed.set)
        task = asyncio.get_running_loop().create_task(file.watch())
        written(path, 'anonymous = ["viewer"]')
        await asyncio.wait_for(changed.wait(), 20)
        task.cancel()

    asyncio.run(main())
    assert Role.VIEWER in file.table.anonymous.roles


def test_a_key_of_many_parts_does_not_hide_later_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "access.toml"
    file = AccessFile(str(written(path, entry("a", "1", [Role.VIEWER]))), ManualClock())
    written(path, ".".join(["a"] * 500_000) + " = 1\n")
    assert not taken(file) and events(caplog).count("access_unusable") == 1
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    written(path, entry("b", "2", [Role.VIEWER]))
    assert taken(file) and [token.name for token in file.table.tokens] == ["b"]


@pytest.mark.parametrize(
    "text",
    [
        "anonymous = " + "9" * 5000,
        f"{'x' * 100_000} = 1",
    ],
)
def test_no_text_ends_the_watch_or_fills_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = tmp_path / "access.toml"
    file = AccessFile(str(written(path, entry("a", "1", [Role.VIEWER]))), ManualClock())
    written(path, text)
    assert not taken(file) and events(caplog).count("access_unusable") == 1
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


def test_a_bug_in_the_parser_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.toml"
    file = AccessFile(str(written(path, entry("a", "1", [Role.VIEWER]))), ManualClock())
    with monkeypatch.context() as broken:
        broken.setattr(module, "parse", lambda _: 1 / 0)
        written(path, entry("b", "2", [Role.VIEWER]))
        assert not taken(file) and not taken(file) and events(caplog).count("access_unusable") == 1
    written(path, entry("c", "3", [Role.VIEWER]))
    assert taken(file)


def test_a_version_that_is_never_read_to_its_end_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, release = tmp_path / "access.toml", threading.Event()
    file = AccessFile(str(written(path, entry("a", "1", [Role.VIEWER]))), ManualClock())
    parse = module.parse

    def slow(text: bytes) -> AccessTable:
        if b"endless" in text:
            release.wait()
        return parse(text)

    monkeypatch.setattr(module, "parse", slow)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", 0.1)

    async def main() -> None:
        changed = asyncio.Event()
        file.on_change.append(changed.set)
        watching = asyncio.create_task(file.watch())
        written(path, entry("endless", "2", [Role.VIEWER]))
        async with asyncio.timeout(20):
            while "access_unusable" not in events(caplog):
                await asyncio.sleep(0)
            written(path, entry("b", "3", [Role.VIEWER]))
            await changed.wait()
        assert [token.name for token in file.table.tokens] == ["b"]
        watching.cancel()

    asyncio.run(main())  # it does not wait for the thread
    release.set()
    assert events(caplog).count("access_unusable") == 1 and file.look() is None
