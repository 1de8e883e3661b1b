"""Generated files: pages that groff takes, scripts that shells take, and nothing of anybody is written over."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nsqha.cli import build_parser
from nsqha.cli.generate.command import GENERATORS, daemons, run
from nsqha.cli.generate.writing import differences, write
from nsqha.cli.terminal import exits
from nsqha.cli.verbs import VERBS

WHOLE = build_parser()
MAN = GENERATORS["man"].files(WHOLE)
COMPLETION = GENERATORS["completion"].files(WHOLE)


def generate(*words: str) -> int:
    args = build_parser("generate").parse_args(["generate", *words])
    args.build_parser = build_parser
    return run(args)


# ---- man pages


def test_there_is_a_page_for_every_command_and_daemon() -> None:
    programs = {"nsqha", "nsqd", "nsqlookupd", *(f"nsqha-{verb}" for verb in VERBS)}
    assert set(MAN) == {f"share/man/man1/{program}.1" for program in programs}


def test_groff_has_nothing_to_say_about_them(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    write(tmp_path, MAN)
    pages = sorted(map(str, tmp_path.rglob("*.1")))
    done = subprocess.run(["groff", "-man", "-ww", "-z", "-Kutf8", "-Tutf8", *pages], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_says_what_help_says() -> None:
    plain = "\n".join(MAN.values()).replace("\\-", "-").replace("\\(aq", "'")
    for flag in ("--retention-bytes", "--cluster-secret-file", "--oldest-warning", "--insecure-cluster"):
        assert flag in plain
    seek = MAN["share/man/man1/nsqha-seek.1"].replace("\\-", "-")
    assert ".SH EXAMPLES" in seek and "nsqha seek" in seek and '.SH "EXIT STATUS"' in seek


def test_no_line_of_text_is_a_command_of_roff() -> None:
    known = {".TH", ".SH", ".SS", ".PP", ".TP", ".nh", ".ad", ".hy", ".nf", ".fi", ".BR"}
    for page in MAN.values():
        assert {line.split()[0] for line in page.splitlines() if line[:1] in (".", "'")} <= known


# ---- completion


def test_bash_completes_flags_of_the_daemons(tmp_path: Path) -> None:
    write(tmp_path, COMPLETION)
    for path in (tmp_path / "share/bash-completion/completions").iterdir():
        subprocess.run(["bash", "-n", str(path)], check=True)
    ask = (
        f"source {tmp_path}/share/bash-completion/completions/nsqd; compopt() {{ :; }}; "
        "COMP_WORDS=(nsqd --data-p); COMP_CWORD=1; _nsqd; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True).stdout == "--data-path=\n"


def test_every_flag_that_has_an_effect_is_in_every_script() -> None:
    for daemon in daemons():
        scripts = [text for path, text in COMPLETION.items() if Path(path).stem.removeprefix("_") == daemon.prog]
        assert len(scripts) == 3
        assert all("data-path" in text for text in scripts) or daemon.prog == "nsqlookupd"
        assert all("etcd-endpoint" in text and "verbose" not in text for text in scripts)


# ---- what is there already


def test_what_says_something_else_is_shown_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("completion", "--to", str(tmp_path)) == exits.OK
    changed = tmp_path / "share/bash-completion/completions/nsqha"
    removed = tmp_path / "share/bash-completion/completions/nsqd"
    changed.write_text("by hand\n")
    removed.unlink()
    capsys.readouterr()
    with pytest.raises(exits.Exit) as raised:
        generate("completion", "--to", str(tmp_path))
    assert raised.value.status == exits.CONFLICT
    assert "1 of 9 files" in str(raised.value) and "--force" in str(raised.value)
    assert "-by hand" in capsys.readouterr().out
    assert changed.read_text() == "by hand\n" and not removed.exists()
    assert generate("completion", "--to", str(tmp_path), "--force") == exits.OK
    assert not differences(tmp_path, COMPLETION) and removed.exists()
    assert sorted(capsys.readouterr().out.split()) == sorted(map(str, (changed, removed)))


def test_a_second_run_writes_nothing(tmp_path: Path) -> None:
    assert write(tmp_path, {"a/b": "text\n", "c": "more\n"}) == ["a/b", "c"]
    assert write(tmp_path, {"a/b": "text\n", "c": "more\n"}) == []


@pytest.mark.parametrize("there", ["folder", "file in the way", "huge"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, there: str) -> None:
    if there == "folder":
        (tmp_path / "a").mkdir()
    elif there == "huge":
        with (tmp_path / "a").open("wb") as file:
            file.truncate(1 << 30)
    else:
        (tmp_path / "x").write_text("")
    name = "x/a" if there == "file in the way" else "a"
    with pytest.raises(exits.Exit) as raised:
        write(tmp_path, {name: "text"})
    assert str(tmp_path) in str(raised.value)
