"""How etcd is reached, from flags: what is refused before anything is sent, and that the password stays in its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqha.clock import SystemClock
from nsqha.election.etcd.access import etcd_options, look_at
from nsqha.errors import ConfigError, Unavailable
from nsqha.options import Options


def options(**given: object) -> Options:
    return Options(etcd_endpoints=("127.0.0.1:2379",), **given)  # type: ignore[arg-type]


def test_the_password_is_the_one_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret word\n")
    file.chmod(0o600)
    found = etcd_options(options(etcd_user="nsqha", etcd_password_file=str(file)))
    assert (found.user, found.password) == ("nsqha", "s3cret word")
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"\xff\xfe"])
def test_a_password_file_with_anything_else_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="in one line") as refused:
        etcd_options(options(etcd_user="nsqha", etcd_password_file=str(file)))
    assert "two" not in str(refused.value).replace(str(file), "")


@pytest.mark.parametrize(("size", "mode", "why"), [(5000, 0o600, "more than 4,096 bytes"), (10, 0o644, "every user")])
def test_a_password_file_is_a_private_file(tmp_path: Path, size: int, mode: int, why: str) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"x" * size)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        etcd_options(options(etcd_user="nsqha", etcd_password_file=str(file)))


def test_what_does_not_go_together_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--etcd-user and --etcd-password-file"):
        etcd_options(options(etcd_user="nsqha"))
    with pytest.raises(ConfigError, match=r"--etcd-password-file=.*nowhere: No such file"):
        etcd_options(options(etcd_user="nsqha", etcd_password_file=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"--etcd-ca=.*there is no such file"):
        etcd_options(options(etcd_ca=str(tmp_path / "nowhere")))


def test_an_etcd_that_is_not_there_is_named_once_with_what_to_do() -> None:
    flags = Options(etcd_endpoints=("127.0.0.1:1",))
    with pytest.raises(Unavailable) as unusable:
        look_at(flags, SystemClock())
    wanted = "etcd at 127.0.0.1:1 cannot be reached: Connection refused; start it, or correct --etcd-endpoint"
    assert str(unusable.value) == wanted


def test_endpoints_may_end_in_a_slash() -> None:
    assert etcd_options(Options(etcd_endpoints=("http://a:1/", "b:2"))).endpoints == ("http://a:1", "b:2")
